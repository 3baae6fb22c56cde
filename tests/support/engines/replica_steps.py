"""Steps of replicas: the sums of their gradients, and the collectives of host memory."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor, nn

from tests.support.engines.config_runs import world_of_pool
from tests.support.engines.parity import (
    LOSSES_WITH_REFERENCE,
    Case,
    load_parallel,
    make_policy,
    make_reference,
    make_trainer,
)
from tests.support.tiny_models import MIXED, tiny_model
from thresher.config.roles import TrainingArgs
from thresher.distributed import replicas
from thresher.distributed.groups import DataParallelGroup, Group
from thresher.engines.accumulate import MicroBatch
from thresher.engines.native.build import train_engine
from thresher.engines.native.parallelize import ParallelContext
from thresher.losses.objective import Objective
from thresher.losses.registry import make_losses
from thresher.models.layouts import PaddedLayout
from thresher.models.optimizations.recompute import Recompute, recompute_activations

_ON_HOST = ("all_reduce", "all_gather_object", "gather_object", "broadcast_object")


def host_collectives_of_step(case: Case, policy_dir: Path, reference_dir: Path | None = None) -> list[str]:
    """Name the collectives of host memory in the second optimizer step."""
    reference = None
    if reference_dir is not None and case.loss in LOSSES_WITH_REFERENCE:
        reference = make_reference(case, *load_parallel(case, reference_dir)).score
    trainer = make_trainer(make_policy(case, *load_parallel(case, policy_dir)), reference, case)
    trainer.training_step()
    with host_collectives() as called:
        trainer.training_step()
    return called


@contextmanager
def host_collectives() -> Iterator[list[str]]:
    """List the calls of a group's methods for host memory, in a `with` block."""
    called: list[str] = []

    def counting(name: str):
        original = getattr(Group, name)

        def method(group: Group, *args, **options):
            called.extend([name] * (group.size > 1))
            return original(group, *args, **options)

        return method

    with mock.patch.multiple(Group, **{name: counting(name) for name in _ON_HOST}):
        yield called


def sums_of_step(
    counts: Sequence[int], elements_per_bucket: int, recompute: Recompute = "off", has_unused: bool = False
) -> tuple[list[str], dict[str, Tensor | None], dict[str, Tensor | None]]:
    """Make a step of `counts[rank]` micro-batches on each rank.

    Return where buckets start (`backward` or `finish`), and gradients by name: the step's, and the same micro-batches'
    summed after their backward.
    """
    world, model = world_of_pool(), tiny_model("llama")
    if has_unused:
        model.unused = nn.Parameter(torch.ones(2, 3))
    recompute_activations(model, recompute)
    dp_group = DataParallelGroup(world.rank, world.size, world.group)
    training = TrainingArgs(max_grad_norm=0.0)  # no clipping
    with mock.patch.object(replicas, "_BUCKET_ELEMENTS", elements_per_bucket):
        policy = train_engine(model, PaddedLayout(pad_id=0), torch.float32, training, ParallelContext(dp_group))
    objective = Objective(terms=((make_losses(["sft"], {})[0], 1.0),))
    micro_batches = [MicroBatch(MIXED, None)] * counts[world.rank]
    num_pairs = len(MIXED) * sum(counts)
    # alone: not summed
    policy.accumulate(micro_batches, objective, num_pairs)
    parameters = dict(model.named_parameters())
    expected = {name: copy.deepcopy(each.grad) for name, each in parameters.items()}
    held = world.all_gather_object({name for name, gradient in expected.items() if gradient is not None})
    for name, parameter in parameters.items():
        is_held = any(name in names for names in held)
        expected[name] = (
            (torch.zeros_like(parameter) if expected[name] is None else expected[name]) if is_held else None
        )
    with mock.patch.object(replicas, "_BUCKET_ELEMENTS", elements_per_bucket):
        replicas.all_reduce_bucketed([each for each in expected.values() if each is not None], world)
    policy.parameters.zero_grad()

    started: list[str] = []
    sums = policy.parameters.replicas
    begun, finish = sums._start, sums.finish
    where = "backward"

    def start() -> None:
        started.append(where)
        begun()

    def finishing() -> None:
        nonlocal where
        where = "finish"
        finish()

    sums._start, sums.finish = start, finishing
    found: dict[str, Tensor | None] = {}
    update = policy.parameters.optimizer.step

    def step() -> None:
        found.update({name: copy.deepcopy(each.grad) for name, each in parameters.items()})
        update()

    policy.parameters.optimizer.step = step
    policy.train_step(micro_batches, objective, num_pairs_in_step=num_pairs, learning_rate=0.0)
    return started, found, expected
