"""Logps of ragged lists from reference workers."""

from __future__ import annotations

import numpy as np
import torch

from thresher.data.example import Example, ExampleBatch, Response
from thresher.losses.pairs import ExampleLogps, ResponseLogps
from thresher.runtime.ray import remote_reference
from thresher.runtime.ray.remote_reference import PrefetchingReference, pack_logps


def test_each_micro_batch_has_as_many_sides_as_its_longest_list(monkeypatch):
    counts = [2, 2, 4, 3]
    examples = [Example(np.zeros(1, np.int32), (Response(np.zeros(2, np.int32)),) * count) for count in counts]
    batches = [np.array([0, 1]), np.array([2]), np.array([3])]

    def logps(batch: ExampleBatch) -> ExampleLogps:
        lengths = [[2 * (side < len(each.responses)) for each in batch.pairs] for side in range(batch.num_sides)]
        return ExampleLogps(
            tuple(
                ResponseLogps(torch.full((sum(sizes),), float(side)), torch.tensor(sizes))
                for side, sizes in enumerate(lengths)
            )
        )

    micro_batches = [ExampleBatch(ids, tuple(examples[number] for number in ids)) for ids in batches]
    monkeypatch.setattr(remote_reference.ray, "get", lambda result: result)
    reference = PrefetchingReference(
        lambda _step: batches,
        lambda _step: pack_logps([logps(batch) for batch in micro_batches]),
        work_items=range(1),
        repeats=False,
        prefetch_depth=1,
        device=torch.device("cpu"),
    )
    for batch in micro_batches:
        found, expected = reference.logps(batch).sides, logps(batch).sides
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours.values, theirs.values)
            assert torch.equal(ours.lengths, theirs.lengths)
