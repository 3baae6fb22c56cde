"""Pipeline chunks: consecutive decoder layers that one process computes.

The decoder keeps its full list of layers, because parameter names, windows and layer types depend on the layer's index.
Modules of other processes are replaced by `IdentityModule`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from thresher.errors import UserError


class IdentityModule(nn.Module):
    """Identity placeholder for a module owned by another pipeline stage."""

    def forward(self, hidden_states: Tensor, *_args: Any, **_rest: Any) -> Tensor:
        return hidden_states


def decoder_of(model: PreTrainedModel) -> Any:
    """Return the decoder without the LM head."""
    # transformers looks it up by `base_model_prefix`, which is not the attribute that Llama 4 has it in, and then
    # returns the model with its head
    decoder = model.get_decoder()
    return decoder.model if hasattr(decoder, "lm_head") and hasattr(decoder, "model") else decoder


def head_of(model: PreTrainedModel) -> Any:
    """Return the LM head, or the head of a reward model."""
    return model.score if hasattr(model, "score") else model.get_output_embeddings()


def remove_head(model: PreTrainedModel) -> None:
    """Leave the head to a different pipeline stage."""
    if hasattr(model, "score"):
        model.score = IdentityModule()
    else:
        model.set_output_embeddings(IdentityModule())


def local_layers(decoder: nn.Module, setting: str, hint: str) -> list[nn.Module]:
    """Return the layers that this process computes; `setting` and `hint` go into the error if there are no layers."""
    if not getattr(decoder, "layers", None):
        raise UserError(
            f"{setting} needs a decoder with a list of layers, and {type(decoder).__name__} has no attribute `layers`; "
            f"{hint}"
        )
    layers: Any = decoder.layers
    return [layer for layer in layers if not isinstance(layer, IdentityModule)]


@dataclass(frozen=True)
class Chunk:
    """Consecutive layers by index; the last chunk also has the final norm and the LM head."""

    index: int
    layers: range
    is_last: bool

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @contextmanager
    def activate(self, decoder: Any) -> Iterator[None]:
        """Let a decoder compute only these layers within a `with` block."""
        layers, norm, identity = decoder.layers, decoder.norm, IdentityModule()
        decoder.layers = nn.ModuleList(layer if i in self.layers else identity for i, layer in enumerate(layers))
        decoder.norm = norm if self.is_last else identity
        try:
            yield
        finally:
            decoder.layers, decoder.norm = layers, norm


@torch.no_grad()
def check_accepts_hidden_states(model: PreTrainedModel) -> None:
    """Reject a model whose decoder cannot start from the hidden states of a previous stage.

    A decoder without layers must return `inputs_embeds` bit for bit: one that scales embeddings or adds positions in
    its forward would do so in every stage.
    """
    decoder = decoder_of(model)
    family = model.config.model_type
    if not isinstance(getattr(decoder, "layers", None), nn.ModuleList) or not isinstance(
        getattr(decoder, "norm", None), nn.Module
    ):
        raise UserError(
            f"pipeline stages need a decoder with `layers` and a final `norm`, and {type(decoder).__name__} of the "
            f"model family {family} has no attributes of these names; set pp_size to 1"
        )
    width = model.config.get_text_config().hidden_size
    hidden = torch.linspace(-1.0, 1.0, 2 * width, dtype=next(model.parameters()).dtype).reshape(1, 2, width)
    no_layers = Chunk(index=0, layers=range(0), is_last=False)
    try:
        with no_layers.activate(decoder):
            out = decoder(inputs_embeds=hidden, position_ids=torch.arange(2)[None], use_cache=False)
        is_same = torch.equal(out.last_hidden_state, hidden)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        is_same = False
    if not is_same:
        raise UserError(
            f"pipeline stages pass hidden states as `inputs_embeds`, and the decoder of the model family {family} "
            "changes them before its first layer; set pp_size to 1"
        )
