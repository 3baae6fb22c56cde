"""DPOConfig: the whole run as data, under the key names that users of ROLL's DPO pipeline know."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt, field_validator, model_validator

from thresher.config.roles import PolicyConfig, ReferenceConfig, StringList, ValidationConfig
from thresher.config.section import Section

# Knobs that a loss or modifier may take; None leaves the loss's own default in force.
LOSS_KNOBS = ("beta", "label_smoothing", "gamma", "cpo_alpha", "discopop_tau")
Positive = Annotated[float, Field(gt=0)]


class LossConfig(Section):
    """The objective. Knobs left out take the chosen loss's own default (`thresher losses` lists them)."""

    pref_loss: str | list[str] | dict[str, Positive] = "sigmoid"
    """A loss by name, a list of them, or a mapping from name to weight (MPO)."""
    ipo: bool | None = None
    """`true` is another spelling of pref_loss=ipo."""
    simpo_loss: bool | None = None
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
    """R-DPO: reward lost for each token that chosen is longer than rejected."""

    @model_validator(mode="after")
    def _spellings_agree(self) -> LossConfig:
        for switch, name in (("ipo", "ipo"), ("simpo_loss", "simpo")):
            given = "pref_loss" in self.model_fields_set
            if getattr(self, switch) and given and self.pref_loss not in (name, [name]):
                raise ValueError(f"{switch}: true contradicts pref_loss: {self.pref_loss}; keep one")
        if self.ipo and self.simpo_loss:
            raise ValueError("ipo and simpo_loss are both true; keep one")
        if "f_alpha_divergence_coef" in self.model_fields_set and self.f_divergence_type != "alpha_divergence":
            raise ValueError("f_alpha_divergence_coef only acts with f_divergence_type=alpha_divergence")
        return self

    @property
    def loss_weights(self) -> dict[str, float]:
        """Loss names with their weights, every accepted spelling resolved."""
        if self.ipo:
            names: dict[str, float] = {"ipo": 1.0}
        elif self.simpo_loss:
            names = {"simpo": 1.0}
        elif isinstance(self.pref_loss, str):
            names = {self.pref_loss: 1.0}
        elif isinstance(self.pref_loss, list):
            names = dict.fromkeys(self.pref_loss, 1.0)
        else:
            names = dict(self.pref_loss)
        return {self._normalised_name(name): weight for name, weight in names.items()}

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
    seed: Annotated[int, Field(ge=0)] = 42
    output_dir: str = "./output"
    """Run directory: checkpoints, stores, the final model."""
    logging_dir: str | None = None
    """Metric logs; `output_dir`/logs when absent."""
    max_steps: PositiveInt | None = None
    num_train_epochs: Positive | None = None
    """Fractions are fine. With max_steps as well, whichever ends first; with neither, one epoch."""
    save_steps: Annotated[int, Field(ge=0)] = 100
    """0 saves the final step only."""
    eval_steps: Annotated[int, Field(ge=0)] = 0
    """0 evaluates at the end only."""
    eval_on_start: bool = False
    """Evaluate before the first step as well."""
    logging_steps: PositiveInt = 1
    resume_from_checkpoint: Literal[False] | str = False
    """`false`, the path of a checkpoint, or `auto`."""
    save_total_limit: PositiveInt = 3
    """How many of the newest checkpoints stay; the best stays as well."""
    metric_for_best: str = "eval/loss"
    greater_is_better: bool = False
    max_skipped_steps: PositiveInt = 5
    """Stop after so many steps in a row with a non-finite loss or gradient."""

    pretrain: str | None = None
    """The model that policy and reference start from."""
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
        return False if value in (None, "false", "False", "") else value

    @property
    def policy_path(self) -> str | None:
        return self.actor_train.model_args.model_name_or_path or self.pretrain

    @property
    def reference_path(self) -> str | None:
        return self.reference.model_args.model_name_or_path or self.pretrain or self.policy_path

    @property
    def uses_lora(self) -> bool:
        return self.actor_train.model_args.lora_rank is not None
