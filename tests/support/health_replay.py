"""The health events of a logged run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from thresher.observability.health.monitor import HealthEvent, RuleEngine
from thresher.observability.health.rules import RunFacts


def replay(facts: RunFacts, records: Sequence[Mapping[str, float]]) -> Iterator[HealthEvent]:
    engine = RuleEngine(facts)
    yield from engine.check(0)
    for record in records:
        yield from engine.add(int(record["step"]), record)
