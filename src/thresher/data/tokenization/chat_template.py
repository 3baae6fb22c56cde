"""A row as text: the prompt with the header of the answer, and each side's whole text.

Decides which template renders a row and which stretch of a side an assistant says; token ids are `tokenize`'s.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thresher.data.rows.formats import PreferenceRow
from thresher.data.rows.messages import Message, TextSegment
from thresher.data.rows.parsing import BadRowError
from thresher.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CharSpan = tuple[int, int]


@dataclass(frozen=True)
class SideText:
    """Prompt and response of one side as one text; scored_spans is None when all of the response is scored."""

    text: str
    scored_spans: tuple[CharSpan, ...] | None = None


@dataclass(frozen=True)
class RenderedRow:
    """Texts of a row. `prompt` begins both sides; header_shortened tells that it is less than the generation prompt.

    has_stand_ins: control tokens are written as stand-ins; what spells one is text (`control_tokens`).
    """

    prompt: str
    chosen: SideText
    rejected: SideText
    header_shortened: bool = False
    has_placeholders: bool = False


@dataclass(frozen=True)
class Template:
    """Where the text of a row comes from; `source` is None for the tokenizer's own template and for raw text."""

    is_raw: bool
    source: str | None
    digest: str
    arguments: Mapping[str, Any]


def load_template(tokenizer: PreTrainedTokenizerBase, name: str, arguments: Mapping[str, Any]) -> Template:
    """Find the template that the setting names and check that it can be parsed."""
    if name == "raw":
        return Template(True, None, "raw", {})
    if name == "auto":
        if not tokenizer.chat_template:
            raise UserError(
                "the tokenizer has no chat template; use data_args.template=raw for plain text, "
                "or data_args.template=FILE.jinja for a template of your own"
            )
        source, own = None, tokenizer.chat_template
    else:
        path = Path(os.path.expandvars(name)).expanduser()
        if not path.is_file():
            raise UserError(f"data_args.template={name!r}: no such file; use auto, raw or the path of a Jinja file")
        source = own = path.read_text(encoding="utf-8")
    content = json.dumps([own, dict(arguments)], sort_keys=True)
    template = Template(False, source, hashlib.sha256(content.encode()).hexdigest(), arguments)
    _check_syntax(tokenizer, template, name)
    return template


def _check_syntax(tokenizer: PreTrainedTokenizerBase, template: Template, name: str) -> None:
    try:
        apply_template(tokenizer, template, [{"role": "user", "content": "?"}], None, header=True)
    except BadRowError as error:
        # a template may refuse this one conversation; only one that can't be parsed refuses all
        if type(error.__cause__).__name__ == "TemplateSyntaxError":
            raise UserError(f"data_args.template={name!r} is not valid Jinja: {error.__cause__}") from error


def render(row: PreferenceRow, template: Template, tokenizer: PreTrainedTokenizerBase) -> RenderedRow:
    """Render a row; both sides begin with `prompt`."""
    return _render_raw(row) if template.is_raw else _render_chat(row, template, tokenizer)


def _render_raw(row: PreferenceRow) -> RenderedRow:
    if row.tools:
        raise BadRowError("the row has `tools`, which data_args.template=raw cannot show; use a chat template")
    if row.plain is not None:
        prompt, chosen, rejected = row.plain.prompt, row.plain.chosen, row.plain.rejected
    else:
        prompt = "".join(f"{message['content']}\n\n" for message in row.prompt if message["content"])
        chosen, rejected = _segments(row.chosen), _segments(row.rejected)
    return RenderedRow(prompt, _join_segments(prompt, chosen), _join_segments(prompt, rejected))


def _segments(messages: Sequence[Message]) -> tuple[TextSegment, ...]:
    pieces = [TextSegment(message["content"], message["role"] == "assistant") for message in messages]
    blank_line = TextSegment("\n\n", scored=False)
    return tuple(piece for each in pieces for piece in (blank_line, each))[1:]


def _join_segments(prompt: str, segments: Sequence[TextSegment]) -> SideText:
    text, spans = prompt, []
    for segment in segments:
        if segment.scored:
            spans.append((len(text), len(text) + len(segment.text)))
        text += segment.text
    return SideText(text, tuple(spans) if len(segments) > 1 else None)


def _render_chat(row: PreferenceRow, template: Template, tokenizer: PreTrainedTokenizerBase) -> RenderedRow:
    header = apply_template(tokenizer, template, row.prompt, row.tools, header=True)
    texts = [
        apply_template(tokenizer, template, row.prompt + side, row.tools, header=False)
        for side in (row.chosen, row.rejected)
    ]
    # some templates open a thought in the generation prompt that a finished answer doesn't have
    start = min(common_prefix_length(header, text) for text in texts)
    if start < len(header):
        bare = apply_template(tokenizer, template, row.prompt, row.tools, header=False)
        if start < len(bare.rstrip()):
            raise BadRowError("the chat template writes the prompt differently when an answer follows")
    sides = []
    for text, messages in zip(texts, (row.chosen, row.rejected), strict=True):
        spans = _scored_spans(row, messages, template, tokenizer, text, start) if len(messages) > 1 else None
        sides.append(SideText(text, spans))
    return RenderedRow(texts[0][:start], sides[0], sides[1], header_shortened=start < len(header))


def _scored_spans(
    row: PreferenceRow,
    messages: list[Message],
    template: Template,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    start: int,
) -> tuple[CharSpan, ...]:
    spans: list[CharSpan] = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = row.prompt + messages[:index]
        header = apply_template(tokenizer, template, before, row.tools, header=True)
        bare = apply_template(tokenizer, template, before, row.tools, header=False)
        through = apply_template(tokenizer, template, [*before, message], row.tools, header=False)
        begin = common_prefix_length(header, text) if index else start
        if begin < len(bare.rstrip()) or not text.startswith(through):
            raise BadRowError("the chat template writes a turn differently when more turns follow")
        spans.append((begin, len(cut_after_eos(through, eos_token(tokenizer)))))
    return tuple(spans)


def common_prefix_length(left: str, right: str) -> int:
    """Count the characters that two texts begin with in common."""
    if right.startswith(left):
        return len(left)
    return next((at for at, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def cut_after_eos(text: str, eos: str) -> str:
    """Cut the whitespace that templates write after a final EOS."""
    stripped = text.rstrip()
    return stripped if stripped.endswith(eos) else text


def eos_token(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text of the token that ends an answer."""
    if tokenizer.eos_token is None:
        raise UserError(
            "the tokenizer has no EOS token, so a model could not learn where an answer ends; "
            'set "eos_token" in its tokenizer_config.json'
        )
    return str(tokenizer.eos_token)


def apply_template(
    tokenizer: PreTrainedTokenizerBase,
    template: Template,
    messages: list[Message],
    tools: Any,
    *,
    header: bool,
) -> str:
    """Render messages as text, or raise `BadRowError`."""
    try:
        text = tokenizer.apply_chat_template(
            messages,
            tools=tools,
            chat_template=template.source,
            add_generation_prompt=header,
            tokenize=False,
            **template.arguments,
        )
    except Exception as error:  # a template is the user's program: it may raise anything
        raise BadRowError(f"the chat template refuses the row: {error}") from error
    return str(text)
