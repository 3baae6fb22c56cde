"""The tp axis: shards the matrices of every layer by the tensor-parallel plan of the architecture in transformers.

The LM head is sharded over the vocabulary and scored shard by shard (see models/lm_head.py).
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel
from transformers.distributed.tensor_parallel import apply_tensor_parallelism, replace_layer_number_by_wildcard

from thresher.errors import UserError
from thresher.models.pipeline_chunk import IdentityModule
from thresher.strategies.native.sequence_parallel import ROWWISE, apply_sequence_parallel

# transformers would all-reduce these gradients after every backward, adding earlier micro-batches again
_PARTIAL_GRADIENT = "replicated_with_grad_allreduce"


def apply_tensor_parallel(model: PreTrainedModel, mesh: DeviceMesh, *, splits_rows: bool = False) -> frozenset[str]:
    """Shard a model over a one-dimensional mesh; return the names of replicated parameters with partial gradients.

    Those are norms within heads (Qwen 3): each process has the gradient of its heads, to be summed once per step. And
    with splits_rows (sequence parallelism) all norms, as each process has the gradient of its rows.
    """
    if not model.tp_plan:
        raise UserError(
            f"tp_size is {mesh.size()}, but transformers has no tensor-parallel plan for the architecture "
            f"{model.config.model_type}; set tp_size to 1"
        )
    partial = partial_gradient_modules(model)
    on_other_stages = {name for name, module in model.named_modules() if isinstance(module, IdentityModule)}
    styles = {name: style for name, style in module_styles(model).items() if name not in on_other_stages}
    norms: frozenset[str] = frozenset()
    if splits_rows:
        norms = apply_sequence_parallel(model, mesh)
        styles = {name: ROWWISE if style == "rowwise" else style for name, style in styles.items()}
    apply_tensor_parallelism(model, mesh, styles)
    modules = {name: name.rpartition(".")[0] for name, _ in model.named_parameters()}
    return frozenset(
        name
        for name, module in modules.items()
        if module in norms or replace_layer_number_by_wildcard(module) in partial
    )


def module_styles(model: PreTrainedModel) -> dict[str, str]:
    """The style of every sharded module, by its name with `*` in place of the layer's number; LoRA included."""
    partial = partial_gradient_modules(model)
    return _with_adapters(model, {name: style for name, style in model.tp_plan.items() if name not in partial})


def partial_gradient_modules(model: PreTrainedModel) -> set[str]:
    """Replicated modules whose gradients are partial sums."""
    return {name for name, style in model.tp_plan.items() if style == _PARTIAL_GRADIENT}


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
