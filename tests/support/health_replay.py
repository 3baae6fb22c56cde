"""The health events of a logged run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from thresher.observability.health.history import History
from thresher.observability.health.monitor import HealthEvent, RuleEngine


def replay(history: History, records: Sequence[Mapping[str, float]]) -> Iterator[HealthEvent]:
    engine = RuleEngine(replace(history))
    yield from engine.check(0)
    for record in records:
        yield from engine.add(int(record["step"]), record)
