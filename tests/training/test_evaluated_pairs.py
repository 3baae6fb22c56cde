"""Values of single pairs at an evaluation: the metrics are their means, and a resumed run writes the same ones."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from tests.support.compared_runs import merge
from tests.support.small_runs import make_base
from tests.support.tiny_run import build_run, noise_pairs
from thresher.config import parse_config
from thresher.distributed.groups import DataParallelGroup
from thresher.engines.accumulate import MicroBatch, objective_inputs
from thresher.observability.trackers.jsonl import read_records
from thresher.pipeline import DPOPipeline
from thresher.training.loop import evaluate
from thresher.training.records import EvaluatedExamples, ExampleSampler


@pytest.mark.parametrize("loss", ["sigmoid", "simpo", "aot"])
def test_the_means_of_the_pairs_are_the_metrics(base, loss):
    run = build_run(merge(base, {"pref_loss": loss}), noise_pairs(8), noise_pairs(5, seed=5))
    kept: list[EvaluatedExamples] = []
    metrics = evaluate(run.trainer, 0, keep_examples=lambda step, pairs: kept.append(pairs))
    (pairs,) = kept
    assert pairs.numbers == [0, 1, 2, 3, 4]
    for name in ("rewards", "logps", "lengths"):
        for side in ("chosen", "rejected"):
            assert np.mean(pairs.values[f"{name}/{side}"]) == pytest.approx(metrics[f"eval/{name}/{side}"], rel=1e-9)
    if loss == "simpo":
        assert "reference_logps/chosen" not in pairs.values
    else:
        ratios = [
            np.subtract(pairs.values[f"logps/{s}"], pairs.values[f"reference_logps/{s}"])
            for s in ("chosen", "rejected")
        ]
        assert np.mean(ratios) == pytest.approx(metrics["eval/kl"], rel=1e-9)


def test_a_large_set_is_sampled_at_regular_intervals(base):
    """Of 10 pairs at most 4: every third one, whichever micro-batch it is in."""
    run = build_run(base, noise_pairs(8), noise_pairs(10, seed=5))
    sampler = ExampleSampler(run.trainer.objective, noise_pairs(10, seed=5), max_pairs=4)
    for ids in ([6, 7, 8, 9], [0, 1, 2], [4]):
        pairs = noise_pairs(10, seed=5).read(ids)
        micro = MicroBatch(pairs, run.reference.validation.logps(pairs))
        sampler.add(pairs.pair_ids, objective_inputs(micro, run.trainer.engine.score(pairs)))
    gathered = sampler.gather(DataParallelGroup())
    assert gathered is not None
    assert gathered.numbers == [0, 6, 9]
    assert len(gathered.values["rewards/chosen"]) == 3


def test_a_resumed_run_writes_the_same_pairs_and_describes_itself(tmp_path):
    values = merge(make_base(tmp_path), {"actor_train": {"training_args": {"lr_scheduler_type": "constant"}}})
    for name, stops in (("whole", [4]), ("resumed", [2, 4])):
        for max_steps in stops:
            changes = {"output_dir": str(tmp_path / name), "max_steps": max_steps, "resume_from_checkpoint": "auto"}
            DPOPipeline(parse_config(values | changes)).run()
    whole, resumed = (tmp_path / name / "logs" for name in ("whole", "resumed"))
    assert (whole / "eval_pairs.jsonl").read_bytes() == (resumed / "eval_pairs.jsonl").read_bytes()
    assert [record["step"] for record in read_records(whole / "eval_pairs.jsonl")] == [2, 4]
    description = json.loads((whole / "run.json").read_text())
    assert (description["num_steps"], description["pairs_per_step"]) == (4, 6)
    assert description["data"]["train"]["report"]["pairs_kept"] == 21
    assert description["config"]["output_dir"] == str(tmp_path / "whole")
    assert description["facts"]["loss"] == "sigmoid(beta=0.1)"
    assert description["environment"]["torch"] == torch.__version__
