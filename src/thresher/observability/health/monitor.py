"""HealthMonitor: passes a run's metrics on to its trackers, applies the rules to them, and logs the events.

Rules see the logged records and nothing else, so a resumed run restores their state by reading `metrics.jsonl` again:
its events equal the events of a run that was never interrupted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from thresher.observability import log_files
from thresher.observability.health.history import History
from thresher.observability.health.rules import METRIC_PREFIX, RULES, Rule
from thresher.observability.trackers.jsonl import StepLog, read_metrics, read_records

logger = logging.getLogger(__name__)

# records in a row without the condition after which a rule may fire again
REARM_RECORDS = 20


@dataclass(frozen=True)
class HealthEvent:
    """A rule that fired after a step: what happened, the numbers that prove it, and what to change."""

    step: int
    rule: str
    summary: str
    evidence: Mapping[str, float]
    advice: str

    def __str__(self) -> str:
        numbers = ", ".join(f"{name} {value:.4g}" for name, value in self.evidence.items())
        return f"health: {self.rule} at step {self.step}: {self.summary} ({numbers}); {self.advice}"


def rules_that_stopped(run_dir: Path, step: int) -> list[str]:
    """Return the rules that stopped a run up to a step and after which it was not continued."""
    path = run_dir / log_files.HEALTH
    if not path.exists():
        return []
    rules: list[str] = []
    for line in read_records(path):
        if line["step"] > step:
            break
        if "continued" in line:
            rules = []
        elif line["action"] == "stop":
            rules.append(line["rule"])
    return rules


class RuleEngine:
    """Applies the rules to each record; a rule fires when its condition begins, not while it lasts."""

    def __init__(self, history: History, rules: Sequence[Rule] = RULES) -> None:
        self._history, self._rules = history, rules
        # records since the condition of each rule held
        self._quiet: dict[str, int] = {}

    def check(self, step: int) -> list[HealthEvent]:
        """Return the rules that fire now; called once before the first record, and then after each."""
        events = []
        for rule in self._rules:
            evidence = rule.check(self._history)
            num_quiet = self._quiet.get(rule.name, REARM_RECORDS)
            self._quiet[rule.name] = num_quiet + 1 if evidence is None else 0
            if evidence is not None and num_quiet >= REARM_RECORDS:
                advice = rule.advice(self._history.refused)
                events.append(HealthEvent(step, rule.name, rule.summary, evidence, advice))
        return events

    def add(self, step: int, metrics: Mapping[str, float]) -> list[HealthEvent]:
        """Add the logged metrics of a step; return the rules that fire."""
        return self.check(step) if self._history.add(step, metrics) else []


class HealthMonitor:
    """A metric logger in front of another one. Each event is a warning, a line of `health.jsonl` and a metric.

    Args:
        events: `health.jsonl`. Besides events, it has a line with `continued` where a run was resumed after a stop.
        stop: Called after an event, if the run has to end.
    """

    def __init__(
        self,
        log: Callable[[int, Mapping[str, float]], None],
        history: History,
        events: StepLog,
        stop: Callable[[], None] | None = None,
    ) -> None:
        self._log, self._engine, self._events, self._stop = log, RuleEngine(history), events, stop
        self.fired: list[str] = []

    def start(self, metrics: Path, *, is_new: bool) -> None:
        """Check the run before its first step, or read the records of a run that is resumed."""
        events = self._engine.check(0)
        if is_new:
            self._publish(0, {}, events)
            return
        for record in read_metrics(metrics) if metrics.exists() else ():
            self._engine.add(record["step"], record)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._publish(step, metrics, self._engine.add(step, metrics))

    def _publish(self, step: int, metrics: Mapping[str, float], events: Sequence[HealthEvent]) -> None:
        # the event first: the metric log decides after a crash which steps a resumed run repeats
        action = "warn" if self._stop is None else "stop"
        for event in events:
            self._events.write(asdict(event) | {"action": action})
            logger.warning("%s", event)
        marked = {**metrics, **{f"{METRIC_PREFIX}{event.rule}": 1.0 for event in events}}
        if marked:
            self._log(step, marked)
        if events and self._stop is not None:
            self.fired += [event.rule for event in events]
            self._stop()
