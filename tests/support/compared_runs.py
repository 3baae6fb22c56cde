"""Compare runs: configs that differ in a few values, and logs without what cannot be repeated."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# metrics that depend on the clock or the process
NOT_REPEATABLE = ("time/", "memory/", "pairs_per_second", "useful_tokens_per_second")


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Merge nested changes into nested values."""
    return {**base} | {
        key: merge(base[key], value) if isinstance(value, dict) and isinstance(base.get(key), dict) else value
        for key, value in changes.items()
    }


def metric_log(output: Path) -> list[dict[str, float]]:
    """The records of a run without what cannot be repeated."""
    records = [json.loads(line) for line in (output / "logs" / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in record.items() if not k.startswith(NOT_REPEATABLE)} for record in records]
