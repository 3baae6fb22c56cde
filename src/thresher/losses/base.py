"""The base class of all losses: defaults, parameter checks and saved state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import Field, fields, replace
from typing import Any, ClassVar, Literal, Self, get_args

from torch import Tensor

from thresher.errors import UserError
from thresher.losses.parameters import FINITE
from thresher.losses.scores import ChosenRejected, PairScores

Modifier = Literal[
    "clamp_log_ratio",
    "f_divergence",
    "gamma",
    "ld_alpha",
    "length_penalty",
    "margin",
    "reference_free",
    "weight",
    "wpo",
]
Reward = Literal["scores", "mean_scores", "logps", "mean_logps"]
# comparisons of two responses, single responses with a label, or all responses to a prompt
Reads = Literal["pairs", "labels", "lists"]

# A loss lists the modifiers that reach its formula, so an objective can reject one without effect.
ALL_MODIFIERS: frozenset[Modifier] = frozenset(get_args(Modifier))
RATIO_MODIFIERS: frozenset[Modifier] = frozenset(("clamp_log_ratio", "ld_alpha", "weight", "wpo"))
LOGIT_MODIFIERS: frozenset[Modifier] = frozenset(("length_penalty", "margin", "weight", "wpo"))


class Loss(ABC):
    """One preference loss. `register` makes subclasses frozen dataclasses, whose fields are their parameters."""

    name: ClassVar[str]
    paper: ClassVar[str]  #: arXiv number
    supports: ClassVar[frozenset[Modifier]]  #: the modifiers that change this loss
    reward: ClassVar[Reward] = "scores"  #: what the rewards are, in units of beta
    needs_reference: ClassVar[bool] = True
    couples_pairs: ClassVar[bool] = False  #: the loss of a pair depends on the other pairs of the step
    compares_sides: ClassVar[bool] = True  #: False if only the chosen side is read
    reads: ClassVar[Reads] = "pairs"
    reads_given_margin: ClassVar[bool] = False  #: the margin column, or the scores of a list, is what the loss fits
    trains_rewards: ClassVar[bool] = False  #: of a reward model, which gives each response one number in place of logps
    reads_mismatched: ClassVar[bool] = False  #: each example has a second response, to a different prompt of the step
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    beta: float  #: scale of the rewards; a loss without this field overrides `rewards`

    def __post_init__(self) -> None:
        for field in fields(self):
            if not field.metadata.get("state"):
                allowed = field.metadata.get("allowed", FINITE)
                allowed.check(self.name, field.name, getattr(self, field.name), usual=field.default)

    @property
    def zero_margin_loss(self) -> float | None:
        """The loss of every pair when policy == reference; None without a reference, where it is not a constant."""
        return float(self(PairScores.of_equal_models())) if self.needs_reference else None

    @abstractmethod
    def __call__(self, scores: Any) -> Tensor:
        """Compute the loss of each pair from its `PairScores`, or of each example from its `ResponseScores`."""

    def rewards(self, pairs: PairScores) -> ChosenRejected:
        """Compute the rewards that this loss compares."""
        compared: ChosenRejected = getattr(pairs, self.reward)
        return compared.scaled(self.beta)

    def after_step(self, chosen_reward_sum: float, rejected_reward_sum: float, num_pairs: int) -> Self:  # noqa: ARG002
        """Return this loss with its state updated by one step; the sums are over all ranks."""
        return self

    def state(self) -> dict[str, float]:
        """Return the values that a checkpoint must keep: the fields marked with STATE."""
        return {field.name: float(getattr(self, field.name)) for field in fields(self) if field.metadata.get("state")}

    def with_state(self, state: Mapping[str, float]) -> Self:
        """Return this loss with its state restored."""
        kept = self.state()
        if set(state) != set(kept):
            raise UserError(
                f"{self.name} keeps {' and '.join(kept) or 'no state'}, but the saved state has {sorted(state)}; "
                "resume with the loss that the checkpoint was made with"
            )
        # All values are saved as floats; a field whose default is an int gets an int.
        return replace(self, **{name: type(getattr(type(self), name))(value) for name, value in state.items()})
