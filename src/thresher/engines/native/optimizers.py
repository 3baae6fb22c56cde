"""Optimizers by the name in `training_args.optim`: torch's own, over the shards of this process.

Most are elementwise, so a step does not depend on the sharding. Others need whole matrices, and each process a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from thresher.config.roles import TrainingArgs

Groups = list[dict[str, Any]]  # as torch takes them


@dataclass(frozen=True)
class OptimizerKind:
    """How an optimizer is made, and the size of its state."""

    build: Callable[[Groups, TrainingArgs, Sequence[nn.Parameter]], Optimizer]
    state: Callable[[TrainingArgs], float]  # tensors of a parameter's size
    is_elementwise: bool = True


def build_optimizer(groups: Groups, training: TrainingArgs, in_layers: Sequence[nn.Parameter]) -> Optimizer:
    """in_layers: the matrices of the decoder's layers."""
    return OPTIMIZERS[training.optim].build(groups, training, in_layers)


def state_tensors(training: TrainingArgs) -> float:
    """Tensors of a parameter's size that the optimizer keeps for it."""
    return OPTIMIZERS[training.optim].state(training)


def adamw_options(training: TrainingArgs) -> dict[str, Any]:
    """The arguments of torch's AdamW; every step sets its own learning rate."""
    return {
        "lr": training.learning_rate,
        "betas": (training.adam_beta1, training.adam_beta2),
        "eps": training.adam_epsilon,
        "fused": True,
    }


class MuonAndAdamW(Optimizer):
    """Muon for the matrices of layers, and AdamW for all other parameters."""

    def __init__(self, groups: Groups, training: TrainingArgs, in_layers: Sequence[nn.Parameter]) -> None:
        chosen = {parameter for parameter in in_layers if parameter.ndim == 2}
        parts: list[Groups] = [[], []]
        for part, is_chosen in zip(parts, (True, False), strict=True):
            for group in groups:
                part.append(group | {"params": [each for each in group["params"] if (each in chosen) == is_chosen]})
        settings: dict[str, Any] = {"adjust_lr_fn": "match_rms_adamw", **training.optim_args}
        made = torch.optim.Muon([each for each in parts[0] if each["params"]], lr=training.learning_rate, **settings)
        other = torch.optim.AdamW(parts[1], **adamw_options(training))
        self._parts = (made, other)
        self.param_groups = [*made.param_groups, *other.param_groups]
        self.state = made.state = other.state
        self.defaults = {}

    def step(self, closure: Any = None) -> Any:
        for part in self._parts:
            part.step(closure)  # type: ignore[no-untyped-call]


def _adamw(groups: Groups, training: TrainingArgs, _in_layers: Sequence[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(groups, **adamw_options(training))


def _of_torch(kind: Any, **options: Any) -> Callable[[Groups, TrainingArgs, Sequence[nn.Parameter]], Optimizer]:
    def build(groups: Groups, training: TrainingArgs, _in_layers: Sequence[nn.Parameter]) -> Optimizer:
        made: Optimizer = kind(groups, lr=training.learning_rate, **options, **training.optim_args)
        return made

    return build


def _flag(name: str) -> Callable[[TrainingArgs], float]:
    return lambda training: float(bool(training.optim_args.get(name)))


OPTIMIZERS: Mapping[str, OptimizerKind] = {
    "adamw": OptimizerKind(_adamw, lambda _: 2.0),
    "sgd": OptimizerKind(_of_torch(torch.optim.SGD, fused=True), _flag("momentum")),
    "rmsprop": OptimizerKind(
        _of_torch(torch.optim.RMSprop, foreach=True),
        lambda training: 1.0 + _flag("momentum")(training) + _flag("centered")(training),
    ),
    "adafactor": OptimizerKind(_of_torch(torch.optim.Adafactor), lambda _: 0.0, is_elementwise=False),
    "muon": OptimizerKind(MuonAndAdamW, lambda _: 1.0, is_elementwise=False),
}
