"""The engine of the toy strategy: the native one in one process, with its own learning rate."""

from __future__ import annotations

from dataclasses import replace

from toy_strategy.declaration import ToySettings

from thresher.engines.engine import Engine, TrainEngine
from thresher.engines.native.build import infer_engine, train_engine
from thresher.engines.native.parallelize import ParallelContext
from thresher.engines.native.parameters import LocalCheckpoint, LocalParameters
from thresher.engines.spec import ModelSpec
from thresher.errors import UserError


class ToyParameters(LocalParameters):
    factor = 1.0

    def update(self, learning_rate: float) -> None:
        super().update(learning_rate * self.factor)


def build_train(spec: ModelSpec[ToySettings]) -> TrainEngine:
    engine = train_engine(spec.load(), spec.layout, spec.compute_dtype, spec.training)
    parameters = ToyParameters(engine.model, engine.model, ParallelContext(), spec.training)
    parameters.factor = spec.settings.learning_rate_factor
    return replace(engine, parameters=parameters, checkpoint=LocalCheckpoint(parameters))


def build_infer(spec: ModelSpec[ToySettings]) -> Engine:
    return infer_engine(spec.load().requires_grad_(False).eval(), spec.layout, spec.compute_dtype)


def check(spec: ModelSpec[ToySettings]) -> None:
    if spec.model_config.model_type != "llama":
        raise UserError(f"{spec.section}: toy_train trains llamas, and {spec.path} is {spec.model_config.model_type}")
