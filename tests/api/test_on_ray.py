"""The Python API on Ray workers: the same numbers as the command line, callbacks in the driver, roles as clusters."""

from __future__ import annotations

import pytest

from tests.api.test_callbacks import Recorder, check_events, run
from tests.api.test_programs import assert_equal, run_command_line, run_program
from tests.support.compared_runs import merge, metric_log
from thresher.checkpoint.manager import list_checkpoints
from thresher.config import parse_config
from thresher.pipeline import DPOPipeline
from thresher.runtime.ray.cluster import Cluster

pytestmark = pytest.mark.distributed


@pytest.mark.hand  # CI has the same program in one process
def test_the_program_from_a_dataset_on_two_workers_gives_the_weights_of_the_command_line(
    tiny_dir, tmp_path, monkeypatch, ray_here
):
    run_program(
        tiny_dir,
        tmp_path / "program",
        ("from peft import", "from datasets import Dataset\nfrom peft import"),
        ("rows[24:]", "Dataset.from_list(rows[24:])"),
        ("rows[:24]", "Dataset.from_list(rows[:24])"),
        ('target_modules="all-linear"),', 'target_modules="all-linear"),\n    devices=2,'),
    )
    by_file = run_command_line(tiny_dir, tmp_path / "file", monkeypatch, num_workers=2)
    assert_equal(tmp_path / "program" / "python", by_file)


def test_on_ray_callbacks_are_called_in_the_driver(base, tmp_path, ray_here):
    recorder = Recorder()
    run(base, tmp_path, recorder, actor_train={"num_workers": 2})
    check_events(recorder)


@pytest.mark.hand  # CI has the steps in one process, and the methods of the workers
def test_on_ray_the_roles_are_clusters_that_make_the_steps_of_a_run(base, tmp_path, ray_here):
    on_two = {
        "output_dir": str(tmp_path / "hand"),
        "actor_train": {"num_workers": 2},
        "reference": {"mode": "concurrent"},
    }
    pipeline = DPOPipeline(parse_config(merge(base, on_two)))
    with pipeline.open():
        assert isinstance(pipeline.actor_train, Cluster)
        assert isinstance(pipeline.reference, Cluster)
        assert (len(pipeline.actor_train), len(pipeline.reference)) == (2, 1)
        steps = [pipeline.actor_train.call("training_step") for _ in range(2)]
        evaluations = pipeline.actor_train.call("evaluate")
        pipeline.actor_train.call("save")
    losses = [each["loss"].mean for each, _ in steps]
    assert losses == [each["loss"].mean for _, each in steps]  # of all ranks
    DPOPipeline(parse_config({**base, "output_dir": str(tmp_path / "run"), "max_steps": 2})).run()
    in_one_process = [record["loss"] for record in metric_log(tmp_path / "run") if "loss" in record]
    assert losses == pytest.approx(in_one_process, abs=1e-5)
    assert evaluations[0] == evaluations[1]
    # published when the block ends, though saves are asynchronous
    assert [path.name for path in list_checkpoints(tmp_path / "hand" / "checkpoints")] == ["step-00000002"]
