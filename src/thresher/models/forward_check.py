"""Start-up check of the numbers: our logps against the model's own logits, on real pairs.

The model's own forward takes each sequence alone and attends as its authors wrote it, so this one check covers the
head, the layout, our attention and the positions. Where they part, it names the layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from thresher.data.pair import PairBatch, scored_positions
from thresher.errors import UserError
from thresher.models.layouts import Layout, ModelInputs
from thresher.models.logps import PairModel, original_forward

# mean nats per token by which two forwards of one model may differ for no other reason than their batch's shape
TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-4, torch.bfloat16: 0.1}


@torch.no_grad()
def check_logps(model: PairModel, layout: Layout, batch: PairBatch) -> None:
    """Stop the run when our logps are not those of the model's own forward."""
    exact = in_storage_precision(model)
    arranged = layout.collate(batch)
    # uncompiled: the layers are watched, which would be compiled in for once
    with eval_mode(model.causal_lm), torch.compiler.set_stance("force_eager"):
        ours, our_layers = _our_forward(exact, layout, arranged)
        theirs, their_layers = _own_forward(exact, batch)
    distance = (ours - theirs).abs().mean().item() if len(theirs) else 0.0
    if not distance <= TOLERANCES[exact.compute_dtype]:
        mend = "use layout=padded" if layout.needs_pair_attention else "this family is not supported"
        raise UserError(
            f"log-probabilities of layout `{layout.name}` differ from the model's own forward by {distance:.2g} nats a "
            f"token (model family `{family_of(model)}`, {_parting(our_layers, their_layers)}); {mend}"
        )


def _our_forward(model: PairModel, layout: Layout, arranged: ModelInputs) -> tuple[Tensor, list[Tensor]]:
    """Our logps, and the hidden states of the scored rows after each layer."""
    try:
        with _layer_outputs(model.backbone) as outputs:
            sides = model.score(arranged)
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        if not layout.needs_pair_attention:
            raise
        raise UserError(
            f"layout `{layout.name}` does not work with model family `{family_of(model)}` ({error}); use layout=padded"
        ) from error
    if model.context_parallel is not None:
        outputs = []  # of a part of the row
    layers = [output[_rows_in(arranged, len(output)).to(output.device)] for output in outputs]
    return torch.cat([sides.chosen.values, sides.rejected.values]), layers


def _rows_in(arranged: ModelInputs, num_rows: int) -> Tensor:
    is_pruned = arranged.kept is not None and num_rows == len(arranged.kept.rows)
    return arranged.scored_in_kept if is_pruned and arranged.scored_in_kept is not None else arranged.scored_rows


def _own_forward(model: PairModel, batch: PairBatch) -> tuple[Tensor, list[Tensor]]:
    """The same from the model as it is: one sequence at a time, logits of the scored positions only."""
    sides = [(pair.prompt_ids, pair.chosen_ids, pair.chosen_mask) for pair in batch.pairs]
    sides += [(pair.prompt_ids, pair.rejected_ids, pair.rejected_mask) for pair in batch.pairs]
    logps, layers = [], []
    for prompt, response, mask in sides:
        rows = torch.from_numpy(scored_positions(response, mask) + len(prompt) - 1).to(model.device)
        ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64)).to(model.device)
        with (
            original_forward(model.causal_lm),
            model.precision(model.device),
            _layer_outputs(model.backbone) as outputs,
        ):
            logits = model.causal_lm(input_ids=ids[None], logits_to_keep=rows, use_cache=False).logits[0]
        logits = logits if len(logits) == len(rows) else logits[rows]
        logps.append(logits.float().log_softmax(-1).gather(1, ids[rows + 1][:, None]).squeeze(1))
        layers.append([output[rows] for output in outputs])
    return torch.cat(logps), [torch.cat(parts) for parts in zip(*layers, strict=True)]


def in_storage_precision(model: PairModel) -> PairModel:
    """The same model in the precision of its weights: bf16 would hide small mistakes.

    Not where it is sharded: its layers come together in the precision of their products alone.
    """
    return model if isinstance(model.base_model, FSDPModule) else replace(model, compute_dtype=model.stored_dtype)


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


@contextmanager
def _layer_outputs(backbone: nn.Module) -> Iterator[list[Tensor]]:
    """Collect what each layer of a stack hands on, as flat rows."""
    outputs: list[Tensor] = []

    def keep(_module: nn.Module, _inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        outputs.append(hidden.detach().reshape(-1, hidden.shape[-1]).float())

    handles = [layer.register_forward_hook(keep) for layer in getattr(backbone, "layers", ())]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def _parting(ours: list[Tensor], theirs: list[Tensor]) -> str:
    """Name the first layer after which the same tokens have other hidden states in the two forwards."""
    for number, (mine, own) in enumerate(zip(ours, theirs, strict=False)):
        if (mine - own).norm() > 1e-2 * own.norm():
            return f"they part in layer {number}"
    return "they part after the last layer"


def family_of(model: PairModel) -> str:
    return str(getattr(getattr(model.causal_lm, "config", None), "model_type", "unknown"))
