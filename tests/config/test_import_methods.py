"""How `thresher import` handles reward models and KTO, which are not training on pairs with a reference."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.imported import FILES, entry, imported, lost, value
from thresher.builders.objective import build_objective
from thresher.config import parse_config
from thresher.importers.convert import Conversion

FACTORY = "stage: rm\nmodel_name_or_path: m\ndataset: my_pairs\nfinetuning_type: full\n"
AXOLOTL = "base_model: m\nreward_model: true\ndatasets: [{path: org/pairs, type: bradley_terry.chat_template}]\n"
SWIFT = "rlhf_type: rm\nmodel: m\ndataset: org/pairs\ntuner_type: full\n"
NEMO = "policy: {model_name: m, reward_model_cfg: {enabled: true, reward_model_type: bradley_terry}}\nrm: {seed: 7}\n"
CENTERED = "center_rewards_coefficient: 0.01\n"
REWARDS = {
    "llama-factory": FACTORY,
    "axolotl": AXOLOTL,
    "ms-swift": SWIFT,
    "nemo-rl": NEMO,
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


@pytest.mark.parametrize("trainer", ["axolotl", "ms-swift"])
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
        ("axolotl", "adapter: lora\nlora_modules_to_save: [score]\n"),
        ("ms-swift", "tuner_type: lora\nmodules_to_save: [score]\n"),
    ],
)
def test_lora_trains_the_head_too(tmp_path: Path, trainer: str, text: str) -> None:
    config = REWARDS[trainer].replace("tuner_type: full\n", "") + text
    assert not lost(imported(tmp_path, config))
    assert lost(imported(tmp_path, config.replace("[score]", "[score, embed_tokens]"))) != set()


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


def test_ms_swift_weighs_labels_with_kto_only(tmp_path: Path) -> None:
    text = SWIFT.replace("rm", "kto") + "desirable_weight: 1.5\n"
    assert value(imported(tmp_path, text), "desirable_weight") == 1.5
    assert lost(imported(tmp_path, f"{text}loss_type: apo_zero_unpaired\n")) == {"desirable_weight"}
