"""Health of real runs: what a run that drifts away leaves behind, stops with and resumes from."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from tests.support.compared_runs import merge, metric_log
from tests.support.health_replay import replay
from tests.support.small_runs import save_small_model, write_rows
from thresher.config import parse_config
from thresher.errors import HealthStopped
from thresher.observability.health.history import History
from thresher.observability.trackers.jsonl import read_metrics
from thresher.pipeline import DPOPipeline

STEPS = 10
# the first window ends after step 3 and the next after step 6
EVENT_STEP = 6
DRIFTING, LEARNING = 0.1, 0.001


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """128 pairs in steps of 128, so that windows of 256 pairs have three records."""
    directory = tmp_path_factory.mktemp("health")
    return {
        "pretrain": str(save_small_model(directory / "policy", 0)),
        "cache_dir": str(directory / "cache"),
        "max_steps": STEPS,
        "save_steps": 4,
        "sequence_length": 64,
        "track_with": [],
        "actor_train": {
            "model_args": {"dtype": "fp32"},
            "data_args": {"file_name": str(write_rows(directory / "train.jsonl", 128, 0)), "template": "raw"},
            "training_args": {"global_batch_size": 128, "per_device_train_batch_size": 8},
        },
    }


class CrashAt:
    """A callback that fails when a step is logged."""

    def __init__(self, step: int):
        self.step = step

    def on_log(self, _args, state, _control, **_):
        if state.global_step == self.step:
            raise RuntimeError("crash")


def run(base: dict, output: Path, learning_rate: float = DRIFTING, callbacks=(), **extra) -> Path:
    rate = {"actor_train": {"training_args": {"learning_rate": learning_rate}}}
    config = parse_config(merge(base, {"output_dir": str(output), **rate, **extra}))
    DPOPipeline(config, callbacks=callbacks).run()
    return output


def events(output: Path) -> list[dict]:
    path = output / "logs" / "health.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture(scope="module")
def drifted(base, tmp_path_factory):
    """An undisturbed run at a learning rate that is far too large."""
    return run(base, tmp_path_factory.mktemp("drifted"))


def test_a_run_that_drifts_away_is_reported_while_it_runs(base, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        output = run(base, tmp_path)
    found = {each["rule"]: each for each in events(output)}
    displaced, far = found["likelihood_displacement"], found["large_kl"]
    assert (displaced["step"], displaced["action"]) == (EVENT_STEP, "warn")
    assert displaced["evidence"]["margin now"] > displaced["evidence"]["margin at the start"]
    assert abs(far["evidence"]["log ratio per token"]) > far["evidence"]["limit per token"]
    assert f"health: likelihood_displacement at step {EVENT_STEP}: the chosen responses become less" in caplog.text
    marked = {record["step"] for record in metric_log(output) if record.get("health/likelihood_displacement") == 1.0}
    assert marked == {EVENT_STEP}
    assert f"health: likelihood_displacement at step {EVENT_STEP}" in (output / "logs" / "run.log").read_text()


def test_a_run_that_learns_has_no_events_and_no_file(base, tmp_path):
    output = run(base, tmp_path, LEARNING)
    assert metric_log(output)[-1]["rewards/accuracies"] > 0.7
    assert events(output) == []
    # as recorded, and by every rule that needs facts beside the metrics
    known = History(STEPS, num_training_pairs=128, initial_loss=0.693147, starts_at_reference=True, logp_noise=1e-4)
    assert list(replay(known, read_metrics(output / "logs" / "metrics.jsonl"))) == []


def test_columns_swapped_between_training_and_validation_are_reported(base, tmp_path):
    """The same pairs on both sides: what training learns is wrong for validation only if the columns are swapped."""
    rows = [json.loads(line) for line in Path(base["actor_train"]["data_args"]["file_name"]).read_text().splitlines()]
    for name, (chosen, rejected) in (("swapped", ("rejected", "chosen")), ("same", ("chosen", "rejected"))):
        file = tmp_path / f"{name}.jsonl"
        turned = [row | {"chosen": row[chosen], "rejected": row[rejected]} for row in rows]
        file.write_text("".join(json.dumps(row) + "\n" for row in turned))
        validation = {"data_args": {"file_name": str(file), "template": "raw"}}
        output = run(base, tmp_path / name, LEARNING, validation=validation, eval_steps=2)
        found = {each["rule"]: each for each in events(output)}
        assert found.keys() == ({"validation_below_chance"} if name == "swapped" else set())
    assert "health/validation_below_chance" in {name for record in metric_log(tmp_path / "swapped") for name in record}


def test_the_advice_for_likelihood_displacement_ends_it(base, tmp_path, drifted):
    before, after = metric_log(drifted), metric_log(run(base, tmp_path, rpo_alpha=1.0))
    assert after[-1]["sft_loss"] < before[0]["sft_loss"] < before[-1]["sft_loss"]
    assert after[-1]["rewards/accuracies"] > 0.75
    assert "likelihood_displacement" not in {each["rule"] for each in events(tmp_path)}


@pytest.mark.parametrize(
    ("loss", "row_of", "advice"),
    [
        (
            {"pref_loss": "kto", "undesirable_weight": 20.0},
            lambda at, row: {"completion": row["chosen"], "label": at % 2},
            "raise desirable_weight, ",
        ),
        (
            {"pref_loss": "plackett_luce"},
            lambda _, row: {"completions": [row["chosen"], row["rejected"]], "scores": [2, 1]},
            "",
        ),
    ],
    ids=["labels", "lists"],
)
def test_runs_on_labels_and_lists_get_advice_that_their_loss_accepts(base, tmp_path, loss, row_of, advice):
    rows = [json.loads(line) for line in Path(base["actor_train"]["data_args"]["file_name"]).read_text().splitlines()]
    file = tmp_path / "rows.jsonl"
    file.write_text(
        "".join(json.dumps({"prompt": row["prompt"]} | row_of(at, row)) + "\n" for at, row in enumerate(rows))
    )
    data = merge(base, {"actor_train": {"data_args": {"file_name": str(file)}}})
    found = {each["rule"]: each for each in events(run(data, tmp_path / "out", **loss))}
    assert found["likelihood_displacement"]["advice"] == (
        f"{advice}lower actor_train.training_args.learning_rate{',' * bool(advice)} or raise beta"
    )


def test_off_computes_no_entropy_and_trains_the_same_weights(base, tmp_path, drifted):
    output = run(base, tmp_path, health=False)  # as YAML reads `off`
    assert events(output) == []
    recorded = [
        {name: value for name, value in record.items() if name != "entropy" and not name.startswith("health/")}
        for record in metric_log(drifted)
    ]
    assert metric_log(output) == recorded


def test_events_after_crashes_are_those_of_an_undisturbed_run(base, tmp_path, drifted):
    for step in (EVENT_STEP, EVENT_STEP + 1, 9):  # checkpoints are those of steps 4 and 8
        with pytest.raises(RuntimeError, match="crash"):
            run(base, tmp_path, callbacks=[CrashAt(step)])
    run(base, tmp_path)
    assert events(tmp_path) == events(drifted) != []
    assert metric_log(tmp_path) == metric_log(drifted)


def test_stop_ends_the_run_after_a_checkpoint_and_resumes_with_a_changed_setting(base, tmp_path):
    with pytest.raises(HealthStopped, match=r"after step 7 \(checkpoint saved\): likelihood_displacement") as stopped:
        run(base, tmp_path, health="stop")
    assert stopped.value.exit_code == 3
    assert [each["step"] for each in metric_log(tmp_path)] == list(range(1, 8))
    assert not (tmp_path / "stop").exists()
    with pytest.raises(HealthStopped, match="after step 7"):  # the same command again
        run(base, tmp_path, health="stop")
    run(base, tmp_path, LEARNING, health="stop", resume_from_checkpoint="auto", max_steps=8)
    continued = [each for each in events(tmp_path) if "continued" in each]
    assert [each["step"] for each in continued] == [7]
    assert "learning_rate was 0.1, is 0.001" in "; ".join(continued[0]["continued"])
    assert metric_log(tmp_path)[-1]["step"] == 8


def test_a_stopped_run_continues_unchanged_with_warn(base, tmp_path, drifted):
    with pytest.raises(HealthStopped):
        run(base, tmp_path, health="stop")
    run(base, tmp_path, health="warn")
    assert metric_log(tmp_path) == metric_log(drifted)


def test_duplicates_are_reported_before_the_first_step(base, tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", 8, 3)
    rows.write_text(rows.read_text() * 2)
    data = {"actor_train": {"data_args": {"file_name": str(rows)}, "training_args": {"global_batch_size": 8}}}
    output = run(merge(base, data), tmp_path / "run", LEARNING, max_steps=1)
    (event,) = events(output)
    assert (event["rule"], event["step"]) == ("repeated_data", 0)
    assert event["evidence"] == {"pairs that repeat another": 8, "share of all pairs": 0.5}


@pytest.mark.parametrize("name", ["weight", "margin"])
def test_a_weight_or_margin_of_the_data_explains_the_loss_of_the_first_step(base, tmp_path, name):
    """A weight of 3 makes it 3 ln 2, and a margin of 3 ln(1 + e^3)."""
    rows = write_rows(tmp_path / "rows.jsonl", 8, 3)
    lines = [json.loads(line) | {name: 3.0} for line in rows.read_text().splitlines()]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = {"actor_train": {"data_args": {"file_name": str(rows)}, "training_args": {"global_batch_size": 8}}}
    output = run(merge(base, data), tmp_path / "run", LEARNING, max_steps=1)
    assert metric_log(output)[0]["loss"] > 2
    assert events(output) == []
