"""Choose the cases that CI runs of a test marked `covered`: few, with every value of every parameter.

A parameter that has a property `case_values` (name to text) is covered by each of these values, others as a whole.
The cases that are not chosen get the mark `hand`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import pytest

Values = frozenset[tuple[str, str]]  # (parameter or its part, value)


class Case(NamedTuple):
    """A case of a `covered` test."""

    values: Values
    in_ci: bool


def values_of(parameters: Mapping[str, Any]) -> Values:
    found: set[tuple[str, str]] = set()
    for name, value in parameters.items():
        parts = getattr(value, "case_values", None)
        found |= {(name, repr(value))} if parts is None else set(parts.items())
    return frozenset(found)


def choose(cases: Sequence[Values], costs: Sequence[float]) -> list[int]:
    """Greedy cover: always the case with the most values that are still missing, the cheapest and first of equals."""
    missing = set().union(*cases)
    chosen: list[int] = []
    while missing:
        best = max(range(len(cases)), key=lambda case: (len(cases[case] & missing), -costs[case], -case))
        chosen.append(best)
        missing -= cases[best]
    return sorted(chosen)


def mark_other_cases(items: Iterable[pytest.Item]) -> dict[str, list[Case]]:
    """Mark as `hand` the cases of `covered` tests that CI leaves out; return all of them by test."""
    by_test: dict[str, list[pytest.Function]] = {}
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if isinstance(item, pytest.Function) and "covered" in marks and "hand" not in marks:
            by_test.setdefault(item.nodeid.partition("[")[0], []).append(item)
    found: dict[str, list[Case]] = {}
    for test, cases in by_test.items():
        values = [values_of(case.callspec.params) for case in cases]
        chosen = choose(values, [_cost(case) for case in cases])
        for number in set(range(len(cases))) - set(chosen):
            cases[number].add_marker(pytest.mark.hand)
        found[test] = [Case(case, number in chosen) for number, case in enumerate(values)]
    return found


def _cost(item: pytest.Function) -> float:
    """The number of processes, where a parameter has it."""
    return max((getattr(value, "num_processes", 1) for value in item.callspec.params.values()), default=1)


def render_table(tests: Mapping[str, Sequence[Case]]) -> str:
    """One row per test, as markdown."""
    lines = ["| test | cases | in CI | with every |", "|---|---:|---:|---|"]
    for test, cases in sorted(tests.items()):
        in_ci = [case for case in cases if case.in_ci]
        counts = Counter(name for name, _ in frozenset().union(*(case.values for case in in_ci)))
        names = ", ".join(f"{name} ({count})" for name, count in sorted(counts.items()) if count > 1)
        lines.append(f"| `{test.removeprefix('tests/')}` | {len(cases)} | {len(in_ci)} | {names} |")
    return "\n".join(lines)
