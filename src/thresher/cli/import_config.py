"""`thresher import`: writes our config from another trainer's config."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from thresher.errors import UserError
from thresher.redact import escape_control_chars

if TYPE_CHECKING:
    from thresher.importers.translation import Entry

logger = logging.getLogger(__name__)

# what a reader must know; the other outcomes are the same training
_DIFFERENT = ("different meaning", "no equivalent")
_KEY_WIDTH = 24  # four columns fit into 80 characters


def import_config(
    path: Annotated[
        Path, typer.Argument(metavar="FILE", help="Config file (YAML, JSON) or training script of another trainer.")
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="CONFIG", help="File to write; default: standard output.")
    ] = None,
    dialect: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="TRAINER",
            help="trl, handbook, llama-factory, axolotl, ms-swift, open-instruct, nemo-rl, roll or colossalchat; "
            "default: recognized by its keys.",
        ),
    ] = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Write the config even if a setting that changes the training has no equivalent."),
    ] = False,
    show_all: Annotated[
        bool, typer.Option("--all", help="Show every key, not only those that differ or have no equivalent.")
    ] = False,
) -> None:
    """Translate a config of another trainer, and report how its keys were handled."""
    from thresher.cli.terminal import console
    from thresher.config.load import check_yaml_size
    from thresher.importers.convert import convert

    check_yaml_size(path)
    if output is not None and output.exists():
        raise UserError(f"{output} exists; remove it or name another file")
    translation, text = convert(path, dialect)
    shown = [entry for entry in translation.entries if show_all or entry.outcome in _DIFFERENT]
    if shown:
        console.print(entries_table(translation.dialect.title, shown))
    neutral = [entry.key for entry in translation.entries if entry.outcome == "changes nothing here"]
    if neutral and not show_all:
        logger.info("not translated, because they change nothing here: %s", ", ".join(neutral))
    if others := len(translation.entries) - len(shown) - (0 if show_all else len(neutral)):
        logger.info("%d other keys mean the same here or have no effect; --all shows them", others)
    lost = translation.lost
    if lost and not force:
        names = ", ".join(entry.key for entry in lost)
        logger.error(
            "no config was written: %s changes the training and has no equivalent; --force writes it anyway", names
        )
        raise typer.Exit(1)
    if output is None:
        typer.echo(text, nl=False)
    else:
        output.write_text(text, encoding="utf-8")
        logger.info("wrote %s; check it with: thresher check %s", output, output)


def entries_table(title: str, shown: Sequence[Entry]) -> Table:
    """Build the table of keys, grouped by outcome; keys that stop the import come first in their group."""
    from thresher.importers.convert import shown_value
    from thresher.importers.translation import OUTCOMES

    table = Table(title=f"config of {title}", title_justify="left")
    for heading in (f"key of {title}", "value", "key here", "note"):
        table.add_column(heading, overflow="fold")
    for outcome in OUTCOMES:
        entries = sorted((each for each in shown if each.outcome == outcome), key=lambda each: not each.is_lost)
        if entries:
            table.add_section()
            table.add_row(f"[bold]{outcome}[/]")
        for entry in entries:
            value = f"{shown_value(entry)}{' (default)' if entry.is_default else ''}"
            style = "bold red" if entry.is_lost else None
            targets = "\n".join(fold_at_dots(target) for target in entry.targets)
            cells = (fold_at_dots(entry.key), value, targets, "; ".join(entry.notes))
            table.add_row(*(escape(escape_control_chars(cell)) if cell else "" for cell in cells), style=style)
    return table


def fold_at_dots(key: str) -> str:
    """Break a long dotted key into lines after its dots."""
    lines = [""]
    for part in key.replace(".", ".\n").split("\n"):
        if lines[-1] and len(lines[-1]) + len(part) > _KEY_WIDTH:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)
