"""Peak memory of one process by category, as the sum of the tensors that strategies/native holds at the same time.

Weights, gradients and optimizer state are exact. Activations are the tensors that autograd saves in Llama-like layers,
and an approximation for others. `RESERVED` is for what is not a tensor: fragmentation, and the workspaces of kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

from thresher.models.lm_head import slice_width
from thresher.plan.model import Stage
from thresher.plan.traffic import Precision
from thresher.plan.workload import Rows

# bytes per element of sums in products and of the LM head
_FP32 = 4
_READERS_OF_NORMS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
# share of a device for its context, fragmentation and the workspaces of kernels
RESERVED = 0.08


@dataclass(frozen=True)
class Memory:
    """Bytes by category, at the moment of the peak."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    reference: int = 0
    gather_buffers: int = 0
    activations: int = 0
    lm_head: int = 0

    @property
    def total(self) -> int:
        return sum(self.by_category.values())

    @property
    def persistent(self) -> int:
        """What a process holds between micro-batches."""
        return self.weights + self.gradients + self.optimizer + self.reference

    @property
    def by_category(self) -> dict[str, int]:
        return {each.name: getattr(self, each.name) for each in fields(self)}


@dataclass(frozen=True)
class MemorySettings:
    """What the memory of a process depends on, beside the mesh.

    packs_rows: the memory-efficient layers apply. splits_rows: sequence parallelism. holds_reference: a frozen copy of
    the model is in the same process. micro_batches: of a step; gradients exist during the forward of the second.
    """

    precision: Precision
    packs_rows: bool
    zero_stage: int = 3
    recomputes: bool = False
    offloads: bool = False
    holds_reference: bool = False
    micro_batches: int = 2
    on_gpu: bool = True
    splits_rows: bool = False


def peak_memory(stage: Stage, rows: Rows, settings: MemorySettings) -> Memory:
    """The peak of a step whose largest micro-batch has these rows."""
    steady = _peak_with_gradients(stage, rows, settings)
    if settings.micro_batches > _micro_batches_in_flight(stage, settings):
        return steady
    # no gradient exists before the first backward, one micro-batch less is in flight after it, and none after the last
    moments = [replace(steady, gradients=0), persistent_memory(stage, settings)]
    if settings.micro_batches > 1:
        fewer = replace(settings, micro_batches=settings.micro_batches - 1)
        moments.append(_peak_with_gradients(stage, rows, fewer))
    return max(moments, key=lambda memory: memory.total)


def _peak_with_gradients(stage: Stage, rows: Rows, settings: MemorySettings) -> Memory:
    moments = [
        _moment_of_head(stage, rows, settings),
        *_moments_of_layers(stage, rows, settings),
        *_moments_of_embedding(stage, rows, settings),
    ]
    gathered, activations, head = max(moments, key=sum)
    held = persistent_memory(stage, settings)
    gradients = _accumulated_gradients(stage, settings) or held.gradients
    gradients += _partial_embedding_gradient(stage, settings)
    return replace(held, gradients=gradients, gather_buffers=gathered, activations=activations, lm_head=head)


def _accumulated_gradients(stage: Stage, settings: MemorySettings) -> int:
    """Whole gradients that ZeRO-1 adds up before it reduces them; 0 in other stages."""
    if settings.zero_stage > 1 or stage.dims.fsdp_size == 1 or settings.micro_batches == 1:
        return 0
    return settings.precision.stored * sum(
        group.count * p.numel for group in stage.fsdp_groups for p in group.parameters if p.is_trained
    )


def _partial_embedding_gradient(stage: Stage, settings: MemorySettings) -> int:
    """What the gradient of an embedding sharded over tp has beyond its shard until the end of a step, without FSDP2.

    Each process adds up a partial sum of the whole matrix.
    """
    shape = stage.shape
    if stage.dims.tp == 1 or stage.dims.fsdp_size > 1 or not (stage.is_first and stage.trains_embedding):
        return 0
    whole = shape.vocab * shape.hidden
    return settings.precision.stored * (whole - whole // stage.dims.tp)


def saved_activations(stage: Stage, rows: Rows, settings: MemorySettings) -> int:
    """Bytes that autograd saves in all layers of a stage for one micro-batch."""
    return sum(count * _saved_in_layer(stage, layer, rows, settings) for layer, count in stage.layer_counts)


def persistent_memory(stage: Stage, settings: MemorySettings) -> Memory:
    """Shards of weights, gradients and moments. Offloaded shards are in host memory."""
    stored, held = settings.precision.stored, stage.held
    # two moments like the shard, and the step count of AdamW, one fp32 scalar per parameter
    moments = 2 * stored * held.trained + _FP32 * held.trained_tensors
    reference = stored * held.base if settings.holds_reference else 0
    if settings.offloads:
        return Memory()
    return Memory(stored * held.weights, stored * held.trained, moments, reference)


def _moment_of_head(stage: Stage, rows: Rows, settings: MemorySettings) -> tuple[int, int, int]:
    """(gather buffers, activations, LM head) in the backward of the LM head."""
    if not stage.is_last:
        return 0, 0, 0
    gathered = _outer_gathered(stage, settings) + _kept_layers(stage, settings)
    in_flight = _micro_batches_in_flight(stage, settings)
    saved = saved_activations(stage, rows, settings)
    activations = round(in_flight * saved) + _tables(stage, rows, settings) + _final_norm(stage, rows, settings)
    activations += _pipeline_buffers(stage, rows, settings)
    return gathered, activations, _lm_head(stage, rows, settings)


def _moments_of_layers(stage: Stage, rows: Rows, settings: MemorySettings) -> list[tuple[int, int, int]]:
    """The same in the backward of the MLP and of the attention of the last two layers, and of the first.

    The last layer of a model may compute fewer rows. What the MLP and the final norm saved is free by then. In the
    first, FSDP2 prefetches the embedding.
    """
    moments = []
    in_flight = _micro_batches_in_flight(stage, settings)
    everything = round(in_flight * saved_activations(stage, rows, settings))
    head = _head_gradient(stage, settings) if stage.dims.fsdp_size > 1 else 0
    around = _tables(stage, rows, settings) + _pipeline_buffers(stage, rows, settings)
    freed = 0
    for layer in dict.fromkeys((*stage.layers[:-3:-1], stage.layers[0])):
        if layer == stage.layers[0]:
            freed = saved_activations(stage, rows, settings) - _saved_in_layer(stage, layer, rows, settings)
        recomputed = _saved_in_layer(stage, layer, rows, settings, is_recomputed=True) if settings.recomputes else 0
        of_mlp, of_attention = _temporaries(stage, layer, rows, settings)
        kept = _local_rows(stage, layer, rows, settings)[1]
        saved_by_mlp = _saved_in_mlp(stage, layer, kept, settings, is_lean=_is_lean(stage, settings))
        gathered = _gathered_in_backward(stage, layer, settings)
        held = everything - freed + recomputed + around
        moments += [(gathered, held + working, head) for working in (of_mlp, of_attention - saved_by_mlp)]
        freed += _saved_in_layer(stage, layer, rows, settings)
    return moments


def _moments_of_embedding(stage: Stage, rows: Rows, settings: MemorySettings) -> list[tuple[int, int, int]]:
    """The same in the forward and in the backward of the embedding, where FSDP2 holds gathered bytes twice.

    An all-gather writes into a buffer that is copied into the parameters, and stays until the next all-gather. The
    gradient is copied into the input of a reduce-scatter, while the one of the first layer may still be sent. Under tp
    the gradient is that of the whole embedding.
    """
    if not stage.is_first:
        return []
    stored, shape = settings.precision.stored, stage.shape
    is_sharded = stage.dims.fsdp_size > 1
    root, embedding = _outer_gathered(stage, settings), stored * stage.embedding_numel
    in_flight = round((_micro_batches_in_flight(stage, settings) - 1) * saved_activations(stage, rows, settings))
    around = in_flight + _tables(stage, rows, settings) + _pipeline_buffers(stage, rows, settings)
    kept = 0 if is_sharded else _kept_layers(stage, settings)
    moments = [(2 * (root + embedding) + kept, around, 0)]
    if stage.trains_embedding:
        hidden = stored * rows.padded_to(stage.dims.cp) // stage.dims.cp * shape.hidden
        gradient = stored * shape.vocab * shape.hidden if stage.dims.tp > 1 else embedding
        if stage.dims.tp > 1 and stage.dims.pp > 1:
            gradient += embedding  # as counted in simulations: its own part, copied while the whole still exists
        first_layer = stored * stage.layer(stage.layers[0]).trained_numel if is_sharded else 0
        head = _head_gradient(stage, settings) if is_sharded else 0
        moments.append((root + embedding + kept + gradient + first_layer, around + 2 * hidden, head))
    return moments


def _micro_batches_in_flight(stage: Stage, settings: MemorySettings) -> float:
    """Micro-batches whose activations a stage holds in 1F1B; if interleaved, chunks in flight over those of a stage."""
    pp, num_chunks = stage.dims.pp, len(stage.chunks)
    if pp == 1:
        return 1
    scheduled = max(settings.micro_batches, pp)
    if num_chunks == 1:
        return min(pp - stage.index, settings.micro_batches)  # the rows of dummy batches take next to nothing
    per_round = scheduled // max(1, scheduled // pp)
    warm_up = (num_chunks - 1) * per_round + 2 * (pp - 1 - stage.index)
    return min(warm_up + 1, scheduled * num_chunks) / num_chunks


def _pipeline_buffers(stage: Stage, rows: Rows, settings: MemorySettings) -> int:
    """Hidden states that a stage holds beside those that autograd saves."""
    if stage.dims.pp == 1:
        return 0
    hidden = settings.precision.stored * rows.padded_to(stage.dims.cp) // stage.dims.cp * stage.shape.hidden
    hidden //= _row_shards(stage, settings)
    scheduled = max(settings.micro_batches, stage.dims.pp)
    # as counted in real steps: the peak of the last stage grows by about one input per micro-batch
    inputs = settings.micro_batches if stage.is_last else 0
    if len(stage.chunks) > 1:
        # torch's interleaved schedule waits for all sends at its end, and they hold what is sent: outputs of all chunks
        # but the last of the model, gradients of all but the first
        per_batch = 2 * len(stage.chunks) - stage.is_first - stage.is_last
        return (inputs + per_batch * scheduled) * hidden
    if stage.is_last:
        return inputs * hidden
    # outputs of micro-batches in flight, and gradients that are received and sent
    return round((_micro_batches_in_flight(stage, settings) + 1 + (not stage.is_first)) * hidden)


def _local_rows(stage: Stage, layer: int, rows: Rows, settings: MemorySettings) -> tuple[int, int]:
    """Rows of keys and values, and of everything else, in a layer."""
    total = rows.padded_to(stage.dims.cp) // stage.dims.cp
    is_last = layer == stage.shape.num_layers - 1
    skips = settings.packs_rows and stage.shape.is_llama_like and stage.dims.cp == 1 and is_last
    return total, rows.kept if skips and not settings.splits_rows else total


def _row_shards(stage: Stage, settings: MemorySettings) -> int:
    """Processes that split the rows between layers."""
    return stage.dims.tp if settings.splits_rows else 1


def _saved_in_layer(
    stage: Stage, layer: int, rows: Rows, settings: MemorySettings, *, is_recomputed: bool = False
) -> int:
    """Bytes that autograd saves in a layer, its input included."""
    shape, tp = stage.shape, stage.dims.tp
    stored, compute = settings.precision.stored, settings.precision.compute
    total, kept = _local_rows(stage, layer, rows, settings)
    hidden = stored * total * shape.hidden // _row_shards(stage, settings)
    if settings.recomputes and not is_recomputed:
        return hidden
    is_lean = _is_lean(stage, settings)
    queries, keys = shape.heads * shape.head_dim // tp, shape.kv_heads * shape.head_dim // tp
    if not settings.packs_rows:
        keys = queries  # keys and values are repeated for each query head
    # queries, keys, values, output and log-sum-exp of attention; o_proj reads the output, or the exchanged one
    attention = compute * (2 * kept * queries + 2 * total * keys) + _FP32 * kept * shape.heads // tp
    if stage.dims.cp > 1 and _trains_matrices(stage, layer)("self_attn.o_proj"):
        attention += compute * kept * queries
    norms = hidden if not is_recomputed else 0  # the input of the layer
    norms += (stored * kept * shape.hidden + _FP32 * (total + kept)) // _row_shards(stage, settings)
    norms += _norm_outputs(stage, layer, total, kept, settings, is_lean=is_lean)
    return attention + norms + _saved_in_mlp(stage, layer, kept, settings, is_lean=is_lean)


def _is_lean(stage: Stage, settings: MemorySettings) -> bool:
    """Whether the memory-efficient layers apply."""
    return settings.packs_rows and stage.shape.is_llama_like


def _norm_outputs(stage: Stage, layer: int, total: int, kept: int, settings: MemorySettings, *, is_lean: bool) -> int:
    """Outputs of the two norms, saved by the matrices that read them."""
    stored, compute, width = settings.precision.stored, settings.precision.compute, stage.shape.hidden
    reads_inputs = _trains_matrices(stage, layer)
    attention_reads, mlp_reads = reads_inputs("self_attn."), reads_inputs("mlp.")
    adapted = stage.layer(layer).adapted_modules
    if stored == compute:
        saved = compute * width * (total * attention_reads + kept * mlp_reads)
    elif adapted and stage.dims.fsdp_size == 1:
        # PEFT casts the input of each adapter to its precision, and autocast casts it back; FSDP2 gathers adapters in
        # the compute precision
        readers = sum(name.endswith(_READERS_OF_NORMS) for name in adapted)
        queries = stage.shape.heads * stage.shape.head_dim // stage.dims.tp
        saved = compute * kept * (readers * width + queries * reads_inputs("self_attn.o_proj"))
    elif is_lean:
        saved = compute * width * (total * attention_reads + kept * mlp_reads)
    else:
        saved = compute * width * (3 * total * attention_reads + 2 * kept * mlp_reads)  # one copy per matrix
    if is_lean:
        # the last layer also gathers the kept rows for its queries
        return saved + (compute * width * kept if kept < total and attention_reads else 0)
    # the original norm saves its normalized input as well
    trains_norms = any(p.is_trained and len(p.shape) == 1 for p in stage.in_layer(layer))
    return saved + stored * width * (total + kept) * trains_norms


def _saved_in_mlp(stage: Stage, layer: int, kept: int, settings: MemorySettings, *, is_lean: bool) -> int:
    shape, compute = stage.shape, settings.precision.compute
    width = shape.intermediate // stage.dims.tp
    if shape.experts > 1:
        # rows are copied per chosen expert; gate and up, activation, product and output of each
        per_expert = 4 * width + 2 * shape.hidden
        return compute * kept * shape.experts_per_token * per_expert + _FP32 * kept * shape.experts
    reads_inputs = _trains_matrices(stage, layer)
    # gate and up, their product as the input of down_proj, and the activation unless it is recomputed
    return compute * kept * width * (2 + reads_inputs("mlp.down_proj") + (not is_lean))


def _trains_matrices(stage: Stage, layer: int) -> Callable[[str], bool]:
    """Whether matrices of a layer whose path starts with a prefix are trained, or have trained adapters."""
    trained = stage.layer(layer).trained_modules
    return lambda prefix: any(module.startswith(prefix) for module in trained)


def _tables(stage: Stage, rows: Rows, settings: MemorySettings) -> int:
    """Rotary embeddings."""
    return 2 * settings.precision.stored * _local_rows(stage, 0, rows, settings)[0] * stage.shape.head_dim


def _final_norm(stage: Stage, rows: Rows, settings: MemorySettings) -> int:
    last = _local_rows(stage, stage.shape.num_layers - 1, rows, settings)[1]
    held = 3 * settings.precision.stored * last * stage.shape.hidden // _row_shards(stage, settings)
    return held if stage.is_last else 0


def _temporaries(stage: Stage, layer: int, rows: Rows, settings: MemorySettings) -> tuple[int, int]:
    """Gradients that live in the backward of the MLP and of the attention of a layer, with the residual stream's."""
    shape, tp, compute = stage.shape, stage.dims.tp, settings.precision.compute
    total, kept = _local_rows(stage, layer, rows, settings)
    width = shape.intermediate // tp * (shape.experts_per_token if shape.experts > 1 else 1)
    # of the product, gate and up; the product itself is freed first
    saves_product = _trains_matrices(stage, layer)("mlp.down_proj")
    mlp = compute * (2 if saves_product else 3) * kept * width
    itemsize = compute if settings.on_gpu else _FP32  # the kernel of the CPU computes in fp32
    queries, keys = shape.heads * shape.head_dim // tp, shape.kv_heads * shape.head_dim // tp
    copies = 2 if itemsize != compute else 1
    attention = itemsize * copies * (2 * kept * queries + 2 * total * keys)
    residual = 2 * settings.precision.stored * total * shape.hidden // _row_shards(stage, settings)
    if settings.splits_rows:
        residual += 2 * compute * total * shape.hidden  # what is gathered for a matrix, and the gradient to be reduced
    return mlp + residual, attention + residual


def _lm_head(stage: Stage, rows: Rows, settings: MemorySettings) -> int:
    """Scored rows, their gradient, slices of logits, and the gradient of the weight."""
    scored, width = rows.scored // stage.dims.cp, stage.shape.hidden
    vocab = next(p.shape[0] for p in stage.outer if p.name == stage.shape.head)
    columns = slice_width(vocab, scored, on_gpu=settings.on_gpu)
    # one slice is computed while the one before it still exists
    slices = _FP32 * scored * min(2 * columns, vocab)
    return (settings.precision.stored + 3 * _FP32) * scored * width + slices + _head_gradient(stage, settings)


def _head_gradient(stage: Stage, settings: MemorySettings) -> int:
    """The gradient of this process's part of the head before it is added to earlier ones, or reduced."""
    heads = [p for p in stage.outer if p.name == stage.shape.head and p.is_trained and stage.is_last]
    return sum(settings.precision.stored * p.numel for p in heads)


def _outer_gathered(stage: Stage, settings: MemorySettings) -> int:
    """Gathered parameters outside of layers: those of the root group, through the forward and the backward."""
    kept = stage.embedding_numel if settings.zero_stage == 1 else 0
    return settings.precision.stored * (stage.root_numel + kept)


def _kept_layers(stage: Stage, settings: MemorySettings) -> int:
    """Matrices in the compute precision that live from the forward to the backward."""
    precision = settings.precision
    is_sharded = stage.dims.fsdp_size > 1
    if is_sharded and settings.zero_stage == 3:
        return 0
    if not is_sharded and precision.compute == precision.stored:
        return 0  # the weights themselves
    if not is_sharded and settings.recomputes:
        return precision.compute * max(stage.layer(layer).numel for layer, _ in stage.layer_counts)
    numel = sum(count * stage.layer(layer).numel for layer, count in stage.layer_counts)
    if not is_sharded:
        # autocast keeps one copy of a trained matrix for a step, and makes one of a frozen matrix in every forward
        trained = sum(count * stage.layer(layer).trained_numel for layer, count in stage.layer_counts)
        numel = trained + round(_micro_batches_in_flight(stage, settings) * (numel - trained))
    return precision.compute * numel


def _gathered_in_backward(stage: Stage, layer: int, settings: MemorySettings) -> int:
    """The root, this layer, the next group, which FSDP2 prefetches, and the gradients of this layer and their sum."""
    kept, precision = _kept_layers(stage, settings), settings.precision
    if stage.dims.fsdp_size == 1:
        return kept
    gradients = (precision.stored + precision.compute) * stage.layer(layer).trained_numel
    own = precision.compute * stage.layer(layer).numel
    prefetched = precision.stored * stage.embedding_numel if layer == stage.layers[0] else own
    return _outer_gathered(stage, settings) + (kept or own + prefetched) + gradients
