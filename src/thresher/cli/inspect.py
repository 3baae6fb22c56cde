"""`thresher inspect`: a store in figures, or one of its pairs as a model will see it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.text import Text
    from transformers import PreTrainedTokenizerBase

    from thresher.data.pair import Pair
    from thresher.data.store.reader import PairStore

PROMPT_STYLE = "dim"
UNSCORED_STYLE = "bright_black"
SCORED_STYLES = {"chosen": "green", "rejected": "red"}


def inspect(
    store: Annotated[Path, typer.Argument(help="A store made by `thresher prepare`.")],
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Directory whose tokenizer made the store.")
    ] = None,
    pair: Annotated[int | None, typer.Option("--pair", "-p", help="Number of the pair to show, from 0.")] = None,
    ids: Annotated[bool, typer.Option("--ids", help="Show each token with its id.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Read every byte and check it.")] = False,
) -> None:
    """Show what a store holds; with --pair, which tokens of a pair are scored."""
    from thresher.data.store.reader import PairStore
    from thresher.errors import UserError

    opened = PairStore.open(store)
    if verify:
        opened.verify()
    if pair is None:
        _print_summary(opened)
        return
    if not 0 <= pair < len(opened):
        raise UserError(f"there is no pair {pair}; the store holds pairs 0 to {len(opened) - 1}")
    if model is None:
        raise UserError("a pair is shown as text, which takes its tokenizer; pass --model DIR")
    _print_pair(opened, pair, model, ids=ids)


def _print_summary(store: PairStore) -> None:
    from thresher.cli.prepare import print_report
    from thresher.cli.terminal import print_line
    from thresher.data.prepare.report import report_of

    manifest = store.manifest
    print_line(f"{store.path}: {len(store):,} pairs in {len(manifest['shards'])} shards")
    print_line(f"content {store.digest[:16]}, fingerprint {store.fingerprint[:16]}")
    print_line(f"tokenizer {store.tokenizer_digest[:16]}, template {manifest.get('template')}")
    print_report(report_of(store))


def _print_pair(store: PairStore, number: int, model: str, *, ids: bool) -> None:
    from rich.console import Console

    from thresher.data.prepare.fingerprint import tokenizer_digest
    from thresher.errors import UserError
    from thresher.models.loading.load import load_tokenizer

    tokenizer = load_tokenizer(model)
    if tokenizer_digest(tokenizer) != store.tokenizer_digest:
        raise UserError(
            f"{store.path} was made with another tokenizer than that of {model}; name the one it was made with"
        )
    pair = store[number]
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"pair {number}: weight {pair.weight:g}, margin {pair.margin:g}")
    for side in ("chosen", "rejected"):
        console.rule(f"{side}: {_count(pair, side)}", align="left")
        console.print(render_side(pair, side, tokenizer, ids=ids))


def _count(pair: Pair, side: str) -> str:
    response, mask = (
        (pair.chosen_ids, pair.chosen_mask) if side == "chosen" else (pair.rejected_ids, pair.rejected_mask)
    )
    scored = len(response) if mask is None else int(mask.sum())
    return f"{len(pair.prompt_ids)} prompt tokens, {len(response)} response tokens, {scored} scored"


def render_side(pair: Pair, side: str, tokenizer: PreTrainedTokenizerBase, *, ids: bool) -> Text:
    """Colour one side: the prompt dim, scored tokens green or red, unscored tokens of the response grey."""
    from rich.text import Text

    from thresher.redact import escape_control_chars

    response, mask = (
        (pair.chosen_ids, pair.chosen_mask) if side == "chosen" else (pair.rejected_ids, pair.rejected_mask)
    )
    sequence = [*pair.prompt_ids.tolist(), *response.tolist()]
    scored = [True] * len(response) if mask is None else mask.tolist()
    styles = [PROMPT_STYLE] * len(pair.prompt_ids)
    styles += [SCORED_STYLES[side] if each else UNSCORED_STYLE for each in scored]
    text = Text()
    if ids:
        tokens = tokenizer.convert_ids_to_tokens(sequence)
        for token, token_id, style in zip(tokens, sequence, styles, strict=True):
            text.append(escape_control_chars(f"{token}"), style).append(f":{token_id} ", "dim")
        return text
    start = 0
    for end in range(1, len(sequence) + 1):
        if end == len(sequence) or styles[end] != styles[start]:
            text.append(escape_control_chars(_decode_between(tokenizer, sequence, start, end)), styles[start])
            start = end
    return text


def _decode_between(tokenizer: PreTrainedTokenizerBase, ids: list[int], start: int, end: int) -> str:
    # decoded from the very beginning: a piece on its own would lose the space that it begins with
    before = str(tokenizer.decode(ids[:start])) if start else ""
    return str(tokenizer.decode(ids[:end]))[len(before) :]
