"""Losses: pure functions of logps, found by name. Importing this package registers all of them.

A loss is in the file with its name; variants of one method share a file (`ipo_sum` is in ipo.py).
"""

from thresher.losses.aot import AOT, AOTUnpaired
from thresher.losses.apo import APODown, APOZero
from thresher.losses.base import Loss
from thresher.losses.bco_pair import BCOPair
from thresher.losses.cpo import CPO
from thresher.losses.discopop import DiscoPOP
from thresher.losses.exo_pair import EXOPair
from thresher.losses.hinge import Hinge
from thresher.losses.ipo import IPO, IPOSum
from thresher.losses.metrics import MetricSum, merge_metrics
from thresher.losses.nca_pair import NCAPair
from thresher.losses.objective import Objective, ObjectiveOutput
from thresher.losses.orpo import ORPO
from thresher.losses.pairs import ChosenRejectedLogps, ObjectiveInputs, ResponseLogps, concat_pairs
from thresher.losses.registry import (
    LossRow,
    describe,
    loss_class,
    loss_names,
    make_loss,
    make_losses,
    parameter_defaults,
)
from thresher.losses.robust import Robust
from thresher.losses.scores import ChosenRejected, PairScores, score_pairs
from thresher.losses.sft import SFT
from thresher.losses.sigmoid import Sigmoid, SigmoidNorm
from thresher.losses.simpo import SimPO
from thresher.losses.sppo_hard import SPPOHard

__all__ = [
    "AOT",
    "CPO",
    "IPO",
    "ORPO",
    "SFT",
    "AOTUnpaired",
    "APODown",
    "APOZero",
    "BCOPair",
    "ChosenRejected",
    "ChosenRejectedLogps",
    "DiscoPOP",
    "EXOPair",
    "Hinge",
    "IPOSum",
    "Loss",
    "LossRow",
    "MetricSum",
    "NCAPair",
    "Objective",
    "ObjectiveInputs",
    "ObjectiveOutput",
    "PairScores",
    "ResponseLogps",
    "Robust",
    "SPPOHard",
    "Sigmoid",
    "SigmoidNorm",
    "SimPO",
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
