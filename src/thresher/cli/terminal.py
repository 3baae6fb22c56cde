"""What a person sees beside the training itself: lines and tables, on stderr so that stdout stays clean."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from rich.console import Console
from rich.table import Table

from thresher.redact import printable, redact_text

console = Console(stderr=True, highlight=False)


def quiet_libraries() -> None:
    """Turn off the progress bars that transformers draws while it loads and saves; ours say what matters."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def announce(line: str) -> None:
    console.print(printable(redact_text(line)), markup=False, soft_wrap=True)


def progress_lines(announce: Callable[[str], None], every_seconds: float = 5.0) -> Callable[[str, int, int], None]:
    """Print how far a long piece of work is, now and then and at its end."""
    last = time.monotonic()

    def show(what: str, done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if done == total or now - last >= every_seconds:
            last = now
            announce(f"{what}: {done}/{total}")

    return show


def metric_table(title: str, metrics: Mapping[str, float]) -> None:
    table = Table("metric", "value", title=title)
    for name, value in metrics.items():
        table.add_row(name, f"{value:.6g}")
    console.print(table)
