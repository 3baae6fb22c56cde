"""`thresher losses`: lists the losses with their parameters and papers."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table


def losses() -> None:
    """List the losses with their parameters, defaults and papers."""
    Console().print(losses_table())


def losses_table() -> Table:
    """Build the table of all losses."""
    # The losses import torch, which takes seconds; `thresher --help` must not wait for it.
    from thresher.losses import describe

    table = Table(title="Losses (pref_loss)", title_justify="left", show_lines=True)
    for heading in ("loss", "reference", "paper", "summary; parameters with defaults"):
        table.add_column(heading, no_wrap=heading in ("loss", "paper"))
    for row in describe():
        parameters = ", ".join(f"{parameter}={default:g}" for parameter, default in row.parameters.items())
        # one column for both texts, so neither is squeezed on a narrow terminal
        text = f"{row.summary}\n{parameters}" if parameters else row.summary
        table.add_row(row.name, "yes" if row.needs_reference else "no", row.paper, text)
    return table
