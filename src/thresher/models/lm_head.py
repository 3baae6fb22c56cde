"""From hidden states to logps under the LM head, one vocabulary slice at a time: the full logits are never in memory.

One autograd function for plain, scaled and soft-capped logits. The logits of each slice are computed, folded into a
running log-sum-exp and freed; the backward recomputes them. Slicing the vocabulary, not the rows, writes each slice of
the weight's gradient once, and extends to a vocab-parallel head: each rank folds its slices, and two numbers per row
are all-reduced.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedConfig

from thresher.distributed.context_parallel import ContextParallel
from thresher.distributed.tensors import copy_to_device
from thresher.losses.pairs import NO_STATISTICS, ExampleLogps, ResponseLogps, TokenStatistics
from thresher.models.layouts import ModelInputs

# logits per slice: on a CPU a slice should fit into the cache; a GPU needs large products
LOGITS_AT_ONCE = 1 << 20
LOGITS_AT_ONCE_ON_GPU = 1 << 26
_TILE = 128


@dataclass(frozen=True)
class LogitTransform:
    """Scale and soft cap that a model applies between its head and the softmax."""

    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        """Transform logits, in place if possible: they are large."""
        if self.scale != 1.0:
            logits = logits.mul_(self.scale)
        return logits if self.softcap is None else logits.div_(self.softcap).tanh_().mul_(self.softcap)

    def backward(self, grad: Tensor, transformed: Tensor) -> Tensor:
        """Return the gradient of the input, computed in place; `transformed` is the output."""
        if self.softcap is not None:
            grad = grad.mul_((transformed / self.softcap).square_().neg_().add_(1.0))
        return grad if self.scale == 1.0 else grad.mul_(self.scale)


@dataclass(frozen=True)
class VocabParallel:
    """Vocabulary shards of a head: the offset of the local shard, and the group that holds all shards."""

    offset: int
    group: dist.ProcessGroup

    def log_sum(self, local: Tensor) -> Tensor:
        """Combine the log-sum-exp of every shard: [num_rows] -> [num_rows]."""
        largest = local.clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        return self.sum((local - largest).exp_()).log_().add_(largest)

    def sum(self, local: Tensor) -> Tensor:
        dist.all_reduce(local, group=self.group)
        return local


@dataclass(frozen=True)
class LMHead:
    """A model's output projection, the precision of its products, and the transform of its logits."""

    weight: Tensor  # [vocab, hidden]; with vocab_parallel, the local shard
    bias: Tensor | None  # [vocab]
    compute_dtype: torch.dtype  # of factors; sums are fp32 or wider
    transform: LogitTransform
    vocab_parallel: VocabParallel | None = None

    @property
    def sum_dtype(self) -> torch.dtype:
        return torch.promote_types(self.compute_dtype, torch.float32)

    def logits(self, rows: Tensor, vocab: slice, weight: Tensor | None = None) -> Tensor:
        """Transformed logits of a vocabulary slice: [num_rows, slice]. `weight`: of the slice, if rounded."""
        logits = self.product(rows, (self.weight[vocab] if weight is None else weight).T)
        if self.bias is not None:
            logits += self.bias[vocab].to(logits.dtype)
        return self.transform(logits)

    def factor(self, tensor: Tensor) -> Tensor:
        """Round a tensor that is a factor of several products, where `product` does not need it in fp32."""
        return tensor if tensor.device.type == "cpu" else tensor.to(self.compute_dtype)

    def product(self, left: Tensor, right: Tensor) -> Tensor:
        """left @ right with factors in compute_dtype and fp32 sums: bf16 logits near 16 would be off by 0.06 nats."""
        if self.compute_dtype == self.sum_dtype:
            return left.to(self.sum_dtype) @ right.to(self.sum_dtype)
        if left.device.type == "cpu" and self.compute_dtype == torch.bfloat16:
            with _bf16_matmul():
                return left.float() @ right.float()
        if left.device.type == "cpu":  # which has no product of fp16 factors with an fp32 result
            return left.to(self.compute_dtype).float() @ right.to(self.compute_dtype).float()
        return torch.mm(left.to(self.compute_dtype), right.to(self.compute_dtype), out_dtype=torch.float32)

    def vocab_slices(self, num_rows: int) -> Iterator[slice]:
        """Split the vocabulary into slices of `slice_width`."""
        vocab = self.weight.shape[0]
        width = slice_width(vocab, num_rows, on_gpu=self.weight.device.type != "cpu")
        return (slice(start, min(start + width, vocab)) for start in range(0, vocab, width))


def slice_width(vocab: int, num_rows: int, *, on_gpu: bool) -> int:
    """Columns of logits at once: about LOGITS_AT_ONCE logits, in as few slices as that allows, of equal width."""
    at_once = LOGITS_AT_ONCE_ON_GPU if on_gpu else LOGITS_AT_ONCE
    count = min(vocab, max(1, -(-num_rows * vocab // at_once)))
    width = -(-vocab // count)
    # whole tiles of a matrix product: kernels for other widths are slower
    return width if width < _TILE else min(vocab, -(-width // _TILE) * _TILE)


@dataclass(frozen=True)
class RewardHead:
    """The projection of a reward model from a hidden state to one number."""

    weight: Tensor  # [1, hidden]

    def rewards(self, rows: Tensor) -> Tensor:
        """[num_rows, hidden] -> [num_rows], in fp32 or wider: differences of rewards are small."""
        dtype = torch.promote_types(rows.dtype, torch.float32)
        return F.linear(rows.to(dtype), self.weight.to(dtype)).squeeze(1)


def target_logps_and_entropy(
    head: LMHead, rows: Tensor, targets: Tensor, *, with_entropy: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Logp of each target, and the entropy at each row in nats, without gradient: [num_rows] each, fp32 or wider.

    rows [num_rows, hidden], targets [num_rows]. The entropy comes from the same slices, and does not change a logp.
    """
    inputs = (rows, head.weight, head.bias, targets)
    logps, entropy = _TargetLogps.apply(*inputs, head, with_entropy)  # type: ignore[no-untyped-call]
    return logps, entropy if with_entropy else None


@torch.no_grad()
def log_sum_squared_probs(head: LMHead, rows: Tensor) -> Tensor:
    """log(sum_v p(v)^2) at each row, without gradient."""
    log_sum, log_square_sum = (rows.new_full((len(rows),), -torch.inf, dtype=head.sum_dtype) for _ in range(2))
    for vocab in head.vocab_slices(len(rows)):
        logits = head.logits(rows, vocab)
        log_sum = torch.logaddexp(log_sum, logits.logsumexp(1))
        log_square_sum = torch.logaddexp(log_square_sum, logits.mul_(2.0).logsumexp(1))
    if (shards := head.vocab_parallel) is not None:
        log_sum, log_square_sum = shards.log_sum(log_sum), shards.log_sum(log_square_sum)
    return log_square_sum - 2.0 * log_sum


class _TargetLogps(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, head: LMHead, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        shards = head.vocab_parallel
        targets = targets if shards is None else targets - shards.offset
        log_sum = rows.new_full((len(rows),), -torch.inf, dtype=head.sum_dtype)
        found = torch.zeros_like(log_sum)
        mean_logit = torch.zeros_like(log_sum)
        factors = head.factor(rows)
        for vocab in head.vocab_slices(len(rows)):
            logits = head.logits(factors, vocab)
            is_target, columns = _targets_in(vocab, targets)
            found = torch.where(is_target, logits.gather(1, columns).squeeze(1), found)
            if with_entropy:
                log_sum, mean_logit = _fold_mean_logit(logits, log_sum, mean_logit)
            else:
                log_sum = torch.logaddexp(log_sum, _log_sum(logits))
        if shards is not None:
            local = log_sum
            log_sum, found = shards.log_sum(local), shards.sum(found)
            if with_entropy:
                mean_logit = shards.sum(mean_logit * (local - log_sum).exp_())
        ctx.save_for_backward(rows, weight, bias, targets, log_sum)
        ctx.compute_dtype, ctx.transform, ctx.shards = head.compute_dtype, head.transform, shards
        # entropy = -sum_v p(v) (logit(v) - log_sum)
        entropy = log_sum - mean_logit
        ctx.mark_non_differentiable(entropy)
        return found - log_sum, entropy

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor, _entropy_grad: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        rows, weight, bias, targets, log_sum = ctx.saved_tensors
        head = LMHead(weight, bias, ctx.compute_dtype, ctx.transform)
        needs_rows, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        grad_rows = rows.new_zeros(rows.shape, dtype=head.sum_dtype) if needs_rows else None
        grad_weight = torch.empty_like(weight) if needs_weight else None
        grad_bias = torch.empty_like(bias) if needs_bias else None
        # scale rows by their incoming gradient, not the logits: they are smaller
        weighted_rows = head.factor(rows.to(head.sum_dtype) * grad[:, None])
        factors = head.factor(rows)
        for vocab in head.vocab_slices(len(rows)):
            part = head.factor(weight[vocab])
            logits = head.logits(factors, vocab, part)
            errors = (logits.clone() if head.transform.softcap is not None else logits).sub_(log_sum[:, None])
            errors = errors.exp_().neg_()
            is_target, columns = _targets_in(vocab, targets)
            errors.scatter_add_(1, columns, is_target[:, None].to(errors.dtype))
            errors = head.transform.backward(errors, logits)
            if grad_bias is not None:
                grad_bias[vocab] = errors.T @ grad
            errors = head.factor(errors)
            if grad_rows is not None:
                grad_rows += head.product(errors, part)
            if grad_weight is not None:
                grad_weight[vocab] = head.product(errors.T, weighted_rows)
        if grad_rows is not None:
            grad_rows = grad_rows if ctx.shards is None else ctx.shards.sum(grad_rows)
            grad_rows = grad_rows.mul_(grad[:, None]).to(rows.dtype)
        return grad_rows, grad_weight, grad_bias, None, None, None


def _targets_in(vocab: slice, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return which targets are in a slice, and their columns there: [num_rows] bool, [num_rows, 1]."""
    columns = targets - vocab.start
    is_target = (columns >= 0) & (columns < vocab.stop - vocab.start)
    return is_target, columns.clamp(0, vocab.stop - vocab.start - 1)[:, None]


def _log_sum(logits: Tensor) -> Tensor:
    """logsumexp over the last dimension; overwrites its input."""
    largest = logits.amax(1)
    return logits.sub_(largest[:, None]).exp_().sum(1).log_().add_(largest)


def _fold_mean_logit(logits: Tensor, log_sum: Tensor, mean_logit: Tensor) -> tuple[Tensor, Tensor]:
    """Fold a slice into the running log-sum-exp and the running mean logit under the softmax; overwrites the logits."""
    largest = logits.amax(1)
    weights = logits.sub_(largest[:, None]).exp()
    total = weights.sum(1)
    # in place: a dot product per row takes five times as long on the CPU
    mean_of_slice = logits.mul_(weights).sum(1).div_(total).add_(largest)
    log_sum_of_slice = total.log_().add_(largest)
    # bitwise `torch.logaddexp(log_sum, _log_sum(logits))`
    folded = torch.logaddexp(log_sum, log_sum_of_slice)
    old, new = (log_sum - folded).exp_(), (log_sum_of_slice - folded).exp_()
    return folded, mean_logit.mul_(old).add_(mean_of_slice.mul_(new))


@contextmanager
def _bf16_matmul() -> Iterator[None]:
    """Let fp32 matmuls on the CPU round their factors to bf16, with fp32 sums, if the processor supports it."""
    # with AMX they take a quarter to a half of the time
    setting: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # created at run time
    before = setting.fp32_precision
    setting.fp32_precision = "bf16"
    try:
        yield
    finally:
        setting.fp32_precision = before


class ScoredTokens(NamedTuple):
    """Per-token values of a micro-batch, [num_tokens] each: logps with gradient, and the statistics on request."""

    logps: Tensor
    log_sum_squared_probs: Tensor | None = None
    entropy: Tensor | None = None

    def stack(self) -> Tensor:
        """Return the values that are present as one tensor: [num_values, num_tokens]."""
        return torch.stack([each for each in self if each is not None])

    @classmethod
    def unstack(cls, rows: Tensor, statistics: TokenStatistics) -> ScoredTokens:
        """Inverse of `stack`."""
        remaining = iter(rows)
        return cls(next(remaining), *(next(remaining) if each else None for each in statistics))


def score_rows(
    head: LMHead | RewardHead,
    states: Tensor,  # [rows, hidden], with context_parallel this process's sequence shard
    rows: Tensor,  # [num_scored] the row of the full sequence that predicts each target
    targets: Tensor,
    *,
    context_parallel: ContextParallel | None = None,
    statistics: TokenStatistics = NO_STATISTICS,
) -> ScoredTokens:
    """Return the logp of each target and the requested statistics at each row, or the reward."""
    count = len(targets)
    if context_parallel is not None:  # on the host, because the number of rows depends on their values
        index, rows = context_parallel.local_scored_rows(rows, len(states))
        targets, index = targets[index], copy_to_device(index, states.device)
    rows, targets = copy_to_device(rows, states.device), copy_to_device(targets, states.device)
    scored = states.index_select(0, rows)
    entropy, squared_probs = None, None
    if isinstance(head, RewardHead):
        logps = head.rewards(scored)
    else:
        logps, entropy = target_logps_and_entropy(head, scored, targets, with_entropy=statistics.entropy)
        squared_probs = log_sum_squared_probs(head, scored) if statistics.squared_probs else None
    if context_parallel is None:
        return ScoredTokens(logps, squared_probs, entropy)
    gather = partial(context_parallel.all_gather_logps, index=index, count=count)
    statistics_of_all = (None if each is None else gather(each) for each in (squared_probs, entropy))
    return ScoredTokens(gather(logps), *statistics_of_all)


def split_sides(batch: ModelInputs, tokens: ScoredTokens, device: torch.device) -> ExampleLogps:
    """Split per-token values by side; the first responses of all examples come first."""
    sizes = [int(lengths.sum()) for lengths in batch.side_lengths]
    values = zip(*((None,) * len(sizes) if each is None else each.split(sizes) for each in tokens), strict=True)
    return ExampleLogps(
        tuple(
            ResponseLogps(logps, copy_to_device(lengths, device), *statistics)
            for lengths, (logps, *statistics) in zip(batch.side_lengths, values, strict=True)
        )
    )


def logit_transform(config: PreTrainedConfig) -> LogitTransform:
    """Read the scale and soft cap of a model's logits from its config."""
    config = config.get_text_config()
    scale = 1.0
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):  # Cohere and others, Falcon-H1
        scale *= float(getattr(config, name, None) or 1.0)
    divisor = float(getattr(config, "logits_scaling", None) or 1.0)  # Granite; HyperCLOVA X multiplies by it
    scale = scale * divisor if config.model_type == "hyperclovax" else scale / divisor
    return LogitTransform(scale, getattr(config, "final_logit_softcapping", None))  # Gemma 2
