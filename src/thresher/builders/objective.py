"""The objective and the learning-rate schedule; settings without effect are rejected."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

from thresher.config import DPOConfig
from thresher.config.loss import LOSS_PARAMETERS
from thresher.data.prepare.report import report_of
from thresher.data.rows.formats import FORMATS
from thresher.data.store.joined import Stores
from thresher.data.store.reader import ExampleStore
from thresher.errors import UserError
from thresher.losses.objective import Objective
from thresher.losses.registry import loss_class, make_losses, parameter_defaults
from thresher.training.lr_schedule import LRSchedule

logger = logging.getLogger(__name__)

_WITHOUT_LABEL = {each.name for each in FORMATS if each.kind == "labels" and not each.is_labelled}
_LENGTH_NORMALIZED = {"sigmoid_norm", "ipo", "simpo", "alphapo", "orpo", "sft"}


def build_objective(config: DPOConfig) -> Objective:
    """Pass each given parameter to the losses that have it."""
    weights = config.loss_weights
    parameters = config.given_parameters
    if trains_rewards(config):
        if config.samples is not None:
            raise UserError("samples is not possible with bradley_terry: a reward model writes no answers; remove it")
        if not config.apply_loss_mask:
            raise UserError("apply_loss_mask has no effect on bradley_terry, which scores whole responses; remove it")
        if config.length_normalization is not None:
            raise UserError(
                "length_normalization has no effect on bradley_terry, which has no log-probabilities; remove it"
            )
    # gamma is SimPO's and AlphaPO's target margin; other losses get the same term in their logit
    has_gamma = any("gamma" in parameter_defaults(name) for name in weights)
    margin = 0.0 if has_gamma else parameters.pop("gamma", 0.0)
    losses = make_losses(list(weights), parameters, config.term_parameters)
    normalizes = config.length_normalization
    conflicting = [name for name in weights if (name in _LENGTH_NORMALIZED) != normalizes]
    if normalizes is not None and conflicting:
        raise UserError(
            f"length_normalization: {str(normalizes).lower()} conflicts with {', '.join(conflicting)}: "
            f"{', '.join(sorted(_LENGTH_NORMALIZED))} average logps over length, all other losses sum them; choose "
            "a different loss or remove length_normalization"
        )
    return Objective(
        terms=tuple(zip(losses, weights.values(), strict=True)),
        f_divergence=config.f_divergence_type,
        f_alpha_divergence_coef=config.f_alpha_divergence_coef,
        ld_alpha=1.0 if config.ld_alpha is None else config.ld_alpha,
        length_penalty=config.length_penalty or 0.0,
        rpo_alpha=config.rpo_alpha or 0.0,
        clamp_log_ratio=config.clamp_log_ratio,
        wpo=config.use_wpo,
        margin=margin,
        measures_entropy=config.health != "off" and not trains_rewards(config),
        comparisons=config.comparisons,
        reference_free=config.reference.mode == "none" and any(loss.needs_reference for loss in losses),
    )


def trains_rewards(config: DPOConfig) -> bool:
    """Whether the policy is a reward model; false with an unknown loss, which `build_objective` reports."""
    with suppress(UserError):
        return any(loss_class(name).trains_rewards for name in config.loss_weights)
    return False


def scores_steps_twice(config: DPOConfig) -> bool:
    """Whether a loss needs the logps of a whole step before its backward; false with an unknown loss."""
    with suppress(UserError):
        losses = [loss_class(name) for name in config.loss_weights]
        return any(each.couples_pairs and not each.reads_mismatched for each in losses)
    return False


def for_data(objective: Objective, train: Stores, validation: Stores | None = None) -> Objective:
    """Return the objective as it reads this data; UserError if it cannot."""
    if validation is not None and (train.kind == "labels") != (validation.kind == "labels"):
        raise UserError(
            f"{train.path} has {train.unit}, but the validation data in {validation.path} has {validation.unit}; one "
            "loss cannot read both"
        )
    names = " + ".join(loss.name for loss, _ in objective.terms)
    reads_comparisons = train.kind == "lists" and any(loss.reads == "pairs" for loss, _ in objective.terms)
    if objective.comparisons != "all" and not reads_comparisons:
        what = "pairs" if train.kind == "pairs" else names
        raise UserError(f"comparisons={objective.comparisons} has no effect on {what}; remove it")
    parts = [part for stores in (train, validation) if stores is not None for part in stores.parts.values()]
    found, *_ = [as_read(objective, part) for part in parts]
    return found


def as_read(objective: Objective, store: ExampleStore) -> Objective:
    """Return the objective as it reads one store; UserError if it cannot."""
    names = " + ".join(loss.name for loss, _ in objective.terms)
    if store.kind == "labels":
        if objective.reads == "labels":
            _check_labels(names, store)
        return replace(objective, reads_labels=True)
    if objective.reads == "labels":
        raise UserError(
            f"{names} reads single responses with a label, and {store.path} contains {store.kind}; use a loss on pairs "
            "or lists (`thresher losses` lists them), such as bco_pair or apo_zero, or data with a label per response"
        )
    if store.kind == "lists" and objective.couples_pairs:
        raise UserError(
            f"{names} compares all pairs of a step, which lists do not have; use a different loss, or pairs"
        )
    fitting = [loss.name for loss, _ in objective.terms if loss.reads_given_margin]
    if fitting and store.kind == "pairs" and "margin" not in store.columns_in_use:
        raise UserError(
            f"{fitting[0]} fits the differences of scores, and {store.path} has none; write them to a column `margin`, "
            "set actor_train.data_args.margin_from_scores=true for rows with score_chosen and score_rejected, or use "
            "scored lists"
        )
    if fitting and store.kind == "lists" and "margin" in store.columns_in_use:
        raise UserError(
            f"{fitting[0]} fits the differences of the scores of a list, and {store.path} has a column `margin` too, "
            "which has no effect; remove the column"
        )
    return objective


def _check_labels(names: str, store: ExampleStore) -> None:
    """Reject answers without a label, which all count as desirable."""
    for file in report_of(store).files:
        if file.shape in _WITHOUT_LABEL:
            unused = f" (it ignores {', '.join(file.unused_columns)})" if file.unused_columns else ""
            raise UserError(
                f"{names} needs a label per response, and {file.name} was read in format {file.shape}, which has "
                f"none{unused}; write true or false to a column `label`, or train with pref_loss=sft"
            )


def warn_about_labels(objective: Objective, train: Stores) -> None:
    """Warn if a loss on labels sees only one of them."""
    if not any(loss.reads == "labels" for loss, _ in objective.terms):
        return
    reports = [report_of(part) for part in train.parts.values()]
    desirable = sum(each.desirable for each in reports)
    if desirable in (0, sum(each.pairs_kept for each in reports)):
        logger.warning(
            "%s: every response is labelled %s, so the loss only makes responses %s likely; add rows with the other "
            "label",
            train.path,
            *(("desirable", "more") if desirable else ("undesirable", "less")),
        )


# modifiers that health rules advise
_ADVISED: Mapping[str, object] = {
    "rpo_alpha": 1.0,
    "length_penalty": 0.01,
    "ld_alpha": 0.5,
    "length_normalization": True,
    "pref_loss": "ipo",
}


def refused_settings(config: DPOConfig, train: Stores) -> frozenset[str]:
    """The settings that health rules advise and that the losses of a run, or its data, refuse."""
    known = {name for loss in config.loss_weights for name in parameter_defaults(loss)}
    refused = set(LOSS_PARAMETERS) - known
    for name, value in _ADVISED.items():
        try:
            for_data(build_objective(config.model_copy(update={name: value})), train)
        except UserError:
            refused.add(name)
    if trains_rewards(config):
        refused.add("pref_loss")  # a different loss would train a policy
    return frozenset(refused)


def build_schedule(config: DPOConfig, num_steps: int) -> LRSchedule:
    args = config.actor_train.training_args
    return LRSchedule(
        name=args.lr_scheduler_type,
        learning_rate=args.learning_rate,
        num_warmup_steps=args.num_warmup_steps(num_steps),
        num_steps=num_steps,
        min_lr_ratio=args.min_lr_ratio,
        power=args.lr_power,
    )
