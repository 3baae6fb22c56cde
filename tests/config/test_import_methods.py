"""How `thresher import` handles reward models and KTO, which are not training on pairs with a reference."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from tests.support.imported import FILES, MODEL, TRAINING, entry, imported, lost, value
from thresher.builders.objective import build_objective
from thresher.config import parse_config
from thresher.errors import UserError
from thresher.importers.convert import Conversion, convert

FACTORY = "stage: rm\nmodel_name_or_path: m\ndataset: my_pairs\nfinetuning_type: full\n"
AXOLOTL = "base_model: m\nreward_model: true\ndatasets: [{path: org/pairs, type: bradley_terry.chat_template}]\n"
SWIFT = "rlhf_type: rm\nmodel: m\ndataset: org/pairs\ntuner_type: full\n"
NEMO = "policy: {model_name: m, reward_model_cfg: {enabled: true, reward_model_type: bradley_terry}}\nrm: {seed: 7}\n"
TRL = "model_name_or_path: m\ndataset_name: org/rows\n"
CENTERED = "center_rewards_coefficient: 0.01\n"
REWARDS = {
    "llama-factory": FACTORY,
    "axolotl": AXOLOTL,
    "ms-swift": SWIFT,
    "nemo-rl": NEMO,
    "trl": TRL + CENTERED,
}


def trains_rewards(done: Conversion) -> bool:
    """Whether the config builds, so that no setting is without effect, and trains a reward model."""
    return build_objective(parse_config(done.translation.values)).trains_rewards


@pytest.mark.parametrize("trainer", REWARDS)
def test_a_reward_model_is_trained_with_bradley_terry(tmp_path: Path, trainer: str) -> None:
    done = imported(tmp_path, REWARDS[trainer])
    assert done.translation.dialect.name == trainer
    assert value(done, "pref_loss") == "bradley_terry"
    assert trains_rewards(done)
    assert "a new head starts at zero here" in done.text
    assert not lost(done)


@pytest.mark.parametrize("trainer", ["axolotl", "ms-swift", "trl"])
def test_the_coefficient_of_a_reward_model_is_kept(tmp_path: Path, trainer: str) -> None:
    done = imported(tmp_path, REWARDS[trainer].replace(CENTERED, "") + CENTERED)
    assert value(done, "center_rewards_coefficient") == 0.01
    assert trains_rewards(done)


@pytest.mark.parametrize(
    ("trainer", "text"),
    [
        (
            "llama-factory",
            "pref_loss: simpo\npref_beta: 0.2\npref_ftx: 0.5\nsimpo_gamma: 1.0\nld_alpha: 0.5\nref_model: r\n"
            "dpo_label_smoothing: 0.1\nkto_chosen_weight: 2.0\n",
        ),
        ("axolotl", "rl_beta: 0.2\nrpo_alpha: 0.5\nprecompute_ref_log_probs: true\n"),
        ("ms-swift", "beta: 0.2\nrpo_alpha: 0.5\nld_alpha: 0.5\nf_divergence_type: js_divergence\nloss_type: hinge\n"),
        ("ms-swift", "ref_model: r\nreference_free: true\ndesirable_weight: 2.0\n"),
    ],
)
def test_settings_of_policies_have_no_effect_on_a_reward_model(tmp_path: Path, trainer: str, text: str) -> None:
    done = imported(tmp_path, REWARDS[trainer] + text)
    plain = imported(tmp_path, REWARDS[trainer])
    assert done.translation.values == plain.translation.values
    assert {entry(done, line.partition(":")[0]).outcome for line in text.splitlines()} == {"no effect"}


def test_a_loss_without_a_reference_has_no_settings_of_one(tmp_path: Path) -> None:
    text = "stage: dpo\nmodel_name_or_path: m\ndataset: d\nref_model: r\npref_loss: "
    assert "reference" in imported(tmp_path, f"{text}sigmoid\n").translation.values
    done = imported(tmp_path, f"{text}simpo\n")
    assert "reference" not in done.translation.values
    assert entry(done, "ref_model").notes == ["simpo has no reference"]


def test_the_stage_of_llama_factory_says_which_loss_it_is(tmp_path: Path) -> None:
    done = imported(tmp_path, f"{FACTORY.replace('rm', 'kto')}pref_loss: hinge\n")
    assert (value(done, "pref_loss"), entry(done, "pref_loss").outcome) == ("kto", "no effect")


def test_the_value_head_of_llama_factory_has_dropout(tmp_path: Path) -> None:
    assert "has dropout" in "; ".join(entry(imported(tmp_path, FACTORY), "stage").notes)


def test_a_reward_dataset_of_axolotl_has_its_columns_and_is_cut(tmp_path: Path) -> None:
    done = imported(tmp_path, f"{AXOLOTL}sequence_len: 2048\nchat_template: gemma\nnum_labels: 1\n")
    assert (value(done, FILES), value(done, "prompt_key")) == ("hf://org/pairs", "input")
    assert value(done, "sequence_length") == 2048
    assert value(done, "actor_train.data_args.truncation") == "response_end"
    assert value(done, "actor_train.data_args.template") == "gemma"
    assert not lost(done)
    assert lost(imported(tmp_path, AXOLOTL.replace("chat_template", "user_defined"))) == {"datasets"}


def test_process_rewards_are_not_trained(tmp_path: Path) -> None:
    done = imported(tmp_path, AXOLOTL.replace("reward_model", "process_reward_model"))
    assert "process_reward_model" in lost(done)


@pytest.mark.parametrize(
    ("trainer", "text"),
    [
        ("trl", "use_peft: true\nlora_modules_to_save: [score]\n"),
        ("axolotl", "adapter: lora\nlora_r: 8\nlora_modules_to_save: [score]\n"),
        ("ms-swift", "tuner_type: lora\nmodules_to_save: [score]\n"),
    ],
)
def test_lora_trains_the_head_too(tmp_path: Path, trainer: str, text: str) -> None:
    config = REWARDS[trainer].replace("tuner_type: full\n", "") + text
    assert not lost(imported(tmp_path, config))
    more = imported(tmp_path, config.replace("[score]", "[score, embed_tokens]"))
    assert value(more, "actor_train.model_args.modules_to_save") == ["embed_tokens"]
    assert not lost(more)


def test_megatron_trains_no_reward_models(tmp_path: Path) -> None:
    script = "NPROC_PER_NODE=4 megatron rlhf --rlhf_type rm --model m --dataset a.jsonl --tensor_model_parallel_size 2"
    done = imported(tmp_path, f"{script} --micro_batch_size 2\n", "train.sh")
    assert "strategy_args" not in done.translation.values["actor_train"]
    size = entry(done, "tensor_model_parallel_size")
    assert (size.outcome, size.is_lost) == ("no equivalent", False)
    assert "megatron_train does not train reward models" in size.notes[0]
    assert value(done, "actor_train.device_mapping") == "list(range(0,4))"
    assert not lost(done)


def test_nemo_rl_trains_a_reward_model_for_its_epochs(tmp_path: Path) -> None:
    done = imported(
        tmp_path,
        NEMO.replace(
            "{seed: 7}", "{seed: 7, max_num_epochs: 2, max_num_steps: -1, val_period: 16, val_global_batch_size: 32}"
        ),
    )
    assert [value(done, key) for key in ("seed", "num_train_epochs", "max_steps", "beta")] == [7, 2, None, None]
    other = imported(tmp_path, NEMO.replace("bradley_terry", "regression"))
    assert lost(other) == {"policy.reward_model_cfg.reward_model_type"}


@pytest.mark.parametrize(
    ("text", "name", "dialect"),
    [
        (TRL + CENTERED, "theirs.yaml", None),
        (TRL, "theirs.yaml", "trl-reward"),
        (f"{TRL}center_rewards_coefficient: null\n", "theirs.yaml", "trl-reward"),
        ("trl reward --model_name_or_path m --dataset_name org/rows\n", "train.sh", None),
        ("accelerate launch trl/scripts/reward.py --model_name_or_path m --dataset_name org/rows\n", "train.sh", None),
    ],
)
def test_a_reward_config_of_trl_is_recognized(tmp_path: Path, text: str, name: str, dialect: str | None) -> None:
    import trl

    done = imported(tmp_path, text, name, dialect)
    assert value(done, "pref_loss") == "bradley_terry"
    assert trains_rewards(done)
    defaults = {field.name: field.default for field in fields(trl.RewardConfig)}
    assert value(done, f"{TRAINING}learning_rate") == defaults["learning_rate"] == 1e-4
    assert value(done, "sequence_length") == defaults["max_length"]
    assert value(done, "logging_steps") == defaults["logging_steps"]
    assert value(done, f"{TRAINING}gradient_checkpointing") is defaults["gradient_checkpointing"]
    assert value(done, "actor_train.data_args.truncation") is None, "RewardTrainer drops longer rows, as here"
    assert "learning_rate: 0.0001  # default of TRL" in done.text
    assert not lost(done)


@pytest.mark.parametrize(
    ("text", "name", "dialect"),
    [
        (f"{TRL}loss_type: kto\n", "theirs.yaml", None),
        (f"{TRL}desirable_weight: 1.0\n", "theirs.yaml", None),
        (f"{TRL}undesirable_weight: 1.0\n", "theirs.yaml", None),
        (TRL, "theirs.yaml", "trl-kto"),
        ("trl kto --model_name_or_path m --dataset_name org/rows\n", "train.sh", None),
        ("python scripts/kto.py --model_name_or_path m --dataset_name org/rows\n", "train.sh", None),
    ],
)
def test_a_kto_config_of_trl_is_recognized(tmp_path: Path, text: str, name: str, dialect: str | None) -> None:
    import trl

    done = imported(tmp_path, text, name, dialect)
    assert value(done, "pref_loss") == "kto"
    assert build_objective(parse_config(done.translation.values)).reads == "labels"
    defaults = {field.name: field.default for field in fields(trl.KTOConfig)}
    assert value(done, f"{TRAINING}learning_rate") == defaults["learning_rate"]
    assert value(done, "sequence_length") == defaults["max_length"]
    assert value(done, "beta") == defaults["beta"]
    assert value(done, "actor_train.data_args.truncation") == "response_end", "KTOTrainer cuts at the end"
    assert "the mean over the whole step" in done.text
    assert not lost(done)


def test_trl_keeps_the_weights_of_labels(tmp_path: Path) -> None:
    text = f"{TRL}beta: 0.3\ndesirable_weight: 1.5\nundesirable_weight: 0.5\ntrain_sampling_strategy: sequential\n"
    done = imported(tmp_path, text)
    assert [value(done, key) for key in ("beta", "desirable_weight", "undesirable_weight")] == [0.3, 1.5, 0.5]
    assert entry(done, "train_sampling_strategy").outcome == "different meaning", "KTOTrainer takes no other"
    assert not lost(done)
    done = imported(tmp_path, f"{text}loss_type: apo_zero_unpaired\n")
    assert value(done, "pref_loss") == "apo_zero_unpaired"
    assert lost(done) == {"desirable_weight", "undesirable_weight"}
    assert lost(imported(tmp_path, f"{TRL}train_sampling_strategy: sequential\n")) == {"train_sampling_strategy"}


def test_ms_swift_weighs_labels_with_kto_only(tmp_path: Path) -> None:
    text = SWIFT.replace("rm", "kto") + "desirable_weight: 1.5\n"
    assert value(imported(tmp_path, text), "desirable_weight") == 1.5
    assert lost(imported(tmp_path, f"{text}loss_type: apo_zero_unpaired\n")) == {"desirable_weight"}


def test_a_name_of_a_config_class_is_a_dialect(tmp_path: Path) -> None:
    path = tmp_path / "theirs.yaml"
    path.write_text(TRL)
    assert value(convert(path, "trl"), "pref_loss") == "sigmoid"
    with pytest.raises(UserError, match="trl-kto, trl-reward"):
        convert(path, "trl-ppo")


def test_the_weights_of_a_reward_model_keep_their_precision(tmp_path: Path) -> None:
    done = imported(tmp_path, f"{TRL}{CENTERED}dtype: bfloat16\neos_token: </s>\n")
    assert value(done, f"{MODEL}master_dtype") == "bf16"
    assert lost(done) == {"eos_token"}


def test_llama_factory_adds_an_nll_term_to_pairs_only(tmp_path: Path) -> None:
    text = "model_name_or_path: m\nstage: {}\ndataset: d\npref_ftx: 0.5\n"
    assert value(imported(tmp_path, text.format("dpo")), "rpo_alpha") == 0.5
    done = imported(tmp_path, text.format("kto"))
    assert lost(done) == {"pref_ftx"}
    assert value(done, "rpo_alpha") is None
