"""A step on replicas of a model with a weight that its forward does not read."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.support.engines.config_runs import world_of_pool
from tests.support.tiny_models import MIXED, tiny_model
from thresher.config.roles import TrainingArgs
from thresher.distributed.groups import DataParallelGroup
from thresher.engines.accumulate import MicroBatch
from thresher.engines.native.build import train_engine
from thresher.engines.native.parallelize import ParallelContext
from thresher.losses.objective import Objective
from thresher.losses.registry import make_losses
from thresher.models.layouts import PaddedLayout


def train_with_unused_weight() -> tuple[float, Tensor]:
    """Make a step with weight decay, of the same pairs on every rank; return zeros of its gradient, and the weight."""
    world, model = world_of_pool(), tiny_model("llama")
    model.unused = nn.Parameter(torch.ones(2, 3))
    dp_group = DataParallelGroup(world.rank, world.size, world.group)
    args = TrainingArgs(weight_decay=0.5, log_num_zeros_in_grad=True)
    policy = train_engine(model, PaddedLayout(pad_id=0), torch.float32, args, ParallelContext(dp_group=dp_group))
    objective = Objective(terms=((make_losses(["sft"], {})[0], 1.0),))
    num_pairs = len(MIXED) * world.size
    outcome = policy.train_step([MicroBatch(MIXED, None)], objective, num_pairs_in_step=num_pairs, learning_rate=0.1)
    return outcome.metrics["num_zeros_in_grad"].mean, model.unused.detach()
