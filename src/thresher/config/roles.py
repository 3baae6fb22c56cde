"""Sections of one role (policy or reference): model, training, data, strategy, devices."""

from __future__ import annotations

import json
import math
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    JsonValue,
    PositiveInt,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from thresher.config.aliases import resolve_aliases
from thresher.config.devices import parse_device_mapping
from thresher.config.section import Section, no_effect

NonNegative = Annotated[float, Field(ge=0)]
DType = Literal["fp32", "bf16"]


def _as_list(value: object) -> object:
    # a string is one name, never a sequence of characters
    return [value] if isinstance(value, str) else value


def _as_strings(value: object) -> object:
    # YAML reads `1` as a number and `true` as a boolean; an environment variable is a string
    if not isinstance(value, dict):
        return value
    return {key: json.dumps(each) if isinstance(each, bool | int | float) else each for key, each in value.items()}


StringList = Annotated[list[str], BeforeValidator(_as_list)]
Environment = Annotated[dict[str, str], BeforeValidator(_as_strings)]


class ModelArgs(Section):
    """Model weights, precision and LoRA adapter."""

    model_name_or_path: str | None = None
    """Model directory or GGUF file; `pretrain` when absent."""
    model_type: Literal["causal_lm"] | None = None
    """Accepted for compatibility; all models are causal language models."""
    dtype: DType = "bf16"
    """Precision of the forward and backward passes."""
    master_dtype: DType = "fp32"
    """Precision of the master weights and the optimizer state."""
    attn_implementation: str | None = None
    """sdpa, eager or flash_attention_2; sdpa when absent, if the architecture supports it."""
    pad_token: str | None = None
    """Existing token to use for padding, for tokenizers without a pad token."""
    trust_remote_code: bool = False
    """Allow Python code from the model repository to run. Enable only for models that you trust."""
    lora_rank: PositiveInt | None = None
    """Rank of the LoRA adapters; full fine-tuning when absent."""
    lora_alpha: Annotated[float, Field(gt=0)] | None = None
    """LoRA alpha; twice the rank when absent."""
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout of the adapters. All other dropout is disabled."""
    lora_target: StringList = ["all-linear"]
    """Names of the modules that get an adapter, or `all-linear`."""

    @model_validator(mode="after")
    def _validate_dtypes(self) -> ModelArgs:
        if self.dtype == "fp32" and self.master_dtype == "bf16":
            raise ValueError("dtype fp32 cannot compute from master_dtype bf16; set master_dtype to fp32")
        return self

    @model_validator(mode="after")
    def _validate_lora(self) -> ModelArgs:
        unused = self.non_default("lora_alpha", "lora_dropout", "lora_target")
        if self.lora_rank is None and unused:
            raise ValueError(no_effect(unused, "without lora_rank; set lora_rank"))
        return self


class ReferenceModelArgs(Section):
    """Model settings that may differ from the policy's; the others are shared, so the margin at step 0 is 0."""

    model_name_or_path: str | None = None
    """Model directory or GGUF file; `pretrain` when absent."""
    model_type: Literal["causal_lm"] | None = None
    """Accepted for compatibility; all models are causal language models."""
    dtype: DType | None = None
    """Precision of the forward pass; the policy's when absent."""
    master_dtype: DType | None = None
    """Precision of the loaded weights; the policy's when absent."""
    attn_implementation: str | None = None
    """sdpa, eager or flash_attention_2; the policy's when absent."""
    trust_remote_code: bool | None = None
    """Allow Python code from the model repository to run; when absent, the policy's setting if both are the same model,
    otherwise false."""


SCHEDULES = (
    "constant",
    "constant_with_warmup",
    "linear",
    "cosine",
    "cosine_with_min_lr",
    "polynomial",
    "inverse_sqrt",
)


class TrainingArgs(Section):
    """Optimizer, learning-rate schedule and micro-batches. Batch sizes are in pairs."""

    learning_rate: Annotated[float, Field(gt=0)] = 5e-7
    """Peak learning rate of AdamW."""
    per_device_train_batch_size: PositiveInt = 8
    """Pairs per data-parallel rank and accumulation step. With the padded layout, this is the micro-batch size."""
    gradient_accumulation_steps: PositiveInt = 1
    """Multiples of per_device_train_batch_size per optimizer step."""
    global_batch_size: PositiveInt | None = None
    """Pairs per optimizer step over all ranks; replaces gradient_accumulation_steps. When absent,
    per_device_train_batch_size * gradient_accumulation_steps * data-parallel ranks."""
    max_tokens_per_micro_batch: PositiveInt | None = None
    """Token budget per training micro-batch; chosen automatically when absent. Does not change the pairs per step."""
    per_device_eval_batch_size: PositiveInt | None = None
    """Pairs per rank and evaluation batch; per_device_train_batch_size when absent."""
    weight_decay: NonNegative = 0.0
    """Weight decay of AdamW for matrices; not applied to norms and biases."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """beta1 of AdamW."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """beta2 of AdamW."""
    adam_epsilon: Annotated[float, Field(gt=0)] = 1e-8
    """epsilon of AdamW."""
    max_grad_norm: NonNegative = 1.0
    """Maximum global gradient norm; 0 disables clipping."""
    lr_scheduler_type: Literal[SCHEDULES] = "cosine"  # type: ignore[valid-type]
    """Learning-rate schedule over the whole run."""
    warmup_steps: Annotated[int, Field(ge=0)] | None = None
    """Number of warm-up steps; set this or warmup_ratio."""
    warmup_ratio: Annotated[float, Field(ge=0, le=1)] | None = None
    """Fraction of all steps used for warm-up, rounded up; set this or warmup_steps."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Minimum of `cosine_with_min_lr`, as a fraction of learning_rate."""
    lr_power: Annotated[float, Field(gt=0)] = 1.0
    """Exponent of `polynomial`."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""
    torch_compile: bool = False
    """Compile the layers with torch.compile: faster steps in bf16, about a minute of compilation before the first."""

    @model_validator(mode="after")
    def _validate_schedule(self) -> TrainingArgs:
        if self.global_batch_size is not None and self.non_default("gradient_accumulation_steps"):
            raise ValueError("gradient_accumulation_steps has no effect with global_batch_size; keep one")
        if self.warmup_steps is not None and self.warmup_ratio is not None:
            raise ValueError("warmup_steps and warmup_ratio are both set; keep one")
        if self.non_default("min_lr_ratio") and self.lr_scheduler_type != "cosine_with_min_lr":
            raise ValueError("min_lr_ratio has no effect without lr_scheduler_type=cosine_with_min_lr")
        if self.non_default("lr_power") and self.lr_scheduler_type != "polynomial":
            raise ValueError("lr_power has no effect without lr_scheduler_type=polynomial")
        if (self.warmup_steps or self.warmup_ratio) and self.lr_scheduler_type == "constant":
            raise ValueError("lr_scheduler_type constant has no warm-up; use constant_with_warmup")
        return self

    def pairs_per_step(self, num_ranks: int) -> int:
        """Pairs per optimizer step over all data-parallel ranks."""
        each = self.per_device_train_batch_size * self.gradient_accumulation_steps
        return self.global_batch_size or each * num_ranks

    @property
    def pairs_per_eval_batch(self) -> int:
        return self.per_device_eval_batch_size or self.per_device_train_batch_size

    def num_warmup_steps(self, num_steps: int) -> int:
        if self.warmup_ratio is not None:
            return math.ceil(self.warmup_ratio * num_steps)  # as transformers does: a warm-up never rounds to nothing
        return self.warmup_steps or 0


class DataArgs(Section):
    """Source files and tokenization of the pairs."""

    file_name: StringList = []
    """File, directory, glob or URL, or a list of them."""
    dataset_dir: str | None = None
    """Directory of relative file names that do not exist as given."""
    store: str | None = None
    """Store written by `thresher prepare`; replaces file_name."""
    template: str = "auto"
    """`auto`: chat template of the tokenizer; `raw`: plain text; a family: chatml, gemma, llama3, mistral, phi4,
    qwen2_5, qwen3; otherwise the path of a Jinja file."""
    template_arguments: dict[str, JsonValue] = {}
    """Variables of the chat template, such as `enable_thinking: false`."""
    truncation: Literal["drop", "prompt_start", "response_end"] = "drop"
    """Handling of pairs longer than sequence_length: drop the pair, or cut the start of the prompt or the end of the
    responses."""
    on_bad_row: Literal["fail", "skip", "quarantine"] = "fail"
    """Handling of unreadable rows: stop, skip them, or write them to a separate file."""
    special_tokens_in_text: Literal["keep_as_text", "reject"] = "keep_as_text"
    """Handling of rows whose text contains a special token such as `<|im_end|>`: tokenize it as plain text, or treat
    the row as bad (see on_bad_row)."""
    preprocessing_num_workers: PositiveInt = 1
    """Number of tokenizing processes; does not change the result."""

    @model_validator(mode="after")
    def _validate_source(self) -> DataArgs:
        if self.store and self.file_name:
            raise ValueError("file_name and store are both set; keep one")
        for_files = (
            "dataset_dir",
            "template",
            "template_arguments",
            "truncation",
            "on_bad_row",
            "special_tokens_in_text",
            "preprocessing_num_workers",
        )
        if self.store and (unused := self.non_default(*for_files)):
            raise ValueError(no_effect(unused, "on a store, which is already prepared; remove {it}"))
        return self


STRATEGIES = (
    "fsdp2_train",
    "fsdp2_infer",
    "deepspeed_train",
    "deepspeed_infer",
    "megatron_train",
    "megatron_infer",
    "hf_infer",
)


class Axes(Section):
    """`strategy_config` of the fsdp2 strategies. The workers left over by these axes shard the model (FSDP2)."""

    tp_size: PositiveInt = 1
    """Tensor-parallel size: workers that split each weight matrix."""
    pp_size: PositiveInt = 1
    """Pipeline-parallel size: number of stages, each with a part of the layers."""
    virtual_pp_size: PositiveInt = 1
    """Virtual stages per pipeline stage; more than one selects the interleaved schedule, which shrinks the pipeline
    bubble."""
    cp_size: PositiveInt = 1
    """Context-parallel size: workers that split each packed row, for long sequences."""
    dp_replicate: PositiveInt = 1
    """Number of model replicas (HSDP), each sharded over its workers. Equal to the number of workers: no sharding."""
    cpu_offload: bool = False
    """Keep shards of weights, gradients and optimizer state in host memory between uses."""

    @property
    def workers_per_data_rank(self) -> int:
        return self.tp_size * self.pp_size * self.cp_size

    @model_validator(mode="after")
    def _validate_virtual_stages(self) -> Axes:
        if self.virtual_pp_size > 1 and self.pp_size == 1:
            raise ValueError("virtual_pp_size has no effect without pp_size; set pp_size")
        return self


class StrategyArgs(Section):
    """Training or inference engine of a role."""

    strategy_name: Literal[STRATEGIES] | None = None  # type: ignore[valid-type]
    """Engine; when absent, fsdp2_train for the policy. A reference without engine, num_workers and device_mapping runs
    in the policy's workers on their axes if it is the same model; otherwise hf_infer. The deepspeed and megatron names
    are reserved."""
    strategy_config: dict[str, JsonValue] = {}
    """Settings of the engine. For fsdp2: tp_size, pp_size, virtual_pp_size, cp_size, dp_replicate and cpu_offload, see
    below."""

    @field_validator("strategy_config", mode="before")
    @classmethod
    def _resolve_axis_aliases(cls, value: Any, info: ValidationInfo) -> Any:
        is_native = isinstance(value, dict) and _is_native(info.data.get("strategy_name"))
        return resolve_aliases(Axes.__name__, value) if is_native else value

    @model_validator(mode="after")
    def _validate_axes(self) -> StrategyArgs:
        if not _is_native(self.strategy_name):
            return self
        if unknown := sorted(self.strategy_config.keys() - Axes.model_fields.keys()):
            raise ValueError(f"strategy_config has no key {', '.join(unknown)}; known: {', '.join(Axes.model_fields)}")
        try:
            Axes.model_validate(self.strategy_config)
        except ValidationError as error:
            problem = error.errors()[0]
            key = ".".join(map(str, ("strategy_config", *problem["loc"])))
            raise ValueError(f"{key}: {problem['msg'].removeprefix('Value error, ')}") from None
        return self

    @property
    def axes(self) -> Axes:
        """Parallel axes of the native engine; all 1 for other engines."""
        return Axes.model_validate(self.strategy_config) if _is_native(self.strategy_name) else Axes()


def _is_native(strategy_name: str | None) -> bool:
    return strategy_name is None or strategy_name.startswith(("fsdp2", "hf"))


class RoleConfig(Section):
    """Settings common to policy and reference."""

    strategy_args: StrategyArgs = StrategyArgs()
    device_mapping: list[int] | None = None
    """Global device ids, one worker per device: a list, or text like `list(range(0,8))`. Roles may share devices."""
    system_envs: Environment = {}
    """Environment variables of this role's workers, in addition to those of the run."""
    num_workers: PositiveInt | None = None
    """Number of CPU workers; 1 when absent. Cannot be combined with device_mapping, which has one worker per device."""

    @model_validator(mode="after")
    def _validate_devices(self) -> RoleConfig:
        if self.device_mapping and self.num_workers is not None:
            raise ValueError("num_workers has no effect with device_mapping, which has one worker per device; keep one")
        return self

    @property
    def num_processes(self) -> int:
        return len(self.device_mapping or ()) or self.num_workers or 1

    @property
    def num_data_ranks(self) -> int:
        """Number of data-parallel ranks; workers along tp, pp and cp form one rank."""
        return max(1, self.num_processes // self.strategy_args.axes.workers_per_data_rank)

    @field_validator("device_mapping", mode="before")
    @classmethod
    def _parse_devices(cls, value: Any) -> list[int] | None:
        return parse_device_mapping(value)


class PolicyConfig(RoleConfig):
    """`actor_train`: the policy."""

    model_args: ModelArgs = ModelArgs()
    training_args: TrainingArgs = TrainingArgs()
    data_args: DataArgs = DataArgs()


class ReferenceConfig(RoleConfig):
    """`reference`: the frozen model."""

    model_args: ReferenceModelArgs = ReferenceModelArgs()
    mode: Literal["auto", "precompute", "concurrent", "adapter", "none"] = "auto"
    """How reference log-probabilities are computed. precompute: before training, and cached; concurrent: during
    training; adapter: by the policy without its LoRA adapter; none: for losses without a reference, and for
    reference-free DPO, whose log ratios are the policy's logps. auto: none if the loss needs no reference, adapter with
    LoRA on the same model, concurrent with sync_steps, otherwise precompute."""
    infer_batch_size: PositiveInt = 8
    """Pairs per forward pass in mode precompute."""
    cache_dir: str | None = None
    """Directory of precomputed log-probabilities; the run's cache_dir when absent."""
    prefetch_steps: PositiveInt = 2
    """Maximum number of steps that workers of a concurrent reference run ahead of the policy."""
    sync_steps: PositiveInt | None = None
    """TR-DPO: steps between updates of the reference towards the policy; never when absent."""
    sync_alpha: Annotated[float, Field(gt=0, le=1)] = 0.6
    """TR-DPO: weight of the policy in the updated reference."""

    @model_validator(mode="after")
    def _validate_sync(self) -> ReferenceConfig:
        if self.sync_steps is None and self.non_default("sync_alpha"):
            raise ValueError("sync_alpha has no effect without sync_steps; set sync_steps")
        if self.sync_steps is not None and self.mode not in ("auto", "concurrent"):
            raise ValueError(
                f"sync_steps needs a reference in mode concurrent, not {self.mode}; set mode to concurrent"
            )
        return self


class ValidationConfig(Section):
    """`validation`: the validation pairs."""

    data_args: DataArgs = DataArgs()
