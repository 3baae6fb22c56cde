"""Memory of a training process by closed form: what it holds between steps, and the peak of a step.

One page for the token budget of a run and for `thresher plan`. What it does not state, `thresher plan --simulate`
counts: peaks are within 15 % of the counted ones, most of them above (tests/plan/test_simulation.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from thresher.config.roles import TrainingArgs
from thresher.distributed.mesh import ParallelDims
from thresher.engines.native.declaration import FSDP2Settings
from thresher.engines.native.optimizers.registry import held_bytes
from thresher.engines.native.parallelize import partition_layers
from thresher.errors import UserError
from thresher.models.experts import is_stacked
from thresher.models.lm_head import slice_width
from thresher.models.loading.quantization import quantized_modules
from thresher.models.loading.trained import widest_dtype
from thresher.models.logps import base_model
from thresher.models.optimizations.llama_layers import is_llama_like
from thresher.models.optimizations.recompute import Recompute
from thresher.models.pipeline_chunk import decoder_of, head_of
from thresher.models.router import num_experts

# share of a GPU for its context, fragmentation and the workspaces of kernels
RESERVED = 0.08
# rows of the process whose experts get most, in those of a balanced one: assumed
IMBALANCE = 1.2
_FP32 = 4
_WITHOUT_ATTENTION = {"linear_attention", "conv", "mlp", "moe"}


@dataclass(frozen=True)
class Elements:
    """Numbers of elements of some parameters."""

    total: float = 0
    trained: float = 0
    narrow: float = 0  # frozen, and stored in the compute precision
    packed: float = 0  # quantized

    def __add__(self, other: Elements) -> Elements:
        return Elements(*(one + two for one, two in zip(vars(self).values(), vars(other).values(), strict=True)))

    def __sub__(self, other: Elements) -> Elements:
        return self + other * -1

    def __mul__(self, share: float) -> Elements:
        return Elements(*(share * each for each in vars(self).values()))


@dataclass(frozen=True)
class ModelSize:
    """Sizes of a model, adapters included."""

    matrices: Elements  # of all layers
    experts: Elements  # of them, those of stacked experts
    active: Elements  # of them, what a token multiplies with: of experts, the chosen ones
    embedding: Elements
    head: Elements  # equal to the embedding if tied
    others: Elements  # norms and biases
    tied: bool
    num_layers: int
    hidden: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int  # columns of the MLP that a token computes
    experts_per_token: int  # 0 in a dense model
    expert_layers: int
    adapts_experts: bool  # each forward adds the adapters to the stacked matrices
    adapted_inputs: int  # adapters of a layer that read a norm
    dora_columns: int  # outputs of a layer's matrices whose lengths are trained
    is_llama_like: bool  # the memory-efficient layers support it
    attention_share: float  # of the layers; the others carry state, or are MLPs
    packed_bytes: float  # of a quantized element
    constant_bytes: float  # of a quantized element, in constants that are not sharded
    largest_packed: int  # elements of the largest quantized matrix

    @classmethod
    def of(cls, model: nn.Module) -> ModelSize:
        """Read the sizes of a model on the meta device."""
        base = base_model(model)
        config = base.config.get_text_config()
        layers = getattr(decoder_of(base), "layers", None)
        if not layers:
            family = base.config.model_type
            raise UserError(f"its memory is not known: the model family {family} has no list of decoder layers")
        stored, experts = widest_dtype(base), num_experts(config)
        heads, chosen = int(config.num_attention_heads), int(getattr(config, "num_experts_per_tok", None) or 1)
        names = ("moe_intermediate_size", "intermediate_size") if experts else ("intermediate_size",)
        width = next(filter(None, (getattr(config, name, None) for name in names)), 4 * config.hidden_size)
        embedding, head = (_weight(each) for each in (base.get_input_embeddings(), head_of(base)))
        matrices = [p for layer in layers for p in layer.parameters() if p.ndim > 1]
        known = {id(p) for p in (*matrices, embedding, head)}
        kinds = getattr(config, "layer_types", None) or ()
        quantized = {id(each.weight): each for each in quantized_modules(base).values()}
        num_packed = max(1, sum(each.num_elements for each in quantized.values()))
        adapted = [name for name, _ in layers[0].named_modules() if name.endswith("_proj.lora_A")]

        def count(parameters: Iterable[nn.Parameter], experts_share: float = 1.0) -> Elements:
            found = Elements()
            for p in parameters:
                if (module := quantized.get(id(p))) is not None:
                    found += Elements(module.num_elements, packed=module.num_elements)
                    continue
                numel = p.numel() * (experts_share if is_stacked(p) else 1.0)
                found += Elements(numel, numel * p.requires_grad, numel * (p.dtype != stored))
            return found

        return cls(
            matrices=count(matrices),
            experts=count(p for p in matrices if is_stacked(p)),
            active=count(matrices, chosen / experts if experts else 1.0),
            embedding=count([embedding]),
            head=count([head]),
            others=count(p for p in base.parameters() if id(p) not in known),
            tied=embedding is head,
            num_layers=len(layers),
            hidden=int(config.hidden_size),
            vocab=head.shape[0],
            heads=heads,
            kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
            head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
            width=int(width) * (chosen if experts else 1),
            experts_per_token=chosen if experts else 0,
            expert_layers=sum(any(is_stacked(p) for p in layer.parameters()) for layer in layers),
            adapts_experts=any(
                name.endswith("experts.lora_A") for layer in layers for name, _ in layer.named_modules()
            ),
            adapted_inputs=sum(not name.startswith(("self_attn.o_proj", "mlp.down_proj")) for name in adapted),
            dora_columns=sum(p.numel() for name, p in layers[0].named_parameters() if "lora_magnitude" in name),
            is_llama_like=is_llama_like(layers[0]),
            attention_share=1 - sum(kind in _WITHOUT_ATTENTION for kind in kinds) / max(1, len(kinds)),
            packed_bytes=sum(each.weight.nbytes for each in quantized.values()) / num_packed,
            constant_bytes=sum(b.nbytes for each in quantized.values() for b in each.buffers()) / num_packed,
            largest_packed=max((each.num_elements for each in quantized.values()), default=0),
        )

    @property
    def experts_share(self) -> float:
        """Of what a token multiplies with."""
        return 1 - (self.matrices - self.experts).total / self.active.total

    @property
    def has_narrow_experts(self) -> bool:
        """Whether their last product has few FLOPs per element of its result."""
        return 0 < 2 * self.width < self.hidden * self.experts_per_token

    @property
    def parameters(self) -> Elements:
        return self.matrices + self.embedding + self.others + (Elements() if self.tied else self.head)


def _weight(module: Any) -> nn.Parameter:
    """The matrix of an embedding or a head; PEFT wraps one that has an adapter."""
    weight: nn.Parameter = getattr(module, "base_layer", module).weight
    return weight


@dataclass(frozen=True)
class Process:
    """A process of a pipeline stage, and the settings that its memory depends on."""

    size: ModelSize
    dims: ParallelDims
    settings: FSDP2Settings
    training: TrainingArgs
    stored: int  # bytes of an element of the weights and of the residual stream
    compute: int  # bytes of an element of products
    packs_rows: bool  # the layout packs rows; a padded one needs more per row
    reference: Literal["adapter", "copy"] | None = None  # how these processes score it in each step
    stage: int = 0
    imbalance: float = IMBALANCE  # of expert parallelism

    @property
    def recompute(self) -> Recompute:
        return self.training.gradient_checkpointing

    @property
    def num_layers(self) -> int:
        chunks = partition_layers(self.size.num_layers, self.dims.pp * self.settings.virtual_pp_size)
        return sum(map(len, chunks[self.stage :: self.dims.pp]))

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.dims.pp - 1

    @property
    def matrices(self) -> Elements:
        """Of its layers, before FSDP2 shards them."""
        dense = self.size.matrices - self.size.experts
        return dense * (self.num_layers / self.size.num_layers / self.dims.tp) + self.experts

    @property
    def experts(self) -> Elements:
        """Of its layers, before FSDP2 shards them."""
        return self.size.experts * (self.num_layers / self.size.num_layers / self.dims.ep)

    @property
    def shards(self) -> Elements:
        """What it holds between steps."""
        dense = self.elements - self.experts
        return dense * (1 / self.dims.fsdp_size) + self.experts * (1 / self.dims.ep_shard)

    @property
    def expert_rows(self) -> float:
        """Rows of experts for each row of the process."""
        return self.size.experts_per_token * self._spread

    @property
    def width(self) -> float:
        """Columns of the MLP that it computes for each of its rows."""
        return self.size.width * self._spread

    @property
    def _spread(self) -> float:
        return (self.imbalance if self.dims.ep > 1 else 1.0) / self.dims.tp

    @property
    def embedding(self) -> Elements:
        return self.size.embedding * (self.is_first / self.dims.tp)

    @property
    def head(self) -> Elements:
        return self.size.head * (self.is_last / self.dims.tp)

    @property
    def elements(self) -> Elements:
        """All elements, before FSDP2 shards them."""
        one_matrix = self.size.tied and self.dims.pp == 1
        outer = self.embedding if one_matrix else self.embedding + self.head
        return self.matrices + outer + self.size.others * (self.num_layers / self.size.num_layers)

    def held_bytes(self, elements: Elements, itemsize: int) -> float:
        """Bytes of elements in a precision, without the constants of those that are quantized."""
        return itemsize * (elements.total - elements.packed) + self.size.packed_bytes * elements.packed

    @property
    def row_columns(self) -> float:
        """Columns of the residual stream; sequence parallelism splits its rows, which costs as much as columns."""
        return self.size.hidden / (self.dims.tp if self.settings.sequence_parallel else 1)

    @property
    def query_columns(self) -> float:
        return self.size.heads * self.size.head_dim / self.dims.tp

    @property
    def key_columns(self) -> float:
        """Of keys, and of values; padded rows repeat them for each query head."""
        heads = self.size.kv_heads if self.packs_rows else self.size.heads
        return heads * self.size.head_dim / self.dims.tp

    @property
    def slowest(self) -> float:
        """Time of the process whose experts get most rows, in that of a balanced one."""
        return 1 + (self.imbalance - 1) * self.size.experts_share if self.dims.ep > 1 else 1.0

    def in_flight(self, micro_batches: int) -> float:
        """Micro-batches whose activations it holds at once."""
        pp, chunks = self.dims.pp, self.settings.virtual_pp_size
        if pp == 1:
            return 1
        if chunks == 1:
            return min(pp if self.settings.pp_schedule == "zero_bubble" else pp - self.stage, micro_batches)
        scheduled = max(micro_batches, pp)
        warm_up = (chunks - 1) * pp + 2 * (pp - 1 - self.stage)
        return min(warm_up + 1, scheduled * chunks) / chunks


@dataclass(frozen=True)
class Memory:
    """Bytes by category, at the moment of the peak."""

    weights: float = 0
    gradients: float = 0
    optimizer: float = 0
    reference: float = 0
    gather_buffers: float = 0
    activations: float = 0
    lm_head: float = 0

    @property
    def total(self) -> float:
        return sum(self.by_category.values())

    @property
    def by_category(self) -> dict[str, float]:
        return dict(vars(self))


def held_memory(process: Process) -> Memory:
    """Shards of weights, gradients and optimizer state; offloaded ones are in host memory."""
    if process.settings.cpu_offload:
        return Memory()
    elements, stored = process.shards, process.stored
    dense = process.held_bytes(elements, stored) + process.size.constant_bytes * process.elements.packed
    weights = dense - (stored - process.compute) * elements.narrow
    reference = dense if process.reference == "copy" else 0
    state = held_bytes(process.training, stored) * elements.trained
    return Memory(weights, stored * elements.trained, state, reference)


def peak_memory(process: Process, rows: int, scored: int, micro_batches: int) -> Memory:
    """The peak of a step of several micro-batches, the largest with these rows and scored rows."""
    held, in_flight = held_memory(process), process.in_flight(micro_batches)
    gradients = held.gradients
    if process.settings.zero_stage == 1 and process.dims.uses_fsdp and micro_batches > 1:
        gradients = process.stored * process.elements.trained  # whole ones, added up before they are reduced
    if (process.dims.tp > 1 and gradients > held.gradients) or not process.dims.uses_fsdp:
        # the embedding's gradient is a partial sum of the whole matrix until the end of a step
        gradients += process.stored * (process.dims.tp - 1) * process.embedding.trained
    # gradients exist from the first backward on, when one micro-batch less is in flight
    cases = [(in_flight, gradients)] if micro_batches > in_flight else [(in_flight, 0.0), (in_flight - 1, gradients)]
    peaks = [
        Memory(held.weights, gradient, held.optimizer, held.reference, *moment)
        for number, gradient in cases
        for moment in _moments(process, rows, scored, number, micro_batches)
    ]
    return max(peaks, key=lambda memory: memory.total)


def _moments(
    process: Process, rows: int, scored: int, in_flight: float, micro_batches: int
) -> Iterator[tuple[float, float, float]]:
    """(gather buffers, activations, LM head) in the backward of a layer, in the LM head, and in the embedding."""
    size, dims, stored, compute = process.size, process.dims, process.stored, process.compute
    rows, scored = -(-rows // dims.cp), -(-scored // dims.cp)
    kept_layers, of_layer = _gathered(process)
    hidden = stored * rows * process.row_columns
    whole, kept = rows * _saved_per_row(process, "off"), rows * _saved_per_row(process, process.recompute)
    saved = in_flight * process.num_layers * kept + _pipeline_buffers(process, hidden, in_flight, micro_batches)
    saved += 2 * stored * rows * size.head_dim  # rotary embeddings
    if size.adapts_experts:
        saved += compute * process.experts.total * (in_flight if process.recompute == "off" else 1 / process.num_layers)
    # gradients of gate, up and their product, and of the residual stream; the layer's activations, computed again
    working = 2 * compute * rows * process.width + 2 * hidden + whole - kept
    if process.settings.sequence_parallel:
        working += 2 * compute * rows * size.hidden
    working += compute * size.largest_packed  # dequantized for one product
    yield kept_layers + of_layer, saved + working, 0.0
    is_sharded = dims.uses_fsdp
    if process.is_last and in_flight >= 1:
        vocab, head = max(1, size.vocab // dims.tp), process.head
        columns = slice_width(vocab, max(1, scored), on_gpu=True)
        logits, scored_rows = _FP32 * scored * min(vocab, 2 * columns), scored * size.hidden
        buffer = stored * head.total if is_sharded and not size.tied else 0.0
        gathered = 0.0 if process.settings.zero_stage == 1 else buffer
        # in the forward with the buffer of the all-gather, in the backward with gradients
        rounded = compute * (scored + columns) * size.hidden
        yield kept_layers, saved + 3 * hidden, gathered + buffer + stored * scored_rows + rounded + logits
        if head.trained:
            logits = max(logits, (_FP32 + compute) * columns * (scored + size.hidden))
        gradients = 3 * _FP32 * scored_rows + stored * head.trained
        yield kept_layers, saved + 3 * hidden, gathered + stored * scored_rows + gradients + logits
    if process.is_first and is_sharded:
        # gathered twice like the head; its gradient, of the whole matrix under tp, and a copy to reduce
        copies = 1 + dims.tp + (dims.tp > 1 and dims.pp > 1)
        gathered = stored * max(2 * process.embedding.total, copies * process.embedding.trained)
        yield kept_layers + gathered, max(0.0, saved - process.num_layers * kept) + 2 * hidden, 0.0


def _gathered(process: Process) -> tuple[float, float]:
    """Bytes of weights in the compute precision that stay from forward to backward, and of a layer's backward."""
    compute, matrices = process.compute, process.matrices
    layer = matrices * (1 / process.num_layers)
    if process.dims.uses_fsdp:
        gradients = (process.stored + compute) * layer.trained
        # a tied matrix stays gathered, and with ZeRO-1 everything does
        outer = process.stored * (process.head.total if process.size.tied else 0)
        if process.settings.zero_stage == 3:
            return outer, 2 * process.held_bytes(layer, compute) + gradients  # the next layer is gathered ahead
        if process.settings.zero_stage == 1:
            outer = process.stored * (process.elements.total - matrices.total)
        return process.held_bytes(matrices, compute) + outer, gradients
    if compute == process.stored:
        return 0.0, 0.0
    # autocast keeps copies of all matrices, or of a layer if it is computed again
    copies = layer if process.recompute != "off" else matrices
    return compute * (copies.total - copies.narrow - copies.packed), 0.0


def _saved_per_row(process: Process, recompute: Recompute) -> float:
    """Bytes that a layer keeps of a row for the backward, its input included."""
    size, stored, compute, tp = process.size, process.stored, process.compute, process.dims.tp
    width, queries, keys = process.width, process.query_columns, process.key_columns
    kept_input = stored * process.row_columns
    if recompute != "off":
        kept_input = 0 if process.training.activation_offload else kept_input
    if recompute == "full":
        return kept_input
    attention = compute * (2 * queries + 2 * keys) + _FP32 * size.heads / tp
    if recompute == "selective":
        exchanged = 2 * queries + 2 * keys if process.dims.cp > 1 else 0
        outputs = (2 if size.adapted_inputs else 1) * process.row_columns
        return kept_input + attention + compute * (exchanged + outputs + 2 * width)
    is_lean = process.packs_rows and size.is_llama_like
    # inputs of the matrices that read a norm: one per norm, or one per matrix; PEFT casts one per adapter
    inputs = 2.0 if is_lean else 5.0
    if size.adapted_inputs and not process.dims.uses_fsdp and compute != stored:
        inputs = size.adapted_inputs
    norms = stored * process.row_columns + compute * inputs * size.hidden
    if not is_lean and size.others.trained:
        norms += 2 * stored * size.hidden  # their normalized inputs
    # gate, up and their product; the activation unless it is computed again, and copies of the input of each expert
    mlp = compute * ((3 if is_lean else 4) * width + 3 * size.hidden * process.expert_rows)
    # outputs of a matrix and of its adapter, both multiplied with trained lengths
    dora = 2 * compute * size.dora_columns
    return kept_input + attention + norms + mlp + dora + (compute * queries if process.dims.cp > 1 else 0)


def _pipeline_buffers(process: Process, hidden: float, in_flight: float, micro_batches: int) -> float:
    """Hidden states that a stage receives and sends. hidden: bytes of one."""
    if process.dims.pp == 1:
        return 0.0
    if process.settings.pp_dtype == "bf16":
        hidden *= 2 / process.stored
    if process.settings.virtual_pp_size > 1:  # torch's schedule waits for all sends at its end
        return 2 * process.settings.virtual_pp_size * max(micro_batches, process.dims.pp) * hidden
    return hidden * (micro_batches if process.is_last else in_flight + 2)
