"""The engine of the toy strategy: one process, and a learning rate of its own."""

from __future__ import annotations

from typing import Any

from thresher.errors import UserError
from thresher.strategies.native.infer import NativeInfer
from thresher.strategies.native.train import NativeTrain
from thresher.strategies.spec import ModelSpec, PolicySpec, StrategyCheck
from thresher.strategies.strategy import StepOutcome


class ToyTrain(NativeTrain):
    factor: float

    def train_step(self, *args: Any, learning_rate: float, **rest: Any) -> StepOutcome:
        return super().train_step(*args, learning_rate=learning_rate * self.factor, **rest)


def build_train(spec: PolicySpec) -> ToyTrain:
    policy = ToyTrain(spec.source.load(), spec.layout, spec.compute_dtype, spec.optimizer)
    policy.factor = spec.settings.learning_rate_factor
    return policy


def build_infer(spec: ModelSpec) -> NativeInfer:
    return NativeInfer(spec.source.load().requires_grad_(False).eval(), spec.layout, spec.compute_dtype)


def check(run: StrategyCheck) -> None:
    if run.model_config.model_type != "llama":
        raise UserError(f"{run.section}: toy_train trains llamas, and {run.path} is {run.model_config.model_type}")
