"""Losses: pure functions of logps, found by name. Importing this package registers all of them."""

from thresher.losses import formulas, responses  # noqa: F401  # register the built-in losses
from thresher.losses.base import Loss
from thresher.losses.metrics import MetricSum, merge_metrics
from thresher.losses.objective import Objective, ObjectiveOutput
from thresher.losses.pairs import ExampleLogps, ObjectiveInputs, ResponseLogps, concat_pairs
from thresher.losses.registry import (
    LossRow,
    describe,
    loss_class,
    loss_names,
    make_loss,
    make_losses,
    parameter_defaults,
)
from thresher.losses.scores import ChosenRejected, PairScores, score_pairs

__all__ = [
    "ChosenRejected",
    "ExampleLogps",
    "Loss",
    "LossRow",
    "MetricSum",
    "Objective",
    "ObjectiveInputs",
    "ObjectiveOutput",
    "PairScores",
    "ResponseLogps",
    "concat_pairs",
    "describe",
    "loss_class",
    "loss_names",
    "make_loss",
    "make_losses",
    "merge_metrics",
    "parameter_defaults",
    "score_pairs",
]
