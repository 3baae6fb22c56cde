"""Log-probabilities under the LM head, a slice of the vocabulary at a time: the logits are never whole in memory.

One autograd function for plain, scaled and soft-capped logits. Each slice's logits are made, folded into a running
log-sum-exp and dropped; the backward makes them again. Slicing the vocabulary instead of the rows writes each slice of
the weight's gradient once, and is how a head that is split over processes is scored: each folds its own slices, and
two numbers a row are exchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# on a CPU a slice should fit into the cache; a GPU wants large products
LOGITS_AT_ONCE = 1 << 20
LOGITS_AT_ONCE_ON_GPU = 1 << 26


@dataclass(frozen=True)
class LogitTransform:
    """What a model family does between its head and the softmax."""

    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        """Work in place where it can: logits are large."""
        if self.scale != 1.0:
            logits = logits.mul_(self.scale)
        return logits if self.softcap is None else logits.div_(self.softcap).tanh_().mul_(self.softcap)

    def chain(self, grad: Tensor, transformed: Tensor) -> Tensor:
        """The gradient before the transform, in place; `transformed` is what the transform gave."""
        if self.softcap is not None:
            grad = grad.mul_((transformed / self.softcap).square_().neg_().add_(1.0))
        return grad if self.scale == 1.0 else grad.mul_(self.scale)


@dataclass(frozen=True)
class VocabParallel:
    """Where a process's rows of a split head begin in the vocabulary, and who holds the others."""

    first: int
    group: dist.ProcessGroup

    def log_sum(self, own: Tensor) -> Tensor:
        """The log-sum-exp over all shares from that of each: [num_rows] -> [num_rows]."""
        largest = own.clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        return self.sum((own - largest).exp_()).log_().add_(largest)

    def sum(self, own: Tensor) -> Tensor:
        dist.all_reduce(own, group=self.group)
        return own


@dataclass(frozen=True)
class LMHead:
    """The last linear map of a model, the precision of its products, and what follows it.

    weight: [vocab, hidden]; bias: [vocab] or None; of a split head, the rows that are ours. Factors are rounded to
    compute_dtype; sums are fp32 or wider.
    """

    weight: Tensor
    bias: Tensor | None
    compute_dtype: torch.dtype
    transform: LogitTransform
    share: VocabParallel | None = None

    @property
    def sum_dtype(self) -> torch.dtype:
        return torch.promote_types(self.compute_dtype, torch.float32)

    def logits(self, rows: Tensor, part: slice) -> Tensor:
        """Transformed logits of a slice of the vocabulary: [num_rows, slice]."""
        logits = self.product(rows, self.weight[part].T)
        if self.bias is not None:
            logits += self.bias[part].to(logits.dtype)
        return self.transform(logits)

    def product(self, left: Tensor, right: Tensor) -> Tensor:
        """left @ right in compute_dtype, its sums unrounded.

        bf16 logits would be off by up to 0.06 nats at 16, per token.
        """
        if self.compute_dtype == self.sum_dtype:
            return left.to(self.sum_dtype) @ right.to(self.sum_dtype)
        if left.device.type == "cpu":
            with _bf16_inside():
                return left.float() @ right.float()
        return torch.mm(left.to(self.compute_dtype), right.to(self.compute_dtype), out_dtype=torch.float32)

    def vocab_slices(self, num_rows: int) -> Iterator[slice]:
        """Slices of the vocabulary, of nearly the same size, whose logits are at most so many numbers."""
        vocab = self.weight.shape[0]
        at_once = LOGITS_AT_ONCE if self.weight.device.type == "cpu" else LOGITS_AT_ONCE_ON_GPU
        count = min(vocab, max(1, -(-num_rows * vocab // at_once)))
        edges = [vocab * number // count for number in range(count + 1)]
        return (slice(start, stop) for start, stop in pairwise(edges))


def target_logps(head: LMHead, rows: Tensor, targets: Tensor) -> Tensor:
    """Log-probability of each target: rows [num_rows, hidden], targets [num_rows] -> [num_rows], fp32 or wider."""
    logps: Tensor = _TargetLogps.apply(rows, head.weight, head.bias, targets, head)  # type: ignore[no-untyped-call]
    return logps


@torch.no_grad()
def log_sum_squared_probs(head: LMHead, rows: Tensor) -> Tensor:
    """log(sum_v p(v)^2) at each row, without gradient."""
    log_sum, log_square_sum = (rows.new_full((len(rows),), -torch.inf, dtype=head.sum_dtype) for _ in range(2))
    for part in head.vocab_slices(len(rows)):
        logits = head.logits(rows, part)
        log_sum = torch.logaddexp(log_sum, logits.logsumexp(1))
        log_square_sum = torch.logaddexp(log_square_sum, logits.mul_(2.0).logsumexp(1))
    if head.share is not None:
        log_sum, log_square_sum = head.share.log_sum(log_sum), head.share.log_sum(log_square_sum)
    return log_square_sum - 2.0 * log_sum


class _TargetLogps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, head: LMHead) -> Tensor:
        share = head.share
        targets = targets if share is None else targets - share.first
        log_sum = rows.new_full((len(rows),), -torch.inf, dtype=head.sum_dtype)
        found = torch.zeros_like(log_sum)
        for part in head.vocab_slices(len(rows)):
            logits = head.logits(rows, part)
            is_here, columns = _targets_in(part, targets)
            found = torch.where(is_here, logits.gather(1, columns).squeeze(1), found)
            log_sum = torch.logaddexp(log_sum, _log_sum(logits))
        if share is not None:
            log_sum, found = share.log_sum(log_sum), share.sum(found)
        ctx.save_for_backward(rows, weight, bias, targets, log_sum)
        ctx.compute_dtype, ctx.transform, ctx.share = head.compute_dtype, head.transform, share
        return found - log_sum

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        rows, weight, bias, targets, log_sum = ctx.saved_tensors
        head = LMHead(weight, bias, ctx.compute_dtype, ctx.transform)
        needs_rows, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        grad_rows = rows.new_zeros(rows.shape, dtype=head.sum_dtype) if needs_rows else None
        grad_weight = torch.empty_like(weight) if needs_weight else None
        grad_bias = torch.empty_like(bias) if needs_bias else None
        # each row's factor goes to the narrow side of both products, never over the logits
        weighted_rows = rows.to(head.sum_dtype) * grad[:, None]
        for part in head.vocab_slices(len(rows)):
            logits = head.logits(rows, part)
            errors = (logits.clone() if head.transform.softcap is not None else logits).sub_(log_sum[:, None])
            errors = errors.exp_().neg_()
            is_here, columns = _targets_in(part, targets)
            errors.scatter_add_(1, columns, is_here[:, None].to(errors.dtype))
            errors = head.transform.chain(errors, logits)
            if grad_rows is not None:
                grad_rows += head.product(errors, weight[part])
            if grad_weight is not None:
                grad_weight[part] = head.product(errors.T, weighted_rows)
            if grad_bias is not None:
                grad_bias[part] = errors.T @ grad
        if grad_rows is not None:
            grad_rows = grad_rows if ctx.share is None else ctx.share.sum(grad_rows)
            grad_rows = grad_rows.mul_(grad[:, None]).to(rows.dtype)
        return grad_rows, grad_weight, grad_bias, None, None


def _targets_in(part: slice, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Which targets lie in a slice, and their columns there: [num_rows] bool, [num_rows, 1]."""
    columns = targets - part.start
    is_here = (columns >= 0) & (columns < part.stop - part.start)
    return is_here, columns.clamp(0, part.stop - part.start - 1)[:, None]


def _log_sum(logits: Tensor) -> Tensor:
    """logsumexp over the last dimension that overwrites its input."""
    largest = logits.amax(1)
    return logits.sub_(largest[:, None]).exp_().sum(1).log_().add_(largest)


@contextmanager
def _bf16_inside() -> Iterator[None]:
    """fp32 products on the CPU with factors rounded to bf16 and unrounded sums, where the processor can; else in fp32.

    On a processor with AMX they take a quarter to a half of the time.
    """
    setting: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # made at run time
    before = setting.fp32_precision
    setting.fp32_precision = "bf16"
    try:
        yield
    finally:
        setting.fp32_precision = before
