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
        ({"deepspeed": "gone.json"}, "deepspeed: gone.json does not exist; give the path of a DeepSpeed config"),
        ({"deepspeed": "zero3_gone.json"}, "deepspeed: zero3_gone.json does not exist"),
        ({"loss_type": ["sigmoid", "sft"], "loss_weights": [0.8]}, "1 weights for 2 losses"),
        ({"loss_type": len}, "name a function of your own by its file, as in pref_loss='path/to/file.py:function'"),
        ({"start_epoch": 1}, "a run resumes from its newest checkpoint by itself"),
        ({"use_ref_model": False}, "set `reference.mode`"),
        ({"model_init_kwargs": {"rope_theta": 1}}, "model_init_kwargs: no equivalent; rope_theta"),
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


def test_a_number_of_steps_takes_precedence_over_epochs_as_in_trl():
    with pytest.warns(UserWarning, match="num_train_epochs has no effect with max_steps, as in TRL"):
        config = DPOConfig(max_steps=1000, num_train_epochs=1)
    assert (config.max_steps, config.num_train_epochs) == (1000, None)
    # a file has ROLL's meaning: whichever comes first
    assert parse_config({"max_steps": 1000, "num_train_epochs": 1}).num_train_epochs == 1


def test_evaluations_by_steps_follow_the_logs_as_in_trl():
    assert DPOConfig(eval_strategy="steps").eval_steps == 10
    assert DPOConfig(eval_strategy="steps", logging_steps=3).eval_steps == 3
    assert DPOConfig(eval_strategy="steps", eval_steps=7).eval_steps == 7
    assert DPOConfig().eval_steps == 0


@pytest.mark.parametrize("name", ["eval_loss", "loss", "eval/loss"])
def test_the_metric_of_the_best_checkpoint_has_the_names_of_both_worlds(name):
    assert DPOConfig(metric_for_best_model=name).metric_for_best_model == "eval/loss"
    assert DPOConfig(metric_for_best_model="eval_rewards/margins").greater_is_better


def test_a_loss_of_trl_has_trl_s_label_smoothing():
    assert DPOConfig(loss_type="robust").label_smoothing == 0.0
    assert DPOConfig(loss_type="robust", label_smoothing=0.2).label_smoothing == 0.2
    assert DPOConfig(pref_loss="robust").label_smoothing is None
    config = DPOConfig(loss_type=["sigmoid", "robust"], label_smoothing=0.2)
    assert config.term_parameters == {"sigmoid": {"label_smoothing": 0.0}}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss_type": "bco_pair"}, "loss_type: different meaning; bco_pair"),
        ({"disable_dropout": False}, "dropout is always"),
    ],
)
def test_numbers_that_differ_from_trl_are_warnings(settings, message):
    with pytest.warns(UserWarning, match=message):
        DPOConfig(**settings)


def test_a_setting_can_be_read_under_its_name_in_trl():
    config = DPOConfig(learning_rate=1e-6, max_length=64, bf16=True, loss_type=["sigmoid", "hinge"], hub_model_id="a/b")
    assert (config.learning_rate, config.max_length, config.bf16, config.hub_model_id) == (1e-6, 64, True, "a/b")
    assert (config.loss_type, config.push_to_hub, config.max_steps) == (["sigmoid", "hinge"], False, None)
    assert "hub_token" not in DPOConfig(hub_token="hf_secret").model_dump()
    assert "hf_secret" not in repr(DPOConfig(hub_token="hf_secret"))
    with pytest.raises(AttributeError, match="no attribute 'learning_rat'"):
        _ = config.learning_rat


def test_answers_at_evaluations_are_samples():
    assert DPOConfig(generate_during_eval=True).samples.num_prompts == 16


def test_arguments_of_from_pretrained_are_settings_of_the_model():
    config = DPOConfig(model_init_kwargs={"dtype": "bfloat16", "attn_implementation": "sdpa"})
    model = config.actor_train.model_args
    assert (model.master_dtype, model.dtype, model.attn_implementation) == ("bf16", "bf16", "sdpa")


def test_a_setting_that_changes_nothing_is_a_warning():
    with pytest.warns(UserWarning, match="dataloader_num_workers: changes nothing here"):
        DPOConfig(dataloader_num_workers=4)


def test_flat_names_are_not_keys_of_a_file():
    with pytest.raises(UserError, match="learning_rate: unknown key; it belongs at"):
        parse_config({"learning_rate": 1e-6})


def test_a_setting_without_effect_is_rejected_when_the_run_starts():
    config = DPOConfig(eval_steps=5)  # DPOTrainer may add the data
    with pytest.raises(UserError, match=r"eval_steps has no effect without validation\.data_args"):
        check_files(config)
