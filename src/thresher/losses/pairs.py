"""The inputs of an objective: per-token log-probabilities of the scored response tokens, nothing else.

Flat values with lengths instead of padded rectangles, so the numbers are the same for every layout, engine and
micro-batch size. Tokens outside the loss mask are not included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

T = TypeVar("T", "ResponseLogps", "ExampleLogps", "ObjectiveInputs")


class TokenStatistics(NamedTuple):
    """Statistics of the policy's distribution at each scored token, computed only on request."""

    squared_probs: bool = False  # log(sum_v p(v)^2), for WPO
    entropy: bool = False  # -sum_v p(v) log p(v), for the metric


NO_STATISTICS = TokenStatistics()


@dataclass(frozen=True)
class ResponseLogps:
    """Logps of one response of each of `num_pairs` examples, and the requested statistics."""

    values: Tensor  # [num_tokens], example after example, fp32 or fp64
    lengths: Tensor  # [num_pairs] int64, scored tokens; 0 if the example has no such response; sums to num_tokens
    log_sum_squared_probs: Tensor | None = None  # [num_tokens] log(sum_v p(v)^2)
    entropy: Tensor | None = None  # [num_tokens] in nats, without gradient
    token_weights: Tensor | None = None  # [num_tokens] of the data, on the policy's logps only; None weighs all equally

    @property
    def num_pairs(self) -> int:
        return self.lengths.numel()

    @property
    def weights(self) -> Tensor | None:
        """The token weights in fp64."""
        return None if self.token_weights is None else to_fp64(self.token_weights)

    def sums(self, token_weights: Tensor | None = None) -> Tensor:
        """Sum each pair's logps: [num_pairs] fp64. Each sum is bitwise independent of the other pairs."""
        values = self.values if token_weights is None else self.values * token_weights
        return segment_sums(values, self.lengths)

    def positions(self) -> Tensor:
        """Number each token within its response, from 0: [num_tokens] int64."""
        ends = self.lengths.cumsum(0)
        # Without output_size, repeat_interleave would synchronize with the GPU to find it.
        starts = torch.repeat_interleave(ends - self.lengths, self.lengths, output_size=self.values.numel())
        return torch.arange(self.values.numel(), device=self.values.device) - starts


@dataclass(frozen=True)
class ExampleLogps:
    """The responses of the same examples, scored by one model: the first of each, the second of each, and so on."""

    sides: tuple[ResponseLogps, ...]

    @classmethod
    def of(cls, *sides: ResponseLogps) -> ExampleLogps:
        return cls(sides)

    @property
    def chosen(self) -> ResponseLogps:
        return self.sides[0]

    @property
    def rejected(self) -> ResponseLogps:
        return self.sides[1]

    def side(self, number: int) -> ResponseLogps:
        """Return a side; empty responses if no example has so many."""
        if number < len(self.sides):
            return self.sides[number]
        first = self.chosen
        return replace(map_tensors(first, lambda tensor: tensor[:0]), lengths=torch.zeros_like(first.lengths))

    @property
    def num_pairs(self) -> int:
        return self.chosen.num_pairs

    def detach(self) -> ExampleLogps:
        return map_tensors(self, Tensor.detach)


def empty_logps(
    device: torch.device | None = None, *, statistics: TokenStatistics = NO_STATISTICS, num_sides: int = 2
) -> ExampleLogps:
    """Return the logps of zero examples."""
    empty = torch.zeros(0, device=device)
    squared_probs, entropy = (empty if each else None for each in statistics)
    side = ResponseLogps(empty, empty.long(), squared_probs, entropy)
    return ExampleLogps((side,) * num_sides)


@dataclass(frozen=True)
class ObjectiveInputs:
    """All inputs of an objective for `num_pairs` pairs."""

    policy: ExampleLogps
    reference: ExampleLogps | None = None  #: None for losses without a reference
    weight: Tensor | None = None  #: [num_pairs], columns of the dataset
    margin: Tensor | None = None
    values: Tensor | None = None  #: [num_pairs, num_sides] labels or scores of the responses; None in pairs
    group: Tensor | None = None  #: [num_pairs] int64, of those that the objective measures separately; -1 for none

    @property
    def num_pairs(self) -> int:
        return self.policy.num_pairs


def map_tensors(pairs: T, change: Callable[[Tensor], Tensor]) -> T:
    """Apply a function to every tensor of inputs or logps."""

    def changed(value: Any) -> Any:
        if isinstance(value, Tensor):
            return change(value)
        if isinstance(value, tuple):
            return tuple(map(changed, value))
        return None if value is None else map_tensors(value, change)

    return replace(pairs, **{name: changed(value) for name, value in vars(pairs).items()})


def to_fp64(values: Tensor) -> Tensor:
    """Convert to fp64, or to fp32 on MPS, which has no fp64."""
    return values.to(torch.float32 if values.device.type == "mps" else torch.float64)


def segment_sums(values: Tensor, lengths: Tensor) -> Tensor:
    """Sum consecutive runs of `lengths` values: [num_tokens] -> [num_segments] fp64; an empty run sums to 0.

    fp64 because a log ratio is a small difference of two sums: at -1e5 nats, a response of 64k tokens, adjacent fp32
    numbers are 0.008 apart. The gradient of `values` has their dtype.
    """
    values = to_fp64(values)
    if lengths.numel() == 0:
        return values[:0]  # segment_reduce fails without segments: it takes the minimum of lengths
    # segment_reduce adds up each segment separately and in order: deterministic on every device, unlike index_add.
    # unsafe: it does not read the lengths from the device to compare their sum with the number of values
    return torch.segment_reduce(values, "sum", lengths=lengths, initial=0.0, unsafe=True)


def concat_logps(parts: Sequence[ResponseLogps]) -> ResponseLogps:
    """Concatenate one side of several micro-batches."""
    return ResponseLogps(
        torch.cat([part.values for part in parts]),
        torch.cat([part.lengths for part in parts]),
        _concat_statistic([part.log_sum_squared_probs for part in parts]),
        _concat_statistic([part.entropy for part in parts]),
        _concat_weights(parts),
    )


def _concat_weights(parts: Sequence[ResponseLogps]) -> Tensor | None:
    if all(part.token_weights is None for part in parts):
        return None
    weights = (torch.ones_like(part.values) if part.token_weights is None else part.token_weights for part in parts)
    return torch.cat(list(weights))


def _concat_statistic(parts: Sequence[Tensor | None]) -> Tensor | None:
    present = [part for part in parts if part is not None]
    return torch.cat(present) if len(present) == len(parts) else None


def concat_pairs(parts: Sequence[ObjectiveInputs]) -> ObjectiveInputs:
    """Concatenate micro-batches, for losses that couple the pairs of a step."""
    references = [part.reference for part in parts if part.reference is not None]
    if references and len(references) != len(parts):
        raise ValueError(
            f"{len(references)} of {len(parts)} micro-batches have reference logps; either all or none must have them"
        )
    return ObjectiveInputs(
        concat_sides([part.policy for part in parts]),
        concat_sides(references) if references else None,
        _concat_columns([part.weight for part in parts], parts, neutral=1.0),
        _concat_columns([part.margin for part in parts], parts, neutral=0.0),
        _concat_values([part.values for part in parts]),
        _concat_groups(parts),
    )


def _concat_groups(parts: Sequence[ObjectiveInputs]) -> Tensor | None:
    if all(part.group is None for part in parts):
        return None
    # a rank without examples has none
    return torch.cat([part.policy.chosen.lengths[:0] if part.group is None else part.group for part in parts])


def _concat_values(parts: Sequence[Tensor | None]) -> Tensor | None:
    present = [part for part in parts if part is not None]
    num_sides = max((part.shape[1] for part in present), default=0)
    # absent responses have no tokens, which is what marks them
    return torch.cat([F.pad(part, (0, num_sides - part.shape[1])) for part in present]) if present else None


def concat_sides(parts: Sequence[ExampleLogps]) -> ExampleLogps:
    """Concatenate the logps of several micro-batches by one model."""
    num_sides = max(len(part.sides) for part in parts)
    return ExampleLogps(tuple(concat_logps([part.side(number) for part in parts]) for number in range(num_sides)))


def _concat_columns(
    columns: Sequence[Tensor | None], parts: Sequence[ObjectiveInputs], neutral: float
) -> Tensor | None:
    present = next((column for column in columns if column is not None), None)
    if present is None:
        return None
    # a micro-batch without any value in a column leaves the column out
    filled = [
        present.new_full((part.num_pairs,), neutral) if column is None else column
        for column, part in zip(columns, parts, strict=True)
    ]
    return torch.cat(filled)
