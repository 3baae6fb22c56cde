"""What an objective asks of a loss, and of the few losses that carry state from step to step."""

from collections.abc import Mapping
from typing import ClassVar, Literal, Protocol, Self, runtime_checkable

from torch import Tensor

from thresher.losses.scores import PairScores

Modifier = Literal["f_divergence", "ld_alpha", "length_penalty", "margin", "weight", "wpo"]

# A loss lists the modifiers that reach its formula, so that an objective can refuse one that would do nothing.
EVERY_MODIFIER: frozenset[Modifier] = frozenset(
    ("f_divergence", "ld_alpha", "length_penalty", "margin", "weight", "wpo")
)
RATIO_MODIFIERS: frozenset[Modifier] = frozenset(("ld_alpha", "weight", "wpo"))
LOGIT_MODIFIERS: frozenset[Modifier] = frozenset(("length_penalty", "margin", "weight", "wpo"))


class Loss(Protocol):
    """One preference loss: a frozen dataclass whose fields are its knobs.

    supports: the modifiers that this loss honours. compares_sides: False for a loss that reads the chosen side only.
    """

    name: ClassVar[str]
    paper: ClassVar[str]
    needs_reference: ClassVar[bool]
    couples_pairs: ClassVar[bool]
    compares_sides: ClassVar[bool]
    supports: ClassVar[frozenset[Modifier]]

    @property
    def zero_margin_loss(self) -> float | None:
        """Say what every pair costs when policy == reference, or None where that is no constant."""

    def __call__(self, pairs: PairScores) -> Tensor:
        """Compute the loss of each pair: [num_pairs]."""

    def rewards(self, pairs: PairScores) -> tuple[Tensor, Tensor]:
        """Compute what this loss takes for the reward of each side: two [num_pairs]."""


@runtime_checkable
class StatefulLoss(Loss, Protocol):
    """A loss that learns from finished steps; each change makes a new instance, a checkpoint keeps `state()`."""

    def advanced(self, chosen_reward_sum: float, rejected_reward_sum: float, num_pairs: int) -> Self:
        """Take in one finished step, summed over all ranks."""

    def state(self) -> dict[str, float]:
        """Return what a checkpoint must keep."""

    def with_state(self, state: Mapping[str, float]) -> Self:
        """Return this loss as it was when `state` was saved."""
