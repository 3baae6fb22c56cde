"""Start-up check of a pipeline's numbers, on real pairs.

No process can make the model's own forward, so every stage makes its part of it: each pair alone, attention and norms
as their authors wrote them, and in the last stage the logits of the model's own head. That stages may hand on hidden
states at all was checked when the model was cut (see models/pipeline_chunk.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from thresher.data.pair import PairBatch
from thresher.errors import UserError
from thresher.losses.pairs import ChosenRejectedLogps
from thresher.models.forward_check import TOLERANCES, eval_mode, family_of, in_storage_precision
from thresher.models.layouts import ModelInputs, PaddedLayout
from thresher.models.logps import PairModel, original_forward
from thresher.models.pipeline_chunk import Chunk
from thresher.strategies.native.pipeline_executor import PipelineExecutor


@torch.no_grad()
def check_stages(passes: PipelineExecutor, batch: PairBatch) -> None:
    """Stop the run when our logps are not those of the stages as they were written; all stages find the same."""
    model = in_storage_precision(passes.model)
    original_forwards = _AsWritten(model.causal_lm, model.compute_dtype)
    with eval_mode(model.causal_lm), torch.compiler.set_stance("force_eager"):
        ours = _flat(replace(passes, model=model).score(batch))
        with original_forward(model.causal_lm):
            alone = replace(passes, model=original_forwards, layout=PaddedLayout(pad_id=0))
            pairs = [PairBatch(batch.pair_ids[i : i + 1], batch.pairs[i : i + 1]) for i in range(len(batch))]
            scored = [alone.score(pair) for pair in pairs]
    theirs = torch.cat([sides.chosen.values for sides in scored] + [sides.rejected.values for sides in scored])
    distance = (ours - theirs).abs().mean().item() if len(theirs) else 0.0
    if not distance <= TOLERANCES[model.compute_dtype]:
        mend = "use layout=padded" if passes.layout.needs_pair_attention else "set pp_size to 1"
        raise UserError(
            f"log-probabilities of layout `{passes.layout.name}` differ from those of the model's own layers and head "
            f"by {distance:.2g} nats a token (model family `{family_of(model)}`, {passes.stage.pipeline.size} pipeline "
            f"stages); {mend}"
        )


def _flat(sides: ChosenRejectedLogps) -> Tensor:
    return torch.cat([sides.chosen.values, sides.rejected.values])


class _AsWritten(PairModel):
    """A model that has its last chunk scored by its own causal LM's forward."""

    def _compute_chunk(
        self, chunk: Chunk, batch: ModelInputs, entering: Tensor | None, with_squared_probs: bool
    ) -> tuple[Tensor, Tensor | None]:
        if not chunk.is_last:
            return super()._compute_chunk(chunk, batch, entering, with_squared_probs)
        inputs = {name: tensor.to(self.device) for name, tensor in batch.model_inputs.items() if name != "input_ids"}
        model: Any = self.base_model
        width = batch.model_inputs["input_ids"].shape[1]
        columns, places = (batch.scored_rows % width).unique(return_inverse=True)
        with chunk.activate(self.backbone), self.precision(self.device):
            logits: Tensor = model.original_forward(
                inputs_embeds=entering, **inputs, logits_to_keep=columns.to(self.device), use_cache=False
            ).logits
        if logits.shape[1] != len(columns):  # a family that gives all logits
            logits = logits[:, columns]
        rows = logits[batch.scored_rows // width, places].float()
        return rows.log_softmax(-1).gather(1, batch.targets.to(rows.device)[:, None]).squeeze(1), None
