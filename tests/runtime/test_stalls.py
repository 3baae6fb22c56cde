"""Workers that are alive but stuck are found by their progress, and by nothing that a slow start or a save does."""

from __future__ import annotations

from itertools import pairwise

import pytest

from thresher.observability.heartbeat import (
    Heartbeat,
    end_activity,
    heartbeat,
    pace_after,
    report_progress,
    set_activity,
)

TIMEOUT, INTERVAL = 16.0, 2.0  # 5 polls without progress are too many: 16 - 3 * 2 = 10 s


def seconds_by_poll(polls: list[list[Heartbeat]]) -> list[float | None]:
    from thresher.runtime.stalls import StallDetector

    detector = StallDetector(TIMEOUT, INTERVAL)
    return [detector.seconds_stuck(heartbeats) for heartbeats in polls]


def beat(process: int, progress: int, pace: str = "steady") -> Heartbeat:
    return Heartbeat("step 3: training", 0.0, process, progress, pace)  # type: ignore[arg-type]


def test_workers_that_all_stop_are_stuck_after_the_timeout_less_the_delay_of_polls():
    stopped = [beat(1, 7), beat(2, 6)]
    assert seconds_by_poll([stopped] * 7) == [None, None, None, None, None, 10.0, 12.0]


def test_any_worker_that_advances_keeps_the_others_waiting():
    assert seconds_by_poll([[beat(1, 7), beat(2, poll)] for poll in range(20)]) == [None] * 20


@pytest.mark.parametrize("pace", ["unknown", "warm-up"])
def test_loading_saving_idling_and_warm_up_take_any_time(pace):
    assert seconds_by_poll([[beat(1, 7, pace), beat(2, 6, pace)]] * 50) == [None] * 50


@pytest.mark.parametrize("pace", ["unknown", "warm-up"])
def test_idle_workers_do_not_hide_one_that_is_stuck_in_a_step(pace):
    """Such as reference workers that wait for the policy."""
    assert seconds_by_poll([[beat(1, 7), beat(2, 6, pace)]] * 6)[-1] == 10.0


def test_an_operation_may_take_twice_as_long_as_the_longest_in_warm_up():
    slow_start = [[beat(1, 0, "warm-up")]] * 16  # 15 polls without progress: 30 s
    found = seconds_by_poll([*slow_start, *[[beat(1, 1)]] * 40])
    assert found.index(60.0) == len(slow_start) + 30
    assert found[: len(slow_start) + 30] == [None] * (len(slow_start) + 30)


def test_a_restarted_worker_is_another_one():
    polls = [[beat(process, 7)] for process in (1, 1, 1, 1, 1, 2, 2, 2, 2, 2)]
    assert seconds_by_poll(polls) == [None] * 10


def test_every_report_counts_and_the_end_of_an_activity_keeps_its_name():
    set_activity("step 9: training", pace_after(2))
    first = heartbeat()
    report_progress()
    second = heartbeat()
    end_activity()
    last = heartbeat()
    assert [each.progress - first.progress for each in (first, second, last)] == [0, 1, 1]
    assert [each.pace for each in (first, second, last)] == ["steady", "steady", "unknown"]
    assert all(one.activity == other.activity for one, other in pairwise((first, second, last)))
    assert [pace_after(count) for count in (0, 1, 2)] == ["warm-up", "warm-up", "steady"]
