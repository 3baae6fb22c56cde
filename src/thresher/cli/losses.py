"""`thresher losses`: which losses there are, with their knobs and papers."""

from rich.console import Console
from rich.table import Table


def losses() -> None:
    """List the losses with their knobs, defaults and papers."""
    Console().print(losses_table())


def losses_table() -> Table:
    """Build the table of all losses."""
    # torch comes with the losses and takes seconds to import; `thresher --help` must not wait for it.
    from thresher.losses import describe

    table = Table(title="Losses (pref_loss)", title_justify="left")
    for heading in ("loss", "knobs and defaults", "reference", "paper", "what it does"):
        table.add_column(heading, no_wrap=heading in ("loss", "knobs and defaults", "paper"))
    for row in describe():
        table.add_row(
            row.name,
            "\n".join(f"{knob}={default:g}" for knob, default in row.knobs.items()) or "-",
            "yes" if row.needs_reference else "no",
            row.paper,
            row.summary,
        )
    return table
