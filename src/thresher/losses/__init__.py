"""Losses: pure functions of logps, one file each, by name. Importing this package registers all of them."""

from thresher.losses.aot import AOT
from thresher.losses.aot_unpaired import AOTUnpaired
from thresher.losses.apo_down import APODown
from thresher.losses.apo_zero import APOZero
from thresher.losses.bco_pair import BCOPair
from thresher.losses.cpo import CPO
from thresher.losses.discopop import DiscoPOP
from thresher.losses.exo_pair import EXOPair
from thresher.losses.hinge import Hinge
from thresher.losses.ipo import IPO
from thresher.losses.ipo_sum import IPOSum
from thresher.losses.metrics import MetricSum, merge_metrics
from thresher.losses.nca_pair import NCAPair
from thresher.losses.objective import Objective, ObjectiveOutput
from thresher.losses.orpo import ORPO
from thresher.losses.pairs import PairLogps, ResponseLogps, SidesLogps, concat_logps, concat_pairs, segment_sums
from thresher.losses.protocol import Loss, StatefulLoss
from thresher.losses.registry import (
    LossRow,
    describe,
    knob_defaults,
    loss_class,
    loss_names,
    make_loss,
    make_losses,
)
from thresher.losses.robust import Robust
from thresher.losses.scores import PairScores, score_pairs
from thresher.losses.sft import SFT
from thresher.losses.sigmoid import Sigmoid
from thresher.losses.sigmoid_norm import SigmoidNorm
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
    "DiscoPOP",
    "EXOPair",
    "Hinge",
    "IPOSum",
    "Loss",
    "LossRow",
    "MetricSum",
    "NCAPair",
    "Objective",
    "ObjectiveOutput",
    "PairLogps",
    "PairScores",
    "ResponseLogps",
    "Robust",
    "SPPOHard",
    "SidesLogps",
    "Sigmoid",
    "SigmoidNorm",
    "SimPO",
    "StatefulLoss",
    "concat_logps",
    "concat_pairs",
    "describe",
    "knob_defaults",
    "loss_class",
    "loss_names",
    "make_loss",
    "make_losses",
    "merge_metrics",
    "score_pairs",
    "segment_sums",
]
