"""The same run in one process and on 1, 2 and 4 Ray workers: every metric and every weight agree.

The last step has 3 pairs, and there are 3 validation pairs, so the fourth of 4 workers has no pairs in either.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.compared_runs import merge, metric_log
from tests.support.paths import ROOT
from tests.support.small_runs import assert_same_run, last_weights, mode_of, open_small_inputs
from thresher.builders.run import build_tracking, track
from thresher.config import parse_config
from thresher.config.roles import PolicyConfig
from thresher.errors import UserError
from thresher.observability.log_files import EVAL_PAIRS
from thresher.observability.trackers.jsonl import StepLog
from thresher.pipeline import DPOPipeline
from thresher.training.loop import fit

pytestmark = pytest.mark.distributed

LORA = {"actor_train": {"model_args": {"lora_rank": 4}, "training_args": {"learning_rate": 0.05}}}
NO_REFERENCE = {"reference": {"model_args": {"model_name_or_path": None}, "infer_batch_size": 8}}
CONCURRENT = {"reference": {"mode": "concurrent", "infer_batch_size": 8}}
CASES = {
    "sigmoid, all weights": {},
    "ipo, all weights": {"pref_loss": "ipo"},
    "orpo, all weights": {"pref_loss": "orpo"} | NO_REFERENCE,
    "simpo, all weights": {"pref_loss": "simpo"} | NO_REFERENCE,
    "sigmoid, lora": LORA,
    "ipo, lora": {"pref_loss": "ipo"} | LORA,
    "orpo, lora": {"pref_loss": "orpo"} | LORA | NO_REFERENCE,
    "simpo, lora": {"pref_loss": "simpo"} | LORA | NO_REFERENCE,
    "the adapter's base as reference": LORA | NO_REFERENCE,
    "aot couples all pairs of a step": {"pref_loss": "aot"},
    "bco_pair carries state from step to step": {"pref_loss": "bco_pair"},
    "a synced reference": {"reference": {"sync_steps": 2}},
    "a loss in a file of the user": {"pref_loss": f"{ROOT / 'tests/support/own_loss.py'}:squared"},
    "a mixture and two validation sets": {"pref_loss": "aot"},
}


def case_of(base: dict[str, Any], name: str) -> dict[str, Any]:
    if "mixture" not in name:
        return CASES[name]
    many, few = (base[role]["data_args"]["file_name"] for role in ("actor_train", "validation"))
    sources = {"many": {"file_name": many, "weight": 0.8}, "few": {"file_name": few, "count": 4}}
    sets = {"few": {"file_name": few}, "many": {"file_name": many, "max_samples": 5}}
    train, validation = {"file_name": [], "sources": sources}, {"data_args": {"file_name": []}, "sets": sets}
    return CASES[name] | {"actor_train": {"data_args": train}, "validation": validation}


@pytest.fixture(scope="module")
def in_process(base, tmp_path_factory):
    """Run a case in this process, once."""
    known: dict[str, Path] = {}

    def run(name: str) -> Path:
        if name not in known:
            known[name] = tmp_path_factory.mktemp("local")
            values = merge(merge(base, case_of(base, name)), {"output_dir": str(known[name])})
            DPOPipeline(parse_config(values)).run()
        return known[name]

    return run


@pytest.fixture(scope="module", params=[1, 2, 4], ids=lambda size: f"{size} workers")
def on_workers(request, reference_cluster, base, tmp_path_factory):
    """Run cases one after the other on one cluster of workers.

    A separate worker prefetches the reference logps; the run in one process precomputes them.
    """
    from thresher.runtime.ray.cluster import ResourceManager
    from thresher.runtime.ray.runtime import RayRuntime

    size = request.param
    resources = ResourceManager({"actor_train": PolicyConfig(num_workers=size)}, None, concurrent=True)
    clusters: list = []

    def run(case: dict[str, Any], output: Path) -> None:
        workers = {"output_dir": str(output), "runtime": "ray", "actor_train": {"num_workers": size}}
        config, inputs = open_small_inputs(merge(merge(base, case), workers))
        if mode_of(config) == "precompute":
            config, inputs = open_small_inputs(merge(merge(base, case), merge(workers, CONCURRENT)))
        runtime = RayRuntime(config, mode_of(config), resources)
        runtime.use(clusters[0] if clusters else None, reference_cluster)
        runtime.start(inputs, None, print)
        clusters[:] = [runtime.ranks]
        runtime.begin()
        trackers = build_tracking(config, None)
        with track(trackers, runtime.inputs, resume_step=None) as skipped:
            log = StepLog(config.log_dir / EVAL_PAIRS, None)
            keep = lambda step, pairs: log.write(pairs.to_json(step))  # noqa: E731
            fit(runtime, config, inputs.plan, trackers, skipped, keep_examples=keep)

    yield run
    for cluster in clusters:
        cluster.close()
    resources.close()


@pytest.mark.covered
@pytest.mark.parametrize("name", CASES)
def test_a_run_on_workers_equals_the_run_in_one_process(in_process, on_workers, base, tmp_path, name):
    local = in_process(name)
    on_workers(case_of(base, name), tmp_path)
    assert_same_run(tmp_path, local)


def test_non_finite_steps_end_the_run_on_every_worker_after_logging_earlier_steps(on_workers, tmp_path):
    """The last test of a cluster, because the failure of a worker ends all workers."""
    diverging = {"max_consecutive_skipped_steps": 1, "actor_train": {"training_args": {"learning_rate": 1e30}}}
    with pytest.raises(UserError, match="the loss or gradient was not finite in 1 steps in a row, up to step 2"):
        on_workers(diverging, tmp_path)
    assert [record["step"] for record in metric_log(tmp_path)] == [1]


def test_the_compared_runs_change_the_loss_and_the_weights(in_process):
    losses = [record["loss"] for record in metric_log(in_process("sigmoid, all weights")) if "loss" in record]
    assert len(losses) == 4
    assert losses[-1] != pytest.approx(losses[0], abs=1e-2)
    assert last_weights(in_process("sigmoid, lora"))
