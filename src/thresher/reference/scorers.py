"""Who says what the reference thinks of a pair: a live model, the adapter's base, or a table scored in advance."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from thresher.data.batch import PairBatch
from thresher.losses.pairs import ResponseLogps, SidesLogps, concat_logps


@dataclass(frozen=True)
class LiveReference:
    """Score at the moment of need: a frozen model, or the policy with its adapter off."""

    score: Callable[[PairBatch], SidesLogps]
    device: torch.device
    seconds_per_pair: float = 0.0

    def logps(self, batch: PairBatch) -> SidesLogps:
        return _to(self.score(batch), self.device)


class PairSource(Protocol):
    """What a table needs of a store."""

    def __len__(self) -> int: ...

    def read(self, ids: npt.NDArray[np.int64]) -> PairBatch: ...


@dataclass
class PrecomputedReference:
    """Logps scored before training, in blocks of neighbouring rows.

    A pair's logps depend on its block alone, not on which pairs a run visits, so that a resumed run sees the same bits.
    """

    pairs_per_block: int
    device: torch.device
    seconds_per_pair: float = 0.0
    _blocks: dict[int, SidesLogps] = field(default_factory=dict)

    def fill(
        self,
        source: PairSource,
        score: Callable[[PairBatch], SidesLogps],
        pair_ids: npt.NDArray[np.int64],
        *,
        num_visits: int,
        advance: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Score every block that holds one of `pair_ids`; `num_visits` spreads the cost over the run's pairs."""
        started = time.perf_counter()
        blocks = self.blocks_with(pair_ids)
        for done, block in enumerate(blocks, start=1):
            self.put(block, _to(score(source.read(self.pairs_of(block, source))), torch.device("cpu")))
            advance(done, len(blocks))
        self.seconds_per_pair = (time.perf_counter() - started) / max(1, num_visits)

    def blocks_with(self, pair_ids: npt.NDArray[np.int64]) -> list[int]:
        """Number the blocks that hold some of these pairs."""
        blocks: list[int] = np.unique(pair_ids // self.pairs_per_block).tolist()
        return blocks

    def pairs_of(self, block: int, source: PairSource) -> npt.NDArray[np.int64]:
        first = block * self.pairs_per_block
        return np.arange(first, min(first + self.pairs_per_block, len(source)), dtype=np.int64)

    def put(self, block: int, sides: SidesLogps) -> None:
        """Keep the logps of a block's pairs, scored here or elsewhere."""
        self._blocks[block] = sides

    def logps(self, batch: PairBatch) -> SidesLogps:
        """Look a micro-batch up."""
        sides = [self._pair(int(i)) for i in batch.pair_ids]
        joined = SidesLogps(concat_logps([s.chosen for s in sides]), concat_logps([s.rejected for s in sides]))
        return _to(joined, self.device)

    def _pair(self, pair_id: int) -> SidesLogps:
        block, index = divmod(pair_id, self.pairs_per_block)
        sides = self._blocks[block]
        return SidesLogps(_slice(sides.chosen, index), _slice(sides.rejected, index))


def weights_digest(weights: Mapping[str, Tensor]) -> str:
    """Identify a model by its weights, not by its name."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _slice(side: ResponseLogps, index: int) -> ResponseLogps:
    start = int(side.lengths[:index].sum())
    stop = start + int(side.lengths[index])
    return ResponseLogps(side.values[start:stop], side.lengths[index : index + 1])


def _to(sides: SidesLogps, device: torch.device) -> SidesLogps:
    return SidesLogps(
        *(ResponseLogps(s.values.to(device), s.lengths.to(device)) for s in (sides.chosen, sides.rejected))
    )
