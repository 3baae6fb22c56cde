"""The skipped-step log of complete runs has one record per skipped step, also after failures and resumes."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.compared_runs import merge
from tests.support.small_runs import last_weights, open_small_inputs
from tests.support.worker_killer import Killer
from thresher.config import parse_config
from thresher.data.store.reader import ExampleStore
from thresher.errors import UserError
from thresher.pipeline import DPOPipeline

TWO = {"runtime": "ray", "actor_train": {"num_workers": 2}}
distributed = pytest.mark.distributed


def run(values: dict[str, Any], output: Path, console: Any = None) -> None:
    DPOPipeline(parse_config({**values, "output_dir": str(output)}), console=console).run()


def records(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "logs" / "skipped_steps.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def poisoned(base, tmp_path_factory) -> tuple[dict[str, Any], int, str]:
    """A config whose third step has a pair with an infinite loss, that pair, and its hash."""
    directory = tmp_path_factory.mktemp("poisoned")
    config, inputs = open_small_inputs(merge(base, {"output_dir": str(directory / "valid")}))
    pair = int(inputs.plan.pair_ids(2)[1])
    rows = [json.loads(line) for line in Path(config.actor_train.data_args.file_name[0]).read_text().splitlines()]
    rows[pair] |= {"weight": 3.4e38, "margin": 20.0}
    file = directory / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = merge(base, {"actor_train": {"data_args": {"file_name": str(file)}}, "track_with": ["console"]})
    store: ExampleStore = inputs.train
    content = b"".join(hashes.tobytes() for hashes in store.hashes())[16 * pair : 16 * pair + 16]
    return values, pair, content.hex()


def test_a_run_in_one_process_records_the_number_and_hash_of_the_pair(poisoned, tmp_path):
    values, pair, content = poisoned
    run(values, tmp_path, Killer(-1, ""))
    (record,) = records(tmp_path)
    assert record["step"] == 3
    assert record["reason"] == "loss"
    assert record["pairs"] == [{"pair": pair, "hash": content, "fault": "loss"}]


@pytest.mark.hand  # CI has a resumed run in one process
@distributed
def test_a_killed_worker_leaves_one_record_of_a_repeated_skipped_step(poisoned, ray_here, tmp_path):
    """The worker dies after the step is logged; the run resumes before it and skips it again."""
    values, _, _ = poisoned
    run(values, tmp_path / "local", Killer(-1, ""))
    killer = Killer(3, "ActorWorker")
    run(merge(values, TWO), tmp_path / "killed", killer)
    assert killer.killed
    assert (tmp_path / "killed" / "logs" / "recoveries.jsonl").exists()
    assert records(tmp_path / "killed") == records(tmp_path / "local")
    weights = last_weights(tmp_path / "local")
    for name, weight in last_weights(tmp_path / "killed").items():
        torch.testing.assert_close(weight, weights[name], atol=1e-5, rtol=0, msg=name)


def test_a_resumed_run_replaces_the_records_of_repeated_steps(poisoned, tmp_path):
    values, _, _ = poisoned
    run(values, tmp_path, Killer(-1, ""))
    uninterrupted, weights = records(tmp_path), last_weights(tmp_path)
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000004")  # as if the run had died before saving it
    file = tmp_path / "logs" / "skipped_steps.jsonl"
    earlier = json.dumps({**uninterrupted[0], "step": 1}) + "\n"
    file.write_text(earlier + file.read_text() + '{"step": 3, "reas')  # an interrupted write
    run(values, tmp_path, Killer(-1, ""))
    assert records(tmp_path) == [json.loads(earlier), *uninterrupted]
    assert all(torch.equal(weight, weights[name]) for name, weight in last_weights(tmp_path).items())


def test_a_separate_run_renames_the_log_of_an_earlier_one(poisoned, tmp_path):
    values, _, _ = poisoned
    run(values, tmp_path, Killer(-1, ""))
    shutil.rmtree(tmp_path / "checkpoints")
    run(values, tmp_path, Killer(-1, ""))
    assert len(records(tmp_path)) == 1
    assert len((tmp_path / "logs" / "skipped_steps.1.jsonl").read_text().splitlines()) == 1


@pytest.mark.hand  # CI has the same in one process
@distributed
def test_too_many_consecutive_skips_end_a_run_on_two_workers_with_every_record_written(poisoned, ray_here, tmp_path):
    values, pair, _ = poisoned
    with pytest.raises(
        UserError, match=r"in 1 steps in a row, up to step 3; lower .* listed in .*skipped_steps\.jsonl"
    ):
        run(merge(values, {**TWO, "max_consecutive_skipped_steps": 1}), tmp_path, Killer(-1, ""))
    assert [[each["pair"] for each in record["pairs"]] for record in records(tmp_path)] == [[pair]]


def test_the_command_ends_with_exit_code_2_and_names_the_file(poisoned, tmp_path, monkeypatch, capsys):
    from thresher.cli import main

    values, _, _ = poisoned
    config = tmp_path / "run.yaml"
    config.write_text(json.dumps({**values, "output_dir": str(tmp_path / "out"), "max_consecutive_skipped_steps": 1}))
    monkeypatch.setattr(sys, "argv", ["thresher", "train", str(config)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    output = capsys.readouterr().err
    assert f"listed in {tmp_path / 'out' / 'logs' / 'skipped_steps.jsonl'}" in output
    assert "Traceback" not in output
    assert len(records(tmp_path / "out")) == 1
