"""A step on single labelled responses in fp64, on the ranks of a pool or in this process."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from tests.support.engines.config_runs import world_of_pool
from tests.support.tiny_models import VOCAB, tiny_model
from thresher.config.roles import TrainingArgs
from thresher.data.example import Example, ExampleBatch, Response
from thresher.distributed.groups import DataParallelGroup
from thresher.engines.accumulate import MicroBatch
from thresher.engines.native.build import infer_engine, train_engine
from thresher.engines.native.parallelize import ParallelContext
from thresher.losses import Objective, make_loss
from thresher.models.layouts import Layout, PackedLayout, PaddedLayout

LAYOUTS = {"shared": PackedLayout(True), "packed": PackedLayout(False), "padded": PaddedLayout(pad_id=0)}
KTO = Objective(((make_loss("kto", {"beta": 0.2, "desirable_weight": 1.3, "undesirable_weight": 0.9}), 1.0),))
LABELS = [1.0, 0.0, 0.0, 1.0, 1.0, 0.0]


def tokens(draw: np.random.Generator, most: int) -> np.ndarray:
    return draw.integers(3, VOCAB, draw.integers(1, most + 1)).astype(np.int32)


def with_mismatched_answers() -> list[Example]:
    """Labelled examples, each with the answer of the one before it."""
    draw = np.random.default_rng(0)
    prompts, answers = [tokens(draw, 4) for _ in LABELS], [tokens(draw, 6) for _ in LABELS]
    return [
        Example(prompt, (Response(answer, value=label), Response(answers[at - 1], value=0.0)))
        for at, (prompt, answer, label) in enumerate(zip(prompts, answers, LABELS, strict=True))
    ]


def models() -> tuple[PreTrainedModel, PreTrainedModel]:
    """Policy and reference, different weights."""
    return tiny_model("llama").double(), tiny_model("llama", seed=1).double()


def gradients(
    examples: Sequence[Example], objective: Objective, layout: Layout, split: Sequence[int]
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The step's gradient and metrics, with these micro-batches on each rank of the pool, or in this process."""
    world = world_of_pool()
    policy_model, reference_model = models()
    dp_group = DataParallelGroup(world.rank, world.size, world.group)
    training = TrainingArgs(learning_rate=1e-3)
    policy = train_engine(policy_model, layout, torch.float64, training, ParallelContext(dp_group))
    reference = infer_engine(reference_model, layout, torch.float64)
    micro_batches = []
    own = np.arange(world.rank, len(examples), world.size)
    for ids in np.split(own, np.cumsum(split)[:-1]):
        if len(ids):
            batch = ExampleBatch(ids, tuple(examples[at] for at in ids))
            micro_batches.append(MicroBatch(batch, reference.score(batch)))
    metrics, _, _ = policy.accumulate(micro_batches, objective, len(examples))
    found = {name: each.grad for name, each in policy.model.named_parameters() if each.grad is not None}
    if world.size > 1:
        for gradient in found.values():
            dist.all_reduce(gradient)
        metrics, _ = dp_group.all_reduce_metrics(metrics)
    return found, {name: metric.mean for name, metric in metrics.items()}


def kto_gradients(layout: str, split: Sequence[int]) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The gradient and the metrics of a step of KTO."""
    return gradients(with_mismatched_answers(), KTO, LAYOUTS[layout], split)
