"""Count the collectives of a process in an optimizer step and their bytes, by kind."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tests.support.engines.parity import Case, load_parallel, make_policy, make_trainer
from thresher.plan.simulate.counters import Collective, CommunicationCounter


def count_step(case: Case, model_dir: Path) -> dict[str, int]:
    """Count the bytes of the second optimizer step on this rank, with a loss without reference."""
    return by_kind(_count_step(case, model_dir).payloads)


def count_calls_of_step(case: Case, model_dir: Path) -> dict[str, int]:
    """Count the collectives of the same step."""
    return by_kind(_count_step(case, model_dir).calls_of)


def _count_step(case: Case, model_dir: Path) -> CommunicationCounter:
    trainer = make_trainer(make_policy(case, *load_parallel(case, model_dir)), None, case)
    trainer.training_step()
    with CommunicationCounter() as counter:
        trainer.training_step()
    return counter


def by_kind(counted: Counter[Collective]) -> dict[str, int]:
    """Add up what was counted for each kind of collective."""
    sums: Counter[str] = Counter()
    for collective, count in counted.items():
        sums[collective.kind] += count
    return dict(sums)
