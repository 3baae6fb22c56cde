"""Start-up check of a pipeline: compares its logps with those of the model's original layers on real pairs.

No process has the full model, so each stage runs its original layers, one pair at a time, and the last stage computes
the logits with the original head. That the model accepts hidden states is checked by models/pipeline_chunk.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from thresher.data.pair import PairBatch
from thresher.errors import UserError
from thresher.losses.pairs import ChosenRejectedLogps, TokenStatistics
from thresher.models.forward_check import (
    TOLERANCES,
    LayoutError,
    computing_in_storage_precision,
    eval_mode,
    family_of,
    in_storage_precision,
)
from thresher.models.layouts import ModelInputs, PaddedLayout
from thresher.models.lm_head import ScoredTokens
from thresher.models.logps import PairModel, original_forward
from thresher.models.optimizations.compile import uncompiled_layers
from thresher.models.pipeline_chunk import Chunk
from thresher.strategies.native.pipeline_executor import PipelineExecutor
from thresher.strategies.native.pipeline_parallel import PipelineSettings


@torch.no_grad()
def check_stages(executor: PipelineExecutor, batch: PairBatch) -> None:
    """Raise UserError on every stage if the logps differ from those of the original layers."""
    model = in_storage_precision(executor.model)
    original = _OriginalForwardModel(model.causal_lm, model.compute_dtype)
    with eval_mode(model.causal_lm), uncompiled_layers(model.causal_lm), computing_in_storage_precision(model):
        ours = _flat(replace(executor, model=model, settings=PipelineSettings()).score(batch))
        with original_forward(model.causal_lm):
            one_by_one = replace(
                executor,
                model=original,
                layout=PaddedLayout(pad_id=0, scores_prompt=executor.layout.scores_prompt),
                settings=PipelineSettings(),
            )
            pairs = [PairBatch(batch.pair_ids[i : i + 1], batch.pairs[i : i + 1]) for i in range(len(batch))]
            scored = [one_by_one.score(pair) for pair in pairs]
    expected = torch.cat([sides.chosen.values for sides in scored] + [sides.rejected.values for sides in scored])
    distance = (ours - expected).abs().mean().item() if len(expected) else 0.0
    if not distance <= TOLERANCES[model.compute_dtype]:
        is_packed = executor.layout.needs_pair_attention
        error, hint = (LayoutError, "use layout=padded") if is_packed else (UserError, "set pp_size to 1")
        raise error(
            f"log-probabilities of layout `{executor.layout.name}` differ from those of the model's original layers by "
            f"{distance:.2g} nats per token (architecture `{family_of(model)}`, pp_size "
            f"{executor.stage.pipeline.size}); {hint}"
        )


def _flat(sides: ChosenRejectedLogps) -> Tensor:
    return torch.cat([sides.chosen.values, sides.rejected.values])


class _OriginalForwardModel(PairModel):
    """Scores the last chunk with the original forward of the causal LM."""

    def _compute_chunk(
        self, chunk: Chunk, batch: ModelInputs, entering: Tensor | None, statistics: TokenStatistics
    ) -> Tensor | ScoredTokens:
        if not chunk.is_last:
            return super()._compute_chunk(chunk, batch, entering, statistics)
        inputs = {name: tensor.to(self.device) for name, tensor in batch.model_inputs.items() if name != "input_ids"}
        model: Any = self.base_model
        width = batch.model_inputs["input_ids"].shape[1]
        columns, column_index = (batch.scored_rows % width).unique(return_inverse=True)
        with chunk.activate(self.backbone), self.precision(self.device):
            logits: Tensor = model.original_forward(
                inputs_embeds=entering, **inputs, logits_to_keep=columns.to(self.device), use_cache=False
            ).logits
        if logits.shape[1] != len(columns):  # the architecture ignores logits_to_keep
            logits = logits[:, columns]
        rows = logits[batch.scored_rows // width, column_index].float()
        return ScoredTokens(rows.log_softmax(-1).gather(1, batch.targets.to(rows.device)[:, None]).squeeze(1))
