"""This process around a run in Python: its rank by accelerate's names, its console, and the messages of libraries."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from thresher.observability.trackers.console import ConsoleTracker
from thresher.redact import RedactingHandler


class Accelerator:
    """This process, by the names of accelerate's Accelerator; the workers of a run are separate processes."""

    def __init__(self, rank: int = 0, size: int = 1, local_rank: int = 0) -> None:
        self.process_index, self.num_processes, self.local_process_index = rank, size, local_rank

    @property
    def is_main_process(self) -> bool:
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        return self.local_process_index == 0

    def print(self, *values: object, **arguments: Any) -> None:
        """Print in the main process."""
        if self.is_main_process:
            print(*values, **arguments)  # noqa: T201

    def wait_for_everyone(self) -> None:
        """Do nothing: a run has ended in all of its processes when `train` returns."""


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Hide progress bars of transformers and deprecations inside of libraries, as the command line does."""
    from transformers.utils import logging as transformers_logging

    is_on = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning, module=r"(accelerate|peft|torch|transformers)\b")
            yield
    finally:
        if is_on:
            transformers_logging.enable_progress_bar()


@contextmanager
def open_console() -> Iterator[ConsoleTracker]:
    """Make the console of a run; it also shows warnings, unless the application has configured logging."""
    console, package = ConsoleTracker(), logging.getLogger("thresher")
    own = [handler for handler in package.handlers if not isinstance(handler, logging.NullHandler)]
    handler = RedactingHandler(
        logging.WARNING, lambda record, text: console.print(f"{record.levelname.lower()}: {text}")
    )
    if not own and not logging.getLogger().handlers:
        package.addHandler(handler)
    try:
        yield console
    finally:
        package.removeHandler(handler)
