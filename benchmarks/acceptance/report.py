"""The report of an acceptance run: each part is ok, failed or skipped, with what it measured."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import print as show

from thresher.redact import redact_text

Facts = dict[str, Any]


class Skipped(Exception):  # noqa: N818  # an outcome, not an error
    """A part that this machine cannot run; the message says why."""


@dataclass(frozen=True)
class Place:
    """Where the parts run: the kind of device, its number, and a directory for the runs."""

    device: str
    num_devices: int
    directory: Path


Part = Callable[[Place], Facts]


def run_parts(parts: Mapping[str, Part], place: Place) -> dict[str, Facts]:
    """Run every part, however many fail before it."""
    return {name: _run(name, part, place) for name, part in parts.items()}


def _run(name: str, part: Part, place: Place) -> Facts:
    started = time.perf_counter()
    try:
        outcome = {"status": "ok", **part(place)}
    except Skipped as reason:
        outcome = {"status": "skipped", "reason": str(reason)}
    except Exception as error:  # a part may fail in any way, and the others still run
        trace = redact_text(traceback.format_exc())
        outcome = {"status": "failed", "reason": redact_text(f"{type(error).__name__}: {error}"), "traceback": trace}
    outcome["seconds"] = round(time.perf_counter() - started, 1)
    show(f"{name}: {outcome['status']} ({outcome['seconds']} s) {outcome.get('reason', '')[:300]}")
    return outcome


def write_report(path: Path, place: Place, parts: Mapping[str, Facts]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    report = {"format": 1, "device": place.device, "num_devices": place.num_devices, "parts": dict(parts)}
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def check(is_true: object, message: str) -> None:
    """Fail the part unless a fact holds."""
    if not is_true:
        raise AssertionError(message)
