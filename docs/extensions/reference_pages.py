"""Reference pages made from the code while the site is built: the command line, the losses, the Python API.

A page asks for one of them with the comment `<!-- generated: cli -->`. Names of the API that `thresher` itself does not
export are listed in `API`, by title and module.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import typer
from sphinx.application import Sphinx

import thresher
from thresher.cli import app as command_line
from thresher.losses import describe, loss_class

API: dict[str, dict[str, list[str]]] = {
    "Runs": {"thresher": thresher.__all__},
    "Losses": {
        "thresher.losses": [
            "make_loss",
            "loss_names",
            "describe",
            "LossRow",
            "Loss",
            "PairScores",
            "ObjectiveInputs",
            "Objective",
            "ObjectiveOutput",
        ]
    },
    "Data": {
        "thresher.data.prepare.prepare": ["prepare"],
        "thresher.data.store": ["PairStore"],
        "thresher.data.pair": ["Pair"],
    },
    "Trackers": {
        "thresher.observability.trackers.tracker": ["Tracker", "RunInfo"],
        "thresher.observability.trackers.jsonl": ["read_metrics"],
    },
    "Ray": {
        "thresher.runtime.ray.cluster": ["ResourceManager", "Cluster"],
        "thresher.runtime.ray.workers": ["ActorWorker"],
    },
}


def render_cli() -> str:
    """Describe every command, with its arguments and options, in Markdown."""
    root = typer.main.get_command(command_line)
    return "\n".join(_command_lines(root, "thresher"))


def _command_lines(command: Any, name: str) -> Iterator[str]:
    """Yield the lines of a command and of those below it; Typer brings its own copy of click's classes."""
    commands = getattr(command, "commands", {})
    context = command.context_class(command, info_name=name)
    if not commands:
        yield from (f"## `{name}`", "", command.help, "")
        yield from ("```text", command.get_usage(context).removeprefix("Usage: "), "```", "")
        for kind in ("argument", "option"):
            params = [param for param in command.params if param.param_type_name == kind and not param.hidden]
            yield from _table(kind, [_describe_parameter(param, context) for param in params])
    for word, inner in commands.items():
        yield from _command_lines(inner, f"{name} {word}")


def _describe_parameter(param: Any, context: Any) -> tuple[str, str, str]:
    """Split the line that --help prints into spelling, default and meaning."""
    spelled, meaning = param.get_help_record(context)
    meaning, _, extra = meaning.partition("  [")
    extra = extra.removesuffix("]")
    default = f"`{extra.removeprefix('default: ')}`" if extra.startswith("default: ") else extra
    return f"`{spelled}`", default, meaning


def _table(kind: str, rows: list[tuple[str, str, str]]) -> list[str]:
    if not rows:
        return []
    if any(default for _, default, _ in rows):
        return [_row(kind, "default", "meaning"), "|---|---|---|", *(_row(*row) for row in rows), ""]
    return [_row(kind, "meaning"), "|---|---|", *(_row(spelled, meaning) for spelled, _, meaning in rows), ""]


def render_losses() -> str:
    """List the losses in a table, then each with its formula."""
    lines = [_row("loss", "parameters", "reference", "paper", "summary"), "|---|---|---|---|---|"]
    sections = []
    for loss in describe():
        defaults = ", ".join(f"`{name}` {default:g}" for name, default in loss.parameters.items())
        paper = (
            f"[{loss.paper}](https://arxiv.org/abs/{loss.paper})"
            if re.fullmatch(r"\d+\.\d+", loss.paper)
            else loss.paper
        )
        reference = "yes" if loss.needs_reference else "no"
        lines.append(_row(f"[`{loss.name}`](#{loss.name})", defaults or "none", reference, paper, loss.summary))
        text = (loss_class(loss.name).__doc__ or "").partition("\n")[2]
        formula = "\n".join(line.strip() for line in text.strip().splitlines())
        sections += [f"## {loss.name}", "", loss.summary, "", "```text", formula, "```", ""]
    return "\n".join([*lines, "", *sections])


def render_api() -> str:
    """Ask autodoc for every name of the public API, by section."""
    lines = []
    for title, modules in API.items():
        lines += [f"## {title}", "", "```{eval-rst}"]
        for module, names in modules.items():
            for name in names:
                lines += _autodoc(module, name)
        lines += ["```", ""]
    return "\n".join(lines)


def _autodoc(module: str, name: str) -> list[str]:
    value = getattr(__import__(module, fromlist=[name]), name)
    kind = "class" if isinstance(value, type) else "function"
    if isinstance(value, type) and issubclass(value, Exception):
        kind = "exception"
    # the fields of a config are the config reference; one table is enough
    is_config = hasattr(value, "model_fields")
    return [f".. auto{kind}:: {module}.{name}", *(["   :no-members:"] if is_config else []), ""]


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


_PAGES = {"cli": render_cli, "losses": render_losses, "api": render_api}
_MARK = re.compile(r"<!-- generated: (\w+) -->")


def _fill_in(_app: Sphinx, _docname: str, source: list[str]) -> None:
    source[0] = _MARK.sub(lambda match: _PAGES[match[1]](), source[0])


def plain_to_rst(text: str) -> str:
    """Write a plain docstring as reStructuredText: `code` is code, and nothing else is markup."""
    parts = re.split(r"(`+[^`]+`+)", text)
    for index, part in enumerate(parts):
        if index % 2:
            parts[index] = f"``{part.strip('`')}``"
        else:
            parts[index] = re.sub(r"[*|\\]|_(?!\w)", lambda match: f"\\{match[0]}", part)
    return "".join(parts)


def _write_rst(_app: Sphinx, _what: str, _name: str, _value: object, _options: object, lines: list[str]) -> None:
    lines[:] = plain_to_rst("\n".join(lines)).split("\n")


def _shorten_signature(
    _app: Sphinx, _what: str, _name: str, value: object, _options: object, *_signature: str
) -> object:
    """Leave out the fields of a config, which have a page, and the signature that every protocol gets."""
    is_config = isinstance(value, type) and hasattr(value, "model_fields")
    return ("", "") if is_config or getattr(value, "_is_protocol", False) else None


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", _fill_in)
    app.connect("autodoc-process-signature", _shorten_signature)
    app.connect("autodoc-process-docstring", _write_rst)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
