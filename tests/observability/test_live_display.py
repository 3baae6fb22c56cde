"""The live display of a run, on a real pseudo-terminal and as lines of text."""

from __future__ import annotations

import io
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from thresher.observability.trackers.console import ConsoleTracker, can_redraw
from thresher.observability.trackers.tracker import RunInfo

HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
METRICS = {"loss": 0.69314, "rewards/accuracies": 0.5, "rewards/margins": 0.25, "pairs_per_second": 12.34}


def run_of(total_steps: int) -> RunInfo:
    return RunInfo("my-run", Path("runs") / "a", {}, total_steps=total_steps, total_pairs=640, health_from=512)


class Screen:
    """A tracker with a live display and a clock that stands still; `lines` is what the display shows now."""

    def __init__(self, width: int = 100) -> None:
        self.now = 0.0
        self.console = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
        self.tracker = ConsoleTracker(self.console, clock=lambda: self.now, is_live=True)

    def lines(self) -> list[str]:
        assert self.tracker._live is not None
        return [line.rstrip() for line in self._text(self.tracker._render()).splitlines()]

    def _text(self, renderable: object) -> str:
        plain = Console(file=io.StringIO(), width=self.console.width, color_system=None)
        plain.print(renderable)
        return plain.file.getvalue()


@pytest.fixture
def screen() -> Iterator[Screen]:
    screen = Screen()
    with screen.tracker.displayed():
        yield screen


def test_the_display_has_the_bar_the_metrics_and_the_last_event(screen):
    screen.tracker.start(run_of(10), None)
    screen.now = 20.0
    screen.tracker.log(4, {**METRICS, "kl": -1.5, "lr": 1e-6, "pairs_seen": 512})
    bar, metrics, events = screen.lines()
    # 4 steps in 20 seconds: the other 6 take 30
    # 12 of the 30 characters of the bar; without colors, the rest is blank
    assert re.fullmatch(r"step 4/10 ━{12} +40%  0:00:20 elapsed, 0:00:30 left", bar), bar
    assert metrics == "loss 0.6931  accuracy 0.500  margin 0.2500  log ratio -1.5000  12.3 pairs/s"
    assert events == "no events"


@pytest.mark.parametrize(
    ("changes", "pairs_seen", "shown"),
    [
        ({}, 511, "no events yet; most health rules start at pair 512"),
        ({}, 512, "no events"),
        ({"unit": "lists"}, 80, "no events yet; most health rules start at list 512"),
        ({"total_pairs": 400}, 80, "no events yet; most health rules start at pair 512, and this run has fewer"),
        ({"health_from": None}, 9000, "health is off"),
    ],
)
def test_silence_of_the_health_rules_is_not_shown_as_health(screen, changes, pairs_seen, shown):
    screen.tracker.start(replace(run_of(10), **changes), None)
    assert screen.lines()[2] != "no events"
    screen.tracker.log(4, {**METRICS, "pairs_seen": pairs_seen})
    assert screen.lines()[2] == shown
    assert len(shown) <= 80


def test_a_run_without_reference_shows_no_log_ratio(screen):
    screen.tracker.start(run_of(10), None)
    screen.tracker.log(1, METRICS)
    assert "log ratio" not in screen.lines()[1]


def test_a_resumed_run_starts_at_its_step_and_estimates_from_its_own_steps(screen):
    screen.tracker.start(run_of(10), 6)
    assert screen.lines()[0].startswith("step 6/10")
    assert "? left" in screen.lines()[0]
    screen.now = 10.0
    screen.tracker.log(8, METRICS)
    assert screen.lines()[0].endswith("80%  0:00:10 elapsed, 0:00:10 left")


def test_a_health_event_stays_in_the_display(screen):
    screen.tracker.start(run_of(10), None)
    screen.tracker.log(3, {**METRICS, "health/large_kl": 1.0})
    screen.tracker.log(4, METRICS)
    assert screen.lines()[2] == "last event: health at step 3: large_kl, the policy is far from its reference"


def test_a_restarted_run_shows_its_attempt(screen):
    screen.tracker.start(run_of(10), None)
    screen.tracker.log(5, METRICS)
    screen.tracker.close("failed")
    screen.tracker.show_work("connecting to Ray")
    assert [line[2:] for line in screen.lines()] == ["connecting to Ray"]
    screen.tracker.start(run_of(10), 4)
    bar, _, event = screen.lines()
    assert bar.startswith("step 4/10")
    assert event == "last event: attempt 2, resumed after step 4"


def test_other_work_is_shown_until_the_next_step(screen):
    screen.tracker.start(run_of(10), None)
    screen.tracker.log(4, METRICS)
    assert screen.tracker.show_work("evaluating after step 4, batches", 3, 7)
    assert screen.lines()[3].endswith("evaluating after step 4, batches: 3/7")
    screen.tracker.log(5, METRICS)
    assert len(screen.lines()) == 3


def test_no_line_wraps_on_a_narrow_terminal():
    screen = Screen(width=40)
    with screen.tracker.displayed():
        screen.tracker.start(run_of(10), None)
        screen.tracker.log(4, {**METRICS, "kl": 1.5, "health/large_kl": 1.0})
        assert len(screen.lines()) == 3
        assert all(len(line) <= 40 for line in screen.lines())


@contextmanager
def pseudo_terminal() -> Iterator[tuple[Console, list[bytes]]]:
    """A console on a real terminal, and what it receives."""
    reader, writer = os.openpty()
    received: list[bytes] = []

    def read() -> None:
        while True:
            try:
                received.append(os.read(reader, 65536))
            except OSError:  # the other end is closed
                return

    thread = threading.Thread(target=read)
    thread.start()
    try:
        with os.fdopen(writer, "w") as file:
            yield Console(file=file, width=100), received
    finally:
        thread.join(timeout=10)
        os.close(reader)


@pytest.mark.parametrize("error", [None, KeyboardInterrupt, ValueError])
def test_the_terminal_is_left_clean_however_a_run_ends(monkeypatch, error):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)

    def run(tracker: ConsoleTracker) -> None:
        with tracker.displayed():
            tracker.start(run_of(10), None)
            tracker.log(4, METRICS)
            tracker._live.refresh()  # as its thread does four times per second
            tracker.print("a message")
            if error is not None:
                raise error
            tracker.close("finished")

    with pseudo_terminal() as (console, received):
        assert can_redraw(console)
        if error is None:
            run(ConsoleTracker(console))
        else:
            with pytest.raises(error):
                run(ConsoleTracker(console))
    text = b"".join(received).decode()
    assert text.count(HIDE_CURSOR) == text.count(SHOW_CURSOR) == 1
    assert text.index(HIDE_CURSOR) < text.index("a message") < text.index(SHOW_CURSOR)
    assert "━" in text
    assert "━" not in text[text.rindex("\x1b[2K") :]  # every line of the display was erased


@pytest.mark.parametrize(("name", "value"), [("CI", "true"), ("TERM", "dumb")])
def test_a_terminal_that_cannot_be_redrawn_gets_plain_lines(monkeypatch, name, value):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv(name, value)
    with pseudo_terminal() as (console, received):
        assert not can_redraw(console)
        tracker = ConsoleTracker(console)
        with tracker.displayed():
            tracker.start(run_of(10), None)
            tracker.log(4, METRICS)
            tracker.close("finished")
    text = b"".join(received).decode()
    assert "\x1b" not in text
    assert "step 4/10  loss 0.6931" in text
