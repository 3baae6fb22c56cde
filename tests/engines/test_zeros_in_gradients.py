"""`num_zeros_in_grad`: the zeros of plain torch's gradient, each counted once over the ranks that shard the model."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.engines.parity import Case, train_parallel
from tests.support.engines.unused_weight import train_with_unused_weight
from tests.support.tiny_models import MIXED, VOCAB, tiny_model
from thresher.config.roles import TrainingArgs
from thresher.distributed.mesh import ParallelDims
from thresher.engines.accumulate import MicroBatch
from thresher.engines.native.build import train_engine
from thresher.losses.objective import Objective
from thresher.losses.registry import make_losses
from thresher.models.layouts import PaddedLayout


def test_one_process_counts_the_zeros_of_plain_torch():
    """The embeddings of tokens that are not in the batch have a gradient of 0."""
    model, plain = tiny_model("llama"), tiny_model("llama")
    losses = []
    for pair in MIXED.pairs:
        ids = torch.from_numpy(np.concatenate([pair.prompt_ids, pair.chosen.ids]))[None].long()
        logps = plain(input_ids=ids).logits.log_softmax(-1)[0, len(pair.prompt_ids) - 1 : -1]
        scored = torch.ones(len(pair.chosen.ids), dtype=torch.bool)
        if pair.chosen.mask is not None:
            scored = torch.from_numpy(pair.chosen.mask)
        targets = torch.from_numpy(pair.chosen.ids).long()
        losses.append(-logps.gather(1, targets[:, None])[scored].mean())
    torch.stack(losses).mean().backward()
    expected = sum(int((parameter.grad == 0).sum()) for parameter in plain.parameters())
    policy = train_engine(
        model, PaddedLayout(pad_id=0), torch.float32, TrainingArgs(learning_rate=1e-3, log_num_zeros_in_grad=True)
    )
    objective = Objective(terms=((make_losses(["sft"], {})[0], 1.0),))
    outcome = policy.train_step([MicroBatch(MIXED, None)], objective, num_pairs_in_step=3, learning_rate=1e-3)
    assert outcome.metrics["num_zeros_in_grad"].mean == expected
    assert expected > VOCAB


@pytest.mark.distributed
@pytest.mark.parametrize("sizes", [ParallelDims(dp_shard=2), ParallelDims(dp_replicate=2)], ids=["shards", "replicas"])
def test_ranks_count_each_zero_once(two_ranks, one_process, model_dirs, sizes):
    case = Case(sizes, counts_zeros=True)
    expected = [metrics["num_zeros_in_grad"] for metrics in one_process(case).metrics]
    for outcome in two_ranks.run(train_parallel, case, *model_dirs(case.family, case.num_layers)):
        assert [metrics["num_zeros_in_grad"] for metrics in outcome.metrics] == expected
    assert min(expected) > 0


@pytest.mark.distributed
def test_replicas_neither_count_nor_decay_an_unused_weight(two_ranks):
    """Its gradient is absent, not 0, as in one process; AdamW would apply weight decay to it."""
    zeros, weight = train_with_unused_weight()
    assert torch.equal(weight, torch.ones(2, 3))
    for zeros_of_ranks, weight_of_rank in two_ranks.run(train_with_unused_weight):
        assert zeros_of_ranks == zeros
        assert torch.equal(weight_of_rank, weight)
