"""DPOConfig: the whole run as data, with the key names of ROLL's DPO pipeline."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    PositiveInt,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from thresher.config.data import DataArgs, SamplesConfig, SetArgs, ValidationConfig
from thresher.config.loss import LossConfig, Positive, with_digests
from thresher.config.roles import DType, Environment, PolicyConfig, ReferenceConfig, at_revision
from thresher.config.section import Section, StringList, also, no_effect, readable_errors
from thresher.foreign_names import foreign

EVAL_METRICS = tuple(
    f"eval/{name}"
    for name in ("loss", "rewards/accuracies", "rewards/margins", "rewards/chosen", "rewards/rejected", "sft_loss")
)
# the names of transformers
_METRIC_SPELLINGS = {f"{prefix}{name.removeprefix('eval/')}": name for prefix in ("", "eval_") for name in EVAL_METRICS}
_OF_A_SET = re.compile(rf"(eval/).+/({'|'.join(name.removeprefix('eval/') for name in EVAL_METRICS)})")
_RESUME_SPELLINGS = {"false": False, "False": False, "": False, True: "auto"}
_HIGHER_IS_BETTER = {"eval/rewards/accuracies", "eval/rewards/margins", "eval/rewards/chosen"}


def _check_metric(name: str) -> str:
    if name in EVAL_METRICS or _OF_A_SET.fullmatch(name):
        return name
    raise ValueError(f"use {', '.join(EVAL_METRICS)}, or one of a set: eval/NAME/loss and so on")


def _higher_is_better(metric: str) -> bool:
    """Whether a metric of all pairs, of a set or of a subset is better if it is higher."""
    return _OF_A_SET.sub(r"\1\2", metric) in _HIGHER_IS_BETTER


# YAML reads a bare `no` or `off` as false
Health = Annotated[Literal["off", "warn", "stop"], also({False: "off"})]
Cadence = Annotated[Literal["steps", "epoch", "no"], also({False: "no"})]


class TrackerArgs(Section):
    """Settings of the trackers."""

    wandb_project: str = "thresher"
    """Project on Weights & Biases."""
    wandb_entity: str | None = None
    """Team or user on Weights & Biases; the account's default when absent."""
    wandb_mode: Literal["auto", "online", "offline"] = "auto"
    """auto: WANDB_MODE, else online with an API key and offline without."""
    wandb_api_key: str | None = None
    """API key of Weights & Biases, for this run alone; `wandb login` or WANDB_API_KEY when absent."""
    mlflow_tracking_uri: str | None = None
    """MLflow server or store; a local store in logging_dir when absent."""
    tensorboard_dir: str | None = None
    """Directory of the TensorBoard files, one subdirectory per exp_name; logging_dir/tensorboard when absent."""
    trackio_project: str = "thresher"
    """Project in Trackio's local database."""
    name: str | None = None
    """Run name on wandb, mlflow and trackio; exp_name when absent."""
    notes: str | None = None
    """Run description on wandb and mlflow."""
    tags: StringList = []
    """Run tags on wandb and mlflow."""


class ProfileConfig(Section):
    """Traces of single steps."""

    steps: list[PositiveInt] = []
    """Steps to profile, counted from 1: each rank of the policy writes a trace of them to logs/profile."""


# keys of tracker_kwargs, and the trackers that use them
_TRACKER_SETTINGS = (
    (("wandb_project", "wandb_entity", "wandb_mode", "wandb_api_key"), ("wandb",)),
    (("mlflow_tracking_uri",), ("mlflow",)),
    (("tensorboard_dir",), ("tensorboard",)),
    (("trackio_project",), ("trackio",)),
    (("name",), ("wandb", "mlflow", "trackio")),
    (("notes", "tags"), ("wandb", "mlflow")),
)
# the validation context of a config made in Python, to which DPOTrainer may add data and devices
_FROM_PYTHON: dict[str, Any] = {"from": "Python"}

# each names the column of a row that formats know without the suffix
COLUMN_KEYS = (
    *("chosen_key", "rejected_key", "prompt_key"),
    *("completion_key", "label_key", "completions_key", "scores_key"),
)


class DPOConfig(LossConfig):
    """All settings of a run.

    Python code may also give flat names, TRL's or the last part of a key: `DPOConfig(learning_rate=1e-6)`. A mistake is
    a `UserError`; settings without effect are reported when a run starts: `DPOTrainer` may add data and devices.
    """

    exp_name: str = "thresher"
    """Run name on trackers."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 42
    """Random seed of the run."""
    output_dir: str = "./output"
    """Run directory: checkpoints, prepared pairs, and logs unless logging_dir is set."""
    logging_dir: str | None = None
    """Directory of metrics and logs; output_dir/logs when absent."""
    cache_dir: str | None = None
    """Directory that runs share: prepared pairs, and reference log-probabilities unless reference.cache_dir is set.
    When absent, `$THRESHER_CACHE_DIR` or the user's cache directory."""
    max_steps: Annotated[PositiveInt | None, also({-1: None})] = None
    """Maximum number of steps; no limit when absent or -1. Without num_train_epochs, the data repeats until then."""
    num_train_epochs: Annotated[Positive | None, also({-1: None})] = None
    """Number of epochs, which may be fractional; 1 if max_steps is absent too. With both, the run ends at whichever
    comes first; in Python, DPOConfig drops the epochs, as TRL does."""
    save_strategy: Cadence = "steps"
    """When to save besides the end: every save_steps `steps`, at the end of each `epoch`, or `no`."""
    save_steps: Annotated[int, Field(ge=0)] = 100
    """Steps between checkpoints; 0 saves the final step only."""
    async_save: bool = True
    """Write checkpoints while training continues; needs host memory for trained weights and optimizer state."""
    eval_strategy: Cadence = "steps"
    """When to evaluate besides the end: every eval_steps `steps`, at the end of each `epoch`, or `no`."""
    eval_steps: Annotated[int, Field(ge=0)] = 0
    """Steps between evaluations; 0 evaluates at the end only."""
    eval_on_start: bool = False
    """Evaluate before the first step too."""
    logging_steps: PositiveInt = 1
    """Steps between log entries; loss metrics are means since the previous one. The final step is always logged."""
    resume_from_checkpoint: Annotated[Literal[False] | str | None, also(_RESUME_SPELLINGS)] = None
    """Absent: resume from the newest checkpoint in output_dir, whose settings must agree where they affect numbers.
    `auto` or `true`: only data, seed, pairs per step and models must agree. `false`: start from scratch. Otherwise a
    checkpoint's path. Both need an output_dir without later checkpoints."""
    save_total_limit: PositiveInt = 3
    """Number of newest checkpoints to keep; the best one is kept too."""
    export_model: bool = False
    """At the end, write the trained model with merged adapters to output_dir/model, as `thresher export` does. Files of
    an earlier one are replaced."""
    metric_for_best_model: Annotated[str, also(_METRIC_SPELLINGS), AfterValidator(_check_metric)] = "eval/loss"
    """Evaluation metric that selects the best checkpoint: eval/loss, eval/rewards/accuracies, margins, chosen or
    rejected, or eval/sft_loss; or one of a validation set or subset, such as eval/NAME/loss."""
    greater_is_better: bool = Field(default=None, validate_default=True)
    """Whether a higher metric_for_best_model is better. Absent: true for accuracies, margins and chosen rewards."""
    max_consecutive_skipped_steps: PositiveInt = 5
    """Stop after this many consecutive steps with a non-finite loss or gradient; fp16 overflows do not count."""
    health: Health = "warn"
    """When a health rule finds a problem: `warn`, or `stop` after a checkpoint; `off` checks nothing."""
    max_restarts: Annotated[int, Field(ge=0)] = 5
    """On Ray: maximum consecutive restarts without a new checkpoint."""
    heartbeat_timeout: Annotated[float, Field(gt=0)] = 600.0
    """Seconds without a worker's heartbeat or, after warm-up, without progress of any worker, after which a run on Ray
    restarts and a torchrun run ends. Also the timeout of NCCL collectives in later steps."""
    elastic: bool = False
    """On Ray: after losing a node, continue with fewer workers and the same global batch, and use a node that joins
    from the next checkpoint on."""
    graceful_stop_timeout: Annotated[float, Field(gt=0)] = 60.0
    """Seconds to stop and save after SIGTERM or SIGINT; then the run reports what is lost and exits. A single process
    discards a slow step; several finish it, so allow more than one step."""

    runtime: Literal["auto", "local", "ray", "torchrun"] = "auto"
    """local: one process; ray: workers on Ray; torchrun: the processes that torchrun or srun started. auto: torchrun if
    started so, ray for several devices or workers or with ray_address, otherwise local."""
    ray_address: str | None = None
    """HOST:PORT of a running Ray cluster; when absent, the run starts and stops Ray on this machine."""
    system_envs: Environment = {}
    """Environment variables of all workers; without Ray, of all processes."""
    num_gpus_per_node: PositiveInt | None = None
    """Devices per node, for the numbering in device_mapping; detected when absent."""

    pretrain: str | None = None
    """Initial model of policy and reference: a Hub name, a directory or a GGUF file."""
    layout: Literal["auto", "shared", "packed", "padded"] = "auto"
    """shared: packed, with each prompt computed once per pair; packed: sequences concatenated; padded; auto: shared if
    possible, else padded."""
    apply_loss_mask: bool = True
    """Score the responses only. `false` scores the prompt too, which changes losses with token averages or an NLL term;
    in a difference of sums, the prompt cancels out."""
    sequence_length: Annotated[int, Field(ge=2)] = 1024
    """Maximum tokens of prompt plus response."""
    chosen_key: str | None = None
    """Column of the chosen response, if its name is not recognized."""
    rejected_key: str | None = None
    """Column of the rejected response, if its name is not recognized."""
    prompt_key: str | None = None
    """Column of the prompt, if its name is not recognized."""
    completion_key: str | None = None
    """Column of the one answer of a row, if its name is not recognized."""
    label_key: str | None = None
    """Column of an answer's label, if its name is not recognized."""
    completions_key: str | None = None
    """Column of the list of responses, if its name is not recognized."""
    scores_key: str | None = None
    """Column of the list of their scores, if its name is not recognized."""

    actor_train: PolicyConfig = PolicyConfig()
    reference: ReferenceConfig = ReferenceConfig()
    validation: ValidationConfig | None = None
    samples: SamplesConfig | None = None
    track_with: StringList = ["console"]
    """Any of console, tensorboard, wandb, mlflow, trackio; metrics.jsonl is always written, and a run on Ray exports to
    Prometheus."""
    tracker_kwargs: TrackerArgs = TrackerArgs()
    profile: ProfileConfig = ProfileConfig()

    # names of TRL that DPOTrainer's methods use and a run does not, such as hub_model_id
    _trainer_options: dict[str, Any] = PrivateAttr(default_factory=dict)

    def __init__(self, **values: Any) -> None:
        given = {name: os.fspath(value) if isinstance(value, os.PathLike) else value for name, value in values.items()}
        given, options = foreign().from_python(type(self), with_digests(given))
        try:
            self.__pydantic_validator__.validate_python(given, self_instance=self, context=_FROM_PYTHON)
        except ValidationError as error:
            raise readable_errors(error, type(self)) from None
        self._trainer_options = options

    if not TYPE_CHECKING:  # else mypy would accept any name

        def __getattr__(self, name: str) -> Any:
            """Read a setting under TRL's name, as programs do: `training_args.learning_rate`."""
            if not name.startswith("_"):
                found = foreign().trl_arguments(self)
                if name in found:
                    return found[name]
            return super().__getattr__(name)

    @property
    def trainer_options(self) -> dict[str, Any]:
        """Settings of TRL that only `DPOTrainer` uses."""
        return dict(self._trainer_options)

    # keeps pydantic from calling it for the plain values of a file, which have no flat names
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @field_validator("greater_is_better", mode="before")
    @classmethod
    def _derive_direction(cls, value: object, info: ValidationInfo) -> object:
        return _higher_is_better(info.data.get("metric_for_best_model", "")) if value is None else value

    @model_validator(mode="after")
    def _validate_roles(self) -> DPOConfig:
        dtype, master_dtype = self.reference_dtype, self.reference_master_dtype
        if master_dtype == "fp16" or master_dtype not in ("fp32", dtype):
            problem = f"the reference cannot compute in {dtype} from {master_dtype} weights"
            raise ValueError(f"{problem}; remove its dtype and master_dtype")
        for name, role in (("actor_train", self.actor_train), ("reference", self.reference)):
            if self.runtime == "local" and role.num_processes > 1:
                what = "device_mapping" if role.device_mapping else "num_workers"
                raise ValueError(
                    f"runtime: local is one process, but {name}.{what} needs {role.num_processes}; use runtime: ray"
                )
        return self

    @model_validator(mode="after")
    def _validate_best_metric(self) -> DPOConfig:
        found = _OF_A_SET.fullmatch(self.metric_for_best_model)
        if self.validation is not None and found is not None and self.metric_for_best_model not in EVAL_METRICS:
            sources = self.actor_train.data_args.sources
            names = list(sources if self.validation.split is not None else self.validation.sets)
            if not any(self.metric_for_best_model.startswith(f"eval/{name}/") for name in names):
                known = f"use one of {', '.join(f'eval/{name}/' for name in names)}" if names else "there is no set"
                raise ValueError(f"metric_for_best_model is {self.metric_for_best_model}, of an unknown set; {known}")
        return self

    @model_validator(mode="after")
    def _reject_unused_settings(self, info: ValidationInfo) -> DPOConfig:
        # a launcher may turn runtime auto into torchrun; the checks of a run find what is unused in one process
        names_to_skip = ["heartbeat_timeout"] if self.runtime == "auto" else []
        found = [(names, why) for names, why in self._unused_settings() if names and names != names_to_skip]
        if info.context is not _FROM_PYTHON and found:
            raise ValueError("\n".join(no_effect(names, why) for names, why in found))
        return self

    @property
    def unused_settings(self) -> list[str]:
        """Settings that the run would ignore because of other settings, one message per reason."""
        return [no_effect(names, why) for names, why in self._unused_settings() if names]

    def _unused_settings(self) -> Iterator[tuple[list[str], str]]:
        """Yield settings that the run would ignore because of other settings, with the reason and a fix."""
        if self.runtime in ("local", "torchrun"):
            yield self.non_default("ray_address"), f"with runtime: {self.runtime}; use runtime: ray"
        if self.runtime == "torchrun":
            reference = self.reference.non_default("num_workers", "device_mapping", "strategy_args")
            of_reference = [f"reference.{name}" for name in reference]
            yield of_reference, "with runtime: torchrun, where the policy's processes score it; use runtime: ray"
        if not self.uses_ray:
            where = "with runtime: torchrun" if self.runtime == "torchrun" else "in one process"
            yield self.non_default("max_restarts", "elastic"), f"{where}; set runtime: ray or remove {{it}}"
            if self.runtime != "torchrun":
                hangs = self.non_default("heartbeat_timeout")
                yield hangs, "in one process; set runtime: ray or runtime: torchrun, or remove {it}"
        for strategy, steps in (("save_strategy", "save_steps"), ("eval_strategy", "eval_steps")):
            if (value := getattr(self, strategy)) != "steps":
                yield self.non_default(steps), f"with {strategy}: {value}; remove {{it}} or set {strategy}: steps"
        if self.validation is None:
            evaluation = self.non_default("metric_for_best_model")
            if self.samples is None:
                evaluation += self.non_default("eval_steps", "eval_on_start")
                if self.eval_strategy == "epoch":
                    evaluation.append("eval_strategy")
            elif self.samples.prompts_file is None:
                yield ["samples"], "without validation, whose prompts it answers; set it or samples.prompts_file"
            if self.greater_is_better != _higher_is_better(self.metric_for_best_model):
                evaluation.append("greater_is_better")
            if self.actor_train.training_args.non_default("per_device_eval_batch_size"):
                evaluation.append("actor_train.training_args.per_device_eval_batch_size")
            yield evaluation, "without validation.data_args or validation.split; set one or remove {it}"
        if self._reads_only_stores:
            columns = self.non_default(*COLUMN_KEYS)
            yield columns, "on a store, which is already prepared; remove {it}"
        for names, trackers in _TRACKER_SETTINGS:
            if not set(trackers) & set(self.track_with):
                unused = [f"tracker_kwargs.{name}" for name in self.tracker_kwargs.non_default(*names)]
                needed = " or ".join(trackers)
                yield unused, f"without {needed} in track_with; add {needed} there or remove {{it}}"
        split = None if self.validation is None else self.validation.split
        for name, each in self.actor_train.data_args.sources.items():
            if "subset" in each.columns and split is None:
                subset = [f"actor_train.data_args.sources.{name}.columns.subset"]
                yield subset, "without validation.split, which makes it a validation set; remove {it}"
        if self.pretrain not in (None, self._policy_name, self._reference_name):
            yield ["pretrain"], "if actor_train and reference name their models; remove {it} or one of those"

    @property
    def _reads_only_stores(self) -> bool:
        train = self.actor_train.data_args
        found: list[SetArgs | DataArgs] = [*(train.sources.values() or [train])]
        if self.validation is not None and self.validation.split is None:
            found += self.validation.sets.values() or [self.validation.data_args]
        return any(each.store for each in found) and not any(each.file_name for each in found)

    @property
    def uses_ray(self) -> bool:
        several = max(self.actor_train.num_processes, self.reference.num_processes) > 1
        return self.runtime == "ray" or (self.runtime == "auto" and (several or self.ray_address is not None))

    @property
    def pairs_per_step(self) -> int:
        return self.actor_train.training_args.pairs_per_step(self.actor_train.num_data_ranks)

    @property
    def log_dir(self) -> Path:
        """Directory of the metrics and logs of a run."""
        return Path(self.logging_dir or Path(self.output_dir) / "logs")

    @property
    def stop_file(self) -> Path:
        """The file that requests a stop; absolute, since workers may have a different working directory."""
        return Path(self.output_dir).resolve() / "stop"

    @property
    def policy_path(self) -> str | None:
        return at_revision(self._policy_name, self.actor_train.model_args.revision)

    @property
    def tokenizer_path(self) -> str | None:
        return self.actor_train.model_args.tokenizer_name_or_path or self.policy_path

    @property
    def reference_path(self) -> str | None:
        own, policy = self.reference.model_args.revision, self.actor_train.model_args.revision
        is_same = self._reference_name == self._policy_name
        return at_revision(self._reference_name, policy if own is None and is_same else own)

    @property
    def _policy_name(self) -> str | None:
        return self.actor_train.model_args.model_name_or_path or self.pretrain

    @property
    def _reference_name(self) -> str | None:
        return self.reference.model_args.model_name_or_path or self.pretrain or self._policy_name

    @property
    def reference_dtype(self) -> DType:
        """The policy's dtype unless set: with equal dtypes the margin at step 0 is 0."""
        return self.reference.model_args.dtype or self.actor_train.model_args.dtype

    @property
    def reference_master_dtype(self) -> DType:
        return self.reference.model_args.master_dtype or self.actor_train.model_args.master_dtype

    @property
    def reference_cache_dir(self) -> str | None:
        return self.reference.cache_dir or self.cache_dir

    @property
    def trusts_reference_code(self) -> bool:
        """Whether remote code may run; the policy's setting applies only if both are the same model."""
        own, policy = self.reference.model_args.trust_remote_code, self.actor_train.model_args.trust_remote_code
        return policy and self.reference_path == self.policy_path if own is None else own

    def environment_of(self, role: str) -> dict[str, str]:
        """Environment variables of a role's workers; a run in one process has actor_train's."""
        return {**self.system_envs, **getattr(self, role).system_envs}

    @property
    def uses_lora(self) -> bool:
        return self.actor_train.model_args.has_adapter

    @property
    def freezes_weights(self) -> bool:
        return self.actor_train.model_args.freezes_weights
