"""Configs of other trainers: the files that people publish, the tables of keys, odd input, and hints."""

from __future__ import annotations

import contextlib
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.imported import TRAINING, entry, imported, lost, value
from tests.support.paths import SHARED, shared_path
from thresher import foreign_names
from thresher.config import DPOConfig, load_config, parse_config
from thresher.config.section import known_keys
from thresher.errors import UserError
from thresher.importers.convert import DIALECTS, NAMES, convert, shown_value
from thresher.importers.names import flat_names, hint
from thresher.importers.read import read_commands, read_options, recognize
from thresher.importers.translation import NEUTRAL, Dialect, nest, translate

TRL = NAMES["trl"]

# settings that change the training and have no equivalent yet; all other files need no --force
LOST = {
    "axolotl/llama3-instruct-dpo-lora-8b.yml": {"special_tokens"},
    "axolotl/mistral-dpo-qlora.yml": {"special_tokens"},
    "axolotl/qlora-1b-kto.yaml": set(),
    "axolotl/qwen2-dpo.yaml": set(),
    "colossalchat/benchmark_simpo.sh": set(),
    "colossalchat/train_dpo.sh": set(),
    "llama-factory/qwen3_lora_dpo.yaml": set(),
    "llama-factory/qwen3_lora_kto.yaml": set(),
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
    assert done.translation.dialect.name == name.partition("/")[0]
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

    configs = (trl.DPOConfig, trl.KTOConfig, trl.RewardConfig)
    classes = (*configs, trl.ModelConfig, trl.ScriptArguments, DatasetMixtureConfig)
    assert [field.name for cls in classes for field in fields(cls) if TRL.find(field.name) is None] == []


def test_every_target_is_a_key_of_ours() -> None:
    from thresher.engines.native.declaration import FSDP2Settings

    axes = {f"{role}.strategy_args.strategy_config.{axis}" for role in ("actor_train", "reference")
            for axis in FSDP2Settings.model_fields}  # fmt: skip
    known = {key for key, _ in known_keys(DPOConfig)} | axes
    targets = {target for dialect in DIALECTS for rule in dialect.table.values() for target in rule.targets}
    assert targets <= known


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
def test_notes_name_keys_as_they_are_written_in_a_config(dialect: Dialect) -> None:
    """A part of a key, such as data_args.template, would be rejected where the reader pastes it."""
    part = re.compile(r"(?<![\w.])(data_args|model_args|training_args|strategy_args|strategy_config)\.")
    keys = [key for key in dialect.table if not has_section_above(key, list(dialect.table))]
    runs = [translate(dialect, nest(dict.fromkeys(keys, value))) for value in ("x", 2, True)]
    notes = {note for run in runs for entry in run.entries for note in entry.notes}
    assert {note for note in notes if part.search(note)} == set()


# members of a family of neutral keys that are not neutral themselves: their own rules count
MEANT = {
    "axolotl": {"trl.beta", "jagged_restart_steps", "lisa_n_layers"},
    "ms-swift": {"overlap_grad_reduce", "overlap_param_gather", "fp8_format", "fp4_format", "mtp_num_layers"},
    "open-instruct": {"rope_scaling_factor"},
}


def test_every_rule_without_a_target_has_a_reason() -> None:
    for dialect in DIALECTS:
        assert [key for key, rule in dialect.table.items() if not rule.targets and not rule.note] == []


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
def test_a_key_that_changes_the_training_never_counts_as_changing_nothing(dialect: Dialect) -> None:
    """Patterns of neutral keys match no key of the same trainer that is translated or that stops an import."""
    only_neutral = replace(dialect, table={})
    assert {key for key in dialect.table if only_neutral.find(key)} == MEANT.get(dialect.name, set())


def test_no_key_of_ours_counts_as_changing_nothing_where_both_are_read() -> None:
    """ROLL's keys are read in our files, and TRL's names in Python."""
    keys = [key for key, _ in known_keys(DPOConfig)]
    assert [key for key in keys if NAMES["roll"].find(key) is NEUTRAL] == []
    assert [key for key in keys if TRL.find(key.rpartition(".")[2]) is NEUTRAL] == []


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
def test_every_key_of_a_config_has_one_outcome(dialect: Dialect) -> None:
    keys = [*dialect.table, *(pattern.replace("*", "any") for pattern in dialect.neutral), "not_a_key"]
    keys = [key for key in keys if not has_section_above(key, keys) and key != "processes"]
    flat = dict.fromkeys(keys, "x")
    entries = translate(dialect, nest(flat)).entries
    assert sorted(entry.key for entry in entries if not entry.is_default) == sorted(flat)
    assert {entry.outcome for entry in entries if entry.key in dialect.neutral} <= {"changes nothing here"}


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
    flat = dict.fromkeys(dialect.table, odd)
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
        ("dataloader_num_workers", "a key of TRL that changes nothing here; remove it"),
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
    def recognized(*keys: str) -> Dialect | None:
        return recognize(dict.fromkeys(keys), DIALECTS)

    assert recognized("model_name_or_path", "learning_rate") is TRL
    assert recognized("model_name_or_path", "stage", "learning_rate") is NAMES["llama-factory"]
    assert recognized("pretrain", "beta") is None


def test_a_config_knows_no_other_trainer_unless_the_importers_are_installed() -> None:
    foreign_names.install(None)
    with pytest.raises(UserError, match="max_grad_norm: unknown key; it belongs at `actor_train"):
        parse_config({"max_grad_norm": 1.0})
    with pytest.raises(UserError, match="dataset_name: unknown key; known keys here: "):
        parse_config({"dataset_name": "d"})


def test_an_option_that_a_command_computes_is_lost_and_not_a_flag(tmp_path: Path) -> None:
    steps = "--gradient_accumulation_steps $(expr 16 / $n)"
    script = f"n=4\nswift rlhf --rlhf_type dpo --model m --dataset d {steps} --learning_rate 1e-5\n"
    assert lost(imported(tmp_path, script, "train.sh")) == {"gradient_accumulation_steps"}
