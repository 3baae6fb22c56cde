"""FLOPs of a step, and its time by a roofline: each kind of work at an assumed share of the hardware's peak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from thresher.distributed.mesh import ParallelDims
from thresher.plan.hardware import Hardware
from thresher.plan.model import Stage
from thresher.plan.traffic import Axis, Message, wire_bytes
from thresher.plan.workload import Rows

# assumed shares of the peak: of matrix products, of memory bandwidth, and of links
PRODUCT_RATES = (0.5, 0.7)
MEMORY_RATE = 0.8
LINK_RATE = 0.8
# memory traffic of elementwise operations per byte that autograd saves, and of the copies around an FSDP2 collective
# per byte of its payload: counted on a step of an 8B shape whose layers are not compiled
_PASSES_PER_ACTIVATION = 18
_PASSES_PER_GATHER = 3


@dataclass(frozen=True)
class Flops:
    """FLOPs of a step on one process.

    model: what the forward and backward of the policy need. recomputed: a second forward (gradient checkpointing) and
    the logits of the backward. reference: of a reference that is scored in the same processes.
    """

    model: float = 0.0
    recomputed: float = 0.0
    reference: float = 0.0

    @property
    def total(self) -> float:
        return self.model + self.recomputed + self.reference

    def __add__(self, other: Flops) -> Flops:
        return Flops(self.model + other.model, self.recomputed + other.recomputed, self.reference + other.reference)


def step_flops(
    stage: Stage, micro_batches: Iterable[Rows], *, packs_rows: bool, recomputes: bool, scores_reference: bool
) -> Flops:
    """FLOPs of a stage for the micro-batches of a data-parallel rank."""
    flops = Flops()
    for rows, count in Counter(micro_batches).items():
        forward, weights = _layers(stage, rows, packs_rows=packs_rows)
        head, head_weight = _head(stage, rows)
        # the gradient of the input costs as much as the forward; that of the weights only where they are trained
        model = 2 * forward + weights + 2 * head + head_weight
        again = head + (forward if recomputes else 0.0)
        reference = forward + head if scores_reference else 0.0
        flops += Flops(count * model, count * again, count * reference)
    return flops


def _layers(stage: Stage, rows: Rows, *, packs_rows: bool) -> tuple[float, float]:
    """FLOPs of the forward through all layers of a stage, and of the gradients of their weights."""
    shape, dims = stage.shape, stage.dims
    total = rows.padded_to(dims.cp) / dims.cp
    skips = packs_rows and shape.is_llama_like and dims.cp == 1
    forward = weights = 0.0
    for layer, count in stage.layer_counts:
        is_short = skips and layer == shape.num_layers - 1
        for parameter in stage.in_layer(layer):
            if len(parameter.shape) < 2:
                continue
            reads_all = not is_short or parameter.module.startswith(("self_attn.k_proj", "self_attn.v_proj"))
            share = shape.experts_per_token / shape.experts if len(parameter.shape) == 3 else 1.0
            product = 2.0 * count * parameter.numel * share * (total if reads_all else rows.kept)
            forward += product
            weights += product if parameter.is_trained else 0.0
        attended = count * rows.attended * (rows.kept / rows.total if is_short else 1.0)
        forward += _attention(stage, attended)
        weights += 0.5 * _attention(stage, attended)  # the backward kernel computes the scores again
    return forward, weights


def _attention(stage: Stage, attended: float) -> float:
    """Scores and weighted values."""
    return 4.0 * attended * stage.shape.heads * stage.shape.head_dim / (stage.dims.tp * stage.dims.cp)


def _head(stage: Stage, rows: Rows) -> tuple[float, float]:
    if not stage.is_last:
        return 0.0, 0.0
    head = next(p for p in stage.outer if p.name == stage.shape.head)
    forward = 2.0 * head.numel * rows.scored / stage.dims.cp
    return forward, forward if head.is_trained else 0.0


@dataclass(frozen=True)
class Roofline:
    """Seconds of a step by kind of work, and of the step: with all transfers hidden, and with none.

    bubble: idle time of a pipeline, at the better rate of products.
    """

    products: tuple[float, float]
    elementwise: float
    copies: float
    optimizer: float
    communication: dict[Axis, float]
    bubble: float
    best: float
    worst: float

    def mfu(self, model_flops: float, peak_flops: float) -> tuple[float, float]:
        """Model FLOPs utilization, from the worst to the best case."""
        return model_flops / (peak_flops * self.worst), model_flops / (peak_flops * self.best)


@dataclass(frozen=True)
class Cluster:
    """GPUs, and how many of them share a node."""

    gpu: Hardware
    gpus_per_node: int
    num_gpus: int

    def bandwidth(self, axis: Axis, dims: ParallelDims) -> float:
        """Bytes per second of a group: of the slower link if it spans nodes. Inner axes are on adjacent ranks."""
        inner = {
            "tp": dims.tp,
            "cp": dims.tp * dims.cp,
            "dp_shard": dims.tp * dims.cp * dims.dp_shard,
            "dp_replicate": dims.tp * dims.cp * dims.dp_shard * dims.dp_replicate,
        }
        extent = inner.get(axis, self.num_gpus)
        return LINK_RATE * (self.gpu.intra_node if extent <= self.gpus_per_node else self.gpu.inter_node)


def roofline(
    stage: Stage,
    cluster: Cluster,
    flops: Flops,
    messages: Sequence[Message],
    *,
    activation_bytes: float,
    trained_bytes: float,
    micro_batches: int,
) -> Roofline:
    """activation_bytes: saved in all micro-batches. trained_bytes: weights, gradients and moments of the optimizer."""
    gpu, dims = cluster.gpu, stage.dims
    low, high = (flops.total / (gpu.peak_flops * rate) for rate in reversed(PRODUCT_RATES))
    elementwise = _PASSES_PER_ACTIVATION * activation_bytes / (MEMORY_RATE * gpu.memory_bandwidth)
    payload = sum(message.payload_bytes for message in messages if message.axis == "dp_shard")
    copies = _PASSES_PER_GATHER * payload / (MEMORY_RATE * gpu.memory_bandwidth)
    optimizer = 2 * trained_bytes / (MEMORY_RATE * gpu.memory_bandwidth)
    communication = {axis: sent / cluster.bandwidth(axis, dims) for axis, sent in wire_bytes(messages).items()}
    idle = (dims.pp - 1) / max(1, micro_batches * len(stage.chunks))
    hidden = communication.get("dp_shard", 0.0)
    exposed = sum(communication.values()) - hidden
    local = elementwise + copies
    best = max((low + local) * (1 + idle), hidden) + exposed + optimizer
    worst = (high + local) * (1 + idle) + hidden + exposed + optimizer
    return Roofline((low, high), elementwise, copies, optimizer, communication, idle * (low + local), best, worst)
