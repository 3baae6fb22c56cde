"""DPOConfig: the whole run as data, under the key names that users of ROLL's DPO pipeline know."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, StrictBool, field_validator, model_validator

from thresher.config.roles import DType, PolicyConfig, ReferenceConfig, StringList, ValidationConfig
from thresher.config.section import Section

# Knobs that a loss or modifier may take; None leaves the loss's own default in force.
LOSS_KNOBS = ("beta", "label_smoothing", "gamma", "cpo_alpha", "discopop_tau")
EVAL_METRICS = tuple(
    f"eval/{name}"
    for name in ("loss", "rewards/accuracies", "rewards/margins", "rewards/chosen", "rewards/rejected", "sft_loss")
)
_SWITCHES = {"ipo": "ipo", "simpo_loss": "simpo"}
Positive = Annotated[float, Field(gt=0)]


class LossConfig(Section):
    """The objective. Knobs left out take the chosen loss's own default (`thresher losses` lists them)."""

    pref_loss: str | list[str] | dict[str, Positive] = "sigmoid"
    """A loss by name, a list of them, or a mapping from name to weight (MPO)."""
    ipo: StrictBool | None = None
    """`true` is another spelling of pref_loss=ipo."""
    simpo_loss: StrictBool | None = None
    """`true` is another spelling of pref_loss=simpo."""
    beta: Positive | None = None
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] | None = None
    gamma: float | None = None
    """Target margin of simpo."""
    length_normalization: bool | None = None
    """sigmoid: true is sigmoid_norm; ipo: false is ipo_sum."""
    cpo_alpha: Annotated[float, Field(ge=0)] | None = None
    discopop_tau: Positive | None = None
    rpo_alpha: Positive | None = None
    """Add this much NLL of the chosen response."""
    f_divergence_type: Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"] = "reverse_kl"
    f_alpha_divergence_coef: float = 0.5
    ld_alpha: Annotated[float, Field(ge=0, le=1)] | None = None
    """LD-DPO: weight of the tokens past the shorter side's length."""
    use_wpo: bool = False
    """WPO: weight pairs by how likely the policy finds them."""
    length_penalty: Annotated[float, Field(ge=0)] | None = None
    """R-DPO: reward that a response owes for each of its tokens."""

    @model_validator(mode="before")
    @classmethod
    def _switches_name_the_loss(cls, values: Any) -> Any:
        if not isinstance(values, dict) or "pref_loss" in values:
            return values
        named = [name for switch, name in _SWITCHES.items() if values.get(switch) is True]
        return {**values, "pref_loss": named[0]} if named else values

    @model_validator(mode="after")
    def _spellings_agree(self) -> LossConfig:
        if self.ipo and self.simpo_loss:
            raise ValueError("ipo and simpo_loss are both true; keep one")
        for switch, name in _SWITCHES.items():
            if getattr(self, switch) and self.pref_loss not in (name, [name]):
                raise ValueError(f"{switch}: true contradicts pref_loss: {self.pref_loss}; keep one")
        names = [name for name, _ in self._terms]
        if len(set(names)) != len(names):
            raise ValueError(f"pref_loss adds up {' + '.join(names)}; name each loss once, with its weight")
        if self.turned("f_alpha_divergence_coef") and self.f_divergence_type != "alpha_divergence":
            raise ValueError("f_alpha_divergence_coef only acts with f_divergence_type=alpha_divergence")
        return self

    @property
    def loss_weights(self) -> dict[str, float]:
        """Loss names with their weights, every accepted spelling resolved."""
        return dict(self._terms)

    @property
    def _terms(self) -> list[tuple[str, float]]:
        names = [self.pref_loss] if isinstance(self.pref_loss, str) else self.pref_loss
        weights = names if isinstance(names, dict) else {}
        return [(self._normalised_name(name), weights.get(name, 1.0)) for name in names]

    def _normalised_name(self, name: str) -> str:
        renamed = {("sigmoid", True): "sigmoid_norm", ("ipo", False): "ipo_sum"}
        return renamed.get((name, self.length_normalization), name) if self.length_normalization is not None else name

    @property
    def given_knobs(self) -> dict[str, float]:
        """The loss knobs that the user set."""
        return {name: getattr(self, name) for name in LOSS_KNOBS if getattr(self, name) is not None}


class TrackerArgs(Section):
    """Settings of the trackers that have some."""

    wandb_project: str = "thresher"
    wandb_entity: str | None = None
    wandb_mode: Literal["auto", "online", "offline"] = "auto"
    """auto: online where a key is at hand, offline otherwise."""
    mlflow_tracking_uri: str | None = None
    """A server or store; below the log directory when absent."""


class DPOConfig(LossConfig):
    """Everything a run needs to know."""

    exp_name: str = "thresher"
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 42
    output_dir: str = "./output"
    """Run directory: checkpoints, prepared pairs and, unless logging_dir says otherwise, logs."""
    logging_dir: str | None = None
    """Metric logs; `output_dir`/logs when absent."""
    max_steps: PositiveInt | None = None
    num_train_epochs: Positive | None = None
    """Fractions are fine. With max_steps as well, whichever ends first; with neither, one epoch."""
    save_steps: Annotated[int, Field(ge=0)] = 100
    """0 saves the final step only."""
    async_save: bool = True
    """Train on while a checkpoint is written; it takes a copy of weights and optimizer state in host memory."""
    eval_steps: Annotated[int, Field(ge=0)] = 0
    """0 evaluates at the end only."""
    eval_on_start: bool = False
    """Evaluate before the first step as well."""
    logging_steps: PositiveInt = 1
    resume_from_checkpoint: Literal[False] | str | None = None
    """Absent: go on from the newest checkpoint of a run with this very config. `auto`: whatever its config; `false`:
    start anew; or the path of a checkpoint."""
    save_total_limit: PositiveInt = 3
    """How many of the newest checkpoints stay; the best stays as well."""
    metric_for_best: Literal[EVAL_METRICS] = "eval/loss"  # type: ignore[valid-type]
    greater_is_better: bool = False
    max_skipped_steps: PositiveInt = 5
    """Stop after so many steps in a row with a non-finite loss or gradient."""
    max_restarts: Annotated[int, Field(ge=0)] = 5
    """On Ray: how often all workers are built again after one failed, counted anew after every checkpoint."""
    hang_timeout: Annotated[float, Field(gt=0)] = 600.0
    """On Ray: seconds after which a worker that gives no sign of life counts as lost."""
    elastic: bool = False
    """On Ray: after a node is lost, go on with fewer workers and the same steps; a node that joins is used after the
    next checkpoint."""
    stop_deadline: Annotated[float, Field(gt=0)] = 60.0
    """Seconds after SIGTERM or SIGINT for the step under way to be finished and saved; then the run leaves at once."""

    runtime: Literal["auto", "local", "ray"] = "auto"
    """One process, or workers on Ray; auto: Ray where a role has several devices or workers, or ray_address is set."""
    ray_address: str | None = None
    """A running Ray cluster, HOST:PORT; when absent, Ray is started on this machine for the length of the run."""
    num_gpus_per_node: PositiveInt | None = None
    """Devices that device_mapping counts on each node; what the cluster's nodes have when absent."""

    pretrain: str | None = None
    """The model that policy and reference start from."""
    layout: Literal["auto", "shared", "packed", "padded"] = "auto"
    """How pairs lie in a batch: prompts computed once, sequences end to end, or padded; auto: the fastest that fits."""
    sequence_length: Annotated[int, Field(ge=2)] = 1024
    """Longest prompt plus response, in tokens."""
    chosen_key: str | None = None
    rejected_key: str | None = None
    prompt_key: str | None = None

    actor_train: PolicyConfig = PolicyConfig()
    reference: ReferenceConfig = ReferenceConfig()
    validation: ValidationConfig | None = None
    track_with: StringList = ["console"]
    """console, tensorboard, wandb, mlflow; metrics.jsonl is always written."""
    tracker_kwargs: TrackerArgs = TrackerArgs()

    @field_validator("max_steps", "num_train_epochs", mode="before")
    @classmethod
    def _minus_one_is_unlimited(cls, value: object) -> object:
        return None if value == -1 else value

    @field_validator("resume_from_checkpoint", mode="before")
    @classmethod
    def _true_says_too_little(cls, value: object) -> object:
        if value is True:
            raise ValueError("use `auto` to go on from the newest checkpoint, or give a path")
        return False if value in ("false", "False", "") else value

    @model_validator(mode="after")
    def _precisions_of_the_reference_fit(self) -> DPOConfig:
        own, policy = self.reference.model_args, self.actor_train.model_args
        if (own.dtype or policy.dtype) == "fp32" and (own.master_dtype or policy.master_dtype) == "bf16":
            raise ValueError(
                "the reference cannot compute in fp32 from bf16 weights; remove its dtype and master_dtype"
            )
        return self

    @model_validator(mode="after")
    def _evaluation_needs_pairs(self) -> DPOConfig:
        idle = self.turned("eval_steps", "eval_on_start", "metric_for_best", "greater_is_better")
        idle += [
            f"actor_train.training_args.{name}"
            for name in self.actor_train.training_args.turned("per_device_eval_batch_size")
        ]
        if self.validation is None and idle:
            raise ValueError(f"{', '.join(idle)} has no effect without validation.data_args; add it or remove this")
        return self

    @model_validator(mode="after")
    def _runtime_fits(self) -> DPOConfig:
        for name, role in (("actor_train", self.actor_train), ("reference", self.reference)):
            if self.runtime == "local" and role.num_processes > 1:
                what = "device_mapping" if role.device_mapping else "num_workers"
                raise ValueError(
                    f"runtime: local is one process, and {name}.{what} asks for {role.num_processes}; use runtime: ray"
                )
        if self.runtime == "local" and self.ray_address is not None:
            raise ValueError("ray_address has no effect with runtime: local; use runtime: ray")
        if self.num_gpus_per_node is not None and not (
            self.actor_train.device_mapping or self.reference.device_mapping
        ):
            raise ValueError("num_gpus_per_node has no effect without a device_mapping; remove it")
        return self

    @property
    def uses_ray(self) -> bool:
        several = max(self.actor_train.num_processes, self.reference.num_processes) > 1
        return self.runtime == "ray" or (self.runtime == "auto" and (several or self.ray_address is not None))

    @property
    def pairs_per_step(self) -> int:
        return self.actor_train.training_args.pairs_per_step(self.actor_train.num_data_ranks)

    @property
    def policy_path(self) -> str | None:
        return self.actor_train.model_args.model_name_or_path or self.pretrain

    @property
    def reference_path(self) -> str | None:
        return self.reference.model_args.model_name_or_path or self.pretrain or self.policy_path

    @property
    def reference_dtype(self) -> DType:
        """The policy's where it has none of its own: otherwise step 0 would not start at margin 0."""
        return self.reference.model_args.dtype or self.actor_train.model_args.dtype

    @property
    def reference_master_dtype(self) -> DType:
        return self.reference.model_args.master_dtype or self.actor_train.model_args.master_dtype

    @property
    def trusts_reference_code(self) -> bool:
        """Trust is given to a model: the policy's reaches the reference only where that is the same one."""
        own, policy = self.reference.model_args.trust_remote_code, self.actor_train.model_args.trust_remote_code
        return policy and self.reference_path == self.policy_path if own is None else own

    @property
    def uses_lora(self) -> bool:
        return self.actor_train.model_args.lora_rank is not None
