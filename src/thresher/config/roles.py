"""The blocks of one role (policy or reference): model, training, data, strategy, devices."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveInt, ValidationError, field_validator, model_validator

from thresher.config.devices import parse_device_mapping
from thresher.config.section import Section

NonNegative = Annotated[float, Field(ge=0)]
DType = Literal["fp32", "bf16"]


def _as_list(value: object) -> object:
    # a bare string is one name, never a sequence of characters
    return [value] if isinstance(value, str) else value


StringList = Annotated[list[str], BeforeValidator(_as_list)]


class ModelArgs(Section):
    """Which weights, in which precision, with which adapter."""

    model_name_or_path: str | None = None
    """Directory or GGUF file; `pretrain` when absent."""
    model_type: Literal["causal_lm"] | None = None
    """Only causal language models are trained; kept for configs that name it."""
    dtype: DType = "bf16"
    """Precision of forward and backward."""
    master_dtype: DType = "fp32"
    """Precision of the stored weights and the optimizer's state."""
    attn_implementation: str | None = None
    """sdpa, eager, flash_attention_2; when absent, sdpa where the family has it."""
    pad_token: str | None = None
    """An existing token to pad with, for tokenizers that have none."""
    trust_remote_code: bool = False
    """Run Python code that a model repository brings. Off unless you trust it."""
    lora_rank: PositiveInt | None = None
    """Rank of LoRA adapters; absent trains all weights."""
    lora_alpha: Annotated[float, Field(gt=0)] | None = None
    """LoRA scale; twice the rank when absent."""
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    lora_target: StringList = ["all-linear"]
    """Modules that get an adapter: names, or `all-linear`."""

    @model_validator(mode="after")
    def _precisions_fit(self) -> ModelArgs:
        if self.dtype == "fp32" and self.master_dtype == "bf16":
            raise ValueError("dtype fp32 cannot compute from master_dtype bf16; set master_dtype to fp32")
        return self

    @model_validator(mode="after")
    def _lora_settings_need_a_rank(self) -> ModelArgs:
        turned = self.turned("lora_alpha", "lora_dropout", "lora_target")
        if self.lora_rank is None and turned:
            raise ValueError(f"{', '.join(turned)} has no effect without lora_rank; set lora_rank")
        return self


class ReferenceModelArgs(Section):
    """What the reference may have of its own; the rest is as for the policy, so that step 0 is at margin 0."""

    model_name_or_path: str | None = None
    """Directory or GGUF file; `pretrain` when absent."""
    model_type: Literal["causal_lm"] | None = None
    dtype: DType | None = None
    """Precision of the forward; the policy's when absent."""
    master_dtype: DType | None = None
    """Precision of the stored weights; the policy's when absent."""
    attn_implementation: str | None = None
    """The policy's when absent."""
    trust_remote_code: bool | None = None
    """The policy's when absent and the model is the same; otherwise off."""


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
    """Optimizer, schedule and micro-batches. Batch sizes are in pairs."""

    learning_rate: Annotated[float, Field(gt=0)] = 5e-7
    per_device_train_batch_size: PositiveInt = 8
    """Pairs of one data-parallel rank in a step, before accumulation. The micro-batch of a padded layout."""
    gradient_accumulation_steps: PositiveInt = 1
    global_batch_size: PositiveInt | None = None
    """Pairs of a step over all ranks, whatever their number; instead of gradient_accumulation_steps. When absent,
    per_device_train_batch_size * gradient_accumulation_steps * ranks."""
    max_tokens_per_micro_batch: PositiveInt | None = None
    """Most tokens of a training micro-batch; chosen when absent. Does not change the pairs of a step."""
    per_device_eval_batch_size: PositiveInt | None = None
    """Pairs in one evaluation batch; the training size when absent."""
    weight_decay: NonNegative = 0.0
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    adam_epsilon: Annotated[float, Field(gt=0)] = 1e-8
    max_grad_norm: NonNegative = 1.0
    """Clip the global gradient norm to this; 0 leaves it alone."""
    lr_scheduler_type: Literal[SCHEDULES] = "cosine"  # type: ignore[valid-type]
    warmup_steps: Annotated[int, Field(ge=0)] | None = None
    warmup_ratio: Annotated[float, Field(ge=0, le=1)] | None = None
    """Share of all steps that warm up; give this or warmup_steps."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Floor of `cosine_with_min_lr`, as a share of learning_rate."""
    lr_power: Annotated[float, Field(gt=0)] = 1.0
    """Exponent of `polynomial`."""
    gradient_checkpointing: bool = False
    torch_compile: bool = False
    """Compile the layers with torch.compile: faster steps in bf16, and a minute or so before the first."""

    @model_validator(mode="after")
    def _settings_have_an_effect(self) -> TrainingArgs:
        if self.global_batch_size is not None and self.turned("gradient_accumulation_steps"):
            raise ValueError("gradient_accumulation_steps has no effect with global_batch_size; keep one")
        if self.warmup_steps is not None and self.warmup_ratio is not None:
            raise ValueError("warmup_steps and warmup_ratio are both set; keep one")
        if self.turned("min_lr_ratio") and self.lr_scheduler_type != "cosine_with_min_lr":
            raise ValueError("min_lr_ratio only acts with lr_scheduler_type=cosine_with_min_lr")
        if self.turned("lr_power") and self.lr_scheduler_type != "polynomial":
            raise ValueError("lr_power only acts with lr_scheduler_type=polynomial")
        if (self.warmup_steps or self.warmup_ratio) and self.lr_scheduler_type == "constant":
            raise ValueError("a constant schedule has no warm-up; use lr_scheduler_type=constant_with_warmup")
        return self

    def pairs_per_step(self, num_ranks: int) -> int:
        """Pairs of a step over all data-parallel ranks."""
        each = self.per_device_train_batch_size * self.gradient_accumulation_steps
        return self.global_batch_size or each * num_ranks

    @property
    def pairs_per_eval_batch(self) -> int:
        return self.per_device_eval_batch_size or self.per_device_train_batch_size

    def num_warmup_steps(self, num_steps: int) -> int:
        if self.warmup_ratio is not None:
            return round(self.warmup_ratio * num_steps)
        return self.warmup_steps or 0


class DataArgs(Section):
    """Where pairs come from and how rows become tokens."""

    file_name: StringList = []
    """One file, directory, glob or URL, or a list of them."""
    store: str | None = None
    """A store made by `thresher prepare`; instead of file_name."""
    template: str = "auto"
    """`auto`: the tokenizer's chat template; `raw`: plain text; or the path of a Jinja file."""
    truncation: Literal["drop", "prompt_start", "response_end"] = "drop"
    on_bad_row: Literal["fail", "skip", "quarantine"] = "fail"
    special_tokens_in_text: Literal["text", "refuse"] = "text"
    """What a row's text that spells a control token, such as `<|im_end|>`, is: plain text, or a bad row."""
    preprocessing_num_workers: PositiveInt = 1

    @model_validator(mode="after")
    def _one_source(self) -> DataArgs:
        if self.store and self.file_name:
            raise ValueError("file_name and store are both set; keep one")
        of_files = ("template", "truncation", "on_bad_row", "special_tokens_in_text", "preprocessing_num_workers")
        if self.store and (turned := self.turned(*of_files)):
            raise ValueError(f"{', '.join(turned)} has no effect on a store, which is prepared already; remove it")
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
    """How a model is split over the workers of its role. What these leave of the workers shards it (FSDP2)."""

    tp_size: PositiveInt = 1
    """Workers that split every matrix."""
    pp_size: PositiveInt = 1
    """Stages of a pipeline: workers that have some of the layers each."""
    pp_chunks: PositiveInt = 1
    """Runs of layers that one stage has; more than one interleaves them, for smaller gaps in the pipeline."""
    cp_size: PositiveInt = 1
    """Workers that split every packed row, for long sequences."""
    dp_replicate: PositiveInt = 1
    """Whole copies; the workers of one copy shard it. As many as workers: nothing is sharded."""
    cpu_offload: bool = False
    """Keep shards of weights, gradients and optimizer in host memory between their uses."""

    @property
    def workers_per_data_rank(self) -> int:
        return self.tp_size * self.pp_size * self.cp_size

    @model_validator(mode="after")
    def _chunks_need_a_pipeline(self) -> Axes:
        if self.pp_chunks > 1 and self.pp_size == 1:
            raise ValueError("pp_chunks has no effect without pp_size; set pp_size")
        return self


class StrategyArgs(Section):
    """Which engine runs the role."""

    strategy_name: Literal[STRATEGIES] | None = None  # type: ignore[valid-type]
    """fsdp2_train for the policy and hf_infer for the reference when absent."""
    strategy_config: dict[str, int | bool] = {}
    """Settings of the engine. For fsdp2: tp_size, pp_size, pp_chunks, cp_size, dp_replicate (whole numbers, 1 when
    absent) and cpu_offload; what they leave of the workers shards the model. See
    docs/concepts/parallelism-and-layouts.md."""

    @model_validator(mode="after")
    def _axes_are_known(self) -> StrategyArgs:
        if not self._is_native:
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
        """How the native engine splits a model; other engines have settings of their own."""
        return Axes.model_validate(self.strategy_config) if self._is_native else Axes()

    @property
    def _is_native(self) -> bool:
        name: str | None = self.strategy_name
        return name is None or name.startswith(("fsdp2", "hf"))


class RoleConfig(Section):
    """What policy and reference have in common."""

    strategy_args: StrategyArgs = StrategyArgs()
    device_mapping: list[int] | None = None
    num_workers: PositiveInt | None = None
    """Workers of a role that runs on CPUs; one when absent. With device_mapping there is one a device."""

    @model_validator(mode="after")
    def _devices_or_workers(self) -> RoleConfig:
        if self.device_mapping and self.num_workers is not None:
            raise ValueError("num_workers has no effect with device_mapping, which has one worker a device; keep one")
        return self

    @property
    def num_processes(self) -> int:
        return len(self.device_mapping or ()) or self.num_workers or 1

    @property
    def num_data_ranks(self) -> int:
        """Shares of a step: workers that split a model along other axes have one together."""
        return max(1, self.num_processes // self.strategy_args.axes.workers_per_data_rank)

    @field_validator("device_mapping", mode="before")
    @classmethod
    def _parse_devices(cls, value: Any) -> list[int] | None:
        return parse_device_mapping(value)


class PolicyConfig(RoleConfig):
    """`actor_train`: the model in training."""

    model_args: ModelArgs = ModelArgs()
    training_args: TrainingArgs = TrainingArgs()
    data_args: DataArgs = DataArgs()


class ReferenceConfig(RoleConfig):
    """`reference`: the frozen model."""

    model_args: ReferenceModelArgs = ReferenceModelArgs()
    mode: Literal["auto", "precompute", "concurrent", "adapter", "none"] = "auto"
    infer_batch_size: PositiveInt = 8
    """Pairs scored at once when the reference is precomputed."""
    cache_dir: str | None = None
    """Where precomputed logps are kept; `$THRESHER_CACHE_DIR`, or the user's cache directory, when absent."""
    steps_ahead: PositiveInt = 2
    """Steps that workers of a concurrent reference are ahead of the policy at most."""
    sync_steps: PositiveInt | None = None
    """TR-DPO: pull the reference towards the policy every so many steps."""
    sync_alpha: Annotated[float, Field(gt=0, le=1)] = 0.6
    """TR-DPO: share of the policy in the pulled reference."""

    @model_validator(mode="after")
    def _sync_settings_agree(self) -> ReferenceConfig:
        if self.sync_steps is None and self.turned("sync_alpha"):
            raise ValueError("sync_alpha has no effect without sync_steps; set sync_steps")
        if self.sync_steps is not None and self.mode not in ("auto", "concurrent"):
            raise ValueError(f"a reference that is synced must be alive: use mode=concurrent, not {self.mode}")
        return self


class ValidationConfig(Section):
    """`validation`: the held-out pairs."""

    data_args: DataArgs = DataArgs()
