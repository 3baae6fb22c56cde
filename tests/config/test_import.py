"""Configs of other trainers: the files that people publish, the tables of keys, odd input, and hints."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from tests.support.imported import TRAINING, entry, imported, lost, value
from tests.support.paths import SHARED, shared_path
from thresher.config import load_config, parse_config
from thresher.config.dialects.convert import convert
from thresher.config.dialects.hints import flat_names, hint
from thresher.config.dialects.llama_factory import LLAMA_FACTORY
from thresher.config.dialects.losses import LOSS_PARAMETERS
from thresher.config.dialects.planned import PLANNED
from thresher.config.dialects.read import DIALECTS, recognize
from thresher.config.dialects.shell import read_commands, read_options
from thresher.config.dialects.translation import Dialect, nest, translate
from thresher.config.dialects.trl import TRL
from thresher.config.section import known_keys
from thresher.errors import UserError

# settings that change the training and have no equivalent yet; all other files need no --force
LOST = {
    "axolotl/llama3-instruct-dpo-lora-8b.yml": {"load_in_8bit", "special_tokens"},
    "axolotl/mistral-dpo-qlora.yml": {
        "load_in_4bit",
        "special_tokens",
        "lora_modules_to_save",
    },
    "axolotl/qlora-1b-kto.yaml": {"rl", "load_in_4bit"},
    "axolotl/qwen2-dpo.yaml": set(),
    "colossalchat/benchmark_simpo.sh": set(),
    "colossalchat/train_dpo.sh": set(),
    "llama-factory/qwen3_lora_dpo.yaml": set(),
    "llama-factory/qwen3_lora_kto.yaml": {"stage"},
    "ms-swift/dpo-full.sh": set(),
    "ms-swift/dpo-lora.sh": set(),
    "ms-swift/megatron-dpo-dense.sh": set(),
    "nemo-rl/dpo.yaml": {"data.train"},
    "open-instruct/final_best_70b_dpo_config.yaml": set(),
    "open-instruct/final_best_8b_dpo_config.yaml": set(),
    "open-instruct/tulu3_preview_test_simpo.yaml": set(),
    "roll/qwen2.5-3B_dpo_megatron.yaml": set(),
    "roll/qwen3-30BA3B-dpo_megatron_80GB.yaml": set(),
    "trl/qwen2-0.5b-dpo.yaml": set(),
}


@pytest.mark.real
@pytest.mark.parametrize("name", LOST)
def test_a_published_config_is_translated(tmp_path: Path, name: str) -> None:
    done = convert(shared_path("peer-configs", *name.split("/")))
    assert done.dialect.name == name.partition("/")[0]
    assert lost(done) == LOST[name]
    (tmp_path / "ours.yaml").write_text(done.text)
    load_config(tmp_path / "ours.yaml")


@pytest.mark.real
def test_every_published_config_is_listed() -> None:
    root = shared_path("peer-configs")
    assert {str(path.relative_to(root)) for path in root.glob("*/*")} == set(LOST), SHARED


def test_every_key_of_trl_is_known() -> None:
    trl = pytest.importorskip("trl")
    from dataclasses import fields

    from trl.scripts.utils import DatasetMixtureConfig

    classes = (trl.DPOConfig, trl.ModelConfig, trl.ScriptArguments, DatasetMixtureConfig)
    assert {field.name for cls in classes for field in fields(cls)} - TRL.table.keys() == set()


def test_the_table_of_losses_is_the_registry() -> None:
    from thresher.losses import describe

    assert {row.name: tuple(row.parameters) for row in describe()} == LOSS_PARAMETERS


def test_every_target_is_a_key_of_ours() -> None:
    from thresher.config import DPOConfig
    from thresher.strategies.native.declaration import FSDP2Settings

    axes = {f"{role}.strategy_args.strategy_config.{axis}" for role in ("actor_train", "reference")
            for axis in FSDP2Settings.model_fields}  # fmt: skip
    known = {key for key, _ in known_keys(DPOConfig)} | axes
    targets = {target for dialect in DIALECTS for rule in dialect.table.values() for target in rule.targets}
    assert targets | {key.target for key in PLANNED.values() if key.target} <= known


def test_every_rule_without_a_target_has_a_reason() -> None:
    for dialect in DIALECTS:
        assert [key for key, rule in dialect.table.items() if not rule.targets and not rule.note] == []


def test_a_planned_key_is_applied_once_it_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PLANNED, "kto", PLANNED["kto"]._replace(target="exp_name"))
    done = translate(LLAMA_FACTORY, {"model_name_or_path": "m", "stage": "kto", "finetuning_type": "full"})
    assert done.value("exp_name") == "kto"
    assert not done.lost


def test_an_unknown_key_is_lost_unless_it_is_empty(tmp_path: Path) -> None:
    done = imported(tmp_path, "model_name_or_path: m\ndataset_name: d\nnew_trick: 3\nother_trick: false\n")
    assert lost(done) == {"new_trick"}
    assert "not a key of TRL" in entry(done, "new_trick").notes[0]


def test_a_value_of_a_wrong_type_is_reported_not_a_crash(tmp_path: Path) -> None:
    done = imported(tmp_path, "model_name_or_path: m\ndataset_name: d\nwarmup_steps: many\nloss_weights: 1\n")
    assert lost(done) == {"warmup_steps"}
    with pytest.raises(UserError, match="learning_rate"):
        imported(tmp_path, "model_name_or_path: m\ndataset_name: d\nlearning_rate: fast\n")


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
@pytest.mark.parametrize("odd", [True, 0, -1, 1.5, float("inf"), "x", "a,b", [1], [{}], {"a": 1}], ids=repr)
def test_odd_values_never_crash(dialect: Dialect, odd: object) -> None:
    flat = {key: odd for key in dialect.table if not key.endswith("*")}
    for keys in (list(flat), list(flat)[::2], list(flat)[1::3]):
        run = translate(dialect, nest({key: flat[key] for key in keys if not has_section_above(key, keys)}))
        with contextlib.suppress(UserError):
            parse_config(run.values)


def has_section_above(key: str, keys: list[str]) -> bool:
    return any(key.startswith(f"{other}.") for other in keys)


def test_a_file_of_nobody_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not recognized as a config of ROLL"):
        imported(tmp_path, "greeting: hello\n")
    with pytest.raises(UserError, match="runs no training program"):
        imported(tmp_path, "echo hello\n", "train.sh")
    with pytest.raises(UserError, match="unknown dialect verl; use one of"):
        convert(tmp_path / "theirs.yaml", "verl")


def test_a_script_that_names_a_config_file_is_read_with_it(tmp_path: Path) -> None:
    (tmp_path / "dpo.yaml").write_text("model_name_or_path: m\ndataset_name: d\nbeta: 0.1\n")
    done = imported(
        tmp_path, "accelerate launch --num_processes 2 scripts/dpo.py --config dpo.yaml --beta 0.3\n", "a.sh"
    )
    assert value(done, "beta") == 0.3
    assert value(done, "actor_train.device_mapping") == "list(range(0,2))"
    with pytest.raises(UserError, match=r"names the config gone\.yaml, which is not here"):
        imported(tmp_path, "llamafactory-cli train gone.yaml\n", "b.sh")


def test_shell_words() -> None:
    commands = read_commands('A=1 run --x $A --y \'{"k": 2}\' --flag --list a b # end\nx=$(rm -rf /) && run2 "$x"\n')
    assert [command.words[0] for command in commands] == ["run", "run2"]
    options = read_options(commands[0].words[1:])
    assert options.options == {"y": {"k": 2}, "flag": True, "list": ["a", "b"]}
    assert options.empty == ["x"], "an environment prefix is not a variable of the same line"


def test_secrets_are_not_shown_and_not_written(tmp_path: Path) -> None:
    from thresher.config.dialects.convert import shown_value

    done = imported(tmp_path, "model_name_or_path: m\ndataset_name: d\nhub_token: hf_abcdefghijklmnopqrstuvwxyz0123\n")
    assert "hf_abc" not in done.text
    assert "hf_abc" not in shown_value(entry(done, "hub_token"))


@pytest.mark.parametrize(
    ("key", "meaning"),
    [
        ("dataset_name", "did you mean `actor_train.data_args.file_name`?"),
        ("use_peft", "did you mean `actor_train.model_args.lora_rank`?"),
        ("max_length", "did you mean `sequence_length`?"),
        ("loss_type", "did you mean `pref_loss`?"),
        ("bf16", "did you mean `actor_train.model_args.dtype`?"),
        ("report_to", "did you mean `track_with`?"),
        ("evaluation_strategy", "did you mean `eval_strategy`?"),
        ("pref_beta", "did you mean `beta`?"),
        (
            "micro_batch_size",
            "did you mean `actor_train.training_args.per_device_train_batch_size`?",
        ),
        ("max_prompt_length", "a key of TRL without an equivalent: prompt and response share"),
        ("learning_rate", "it belongs at `actor_train.training_args.learning_rate`"),
        ("sequence_lenght", "did you mean `sequence_length`?"),
    ],
)
def test_an_unknown_key_is_explained_by_its_meaning_before_its_spelling(key: str, meaning: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_config({key: 1})
    assert meaning in str(caught.value)


def test_a_key_that_nobody_has_gets_no_hint() -> None:
    assert hint("sequence_lenght") is None


def test_flat_names_lead_to_our_keys() -> None:
    names = flat_names()
    assert names["learning_rate"] == f"{TRAINING}learning_rate"
    assert names["max_length"] == "sequence_length"
    assert "loss_type" not in names, "its value is translated"


def test_recognition_prefers_the_special_dialects() -> None:
    assert recognize({"model_name_or_path": 1, "learning_rate": 1}) is TRL
    assert recognize({"model_name_or_path": 1, "stage": 1, "learning_rate": 1}).name == "llama-factory"
    assert recognize({"pretrain": 1, "beta": 1}) is None
