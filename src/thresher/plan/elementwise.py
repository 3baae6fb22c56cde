"""Bytes that the operations of a step read and write in device memory, without matrix products and attention kernels.

Counted, not assumed: in layers by benchmarks/elementwise_traffic.py, in the LM head by the simulation of an 8B shape.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from thresher.models.lm_head import slice_width
from thresher.plan.activations import FP32, MemorySettings, local_rows, row_shards
from thresher.plan.model import Stage
from thresher.plan.workload import Rows

# nothing; the norms and activations of layers, one by one; whole layers
Compiled = Literal["nothing", "functions", "layers"]


@dataclass(frozen=True)
class _BytesPerColumn:
    """Bytes per row and column of the forward and the backward of a layer, in bf16 over a residual stream in fp32.

    inputs: of the matrices that read a norm, whose gradients are added. hidden: of everything else in the residual
    stream, which sequence parallelism splits.
    """

    inputs: tuple[float, float]
    hidden: tuple[float, float]
    intermediate: tuple[float, float]
    queries: tuple[float, float]
    keys_and_values: tuple[float, float]


# "functions" is "nothing", with the compiled norms (6 and 16 bytes each) and activations in place of the others
_IN_LAYERS: Mapping[Compiled, _BytesPerColumn] = {
    "nothing": _BytesPerColumn((0.0, 18.0), (71.6, 159.8), (10.3, 22.3), (40.8, 58.8), (19.0, 29.9)),
    "functions": _BytesPerColumn((0.0, 18.0), (32.0, 68.0), (6.0, 10.0), (40.8, 58.8), (19.0, 29.9)),
    # with 4 bytes per query in and out for the output of attention, which is made contiguous outside of them
    "layers": _BytesPerColumn((0.0, 0.0), (25.6, 59.9), (6.3, 9.8), (22.8, 16.3), (9.9, 8.0)),
}
# per logit, with the entropy in the forward
_PER_LOGIT = (40.0, 38.0)
_STORED, _COMPUTE = 4, 2


def elementwise_bytes(
    stage: Stage,
    micro_batches: Iterable[Rows],
    settings: MemorySettings,
    *,
    compiled: Compiled,
    scores_reference: bool,
) -> float:
    """Bytes of a step of one process, in all layers and the LM head of a stage."""
    total = 0.0
    for rows, count in Counter(micro_batches).items():
        forward, backward = _in_layers(stage, rows, settings, _IN_LAYERS[compiled])
        in_head = _in_head(stage, rows, settings)
        forwards = 1 + (settings.recompute != "off") + scores_reference
        total += count * (forwards * forward + backward + (1 + scores_reference) * in_head[0] + in_head[1])
    return total


def _in_layers(stage: Stage, rows: Rows, settings: MemorySettings, each: _BytesPerColumn) -> tuple[float, float]:
    shape, tp, precision = stage.shape, stage.dims.tp, settings.precision
    stored, compute = precision.stored / _STORED, precision.compute / _COMPUTE
    width = shape.intermediate / tp * (shape.experts_per_token if shape.experts > 1 else 1)
    forward = backward = 0.0
    for layer, count in stage.layer_counts:
        total, kept = local_rows(stage, layer, rows, settings)
        columns = (
            (each.inputs, compute * kept * shape.hidden),
            (each.hidden, stored * kept * shape.hidden / row_shards(stage, settings)),
            (each.intermediate, compute * kept * width),
            (each.queries, compute * kept * shape.heads * shape.head_dim / tp),
            (each.keys_and_values, compute * total * 2 * shape.kv_heads * shape.head_dim / tp),
        )
        forward += count * sum(own[0] * size for own, size in columns)
        backward += count * sum(own[1] * size for own, size in columns)
    return forward, backward


def _in_head(stage: Stage, rows: Rows, settings: MemorySettings) -> tuple[float, float]:
    if not stage.is_last:
        return 0.0, 0.0
    head = next(p for p in stage.outer if p.name == stage.shape.head)
    scored = rows.scored // stage.dims.cp
    logits = scored * head.shape[0]
    precision = settings.precision
    cast = 0 if precision.stored == precision.compute else head.numel * (precision.stored + precision.compute)
    num_slices = -(-head.shape[0] // slice_width(head.shape[0], max(1, scored), on_gpu=True))
    # each slice adds to the gradient of the rows, and copies that of its weights to their place
    sums = 3 * FP32 * (num_slices * scored * head.shape[1] + head.is_trained * head.numel)
    return _PER_LOGIT[0] * logits + cast, _PER_LOGIT[1] * logits + cast + sums
