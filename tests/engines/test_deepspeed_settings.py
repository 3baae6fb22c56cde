"""DeepSpeed's settings: thresher's names, a user's DeepSpeed JSON, and what contradicts it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from transformers import LlamaConfig

from tests.support.engines.parity import save_model
from tests.support.paths import ROOT
from thresher.config.roles import ModelArgs, TrainingArgs
from thresher.distributed.groups import Group
from thresher.engines.deepspeed import declaration as deepspeed
from thresher.engines.deepspeed.build import engine_config
from thresher.engines.deepspeed.check import check
from thresher.engines.deepspeed.declaration import DeepSpeedInferSettings, DeepSpeedTrainSettings
from thresher.engines.megatron import declaration as megatron
from thresher.engines.spec import ModelSpec
from thresher.errors import UserError
from thresher.models.layouts import PackedLayout
from thresher.models.loading.adapters import LoraSettings
from thresher.models.loading.trained import TrainedParts

# as trainers on transformers are configured
ZERO_3_JSON: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_allow_untested_optimizer": True,
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "auto", "params": {"warmup_min_lr": "auto", "warmup_num_steps": "auto"}},
    "steps_per_print": None,
    "wall_clock_breakdown": False,
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "none"},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}
TRAINING = TrainingArgs(per_device_train_batch_size=4, gradient_accumulation_steps=2)


def spec_of(settings: Any, path: str = "somewhere", **changes: Any) -> ModelSpec:
    values: dict[str, Any] = {
        "path": path,
        "world": Group(size=2),
        "device": torch.device("cpu"),
        "find_layout": lambda: PackedLayout(shares_prompt=True),
        "dtype": "bf16",
        "master_dtype": "fp32",
        "training": TRAINING,
        "pairs_per_step": 16,
    }
    spec = ModelSpec(settings=settings, **values | changes)
    vars(spec)["model_config"] = LlamaConfig()  # as read from the path
    return spec


def train_settings(**values: Any) -> DeepSpeedTrainSettings:
    return DeepSpeedTrainSettings.model_validate(values)


def test_a_json_of_transformers_trainers_is_accepted_and_passed_on(tmp_path):
    settings = DeepSpeedTrainSettings.model_validate(ZERO_3_JSON)
    assert settings.stage == 3
    assert settings.zero_options == {
        "overlap_comm": True,
        "contiguous_gradients": True,
        "stage3_max_live_parameters": 1e9,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
    }
    check(spec_of(settings, str(save_model(tmp_path, "llama", 0))))


def test_the_config_of_the_engine_leaves_batches_clipping_and_precision_to_thresher():
    def reduction(stage: int) -> str:
        return engine_config(train_settings(zero_stage=stage))["gradient_allreduce_op"]

    config = engine_config(train_settings(zero_stage=3, zero_optimization={"overlap_comm": True}), num_trained=1000)
    assert config["zero_optimization"] == {
        "stage": 3,
        "overlap_comm": True,
        "reduce_bucket_size": 1000,
        "memory_efficient_linear": False,
    }
    assert (config["gradient_clipping"], config["gradient_accumulation_steps"]) == (0.0, 1)
    assert not {"bf16", "fp16", "optimizer", "scheduler"} & config.keys()
    assert [reduction(stage) for stage in range(4)] == ["sum", "sum", "sum", "mean"]


@pytest.mark.parametrize(
    ("values", "stage"),
    [
        ({}, 2),
        ({"zero_stage": 0}, 0),
        ({"zero_optimization": {"stage": 1}}, 1),
        ({"zero_stage": 3, "zero_optimization": {"stage": "auto"}}, 3),
        ({"zero_stage": 3, "zero_optimization": {"stage": 3}}, 3),
    ],
)
def test_the_stage_is_read_from_either_name(values, stage):
    assert train_settings(**values).stage == stage


@pytest.mark.parametrize("value", [True, {"device": "cpu"}])
def test_offload_is_a_flag_or_a_section(value):
    assert train_settings(zero_stage=1, offload_optimizer=value).zero_options == {
        "offload_optimizer": {"device": "cpu"}
    }
    nested = train_settings(zero_optimization={"stage": 3, "offload_param": {"device": "cpu"}})
    assert nested.zero_options == {"offload_param": {"device": "cpu"}}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"zero_stage": 2, "zero_optimization": {"stage": 3}}, "keep one of these"),
        ({"zero_stage": 4}, "zero_stage"),
        ({"zero_optimization": {"stage": 5}}, "use 0, 1, 2 or 3"),
        ({"zero_optimization": {"zero_quantized_weights": True}}, "zero_quantized_weights is not supported"),
        ({"zero_optimization": {"overlap_com": True}}, "overlap_com is not supported"),
        ({"zero_stage": 0, "offload_optimizer": True}, "offload_optimizer needs zero_stage 1 or more"),
        ({"zero_stage": 2, "offload_param": True}, "offload_param needs zero_stage 3 or more"),
        ({"zero_stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/x"}}, "NVMe is not supported"),
        ({"zero_stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.3}}, "ratio is not supported"),
        ({"gradient_cliping": 1.0}, "gradient_cliping"),
        ({"wall_clock_breakdown": True}, "wall_clock_breakdown"),
        ({"zero_force_ds_cpu_optimizer": True}, "zero_force_ds_cpu_optimizer"),
    ],
)
def test_what_cannot_be_applied_is_an_error(values, message):
    with pytest.raises(ValidationError, match=message):
        train_settings(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"zero_stage": 2}, "use 3, or 0 for a full copy per worker"),
        ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}, "has no optimizer"),
    ],
)
def test_a_reference_has_nothing_that_stages_1_and_2_partition(values, message):
    with pytest.raises(ValidationError, match=message):
        DeepSpeedInferSettings.model_validate(values)


EQUAL = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1,
    "bf16": {"enabled": True},
    "fp16": {"enabled": False},
    "optimizer": {"type": "AdamW", "params": {"lr": 5e-7, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0}},
    "steps_per_print": "inf",
}


def test_values_that_equal_the_settings_of_thresher_are_accepted():
    check(spec_of(train_settings(**EQUAL)))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"train_batch_size": 32}, "train_batch_size is 32, but the number of pairs per step is 16"),
        ({"train_micro_batch_size_per_gpu": 1}, "set training_args.per_device_train_batch_size"),
        ({"gradient_accumulation_steps": 1}, "set training_args.gradient_accumulation_steps"),
        ({"gradient_clipping": 0.5}, "gradient_clipping is 0.5, but training_args.max_grad_norm is 1.0"),
        ({"bf16": {"enabled": False}}, "bf16.enabled is False, but model_args.dtype == bf16 is True"),
        ({"fp16": {"enabled": True}}, "fp16.enabled is True, but model_args.dtype == fp16 is False"),
        ({"optimizer": {"type": "Lion"}}, "optimizer.type is lion"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}}, "set training_args.learning_rate"),
        ({"optimizer": {"params": {"betas": [0.9, 0.95]}}}, "training_args.adam_beta1 and training_args.adam_beta2"),
        ({"optimizer": {"params": {"torch_adam": True}}}, "optimizer.params.torch_adam"),
        ({"scheduler": {"type": "WarmupLR"}}, "set training_args.lr_scheduler_type"),
        ({"scheduler": {"type": "auto", "params": {"warmup_num_steps": 10}}}, "scheduler.params.warmup_num_steps"),
        ({"bf16": True}, "use a section with keys"),
        ({"steps_per_print": 10}, "steps_per_print is 10"),
    ],
)
def test_values_that_contradict_thresher_name_its_setting(values, message):
    with pytest.raises(UserError) as caught:
        check(spec_of(train_settings(**values)))
    assert message in str(caught.value)
    assert str(caught.value).startswith("actor_train.strategy_args.strategy_config.")


def test_the_loss_scale_of_fp16_is_compared_in_fp16_only():
    section = {"enabled": "auto", "initial_scale_power": 32}
    check(spec_of(train_settings(fp16=section)))
    with pytest.raises(UserError, match=r"training_args\.initial_scale_power is 16"):
        check(spec_of(train_settings(fp16=section), dtype="fp16"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"training": TRAINING.model_copy(update={"torch_compile": True})}, "torch_compile"),
        ({"is_synced": True}, "reference.sync_steps"),
        ({"master_dtype": "bf16"}, "master_dtype"),
        ({"model_args": ModelArgs(moe_aux_loss_coef=0.01)}, "moe_aux_loss_coef has no effect"),
        ({"trained": TrainedParts(lora=LoraSettings(4, None, ["q_proj"], "pissa"))}, "lora_init pissa"),
    ],
)
def test_what_deepspeed_does_not_support_says_what_to_do(changes, message):
    with pytest.raises(UserError, match=message) as caught:
        check(spec_of(train_settings(zero_stage=3), **changes))
    assert "; " in str(caught.value)


def test_pissa_is_supported_where_weights_are_whole():
    lora = TrainedParts(lora=LoraSettings(4, None, ["q_proj"], "pissa"))
    check(spec_of(train_settings(zero_stage=2), trained=lora))


def test_stage_3_needs_files_that_can_be_read_in_parts(tmp_path):
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="safetensors"):
        check(spec_of(train_settings(zero_stage=3), str(tmp_path)))


@pytest.mark.parametrize(
    ("declaration", "pages"),
    [(deepspeed.TRAIN, ("get-started/install.md", "scale/engines.md")), (megatron.TRAIN, ("scale/engines.md",))],
    ids=["deepspeed", "megatron"],
)
def test_an_engine_that_is_not_installed_is_installed_as_the_pages_say(declaration, pages):
    with pytest.raises(UserError) as caught:
        replace(declaration, modules=("no_such_engine",)).check_installed("engine_train")
    command = str(caught.value).split("`")[1]
    assert str(caught.value) == (
        f"strategy_name engine_train needs no_such_engine, which is not installed; run `{command}`"
    )
    for page in pages:
        assert command in (ROOT / "docs" / page).read_text(encoding="utf-8")
