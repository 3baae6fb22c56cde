"""FLOPs of a step, and its time by a roofline: each kind of work at an assumed share of the hardware's peak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass

from thresher.distributed.mesh import ParallelDims
from thresher.models.optimizations.recompute import Recompute
from thresher.plan.hardware import Hardware
from thresher.plan.model import Parameter, Stage
from thresher.plan.traffic import Axis, Message, wire_bytes
from thresher.plan.workload import Rows

# assumed shares of the peak: of matrix products, of memory bandwidth, and of links
PRODUCT_RATES = (0.5, 0.7)
MEMORY_RATE = 0.8
LINK_RATE = 0.8
# memory traffic of the copies around an FSDP2 collective per byte of its payload, counted on a step of an 8B shape
_PASSES_PER_GATHER = 3


@dataclass(frozen=True)
class Flops:
    """FLOPs of a step on one process.

    model: what the forward and backward of the policy need. recomputed: a second forward (gradient checkpointing) and
    the logits of the backward. reference: of a reference that is scored in the same processes. forward: what model has
    of the forward.
    """

    model: float = 0.0
    recomputed: float = 0.0
    reference: float = 0.0
    forward: float = 0.0

    @property
    def total(self) -> float:
        return self.model + self.recomputed + self.reference

    def __add__(self, other: Flops) -> Flops:
        return Flops(*(own + others for own, others in zip(astuple(self), astuple(other), strict=True)))

    def __mul__(self, factor: float) -> Flops:
        return Flops(*(factor * number for number in astuple(self)))


def step_flops(
    stage: Stage, micro_batches: Iterable[Rows], *, packs_rows: bool, recompute: Recompute, scores_reference: bool
) -> Flops:
    """FLOPs of a stage for the micro-batches of a data-parallel rank."""
    flops = Flops()
    for rows, count in Counter(micro_batches).items():
        forward, weights, partial = _layers(stage, rows, packs_rows=packs_rows)
        head, head_weight = _head(stage, rows)
        # the gradient of the input costs as much as the forward; that of the weights only where they are trained
        model = 2 * forward + weights + 2 * head + head_weight
        again = head + {"off": 0.0, "selective": partial, "full": forward}[recompute]
        reference = forward + head if scores_reference else 0.0
        flops += Flops(model, again, reference, forward + head) * count
    return flops


def _layers(stage: Stage, rows: Rows, *, packs_rows: bool) -> tuple[float, float, float]:
    """FLOPs of the forward through all layers of a stage, of the gradients of their weights, and of products whose
    results selective recomputation does not keep.
    """
    shape, dims = stage.shape, stage.dims
    total = rows.padded_to(dims.cp) / dims.cp
    skips = packs_rows and shape.is_llama_like and dims.cp == 1
    forward = weights = again = 0.0
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
            again += product if _is_computed_again(stage, layer, parameter) else 0.0
        attended = count * rows.attended * (rows.kept / rows.total if is_short else 1.0)
        forward += _attention(stage, attended)
        weights += 0.5 * _attention(stage, attended)  # the backward kernel computes the scores again
    return forward, weights, again


def _is_computed_again(stage: Stage, layer: int, parameter: Parameter) -> bool:
    """Whether selective recomputation repeats a product: one of partial sums, or with a narrow inner dimension."""
    is_partial = stage.dims.tp > 1 and (parameter.style or "").startswith("rowwise")
    is_last = parameter.module == "mlp.down_proj" and "mlp.down_proj" not in stage.layer(layer).adapted_modules
    return "lora_B" in parameter.name or (is_partial and not (is_last and stage.shape.is_llama_like))


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
    """Seconds of a step by kind of work, and of the step: with FSDP2 hidden where it can be, and with nothing hidden.

    bubble: idle time of a pipeline, at the better rate of products. exposed: of communication, in the best case.
    """

    products: tuple[float, float]
    elementwise: float
    copies: float
    optimizer: float
    communication: dict[Axis, float]
    exposed: float
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


@dataclass(frozen=True)
class StepCosts:
    """What the time of a step of one process depends on.

    elementwise_bytes: memory traffic of layers and LM head beside their products. trained_bytes: weights, gradients and
    moments of the optimizer.
    """

    flops: Flops
    messages: Sequence[Message]
    micro_batches: int
    elementwise_bytes: float
    trained_bytes: float
    zero_stage: int = 3
    has_zero_bubble: bool = False


def roofline(stage: Stage, cluster: Cluster, step: StepCosts) -> Roofline:
    """Time of a step. What hides behind what:

    FSDP2 gathers the next layer while one computes, and reduces the gradients of one while the next computes, on a
    stream of its own: as much is hidden as the computation of the same forward or backward takes. tp and cp wait for
    each message before the next product, a stage for hidden states, and replicas for the last backward: exposed.
    """
    gpu, dims, flops = cluster.gpu, stage.dims, step.flops
    memory_rate = MEMORY_RATE * gpu.memory_bandwidth
    low, high = (flops.total / (gpu.peak_flops * rate) for rate in reversed(PRODUCT_RATES))
    elementwise = step.elementwise_bytes / memory_rate
    sharding = [message for message in step.messages if message.axis == "dp_shard"]
    copies = _PASSES_PER_GATHER * sum(message.payload_bytes for message in sharding) / memory_rate
    optimizer = 2 * step.trained_bytes / memory_rate
    communication = {axis: sent / cluster.bandwidth(axis, dims) for axis, sent in wire_bytes(step.messages).items()}
    idle = (dims.pp - 1) / max(1, step.micro_batches * len(stage.chunks))
    if step.has_zero_bubble:  # gradients of weights fill the bubble: forward + input - weights of all three remain
        idle *= max(0.0, 1 - 2 * (flops.model - 2 * flops.forward) / max(1.0, flops.total))
    others = sum(seconds for axis, seconds in communication.items() if axis != "dp_shard")
    local = elementwise + copies
    covering = low + local
    if cluster.bandwidth("tp", dims) > cluster.bandwidth("dp_shard", dims):
        covering += communication.get("tp", 0.0)  # which waits for another link
    exposed = others + _exposed_sharding(step, sharding, cluster.bandwidth("dp_shard", dims), covering)
    best = (low + local) * (1 + idle) + exposed + optimizer
    worst = (high + local) * (1 + idle) + sum(communication.values()) + optimizer
    bubble = idle * (low + local)
    return Roofline((low, high), elementwise, copies, optimizer, communication, exposed, bubble, best, worst)


def _exposed_sharding(step: StepCosts, sharding: Sequence[Message], bandwidth: float, covering: float) -> float:
    """Seconds of FSDP2 that computation does not cover. covering: seconds of all that covers it in a step."""
    gathering, reducing = (
        sum(message.wire_bytes for message in sharding if message.kind == kind) / bandwidth
        for kind in ("all_gather", "reduce_scatter")
    )
    in_forward = 0.5 * gathering if step.zero_stage == 3 else gathering
    in_backward = gathering - in_forward + reducing
    if step.zero_stage == 1:  # gathers in the first forward of a step, and reduces in the last backward
        covering /= max(1, step.micro_batches)
    forward = covering * (step.flops.forward + step.flops.reference) / max(1.0, step.flops.total)
    return max(0.0, in_forward - forward) + max(0.0, in_backward - (covering - forward))
