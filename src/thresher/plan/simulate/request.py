"""What a simulated rank gets, and what it counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

# mesh dimensions, and `step`: the norms and metrics that all ranks agree on
CountedDim = Literal["dp_shard", "dp_replicate", "tp", "cp", "ep", "pp", "step"]
Kind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "send", "receive"]


@dataclass(frozen=True)
class RankRequest:
    """A rank to simulate."""

    config: dict[str, Any]  # the values of a DPOConfig
    rank: int
    num_processes: int
    micro_batches: list[list[list[int]]]  # of one step; lengths (prompt, response 1, response 2, ...) of their examples
    pairs_per_step: int  # over all ranks
    reference: Literal["adapter", "copy"] | None  # how the policy's processes score it in each step, if they do
    memory: int  # of the device in bytes


@dataclass(frozen=True)
class CountedCollective:
    """Collectives of one kind in a group of `size` processes."""

    mesh_dim: CountedDim
    kind: Kind
    size: int
    calls: int
    payload: int  # bytes of the output of an all-gather, of the input of others
    on_host: bool

    @property
    def wire_bytes(self) -> float:
        """Bytes that the process sends, in ring collectives."""
        if self.kind in ("send", "receive"):
            return float(self.payload) if self.kind == "send" else 0.0
        return (2 if self.kind == "all_reduce" else 1) * (self.size - 1) / self.size * self.payload


@dataclass(frozen=True)
class RankResult:
    """Counts of one optimizer step. Bytes are on the device."""

    rank: int
    held: int  # weights and optimizer state, between steps
    peak: int
    collectives: list[CountedCollective]
    reads: dict[str, int]  # by file and line, how often the host waits for the device
    flops: dict[str, int]  # of matrix products by dtype
    operations: int
    seconds: float  # CPU time of the simulation itself
    resident: int  # and its memory

    @property
    def wire_bytes(self) -> dict[str, float]:
        """Bytes that the process sends along each mesh dimension, without the messages of a step."""
        sent: dict[str, float] = {}
        for each in self.collectives:
            if each.mesh_dim != "step":
                sent[each.mesh_dim] = sent.get(each.mesh_dim, 0.0) + each.wire_bytes
        return sent

    @classmethod
    def parse(cls, values: dict[str, Any]) -> RankResult:
        return cls(**{**values, "collectives": [CountedCollective(**each) for each in values["collectives"]]})
