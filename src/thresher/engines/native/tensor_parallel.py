"""The tp dimension: shards the matrices of every layer by transformers' tensor-parallel plan of the architecture.

The LM head is sharded over the vocabulary and scored shard by shard (see models/lm_head.py).

With sequence parallelism each of the processes also computes a part of the rows outside of these matrices. Residual
stream and norms of a Llama-like layer are on 1/tp of the rows. A norm's output is gathered once for all matrices that
read it, and the partial outputs of o_proj and down_proj are reduced to the rows of each process. Instead of an
all-reduce there are an all-gather and a reduce-scatter, with the same bytes on the wire:

    forward   norm -> all-gather -> q, k, v or gate, up -> ... -> o or down -> reduce-scatter
    backward  norm <- reduce-scatter <- q, k, v or gate, up <- ... <- o or down <- all-gather

It applies while the model attends over packed rows; its original forward, which the start-up check runs, has all rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import PreTrainedModel
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES
from transformers.distributed.tensor_parallel import (
    RowwiseParallel,
    apply_tensor_parallelism,
    replace_layer_number_by_wildcard,
)

from thresher.distributed.tensors import own_part
from thresher.errors import UserError
from thresher.models.attention.interface import PAIR_ATTENTION
from thresher.models.optimizations.llama_layers import is_llama_like
from thresher.models.pipeline_chunk import IdentityModule, decoder_of, local_layers

# transformers would all-reduce these gradients after every backward, adding earlier micro-batches again
_PARTIAL_GRADIENT = "replicated_with_grad_allreduce"
_ROWWISE = "thresher_rowwise_to_rows"
_ALL_ROWS = (Replicate(),)


def apply_tensor_parallel(
    model: PreTrainedModel, mesh: DeviceMesh, *, splits_rows: bool = False, splits_experts: bool = True
) -> frozenset[str]:
    """Shard a model over a one-dimensional mesh; return the names of replicated parameters with partial gradients.

    Those are norms within heads (Qwen 3): each process has the gradient of its heads, to be summed once per step. And
    with splits_rows (sequence parallelism) all norms, as each process has the gradient of its rows.
    """
    if not model.tp_plan:
        raise UserError(
            f"tp_size is {mesh.size()}, but transformers has no tensor-parallel plan for the architecture "
            f"{model.config.model_type}; set tp_size to 1"
        )
    # replicated modules whose gradients are partial sums
    partial = {name for name, style in model.tp_plan.items() if style == _PARTIAL_GRADIENT}
    on_other_stages = {name for name, module in model.named_modules() if isinstance(module, IdentityModule)}
    plan = {name: style for name, style in model.tp_plan.items() if name not in partial}
    if not splits_experts:
        plan = {name: style for name, style in plan.items() if ".experts." not in f"{name}."}
    styles = {name: style for name, style in _with_adapters(model, plan).items() if name not in on_other_stages}
    norms: frozenset[str] = frozenset()
    if splits_rows:
        norms = _split_rows(model, mesh)
        styles = {name: _ROWWISE if style == "rowwise" else style for name, style in styles.items()}
    apply_tensor_parallelism(model, mesh, styles)
    modules = {name: name.rpartition(".")[0] for name, _ in model.named_parameters()}
    return frozenset(
        name
        for name, module in modules.items()
        if module in norms or replace_layer_number_by_wildcard(module) in partial
    )


def _with_adapters(model: nn.Module, plan: dict[str, str]) -> dict[str, str]:
    """Extend a plan to LoRA: shard lora_B of a column-wise matrix, lora_A of a row-wise one; replicate the other."""
    wrapped = {
        replace_layer_number_by_wildcard(name) for name, module in model.named_modules() if hasattr(module, "lora_A")
    }
    extended = {}
    for name, style in plan.items():
        if name not in wrapped:
            extended[name] = style
            continue
        sharded = "lora_B" if style.startswith("colwise") else "lora_A"
        extended |= {f"{name}.base_layer": style, f"{name}.{sharded}.default": style}
    return extended


@dataclass(frozen=True)
class _SequenceParallel:
    """The rows of this process: [1, rows, hidden] -> [1, rows / tp, hidden], and back."""

    mesh: DeviceMesh
    model: PreTrainedModel

    @property
    def is_active(self) -> bool:
        return bool(self.model.config._attn_implementation == PAIR_ATTENTION)

    def split(self, rows: Tensor) -> Tensor:
        """Take this process's rows; the backward gathers."""
        return own_part(rows, self.mesh, 1)

    def gather(self, rows: Tensor) -> Tensor:
        """Gather all rows, for computations that every process repeats; the backward takes this process's rows."""
        gathered: Tensor = self.gather_for_matrices(rows).to_local(grad_placements=_ALL_ROWS)
        return gathered

    def gather_for_matrices(self, rows: Tensor) -> DTensor:
        """Gather all rows, for matrices sharded by columns; the backward sums what each process has of the gradient."""
        # along the first dimension: a reduce-scatter along a different one copies its input
        own = DTensor.from_local(rows.squeeze(0), self.mesh, (Shard(0),), run_check=False)
        gathered: DTensor = own.redistribute(placements=_ALL_ROWS).unsqueeze(0)  # type: ignore[assignment]
        return gathered


class _RowwiseToRows(RowwiseParallel):
    """A matrix sharded by rows whose partial outputs are reduced to the rows of each process."""

    def __init__(self, sequence: _SequenceParallel):
        super().__init__(output_layouts=Shard(0))
        self._sequence, self._to_all_rows = sequence, RowwiseParallel()

    def transform_output_post_forward(self, module: Any, output: Any, mesh: Any) -> Any:
        if not self._sequence.is_active:
            return self._to_all_rows.transform_output_post_forward(module, output, mesh)
        rows = super().transform_output_post_forward(module, output.squeeze(0), mesh)  # type: ignore[no-untyped-call]
        return rows.unsqueeze(0)


def _split_rows(model: PreTrainedModel, mesh: DeviceMesh) -> frozenset[str]:
    """Split the rows of a model; return the modules whose gradients are then partial sums: its norms.

    Registers the style _ROWWISE for the matrices of this model, to be used in its tensor-parallel plan.
    """
    decoder = decoder_of(model)
    layers: list[Any] = local_layers(decoder, "sequence_parallel", "remove sequence_parallel")
    if not all(map(is_llama_like, layers)):
        raise UserError(f"sequence_parallel is not supported for the architecture {model.config.model_type}; remove it")
    sequence = _SequenceParallel(mesh, model)
    styles: Any = ALL_PARALLEL_STYLES
    styles.register(_ROWWISE, _RowwiseToRows(sequence))

    def hook(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
        if not isinstance(module, IdentityModule):  # of another pipeline stage
            module.register_forward_hook(lambda _module, _args, out: change(out) if sequence.is_active else out)

    hook(model.get_input_embeddings(), sequence.split)
    norms = [norm for layer in layers for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
    for norm in norms:
        hook(norm, sequence.gather_for_matrices)
    hook(decoder.norm, sequence.gather)
    names = {module: name for name, module in model.named_modules()}
    return frozenset(names[norm] for norm in (*norms, decoder.norm))
