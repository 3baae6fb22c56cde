"""Count the collectives of a process in an optimizer step and their bytes, by kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.strategies.config_runs import trainer_of_config
from tests.support.strategies.parity import Case, load_parallel, make_policy, make_trainer
from thresher.plan.simulate.counters import CommunicationCounter


def count_step(case: Case, model_dir: Path) -> dict[str, int]:
    """Count the bytes of the second optimizer step on this rank, with a loss without reference."""
    return dict(_count_step(case, model_dir).bytes)


def count_calls_of_step(case: Case, model_dir: Path) -> dict[str, int]:
    """Count the collectives of the same step."""
    return dict(_count_step(case, model_dir).calls)


def _count_step(case: Case, model_dir: Path) -> CommunicationCounter:
    trainer = make_trainer(make_policy(case, *load_parallel(case, model_dir)), None, case)
    trainer.training_step()
    with CommunicationCounter() as counter:
        trainer.training_step()
    return counter


def count_step_of_config(model_dir: Path, axes: dict[str, int], layout: str, **settings: Any) -> dict[str, int]:
    """Count the second optimizer step of a policy that `builders` makes, with the sigmoid loss.

    The reference is the base of the adapter or, without one, a cache, which sends nothing.
    """
    _, trainer = trainer_of_config(model_dir, axes, layout, **settings)
    trainer.training_step()
    with CommunicationCounter() as counter:
        trainer.training_step()
    return dict(counter.bytes)
