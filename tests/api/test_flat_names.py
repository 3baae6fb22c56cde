"""`DPOConfig(...)` in Python: flat names of TRL and of ours, and errors that say what to write."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import SchedulerType

from thresher import DPOConfig, UserError
from thresher.builders.preflight import check_files
from thresher.config import parse_config


def test_names_of_trl_that_mean_the_same_are_renamed():
    config = DPOConfig(learning_rate=1e-6, max_length=64, model_name_or_path="model", run_name="first")
    assert config.actor_train.training_args.learning_rate == 1e-6
    assert (config.sequence_length, config.pretrain, config.exp_name) == (64, "model", "first")


def test_values_of_trl_are_translated():
    config = DPOConfig(
        loss_type=["sigmoid", "sft"],
        loss_weights=[0.8, 0.2],
        report_to="none",
        bf16=False,
        lr_scheduler_type=SchedulerType.LINEAR,
        warmup_steps=0.1,
    )
    assert config.loss_weights == {"sigmoid": 0.8, "sft": 0.2}
    assert config.track_with == ["console"]
    assert config.actor_train.model_args.dtype == "fp32"
    assert config.actor_train.training_args.lr_scheduler_type == "linear"
    assert config.actor_train.training_args.warmup_ratio == 0.1


def test_adapters_are_set_by_the_names_of_trl_and_by_ours():
    trl = DPOConfig(use_peft=True, lora_r=4, lora_alpha=8, lora_target_modules=["q_proj"])
    ours = DPOConfig(lora_rank=4, lora_alpha=8, lora_target=["q_proj"])
    assert trl.actor_train.model_args == ours.actor_train.model_args


def test_the_last_part_of_our_keys_is_a_name_and_means_the_policy():
    config = DPOConfig(template="raw", num_workers=2, sync_steps=3)
    assert config.actor_train.data_args.template == "raw"
    assert (config.actor_train.num_workers, config.reference.num_workers) == (2, None)
    assert config.reference.sync_steps == 3


def test_flat_names_are_joined_with_sections():
    config = DPOConfig(learning_rate=1e-6, actor_train={"training_args": {"warmup_steps": 3}}, output_dir=Path("out"))
    training = config.actor_train.training_args
    assert (training.learning_rate, training.warmup_steps, config.output_dir) == (1e-6, 3, "out")


def test_nested_sections_are_as_before():
    values = {"beta": 0.2, "actor_train": {"training_args": {"learning_rate": 1e-6}}}
    assert DPOConfig(**values) == parse_config(values)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"eval_file": "x"}, "did you mean `validation.data_args.file_name`"),
        ({"learning_rate": "fast"}, "actor_train.training_args.learning_rate: Input should be a valid number"),
        ({"dtype": "bf16"}, "dtype: ambiguous; TRL's is the dtype of the weights"),
        ({"load_in_4bit": True}, "load_in_4bit: no equivalent"),
        ({"use_peft": True}, "use_peft=True has no effect alone; set actor_train.model_args.lora_rank"),
        ({"lora_alpha": 8}, "lora_alpha has no effect without lora_rank"),
        ({"max_length": 8, "sequence_length": 9}, "sequence_length is set twice, to 9 and to 8; keep one"),
        (
            {"learning_rate": 1e-6, "actor_train": {"training_args": {"learning_rate": 1e-5}}},
            "actor_train.training_args.learning_rate is set twice",
        ),
    ],
)
def test_a_mistake_is_a_user_error_that_says_what_to_write(settings, message):
    with pytest.raises(UserError) as error:
        DPOConfig(**settings)
    assert message in str(error.value)


def test_a_setting_without_an_equivalent_is_a_warning_if_numbers_do_not_change():
    with pytest.warns(UserWarning, match="dataloader_num_workers: no equivalent"):
        DPOConfig(dataloader_num_workers=4)


def test_flat_names_are_not_keys_of_a_file():
    with pytest.raises(UserError, match="learning_rate: unknown key; it belongs at"):
        parse_config({"learning_rate": 1e-6})


def test_a_setting_without_effect_is_rejected_when_the_run_starts():
    config = DPOConfig(eval_steps=5)  # DPOTrainer may add the data
    with pytest.raises(UserError, match=r"eval_steps has no effect without validation\.data_args"):
        check_files(config)
