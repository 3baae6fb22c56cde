"""Start-up check of the numbers: our logps against the model's own logits, on one real pair.

The model's own forward pads and attends as its authors wrote it, so this one check covers the head, the layout, our
attention and the positions. Where they part, it names the layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from thresher.data.batch import PairBatch
from thresher.errors import UserError
from thresher.models.layouts import ArrangedBatch, Layout, PaddedLayout
from thresher.models.logps import PairModel, own_attention

# mean nats per token by which two forwards of one model may differ for no other reason than their batch's shape
TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-4, torch.bfloat16: 0.1}


@torch.no_grad()
def check_against_own_forward(model: PairModel, layout: Layout, batch: PairBatch) -> None:
    """Stop the run when our logps are not those of the model's own forward."""
    two = PairBatch(batch.pair_ids[:2], batch.pairs[:2])
    arranged, padded = layout.arrange(two), PaddedLayout(pad_id=0).arrange(two)
    was_training = model.causal_lm.training
    model.causal_lm.eval()
    with _layer_outputs(model.backbone) as ours:
        sides = model.score(arranged)
    with own_attention(model.causal_lm), _layer_outputs(model.backbone) as theirs:
        own = _own_logps(model, padded)
    model.causal_lm.train(was_training)
    distance = (torch.cat([sides.chosen.values, sides.rejected.values]) - own).abs().mean().item()
    if not distance <= TOLERANCES[model.compute_dtype]:
        family = getattr(getattr(model.causal_lm, "config", None), "model_type", "unknown")
        raise UserError(
            f"log-probabilities of layout `{layout.name}` differ from the model's own forward by {distance:.2g} nats a "
            f"token (model family `{family}`, {_parting(ours, theirs, arranged, padded)}); use layout=padded, and if "
            "that is refused too, this family is not supported"
        )


def _own_logps(model: PairModel, padded: ArrangedBatch) -> Tensor:
    inputs = {name: tensor.to(model.device) for name, tensor in padded.model_inputs.items()}
    with model.precision(model.device):
        logits = model.causal_lm(**inputs, use_cache=False).logits
    rows = logits.reshape(-1, logits.shape[-1])[padded.scored_rows.to(model.device)].float()
    logps: Tensor = rows.log_softmax(-1).gather(1, padded.targets.to(model.device)[:, None]).squeeze(1)
    return logps


@contextmanager
def _layer_outputs(backbone: nn.Module) -> Iterator[list[Tensor]]:
    """Collect what each layer of a stack hands on, as flat rows."""
    outputs: list[Tensor] = []

    def keep(_module: nn.Module, _inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        outputs.append(hidden.detach().reshape(-1, hidden.shape[-1]).float())

    layers = getattr(backbone, "layers", ())
    handles = [layer.register_forward_hook(keep) for layer in layers]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def _parting(ours: list[Tensor], theirs: list[Tensor], arranged: ArrangedBatch, padded: ArrangedBatch) -> str:
    """Name the first layer after which the same tokens have other hidden states in the two forwards."""
    for number, (mine, own) in enumerate(zip(ours, theirs, strict=False)):
        is_pruned = arranged.kept is not None and len(mine) == len(arranged.kept.rows)
        rows = arranged.scored_in_kept if is_pruned and arranged.scored_in_kept is not None else arranged.scored_rows
        mine, own = mine[rows.to(mine.device)], own[padded.scored_rows.to(own.device)]
        if (mine - own).norm() > 1e-2 * own.norm():
            return f"they part in layer {number}"
    return "they part after the last layer"
