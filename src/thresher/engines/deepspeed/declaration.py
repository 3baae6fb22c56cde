"""DeepSpeed under the names deepspeed_train and deepspeed_infer, and its settings.

The section takes thresher's names, and a DeepSpeed JSON as it is: keys that DeepSpeed shares with thresher must be
"auto" or agree with thresher's setting (see check.py), options of ZeRO that change neither the numbers nor the
partitioning are passed on, and every other key is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import JsonValue, model_validator

from thresher.config.strategies import StrategyDeclaration, StrategySettings

_PACKAGE = "thresher.engines.deepspeed"
AUTO = "auto"
# of zero_optimization: buckets, prefetching and what stays gathered
_PASSED_ON = {
    *("allgather_bucket_size", "allgather_partitions", "contiguous_gradients", "ignore_unused_parameters"),
    *("overlap_comm", "reduce_bucket_size", "reduce_scatter", "sub_group_size"),
    *("stage3_allgather_sequential", "stage3_max_live_parameters", "stage3_max_reuse_distance"),
    *("stage3_model_persistence_threshold", "stage3_module_granularity_threshold"),
    *("stage3_param_persistence_threshold", "stage3_prefetch_bucket_size", "stage3_use_all_reduce_for_fetch_params"),
    "use_multi_rank_bucket_allreduce",
}
# of files that DeepSpeed would write; thresher's checkpoints and exports have all weights with either value
_OF_DEEPSPEED_FILES = {
    *("elastic_checkpoint", "load_from_fp32_weights", "stage3_gather_16bit_weights_on_model_save"),
    "stage3_gather_fp16_weights_on_model_save",
}


class ZeroSettings(StrategySettings):
    """What policy and reference have in common."""

    default_stage: ClassVar[int]

    zero_stage: Literal[0, 1, 2, 3] | None = None
    """What workers partition: 0 nothing, 1 the optimizer state, 2 gradients too, 3 weights too. When absent, 2 for the
    policy and 3 for the reference, which supports 0 and 3 only."""
    offload_optimizer: bool | dict[str, JsonValue] = False
    """Keep and update the optimizer state in host memory, with zero_stage 1 to 3; or DeepSpeed's section, such as
    `{device: cpu, pin_memory: true}`."""
    offload_param: bool | dict[str, JsonValue] = False
    """Keep weight partitions in host memory between uses, with zero_stage 3; or DeepSpeed's section."""
    zero_optimization: dict[str, JsonValue] = {}
    """DeepSpeed's own key, as are all below: `stage`, `offload_optimizer`, `offload_param`, and communication options
    such as `overlap_comm`. "auto" means the default."""
    train_batch_size: JsonValue = AUTO
    """"auto", or the pairs per step."""
    train_micro_batch_size_per_gpu: JsonValue = AUTO
    """"auto", or training_args.per_device_train_batch_size."""
    gradient_accumulation_steps: JsonValue = AUTO
    """"auto", or training_args.gradient_accumulation_steps."""
    gradient_clipping: JsonValue = AUTO
    """"auto", or training_args.max_grad_norm."""
    bf16: JsonValue = AUTO
    """"auto", or a section whose `enabled` agrees with model_args.dtype."""
    fp16: JsonValue = AUTO
    """"auto", or a section that agrees with model_args.dtype and training_args."""
    optimizer: JsonValue = AUTO
    """"auto", or a section of AdamW whose `params` are "auto" or agree with training_args."""
    scheduler: JsonValue = AUTO
    """"auto", or a section whose `type` and `params` are "auto"."""
    zero_allow_untested_optimizer: Literal[True, "auto"] = "auto"
    """Always true: the optimizer is torch's AdamW."""
    zero_force_ds_cpu_optimizer: Literal[False, "auto"] = "auto"
    """Always false: torch's AdamW runs in host memory too."""
    steps_per_print: JsonValue = AUTO
    """"auto" or `inf`: thresher logs the progress."""
    wall_clock_breakdown: Literal[False, "auto"] = "auto"
    """Always false: thresher logs the times."""

    @property
    def stage(self) -> int:
        stage = self.zero_optimization.get("stage", AUTO)
        if self.zero_stage is not None:
            return self.zero_stage
        return int(stage) if isinstance(stage, int) else self.default_stage

    @property
    def zero_options(self) -> dict[str, Any]:
        """DeepSpeed's section of ZeRO without the stage, as the user wants it."""
        given = {key: value for key, value in self.zero_optimization.items() if value != AUTO}
        options: dict[str, Any] = {key: value for key, value in given.items() if key in _PASSED_ON}
        for name in ("offload_optimizer", "offload_param"):
            if (value := self._offload(name)) is not None:
                options[name] = value if isinstance(value, dict) else {"device": "cpu"}
        return options

    def is_replicated(self, num_workers: int) -> bool:  # noqa: ARG002
        return self.stage == 0

    def _offload(self, name: str) -> object:
        """The setting of an offload, under either key; None without one."""
        values = (getattr(self, name), self.zero_optimization.get(name, False))
        given = [value for value in values if _is_set(value)]
        if len(given) == 2 and given[0] != given[1]:
            raise ValueError(f"{name} and zero_optimization.{name} are the same setting; keep one")
        return given[0] if given else None

    @model_validator(mode="after")
    def _validate_zero(self) -> ZeroSettings:
        zero = self.zero_optimization
        known = {"stage", "offload_optimizer", "offload_param", *_PASSED_ON, *_OF_DEEPSPEED_FILES}
        if unknown := sorted(zero.keys() - known):
            raise ValueError(
                f"zero_optimization.{unknown[0]} is not supported, because it changes the numbers or how tensors are "
                "partitioned, or DeepSpeed has no such key; remove it"
            )
        stage = zero.get("stage", AUTO)
        if stage != AUTO and stage not in (0, 1, 2, 3):
            raise ValueError(f"zero_optimization.stage is {stage}; use 0, 1, 2 or 3")
        if self.zero_stage is not None and stage not in (AUTO, self.zero_stage):
            raise ValueError(
                f"zero_stage is {self.zero_stage}, but zero_optimization.stage is {stage}; keep one of these"
            )
        for name in ("offload_optimizer", "offload_param"):
            _validate_offload(name, self._offload(name), self.stage)
        return self


def _is_set(value: object) -> bool:
    if isinstance(value, Mapping):
        return value.get("device", "none") not in (AUTO, "none")
    return value not in (False, None, AUTO)


def _validate_offload(name: str, value: object, stage: int) -> None:
    if value is None:
        return
    if isinstance(value, Mapping):
        if value.get("device") not in ("cpu", "none"):
            raise ValueError(f"{name}.device is {value.get('device')}; use cpu, because NVMe is not supported")
        if unknown := sorted(value.keys() - {"device", "pin_memory"}):
            raise ValueError(f"{name}.{unknown[0]} is not supported; use device and pin_memory")
    elif value is not True:
        raise ValueError(f"{name} is {value!r}; use true, false, or a section such as {{device: cpu}}")
    lowest = 3 if name == "offload_param" else 1
    if stage < lowest:
        raise ValueError(f"{name} needs zero_stage {lowest} or more, and it is {stage}; remove one of them")


class DeepSpeedTrainSettings(ZeroSettings):
    """`strategy_config` of deepspeed_train: a ZeRO stage and its options. All workers are data-parallel ranks."""

    default_stage = 2


class DeepSpeedInferSettings(ZeroSettings):
    """`strategy_config` of deepspeed_infer: zero_stage 3, or 0 for a full copy per worker."""

    default_stage = 3

    @model_validator(mode="after")
    def _validate_stage(self) -> DeepSpeedInferSettings:
        if self.stage not in (0, 3):
            raise ValueError(
                f"zero_stage is {self.stage}, which partitions gradients or optimizer state, and a reference has none; "
                "use 3, or 0 for a full copy per worker"
            )
        if self._offload("offload_optimizer") is not None:
            raise ValueError("offload_optimizer has no effect on a reference, which has no optimizer; remove it")
        return self


TRAIN = StrategyDeclaration(
    DeepSpeedTrainSettings,
    build_train=f"{_PACKAGE}.build:build_train",
    build_infer=f"{_PACKAGE}.build:build_infer",
    check=f"{_PACKAGE}.check:check",
    # without the kernels that DeepSpeed would compile, which no setting here uses, and against the installed torch
    install="DS_BUILD_OPS=0 pip install --no-build-isolation 'thresher[deepspeed]'",
    modules=("deepspeed",),
)
INFER = replace(TRAIN, settings=DeepSpeedInferSettings, build_train=None)
