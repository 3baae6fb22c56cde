"""The counts of `thresher plan --simulate`, beside what the formulas give, as tables or as JSON."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich import filesize
from rich.table import Table

from thresher.plan.traffic import AXES_OF_MESSAGES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thresher.plan.simulate.run import SimulatedRank


def simulation_table(ranks: Sequence[SimulatedRank]) -> Table:
    """Counted and computed figures of one step, side by side."""
    table = Table()
    table.add_column("of the simulated step")
    for rank in ranks:
        table.add_column(f"rank {rank.counted.rank}, counted", justify="right")
        table.add_column("by formula", justify="right")
    table.add_row("peak memory", *_pairs(ranks, lambda r: (r.counted.peak, r.memory.total)))
    table.add_row(
        "held between steps", *_pairs(ranks, lambda r: (r.counted.held, r.memory.weights + r.memory.optimizer))
    )
    for axis in AXES_OF_MESSAGES:
        if any(axis in rank.wire_bytes for rank in ranks):
            table.add_row(f"sent, {axis}", *_pairs(ranks, lambda r, axis=axis: r.wire_bytes.get(axis, (0, 0))))
    table.add_section()
    table.add_row("collectives on the device", *_counts(ranks, lambda r: _calls(r, on_host=False)))
    table.add_row("collectives on the host", *_counts(ranks, lambda r: _calls(r, on_host=True)))
    table.add_row("operations on the device", *_counts(ranks, lambda r: r.counted.operations))
    table.add_row("TFLOP in matrix products", *_counts(ranks, lambda r: sum(r.counted.flops.values()) / 1e12))
    table.add_row("waits of the host for the device", *_counts(ranks, lambda r: sum(r.counted.reads.values())))
    return table


def _pairs(ranks: Sequence[SimulatedRank], figures: Any) -> list[str]:
    return [filesize.decimal(round(size)) for rank in ranks for size in figures(rank)]


def _counts(ranks: Sequence[SimulatedRank], figure: Any) -> list[str]:
    values = [figure(rank) for rank in ranks]
    return [text for value in values for text in (f"{value:,.2f}" if isinstance(value, float) else f"{value:,}", "")]


def _calls(rank: SimulatedRank, *, on_host: bool) -> int:
    return sum(each.calls for each in rank.counted.collectives if each.on_host == on_host)


def wait_lines(ranks: Sequence[SimulatedRank]) -> list[str]:
    """Where the host waits for the device, most often first."""
    waits: Counter[str] = Counter()
    for rank in ranks:
        waits |= Counter(rank.counted.reads)
    return [f"  {count:>4} x {line}" for line, count in waits.most_common()]


def simulation_json(ranks: Sequence[SimulatedRank]) -> list[dict[str, Any]]:
    return [
        {
            "stage": rank.stage,
            **asdict(rank.counted),
            "by_formula": {"peak": rank.memory.total, "wire_bytes": {a: f for a, (_, f) in rank.wire_bytes.items()}},
            "wire_bytes": {axis: counted for axis, (counted, _) in rank.wire_bytes.items()},
        }
        for rank in ranks
    ]
