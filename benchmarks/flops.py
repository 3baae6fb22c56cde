"""FLOPs that a step needs, the peak rate of this machine, and the time of the step's matrix products alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from contestants import Column

from thresher.data.example import Example


def useful_flops(column: Column, pairs: Sequence[Example]) -> float:
    """Count the FLOPs of forward and backward with each prompt computed once and only scored tokens in the head.

    Two FLOPs per multiply-add, three products per weight (one forward, two backward). Everything beyond this (padding,
    repeated prompts, last layer and head at unscored positions, recomputation) is not useful.
    """
    prompt, chosen, rejected = _lengths(pairs)
    scored = (chosen + rejected).sum()
    head = column.hidden * column.vocab * scored
    # each row attends to half of its segment and to the whole prefix; scores and values are one product each
    seen = prompt**2 / 2 + sum(prompt * side + side**2 / 2 for side in (chosen, rejected))
    attention = (column.layers - 1) * 2 * column.hidden * seen.sum()
    return float(6 * (_shared_linear(column, pairs) + head + attention))


@dataclass(frozen=True)
class Rows:
    """Rows of a step, and the multiply-adds with weights of the padded layout relative to the shared one.

    padded: both sides of every pair, as wide as the widest, as TRL computes them. shared: each prompt once, no padding.
    The head of both sees only scored rows, and computes their logits twice (four products per weight).
    """

    padded: int
    shared: int
    scored: int
    ratio: float

    @classmethod
    def of(cls, column: Column, pairs: Sequence[Example]) -> Rows:
        prompt, chosen, rejected = _lengths(pairs)
        padded = 2 * len(pairs) * (prompt + np.maximum(chosen, rejected)).max()
        scored = (chosen + rejected).sum()
        head = 4 * column.hidden * column.vocab * scored
        padded_linear = column.layers * column.weights_per_layer * padded
        ratio = (3 * padded_linear + head) / (3 * _shared_linear(column, pairs) + head)
        return cls(int(padded), int((prompt + chosen + rejected - 2).sum()), int(scored), float(ratio))


def _lengths(pairs: Sequence[Example]) -> list[np.ndarray]:
    sequences = [(pair.prompt_ids, pair.chosen.ids, pair.rejected.ids) for pair in pairs]
    return [np.array([len(ids) for ids in each], dtype=np.float64) for each in zip(*sequences, strict=True)]


def _shared_linear(column: Column, pairs: Sequence[Example]) -> float:
    """Count the multiply-adds with layer weights in one forward: each prompt once, last layer on scored rows only."""
    prompt, chosen, rejected = _lengths(pairs)
    layer, only_keys = column.weights_per_layer, 2 * column.hidden**2
    rows = (prompt + chosen - 1 + rejected - 1).sum()
    kept = (chosen + rejected).sum() - len(pairs)  # the last prompt token predicts both first tokens
    return float((column.layers - 1) * layer * rows + only_keys * rows + (layer - only_keys) * kept)


def matmul_peak(dtype: torch.dtype, size: int = 2048) -> float:
    """Measure the FLOP/s of one large square product: best of seven."""
    left, right = (torch.randn(size, size).to(dtype) for _ in range(2))
    return 2.0 * size**3 / min(_seconds(lambda: left @ right) for _ in range(7))


def products_only_seconds(column: Column, num_rows: int, num_scored: int) -> float:
    """Time the step's products with weights, in their shapes and precision, one after another: median of three."""
    hidden, inner = column.hidden, column.intermediate
    shapes = [(hidden, hidden)] * 4 + [(hidden, inner)] * 2 + [(inner, hidden)]
    cases = [(num_rows, *shape, column.layers) for shape in shapes] + [(num_scored, hidden, column.vocab, 1)]
    total = 0.0
    for rows, inputs, outputs, times in cases:
        states, weight = (torch.randn(*size).to(column.dtype) for size in ((rows, inputs), (outputs, inputs)))
        grads = torch.randn(rows, outputs).to(column.dtype)

        def products(states=states, weight=weight, grads=grads) -> None:
            _ = states @ weight.T, grads @ weight, grads.T @ states

        products()
        total += times * float(np.median([_seconds(products) for _ in range(3)]))
    return total


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
