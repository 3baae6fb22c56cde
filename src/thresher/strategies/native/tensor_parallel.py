"""The tp axis: every matrix of a layer is split over processes by the plan that a model family has in transformers.

The head's rows are split as well, and scored where they are (see models/lm_head.py): nobody has all logits.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel
from transformers.distributed.tensor_parallel import apply_tensor_parallelism, replace_layer_number_by_wildcard

from thresher.errors import UserError
from thresher.models.pipeline_chunk import IdentityModule

# transformers would sum these gradients over tp after every backward, and so count those of earlier micro-batches again
_PARTIAL_GRADIENT = "replicated_with_grad_allreduce"


def apply_tensor_parallel(model: PreTrainedModel, mesh: DeviceMesh) -> frozenset[str]:
    """Split a model over a mesh of one axis; name the parameters that every process has whole but sees in part.

    Their gradients must be summed over the axis once a step: norms within heads, of which a process has some.
    """
    plan = dict(model.tp_plan)
    if not plan:
        raise UserError(
            f"tp_size is {mesh.size()}, and transformers has no tensor-parallel plan for the model family "
            f"{model.config.model_type}; set tp_size to 1"
        )
    partial = {name for name, style in plan.items() if style == _PARTIAL_GRADIENT}
    elsewhere = {name for name, module in model.named_modules() if isinstance(module, IdentityModule)}
    styles = {name: style for name, style in plan.items() if name not in partial | elsewhere}
    apply_tensor_parallelism(model, mesh, _with_adapters(model, styles))
    return frozenset(
        name
        for name, _ in model.named_parameters()
        if replace_layer_number_by_wildcard(name.rpartition(".")[0]) in partial
    )


def _with_adapters(model: nn.Module, plan: dict[str, str]) -> dict[str, str]:
    """Extend a plan to the two small matrices that LoRA puts beside a large one.

    Beside a matrix that is split by outputs, the second of them is; by inputs, the first. The other is whole.
    """
    wrapped = {
        replace_layer_number_by_wildcard(name) for name, module in model.named_modules() if hasattr(module, "lora_A")
    }
    extended = {}
    for name, style in plan.items():
        if name not in wrapped:
            extended[name] = style
            continue
        split = "lora_B" if style.startswith("colwise") else "lora_A"
        extended |= {f"{name}.base_layer": style, f"{name}.{split}.default": style}
    return extended
