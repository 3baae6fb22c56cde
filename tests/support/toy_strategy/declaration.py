"""Declares a strategy as another package would: it imports thresher's config, and no torch."""

from __future__ import annotations

from pydantic import PositiveFloat

from thresher.config.strategies import StrategyDeclaration, StrategySettings


class ToySettings(StrategySettings):
    spellings = {"rate": "learning_rate_factor"}
    learning_rate_factor: PositiveFloat = 1.0
    nested: dict[str, list[int]] = {}

    def check_workers(self, num_workers: int) -> None:
        if num_workers > 2:
            raise ValueError(f"has {num_workers} workers; toys have at most 2")


INFER = StrategyDeclaration(ToySettings, build_infer="toy_strategy.engine:build_infer", layouts=("padded",))
TRAIN = StrategyDeclaration(
    ToySettings,
    build_train="toy_strategy.engine:build_train",
    build_infer="toy_strategy.engine:build_infer",
    check="toy_strategy.engine:check",
    layouts=("padded",),
    dtypes=("fp32",),
    adapters=False,
)
ABSENT = StrategyDeclaration(
    ToySettings, build_infer="toy_strategy.engine:build_infer", build_train="nowhere:build", modules=("no_such_engine",)
)
