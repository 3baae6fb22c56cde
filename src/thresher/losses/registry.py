"""Losses by name: which exist, which knobs each has, and useful answers to misspelt ones."""

import dataclasses
import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from thresher.errors import UserError
from thresher.losses.protocol import Loss

# Marks a dataclass field that a step changes and a checkpoint keeps, as opposed to a knob that a person sets.
STATE: dict[str, bool] = {"state": True}

_LOSSES: dict[str, type[Loss]] = {}

LossClass = TypeVar("LossClass", bound=type[Loss])


@dataclass(frozen=True)
class LossRow:
    """One loss as a table shows it. knobs maps each knob to its default."""

    name: str
    knobs: dict[str, float]
    paper: str
    needs_reference: bool
    summary: str


def register(cls: LossClass) -> LossClass:
    """Make a loss known under its class's `name`."""
    if cls.name in _LOSSES:
        raise ValueError(f"two losses are named {cls.name}")
    _LOSSES[cls.name] = cls
    return cls


def loss_names() -> list[str]:
    """List every loss, sorted."""
    return sorted(_LOSSES)


def loss_class(name: str) -> type[Loss]:
    """Find a loss by name."""
    if name not in _LOSSES:
        raise UserError(f"unknown loss {name!r}{nearest(name, _LOSSES)}; the losses are {', '.join(loss_names())}")
    return _LOSSES[name]


def knob_defaults(name: str) -> dict[str, float]:
    """Map each knob of a loss to its default; state is no knob."""
    cls = loss_class(name)
    if not dataclasses.is_dataclass(cls):
        raise TypeError(f"{cls.__name__} is registered as a loss but is no dataclass")
    return {f.name: f.default for f in dataclasses.fields(cls) if not f.metadata.get("state")}


def make_loss(name: str, knobs: Mapping[str, float]) -> Loss:
    """Build a loss from its own knobs; those left out keep their defaults."""
    own = knob_defaults(name)
    for knob in knobs:
        if knob not in own:
            raise UserError(_unknown_knob(knob, [name]))
    return loss_class(name)(**knobs)


def make_losses(names: Sequence[str], knobs: Mapping[str, float]) -> tuple[Loss, ...]:
    """Build several losses from one set of knobs: each takes those it has, and a knob that none has is an error."""
    own = {name: knob_defaults(name) for name in names}
    for knob in knobs:
        if not any(knob in defaults for defaults in own.values()):
            raise UserError(_unknown_knob(knob, names))
    return tuple(make_loss(name, {k: v for k, v in knobs.items() if k in own[name]}) for name in names)


def describe() -> list[LossRow]:
    """List every loss with what a person needs to choose one."""
    return [
        LossRow(
            name=name,
            knobs=knob_defaults(name),
            paper=cls.paper,
            needs_reference=cls.needs_reference,
            summary=(cls.__doc__ or "").splitlines()[0],
        )
        for name, cls in sorted(_LOSSES.items())
    ]


def nearest(word: str, known: Iterable[str]) -> str:
    """Name the known word nearest to a misspelt one, as the tail of a sentence."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f", did you mean {close[0]!r}?" if close else ""


def _unknown_knob(knob: str, names: Sequence[str]) -> str:
    own = {k: None for name in names for k in knob_defaults(name)}
    users = [name for name in loss_names() if knob in knob_defaults(name)]
    has = f"{' + '.join(names)} has {', '.join(own) or 'no knobs'}"
    if users:
        return f"{knob} is no knob of {' + '.join(names)}; it belongs to {', '.join(users)}; {has}"
    return f"unknown knob {knob!r}{nearest(knob, own)}; {has}"
