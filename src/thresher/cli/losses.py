"""`thresher losses`: lists the losses with their parameters and papers."""

from rich.console import Console
from rich.table import Table


def losses() -> None:
    """List the losses with their parameters, defaults and papers."""
    Console().print(losses_table())


def losses_table() -> Table:
    """Build the table of all losses."""
    # The losses import torch, which takes seconds; `thresher --help` must not wait for it.
    from thresher.losses import describe

    table = Table(title="Losses (pref_loss)", title_justify="left")
    for heading in ("loss", "parameters and defaults", "reference", "paper", "what it does"):
        table.add_column(heading, no_wrap=heading in ("loss", "parameters and defaults", "paper"))
    for row in describe():
        table.add_row(
            row.name,
            "\n".join(f"{parameter}={default:g}" for parameter, default in row.parameters.items()) or "-",
            "yes" if row.needs_reference else "no",
            row.paper,
            row.summary,
        )
    return table
