"""The next step is read in a thread while a step trains, and nothing else changes."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
import torch

from tests.support.compared_runs import merge
from tests.support.tiny_run import PairsInMemory, build_run, noise_pairs
from thresher.data.example import ExampleBatch
from thresher.errors import UserError
from thresher.reference.scorers import LiveReference, PrecomputedReference
from thresher.training.read_ahead import ReadAhead


class WatchedPairs(PairsInMemory):
    """Pairs that remember which thread read them, and of which one cannot be read."""

    def __init__(self, damaged: int | None = None) -> None:
        super().__init__(noise_pairs(12).pairs)
        self.threads: list[str] = []
        self.damaged = damaged

    def read(self, ids: Sequence[int]) -> ExampleBatch:
        self.threads.append(threading.current_thread().name.split("_")[0])
        if self.damaged in list(ids):
            raise UserError("the store is damaged")
        return super().read(ids)


def readers() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("read-ahead")]


def test_every_step_but_the_first_is_read_in_a_thread_that_ends_with_the_run(base):
    pairs = WatchedPairs()
    run = build_run(base, pairs)
    pairs.threads.clear()
    assert [step for step, _ in run.trainer.run(4)] == [1, 2, 3, 4]
    assert pairs.threads == ["MainThread", *["read-ahead"] * 4]  # one micro-batch per step, and the fifth step
    assert readers() == []
    assert [step for step, _ in run.trainer.run(6)] == [5, 6]
    assert pairs.threads == ["MainThread", *["read-ahead"] * 5]


@pytest.mark.parametrize(("mode", "thread"), [("precompute", "read-ahead"), ("concurrent", "MainThread")])
def test_the_thread_reads_cached_logps_and_runs_no_model(different_reference, monkeypatch, mode, thread):
    threads = []
    for scorer in (LiveReference, PrecomputedReference):

        def logps(self, batch, original=scorer.logps):
            threads.append(threading.current_thread().name.split("_")[0])
            return original(self, batch)

        monkeypatch.setattr(scorer, "logps", logps)
    run = build_run(merge(different_reference, {"reference": {"mode": mode}}), noise_pairs(12))
    threads.clear()
    list(run.trainer.run(3))
    assert threads[0] == "MainThread"
    assert set(threads[1:]) == {thread}


def test_steps_are_those_of_a_run_without_the_thread(base, monkeypatch):
    """With dropout, whose random numbers a thread could draw."""
    ends = []
    lora = {"lora_rank": 4, "lora_dropout": 0.1}
    for name in ("thread", "inline"):
        if name == "inline":
            monkeypatch.setattr(ReadAhead, "start", lambda self, step: None)
        torch.manual_seed(0)
        changes = {"output_dir": f"{base['output_dir']}-{name}", "actor_train": {"model_args": lora}}
        run = build_run(merge(base, changes), noise_pairs(12))
        run.fit()
        ends.append((run.trainer.engine.weights(), torch.get_rng_state(), [m["loss"] for _, m in run.log.records]))
    (weights, rng, losses), (expected, expected_rng, expected_losses) = ends
    assert torch.equal(rng, expected_rng)
    assert losses == expected_losses
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_an_error_is_raised_in_the_step_that_it_belongs_to(base):
    pairs = WatchedPairs()
    run = build_run(merge(base, {"pref_loss": "simpo"}), pairs)
    pairs.damaged = int(run.trainer.plan.pair_ids(2)[0])
    steps = []
    with pytest.raises(UserError, match="the store is damaged"):
        steps.extend(step for step, _ in run.trainer.run(6))
    assert run.trainer.state.step == 2
    assert readers() == []


def test_a_step_that_was_not_read_ahead_is_read_when_it_is_taken():
    """After a discarded step, or a checkpoint."""
    read = []
    ahead = ReadAhead(lambda step: read.append(step) or step, torch.device("cpu"))
    ahead.start(5)
    assert ahead.take(4) == 4
    assert ahead.take(5) == 5
    assert read == [5, 4, 5]
