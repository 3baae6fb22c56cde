"""Start-up check on real pairs: logps of the pair forward against the model's original forward.

The original forward takes one sequence at a time with the model's own attention, so the check covers the LM head, the
layout, the attention and the positions. On a mismatch it names the first layer that differs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedConfig

from thresher.data.example import ExampleBatch, Scored, scored_positions
from thresher.errors import UserError
from thresher.models.branching_state import needs_half_precision
from thresher.models.layouts import Layout, ModelInputs
from thresher.models.loading.trained import widened_matrices
from thresher.models.logps import PairModel, original_forward
from thresher.models.optimizations.compile import uncompiled_layers

# mean difference in nats per token that the shape of the batch alone may cause
TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-4, torch.float16: 0.0125, torch.bfloat16: 0.1}


class LayoutError(UserError):
    """A model does not support a packed layout; it may support `padded`."""


@torch.no_grad()
def check_logps(model: PairModel, layout: Layout, batch: ExampleBatch) -> None:
    """Raise if the logps of a layout differ from the model's original forward."""
    inputs = layout.collate(batch)
    # flash kernels of GPUs have no fp32, nor has the gated delta rule of flash-linear-attention
    is_half = inputs.uses_varlen or needs_half_precision(model.base_model)
    exact = model if is_half and model.device.type == "cuda" else in_storage_precision(model)
    # hooks on compiled layers would cause a recompilation
    with eval_mode(model.causal_lm), uncompiled_layers(model.causal_lm), computing_in_storage_precision(exact):
        logps, layers = _pair_forward(exact, layout, inputs)
        expected, expected_layers = _original_forward(exact, batch, layout.scored)
    distance = (logps - expected).abs().mean().item() if len(expected) else 0.0
    if model.is_reward_model and layers:  # a new head is zero, and so is its reward of any hidden state
        states, expected_states = layers[-1], expected_layers[-1]
        distance = max(distance, ((states - expected_states).norm() / expected_states.norm()).item())
    if not distance <= TOLERANCES[exact.compute_dtype]:
        error = LayoutError if layout.needs_pair_attention else UserError
        what, unit = ("rewards", "on average") if model.is_reward_model else ("log-probabilities", "nats per token")
        hint = "use layout=padded" if layout.needs_pair_attention else "this model family is not supported"
        raise error(
            f"{what} of layout `{layout.name}` differ from the model's original forward by {distance:.2g} "
            f"{unit} (model family `{family_of(model)}`, first divergence "
            f"{_first_divergent_layer(layers, expected_layers)}); {hint}"
        )


def _pair_forward(model: PairModel, layout: Layout, inputs: ModelInputs) -> tuple[Tensor, list[Tensor]]:
    """Return the logps, and the hidden states of the scored rows after each layer."""
    try:
        with _layer_outputs(model.backbone) as outputs:
            logps = model.score(inputs)
    except (AssertionError, AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        if not layout.needs_pair_attention or isinstance(error, torch.OutOfMemoryError):
            raise
        raise LayoutError(
            f"layout `{layout.name}` does not work with model family `{family_of(model)}` ({error}); use layout=padded"
        ) from error
    if model.context_parallel is not None or model.num_row_shards > 1:
        outputs = []  # hidden states of a sequence shard
    layers = []
    for output in outputs:
        is_kept = inputs.kept is not None and len(output) == len(inputs.kept.rows)
        rows = inputs.scored_in_kept if is_kept and inputs.scored_in_kept is not None else inputs.scored_rows
        layers.append(output[rows.to(output.device)])
    return torch.cat([side.values for side in logps.sides]), layers


def _original_forward(model: PairModel, batch: ExampleBatch, what: Scored) -> tuple[Tensor, list[Tensor]]:
    """Return the same from the original forward: one sequence at a time, logits of the scored positions only."""
    logps, layers = [], []
    for prompt, response in batch.sequences():
        scored = scored_positions(prompt, response, what)
        rows = torch.from_numpy(scored - 1).to(model.device)
        keeps = {} if model.is_reward_model else {"logits_to_keep": rows}
        ids = torch.from_numpy(np.concatenate([prompt, response.ids]).astype(np.int64)).to(model.device)
        with (
            original_forward(model.causal_lm),
            model.precision(model.device),
            without_pad_token(model.base_model.config) if model.is_reward_model else nullcontext(),
            _layer_outputs(model.backbone) as outputs,
        ):
            logits = model.causal_lm(input_ids=ids[None], use_cache=False, **keeps).logits[0]
        if model.is_reward_model:
            logps.append(logits.float())
        else:
            logits = logits if len(logits) == len(rows) else logits[rows]
            logps.append(logits.float().log_softmax(-1).gather(1, ids[rows + 1][:, None]).squeeze(1))
        layers.append([output[rows] for output in outputs])
    return torch.cat(logps), [torch.cat(outputs) for outputs in zip(*layers, strict=True)]


def in_storage_precision(model: PairModel) -> PairModel:
    """Return the model computing in the precision of its weights: bf16 would hide small errors."""
    # FSDP gathers the layers of a sharded model in compute_dtype
    return model if isinstance(model.base_model, FSDPModule) else replace(model, compute_dtype=model.stored_dtype)


def computing_in_storage_precision(model: PairModel) -> AbstractContextManager[None]:
    """Let the layers compute within a `with` block, for a model that `in_storage_precision` returns."""
    if model.compute_dtype != model.stored_dtype:
        return nullcontext()
    return widened_matrices(model.backbone, model.stored_dtype)


@contextmanager
def without_pad_token(config: PreTrainedConfig) -> Iterator[None]:
    """Let a reward model take the reward at the end of its only sequence, even if that is the pad token."""
    text = config.get_text_config()
    before, text.pad_token_id = text.pad_token_id, None
    try:
        yield
    finally:
        text.pad_token_id = before


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
    """Collect the output of each decoder layer: [rows, hidden], fp32."""
    outputs: list[Tensor] = []

    def collect(_module: nn.Module, _inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        outputs.append(hidden.detach().reshape(-1, hidden.shape[-1]).float())

    handles = [layer.register_forward_hook(collect) for layer in getattr(backbone, "layers", ())]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def _first_divergent_layer(layers: list[Tensor], expected_layers: list[Tensor]) -> str:
    for index, (states, expected) in enumerate(zip(layers, expected_layers, strict=False)):
        if (states - expected).norm() > 1e-2 * expected.norm():
            return f"at layer {index}"
    return "after the last layer"


def family_of(model: PairModel) -> str:
    return str(getattr(getattr(model.causal_lm, "config", None), "model_type", "unknown"))
