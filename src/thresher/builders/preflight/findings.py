"""What a check finds: problems, which stop a run, and warnings. All problems are raised as one error."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, ParamSpec

from thresher.errors import UserError


class Finding(NamedTuple):
    """A line for the user."""

    text: str
    is_problem: bool = True


P = ParamSpec("P")
Check = Callable[[], Iterable[Finding]]


def warning(text: str) -> Finding:
    return Finding(text, is_problem=False)


def problems_of(call: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> Iterator[Finding]:
    """Call a function that raises a UserError for a problem."""
    try:
        call(*args, **kwargs)
    except UserError as error:
        yield Finding(str(error))


def report(checks: Iterable[Check]) -> list[str]:
    """Run all checks; raise their problems, each once, as one error, or return their warnings."""
    found = [finding for check in checks for finding in _findings(check)]
    problems = list(dict.fromkeys(finding.text for finding in found if finding.is_problem))
    if problems:
        lines = (f"  - {each.replace(chr(10), chr(10) + '    ')}" for each in problems)
        raise UserError(problems[0] if len(problems) == 1 else f"{len(problems)} problems:\n" + "\n".join(lines))
    return list(dict.fromkeys(finding.text for finding in found))


def _findings(check: Check) -> Iterator[Finding]:
    # a check may also raise: several need the same model, and a model that cannot be loaded is one problem
    try:
        yield from check()
    except UserError as error:
        yield Finding(str(error))
