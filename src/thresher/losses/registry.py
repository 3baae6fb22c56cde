"""The registry of losses: names, parameters, and errors that suggest the right spelling."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import TypeVar

from thresher.errors import UserError
from thresher.losses.base import Loss

_LOSSES: dict[str, type[Loss]] = {}

LossClass = TypeVar("LossClass", bound=type[Loss])


@dataclass(frozen=True)
class LossRow:
    """One loss as a row of a table. parameters maps each parameter to its default."""

    name: str
    parameters: dict[str, float]
    paper: str
    needs_reference: bool
    summary: str


def register(cls: LossClass) -> LossClass:
    """Register a loss class under its `name`."""
    if cls.name in _LOSSES:
        raise ValueError(f"two losses are named {cls.name}")
    if not is_dataclass(cls):
        raise TypeError(f"the loss {cls.__name__} is not a dataclass; decorate it with @dataclass(frozen=True)")
    _LOSSES[cls.name] = cls
    return cls


def loss_names() -> list[str]:
    """List the names of all losses, sorted."""
    return sorted(_LOSSES)


def loss_class(name: str) -> type[Loss]:
    """Find a loss by name."""
    if name not in _LOSSES:
        raise UserError(f"unknown loss {name!r}{suggestion(name, _LOSSES)}; the losses are {', '.join(loss_names())}")
    return _LOSSES[name]


def parameter_defaults(name: str) -> dict[str, float]:
    """Map each parameter of a loss to its default; fields that hold state are not parameters."""
    loss = loss_class(name)()
    return {field.name: getattr(loss, field.name) for field in fields(loss) if not field.metadata.get("state")}


def make_loss(name: str, parameters: Mapping[str, float]) -> Loss:
    """Build a loss; parameters that are not given keep their defaults."""
    return make_losses([name], parameters)[0]


def make_losses(names: Sequence[str], parameters: Mapping[str, float]) -> tuple[Loss, ...]:
    """Build several losses; each takes the parameters it has, and a parameter that no loss has is an error."""
    known = {name: parameter_defaults(name) for name in names}
    for parameter in parameters:
        if not any(parameter in defaults for defaults in known.values()):
            raise UserError(_unknown_parameter(parameter, names))
    return tuple(loss_class(name)(**{k: v for k, v in parameters.items() if k in known[name]}) for name in names)


def describe() -> list[LossRow]:
    """List all losses with the information needed to choose one."""
    return [
        LossRow(
            name=name,
            parameters=parameter_defaults(name),
            paper=cls.paper,
            needs_reference=cls.needs_reference,
            summary=(cls.__doc__ or "").splitlines()[0],
        )
        for name, cls in sorted(_LOSSES.items())
    ]


def suggestion(word: str, known: Iterable[str]) -> str:
    """Suggest the closest known word for a misspelled one, as the end of a sentence."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f", did you mean {close[0]!r}?" if close else ""


def _unknown_parameter(parameter: str, names: Sequence[str]) -> str:
    losses = " + ".join(names)
    known = {known: None for name in names for known in parameter_defaults(name)}
    owners = [name for name in loss_names() if parameter in parameter_defaults(name)]
    if owners:
        has = f"has no parameter {parameter}, only {', '.join(known)}" if known else "has no parameters"
        return f"{losses} {has}; {parameter} is a parameter of {', '.join(owners)}"
    has = f"has {', '.join(known)}" if known else "has no parameters"
    return f"unknown parameter {parameter!r}{suggestion(parameter, known)}; {losses} {has}"
