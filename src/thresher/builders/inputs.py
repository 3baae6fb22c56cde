"""What a run works on before it has a model: objective, layout, pairs, plan. Every rank gets the same."""

from __future__ import annotations

from dataclasses import dataclass

from thresher.builders.data import StoreBuilder, open_stores
from thresher.builders.run import build_layout
from thresher.config import DPOConfig
from thresher.data.batching.plan import Plan, make_plan
from thresher.data.store.reader import PairStore
from thresher.losses.objective import Objective
from thresher.models.layouts import Layout


@dataclass(frozen=True)
class RunInputs:
    """Small enough to travel: a store goes as its path, and the other side maps its files again."""

    objective: Objective
    layout: Layout
    train: PairStore
    validation: PairStore | None
    plan: Plan


def open_inputs(config: DPOConfig, objective: Objective, build_store: StoreBuilder) -> RunInputs:
    """Build what needs no model, preparing pairs that are not yet there; a mistake is told in seconds."""
    tokenizer, layout = build_layout(config)
    train, validation = open_stores(config, tokenizer, build_store)
    return RunInputs(objective, layout, train, validation, build_plan(config, len(train)))


def build_plan(config: DPOConfig, num_pairs: int) -> Plan:
    return make_plan(
        num_pairs,
        seed=config.seed,
        pairs_per_step=config.pairs_per_step,
        max_steps=config.max_steps,
        num_epochs=config.num_train_epochs,
    )
