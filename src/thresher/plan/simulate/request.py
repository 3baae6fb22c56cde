"""What a simulated rank gets, and what it counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # torch is imported after the device guard is loaded
    from thresher.plan.traffic import Axis, Kind


@dataclass(frozen=True)
class RankRequest:
    """config: the values of a DPOConfig. micro_batches: of one step; lengths (prompt, chosen, rejected) of their pairs.

    pairs_per_step: over all ranks. reference: how the policy's processes score it in each step, if they do.
    memory: of the device in bytes.
    """

    config: dict[str, Any]
    rank: int
    num_processes: int
    micro_batches: list[list[list[int]]]
    pairs_per_step: int
    reference: Literal["adapter", "copy"] | None
    memory: int


@dataclass(frozen=True)
class CountedCollective:
    """Collectives of one kind in a group of `size` processes; axis: `step` if the payload is on the host."""

    axis: Axis
    kind: Kind
    size: int
    calls: int
    payload: int
    on_host: bool


@dataclass(frozen=True)
class RankResult:
    """Counts of one optimizer step. Bytes are those of the device.

    held: weights and optimizer state, between steps. reads: by file and line, how often the host waits for the device.
    flops: of matrix products by dtype. traffic: bytes that other operations read and write, in layers, head, copies of
    FSDP2 and optimizer. seconds, resident: CPU time and memory of the simulation itself.
    """

    rank: int
    held: int
    peak: int
    collectives: list[CountedCollective]
    reads: dict[str, int]
    flops: dict[str, int]
    traffic: dict[str, int]
    operations: int
    seconds: float
    resident: int

    @classmethod
    def parse(cls, values: dict[str, Any]) -> RankResult:
        return cls(**{**values, "collectives": [CountedCollective(**each) for each in values["collectives"]]})
