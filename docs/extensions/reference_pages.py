"""Reference pages made from the code while the site is built: the command line, losses, recipes, the Python API.

A page asks for one of them with the comment `<!-- generated: cli -->`. Names of the API that `thresher` itself does not
export are listed in `API`, by title and module.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from docutils import nodes
from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import config_doc
from loss_formulas import FORMULAS, PAPERS

import thresher
from thresher.builders.objective import build_objective
from thresher.cli import app as command_line
from thresher.config import load_config
from thresher.losses import describe, make_loss
from thresher.recipes.catalog import DIRECTORY, all_recipes

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
        "thresher.data.store": ["ExampleStore"],
        "thresher.data.example": ["Example"],
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


# a command of each kind that a reader can adapt; tests/docs/test_reference_pages.py checks commands and options
EXAMPLES = {
    "thresher demo": "thresher demo --output my-demo",
    "thresher check": "thresher check dpo.yaml",
    "thresher plan": "thresher plan dpo.yaml --gpu h100 --nodes 2 --gpus-per-node 8",
    "thresher prepare": "thresher prepare train.jsonl --model path/to/model --output store",
    "thresher inspect": "thresher inspect store --model path/to/model --pair 0",
    "thresher precompute-reference": "thresher precompute-reference dpo.yaml",
    "thresher train": "thresher train dpo.yaml beta=0.2 output_dir=output/beta-0.2",
    "thresher sweep": "thresher sweep dpo.yaml beta=0.05,0.1,0.2 seed=1,2",
    "thresher submit": "thresher submit dpo.yaml --address http://127.0.0.1:8265",
    "thresher report": "thresher report output/first output/second --output compare.html",
    "thresher export": "thresher export output/first --output my-model --best",
    "thresher eval": "thresher eval output/first --tasks ifeval,gsm8k batch_size=auto",
    "thresher answers": "thresher answers output/first alpaca_eval.json --output answers",
    "thresher losses": "thresher losses",
    "thresher recipes ls": "thresher recipes ls simpo",
    "thresher recipes show": "thresher recipes show zephyr-7b-full",
    "thresher recipes copy": "thresher recipes copy zephyr-7b-full dpo.yaml",
    "thresher import": "thresher import trl-dpo.yaml --output dpo.yaml",
    "thresher cache ls": "thresher cache ls",
    "thresher cache verify": "thresher cache verify",
    "thresher cache prune": "thresher cache prune --older-than 30 --yes",
    "thresher config show": "thresher config show dpo.yaml beta=0.2",
    "thresher config schema": "thresher config schema",
}
# the word for the value of an option that has no metavar
_VALUES = {"int": "N", "float": "NUMBER", "str": "TEXT", "path": "PATH"}


def commands() -> dict[str, Any]:
    """Return every command that --help shows, by its full name; Typer brings its own copy of click's classes."""
    return dict(_commands(typer.main.get_command(command_line), "thresher"))


def _commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    inner = getattr(command, "commands", {})
    if not inner:
        yield name, command
    for word, each in inner.items():
        if not each.hidden:
            yield from _commands(each, f"{name} {word}")


def render_cli() -> str:
    """Describe every command in Markdown: what it does, an example, then its arguments and options."""
    lines = []
    for name, command in commands().items():
        context = command.context_class(command, info_name=name)
        lines += [f"## `{name}`", "", command.help, "", "```bash", EXAMPLES[name], "```", ""]
        shown = [param for param in command.params if not param.hidden]
        for param in sorted(shown, key=lambda each: each.param_type_name):  # arguments before options
            spelled, extra, meaning = _describe_parameter(param, context)
            facts = f" *({extra})*" if extra else ""
            lines += [f"`{spelled}`", f": {meaning}{facts}", ""]
    return "\n".join(lines)


def _describe_parameter(param: Any, context: Any) -> tuple[str, str, str]:
    """Split the line that --help prints into spelling, default or limits, and meaning."""
    spelled, meaning = param.get_help_record(context)
    meaning, _, extra = meaning.partition("  [")
    if param.param_type_name == "argument":
        spelled = re.sub(r" <.*>$", "", spelled)  # the name says it: FILE, KEY=VALUE
    else:
        spelled = re.sub(r"<(\w+)[^>]*>", lambda match: _VALUES[match[1]], spelled)
    found = [_fact(part) for part in extra.removesuffix("]").split("; ") if part]
    return spelled, ", ".join(found), meaning


def _fact(part: str) -> str:
    """Write a default, a limit or `required` as a reader expects it."""
    if part.startswith("default: "):
        return f"default `{part.removeprefix('default: ')}`"
    if limit := re.fullmatch(r"x>=([\d.]+)", part):
        return f"at least {limit[1]}"
    return part


def render_losses() -> str:
    """List the losses in a table, then each with its formula, parameters and paper."""
    lines = [_row("loss", "what it does", "parameters and defaults"), "|---|---|---|"]
    sections = []
    for loss in describe():
        defaults = ", ".join(f"[`{name}`](config.md#{name}) {default:g}" for name, default in loss.parameters.items())
        lines.append(_row(f"[`{loss.name}`](#{loss.name})", loss.summary, defaults or "none"))
        formula, note = FORMULAS[loss.name]
        start = make_loss(loss.name, {}).zero_margin_loss
        facts = [
            f"Paper: [{PAPERS[loss.paper]}, arXiv {loss.paper}](https://arxiv.org/abs/{loss.paper})",
            f"Parameters: {defaults or 'none'}",
            "Reference: needed" if loss.needs_reference else "Reference: not needed",
            f"Loss at the first step, where policy and reference are equal: {start:.4g}" if start is not None else "",
        ]
        sections += [f"## {loss.name}", "", loss.summary, "", "$$", formula, "$$", "", note, ""]
        sections += [*(f"- {fact}" for fact in facts if fact), ""]
    return "\n".join([*lines, "", *sections])


def render_recipes() -> str:
    """List the recipes in a table, then each with its source, its result and what differs."""
    headings = ("recipe", "model<br>data", "loss", "batch<br>learning rate", "GPUs<br>memory of each<br>hours")
    lines = [_row(*headings), "|" + "---|" * len(headings)]
    sections = []
    for recipe in all_recipes():
        config = load_config(DIRECTORY / f"{recipe.name}.yaml")
        data = ", ".join(name.rpartition("/")[2].partition(":")[0] for name in recipe.datasets)
        cells = [
            f"[{recipe.name}](#{re.sub(r'[^a-z0-9-]', '', recipe.name)})",
            f"{recipe.model.rpartition('/')[2]}<br>{data}",
            build_objective(config).describe(),
            f"{config.pairs_per_step}<br>{config.actor_train.training_args.learning_rate:g}",
            f"{recipe.hardware}<br>{recipe.gigabytes} GB<br>{recipe.hours} hours",
        ]
        lines.append(_row(*cells))
        facts = {
            "Source": recipe.source,
            "Published": recipe.published,
            "Model": f"`{recipe.model}`",
            "Data": ", ".join(f"`{name}`" for name in recipe.datasets),
            f"Expected on {recipe.hardware}": recipe.expected,
        }
        sections += [f"## {recipe.name}", "", f"{recipe.title}.", ""]
        sections += [*(f"- {name}: {fact}" for name, fact in facts.items() if fact), ""]
        if recipe.differs:
            sections += ["What differs from the source:", "", *(f"- {each}" for each in recipe.differs), ""]
    return "\n".join([*lines, "", *sections])


def render_api() -> str:
    """Ask autodoc for every name of the public API, by section."""
    lines = []
    for title, modules in API.items():
        lines += [f"## {title}", ""]
        for module, names in modules.items():
            for name in names:
                lines += ["```{eval-rst}", *_autodoc(module, name), "```", ""]
                if name == "DPOConfig":
                    lines += [*_config_fields(), ""]
    return "\n".join(lines)


def _config_fields() -> Iterator[str]:
    """List the fields of the config by chapter, each with a link to its meaning."""
    yield "Fields of `DPOConfig`, by their last name; each links to its type, default and meaning:"
    yield ""
    for chapter in config_doc.chapters():
        keys = ", ".join(f"[`{key.name}`](config.md#{key.anchors[0]})" for key in chapter.keys)
        yield f"- **{chapter.title}**: {keys}"


def _autodoc(module: str, name: str) -> list[str]:
    value = getattr(__import__(module, fromlist=[name]), name)
    kind = "class" if isinstance(value, type) else "function"
    if isinstance(value, type) and issubclass(value, Exception):
        kind = "exception"
    # the fields of a config are the config reference; one table is enough
    is_config = hasattr(value, "model_fields")
    return [
        f".. auto{kind}:: {module}.{name}",
        *(["   :no-members:", "   :class-doc-from: class"] if is_config else []),
        "",
    ]


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


_PAGES = {"cli": render_cli, "losses": render_losses, "recipes": render_recipes, "api": render_api}
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


def _spell_dashes(_app: Sphinx, doctree: nodes.document) -> None:
    """Write `name: meaning` in lists of parameters; without smart quotes, Sphinx shows two hyphens."""
    for field in doctree.findall(nodes.field_body):
        for text in list(field.findall(nodes.Text)):
            if text == " -- ":
                text.parent.replace(text, nodes.Text(": "))


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", _fill_in)
    app.connect("doctree-read", _spell_dashes)
    app.connect("autodoc-process-signature", _shorten_signature)
    # before napoleon, which turns sections such as `Args:` into field lists
    app.connect("autodoc-process-docstring", _write_rst, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
