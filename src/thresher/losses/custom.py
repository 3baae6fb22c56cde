"""The user's own losses: a function of the pair scores in a Python file or module, named in `pref_loss`.

Calls on random pairs find out what the function reads: whether it needs a reference, couples pairs, compares sides, and
which modifiers reach it. So it is checked, combined and distributed like the built-in losses.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, make_dataclass, replace
from functools import cache
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from thresher.errors import UserError
from thresher.imported_function import import_function, read_source
from thresher.losses.base import Loss, Modifier
from thresher.losses.pairs import ExampleLogps, ObjectiveInputs, ResponseLogps, concat_pairs
from thresher.losses.parameters import FINITE, parameter
from thresher.losses.scores import ChosenRejected, FDivergence, PairScores, score_pairs

_NUM_PROBED_PAIRS = 16
_MAX_PROBED_LENGTH = 12
_MISSING = inspect.Parameter("pairs", inspect.Parameter.KEYWORD_ONLY)
_FORM = "write function(pairs, beta=0.1): pairs is a PairScores, other parameters have a number as default"


class CustomLoss(Loss):
    """A loss whose formula is the user's function."""

    paper = "none"
    function: ClassVar[Callable[..., Any]]
    source: ClassVar[bytes | None]  # content of its file, None for a function in a package

    @property
    def zero_margin_loss(self) -> None:
        """None: the function may read more than log ratios."""

    def __call__(self, pairs: PairScores) -> Tensor:
        """Call the function, and check that it returns one loss per pair."""
        parameters = {field.name: getattr(self, field.name) for field in fields(self)}
        values = type(self).function(pairs, **parameters)
        shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        if shape != (pairs.num_pairs,):
            raise UserError(
                f"pref_loss: {self.name} returned {shape} for {pairs.num_pairs} pairs; return one loss per pair, a "
                "tensor of shape (num_pairs,), without a mean"
            )
        return cast("Tensor", values)

    def rewards(self, pairs: PairScores) -> ChosenRejected:
        """Scale log ratios by beta, or by 1 if the function has no beta; logps if it needs no reference."""
        return (pairs.scores if self.needs_reference else pairs.logps).scaled(getattr(self, "beta", 1.0))

    def __reduce__(self) -> tuple[Any, ...]:
        # by the content of the file: every rank runs the same function, wherever it is
        return _restore, (self.name, self.source, {field.name: getattr(self, field.name) for field in fields(self)})


def load_loss(location: str) -> type[Loss]:
    """Load the loss at path/to/file.py:function or package.module:function."""
    try:
        source = read_source(location)
    except OSError as error:
        raise UserError(f"pref_loss: cannot import {location}: {error}; check the path") from None
    return _load(location, source)


def _restore(location: str, source: bytes | None, parameters: dict[str, float]) -> Loss:
    return _load(location, source)(**parameters)


@cache
def _load(location: str, source: bytes | None) -> type[CustomLoss]:
    function = import_function(location, "pref_loss", source)
    own = {"name": location, "function": staticmethod(function), "source": source, "__doc__": function.__doc__}
    parameters = [(name, float, parameter(default, FINITE)) for name, default in _parameters(location, function)]
    # typed as its fields: make_dataclass returns a plain type
    probed = make_dataclass("CustomLoss", parameters, bases=(CustomLoss,), namespace=own, frozen=True)
    generator = torch.Generator().manual_seed(0)
    halves = [_random_inputs(generator), _random_inputs(generator)]
    facts = _Probe(probed(), halves[0], concat_pairs(halves)).facts()
    loss = make_dataclass("CustomLoss", parameters, bases=(CustomLoss,), namespace={**own, **facts}, frozen=True)
    return cast("type[CustomLoss]", loss)


def _parameters(location: str, function: Callable[..., Any]) -> list[tuple[str, float]]:
    """Return the parameters after the first one with their defaults."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    pairs, *others = [*inspect.signature(function).parameters.values()] or [_MISSING]
    if pairs.kind not in positional:
        raise UserError(f"pref_loss: {location} has no parameter for the pairs; {_FORM}")
    for each in others:
        if isinstance(each.default, bool) or not isinstance(each.default, int | float):
            raise UserError(f"pref_loss: the parameter {each.name} of {location} has no number as default; {_FORM}")
    return [(each.name, float(each.default)) for each in others]


def _random_inputs(generator: torch.Generator) -> ObjectiveInputs:
    lengths = torch.randint(1, _MAX_PROBED_LENGTH, (2, _NUM_PROBED_PAIRS // 2), generator=generator)

    def logps() -> ExampleLogps:
        values = [-2.0 * torch.rand(int(each.sum()), generator=generator, dtype=torch.float64) for each in lengths]
        return ExampleLogps.of(*map(ResponseLogps, values, lengths))

    return ObjectiveInputs(logps(), logps())


@dataclass(frozen=True)
class _Probe:
    """Calls of a loss on random pairs with and without a change: what changes its values is what it reads."""

    loss: CustomLoss
    first_half: ObjectiveInputs
    inputs: ObjectiveInputs

    def facts(self) -> dict[str, Any]:
        """Return the class attributes of a loss."""
        needs_reference = self._needs_reference()
        self._check_gradient()
        couples_pairs = self._differs(self.first_half)
        supports: set[Modifier] = {"reference_free"} if needs_reference else set()
        if not couples_pairs:
            supports |= {"weight", "wpo"}
        if self._differs(self.inputs, f_divergence=FDivergence("js_divergence")):
            supports.add("f_divergence")
        if self._differs(self.inputs, ld_alpha=0.5):
            supports.add("ld_alpha")
        if self._differs(self.inputs, clamp_log_ratio=(-0.1, 0.1)):
            supports.add("clamp_log_ratio")
        if self._differs(self.inputs, margin=0.3):
            supports |= {"gamma", "length_penalty", "margin"}
        return {
            "needs_reference": needs_reference,
            "couples_pairs": couples_pairs,
            "compares_sides": self._differs(_less_likely_rejected(self.inputs)),
            "supports": frozenset(supports),
        }

    def _needs_reference(self) -> bool:
        try:
            self._call(score_pairs(replace(self.inputs, reference=None)))
        except UserError as error:
            if "no reference logps" not in str(error):
                raise
            return True
        return False

    def _check_gradient(self) -> None:
        policy = self.inputs.policy
        chosen = replace(policy.chosen, values=policy.chosen.values.clone().requires_grad_())
        inputs = replace(self.inputs, policy=ExampleLogps.of(chosen, policy.rejected))
        values = self._call(score_pairs(inputs))
        if not bool(torch.isfinite(values).all()):
            raise UserError(f"pref_loss: {self.loss.name} is not finite on random pairs; check its formula")
        if not values.requires_grad:
            raise UserError(
                f"pref_loss: {self.loss.name} has no gradient: it does not read the policy's chosen logps, or it "
                "detaches them"
            )

    def _differs(self, inputs: ObjectiveInputs, **modifiers: Any) -> bool:
        values = self._call(score_pairs(inputs, **modifiers))
        return not torch.allclose(values, self._call(score_pairs(self.inputs))[: len(values)], rtol=1e-9, atol=1e-9)

    def _call(self, pairs: PairScores) -> Tensor:
        try:
            return self.loss(pairs)
        except UserError:
            raise
        except Exception as error:  # the user's function may raise anything
            raise UserError(f"pref_loss: {self.loss.name} raised {type(error).__name__}: {error}") from error


def _less_likely_rejected(inputs: ObjectiveInputs) -> ObjectiveInputs:
    rejected = replace(inputs.policy.rejected, values=inputs.policy.rejected.values - 0.5)
    return replace(inputs, policy=ExampleLogps.of(inputs.policy.chosen, rejected))
