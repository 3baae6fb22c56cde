"""A config is compared with a stored one in both directions, with defaults filled in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.compared_runs import merge
from thresher.builders.checkpoints import (
    build_checkpoint_manager,
    changed_settings,
    continue_after_restart,
    find_checkpoint,
)
from thresher.checkpoint.manager import DamagedCheckpoints
from thresher.config import parse_config
from thresher.distributed.groups import SINGLE_PROCESS
from thresher.errors import CheckpointError, UserError
from thresher.redact import redact

BASE = {"pretrain": "model", "actor_train": {"num_workers": 2, "data_args": {"file_name": "pairs.jsonl"}}}


def changes_of(then: dict[str, Any], now: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    stored = redact(parse_config(merge(BASE, then)).model_dump(mode="json"))
    return changed_settings(stored, parse_config(merge(BASE, now)))


def strategy(**settings: object) -> dict[str, Any]:
    return {"actor_train": {"strategy_args": {"strategy_config": settings}}}


def data(**settings: object) -> dict[str, Any]:
    return {"actor_train": {"data_args": settings}}


STRATEGY_CONFIG, DATA_ARGS = "actor_train.strategy_args.strategy_config", "actor_train.data_args"
HELD_OUT = {"validation": {"split": 0.1}}


@pytest.mark.parametrize(
    ("then", "now", "changes"),
    [
        (
            {"pref_loss": {"sigmoid": 0.2, "sft": 5.0}},
            {},
            [("pref_loss.sigmoid", 0.2, 1.0), ("pref_loss.sft", 5.0, None)],
        ),
        (
            {"pref_loss": {"sigmoid": 0.8, "sft": 0.2, "bco_pair": 0.3}},
            {"pref_loss": {"sigmoid": 0.8, "sft": 0.2}},
            [("pref_loss.bco_pair", 0.3, None)],
        ),
        ({"pref_loss": ["sigmoid", "sft"]}, {}, [("pref_loss.sft", 1.0, None)]),
        (strategy(tp_size=2), {}, [(f"{STRATEGY_CONFIG}.tp_size", 2, 1)]),
        (strategy(reduce_dtype="bf16"), {}, [(f"{STRATEGY_CONFIG}.reduce_dtype", "bf16", "fp32")]),
        (data(template_arguments={"a": 1}), {}, [(f"{DATA_ARGS}.template_arguments.a", 1, None)]),
        ({"system_envs": {"A": "1"}}, {}, [("system_envs.A", "1", None)]),
        (HELD_OUT, {}, [("validation", {"split": 0.1}, None)]),
        (merge(HELD_OUT, {"samples": {"num_prompts": 4}}), HELD_OUT, [("samples", {"num_prompts": 4}, None)]),
        (merge(HELD_OUT, {"samples": {}}), HELD_OUT, [("samples", {}, None)]),
        ({"beta": 0.3}, {}, [("beta", 0.3, None)]),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_a_removed_setting_is_a_change_as_an_added_one_is(then, now, changes):
    assert sorted(changes_of(then, now)) == sorted(changes)
    assert sorted(changes_of(now, then)) == sorted((name, new, old) for name, old, new in changes)


@pytest.mark.parametrize(
    ("then", "now"),
    [
        ({"pref_loss": "sigmoid"}, {"pref_loss": {"sigmoid": 1}}),
        ({"pref_loss": ["sigmoid"]}, {}),
        ({"ipo": True}, {"pref_loss": "ipo_sum"}),
        (strategy(tp_size=1), {}),
        ({"actor_train": {"strategy_args": {"strategy_name": "fsdp2_train"}}}, {}),
    ],
)
def test_another_spelling_of_the_same_setting_is_no_change(then, now):
    assert changes_of(then, now) == changes_of(now, then) == []


@pytest.mark.parametrize(
    "now",
    [
        {"track_with": ["wandb"], "tracker_kwargs": {"wandb_project": "other", "tags": ["b"]}},
        {"logging_steps": 5, "logging_dir": "elsewhere"},
        {"save_steps": 7, "save_total_limit": 1},
        {"export_model": True},
    ],
    ids="+".join,
)
def test_a_setting_that_changes_no_number_is_free_to_change(now):
    assert changes_of({}, now) == changes_of(now, {}) == []


@pytest.mark.parametrize(
    ("now", "change"),
    [
        ({"actor_train": {"num_workers": 4}}, ("actor_train.num_workers", 2, 4)),
        (strategy(dp_replicate=2), (f"{STRATEGY_CONFIG}.dp_replicate", 1, 2)),
    ],
    ids=["num_workers", "dp_replicate"],
)
def test_only_an_elastic_run_is_free_to_change_its_number_of_replicas(now, change):
    assert changes_of({}, now) == [change]
    assert changes_of({"elastic": True}, merge(now, {"elastic": True})) == []


def test_a_key_that_only_the_stored_config_knows_is_a_change():
    """A newer version wrote it, and its effect is not known here."""
    stored = parse_config(BASE).model_dump(mode="json")
    assert changed_settings(stored | {"of_tomorrow": None}, parse_config(BASE)) == []
    assert changed_settings(stored | {"of_tomorrow": 3}, parse_config(BASE)) == [("of_tomorrow", 3, None)]


def test_a_key_that_was_removed_is_refused_with_a_hint_and_does_not_stop_a_resume():
    with pytest.raises(UserError, match="spare_workers: unknown key; spare workers no longer exist: remove it"):
        parse_config(BASE | {"spare_workers": 1})
    assert changed_settings(parse_config(BASE).model_dump(mode="json") | {"spare_workers": 1}, parse_config(BASE)) == []


def test_the_names_in_checkpoints_of_0_2_are_the_same_settings():
    """Version 0.2 stored some settings under the names that they had before it."""
    config = parse_config(
        {
            "graceful_stop_timeout": 30,
            "max_consecutive_skipped_steps": 3,
            "metric_for_best_model": "eval/rewards/margins",
            "validation": {"data_args": {"file_name": "held_out.jsonl"}},
            "reference": {"prefetch_steps": 4},
            "actor_train": {
                "data_args": {"file_name": "pairs.jsonl", "special_tokens_in_text": "reject"},
                "training_args": {"gradient_checkpointing": "full"},
                "strategy_args": {"strategy_config": {"pp_size": 2, "virtual_pp_size": 2}},
                "num_workers": 2,
            },
        }
    )
    stored = config.model_dump(mode="json")
    for old, new in (
        ("stop_deadline", "graceful_stop_timeout"),
        ("hang_timeout", "heartbeat_timeout"),
        ("max_skipped_steps", "max_consecutive_skipped_steps"),
        ("metric_for_best", "metric_for_best_model"),
    ):
        stored[old] = stored.pop(new)
    stored["reference"]["steps_ahead"] = stored["reference"].pop("prefetch_steps")
    policy = stored["actor_train"]
    policy["data_args"]["special_tokens_in_text"] = "refuse"
    policy["training_args"]["gradient_checkpointing"] = True
    policy["strategy_args"]["strategy_config"] = {"pp_size": 2, "pp_chunks": 2}
    stored["validation"]["data_args"]["special_tokens_in_text"] = "text"
    assert changed_settings(stored, config) == []
    stored["max_skipped_steps"] = 4
    assert changed_settings(stored, config) == [("max_consecutive_skipped_steps", 4, 3)]


def launch(monkeypatch, job: str, number: int) -> None:
    """Set what differs between the launches of a torchrun, and between those with the same run id."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", f"/tmp/torchelastic/none_{job}/attempt_{number}/0/error.json")


def save(root: Path, step: int) -> Path:
    manager = build_checkpoint_manager(parse_config(merge(BASE, {"output_dir": str(root)})))
    return manager.save(step, lambda path: [], {}, SINGLE_PROCESS)


@pytest.mark.parametrize(
    ("given", "first_step", "own_step", "expected"),
    [
        (False, None, None, False),  # restarted before its first checkpoint
        (False, None, 4, "auto"),
        ("step-00000002", None, 4, "auto"),  # of a different run
        ("step-00000002", 1, None, "step-00000002"),  # the older one in output_dir was there before
        ("auto", None, 4, "auto"),
    ],
)
def test_a_run_that_its_launcher_restarts_continues_from_its_own_newest_checkpoint(
    tmp_path, monkeypatch, given, first_step, own_step, expected
):
    other = save(tmp_path / "other", 2)
    path = str(other) if isinstance(given, str) and given != "auto" else given
    config = parse_config(merge(BASE, {"output_dir": str(tmp_path / "own"), "resume_from_checkpoint": path}))
    if first_step is not None:
        save(tmp_path / "own", first_step)
    launch(monkeypatch, "one", 0)
    find_checkpoint(config, DamagedCheckpoints())
    if own_step is not None:
        save(tmp_path / "own", own_step)
    launch(monkeypatch, "one", 1)
    found = continue_after_restart(config).resume_from_checkpoint
    assert found == (str(other) if expected == other.name else expected)


def test_settings_are_compared_at_a_restart_as_at_the_first_launch(tmp_path, monkeypatch):
    config = parse_config(merge(BASE, {"output_dir": str(tmp_path)}))
    launch(monkeypatch, "one", 0)
    find_checkpoint(config, DamagedCheckpoints())
    save(tmp_path, 4)
    assert continue_after_restart(config) is config


@pytest.mark.parametrize("job", ["one", None])
def test_a_launch_that_was_refused_is_refused_again_when_it_is_restarted(tmp_path, monkeypatch, job):
    """The output_dir has checkpoints of an earlier run. job: of the earlier run's launches."""
    values = {"output_dir": str(tmp_path), "resume_from_checkpoint": False}
    if job is not None:
        launch(monkeypatch, job, 0)
        find_checkpoint(parse_config(merge(BASE, values)), DamagedCheckpoints())
    save(tmp_path, 4)
    config = parse_config(merge(BASE, values))
    for number in range(3):
        launch(monkeypatch, "two", number)
        with pytest.raises(CheckpointError, match="contains checkpoints of an earlier run"):
            find_checkpoint(continue_after_restart(config) if number else config, DamagedCheckpoints())
