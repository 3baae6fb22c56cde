"""Restarts of a run: after which errors, from which checkpoint, how often, and what is logged."""

from __future__ import annotations

import json
import logging
import shutil
import time

import pytest

from tests.support.staged import staging
from thresher.errors import DiskError, RescaleRequested, ResourceError, UserError, WorkerError, WorkerLostError
from thresher.training.supervisor import Supervisor


class Log:
    def __init__(self):
        self.records = []

    def log(self, step, metrics):
        self.records.append((step, metrics))


@pytest.fixture
def supervised(tmp_path, caplog):
    """A supervisor over checkpoints in a directory, whose waits are recorded instead of slept."""

    class Supervised:
        def __init__(self):
            self.waits, self.record = [], tmp_path / "logs" / "recoveries.jsonl"
            self.log = Log()
            caplog.set_level(logging.INFO)

        @property
        def lines(self):
            return caplog.messages

        def newest(self):
            found = sorted((tmp_path / "checkpoints").glob("step-*"))
            return found[-1] if found else None

        def save(self, step):
            with staging(tmp_path / "checkpoints", step) as directory:
                (directory / "weights").write_text("w")

        def run(self, attempts, max_restarts=3):
            supervisor = Supervisor(max_restarts, self.newest, self.record, self.waits.append)
            remaining = iter(attempts)
            return supervisor.run(lambda supervisor, checkpoint: next(remaining)(supervisor, checkpoint), None)

    return Supervised()


def die_at(supervised, step, saved=None, error=WorkerLostError):
    def attempt(supervisor, checkpoint):
        if saved is not None:
            supervised.save(saved)
        if step:
            supervisor.track_progress(supervised.log).log(step, {})
        raise error("worker 1 died: killed; start again\nmore")

    return attempt


def finish_from(supervised, expected, step):
    def attempt(supervisor, checkpoint):
        assert (None if checkpoint is None else checkpoint.name) == expected
        supervisor.track_progress(supervised.log).log(step, {})
        return supervisor.resume_step

    return attempt


def test_a_lost_worker_repeats_the_steps_since_the_newest_checkpoint(supervised, caplog):
    resume_step = supervised.run([die_at(supervised, 7, saved=5), finish_from(supervised, "step-00000005", 6)])
    assert resume_step == 5
    assert supervised.waits == [0.0]
    (line,) = [json.loads(line) for line in supervised.record.read_text().splitlines()]
    assert line.pop("seconds") == pytest.approx(sum(line.pop("phases").values()), abs=0.02)
    assert time.time() - line.pop("time") < 60
    assert line == {"cause": "worker 1 died: killed; start again", "step": 7, "from_step": 5, "steps_repeated": 2}
    assert supervised.lines[0].startswith("worker 1 died: killed; start again; restarting from ")
    assert supervised.lines[0].endswith("step-00000005 (attempt 1/3 since the last new checkpoint)")
    assert supervised.lines[1].startswith("recovered at step 6 after ")
    # the last has the seconds of each phase, for run.log
    assert [record.levelno for record in caplog.records] == [logging.WARNING, logging.INFO, logging.INFO]


def test_a_failure_before_the_next_step_repeats_no_steps_of_the_attempt_before(supervised):
    attempts = [die_at(supervised, 7, saved=5), die_at(supervised, 0), finish_from(supervised, "step-00000005", 6)]
    supervised.run(attempts)
    lines = [json.loads(line) for line in supervised.record.read_text().splitlines()]
    assert [(line["step"], line["from_step"], line["steps_repeated"]) for line in lines] == [(7, 5, 2), (5, 5, 0)]


def test_a_run_that_had_no_checkpoint_starts_over_with_an_empty_log(supervised):
    assert supervised.run([die_at(supervised, 2), finish_from(supervised, None, 1)]) == -1
    line = json.loads(supervised.record.read_text())
    assert (line["from_step"], line["steps_repeated"]) == (0, 2)


def test_a_restart_before_the_log_was_opened_keeps_the_log_of_an_earlier_run(supervised):
    assert supervised.run([die_at(supervised, 0), begin_without_log(None)]) is None


def test_the_initial_checkpoint_may_be_deleted_once_there_is_a_later_one(supervised, tmp_path):
    supervised.save(3)
    given = tmp_path / "checkpoints" / "step-00000003"

    def outlive_it(supervisor, checkpoint):
        shutil.rmtree(given)  # as retention does
        return die_at(supervised, 7, saved=5)(supervisor, checkpoint)

    attempts = iter([outlive_it, finish_from(supervised, "step-00000005", 6)])
    supervisor = Supervisor(3, supervised.newest, supervised.record, supervised.waits.append)
    assert supervisor.run(lambda supervisor, checkpoint: next(attempts)(supervisor, checkpoint), given) == 5


def begin_without_log(expected):
    def attempt(supervisor, checkpoint):
        assert checkpoint == expected
        return supervisor.resume_step

    return attempt


def test_restarts_use_the_initial_checkpoint_of_another_run_until_there_is_a_later_one(supervised, tmp_path):
    given = save_elsewhere(tmp_path, 50)
    supervised.save(3)  # of an earlier run
    attempts = [die_at(supervised, 52), die_at(supervised, 56, saved=55), finish_from(supervised, "step-00000055", 56)]
    seen = []

    def attempt(supervisor, checkpoint):
        seen.append(checkpoint)
        return attempts[len(seen) - 1](supervisor, checkpoint)

    supervisor = Supervisor(3, supervised.newest, supervised.record, supervised.waits.append)
    assert supervisor.run(attempt, given) == 55
    assert seen == [given, given, tmp_path / "checkpoints" / "step-00000055"]


def save_elsewhere(tmp_path, step):
    with staging(tmp_path / "elsewhere", step) as directory:
        (directory / "weights").write_text("w")
    return tmp_path / "elsewhere" / f"step-{step:08d}"


def fall_back(supervisor, _checkpoint):
    return supervisor.fall_back(), supervisor.resume_step


def test_a_first_attempt_with_a_damaged_checkpoint_falls_back_to_another_initial_one(supervised, tmp_path):
    given, other = save_elsewhere(tmp_path, 50), save_elsewhere(tmp_path, 40)
    supervised.save(55)  # of an earlier run
    supervisor = Supervisor(3, supervised.newest, supervised.record, supervised.waits.append)
    assert supervisor.run(fall_back, given, lambda: other) == (other, 40)


def test_a_later_attempt_with_a_damaged_checkpoint_falls_back_to_the_newest_of_its_run(supervised, tmp_path):
    given = save_elsewhere(tmp_path, 50)
    attempts = iter([die_at(supervised, 56, saved=55), fall_back])
    supervisor = Supervisor(3, supervised.newest, supervised.record, supervised.waits.append)
    found = supervisor.run(lambda *arguments: next(attempts)(*arguments), given, lambda: given)
    assert found == (tmp_path / "checkpoints" / "step-00000055", 55)


def test_restarts_without_a_new_checkpoint_are_bounded_and_back_off(supervised):
    with pytest.raises(WorkerLostError, match="worker 1 died"):
        supervised.run([die_at(supervised, 0)] * 9)
    assert supervised.waits == [0.0, 2.0, 4.0]


def test_no_wait_is_longer_than_a_minute(supervised):
    supervised.run([*[die_at(supervised, 0)] * 8, finish_from(supervised, None, 1)], max_restarts=8)
    assert supervised.waits == [0.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]


def test_a_new_checkpoint_resets_the_restart_count(supervised):
    attempts = [die_at(supervised, step, saved=step) for step in range(1, 8)]
    assert supervised.run([*attempts, finish_from(supervised, "step-00000007", 8)]) == 7
    assert supervised.waits == [0.0] * 7


@pytest.mark.parametrize("error", [WorkerError, DiskError])
def test_worker_errors_and_a_full_disk_are_retried(supervised, error):
    supervised.run([die_at(supervised, 1, error=error), finish_from(supervised, None, 1)])
    assert supervised.waits == [0.0]


def test_an_exception_that_repeats_before_the_first_step_ends_the_run(supervised):
    def fail(rank, reason, step=0):
        def attempt(supervisor, _checkpoint):
            if step:
                supervisor.track_progress(supervised.log).log(step, {})
            raise WorkerError(f"actor_train worker {rank} of 2 failed: {reason}\nTraceback")

        return attempt

    with pytest.raises(WorkerError, match="worker 1 of 2 failed: AssertionError: no GPU"):
        supervised.run([fail(0, "AssertionError: no GPU"), fail(1, "AssertionError: no GPU")])
    assert supervised.waits == [0.0]
    # another reason, or a step in between, may pass
    others = [fail(0, "a"), fail(0, "b"), fail(0, "b", step=1), fail(0, "b"), finish_from(supervised, None, 1)]
    supervised.run(others, max_restarts=4)
    assert supervised.waits[1:] == [0.0, 2.0, 4.0, 8.0]


def test_missing_resources_are_an_error_at_first_and_retried_later(supervised):
    no_room = die_at(supervised, 0, error=ResourceError)
    with pytest.raises(ResourceError):
        supervised.run([no_room])
    assert supervised.waits == []
    supervised.run([die_at(supervised, 4, saved=3), no_room, no_room, finish_from(supervised, "step-00000003", 4)])
    assert supervised.waits == [0.0, 2.0, 4.0]
    lines = [json.loads(line) for line in supervised.record.read_text().splitlines()]
    assert [line["steps_repeated"] for line in lines] == [1, 0, 0]  # each failure is recorded, repeated steps once
    assert {line["from_step"] for line in lines} == {3}


def test_scaling_up_does_not_wait_or_count_as_a_restart(supervised):
    grow = die_at(supervised, 2, saved=2, error=RescaleRequested)
    grow_again = die_at(supervised, 4, saved=4, error=RescaleRequested)
    attempts = [grow, grow_again, finish_from(supervised, "step-00000004", 5)]
    assert supervised.run(attempts, max_restarts=0) == 4
    assert supervised.waits == []
    assert supervised.lines[0].endswith("step-00000002 to use them")


@pytest.mark.parametrize("error", [UserError, ValueError, KeyboardInterrupt])
def test_user_errors_and_driver_errors_end_the_run(supervised, error):
    with pytest.raises(error):
        supervised.run([die_at(supervised, 1, error=error), finish_from(supervised, None, 1)])
    assert supervised.waits == []
