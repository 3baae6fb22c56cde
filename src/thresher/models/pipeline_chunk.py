"""Some layers of a decoder that a process computes in one go, while others hold the rest.

A decoder keeps its whole list of layers, each under its number: names, windows and kinds of layers go by it. In the
place of what another process computes stands a `IdentityModule`, which has no weights and hands on what it gets.
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
    """Stands where a layer, a norm, an embedding or a head of another process was."""

    def forward(self, hidden_states: Tensor, *_args: Any, **_rest: Any) -> Tensor:
        return hidden_states


def own_layers(decoder: nn.Module, setting: str, mend: str) -> list[nn.Module]:
    """The layers that this process computes; `setting` and `mend` are for a model that is no stack of layers."""
    layers = getattr(decoder, "layers", None)
    if not layers:
        raise UserError(
            f"{setting} needs a model that is a stack of layers, and {type(decoder).__name__} keeps none under "
            f"`layers`; {mend}"
        )
    return [layer for layer in layers if not isinstance(layer, IdentityModule)]


@dataclass(frozen=True)
class Chunk:
    """Consecutive layers by their numbers; the last chunk has the last norm and the head, too."""

    index: int
    layers: range
    is_last: bool

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @contextmanager
    def alone(self, decoder: Any) -> Iterator[None]:
        """Let a decoder compute these layers and no others, for the length of a `with` block."""
        layers, norm, other = decoder.layers, decoder.norm, IdentityModule()
        decoder.layers = nn.ModuleList(layer if number in self.layers else other for number, layer in enumerate(layers))
        decoder.norm = norm if self.is_last else other
        try:
            yield
        finally:
            decoder.layers, decoder.norm = layers, norm


@torch.no_grad()
def check_accepts_hidden_states(model: PreTrainedModel) -> None:
    """Refuse a family whose layers cannot be given the hidden states of the layers before them.

    A decoder without layers must give back its input, to the bit: one that scales embeddings or adds positions in its
    own forward would do that once in every stage.
    """
    decoder = model.get_decoder()
    family = model.config.model_type
    if not isinstance(getattr(decoder, "layers", None), nn.ModuleList) or not isinstance(
        getattr(decoder, "norm", None), nn.Module
    ):
        raise UserError(
            f"pipeline stages need a decoder with `layers` and a last `norm`, and {type(decoder).__name__} of the "
            f"model family {family} has them under other names; set pp_size to 1"
        )
    width = model.config.get_text_config().hidden_size
    hidden = torch.linspace(-1.0, 1.0, 2 * width, dtype=next(model.parameters()).dtype).reshape(1, 2, width)
    nothing = Chunk(index=0, layers=range(0), is_last=False)
    try:
        with nothing.alone(decoder):
            out = decoder(inputs_embeds=hidden, position_ids=torch.arange(2)[None], use_cache=False)
        is_same = torch.equal(out.last_hidden_state, hidden)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        is_same = False
    if not is_same:
        raise UserError(
            f"pipeline stages hand hidden states from one to the next, and the forward of the model family {family} "
            "changes what it is given before its first layer; set pp_size to 1"
        )
