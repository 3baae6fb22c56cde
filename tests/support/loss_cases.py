"""Pairs for the tests of losses, and how to get values and per-token gradients from an objective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from thresher.losses import ExampleLogps, Loss, Objective, ObjectiveInputs, ResponseLogps, make_loss

REFERENCE_LOSSES = [
    "sigmoid", "robust", "hinge", "ipo", "ipo_sum", "exo_pair", "nca_pair", "bco_pair", "sppo_hard",
    "apo_zero", "apo_down", "discopop", "sigmoid_norm", "aot", "aot_unpaired", "dpop",
]  # fmt: skip
REFERENCE_FREE_LOSSES = ["simpo", "alphapo", "orpo", "cpo", "sft"]
COUPLED_LOSSES = ["aot", "aot_unpaired"]
# that fit the margin column
SCORED_LOSSES = ["rpo_sq", "rpo_bwd_kl", "rpo_fwd_kl"]
# of reward models, which have no logps
REWARD_LOSSES = ["bradley_terry"]
# of pairs
ALL_LOSSES = REFERENCE_LOSSES + REFERENCE_FREE_LOSSES
RESPONSE_LOSSES = ["kto", "bco", "apo_zero_unpaired", "plackett_luce", "infonca"]
INDEPENDENT_LOSSES = [name for name in ALL_LOSSES if name not in COUPLED_LOSSES]
F_DIVERGENCE_LOSSES = ["sigmoid", "robust", "hinge", "ipo", "ipo_sum", "exo_pair", "discopop", "sigmoid_norm"]


def side(rows: Sequence[Sequence[float]], dtype: torch.dtype = torch.float64, grad: bool = False) -> ResponseLogps:
    """Build one side from a list of logps per pair."""
    flat = torch.tensor([value for row in rows for value in row], dtype=dtype, requires_grad=grad)
    return ResponseLogps(flat, torch.tensor([len(row) for row in rows], dtype=torch.int64))


def hand_pairs(*, second: bool = False) -> ObjectiveInputs:
    """Build the pair of the hand-derived cases: r_w = 1, r_l = -2; with `second`, another of r_w = 0.5, r_l = 1."""
    extra = slice(None) if second else slice(1)
    return ObjectiveInputs(
        policy=ExampleLogps.of(
            side([[-1.0, -2.0], [-1.0]][extra], grad=True), side([[-2.0, -2.0, -3.0], [-2.0]][extra], grad=True)
        ),
        reference=ExampleLogps.of(side([[-2.0, -2.0], [-1.5]][extra]), side([[-1.0, -2.0, -2.0], [-3.0]][extra])),
    )


def random_pairs(
    num_pairs: int = 6, *, dtype: torch.dtype = torch.float64, seed: int = 0, collision: bool = False
) -> ObjectiveInputs:
    """Build pairs of 1 to 7 tokens per side, the reference close to the policy; the same numbers in every dtype."""
    generator = torch.Generator().manual_seed(seed)

    def logps(lengths: Tensor) -> Tensor:
        return -3.0 * torch.rand(int(lengths.sum()), generator=generator, dtype=torch.float64) - 0.05

    def build() -> tuple[ResponseLogps, ResponseLogps]:
        lengths = torch.randint(1, 8, (num_pairs,), generator=generator)
        policy = logps(lengths)
        noise = torch.randn(policy.shape, generator=generator, dtype=torch.float64)
        reference = (policy + 0.5 * noise).clamp(max=-0.01)
        spread = (policy - 0.3 * noise.abs()).clamp(min=-4.0).to(dtype) if collision else None
        return (
            ResponseLogps(policy.to(dtype).requires_grad_(), lengths, spread),
            ResponseLogps(reference.to(dtype), lengths),
        )

    chosen, rejected = build(), build()
    return ObjectiveInputs(ExampleLogps.of(chosen[0], rejected[0]), ExampleLogps.of(chosen[1], rejected[1]))


def objective_of(name: str, parameters: dict[str, float] | None = None) -> Objective:
    return Objective(((make_loss(name, parameters or {}), 1.0),))


def bare(loss: Loss) -> Objective:
    return Objective(((loss, 1.0),))


@dataclass(frozen=True)
class Evaluated:
    """Values [num_pairs] and the gradient of their sum by every policy logp, pair after pair."""

    values: Tensor
    chosen_grad: Tensor
    rejected_grad: Tensor

    def as_list(self) -> list[Tensor]:
        return [self.values, self.chosen_grad, self.rejected_grad]


def evaluate(objective: Objective, pairs: ObjectiveInputs) -> Evaluated:
    """Run an objective and differentiate it on fresh leaves."""
    chosen = pairs.policy.chosen.values.detach().clone().requires_grad_()
    rejected = pairs.policy.rejected.values.detach().clone().requires_grad_()
    fresh = replace(
        pairs,
        policy=ExampleLogps.of(
            replace(pairs.policy.chosen, values=chosen),
            replace(pairs.policy.rejected, values=rejected),
        ),
    )
    values = objective(fresh).per_pair
    grads = torch.autograd.grad(values.sum(), [chosen, rejected], allow_unused=True)
    chosen_grad, rejected_grad = (
        torch.zeros_like(leaf) if g is None else g for g, leaf in zip(grads, (chosen, rejected), strict=True)
    )
    return Evaluated(values.detach(), chosen_grad, rejected_grad)


def take_pairs(pairs: ObjectiveInputs, order: Sequence[int]) -> ObjectiveInputs:
    """Select pairs by index, in that order."""

    def take(response: ResponseLogps) -> ResponseLogps:
        lengths = response.lengths.tolist()
        parts = response.values.split(lengths)
        collision = None if response.log_sum_squared_probs is None else response.log_sum_squared_probs.split(lengths)
        return ResponseLogps(
            torch.cat([parts[i] for i in order]),
            response.lengths[list(order)],
            None if collision is None else torch.cat([collision[i] for i in order]),
        )

    def both(sides: ExampleLogps) -> ExampleLogps:
        return ExampleLogps.of(take(sides.chosen), take(sides.rejected))

    return ObjectiveInputs(
        both(pairs.policy),
        None if pairs.reference is None else both(pairs.reference),
        None if pairs.weight is None else pairs.weight[list(order)],
        None if pairs.margin is None else pairs.margin[list(order)],
    )
