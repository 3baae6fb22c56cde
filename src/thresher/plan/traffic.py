"""The messages of one optimizer step of a process: what strategies/native sends along each axis, call by call.

A payload is counted as in docs/concepts/parallelism.md: the output of an all-gather, the input of other collectives.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from thresher.models.optimizations.recompute import Recompute
from thresher.plan.model import FsdpGroup, Parameter, Stage
from thresher.plan.workload import Rows

Axis = Literal["dp_shard", "dp_replicate", "tp", "cp", "pp", "step"]
Kind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "send", "receive"]
AXES_OF_MESSAGES: tuple[Axis, ...] = get_args(Axis)
_FP64, _FP32 = 8, 4


@dataclass(frozen=True)
class Message:
    """`calls` equal collectives. axis: `step` has the metrics and norms. size: processes of the group."""

    axis: Axis
    kind: Kind
    payload: int
    size: int
    calls: int = 1

    def times(self, count: int) -> Message:
        return Message(self.axis, self.kind, self.payload, self.size, count * self.calls)

    @property
    def payload_bytes(self) -> int:
        return self.payload * self.calls

    @property
    def wire_bytes(self) -> float:
        """Bytes that the process sends, for ring collectives."""
        if self.kind in ("send", "receive"):
            return float(self.payload_bytes) if self.kind == "send" else 0.0
        share = (self.size - 1) / self.size
        return (2 if self.kind == "all_reduce" else 1) * share * self.payload_bytes


def wire_bytes(messages: Iterable[Message]) -> dict[Axis, float]:
    """Bytes that a process sends along each axis."""
    sent: dict[Axis, float] = defaultdict(float)
    for message in messages:
        sent[message.axis] += message.wire_bytes
    return dict(sent)


@dataclass(frozen=True)
class Precision:
    """Bytes of an element: of stored weights and the residual stream, and of products.

    reduced: of FSDP2's sums of gradients. sent: of hidden states between stages. None: those of stored weights.
    """

    stored: int
    compute: int
    reduced: int | None = None
    sent: int | None = None

    def gathered(self, group: FsdpGroup) -> int:
        return self.compute if group.kind == "layer" else self.stored

    def summed(self, group: FsdpGroup) -> int:
        return self.stored if group.kind == "root" or self.reduced is None else self.reduced


@dataclass(frozen=True)
class TrafficSettings:
    """What the messages of a step depend on, beside the mesh.

    packs_rows: the memory-efficient layers and the shorter last layer apply. zero_stage: of FSDP2. recompute:
    gradient checkpointing. scores_reference: the same processes score every micro-batch for the reference, without
    adapters. num_metrics: of the objective. measures_entropy: of the policy. splits_rows: sequence parallelism.
    """

    precision: Precision
    packs_rows: bool
    zero_stage: int = 3
    recompute: Recompute = "off"
    scores_reference: bool = False
    num_metrics: int = 0
    measures_entropy: bool = False
    splits_rows: bool = False
    has_zero_bubble: bool = False


def step_messages(stage: Stage, micro_batches: Sequence[Rows], dummy: Rows, settings: TrafficSettings) -> list[Message]:
    """All messages of a step of one data-parallel rank, whose dummy batches are in micro_batches already."""
    scheduled = _scheduled(stage, micro_batches, dummy, has_zero_bubble=settings.has_zero_bubble)
    messages = list(_for_weights(stage, settings, len(scheduled)))
    for rows, count in Counter(scheduled).items():
        messages += [message.times(count) for message in _for_rows(stage, rows, settings, has_backward=True)]
    messages += _pipeline(stage, scheduled, settings, has_backward=True)
    if settings.scores_reference:
        for rows, count in Counter(micro_batches).items():
            messages += [message.times(count) for message in _scoring(stage, rows, dummy, settings)]
    return [*messages, *_after_backward(stage, settings), *_bookkeeping(stage, settings)]


def _scheduled(stage: Stage, micro_batches: Sequence[Rows], dummy: Rows, *, has_zero_bubble: bool) -> list[Rows]:
    """Add the dummy batches that a pipeline schedule needs, as pipeline_executor.py does."""
    count, pp = len(micro_batches), stage.dims.pp
    if count and pp > 1 and len(stage.chunks) == 1:
        count = max(count, pp)
    if count and pp > 1 and (len(stage.chunks) > 1 or has_zero_bubble):
        while count % max(1, count // pp):
            count += 1
    return [*micro_batches, *[dummy] * (count - len(micro_batches))]


def _scoring(stage: Stage, rows: Rows, dummy: Rows, settings: TrafficSettings) -> Iterator[Message]:
    """The forward of the reference, one micro-batch at a time."""
    scheduled = _scheduled(stage, [rows], dummy, has_zero_bubble=settings.has_zero_bubble)
    yield from _gathers(stage, settings, len(scheduled), has_backward=False)
    for each, count in Counter(scheduled).items():
        yield from (message.times(count) for message in _for_rows(stage, each, settings, has_backward=False))
    yield from _pipeline(stage, scheduled, settings, has_backward=False)
    if stage.dims.pp > 1:
        yield Message("pp", "broadcast", _FP32 * rows.scored, stage.dims.pp)


def _for_weights(stage: Stage, settings: TrafficSettings, micro_batches: int) -> Iterator[Message]:
    """Messages of a step, whatever the rows of its micro-batches."""
    yield from _gathers(stage, settings, micro_batches, has_backward=True)
    yield from _reductions(stage, settings, micro_batches)


def _for_rows(stage: Stage, rows: Rows, settings: TrafficSettings, *, has_backward: bool) -> Iterator[Message]:
    yield from _tensor_parallel(stage, rows, settings, has_backward=has_backward)
    yield from _context_parallel(stage, rows, settings, has_backward=has_backward)


def _local_rows(stage: Stage, rows: Rows, settings: TrafficSettings) -> int:
    """Rows of a micro-batch in the matrices of this process; cp and sequence parallelism pad them."""
    cp = stage.dims.cp
    return rows.padded_to(cp * stage.dims.tp if settings.splits_rows else cp) // cp


def _gathers(stage: Stage, settings: TrafficSettings, micro_batches: int, *, has_backward: bool) -> Iterator[Message]:
    """FSDP2 gathers every group in the forward, and those of `_gathered_again` in the backward; ZeRO-1 once."""
    size = stage.dims.fsdp_size
    if has_backward and settings.zero_stage == 1:
        micro_batches = min(1, micro_batches)
    for group in stage.fsdp_groups:
        payload = settings.precision.gathered(group) * size * group.shard_numel
        calls = 2 if has_backward and _gathered_again(group, settings.zero_stage) else 1
        yield Message("dp_shard", "all_gather", payload, size, calls * group.count * micro_batches)


def _gathered_again(group: FsdpGroup, zero_stage: int) -> bool:
    """Whether the backward gathers a group: not the embedding, which it does not read, nor what stays gathered."""
    return zero_stage == 3 if group.kind == "layer" else group.kind == "root" and zero_stage > 1


def _reductions(stage: Stage, settings: TrafficSettings, micro_batches: int) -> Iterator[Message]:
    """FSDP2 reduces the gradients: shards in every backward or, with ZeRO-1, in the last.

    Replicas in the last backward, which each chunk of a stage has; the root belongs to all chunks.
    """
    dims = stage.dims
    calls = min(1, micro_batches) if settings.zero_stage == 1 else micro_batches
    for group in stage.fsdp_groups:
        shard, size = settings.precision.summed(group) * group.trained_shard_numel, dims.fsdp_size
        if shard:
            yield Message("dp_shard", "reduce_scatter", shard * size, size, calls * group.count)
        if shard and dims.dp_replicate > 1 and micro_batches:
            last = len(stage.chunks) if group.kind == "root" else 1
            yield Message("dp_replicate", "all_reduce", shard, dims.dp_replicate, last * group.count)


def _tensor_parallel(stage: Stage, rows: Rows, settings: TrafficSettings, *, has_backward: bool) -> Iterator[Message]:
    """Row-wise matrices sum their outputs in the forward, column-wise ones the gradient of their input."""
    dims, shape = stage.dims, stage.shape
    if dims.tp == 1:
        return
    total, scored = _local_rows(stage, rows, settings), rows.scored // dims.cp

    def all_reduce(numel: int, itemsize: int, calls: int = 1) -> Message:
        return Message("tp", "all_reduce", numel * itemsize, dims.tp, calls)

    if settings.splits_rows:
        yield from _row_exchanges(stage, total, settings, has_backward=has_backward)
    if stage.is_first and any(p.name == shape.embedding and p.style for p in stage.outer):
        yield all_reduce(total * shape.hidden, settings.precision.stored)
    for layer, count in () if settings.splits_rows else stage.layer_counts:
        skips = settings.packs_rows and shape.is_llama_like and dims.cp == 1 and layer == shape.num_layers - 1
        for numel, itemsize in _layer_reductions(
            stage, layer, total, rows.kept if skips else total, settings, has_backward=has_backward
        ):
            yield all_reduce(numel, itemsize, count)
    if stage.is_last and any(p.name == shape.head and p.style for p in stage.outer):
        # largest logit, log-sum-exp and target logit of each row, and the mean logit for the policy's entropy
        yield all_reduce(scored, _FP32, 4 if has_backward and settings.measures_entropy else 3)
        if has_backward:
            yield all_reduce(scored * shape.hidden, _FP32)


def _row_exchanges(stage: Stage, total: int, settings: TrafficSettings, *, has_backward: bool) -> Iterator[Message]:
    """Sequence parallelism: gathers for the matrices that read a norm, and reductions after those that end a block."""
    stored, compute = settings.precision.stored, settings.precision.compute

    def exchange(kind: Kind, itemsize: int, calls: int) -> Message:
        return Message("tp", kind, total * stage.shape.hidden * itemsize, stage.dims.tp, calls)

    layers = sum(count for _, count in stage.layer_counts)
    is_repeated = has_backward and settings.recompute != "off"
    backward = 2 * layers if has_backward else 0
    yield exchange("all_gather", compute, 2 * layers * (1 + is_repeated) + backward)
    # selective recomputation keeps sums, and full recomputation stops at the last tensor that is needed
    again = layers if has_backward and settings.recompute == "full" else 0
    yield exchange("reduce_scatter", compute, 2 * layers + again + backward)
    if stage.is_first and has_backward:
        yield exchange("all_gather", stored, 1)  # gradient of the embedding
    if stage.is_last:
        yield exchange("all_gather", stored, 1)  # for the LM head


def _layer_reductions(
    stage: Stage, layer: int, total: int, kept: int, settings: TrafficSettings, *, has_backward: bool
) -> Iterator[tuple[int, int]]:
    """(elements, bytes of each) of the all-reduces of a layer. kept: rows of all but keys and values."""
    stored, compute = settings.precision.stored, settings.precision.compute
    normed = compute if settings.packs_rows and stage.shape.is_llama_like else stored
    matrices = [p for p in stage.in_layer(layer) if p.style and p.name.endswith("weight") and len(p.shape) == 2]
    experts = [p for p in stage.in_layer(layer) if p.style and len(p.shape) == 3]
    forward = [p for p in matrices if p.style and p.style.startswith("rowwise")]
    if not has_backward:
        forward = [p for p in forward if "lora_" not in p.name]
    outputs = [(kept * p.shape[0], compute) for p in forward]
    if experts:
        outputs.append((kept * stage.shape.hidden, stored))
    yield from outputs
    if not has_backward:
        return
    if settings.recompute == "full":
        # recomputation stops at the last tensor that is needed: not the sum after the last matrix of a layer
        yield from outputs if forward and "lora_" in forward[-1].name else outputs[:-1]
    for p in matrices:
        if not (p.style or "").startswith("colwise"):
            continue
        is_read_by_keys = p.module.split(".")[1:2] in (["k_proj"], ["v_proj"])
        rows = total if is_read_by_keys else kept
        if "lora_B" in p.name:
            yield rows * p.shape[1], compute
        elif _input_has_gradient(stage, layer, p):
            yield rows * p.shape[1], normed
    if experts:
        # gradients of the experts' input, and of the weights of the chosen experts
        yield kept * stage.shape.hidden, stored
        yield kept * stage.shape.experts_per_token, stored


def _input_has_gradient(stage: Stage, layer: int, parameter: Parameter) -> bool:
    """Whether anything trained comes before a matrix of a layer."""
    if stage.trains_before(layer):
        return True
    is_attention = parameter.module.startswith("self_attn.")
    before = ("input_layernorm",) if is_attention else ("input_layernorm", "self_attn.", "post_attention_layernorm")
    return any(p.is_trained and p.module.startswith(before) for p in stage.in_layer(layer))


def _context_parallel(stage: Stage, rows: Rows, settings: TrafficSettings, *, has_backward: bool) -> Iterator[Message]:
    """Attention exchanges queries, keys, values and outputs; the logps are summed over the shards of a row."""
    dims, shape, itemsize = stage.dims, stage.shape, settings.precision.compute
    if dims.cp == 1:
        return
    local = _local_rows(stage, rows, settings)
    kv_heads = shape.kv_heads // dims.tp
    kv_heads *= max(1, dims.cp // kv_heads)  # repeated if there are fewer than ranks
    width, heads = itemsize * local * shape.head_dim, shape.heads // dims.tp
    inputs = Message("cp", "all_to_all", width * (heads + 2 * kv_heads), dims.cp)
    output = Message("cp", "all_to_all", width * heads, dims.cp)
    for layer, count in stage.layer_counts:
        in_layer = [inputs, output] * (2 if has_backward and settings.recompute == "full" else 1)
        if has_backward:
            in_layer.append(output)
            if any(_has_gradient(stage, layer, f"{name}_proj") for name in "qkv"):
                in_layer.append(inputs)
        yield from (message.times(count) for message in in_layer)
    if stage.is_last:
        values = 2 if has_backward and settings.measures_entropy else 1
        yield Message("cp", "all_reduce", _FP32 * rows.scored, dims.cp, values)


def _has_gradient(stage: Stage, layer: int, name: str) -> bool:
    """Whether the output of a projection requires a gradient."""
    before = ("input_layernorm", f"self_attn.{name}")
    return stage.trains_before(layer) or any(
        p.is_trained and p.module.startswith(before) for p in stage.in_layer(layer)
    )


def _pipeline(
    stage: Stage, micro_batches: Sequence[Rows], settings: TrafficSettings, *, has_backward: bool
) -> Iterator[Message]:
    """Hidden states to the next chunk, and their gradients to the previous one."""
    dims, shape = stage.dims, stage.shape
    if dims.pp == 1 or not micro_batches:
        return
    num_chunks = dims.pp * len(stage.chunks)
    for number in range(stage.index, num_chunks, dims.pp):
        for rows, count in Counter(micro_batches).items():
            local = _local_rows(stage, rows, settings) // (dims.tp if settings.splits_rows else 1)
            hidden = (settings.precision.sent or settings.precision.stored) * local * shape.hidden
            if number < num_chunks - 1:
                yield Message("pp", "send", hidden, dims.pp, count)
            if number > 0:
                yield Message("pp", "receive", hidden, dims.pp, count)
            if has_backward and number > 0:
                yield Message("pp", "send", hidden, dims.pp, count)
            if has_backward and number < num_chunks - 1:
                yield Message("pp", "receive", hidden, dims.pp, count)


def _after_backward(stage: Stage, settings: TrafficSettings) -> Iterator[Message]:
    """Gradients that no backward has reduced (parameters.py)."""
    dims, stored = stage.dims, settings.precision.stored
    trained = [(p, count) for p, count in stage.parameter_counts if p.is_trained]
    if dims.dp_replicate > 1 and dims.fsdp_size == 1:
        num_tensors, numel = sum(count for _, count in trained), sum(count * p.numel for p, count in trained)
        yield Message("step", "all_reduce", _FP64 * num_tensors, dims.dp_replicate)
        yield Message("dp_replicate", "all_reduce", max(stored, _FP32) * numel, dims.dp_replicate)
    partial = [
        (p, count)
        for p, count in trained
        if p.has_partial_gradient or (settings.splits_rows and p.module.endswith("norm") and "self_attn" not in p.name)
    ]
    if dims.tp > 1 and partial:
        local = sum(count * stage.local_numel(p) for p, count in partial)
        yield Message("tp", "all_reduce", max(stored, _FP32) * local, dims.tp)
    if dims.pp > 1 and stage.shape.tied and (stage.is_first or stage.is_last):
        tied = sum(stage.local_numel(p) for p, _ in trained if p.name == stage.shape.embedding)
        if tied:
            yield Message("pp", "send", stored * tied, dims.pp)
            yield Message("pp", "receive", stored * tied, dims.pp)


def _bookkeeping(stage: Stage, settings: TrafficSettings) -> Iterator[Message]:
    """Numbers that all ranks must agree on: the norm of the gradient, its zeros, whether to stop, and the metrics."""
    if stage.dims.num_processes > 1:
        # sum and count of each metric, and three counts of tokens
        yield Message("step", "all_reduce", _FP64 * (3 + 2 * settings.num_metrics + 3), stage.dims.num_processes)
