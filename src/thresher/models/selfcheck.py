"""Start-up check of the numbers: our logps against the model's own logits, on one real pair."""

from __future__ import annotations

import torch

from thresher.data.batch import PairBatch
from thresher.errors import UserError
from thresher.models.layouts import Layout
from thresher.models.logps import PairModel

# mean nats per token by which two forwards of one model may differ for no other reason than their batch's shape
TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-4, torch.bfloat16: 0.1}


@torch.no_grad()
def check_against_own_forward(model: PairModel, layout: Layout, batch: PairBatch) -> None:
    """Stop the run when a family does something between backbone and softmax that we do not know of."""
    arranged = layout.arrange(PairBatch(batch.pair_ids[:1], batch.pairs[:1]))
    was_training = model.causal_lm.training
    model.causal_lm.eval()
    ours = model.score(arranged)
    inputs = {name: tensor.to(model.device) for name, tensor in arranged.model_inputs.items()}
    with model._precision(model.device):
        logits = model.causal_lm(**inputs, use_cache=False).logits
    model.causal_lm.train(was_training)
    rows = logits.reshape(-1, logits.shape[-1])[arranged.scored_rows.to(model.device)].float()
    own = rows.log_softmax(-1).gather(1, arranged.targets.to(model.device)[:, None]).squeeze(1)
    distance = (torch.cat([ours.chosen.values, ours.rejected.values]) - own).abs().mean().item()
    if not distance <= TOLERANCES[model.compute_dtype]:
        family = getattr(getattr(model.causal_lm, "config", None), "model_type", "unknown")
        raise UserError(
            f"log-probabilities of layout `{layout.name}` differ from the model's own forward by {distance:.2g} nats "
            f"a token (model family `{family}`); this family changes its logits in a way that is not supported"
        )
