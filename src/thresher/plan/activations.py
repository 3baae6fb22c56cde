"""Bytes that the layers of a stage keep from the forward of a micro-batch to its backward."""

from __future__ import annotations

from dataclasses import dataclass, replace

from thresher.models.optimizations.recompute import Recompute
from thresher.plan.model import Stage
from thresher.plan.traffic import Precision
from thresher.plan.workload import Rows

# bytes per element of sums in products and of the LM head
FP32 = 4
_READERS_OF_NORMS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


@dataclass(frozen=True)
class MemorySettings:
    """What the memory of a process depends on, beside the mesh.

    packs_rows: the memory-efficient layers apply. splits_rows: sequence parallelism. holds_reference: a frozen copy of
    the model is in the same process. offloads_inputs: those of recomputed layers are in host memory. micro_batches: of
    a step; gradients exist during the forward of the second.
    """

    precision: Precision
    packs_rows: bool
    zero_stage: int = 3
    recompute: Recompute = "off"
    offloads: bool = False
    offloads_inputs: bool = False
    holds_reference: bool = False
    micro_batches: int = 2
    on_gpu: bool = True
    splits_rows: bool = False
    has_zero_bubble: bool = False


def saved_activations(stage: Stage, rows: Rows, settings: MemorySettings) -> int:
    """Bytes that autograd saves in all layers of a stage for one micro-batch."""
    return sum(count * saved_in_layer(stage, layer, rows, settings) for layer, count in stage.layer_counts)


def recomputed_in_layer(stage: Stage, layer: int, rows: Rows, settings: MemorySettings) -> int:
    """Bytes that a layer holds in its backward beyond what it kept; together, as many as without recomputation."""
    whole = saved_in_layer(stage, layer, rows, replace(settings, recompute="off"))
    return whole - saved_in_layer(stage, layer, rows, settings)


def saved_in_layer(stage: Stage, layer: int, rows: Rows, settings: MemorySettings) -> int:
    """Bytes that are saved in a layer for the backward, its input included."""
    shape, tp = stage.shape, stage.dims.tp
    stored, compute = settings.precision.stored, settings.precision.compute
    total, kept = local_rows(stage, layer, rows, settings)
    hidden = stored * total * shape.hidden // row_shards(stage, settings)
    if settings.recompute != "off":
        results = _kept_in_layer(stage, layer, total, kept, settings) if settings.recompute == "selective" else 0
        return results + (0 if settings.offloads_inputs else hidden)
    is_lean = uses_lean_layers(stage, settings)
    queries, keys = shape.heads * shape.head_dim // tp, shape.kv_heads * shape.head_dim // tp
    mask = 0
    if not settings.packs_rows:
        keys = queries  # keys and values are repeated for each query head
        mask = compute * total * total // max(1, 2 * rows.pairs)  # of every padded sequence, as numbers
    # queries, keys, values, output and log-sum-exp of attention; o_proj reads the output, or the exchanged one
    attention = compute * (2 * kept * queries + 2 * total * keys) + FP32 * kept * shape.heads // tp + mask
    if stage.dims.cp > 1 and "self_attn.o_proj" in stage.layer(layer).trained_modules:
        attention += compute * kept * queries
    norms = hidden  # the input of the layer
    norms += (stored * kept * shape.hidden + FP32 * (total + kept)) // row_shards(stage, settings)
    norms += _norm_outputs(stage, layer, total, kept, settings, is_lean=is_lean)
    return attention + norms + saved_in_mlp(stage, layer, kept, settings, is_lean=is_lean)


def _kept_in_layer(stage: Stage, layer: int, total: int, kept: int, settings: MemorySettings) -> int:
    """Results that selective recomputation keeps (models/optimizations/recompute.py)."""
    shape, tp, compute = stage.shape, stage.dims.tp, settings.precision.compute
    queries, keys = shape.heads * shape.head_dim // tp, shape.kv_heads * shape.head_dim // tp
    projected = kept * queries + 2 * total * keys
    if stage.dims.cp > 1:
        repeats = max(1, stage.dims.cp * tp // shape.kv_heads)
        # exchanged before and after attention
        projected += 2 * kept * queries + 2 * total * keys * repeats
    output = kept * shape.hidden // row_shards(stage, settings)
    ends_with_product = shape.is_llama_like and "mlp.down_proj" not in stage.layer(layer).adapted_modules
    attention = compute * (projected + kept * queries) + FP32 * kept * shape.heads // tp
    width = shape.intermediate // tp * (shape.experts_per_token if shape.experts > 1 else 1)
    return attention + compute * (output * (1 if ends_with_product else 2) + 2 * kept * width)


def local_rows(stage: Stage, layer: int, rows: Rows, settings: MemorySettings) -> tuple[int, int]:
    """Rows of keys and values, and of everything else, in a layer."""
    total = rows.padded_to(stage.dims.cp) // stage.dims.cp
    is_last = layer == stage.shape.num_layers - 1
    skips = settings.packs_rows and stage.shape.is_llama_like and stage.dims.cp == 1 and is_last
    return total, rows.kept if skips and not settings.splits_rows else total


def row_shards(stage: Stage, settings: MemorySettings) -> int:
    """Processes that split the rows between layers."""
    return stage.dims.tp if settings.splits_rows else 1


def uses_lean_layers(stage: Stage, settings: MemorySettings) -> bool:
    """Whether the memory-efficient layers apply."""
    return settings.packs_rows and stage.shape.is_llama_like


def _norm_outputs(stage: Stage, layer: int, total: int, kept: int, settings: MemorySettings, *, is_lean: bool) -> int:
    """Outputs of the two norms, saved by the matrices that read them."""
    stored, compute, width = settings.precision.stored, settings.precision.compute, stage.shape.hidden
    trained = stage.layer(layer).trained_modules
    attention_reads, mlp_reads = "self_attn" in trained, "mlp" in trained
    adapted = stage.layer(layer).adapted_modules
    if stored == compute:
        saved = compute * width * (total * attention_reads + kept * mlp_reads)
    elif adapted and stage.dims.fsdp_size == 1:
        # PEFT casts the input of each adapter to its precision, and autocast casts it back; FSDP2 gathers adapters in
        # the compute precision
        readers = sum(name.endswith(_READERS_OF_NORMS) for name in adapted)
        queries = stage.shape.heads * stage.shape.head_dim // stage.dims.tp
        saved = compute * kept * (readers * width + queries * ("self_attn.o_proj" in trained))
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


def saved_in_mlp(stage: Stage, layer: int, kept: int, settings: MemorySettings, *, is_lean: bool) -> int:
    shape, compute = stage.shape, settings.precision.compute
    width = shape.intermediate // stage.dims.tp
    if shape.experts > 1:
        # rows are copied per chosen expert; gate and up, activation, product and output of each
        per_expert = 4 * width + 2 * shape.hidden
        return compute * kept * shape.experts_per_token * per_expert + FP32 * kept * shape.experts
    trains_down = "mlp.down_proj" in stage.layer(layer).trained_modules
    # gate and up, their product as the input of down_proj, and the activation unless it is recomputed
    return compute * kept * width * (2 + trains_down + (not is_lean))
