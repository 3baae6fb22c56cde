"""Layers with state on packed rows: a prompt is computed once, and every response continues from its final state.

The modeling files of transformers call a few functions to mix tokens with state: a short convolution, the gated delta
rule and Mamba-2's scan. Here they are replaced by functions that follow the segments of a packed row. The layers hand
the keyword `pair_visibility` down to them; without it, they are transformers' functions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial, wraps
from importlib.util import find_spec
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedConfig

from thresher.distributed.tensors import copy_arrays_to_device
from thresher.models.attention.segments import PackedAttention, Segment


def branch_states(model: nn.Module) -> None:
    """Replace the functions of a model's modeling file that carry state; idempotent."""
    functions = _functions_of(type(model))
    for name in _BRANCHED.keys() & functions:
        if not hasattr(functions[name], "carries_one_state"):
            functions[name] = _on_segments(functions[name], _BRANCHED[name])


def carries_state(model: nn.Module) -> bool:
    return bool(branching_layers(type(model)))


def _functions_of(model_class: type) -> dict[str, Any]:
    """The functions of a model's modeling file."""
    original = next(cls for cls in model_class.__mro__ if not issubclass(cls, FSDPModule))
    return vars(sys.modules[original.__module__])


def branching_layers(model_class: type) -> frozenset[str]:
    """Return transformers' names of the layers with state that can branch in a model family."""
    functions = _BRANCHED.keys() & _functions_of(model_class)
    if functions & {"torch_chunk_gated_delta_rule", "mamba2_chunk_scan"}:
        return frozenset({"linear_attention", "hybrid", "conv"})
    return frozenset({"conv"} if functions else ())


def splits_over(config: PreTrainedConfig, num_ranks: int) -> bool:
    """Whether heads, groups and channels of a model's layers with state split evenly over ranks."""
    text = vars(config.get_text_config())

    def size(*names: str) -> int:
        return next((int(text[name]) for name in names if text.get(name)), 0)

    keys, values = size("linear_num_key_heads"), size("linear_num_value_heads")
    heads, groups = size("mamba_n_heads", "mamba_num_heads"), size("mamba_n_groups", "n_groups")
    channels = 2 * keys * size("linear_key_head_dim") + values * size("linear_value_head_dim")
    channels += heads * size("mamba_d_head", "mamba_head_dim") + 2 * groups * size("mamba_d_state", "ssm_state_size")
    channels += size("hidden_size") if size("conv_L_cache") else 0
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
    """Sequences that a function computes in one call: padded to the longest, or [1, rows] one after another."""

    rows: Tensor  # [sequences, longest] rows of the packed row; any row in padding
    is_padding: Tensor  # [sequences, longest, 1]
    ends: Tensor | None  # cumulative lengths, with a leading 0, of sequences one after another
    origins: Tensor | None  # [sequences] the previous stage's sequence that each continues; None: they have no state


@dataclass(frozen=True)
class _Forest:
    """A micro-batch's sequences: roots are shared prompts or whole sequences, branches the responses of the prompts."""

    stages: tuple[_Stage, ...]
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
    for sequences in filter(None, (roots, branches)):
        starts, lengths = np.array([each.start for each in sequences]), np.array([len(each) for each in sequences])
        offsets = np.arange(lengths.max())
        is_padding = offsets >= lengths[:, None]
        rows = np.where(is_padding, starts[:, None], starts[:, None] + offsets)
        if not is_padded:
            rows = rows[~is_padding][None]
            is_padding = np.zeros(rows.shape, dtype=bool)
        places[rows[~is_padding]] = start + np.flatnonzero(~is_padding)
        start += rows.size
        arrays = [rows, is_padding[:, :, None], np.cumsum([0, *lengths]), np.array(origins if stages else [])]
        taken, padding, ends, continued = copy_arrays_to_device(arrays, device)
        stages.append(_Stage(taken, padding.bool(), None if is_padded else ends.long(), continued if stages else None))
    return _Forest(tuple(stages), copy_arrays_to_device([places], device)[0])


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
    state: Tensor | None = None
    for stage in forest.stages:
        if state is not None and stage.origins is not None:
            state = _take(state, stage.origins)
        taken = [_take(each, stage.rows) for each in rows]
        out, state = scan(taken, stage, state, needs_state=stage is not forest.stages[-1])
        outputs.append(out.flatten(0, 1))
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
    return _branch(visibility, inputs, scan, is_padded=not _has_varlen_kernel(query.device)), None


def _has_varlen_kernel(device: torch.device) -> bool:
    """Whether transformers calls the gated delta rule of flash-linear-attention; Mamba-2 has no such kernel."""
    return device.type == "cuda" and find_spec("fla") is not None


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
