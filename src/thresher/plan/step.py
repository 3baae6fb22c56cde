"""A step of one process by closed form: FLOPs, bytes sent along each mesh dimension, and seconds.

`thresher plan --simulate` counts what the code of a step really does: FLOPs and bytes are within 15 % of its counts
(tests/plan/test_simulation.py). Seconds are within 15 % of steps that others have published
(tests/plan/test_published_steps.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from thresher.builders.hardware import COMPUTE_RATES, MEMORY_RATE, Compiled, Hardware
from thresher.builders.memory import Process
from thresher.distributed.mesh import ParallelDims
from thresher.engines.native.optimizers.registry import state_bytes
from thresher.models.optimizations.recompute import Recompute
from thresher.plan.workload import Rows

MeshDim = Literal["dp_shard", "dp_replicate", "tp", "cp", "ep", "pp"]
# share of a layer's forward that the backward repeats; selective recomputation keeps the results of products, but those
# with a narrow inner dimension, such as the last ones of small experts
RECOMPUTED: Mapping[Recompute, float] = {"off": 0.0, "selective": 0.0, "full": 1.0}
_FP32 = 4


@dataclass(frozen=True)
class Cluster:
    """GPUs, and how many of them share a node."""

    gpu: Hardware
    gpus_per_node: int
    num_gpus: int

    def bandwidth(self, mesh_dim: MeshDim, dims: ParallelDims) -> float:
        """Bytes per second of a group. Inner mesh dimensions are on adjacent ranks."""
        inner = dims.tp * dims.cp * dims.dp_shard
        extents = {"tp": dims.tp, "cp": dims.tp * dims.cp, "ep": dims.ep, "dp_shard": inner}
        extents["dp_replicate"] = inner * dims.dp_replicate
        return self.gpu.link(extents.get(mesh_dim, self.num_gpus), self.gpus_per_node)

    def seconds(self, mesh_dim: MeshDim, dims: ParallelDims, sent: float) -> float:
        """Time to send bytes along a mesh dimension."""
        if mesh_dim == "ep" and dims.ep > self.gpus_per_node:
            # no ring: what an all-to-all sends within a node does not cross the network
            sent *= (dims.ep - self.gpus_per_node) / (dims.ep - 1)
        return sent / self.bandwidth(mesh_dim, dims)


@dataclass(frozen=True)
class Flops:
    """FLOPs of a step."""

    model: float  # what forward and backward need: the numerator of MFU
    recomputed: float  # layers, attention scores and logits, computed again in the backward
    reference: float  # of a reference that these processes score
    mismatched: float = 0.0  # of KTO's mismatched answers, which the policy scores without gradient

    @property
    def total(self) -> float:
        return self.model + self.recomputed + self.reference + self.mismatched


def step_flops(process: Process, rows: Rows, mismatched: Rows | None = None) -> Flops:
    """FLOPs for the rows of a step, and for KTO's mismatched answers."""
    scored_twice = 0.0 if mismatched is None else _forward_flops(process, mismatched)
    scores = process.reference is not None
    dims, active = process.dims, process.size.active
    share = process.num_layers / process.size.num_layers / dims.tp
    per_element = 2 * rows.total / dims.cp
    products, weights = per_element * share * active.total, per_element * share * active.trained
    # scores and weighted values; the backward computes gradients of both, and the scores once more
    num_attending = process.num_layers * process.size.attention_share
    attention = 4 * rows.attended * process.query_columns * num_attending / dims.cp
    head = 2 * rows.scored / dims.cp * process.head.total
    head_weight = 2 * rows.scored / dims.cp * process.head.trained
    again = RECOMPUTED[process.recompute]
    experts_again = 0.0
    if process.recompute == "selective" and process.size.has_narrow_experts:
        experts_again = process.size.experts_share / 3
    return Flops(
        model=2 * products + weights + 3 * attention + 2 * head + head_weight,
        recomputed=again * (products + attention) + experts_again * products + attention / 2 + head,
        reference=products + attention + head + scored_twice if scores else 0.0,
        mismatched=scored_twice,
    )


def _forward_flops(process: Process, rows: Rows) -> float:
    known = step_flops(replace(process, reference="copy"), rows)
    return known.reference


def pipeline_model_flops(process: Process, rows: Rows) -> float:
    """Model FLOPs of one process of each stage together."""
    return step_flops(replace(process, dims=replace(process.dims, pp=1), stage=0), rows).model


def wire_bytes(
    process: Process, rows: Rows, micro_batches: float, mismatched: Rows | None = None
) -> dict[MeshDim, float]:
    """Bytes that a process sends in a step, in ring collectives."""
    dims, size, settings, compute = process.dims, process.size, process.settings, process.compute
    stored, full = process.stored, process.recompute == "full"
    # forwards without gradient: how often weights are gathered for them, and their rows in units of the trained ones
    gathers = (process.reference is not None) + (mismatched is not None)
    share = 0.0 if mismatched is None else mismatched.total / rows.total
    forwards = share + (process.reference is not None) * (1 + share)
    hidden = rows.total / dims.cp * size.hidden
    sent: dict[MeshDim, float] = {}
    if dims.uses_fsdp:
        # layers in the compute precision, with ZeRO-3 again in the backward; embedding and head once, as stored
        times = 1 if settings.zero_stage == 1 else micro_batches
        per_layer = times * (2 if settings.zero_stage == 3 else 1) + gathers * micro_batches
        reduced = times * (2 if settings.reduce_dtype == "bf16" else stored)
        outer = stored * (times + gathers * micro_batches) * (process.elements.total - process.matrices.total)
        dense, experts = process.elements - process.experts, process.experts
        gathered = per_layer * process.held_bytes(process.matrices - experts, compute) + outer
        sent["dp_shard"] = _ring(dims.fsdp_size) * (gathered + reduced * dense.trained)
        of_experts = compute * per_layer * experts.total + reduced * experts.trained
        sent["dp_shard"] += _ring(dims.ep_shard) * of_experts
    if dims.dp_replicate > 1:
        sent["dp_replicate"] = 2 * _ring(dims.dp_replicate) * stored * process.shards.trained
    if dims.tp > 1:
        sent["tp"] = _ring(dims.tp) * (
            _tensor_parallel(process, forwards) * hidden + 2 * _FP32 * rows.scored * size.hidden
        )
    if dims.ep > 1:
        # rows travel to their experts and back in each pass, and so do their gradients
        layers = process.num_layers * size.expert_layers / size.num_layers
        again = process.recompute != "off"
        sent["ep"] = _ring(dims.ep) * 2 * (2 + again + forwards) * layers * compute * hidden * process.expert_rows
    if dims.cp > 1:
        # queries, keys, values and outputs in each pass; keys and values repeated if there are fewer heads than ranks
        keys = process.key_columns * max(1, dims.cp * dims.tp // size.kv_heads)
        exchanged = compute * rows.total / dims.cp * process.num_layers * 2 * (process.query_columns + keys)
        sent["cp"] = _ring(dims.cp) * (2 + full + forwards) * exchanged
    if dims.pp > 1:
        between = (2 if settings.pp_dtype == "bf16" else stored) * rows.total / dims.cp * process.row_columns
        chunks = settings.virtual_pp_size
        sent["pp"] = between * ((1 + forwards) * (chunks - process.is_last) + chunks - process.is_first)
        if size.tied:  # its two gradients are summed
            sent["pp"] += stored * (process.embedding + process.head).trained / dims.fsdp_size
    return sent


def _ring(size: int) -> float:
    """Share of its payload that a process sends in an all-gather or a reduce-scatter, twice in an all-reduce."""
    return (size - 1) / size


def _dequantized_bytes(process: Process, mismatched: Rows | None) -> float:
    """Bytes that dequantization reads and writes in a micro-batch: before each product of forward and backward."""
    passes = 2 + RECOMPUTED[process.recompute] + (process.reference is not None) + (mismatched is not None)
    return passes * (process.size.packed_bytes + process.compute) * process.elements.packed


def _tensor_parallel(process: Process, forwards: float) -> float:
    """Payload bytes of the messages of tp per element of the hidden states; an all-reduce counts twice."""
    layers, compute, stored = process.num_layers, process.compute, process.stored
    full = process.recompute == "full"
    outside = 2 * stored * process.is_first
    if process.settings.sequence_parallel:
        # two gathers and two reductions in each pass; recomputation keeps one of these, or both
        again = {"off": 0, "selective": 2, "full": 3}[process.recompute]
        outside += stored * (process.is_first + process.is_last)
        return layers * (8 + again + 4 * forwards) * compute + outside
    # sums after two matrices in the forward, and of the gradients of five inputs in the backward
    gradients = compute if process.packs_rows and process.size.is_llama_like else stored
    dense = 2 * (2 + full + 2 * forwards) * compute + 2 * 5 * gradients
    # rows of experts are divided, and gathered after them; their gradients before
    routed = 2 * (1 + full + forwards) * compute + 2 * 3 * gradients + (2 + forwards) * stored
    with_experts = process.size.expert_layers / process.size.num_layers
    return layers * (with_experts * routed + (1 - with_experts) * dense) + outside


@dataclass(frozen=True)
class StepTime:
    """Expected seconds of a step by kind of work."""

    compute: float
    optimizer: float
    communication: dict[MeshDim, float]
    exposed: float  # communication that nothing hides
    bubble: float  # idle time of a pipeline

    @property
    def total(self) -> float:
        return self.compute + self.optimizer + self.exposed + self.bubble


def step_time(
    process: Process,
    cluster: Cluster,
    rows: Rows,
    micro_batches: float,
    compiled: Compiled,
    *,
    flops: Flops | None = None,  # if not by the process's settings
    mismatched: Rows | None = None,
    exposed_tp: float = 1.0,  # share of the messages of tp that products wait for; less with torchtitan's async TP
) -> StepTime:
    """Expected time of a step.

    FSDP2 gathers and reduces while layers compute, and replicas are summed while the last backward does: what takes
    longer than they do is exposed. Products wait for the messages of tp, cp, ep and pp.
    """
    gpu, dims = cluster.gpu, process.dims
    flops = flops or step_flops(process, rows, mismatched)
    compute = process.slowest * flops.total / (COMPUTE_RATES[compiled] * gpu.peak_flops)
    compute += micro_batches * _dequantized_bytes(process, mismatched) / (MEMORY_RATE * gpu.memory_bandwidth)
    # the optimizer reads weights, gradients and its state, and writes all but the gradients
    moved = (3 * process.stored + 2 * state_bytes(process.training, process.stored)) * process.shards.trained
    optimizer = moved / (MEMORY_RATE * gpu.memory_bandwidth)
    sent = wire_bytes(process, rows, micro_batches, mismatched)
    seconds = {mesh_dim: cluster.seconds(mesh_dim, dims, size) for mesh_dim, size in sent.items()}
    # ZeRO-1 gathers in the first forward of a step, and reduces in the last backward
    covering = compute / max(1.0, micro_batches) if process.settings.zero_stage == 1 else compute
    waiting = exposed_tp * seconds.get("tp", 0.0) + seconds.get("cp", 0.0) + seconds.get("ep", 0.0)
    exposed = waiting + seconds.get("pp", 0.0)
    left = covering - seconds.get("dp_shard", 0.0)
    exposed += max(0.0, -left)
    # a backward takes two thirds of the products of a micro-batch; in zero bubble, gradients of weights follow it
    is_zero_bubble = process.settings.pp_schedule == "zero_bubble"
    last_backward = 0.0 if is_zero_bubble else 2 / 3 * compute / max(1.0, micro_batches)
    exposed += max(0.0, seconds.get("dp_replicate", 0.0) - max(0.0, min(last_backward, left)))
    idle = (dims.pp - 1) / (max(dims.pp, micro_batches) * process.settings.virtual_pp_size)
    if is_zero_bubble:
        idle /= 3  # gradients of weights, a third of the products, fill a bubble of both passes
    return StepTime(compute, optimizer, seconds, exposed, idle * (compute + waiting))
