"""The registry of losses: names, parameters, and errors that suggest the right spelling.

A package adds a loss with an entry point of the group `thresher.losses`, which names its registered class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import cache
from importlib.metadata import EntryPoint
from typing import TypeVar, dataclass_transform

from thresher.errors import UserError, nearest
from thresher.imported_function import find_entry_points
from thresher.losses.base import Loss, Modifier, Reads, Reward
from thresher.losses.custom import load_loss

_LOSSES: dict[str, type[Loss]] = {}

_ONLINE = "it needs responses that are sampled during training; use sigmoid (DPO) on stored pairs"
# methods that other trainers name like a loss
_OTHER_METHODS = {
    "kto_pair": "use kto on labelled responses, or bco_pair on pairs",
    **dict.fromkeys(("ppo", "grpo", "dapo", "gspo", "rloo", "reinforce", "online_dpo", "xpo", "nash_md"), _ONLINE),
    "dpo": "use sigmoid",
    "apo": "use apo_zero or apo_down",
    "exo": "use exo_pair",
    "nca": "use nca_pair",
    "sppo": "use sppo_hard",
    **dict.fromkeys(("slic", "rso"), "use hinge"),
    "cdpo": "use sigmoid with label_smoothing",
    **dict.fromkeys(("rdpo", "r_dpo"), "use sigmoid with length_penalty"),
    "rpo": "use sigmoid with rpo_alpha",
    "wpo": "use sigmoid with use_wpo: true",
    "dpo_positive": "use dpop",
    "humanline": "use sigmoid with clamp_log_ratio: [-1, 1.5] and reference.sync_steps",
    "ld_dpo": "use sigmoid with ld_alpha",
    "odpo": "use sigmoid with a margin column in the data",
    "tr_dpo": "use sigmoid with reference.sync_steps",
    "mpo": "name several losses with their weights, such as {sigmoid: 0.8, bco_pair: 0.2, sft: 1}",
}

LossClass = TypeVar("LossClass", bound=type[Loss])


@dataclass(frozen=True)
class LossRow:
    """One loss as a row of a table."""

    name: str
    parameters: dict[str, float]  #: with their defaults
    paper: str
    needs_reference: bool
    summary: str


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def register(
    name: str,
    *,
    paper: str,
    supports: Iterable[Modifier],
    reward: Reward = "scores",
    needs_reference: bool = True,
    couples_pairs: bool = False,
    compares_sides: bool = True,
    reads: Reads = "pairs",
) -> Callable[[LossClass], LossClass]:
    """Make a loss class a frozen dataclass with these class variables, and register it under its name."""
    if name in _LOSSES:
        raise ValueError(f"two losses are named {name}")

    def add(cls: LossClass) -> LossClass:
        cls.name, cls.paper = name, paper
        cls.supports, cls.reward = frozenset(supports), reward
        cls.needs_reference = needs_reference
        cls.couples_pairs = couples_pairs
        cls.compares_sides = compares_sides
        cls.reads = reads
        _LOSSES[name] = dataclass(frozen=True)(cls)
        return cls

    return add


def loss_names() -> list[str]:
    """List the names of all losses, sorted."""
    return sorted(_all_losses())


@cache
def _entry_points() -> dict[str, EntryPoint]:
    return find_entry_points("thresher.losses", "loss")


def _load(name: str) -> None:
    """Import the package of a loss, which registers it."""
    location = _entry_points()[name].value
    try:
        loss = _entry_points()[name].load()
    except Exception as error:  # the package may raise anything
        problem = f"{type(error).__name__}: {error}"
        raise UserError(f"the loss {name} cannot be loaded from {location}: {problem}") from error
    if _LOSSES.get(name) is not loss:
        raise UserError(f"{location} is not registered as the loss {name}; decorate its class with @register({name!r})")


def _all_losses() -> dict[str, type[Loss]]:
    """Load the losses of all packages; one that cannot be loaded is an error where it is named, and left out here."""
    for name in _entry_points():
        with suppress(UserError):
            _load(name)
    return _LOSSES


def loss_class(name: str) -> type[Loss]:
    """Find a loss by name, or load one of the user by its location."""
    if ":" in name:
        return load_loss(name)
    if name in _entry_points():
        _load(name)
    if name not in _LOSSES:
        if name.endswith(".py"):
            raise UserError(f"pref_loss {name} names no function; write {name}:FUNCTION")
        if other := _OTHER_METHODS.get(name.lower().replace("-", "_")):
            raise UserError(f"pref_loss {name} is not a loss of thresher: {other} (see `thresher losses`)")
        raise UserError(
            f"unknown loss {name!r}{_suggestion(name, _all_losses())}; the losses are {', '.join(loss_names())}"
        )
    return _LOSSES[name]


def parameter_defaults(name: str) -> dict[str, float]:
    """Map each parameter of a loss to its default; fields that hold state are not parameters."""
    loss = loss_class(name)()
    return {each.name: getattr(loss, each.name) for each in fields(loss) if not each.metadata.get("state")}


def make_loss(name: str, parameters: Mapping[str, float]) -> Loss:
    """Build a loss.

    Args:
        name: a name that `loss_names` lists.
        parameters: values by name; the others keep their defaults.
    """
    return make_losses([name], parameters)[0]


def make_losses(
    names: Sequence[str], parameters: Mapping[str, float], own: Mapping[str, Mapping[str, float]] | None = None
) -> tuple[Loss, ...]:
    """Build several losses; each takes the parameters it has, and a parameter that no loss has is an error."""
    own = own or {}  # by the name of the loss; these take precedence
    known = {name: parameter_defaults(name) for name in names}
    for name, given in own.items():
        if unknown := [parameter for parameter in given if parameter not in known[name]]:
            raise UserError(_unknown_parameter(unknown[0], [name]))
    for parameter in parameters:
        owners = [name for name in names if parameter in known[name]]
        if not owners:
            raise UserError(_unknown_parameter(parameter, names))
        if all(parameter in own.get(name, {}) for name in owners):
            raise UserError(
                f"{parameter} has no effect: pref_loss sets it for {' and '.join(owners)}; remove one of them"
            )
    shared = {name: {key: value for key, value in parameters.items() if key in known[name]} for name in names}
    return tuple(loss_class(name)(**{**shared[name], **own.get(name, {})}) for name in names)


def describe() -> list[LossRow]:
    """List all losses with the information needed to choose one."""
    return [
        LossRow(name, parameter_defaults(name), cls.paper, cls.needs_reference, (cls.__doc__ or "").splitlines()[0])
        for name, cls in sorted(_all_losses().items())
    ]


def _suggestion(word: str, known: Iterable[str]) -> str:
    meant = nearest(word, known)
    return f", did you mean {meant!r}?" if meant else ""


def _unknown_parameter(parameter: str, names: Sequence[str]) -> str:
    losses = " + ".join(names)
    known = {known: None for name in names for known in parameter_defaults(name)}
    owners = [name for name in loss_names() if parameter in parameter_defaults(name)]
    if owners:
        has = f"has no parameter {parameter}, only {', '.join(known)}" if known else "has no parameters"
        return f"{losses} {has}; {parameter} is a parameter of {', '.join(owners)}"
    has = f"has {', '.join(known)}" if known else "has no parameters"
    return f"unknown parameter {parameter!r}{_suggestion(parameter, known)}; {losses} {has}"
