"""TRL's own losses, driven on given logps: the independent oracle of this package's tests.

`DPOTrainer._compute_loss` runs for real; only the model is a dummy that returns given logps.
"""

from collections import defaultdict
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tests.support.loss_cases import Evaluated, take_pairs
from thresher.losses import ExampleLogps, ObjectiveInputs


class GivenLogps(torch.nn.Module):
    """Answer every forward with the same padded logps."""

    is_gradient_checkpointing = False

    def __init__(self, log_probs: Tensor, log_sum_squared_probs: Tensor):
        super().__init__()
        self.output = SimpleNamespace(
            log_probs=log_probs,
            log_sum_sq_probs=log_sum_squared_probs,
            entropy=torch.zeros_like(log_probs),
            mean_logits=torch.zeros_like(log_probs),
            is_top1=torch.zeros_like(log_probs, dtype=torch.bool),
        )

    def forward(self, **_: object) -> SimpleNamespace:
        return self.output


@dataclass(frozen=True)
class Settings:
    """The parameters of TRL's DPOConfig that the tests set."""

    beta: float = 0.1
    label_smoothing: float = 0.0
    discopop_tau: float = 0.05
    ld_alpha: float | None = None
    f_divergence_type: str = "reverse_kl"
    f_alpha_divergence_coef: float = 0.5
    use_weighting: bool = False
    loss_weights: tuple[float, ...] = (1.0,)


def _padded(sides: ExampleLogps, attribute: str = "values") -> Tensor:
    rows = [
        row
        for side in (sides.chosen, sides.rejected)
        for row in getattr(side, attribute).detach().split(side.lengths.tolist())
    ]
    return pad_sequence(rows, batch_first=True)


def trl_mean_loss(loss_types: list[str], pairs: ObjectiveInputs, settings: Settings) -> Evaluated:
    """Let TRL compute the mean loss of these pairs as one batch, with its gradient by every policy logp."""
    from trl import DPOTrainer

    assert pairs.reference is not None
    lengths = torch.cat([pairs.policy.chosen.lengths, pairs.policy.rejected.lengths])
    policy = _padded(pairs.policy).requires_grad_()
    collision = torch.zeros_like(policy)
    if settings.use_weighting:
        collision = _padded(pairs.policy, "log_sum_squared_probs")
    mask = (torch.arange(policy.shape[1]) < lengths[:, None]).long()
    # The first token of a sequence is never predicted, so TRL's mask is one column wider than its logps.
    completion_mask = torch.cat([torch.zeros_like(mask[:, :1]), mask], dim=1)
    inputs = {
        "input_ids": torch.zeros_like(completion_mask),
        "attention_mask": torch.ones_like(completion_mask),
        "completion_mask": completion_mask,
    }
    model = GivenLogps(policy, collision)
    trainer = SimpleNamespace(
        model=model,
        ref_model=GivenLogps(_padded(pairs.reference), collision),
        accelerator=SimpleNamespace(device=policy.device, gather=lambda t: t, gather_for_metrics=lambda t: t),
        args=SimpleNamespace(gradient_checkpointing_kwargs=None, discopop_tau=settings.discopop_tau),
        aux_loss_enabled=False,
        precompute_ref_logps=False,
        loss_types=loss_types,
        loss_weights=list(settings.loss_weights),
        beta=settings.beta,
        label_smoothing=settings.label_smoothing,
        ld_alpha=settings.ld_alpha,
        f_divergence_type=settings.f_divergence_type,
        f_alpha_divergence_coef=settings.f_alpha_divergence_coef,
        use_weighting=settings.use_weighting,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
    )
    loss = DPOTrainer._compute_loss(trainer, model, inputs, False)
    (grad,) = torch.autograd.grad(loss, policy)
    chosen_grad, rejected_grad = grad.chunk(2)
    chosen_mask, rejected_mask = mask.bool().chunk(2)
    return Evaluated(loss.detach(), chosen_grad[chosen_mask], rejected_grad[rejected_mask])


def trl_per_pair(loss_types: list[str], pairs: ObjectiveInputs, settings: Settings) -> Evaluated:
    """Let TRL compute each pair's loss in a separate batch."""
    parts = [trl_mean_loss(loss_types, take_pairs(pairs, [i]), settings) for i in range(pairs.num_pairs)]
    return Evaluated(
        torch.stack([part.values for part in parts]),
        torch.cat([part.chosen_grad for part in parts]),
        torch.cat([part.rejected_grad for part in parts]),
    )


def trl_cpo_losses(chosen: Tensor, rejected: Tensor, loss_type: str, beta: float, **parameters: float) -> Tensor:
    """Let TRL's CPOTrainer compare given logps; loss_type sigmoid, ipo or simpo."""
    from trl.experimental.cpo import CPOTrainer

    trainer = SimpleNamespace(
        alpha=parameters.get("alpha", 0.0),
        beta=beta,
        loss_type=loss_type,
        label_smoothing=parameters.get("label_smoothing", 0.0),
        simpo_gamma=parameters.get("gamma", 0.0),
        accelerator=SimpleNamespace(device=chosen.device),
    )
    return CPOTrainer.cpo_loss(trainer, chosen, rejected)[0]


def trl_odds_ratio(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """Let TRL's ORPOTrainer compare given mean logps: beta * logsig(log odds ratio)."""
    from trl.experimental.orpo import ORPOTrainer

    trainer = SimpleNamespace(beta=beta, accelerator=SimpleNamespace(device=chosen.device))
    return ORPOTrainer.odds_ratio_loss(trainer, chosen, rejected)[0]
