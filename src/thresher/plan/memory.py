"""Peak memory of one process by category, as the sum of the tensors that strategies/native holds at the same time.

Weights, gradients and optimizer state are exact. Activations are the tensors that autograd saves in Llama-like layers,
and an approximation for others. `RESERVED` is for what is not a tensor: fragmentation, and the workspaces of kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from thresher.models.lm_head import slice_width
from thresher.plan.activations import (
    FP32,
    MemorySettings,
    local_rows,
    recomputed_in_layer,
    row_shards,
    saved_activations,
    saved_in_layer,
    saved_in_mlp,
    uses_lean_layers,
)
from thresher.plan.model import Stage
from thresher.plan.workload import Rows

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
    else:
        moments += _ends_of_backward(stage, rows, settings)
    return max(moments, key=lambda memory: memory.total)


def _ends_of_backward(stage: Stage, rows: Rows, settings: MemorySettings) -> list[Memory]:
    """The backward of the first layer and of the embedding in a step of one micro-batch.

    All gradients exist by then, in the first layer without that of the embedding.
    """
    held = persistent_memory(stage, settings)
    embedding = stage.outer_numel("embedding", "tied") if stage.is_first and stage.trains_embedding else 0
    of_embedding = min(held.gradients, settings.precision.stored * embedding // stage.dims.fsdp_size)
    # the first layer is last in the backward: its MLP and its attention
    late = [(moment, of_embedding) for moment in _moments_of_layers(stage, rows, settings)[-2:]]
    late += [(moment, 0) for moment in _moments_of_embedding(stage, rows, settings)[1:]]
    return [
        replace(
            held, gradients=held.gradients - missing, gather_buffers=gathered, activations=activations, lm_head=head
        )
        for (gathered, activations, head), missing in late
    ]


def _peak_with_gradients(stage: Stage, rows: Rows, settings: MemorySettings) -> Memory:
    moments = [
        *_moments_of_head(stage, rows, settings),
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
    return settings.precision.stored * sum(group.count * group.trained_numel for group in stage.fsdp_groups)


def _partial_embedding_gradient(stage: Stage, settings: MemorySettings) -> int:
    """What the gradient of an embedding sharded over tp has beyond its shard until it is reduced.

    Each process adds up a partial sum of the whole matrix, without FSDP2 and with ZeRO-1 until the end of a step.
    """
    shape = stage.shape
    is_added_up = stage.dims.fsdp_size == 1 or _accumulated_gradients(stage, settings) > 0
    if stage.dims.tp == 1 or not is_added_up or not (stage.is_first and stage.trains_embedding):
        return 0
    whole = shape.vocab * shape.hidden
    return settings.precision.stored * (whole - whole // stage.dims.tp)


def persistent_memory(stage: Stage, settings: MemorySettings) -> Memory:
    """Shards of weights, gradients and moments. Offloaded shards are in host memory."""
    stored, held = settings.precision.stored, stage.held
    # two moments like the shard, and the step count of AdamW, one fp32 scalar per parameter
    moments = 2 * stored * held.trained + FP32 * held.trained_tensors
    reference = stored * held.base if settings.holds_reference else 0
    if settings.offloads:
        return Memory()
    weights = stored * held.weights - (stored - settings.precision.compute) * held.narrow
    return Memory(weights, stored * held.trained, moments, reference)


def _moments_of_head(stage: Stage, rows: Rows, settings: MemorySettings) -> list[tuple[int, int, int]]:
    """(gather buffers, activations, LM head) in the forward and the backward of the LM head, and when FSDP2 reduces its
    gradient.

    The buffer of the all-gather of the head stays until the next one, in the backward of the last layer.
    """
    if not stage.is_last:
        return []
    outer = _outer_gathered(stage, settings) + _kept_layers(stage, settings)
    in_flight = _micro_batches_in_flight(stage, settings)
    saved = saved_activations(stage, rows, settings)
    activations = round(in_flight * saved) + _tables(stage, rows, settings) + _final_norm(stage, rows, settings)
    activations += _pipeline_buffers(stage, rows, settings)
    head = settings.precision.stored * stage.outer_numel("head")
    gathered = outer + (head if settings.zero_stage > 1 else 0)
    moments = [
        (gathered + head, activations, _lm_head_forward(stage, rows, settings)),
        (gathered, activations, _lm_head(stage, rows, settings)),
    ]
    if reducing := _reduced_head(stage, settings):
        moments.append((outer, activations, _head_gradient(stage, settings) + reducing))
    return moments


def _moments_of_layers(stage: Stage, rows: Rows, settings: MemorySettings) -> list[tuple[int, int, int]]:
    """The same in the backward of the MLP and of the attention of the last two layers, and of the first.

    The last layer of a model may compute fewer rows. What the MLP and the final norm saved is free by then.
    """
    moments = []
    in_flight = _micro_batches_in_flight(stage, settings)
    everything = round(in_flight * saved_activations(stage, rows, settings))
    head = _reduced_head(stage, settings)
    around = _tables(stage, rows, settings) + _pipeline_buffers(stage, rows, settings)
    freed = 0
    for layer in dict.fromkeys((*stage.layers[:-3:-1], stage.layers[0])):
        if layer == stage.layers[0]:
            freed = saved_activations(stage, rows, settings) - saved_in_layer(stage, layer, rows, settings)
        recomputed = recomputed_in_layer(stage, layer, rows, settings)
        of_mlp, of_attention = _temporaries(stage, layer, rows, settings)
        kept = local_rows(stage, layer, rows, settings)[1]
        saved_by_mlp = saved_in_mlp(stage, layer, kept, settings, is_lean=uses_lean_layers(stage, settings))
        gathered = _gathered_in_backward(stage, layer, settings)
        held = everything - freed + recomputed + around
        moments += [(gathered, held + working, head) for working in (of_mlp, of_attention - saved_by_mlp)]
        freed += saved_in_layer(stage, layer, rows, settings)
        head = 0  # the gradients of the layer are reduced next
    return moments


def _moments_of_embedding(stage: Stage, rows: Rows, settings: MemorySettings) -> list[tuple[int, int, int]]:
    """The same in the forward and in the backward of the embedding, where FSDP2 holds gathered bytes twice.

    An all-gather writes into a buffer that is copied into the parameters, and stays until the next all-gather. The
    gradient is copied into the input of a reduce-scatter. Under tp it is that of the whole embedding.
    """
    if not stage.is_first:
        return []
    precision, shape = settings.precision, stage.shape
    is_sharded = stage.dims.fsdp_size > 1
    root, numel = _outer_gathered(stage, settings), stage.outer_numel("embedding", "tied")
    in_flight = round((_micro_batches_in_flight(stage, settings) - 1) * saved_activations(stage, rows, settings))
    around = in_flight + _tables(stage, rows, settings) + _pipeline_buffers(stage, rows, settings)
    kept = 0 if is_sharded else _kept_layers(stage, settings)
    entering = precision.stored * stage.outer_numel("root", "tied", "embedding")
    moments = [(2 * entering + kept, around, 0)]
    if stage.trains_embedding:
        hidden = precision.stored * rows.padded_to(stage.dims.cp) // stage.dims.cp * shape.hidden
        own = next(p.numel for p in stage.outer if p.name == shape.embedding)
        gradient = precision.stored * (shape.vocab * shape.hidden if stage.dims.tp > 1 else own if is_sharded else 0)
        if stage.dims.tp > 1 and stage.dims.pp > 1:
            # as counted in simulations: its own part, copied while the whole still exists
            gradient += precision.stored * own
        reducing = (precision.reduced or precision.stored) * numel
        first_layer = precision.stored * stage.layer(stage.layers[0]).trained_numel if is_sharded else 0
        moments.append((root + kept + gradient + max(reducing, first_layer), around + 2 * hidden, 0))
    return moments


def _micro_batches_in_flight(stage: Stage, settings: MemorySettings) -> float:
    """Micro-batches whose activations a stage holds in 1F1B; if interleaved, chunks in flight over those of a stage."""
    pp, num_chunks = stage.dims.pp, len(stage.chunks)
    if pp == 1:
        return 1
    scheduled = max(settings.micro_batches, pp)
    if num_chunks == 1:
        # the rows of dummy batches take next to nothing; gradients of weights are computed later with zero bubble
        return min(pp if settings.has_zero_bubble else pp - stage.index, settings.micro_batches)
    per_round = scheduled // max(1, scheduled // pp)
    warm_up = (num_chunks - 1) * per_round + 2 * (pp - 1 - stage.index)
    return min(warm_up + 1, scheduled * num_chunks) / num_chunks


def _pipeline_buffers(stage: Stage, rows: Rows, settings: MemorySettings) -> int:
    """Hidden states that a stage holds beside those that autograd saves."""
    if stage.dims.pp == 1:
        return 0
    itemsize = settings.precision.sent or settings.precision.stored
    hidden = itemsize * rows.padded_to(stage.dims.cp) // stage.dims.cp * stage.shape.hidden
    hidden //= row_shards(stage, settings)
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


def _tables(stage: Stage, rows: Rows, settings: MemorySettings) -> int:
    """Rotary embeddings."""
    return 2 * settings.precision.stored * local_rows(stage, 0, rows, settings)[0] * stage.shape.head_dim


def _final_norm(stage: Stage, rows: Rows, settings: MemorySettings) -> int:
    last = local_rows(stage, stage.shape.num_layers - 1, rows, settings)[1]
    held = 3 * settings.precision.stored * last * stage.shape.hidden // row_shards(stage, settings)
    return held if stage.is_last else 0


def _temporaries(stage: Stage, layer: int, rows: Rows, settings: MemorySettings) -> tuple[int, int]:
    """Gradients that live in the backward of the MLP and of the attention of a layer, with the residual stream's."""
    shape, tp, compute = stage.shape, stage.dims.tp, settings.precision.compute
    total, kept = local_rows(stage, layer, rows, settings)
    width = shape.intermediate // tp * (shape.experts_per_token if shape.experts > 1 else 1)
    # of the product, gate and up; the product itself is freed first
    saves_product = "mlp.down_proj" in stage.layer(layer).trained_modules
    mlp = compute * (2 if saves_product else 3) * kept * width
    itemsize = compute if settings.on_gpu else FP32  # the kernel of the CPU computes in fp32
    queries, keys = shape.heads * shape.head_dim // tp, shape.kv_heads * shape.head_dim // tp
    copies = 2 if itemsize != compute else 1
    attention = itemsize * copies * (2 * kept * queries + 2 * total * keys)
    residual = 2 * settings.precision.stored * total * shape.hidden // row_shards(stage, settings)
    if settings.splits_rows:
        residual += 2 * compute * total * shape.hidden  # what is gathered for a matrix, and the gradient to be reduced
    return mlp + residual, attention + residual


def _lm_head_forward(stage: Stage, rows: Rows, settings: MemorySettings) -> int:
    """Scored rows, their rounded copy, and slices of logits and of the rounded weight."""
    scored, width = rows.scored // stage.dims.cp, stage.shape.hidden
    columns, existing = _columns_of_logits(stage, scored, settings)
    rounded = _rounded(settings) * (scored + columns) * width
    return settings.precision.stored * scored * width + FP32 * scored * existing + rounded


def _lm_head(stage: Stage, rows: Rows, settings: MemorySettings) -> int:
    """Scored rows, their gradient, slices of logits, and the gradient of the weight.

    One slice of logits is computed while the one before it still exists; that of the weight's gradient, beside the
    rounded factors of the product.
    """
    scored, width = rows.scored // stage.dims.cp, stage.shape.hidden
    columns, existing = _columns_of_logits(stage, scored, settings)
    slices = FP32 * scored * existing
    if _trained_head(stage):
        slices = max(slices, (FP32 + _rounded(settings)) * columns * (scored + width))
    return (settings.precision.stored + 3 * FP32) * scored * width + slices + _head_gradient(stage, settings)


def _columns_of_logits(stage: Stage, scored: int, settings: MemorySettings) -> tuple[int, int]:
    """Columns of a slice of logits, and of those that exist at once."""
    vocab = next(p.shape[0] for p in stage.outer if p.name == stage.shape.head)
    columns = min(slice_width(vocab, scored, on_gpu=settings.on_gpu), vocab)
    return columns, min(2 * columns, vocab)


def _rounded(settings: MemorySettings) -> int:
    """Bytes of an element of a rounded factor; 0 if factors are used as they are."""
    precision = settings.precision
    return precision.compute if settings.on_gpu and precision.compute != precision.stored else 0


def _head_gradient(stage: Stage, settings: MemorySettings) -> int:
    """The gradient of this process's part of the head before it is added to earlier ones, or reduced."""
    return settings.precision.stored * _trained_head(stage)


def _reduced_head(stage: Stage, settings: MemorySettings) -> int:
    """The input of the reduce-scatter of the head's gradient, which stays until the next one; 0 without FSDP2."""
    is_sharded = stage.dims.fsdp_size > 1 and stage.outer_numel("head") > 0
    precision = settings.precision
    return (precision.reduced or precision.stored) * _trained_head(stage) if is_sharded else 0


def _trained_head(stage: Stage) -> int:
    return sum(p.numel for p in stage.outer if p.name == stage.shape.head and p.is_trained and stage.is_last)


def _outer_gathered(stage: Stage, settings: MemorySettings) -> int:
    """Parameters outside of layers that are gathered through the forward and the backward."""
    kept = ("embedding", "head") if settings.zero_stage == 1 else ()
    return settings.precision.stored * stage.outer_numel("root", "tied", *kept)


def _kept_layers(stage: Stage, settings: MemorySettings) -> int:
    """Matrices in the compute precision that live from the forward to the backward."""
    precision = settings.precision
    is_sharded = stage.dims.fsdp_size > 1
    if is_sharded and settings.zero_stage == 3:
        return 0
    if not is_sharded and precision.compute == precision.stored:
        return 0  # the weights themselves
    if not is_sharded and settings.recompute != "off":
        copied = (stage.layer(layer).numel - stage.layer(layer).narrow_numel for layer, _ in stage.layer_counts)
        return precision.compute * max(copied)
    numel = sum(count * stage.layer(layer).numel for layer, count in stage.layer_counts)
    if not is_sharded:
        numel -= sum(count * stage.layer(layer).narrow_numel for layer, count in stage.layer_counts)
        # autocast keeps one copy of a trained matrix for a step, and makes one of a frozen matrix in every forward,
        # unless it is stored in the compute precision
        trained = sum(count * stage.layer(layer).trained_numel for layer, count in stage.layer_counts)
        numel = trained + round(_micro_batches_in_flight(stage, settings) * (numel - trained))
    return precision.compute * numel


def _gathered_in_backward(stage: Stage, layer: int, settings: MemorySettings) -> int:
    """The root, this layer, the next one, which FSDP2 prefetches, and the gradients of this layer and their sum."""
    kept, precision = _kept_layers(stage, settings), settings.precision
    if stage.dims.fsdp_size == 1:
        return kept
    gradients = (precision.stored + precision.compute) * stage.layer(layer).trained_numel
    own = precision.compute * stage.layer(layer).numel
    prefetched = 0 if layer == stage.layers[0] else own
    return _outer_gathered(stage, settings) + (kept or own + prefetched) + gradients
