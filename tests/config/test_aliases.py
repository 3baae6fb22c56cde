"""Earlier names of keys and values: accepted from every source, and unchanged in files on disk."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import yaml

from thresher.builders.checkpoints import config_changes
from thresher.config import (
    DataArgs,
    DPOConfig,
    ReferenceConfig,
    StrategyArgs,
    TrainingArgs,
    load_config,
    parse_config,
)
from thresher.config.aliases import ALIASES, Aliases
from thresher.config.section import known_keys
from thresher.config.stored import from_stored, to_stored
from thresher.errors import UserError

# config.json of a checkpoint, written by the version in which the earlier names were the only ones, for this config
STORED = Path(__file__).with_name("stored_config.json")
EARLIER = {
    "stop_deadline": 30,
    "hang_timeout": 16,
    "max_skipped_steps": 3,
    "metric_for_best": "eval/rewards/accuracies",
    "greater_is_better": True,
    "max_steps": -1,
    "num_train_epochs": 2,
    "eval_steps": 5,
    "pretrain": "model",
    "pref_loss": "ipo",
    "ipo": True,
    "reference": {"mode": "concurrent", "infer_batch_size": 8, "steps_ahead": 4},
    "validation": {"data_args": {"file_name": "held_out.jsonl"}},
    "actor_train": {
        "data_args": {"file_name": "pairs.jsonl", "special_tokens_in_text": "refuse"},
        "num_workers": 4,
        "strategy_args": {"strategy_config": {"pp_size": 2, "pp_chunks": 2, "tp_size": 2}},
        "training_args": {"torch_compile": False},  # the default of that version
    },
}
CURRENT = {
    "graceful_stop_timeout": 30,
    "heartbeat_timeout": 16,
    "max_consecutive_skipped_steps": 3,
    "metric_for_best_model": "eval/rewards/accuracies",
    "greater_is_better": True,
    "num_train_epochs": 2,
    "eval_steps": 5,
    "pretrain": "model",
    "pref_loss": "ipo",
    "ipo": True,
    "reference": {"mode": "concurrent", "infer_batch_size": 8, "prefetch_steps": 4},
    "validation": {"data_args": {"file_name": "held_out.jsonl", "special_tokens_in_text": "keep_as_text"}},
    "actor_train": {
        "data_args": {"file_name": "pairs.jsonl", "special_tokens_in_text": "reject"},
        "num_workers": 4,
        "strategy_args": {"strategy_config": {"pp_size": 2, "virtual_pp_size": 2, "tp_size": 2}},
        "training_args": {"torch_compile": False},  # the default of that version
    },
}
KEYS = [
    ("stop_deadline", "graceful_stop_timeout", 30.0),
    ("hang_timeout", "heartbeat_timeout", 16.0),
    ("max_skipped_steps", "max_consecutive_skipped_steps", 3),
    ("reference.steps_ahead", "reference.prefetch_steps", 4),
    (
        "actor_train.strategy_args.strategy_config.pp_chunks",
        "actor_train.strategy_args.strategy_config.virtual_pp_size",
        2,
    ),
]


TWO_STAGES = {"actor_train": {"strategy_args": {"strategy_config": {"pp_size": 2}}}}


def write(path: Path, values: dict) -> Path:
    path.write_text(yaml.safe_dump(values))
    return path


def test_a_config_in_earlier_names_equals_one_in_current_names(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    expected = parse_config(CURRENT)
    assert parse_config(EARLIER) == expected
    assert load_config(write(tmp_path / "earlier.yaml", EARLIER)) == expected
    assert DPOConfig(**EARLIER) == expected
    assert caplog.records == []


def test_every_alias_is_in_the_compared_configs():
    """A new alias needs an example above."""
    examples = yaml.safe_dump(EARLIER)
    for aliases in ALIASES.values():
        assert all(f"{old}:" in examples for old in aliases.keys)
    assert set(ALIASES) == {"DPOConfig", "ReferenceConfig", "TrainingArgs", "DataArgs", "FSDP2Settings"}


def test_an_alias_leads_to_a_key_and_hides_none():
    leaves = {key.rpartition(".")[2] for key, _ in known_keys(DPOConfig)} | {"virtual_pp_size"}
    for aliases in ALIASES.values():
        assert set(aliases.keys.values()) | aliases.values.keys() | aliases.shorthands.keys() <= leaves
        assert not aliases.keys.keys() & leaves


@pytest.mark.parametrize(("old", "new", "value"), KEYS)
def test_an_override_may_use_either_name(tmp_path, old, new, value):
    path = write(tmp_path / "run.yaml", {"runtime": "ray", **TWO_STAGES})
    assert load_config(path, [f"{old}={value}"]) == load_config(path, [f"{new}={value}"])
    assert load_config(path, [f"{old}={value}"]) != load_config(path)


@pytest.mark.parametrize(("old", "new", "value"), KEYS)
def test_a_key_under_both_names_is_rejected(tmp_path, old, new, value):
    path = write(tmp_path / "run.yaml", {"runtime": "ray", **TWO_STAGES})
    section, _, name = new.rpartition(".")
    earlier = old.rpartition(".")[2]
    with pytest.raises(UserError) as caught:
        load_config(path, [f"{old}={value}", f"{new}={value}"])
    assert str(caught.value) == (
        f"invalid configuration:\n  - {section and f'{section}: '}{earlier} and {name} are both set; {earlier} is the "
        f"earlier name of {name}, keep {name}"
    )


def test_sections_built_in_python_take_earlier_spellings():
    assert ReferenceConfig(steps_ahead=4).prefetch_steps == 4
    assert DataArgs(special_tokens_in_text="text") == DataArgs()
    assert DataArgs(special_tokens_in_text="refuse").special_tokens_in_text == "reject"
    assert StrategyArgs(strategy_config={"pp_size": 2, "pp_chunks": 2}).settings.virtual_pp_size == 2
    for given, recompute in ((True, "full"), (False, "off"), ("selective", "selective")):
        assert TrainingArgs(gradient_checkpointing=given).gradient_checkpointing == recompute


def test_gradient_checkpointing_is_off_in_yaml_too(tmp_path):
    path = write(tmp_path / "run.yaml", {})
    key = "actor_train.training_args.gradient_checkpointing"
    for given, recompute in (("true", "full"), ("off", "off"), ("full", "full")):
        assert load_config(path, [f"{key}={given}"]).actor_train.training_args.gradient_checkpointing == recompute


def test_an_earlier_name_belongs_to_its_own_engine():
    with pytest.raises(ValueError, match="strategy_config has no key pp_chunks"):
        StrategyArgs(strategy_name="megatron_train", strategy_config={"pp_size": 2, "pp_chunks": 2})


def test_a_wrong_value_under_an_earlier_name_is_reported_under_the_current_one():
    with pytest.raises(UserError, match="graceful_stop_timeout: Input should be greater than 0"):
        parse_config({"stop_deadline": 0})
    with pytest.raises(UserError, match=r"special_tokens_in_text: Input should be 'keep_as_text' or 'reject'"):
        parse_config({"actor_train": {"data_args": {"special_tokens_in_text": ["text"]}}})


def test_the_stored_config_is_what_earlier_versions_wrote():
    stored = json.loads(STORED.read_text())
    for values in (EARLIER, CURRENT):
        written = of_earlier_versions(to_stored(parse_config(values)), stored)
        assert json.dumps(written) == json.dumps(stored)  # order of keys included


def of_earlier_versions(written: dict, stored: dict) -> dict:
    """Drop the keys that an earlier version did not have."""
    return {
        key: of_earlier_versions(value, stored[key]) if isinstance(value, dict) else value
        for key, value in written.items()
        if key in stored
    }


def test_a_stored_config_loads_and_names_no_change(tmp_path):
    stored = json.loads(STORED.read_text())
    (tmp_path / "config.json").write_text(STORED.read_text())
    assert parse_config(stored) == parse_config(CURRENT)
    current = parse_config(CURRENT).model_dump(mode="json")
    assert from_stored(stored) == of_earlier_versions(current, from_stored(stored))
    assert config_changes(tmp_path, parse_config(EARLIER)) == []
    assert config_changes(tmp_path, parse_config(CURRENT)) == []


def test_a_change_since_an_earlier_checkpoint_is_named_by_current_names(tmp_path):
    (tmp_path / "config.json").write_text(STORED.read_text())
    changed = parse_config(CURRENT | {"max_consecutive_skipped_steps": 4, "graceful_stop_timeout": 99})
    # how long a stop may take is free to change
    assert config_changes(tmp_path, changed) == ["max_consecutive_skipped_steps was 3, is 4"]


def test_earlier_undoes_current():
    for aliases in ALIASES.values():
        for old, new in aliases.keys.items():
            assert aliases.current(old, 1) == (new, 1)
            assert aliases.earlier(new, 1) == (old, 1)
        for key, values in aliases.values.items():
            for old, new in values.items():
                assert aliases.current(key, old) == (key, new)
                assert aliases.earlier(key, new) == (key, old)
    assert Aliases().current("key", [1]) == ("key", [1])
