"""Layers with state on packed rows: a prompt is computed once, and every response continues from its final state.

The modeling files of transformers call a few functions to mix tokens with state: a short convolution, the gated delta
rule and Mamba-2's scan. Here they are replaced by functions that follow the segments of a packed row. The layers hand
the keyword `pair_visibility` down to them; without it, they are transformers' functions.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedConfig

from thresher.distributed.tensors import copy_arrays_to_device
from thresher.models.attention.segments import PackedAttention, Segment

Rows = npt.NDArray[np.int64]
_CHUNK = 64  # rows that a scan computes of the shortest sequence too
WITH_STATE = frozenset({"linear_attention", "hybrid", "conv"})  # transformers' names of layers with state
# of Mamba-2 in the configs of transformers
SCAN_HEADS = ("mamba_n_heads", "mamba_num_heads", "n_mamba_heads")
SCAN_HEAD_DIMS = ("mamba_d_head", "mamba_head_dim", "mamba_headdim")
SCAN_GROUPS = ("mamba_n_groups", "n_groups", "mamba_ngroups")


def branch_states(model: nn.Module) -> None:
    """Replace the functions of a model's modeling file that carry state; idempotent."""
    functions = _functions_of(type(model))
    for name in _BRANCHED.keys() & functions:
        if not hasattr(functions[name], "carries_one_state"):
            functions[name] = _on_segments(functions[name], _BRANCHED[name])


@contextmanager
def on_torch_functions(model: nn.Module) -> Iterator[None]:
    """Let transformers' own functions carry state within a `with` block.

    transformers binds the kernels of other packages when it is imported, on any device, and they need a GPU.
    """
    functions = _functions_of(type(model))
    bound = {name: functions[name] for name in _BRANCHED.keys() & functions}
    functions.update({name: inspect.unwrap(function) for name, function in bound.items()})
    try:
        yield
    finally:
        functions.update(bound)


def needs_half_precision(model: nn.Module) -> bool:
    """Whether a GPU computes a model's gated delta rule by flash-linear-attention, which rejects fp32."""
    return _has_kernel(_functions_of(type(model)).get("torch_chunk_gated_delta_rule"))


def _has_kernel(function: Callable[..., Any] | None) -> bool:
    """Whether transformers has bound another package's kernel to a function that it replaces."""
    while function is not None:
        if inspect.isfunction(function) and inspect.getclosurevars(function).nonlocals.get("is_new_implementation"):
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def _functions_of(model_class: type) -> dict[str, Any]:
    """The functions of a model's modeling file."""
    original = next(cls for cls in model_class.__mro__ if not issubclass(cls, FSDPModule))
    return vars(sys.modules[original.__module__])


def branching_layers(model_class: type) -> frozenset[str]:
    """Return transformers' names of the layers with state that can branch in a model family."""
    functions = _BRANCHED.keys() & _functions_of(model_class)
    if functions & {"torch_chunk_gated_delta_rule", "mamba2_chunk_scan"}:
        return WITH_STATE
    return frozenset({"conv"} if functions else ())


def splits_over(config: PreTrainedConfig, num_ranks: int) -> bool:
    """Whether heads, groups and channels of a model's layers with state split evenly over ranks; False if unknown."""
    text = config.get_text_config()
    present = vars(text)

    def size(*names: str) -> int:
        return next((int(present[name]) for name in names if present.get(name)), 0)

    keys, values = size("linear_num_key_heads"), size("linear_num_value_heads")
    heads, groups = size(*SCAN_HEADS), size(*SCAN_GROUPS)
    channels = 2 * keys * size("linear_key_head_dim") + values * size("linear_value_head_dim")
    channels += heads * size(*SCAN_HEAD_DIMS) + 2 * groups * size("mamba_d_state", "ssm_state_size")
    channels += size("hidden_size") if size("conv_L_cache") else 0
    if not channels:
        return not set(getattr(text, "layer_types", None) or ()) & WITH_STATE
    # as key/value heads, groups are repeated if they are fewer than ranks
    repeats = groups > 0 and num_ranks % groups == 0
    return not any(each % num_ranks for each in (values, heads, channels, 0 if repeats else groups))


def _on_segments(original: Callable[..., Any], branched: Callable[..., Any]) -> Callable[..., Any]:
    # transformers' function is outside compiled layers too: segments change with every batch
    on_segments = torch.compiler.disable(partial(branched, original))

    @wraps(original)
    def function(*args: Any, pair_visibility: PackedAttention | None = None, **rest: Any) -> Any:
        if pair_visibility is None:
            return original(*args, **rest)
        return on_segments(pair_visibility, *args, **rest)

    function.carries_one_state = original  # type: ignore[attr-defined]
    return function


@dataclass(frozen=True)
class _Stage:
    """Sequences of similar length that a function computes in one call: padded, or [1, rows] one after another."""

    rows: Tensor  # [sequences, longest] rows of the packed row; any row in padding
    is_padding: Tensor  # [sequences, longest, 1]
    ends: Tensor | None  # cumulative lengths, with a leading 0, of sequences one after another
    origins: Tensor | None  # [sequences] the root that each continues, in the stages' order; None: roots
    has_branches: bool  # roots whose final states are needed


@dataclass(frozen=True)
class _Forest:
    """A micro-batch's sequences: roots are shared prompts or whole sequences, branches the responses of the prompts."""

    stages: tuple[_Stage, ...]  # roots first
    places: Tensor  # [rows] index of each packed row in the stages, flat and one after another


def _forest(visibility: PackedAttention, device: torch.device, *, is_padded: bool) -> _Forest:
    return visibility.cached(
        ("forest", device, is_padded), lambda: _make_forest(visibility.segments, device, is_padded=is_padded)
    )


def _make_forest(segments: tuple[Segment, ...], device: torch.device, *, is_padded: bool) -> _Forest:
    # a shared prompt and its first response are one segment: its state branches where the prompt ends
    prompt_ends = {segment.prefix_start: segment.prefix_stop for segment in segments if segment.prefix_length}
    roots: list[range] = []
    branches: list[range] = []
    origins: list[int] = []
    indices: dict[int, int] = {}
    for segment in segments:
        first, origin = segment.start, segment.prefix_start
        if not segment.prefix_length:
            first, origin = prompt_ends.get(segment.start, segment.stop), segment.start
            indices[origin] = len(roots)
            roots.append(range(segment.start, first))
        if first < segment.stop:
            branches.append(range(first, segment.stop))
            origins.append(indices[origin])
    stages: list[_Stage] = []
    places = np.empty(segments[-1].stop, dtype=np.int64)
    start = 0
    rank = np.empty(len(roots), dtype=np.int64)  # of each root in the order in which the stages compute them
    for sequences in filter(None, (roots, branches)):
        starts, lengths = np.array([each.start for each in sequences]), np.array([len(each) for each in sequences])
        groups = _similar_lengths(lengths) if is_padded else [np.arange(len(lengths))]
        if sequences is roots:
            rank[np.concatenate(groups)] = np.arange(len(roots))
        for group in groups:
            offsets = np.arange(lengths[group].max())
            is_padding = offsets >= lengths[group, None]
            rows = np.where(is_padding, starts[group, None], starts[group, None] + offsets)
            if not is_padded:
                rows = rows[~is_padding][None]
                is_padding = np.zeros(rows.shape, dtype=bool)
            places[rows[~is_padding]] = start + np.flatnonzero(~is_padding)
            start += rows.size
            continued = np.array([], dtype=np.int64) if sequences is roots else rank[np.array(origins)[group]]
            arrays: list[npt.NDArray[Any]] = [rows, is_padding[:, :, None], np.cumsum([0, *lengths[group]]), continued]
            taken, padding, ends, continues = copy_arrays_to_device(arrays, device)
            stages.append(
                _Stage(
                    taken,
                    padding.bool(),
                    None if is_padded else ends.long(),
                    None if sequences is roots else continues,
                    has_branches=sequences is roots and bool(branches),
                )
            )
    return _Forest(tuple(stages), copy_arrays_to_device([places], device)[0])


def _similar_lengths(lengths: Rows) -> list[Rows]:
    """Group sequences so that padding to a group's longest at most doubles the rows; one group if all are similar.

    A scan computes whole chunks, so sequences up to one chunk are of the same length.
    """
    computed = np.maximum(lengths, _CHUNK)
    order = np.argsort(-computed, kind="stable")
    groups: list[Rows] = []
    while len(order):
        real = np.cumsum(computed[order])
        padded = computed[order[0]] * np.arange(1, len(order) + 1)
        exceeding = np.flatnonzero(padded > 2 * real)
        count = exceeding[0] if len(exceeding) else len(order)
        groups.append(np.sort(order[:count]))
        order = order[count:]
    return groups


def _take(states: Tensor, rows: Tensor) -> Tensor:
    """states [rows, ...], rows [...] -> [*rows.shape, ...]."""
    # an embedding's backward adds up the gradients of repeated rows in a fixed order, on a GPU too
    taken: Tensor = F.embedding(rows, states.flatten(1)).unflatten(-1, states.shape[1:])
    return taken


class _Scan(Protocol):
    """Compute sequences from their initial states, [sequences, longest, heads, ...] -> the same, and final states."""

    def __call__(
        self, inputs: list[Tensor], stage: _Stage, state: Tensor | None, *, needs_state: bool
    ) -> tuple[Tensor, Tensor | None]: ...


def _branch(visibility: PackedAttention, inputs: Iterable[Tensor], scan: _Scan, *, is_padded: bool = True) -> Tensor:
    """Scan the roots, and the branches from the roots' final states: [1, rows, heads, ...] -> [1, rows, heads, dim]."""
    exchange = visibility.exchange
    if exchange is not None:  # full rows of some heads
        inputs = [exchange.gather(each.transpose(1, 2)).transpose(1, 2) for each in inputs]
    rows = [each[0] for each in inputs]
    forest = _forest(visibility, rows[0].device, is_padded=is_padded)
    outputs: list[Tensor] = []
    finals: list[Tensor] = []  # states of roots
    for stage in forest.stages:
        if stage.origins is not None and len(finals) > 1:
            finals = [torch.cat(finals)]
        state = None if stage.origins is None else _take(finals[0], stage.origins)
        taken = [_take(each, stage.rows) for each in rows]
        out, final = scan(taken, stage, state, needs_state=stage.has_branches)
        outputs.append(out.flatten(0, 1))
        if final is not None:
            finals.append(final)
    out = _take(torch.cat(outputs), forest.places)[None]
    return out if exchange is None else exchange.scatter_sequence(out.transpose(1, 2)).transpose(1, 2)


def _gated_delta_rule(
    original: Callable[..., Any],
    visibility: PackedAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    g: Tensor,  # logarithm of the decay: [1, rows, heads]
    beta: Tensor,
    **rest: Any,
) -> tuple[Tensor, None]:
    """query, key and value [1, rows, heads, dim] -> [1, rows, heads, dim]."""

    def scan(
        inputs: list[Tensor], stage: _Stage, state: Tensor | None, *, needs_state: bool
    ) -> tuple[Tensor, Tensor | None]:
        *mixed, decay, write = inputs
        settings = rest | {"initial_state": state, "output_final_state": needs_state, "cu_seqlens": stage.ends}
        # padding decays nothing and writes nothing
        settings |= {"g": decay.masked_fill(stage.is_padding, 0.0), "beta": write.masked_fill(stage.is_padding, 0.0)}
        out: tuple[Tensor, Tensor | None] = original(*mixed, **settings)
        return out

    inputs = (query, key, value, g, beta)
    # flash-linear-attention takes cumulative lengths, transformers' function and Mamba-2's kernel padded sequences
    return _branch(visibility, inputs, scan, is_padded=not _has_kernel(original)), None


def _mamba2_scan(
    original: Callable[..., Any],
    visibility: PackedAttention,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803  as in transformers
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    *,
    D: Tensor | None = None,  # noqa: N803
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **rest: Any,
) -> Tensor:
    """hidden_states [1, rows, heads, dim] -> [1, rows, heads, dim]."""
    # here, not in the function: its bias and limit would give padding a step of more than 0
    steps = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
    steps = (F.softplus(steps) if dt_softplus else steps).clamp(*dt_limit)
    if visibility.exchange is not None:
        A, D = visibility.exchange.own(A), None if D is None else visibility.exchange.own(D)  # noqa: N806

    def scan(
        inputs: list[Tensor], stage: _Stage, state: Tensor | None, *, needs_state: bool
    ) -> tuple[Tensor, Tensor | None]:
        hidden, step, b, c = inputs
        settings = rest | {"D": D, "initial_states": state, "return_final_states": needs_state}
        out: Any = original(hidden, step.masked_fill(stage.is_padding, 0.0), A, b, c, **settings)
        return out if needs_state else (out, None)

    return _branch(visibility, (hidden_states, steps, B, C), scan)


def _without_fused_kernel(*_args: Any, **_rest: Any) -> None:
    """The kernel for a whole Mamba-2 layer knows no segments; the layer then calls its parts one by one."""


def _convolution(
    original: Callable[..., Any],
    visibility: PackedAttention,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_rest: Any,
) -> Tensor:
    """Convolve the row, then each segment's first rows with the inputs before them: [1, channels, rows] -> the same."""
    exchange = visibility.exchange
    if exchange is not None:  # full rows of some channels
        hidden_states = exchange.gather(hidden_states)
        weight, bias = exchange.own(weight), None if bias is None else exchange.own(bias)
    convolve = partial(original, weight=weight, bias=bias, activation=activation)
    out: Tensor = convolve(hidden_states)
    history = weight.shape[-1] - 1
    blocks = visibility.cached(
        ("blocks", history, out.device), lambda: _make_blocks(visibility.segments, history, out.device)
    )
    inputs = _take(hidden_states[0].T, blocks.rows).masked_fill(blocks.is_missing, 0.0)
    starts: Tensor = convolve(inputs.T[None])
    out = out.index_copy(2, blocks.outputs, starts.index_select(2, blocks.computed))
    return out if exchange is None else exchange.scatter_sequence(out)


@dataclass(frozen=True)
class _Blocks:
    """The first rows of each segment, each after the rows that precede them in its sequence."""

    rows: Tensor  # [inputs]
    is_missing: Tensor  # [inputs, 1] before the start of a sequence
    computed: Tensor  # [outputs] which of the inputs are rows of the segment itself
    outputs: Tensor  # [outputs] the same rows, numbered in the packed row


def _make_blocks(segments: Iterable[Segment], history: int, device: torch.device) -> _Blocks:
    rows: list[int] = []
    computed: list[int] = []
    for segment in segments:
        before = range(segment.prefix_start, segment.prefix_stop)[-history:]
        rows += [-1] * (history - len(before)) + [*before]
        first = range(segment.start, segment.stop)[:history]
        computed += range(len(rows), len(rows) + len(first))
        rows += first
    inputs = np.array(rows)
    arrays = [inputs.clip(0), inputs[:, None] < 0, np.array(computed), inputs[computed]]
    on_device = copy_arrays_to_device(arrays, device)
    return _Blocks(on_device[0], on_device[1].bool(), *(each.long() for each in on_device[2:]))


# by their names in transformers' modeling files
_BRANCHED: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _gated_delta_rule,
    "mamba2_chunk_scan": _mamba2_scan,
    "mamba2_split_conv1d_scan_combined": _without_fused_kernel,
}
