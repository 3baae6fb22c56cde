"""Sequence parallelism: outside of the matrices that tp shards, each of its processes computes a part of the rows.

Residual stream and norms of a Llama-like layer are on 1/tp of the rows. The output of a norm is gathered once for all
matrices that read it, and the partial outputs of o_proj and down_proj are reduced to the rows of each process. In place
of an all-reduce there are an all-gather and a reduce-scatter, of the same bytes on the wire:

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
from transformers.distributed.tensor_parallel import RowwiseParallel

from thresher.errors import UserError
from thresher.models.attention.interface import PAIR_ATTENTION
from thresher.models.optimizations.llama_layers import is_llama_like
from thresher.models.pipeline_chunk import IdentityModule, decoder_of, local_layers

ROWWISE = "thresher_rowwise_to_rows"
_ROWS = (Shard(1),)
_ALL_ROWS = (Replicate(),)


@dataclass(frozen=True)
class SequenceParallel:
    """The rows of this process: [1, rows, hidden] -> [1, rows / tp, hidden], and back."""

    mesh: DeviceMesh
    model: PreTrainedModel

    @property
    def is_active(self) -> bool:
        return bool(self.model.config._attn_implementation == PAIR_ATTENTION)

    def split(self, rows: Tensor) -> Tensor:
        """Take this process's rows; the backward gathers."""
        whole = DTensor.from_local(rows, self.mesh, _ALL_ROWS, run_check=False)
        own: Tensor = whole.redistribute(placements=_ROWS).to_local()
        return own

    def gather(self, rows: Tensor) -> Tensor:
        """Gather all rows, for computations that every process repeats; the backward takes this process's rows."""
        gathered: Tensor = self.gather_for_matrices(rows).to_local(grad_placements=_ALL_ROWS)
        return gathered

    def gather_for_matrices(self, rows: Tensor) -> DTensor:
        """Gather all rows, for matrices sharded by columns; the backward sums what each process has of the gradient."""
        # along the first dimension: a reduce-scatter along another one copies its input
        own = DTensor.from_local(rows.squeeze(0), self.mesh, (Shard(0),), run_check=False)
        gathered: DTensor = own.redistribute(placements=_ALL_ROWS).unsqueeze(0)  # type: ignore[assignment]
        return gathered


class _RowwiseToRows(RowwiseParallel):
    """A matrix sharded by rows whose partial outputs are reduced to the rows of each process."""

    def __init__(self, sequence: SequenceParallel):
        super().__init__(output_layouts=Shard(0))
        self._sequence, self._to_all_rows = sequence, RowwiseParallel()

    def transform_output_post_forward(self, module: Any, output: Any, mesh: Any) -> Any:
        if not self._sequence.is_active:
            return self._to_all_rows.transform_output_post_forward(module, output, mesh)
        rows = super().transform_output_post_forward(module, output.squeeze(0), mesh)  # type: ignore[no-untyped-call]
        return rows.unsqueeze(0)


def apply_sequence_parallel(model: PreTrainedModel, mesh: DeviceMesh) -> frozenset[str]:
    """Split the rows of a model; return the modules whose gradients are then partial sums: its norms.

    Registers the style ROWWISE for the matrices of this model, to be used in its tensor-parallel plan.
    """
    decoder = decoder_of(model)
    layers: list[Any] = local_layers(decoder, "sequence_parallel", "remove sequence_parallel")
    if not all(map(is_llama_like, layers)):
        raise UserError(f"sequence_parallel is not supported for the architecture {model.config.model_type}; remove it")
    sequence = SequenceParallel(mesh, model)
    styles: Any = ALL_PARALLEL_STYLES
    styles.register(ROWWISE, _RowwiseToRows(sequence))

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
