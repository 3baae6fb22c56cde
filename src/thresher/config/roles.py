"""Sections of one role (policy or reference): model, training, data, strategy, devices."""

from __future__ import annotations

import ast
import json
import math
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, JsonValue, PositiveInt, model_validator

from thresher.config.data import TrainingDataArgs
from thresher.config.section import Section, also, no_effect
from thresher.config.strategies import DEFAULT_INFER, DEFAULT_TRAIN, StrategyArgs, StrategyDeclaration, find_strategy

NonNegative = Annotated[float, Field(ge=0)]
DType = Literal["fp32", "bf16", "fp16"]
_DEVICES = "write it like `list(range(0,8))` or `[0, 1, 2, 3]`"
_MOST_DEVICES = 1_000_000
# settings that an adapter on disk has too
OF_NEW_ADAPTERS = (
    *("lora_init", "use_rslora", "use_dora", "lora_rank_pattern", "lora_alpha_pattern", "modules_to_save"),
    "lora_exclude",
)


def _split_names(value: object) -> object:
    return [name.strip() for name in value.split(",") if name.strip()] if isinstance(value, str) else value


def _as_targets(value: object) -> object:
    names = _split_names(value)
    return ["all-linear" if name == "all" else name for name in names] if isinstance(names, list) else names


def _as_strings(value: object) -> object:
    # YAML reads `1` as a number and `true` as a boolean; an environment variable is a string
    if not isinstance(value, dict):
        return value
    return {key: json.dumps(each) if isinstance(each, bool | int | float) else each for key, each in value.items()}


Names = Annotated[list[str], BeforeValidator(_split_names)]
LoraTargets = Annotated[list[str], BeforeValidator(_as_targets)]
Environment = Annotated[dict[str, str], BeforeValidator(_as_strings)]
# auto is stored as no value, as in checkpoints that are older than the word
TokenBudget = Annotated[PositiveInt | None, BeforeValidator(lambda value: None if value == "auto" else value)]


def at_revision(name: str | None, revision: str | None) -> str | None:
    """Return the name of a model with its revision, as every reader of models understands it."""
    return name if name is None or revision is None else f"{name}@{revision}"


class QuantizationArgs(Section):
    """Frozen matrices in fewer bits, below trained adapters."""

    bits: Literal[4, 8] = 4
    """Bits per element of the frozen matrices of the layers (QLoRA), of a separate reference too. Needs an adapter,
    fsdp2_train and the extra `quantization`."""
    type: Literal["nf4", "fp4"] = "nf4"
    """The 16 values that 4 bits stand for: nf4 (2305.14314) or fp4."""
    double: bool = True
    """Quantize the constants of 4 bits too: 4.13 bits per element instead of 4.5."""

    @model_validator(mode="after")
    def _validate_bits(self) -> QuantizationArgs:
        if self.bits == 8 and (unused := self.non_default("type", "double")):
            raise ValueError(no_effect(unused, "with bits 8; remove {it}"))
        return self


class ModelArgs(Section):
    """Model weights, precision and LoRA adapter."""

    model_name_or_path: str | None = None
    """The policy's model; `pretrain` when absent."""
    revision: str | None = None
    """Branch, tag or commit of a model on the Hub; the default branch when absent."""
    tokenizer_name_or_path: str | None = None
    """Directory or Hub name of the tokenizer, which `thresher export` writes too; the model's when absent."""
    model_type: Literal["causal_lm"] | None = None
    """Accepted for compatibility; all models are causal language models."""
    dtype: DType = "bf16"
    """Precision of forward and backward; fp16, for GPUs without bf16, scales the loss dynamically."""
    master_dtype: DType = "fp32"
    """Precision of master weights and optimizer state: fp32, or bf16 with dtype bf16 and fsdp2_train."""
    attn_implementation: str | None = None
    """For padded rows sdpa, eager or flash_attention_2; sdpa when absent, if the architecture supports it. varlen:
    torch's flash kernels on packed rows in bf16 and fp16, instead of FlexAttention on a GPU."""
    pad_token: str | None = None
    """Existing token to pad with in the padded layout; when absent, the tokenizer's pad token, else EOS."""
    trust_remote_code: bool = False
    """Run Python code from the repositories of model and tokenizer; only for those that you trust."""
    moe_aux_loss_coef: NonNegative | None = None
    """Weight of a mixture-of-experts model's load-balancing loss, over all tokens of a step; off when absent or 0.
    Costs one more forward."""
    freeze_module_prefix: Names = []
    """Prefixes of parameters that are not trained, such as `model.embed_tokens`: a list, or joined with commas."""
    lora_rank: PositiveInt | None = None
    """Rank of the LoRA adapters; full fine-tuning when absent."""
    lora_alpha: Annotated[float, Field(gt=0)] | None = None
    """LoRA alpha; twice the rank when absent."""
    lora_init: Annotated[str, Field(pattern=r"^(default|olora|pissa|pissa_niter_[1-9]\d*)$")] = "default"
    """`default`: the adapter starts at zero. `pissa`: it starts with the principal components of the weights, taken
    from the frozen weights; `pissa_niter_N` approximates them in N iterations. `olora`: with a part of their QR
    decomposition. The reference is the original model."""
    use_rslora: bool = False
    """Scale adapters by alpha / sqrt(rank) instead of alpha / rank."""
    use_dora: bool = False
    """DoRA: train the length of each row of an adapted matrix too. Needs whole rows: no tp, ZeRO-3 or Megatron-Core."""
    lora_rank_pattern: dict[str, PositiveInt] = {}
    """Ranks of modules whose names end with a key, which may be a regular expression, instead of lora_rank."""
    lora_alpha_pattern: dict[str, Annotated[float, Field(gt=0)]] = {}
    """Alphas of modules, named as in lora_rank_pattern, instead of lora_alpha."""
    modules_to_save: Names = []
    """Modules that are trained whole besides the adapters: `lm_head`, or `norm` for all whose names end with it. If
    embedding and head are tied, one name trains both. The reference has the original ones."""
    adapter_name_or_path: str | None = None
    """LoRA adapter in PEFT's format to start from, with its settings. A reference of the same model has it too, so
    margins start at 0."""
    merge_adapters: Names = []
    """LoRA adapters in PEFT's format that are merged into the model when it is loaded, in this order. A reference of
    the same model has them too: it is the merged model."""
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout of the adapters; all other dropout is disabled."""
    lora_target: LoraTargets = ["all-linear"]
    """Modules that get an adapter, as a list or joined with commas; `all` means `all-linear`, without stacked experts:
    add `experts.gate_up_proj` and `experts.down_proj` for them."""
    lora_exclude: Names = []
    """Modules of lora_target that get no adapter."""

    lora_plus_ratio: Annotated[float, Field(gt=0)] | None = None
    """LoRA+: learning rate of the B factors of the adapters as a multiple of learning_rate, such as 16. fsdp2_train
    only."""
    quantization: QuantizationArgs | None = None
    """Weights of the frozen matrices in fewer bits; off when absent."""

    @model_validator(mode="after")
    def _validate_dtypes(self) -> ModelArgs:
        if self.master_dtype == "fp16":
            raise ValueError("master_dtype fp16 would round most updates to zero; set master_dtype to fp32")
        if self.master_dtype not in ("fp32", self.dtype):
            raise ValueError(f"dtype {self.dtype} cannot compute from master_dtype bf16; set master_dtype to fp32")
        return self

    @model_validator(mode="after")
    def _validate_lora(self) -> ModelArgs:
        if self.has_adapter and self.freeze_module_prefix:
            name = "lora_rank" if self.adapter_name_or_path is None else "adapter_name_or_path"
            raise ValueError(
                f"freeze_module_prefix has no effect with {name}, which trains adapters only; choose their modules "
                "with lora_target"
            )
        ignored = self.non_default(*OF_NEW_ADAPTERS)
        if self.adapter_name_or_path is not None and ignored:
            raise ValueError(no_effect(ignored, "with adapter_name_or_path, whose settings are kept; remove {it}"))
        if self.starts_from_weights and self.master_dtype != "fp32":
            raise ValueError(f"lora_init {self.lora_init} needs master_dtype fp32: bf16 would round the weights")
        if self.starts_from_weights and self.use_dora:
            raise ValueError(
                f"use_dora measures the weights that lora_init {self.lora_init} changes; remove one of them"
            )
        if self.quantization is not None:
            self._validate_quantization()
        unused = self.non_default("lora_alpha", "lora_dropout", "lora_target", "lora_plus_ratio", *OF_NEW_ADAPTERS)
        if not self.has_adapter and unused:
            raise ValueError(no_effect(unused, "without lora_rank; set lora_rank"))
        return self

    def _validate_quantization(self) -> None:
        if not self.has_adapter:
            raise ValueError("quantization is for frozen weights, and all are trained; set lora_rank, or remove it")
        if self.starts_from_weights:
            raise ValueError(
                f"lora_init {self.lora_init} decomposes dense weights, which quantization does not keep; remove one of "
                "them"
            )
        if need_weights := self.non_default("use_dora", "merge_adapters"):
            raise ValueError(
                f"{need_weights[0]} needs dense weights, which quantization does not keep; remove one of them"
            )

    @property
    def starts_from_weights(self) -> bool:
        """Whether the adapter starts with a part of the weights (PiSSA, OLoRA), which the base model then lacks."""
        return self.lora_init != "default"

    @property
    def has_adapter(self) -> bool:
        return self.lora_rank is not None or self.adapter_name_or_path is not None

    @property
    def freezes_weights(self) -> bool:
        """Whether weights stay as they are in the model's files, which checkpoints then lack."""
        return self.has_adapter or bool(self.freeze_module_prefix)


class ReferenceModelArgs(Section):
    """Model settings that may differ from the policy's; the others are shared, so the margin at step 0 is 0."""

    model_name_or_path: str | None = None
    """The reference's model; when absent, `pretrain`, else the policy's model."""
    revision: str | None = None
    """Branch, tag or commit on the Hub; when absent, the policy's for the same model."""
    model_type: Literal["causal_lm"] | None = None
    """Accepted for compatibility, as the policy's."""
    dtype: DType | None = None
    """Precision of the forward pass; the policy's when absent."""
    master_dtype: DType | None = None
    """Precision of the loaded weights, fp32 or bf16; the policy's when absent."""
    attn_implementation: str | None = None
    """sdpa, eager or flash_attention_2; the policy's when absent, as it must be with varlen."""
    trust_remote_code: bool | None = None
    """Run Python code from the model's repository; when absent, the policy's setting for the same model, else false."""


SCHEDULES = ("constant", "constant_with_warmup", "linear", "cosine", "cosine_with_min_lr", "polynomial", "inverse_sqrt")


class ParameterGroup(Section):
    """Parameters with a different learning rate or weight decay, by name."""

    match: Annotated[Names, Field(min_length=1)]
    lr: Annotated[float, Field(gt=0)] | None = None
    lr_ratio: Annotated[float, Field(gt=0)] | None = None
    weight_decay: NonNegative | None = None

    @model_validator(mode="after")
    def _validate_settings(self) -> ParameterGroup:
        if self.lr is not None and self.lr_ratio is not None:
            raise ValueError("lr and lr_ratio are both set; keep one")
        if self.lr is None and self.lr_ratio is None and self.weight_decay is None:
            raise ValueError("the group changes nothing; set lr, lr_ratio or weight_decay")
        return self


class TrainingArgs(Section):
    """Optimizer, learning-rate schedule and micro-batches. Batch sizes are in pairs."""

    learning_rate: Annotated[float, Field(gt=0)] = 5e-7
    """Peak learning rate."""
    per_device_train_batch_size: PositiveInt = 8
    """Pairs per data-parallel rank and accumulation step; with the padded layout, the largest micro-batch."""
    gradient_accumulation_steps: PositiveInt = 1
    """Multiples of per_device_train_batch_size per optimizer step."""
    global_batch_size: PositiveInt | None = None
    """Pairs per optimizer step over all ranks, instead of gradient_accumulation_steps."""
    max_tokens_per_micro_batch: TokenBudget = None
    """Token budget of a micro-batch in training, evaluation and reference scoring. Does not change the pairs per step.
    `auto` or absent: on GPUs with fsdp2_train, from their memory by the formulas of `thresher plan`; otherwise 4096, or
    no limit in training with layout padded."""
    per_device_eval_batch_size: PositiveInt | None = None
    """Maximum pairs per rank and evaluation batch, within the token budget. When absent, as many as the budget allows,
    or per_device_train_batch_size with layout padded."""
    optim: Literal[
        "adamw",
        "adamw_8bit",
        "paged_adamw_8bit",
        "paged_adamw_32bit",
        "schedule_free_adamw",
        "adafactor",
        "muon",
        "rmsprop",
        "sgd",
    ] = "adamw"
    """Optimizer: torch's of this name; bitsandbytes' AdamW with its state in 8 bits, or in pages that move between GPU
    and host; schedulefree's AdamW, which averages weights and needs lr_scheduler_type constant or constant_with_warmup.
    muon updates the matrices of layers, and AdamW the rest. Others than adamw need fsdp2_train; adafactor and muon also
    a full copy of the model on each worker."""
    optim_args: dict[str, JsonValue] = {}
    """Further arguments of the optimizer, such as `momentum` of sgd; torch's and bitsandbytes' AdamW have the adam
    settings instead."""
    weight_decay: NonNegative = 0.0
    """Weight decay of matrices; norms and biases have none."""
    param_groups: list[ParameterGroup] = []
    """Parameters with a different learning rate or weight decay, such as `{match: embed_tokens, lr: 1e-7, weight_decay:
    0}`. `match` is one or more whole parts of parameter names, such as `layers.1` or `lora_B`; `*` stands for any
    characters, as in `*norm`. `lr` is the peak rate, `lr_ratio` a multiple of learning_rate; both follow the schedule.
    `weight_decay` is for all parameters of the group, norms and biases too. A parameter is in the first group that
    matches. fsdp2_train only."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """beta1 of every AdamW, as are the next two."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """beta2 of AdamW."""
    adam_epsilon: Annotated[float, Field(gt=0)] = 1e-8
    """epsilon of AdamW."""
    max_grad_norm: NonNegative = 1.0
    """Maximum global gradient norm; 0 disables clipping."""
    log_num_zeros_in_grad: bool = False
    """Log `num_zeros_in_grad`, the number of zeros in the gradient."""
    initial_scale_power: Annotated[int, Field(ge=0, le=64)] = 16
    """With dtype fp16: the loss scale starts at 2 to this power. An overflow skips the step and halves the scale."""
    loss_scale_window: PositiveInt = 2000
    """With dtype fp16: consecutive steps without overflow before the loss scale doubles."""
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
    gradient_checkpointing: Annotated[Literal["off", "selective", "full"], also({True: "full", False: "off"})] = "off"
    """Recompute activations in the backward to save memory. `full` (or true) keeps only the input of each layer.
    `selective` also keeps the results of most matrix products, attention and tensor-parallel sums. `off` (or false)
    keeps everything."""
    activation_offload: bool = False
    """With gradient_checkpointing: keep layer inputs in host memory until the backward."""
    torch_compile: Literal["auto"] | bool = "auto"
    """Compile the model with torch.compile, which delays the first step. `auto`: on GPUs without moe_aux_loss_coef,
    where the engine and its parallel sizes support it; what the compiler cannot compile runs uncompiled, with a warning
    in the log."""

    @model_validator(mode="after")
    def _validate_schedule(self) -> TrainingArgs:
        if self.global_batch_size is not None and self.non_default("gradient_accumulation_steps"):
            raise ValueError("gradient_accumulation_steps has no effect with global_batch_size; keep one")
        if self.activation_offload and self.gradient_checkpointing == "off":
            raise ValueError("activation_offload has no effect without gradient_checkpointing; set it to full")
        if self.warmup_steps is not None and self.warmup_ratio is not None:
            raise ValueError("warmup_steps and warmup_ratio are both set; keep one")
        if self.non_default("min_lr_ratio") and self.lr_scheduler_type != "cosine_with_min_lr":
            raise ValueError("min_lr_ratio has no effect without lr_scheduler_type=cosine_with_min_lr")
        if self.non_default("lr_power") and self.lr_scheduler_type != "polynomial":
            raise ValueError("lr_power has no effect without lr_scheduler_type=polynomial")
        unread = self.non_default("adam_beta1", "adam_beta2", "adam_epsilon")
        if unread and self.optim in ("adafactor", "rmsprop", "sgd"):
            raise ValueError(no_effect(unread, f"with optim {self.optim}; remove {{it}}, or use optim_args"))
        if self.optim_args and self.optim in ("adamw", "adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit"):
            raise ValueError(
                f"optim_args has no effect with optim {self.optim}; use adam_beta1, adam_beta2 and adam_epsilon"
            )
        if set_elsewhere := self.optim_args.keys() & {"lr", "weight_decay", "warmup_steps"}:
            raise ValueError(
                f"optim_args has {', '.join(sorted(set_elsewhere))}; set learning_rate, weight_decay and warmup_steps "
                "of training_args instead"
            )
        if self.optim == "schedule_free_adamw":
            self._validate_schedule_free()
        if (self.warmup_steps or self.warmup_ratio) and self.lr_scheduler_type == "constant":
            raise ValueError("lr_scheduler_type constant has no warm-up; use constant_with_warmup")
        return self

    def _validate_schedule_free(self) -> None:
        if self.lr_scheduler_type not in ("constant", "constant_with_warmup"):
            raise ValueError(
                "optim schedule_free_adamw averages the weights instead of lowering the rate, and lr_scheduler_type "
                f"is {self.lr_scheduler_type}; set it to constant, or to constant_with_warmup"
            )
        if self.adam_beta1 == 0:
            raise ValueError("optim schedule_free_adamw interpolates by adam_beta1; set it above 0")

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


def parse_device_mapping(value: object) -> list[int] | None:
    """Return the global device ids of a role, without evaluating text as code; None for CPU workers."""
    if value is None:
        return None
    if isinstance(value, str):
        ids = _device_ids(value)
    elif isinstance(value, list | tuple) and all(type(item) is int for item in value):
        ids = list(value)
    else:
        raise ValueError(f"not a device list; {_DEVICES}")
    if len(set(ids)) != len(ids):
        raise ValueError(f"device ids repeat; {_DEVICES}")
    if any(i < 0 for i in ids):
        raise ValueError(f"device ids are negative; {_DEVICES}")
    return ids


def _device_ids(text: str) -> list[int]:
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(f"not a device list; {_DEVICES}") from None
    try:
        return _ids(tree)
    except RecursionError:
        raise ValueError(f"too many lists are added; {_DEVICES}") from None


def _ids(node: ast.expr) -> list[int]:
    match node:
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_integer(item) for item in items]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _ids(left) + _ids(right)
        case ast.Call(func=ast.Name(id="list"), args=[inner], keywords=[]):
            return _ids(inner)
        case ast.Call(func=ast.Name(id="range"), args=args, keywords=[]) if 1 <= len(args) <= 3:
            bounds = [_integer(arg) for arg in args]
            if max(map(abs, bounds)) > _MOST_DEVICES or bounds[2:] == [0]:
                raise ValueError(f"range has step 0 or a bound above {_MOST_DEVICES}; {_DEVICES}")
            return list(range(*bounds))
    raise ValueError(f"not a device list; {_DEVICES}")


def _integer(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() as number)):
            return -number
    raise ValueError(f"not a device list; {_DEVICES}")


class RoleConfig(Section):
    """Settings common to policy and reference."""

    default_strategy: ClassVar[str] = DEFAULT_INFER
    strategy_args: StrategyArgs = StrategyArgs.model_construct()  # validating it imports the default strategy
    device_mapping: Annotated[list[int] | None, BeforeValidator(parse_device_mapping)] = None
    """Global device ids, one worker per device: a list, or text like `list(range(0,8))`. Roles may share devices."""
    system_envs: Environment = {}
    """Environment variables of this role's workers, in addition to the run's."""
    num_workers: PositiveInt | None = None
    """Number of workers without device_mapping, on CPUs with Ray. When absent, 1, or what torchrun or srun started."""

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
        workers: int = self.strategy_args.settings.workers_per_data_rank
        return max(1, self.num_processes // workers)

    @property
    def strategy_name(self) -> str:
        return self.strategy_args.strategy_name or self.default_strategy

    @property
    def strategy(self) -> StrategyDeclaration:
        return find_strategy(self.strategy_name)

    @property
    def is_replicated(self) -> bool:
        """Whether every worker has the whole model."""
        return self.strategy_name == DEFAULT_INFER or self.strategy_args.settings.is_replicated(self.num_processes)


class PolicyConfig(RoleConfig):
    """`actor_train`: the policy."""

    default_strategy: ClassVar[str] = DEFAULT_TRAIN
    model_args: ModelArgs = ModelArgs()
    training_args: TrainingArgs = TrainingArgs()
    data_args: TrainingDataArgs = TrainingDataArgs()

    @model_validator(mode="after")
    def _validate_loss_scale(self) -> PolicyConfig:
        if self.training_args.optim == "schedule_free_adamw" and self.model_args.master_dtype != "fp32":
            raise ValueError("optim schedule_free_adamw needs model_args.master_dtype fp32: bf16 would round averages")
        unused = self.training_args.non_default("initial_scale_power", "loss_scale_window")
        if unused and self.model_args.dtype != "fp16":
            names = [f"training_args.{name}" for name in unused]
            raise ValueError(no_effect(names, "without model_args.dtype fp16; remove {it}"))
        return self


class ReferenceConfig(RoleConfig):
    """`reference`: the frozen model."""

    model_args: ReferenceModelArgs = ReferenceModelArgs()
    mode: Literal["auto", "precompute", "concurrent", "adapter", "none"] = "auto"
    """precompute: score the pairs before training, and cache the log-probabilities; concurrent: during training;
    adapter: by the policy without its LoRA adapter; none: no reference, which makes DPO reference-free. auto: none if
    the loss needs no reference, adapter with a LoRA adapter that starts at zero on the same model, concurrent with
    sync_steps, otherwise precompute."""
    infer_batch_size: PositiveInt | None = None
    """Maximum pairs per forward in mode precompute, within the token budget. When absent, as many as the budget allows,
    or 8 with layout padded."""
    cache_dir: str | None = None
    """Directory of precomputed log-probabilities; the run's cache_dir when absent."""
    prefetch_steps: PositiveInt = 2
    """Maximum steps that workers of a concurrent reference run ahead of the policy."""
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
