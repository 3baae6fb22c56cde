"""`thresher inspect`: statistics of a store, or one of its pairs as the model receives it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from thresher.cli.prepare_report import print_report
from thresher.cli.terminal import print_lines
from thresher.errors import UserError
from thresher.redact import escape_control_chars

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from thresher.data.example import Example, Kind, Response
    from thresher.data.store.reader import ExampleStore

PROMPT_STYLE, UNSCORED_STYLE = "dim", "bright_black"
_UNITS = {"pairs": "pairs", "labels": "labelled responses", "lists": "lists"}
# around scored tokens where there are no colors: a pipe, a file, NO_COLOR
SCORED_MARKS = ("[[", "]]")


def inspect(
    store: Annotated[Path, typer.Argument(metavar="STORE", help="Store written by `thresher prepare`.")],
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", metavar="DIR", help="Directory of the model or the tokenizer of the store."),
    ] = None,
    pair: Annotated[int | None, typer.Option("--pair", "-p", help="Show this pair or other example (from 0).")] = None,
    ids: Annotated[bool, typer.Option("--ids", help="With --pair: show each token with its id.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Verify the checksums of all files.")] = False,
) -> None:
    """Show the statistics of a store; with --pair, show which tokens of an example are scored."""
    from thresher.data.store.reader import ExampleStore

    opened = ExampleStore.open(store)
    if verify:
        opened.verify()
    if pair is None:
        _print_summary(opened)
        return
    if not 0 <= pair < len(opened):
        unit = _UNITS[opened.kind]
        raise UserError(f"there is no {unit[:-1]} {pair}; the store has {unit} 0 to {len(opened) - 1}")
    if model is None:
        raise UserError("--pair shows text, which needs the tokenizer; pass --model DIR")
    _print_pair(opened, pair, model, ids=ids)


def _print_summary(store: ExampleStore) -> None:
    from thresher.data.prepare.report import report_of

    manifest = store.manifest
    print_lines(
        f"{store.path}: {len(store):,} {_UNITS[store.kind]} in {len(manifest['shards'])} shards",
        f"content digest {store.digest[:16]}, fingerprint {store.fingerprint[:16]}",
        f"tokenizer digest {store.tokenizer_digest[:16]}, template {manifest.get('template')}",
    )
    print_report(report_of(store))


def _print_pair(store: ExampleStore, number: int, model: str, *, ids: bool) -> None:
    from thresher.data.prepare.prepare import tokenizer_digest
    from thresher.models.loading.load import load_tokenizer

    tokenizer = load_tokenizer(model)
    if tokenizer_digest(tokenizer) != store.tokenizer_digest:
        hint = "pass the model or the tokenizer that it was prepared with"
        raise UserError(f"{store.path} was not prepared with the tokenizer of {model}; {hint}")
    pair = store[number]
    console = Console(highlight=False, soft_wrap=True)
    marks = SCORED_MARKS if console.no_color or console.color_system is None else ("", "")
    legend = f"; scored tokens are between {marks[0]} and {marks[1]}" if marks[0] else ""
    console.print(
        f"{_UNITS[store.kind][:-1]} {number}: weight {pair.weight:g}, margin {pair.margin:g}{legend}", markup=False
    )
    for side, (response, scored) in enumerate(map(_tokens, pair.responses)):
        counts = f"{len(pair.prompt_ids)} prompt tokens, {len(response)} response tokens, {sum(scored)} scored"
        if (weights := pair.responses[side].weights) is not None:
            counts += f", token weights {weights.min():g} to {weights.max():g}"
        console.rule(f"{_name(store.kind, pair, side)}: {counts}", align="left")
        style = "green" if is_preferred(store.kind, pair, side) else "red"
        console.print(render_side(pair, side, tokenizer, style, ids=ids, marks=marks))


def _name(kind: Kind, example: Example, side: int) -> str:
    """What a response is: chosen or rejected, its label, or its position and score."""
    if kind == "lists":
        return f"response {side + 1}, score {example.responses[side].value:g}"
    names = ("chosen", "rejected") if kind == "pairs" else ("desirable", "undesirable")
    return names[not is_preferred(kind, example, side)]


def is_preferred(kind: Kind, example: Example, side: int) -> bool:
    """Whether a response is chosen, desirable or, of a list, one of the best."""
    if kind == "pairs":
        return side == 0
    return example.responses[side].value == (1 if kind == "labels" else example.responses[0].value)


def _tokens(response: Response) -> tuple[list[int], list[bool]]:
    """The token ids of a response, and whether each is scored."""
    ids, mask, *_ = response
    return ids.tolist(), [True] * len(ids) if mask is None else mask.tolist()


def render_side(
    pair: Example,
    side: int,
    tokenizer: PreTrainedTokenizerBase,
    scored_style: str,
    *,
    ids: bool,
    marks: tuple[str, str] = ("", ""),
) -> Text:
    """Color one side: the prompt dim, scored tokens green or red and between marks, unscored ones gray."""
    response, scored = _tokens(pair.responses[side])
    sequence = [*pair.prompt_ids.tolist(), *response]
    styles = [PROMPT_STYLE] * len(pair.prompt_ids)
    styles += [scored_style if is_scored else UNSCORED_STYLE for is_scored in scored]
    text = Text()
    if ids:
        tokens = tokenizer.convert_ids_to_tokens(sequence)
        weights = pair.responses[side].weights
        shown = [""] * len(pair.prompt_ids)
        shown += [""] * len(response) if weights is None else [f"*{weight:g}" for weight in weights.tolist()]
        for token, token_id, style, weight in zip(tokens, sequence, styles, shown, strict=True):
            before, after = marks if style == scored_style else ("", "")
            text.append(before + escape_control_chars(f"{token}"), style).append(f":{token_id}{weight}{after} ", "dim")
        return text
    start = 0
    for end in range(1, len(sequence) + 1):
        if end == len(sequence) or styles[end] != styles[start]:
            before, after = marks if styles[start] == scored_style else ("", "")
            # decoded from the first token: a piece decoded alone would lose its leading space
            num_shown = len(str(tokenizer.decode(sequence[:start]))) if start else 0
            decoded = str(tokenizer.decode(sequence[:end]))[num_shown:]
            text.append(f"{before}{escape_control_chars(decoded)}{after}", styles[start])
            start = end
    return text
