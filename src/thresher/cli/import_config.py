"""`thresher import`: writes our config from another trainer's config."""

from __future__ import annotations

import logging
import textwrap
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
_KEY_WIDTH = 31
_BOTH_WIDTHS = 73  # two columns in 80 characters


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
            help="trl, trl-kto, trl-reward, handbook, llama-factory, axolotl, ms-swift, open-instruct, nemo-rl, roll "
            "or colossalchat; default: recognized by its keys.",
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
        raise UserError(f"{output} exists; remove it or name a different file")
    translation, text = convert(path, dialect)
    shown = [entry for entry in translation.entries if show_all or entry.outcome in _DIFFERENT]
    if shown:
        console.print(entries_table(translation.dialect.title, shown))
    neutral = [entry.key for entry in translation.entries if entry.outcome == "changes nothing here"]
    if neutral and not show_all:
        logger.info("%s", _wrap(f"not translated, because they change nothing here: {', '.join(neutral)}"))
    others = [entry for entry in translation.entries if entry.outcome not in (*_DIFFERENT, "changes nothing here")]
    if others and not show_all:
        defaults = sum(entry.is_default for entry in others)
        keys = len(others) - defaults
        count = f"{keys} other key{'s' * (keys != 1)}"
        if defaults:
            count += f" and {defaults} default{'s' * (defaults != 1)} of {translation.dialect.title}"
        logger.info("%s", _wrap(f"{count} mean the same here or have no effect; --all shows them"))
    lost = translation.lost
    if lost and not force:
        names = ", ".join(entry.key for entry in lost)
        why = "changes the training and has" if len(lost) == 1 else "change the training and have"
        message = f"no config was written: {names} {why} no equivalent; --force writes it anyway"
        logger.error("%s", _wrap(message, indent=len("error: ")))
        raise typer.Exit(1)
    if output is None:
        typer.echo(text, nl=False)
    else:
        output.write_text(text, encoding="utf-8")
        logger.info("wrote %s; check it with: thresher check %s", output, output)


def _wrap(text: str, indent: int = 0) -> str:
    """Break a message between words; a terminal would break it within a key."""
    from thresher.cli.terminal import console

    lines = textwrap.wrap(
        text, console.width, initial_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(lines)[indent:]


def entries_table(title: str, shown: Sequence[Entry]) -> Table:
    """Build the table of keys, grouped by how they were handled; keys that change the training come first."""
    from thresher.importers.convert import shown_value
    from thresher.importers.translation import OUTCOMES

    groups = {"changes the training": [entry for entry in shown if entry.is_lost]}
    for outcome in sorted(OUTCOMES, key=lambda each: each not in _DIFFERENT):
        groups[outcome] = [entry for entry in shown if entry.outcome == outcome and not entry.is_lost]
    keys = {entry.key: escape_control_chars(fold_at_dots(f"{entry.key}:", _KEY_WIDTH)) for entry in shown}
    table = Table(title=f"config of {title}", title_justify="left")
    # as wide as the longest key, so that only values and notes are broken
    width = max(_KEY_WIDTH, *(len(line) for key in keys.values() for line in key.split("\n")))
    table.add_column(title, overflow="fold", width=width)
    table.add_column("thresher", overflow="fold")
    for heading, entries in groups.items():
        if entries:
            table.add_section()
            table.add_row(f"[bold]{heading}[/]")
        for entry in entries:
            value = f"{shown_value(entry)}{' (default)' if entry.is_default else ''}"
            targets = [fold_at_dots(target, _BOTH_WIDTHS - width) for target in entry.targets]
            here = [*targets, *(["; ".join(entry.notes)] if entry.notes else [])]
            cells = (f"{keys[entry.key]} {value}", escape_control_chars("\n".join(here)))
            table.add_row(*map(escape, cells), style="bold red" if entry.is_lost else None)
    return table


def fold_at_dots(key: str, width: int) -> str:
    """Break a long dotted key into lines after its dots."""
    lines = [""]
    for part in key.replace(".", ".\n").split("\n"):
        if lines[-1] and len(lines[-1]) + len(part) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)
