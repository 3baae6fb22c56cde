"""Render rows as text: the prompt with the assistant header, and the full text of each response.

Decides which template renders a row and which character spans the assistant wrote; `tokenizer` makes token ids of them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thresher.data.rows.formats import PreferenceRow
from thresher.data.rows.messages import Message, TextSegment
from thresher.data.rows.parsing import BadRowError
from thresher.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CharSpan = tuple[int, int]
TEMPLATE_KEY = "actor_train.data_args.template"
_TEMPLATES = Path(__file__).with_name("templates")
_CONTROL_TOKEN = re.compile(r"<\|\w+\|>|<\w+_of_turn>|\[/?INST\]")
# private use, so no header contains it
_PROBE = "\ue000"


@dataclass(frozen=True)
class SideText:
    """Prompt and response as one text; scored_spans is None if the full response is scored."""

    text: str
    scored_spans: tuple[CharSpan, ...] | None = None


@dataclass(frozen=True)
class RenderedRow:
    """The texts of a row; all responses begin with `prompt`."""

    prompt: str
    responses: tuple[SideText, ...]
    header_shortened: bool = False  # `prompt` is only a prefix of the generation prompt
    has_placeholders: bool = False  # for the template's control tokens; any spelled-out token is text


@dataclass(frozen=True)
class Template:
    """A chat template or raw text; `source` is None for raw text and for the tokenizer's built-in template."""

    is_raw: bool
    source: str | None
    digest: str
    arguments: Mapping[str, Any]


def load_template(
    tokenizer: PreTrainedTokenizerBase, name: str, arguments: Mapping[str, Any], key: str = TEMPLATE_KEY
) -> Template:
    """Load the template of `data_args.template` and check its syntax; messages name it by its full config key."""
    if name == "raw":
        return Template(True, None, "raw", {})
    if name == "auto":
        if not tokenizer.chat_template:
            raise UserError(
                f"the tokenizer has no chat template; use {key}=raw for plain text, {key}=FAMILY for a model of the "
                f"family {', '.join(template_names())}, or {key}=FILE.jinja for a custom template"
            )
        source, text = None, tokenizer.chat_template
    else:
        source = text = find_template_file(name, key).read_text(encoding="utf-8")
        if name in template_names():
            _check_control_tokens(f"{key}={name}", text, tokenizer)
    content = json.dumps([text, dict(arguments)], sort_keys=True)
    template = Template(False, source, hashlib.sha256(content.encode()).hexdigest(), arguments)
    _check_syntax(tokenizer, template, f"{key}={name!r}")
    return template


def template_names() -> list[str]:
    """Names of the templates that come with thresher."""
    return sorted(path.stem for path in _TEMPLATES.glob("*.jinja"))


def find_template_file(name: str, key: str = TEMPLATE_KEY) -> Path:
    """Return the Jinja file of a `data_args.template` other than auto and raw."""
    if name in template_names():
        return _TEMPLATES / f"{name}.jinja"
    path = Path(os.path.expandvars(name)).expanduser()
    if not path.is_file():
        raise UserError(
            f"{key}={name!r}: no such file; use auto, raw, one of {', '.join(template_names())}, or the path of a "
            "Jinja file"
        )
    return path


def _check_control_tokens(setting: str, text: str, tokenizer: PreTrainedTokenizerBase) -> None:
    vocabulary = tokenizer.get_vocab()
    if missing := [token for token in dict.fromkeys(_CONTROL_TOKEN.findall(text)) if token not in vocabulary]:
        raise UserError(
            f"{setting}: the tokenizer has no token {', '.join(missing)}, so it would split them into characters; use "
            "the template of the model's family, or auto"
        )


def _check_syntax(tokenizer: PreTrainedTokenizerBase, template: Template, setting: str) -> None:
    try:
        apply_template(tokenizer, template, [{"role": "user", "content": "?"}], None, header=True)
    except BadRowError as error:
        # a template may reject this conversation and accept others, unless it has a syntax error
        if type(error.__cause__).__name__ == "TemplateSyntaxError":
            raise UserError(f"{setting} is not valid Jinja: {error.__cause__}") from error


def render(row: PreferenceRow, template: Template, tokenizer: PreTrainedTokenizerBase) -> RenderedRow:
    """Render a row with its template, or raise `BadRowError`."""
    return _render_raw(row) if template.is_raw else _render_chat(row, template, tokenizer)


def _render_raw(row: PreferenceRow) -> RenderedRow:
    if row.tools:
        raise BadRowError("the row has `tools`, which template raw cannot render; use a chat template")
    if row.template_arguments:
        raise BadRowError("the row has variables of a chat template, but the template is raw; use a chat template")
    if row.plain is not None:
        prompt, responses = row.plain.prompt, row.plain.responses
    else:
        prompt = "".join(f"{message['content']}\n\n" for message in row.prompt if message["content"])
        responses = tuple(map(_segments, row.responses))
    return RenderedRow(prompt, tuple(_join_segments(prompt, response) for response in responses))


def _segments(messages: Sequence[Message]) -> tuple[TextSegment, ...]:
    blank_line = TextSegment("\n\n", scored=False)
    texts = [TextSegment(message["content"], message["role"] == "assistant") for message in messages]
    return tuple(segment for text in texts for segment in (blank_line, text))[1:]


def _join_segments(prompt: str, segments: Sequence[TextSegment]) -> SideText:
    text, spans = prompt, []
    for segment in segments:
        if segment.scored:
            spans.append((len(text), len(text) + len(segment.text)))
        text += segment.text
    return SideText(text, tuple(spans) if len(segments) > 1 else None)


def _render_chat(row: PreferenceRow, template: Template, tokenizer: PreTrainedTokenizerBase) -> RenderedRow:
    if row.template_arguments:
        template = replace(template, arguments={**template.arguments, **row.template_arguments})
    apply = partial(apply_template, tokenizer, template, tools=row.tools)
    header = apply(row.prompt, header=True)
    texts = [apply(row.prompt + response, header=False) for response in row.responses]
    start = _header_end(header, row.prompt, texts, apply)
    if start < len(header) and start < len(apply(row.prompt, header=False).rstrip()):
        raise BadRowError("the chat template renders the prompt differently when an answer follows")
    responses = tuple(
        SideText(text, _scored_spans(row.prompt, response, text, start, apply, eos_token(tokenizer)))
        for text, response in zip(texts, row.responses, strict=True)
    )
    return RenderedRow(texts[0][:start], responses, header_shortened=start < len(header))


def _header_end(header: str, before: list[Message], texts: Sequence[str], apply: Callable[..., str]) -> int:
    """Return where the answers begin: the part of the generation prompt that a finished answer keeps."""
    end = min(_common_prefix_length(header, text) for text in texts)
    if end < len(header):
        # some templates open a <think> block in the generation prompt only; answers may begin with the same characters
        probe = apply([*before, {"role": "assistant", "content": _PROBE}], header=False)
        end = min(end, _common_prefix_length(header, probe))
    return end


def _scored_spans(
    prompt: list[Message], messages: list[Message], text: str, start: int, apply: Callable[..., str], eos: str
) -> tuple[CharSpan, ...] | None:
    if len(messages) == 1:
        return None
    spans: list[CharSpan] = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = prompt + messages[:index]
        begin = _header_end(apply(before, header=True), before, [text], apply) if index else start
        through = apply([*before, message], header=False)
        if begin < len(apply(before, header=False).rstrip()) or not text.startswith(through):
            raise BadRowError("the chat template renders a turn differently when more turns follow")
        spans.append((begin, len(cut_after_eos(through, eos))))
    return tuple(spans)


def _common_prefix_length(left: str, right: str) -> int:
    if right.startswith(left):
        return len(left)
    return next((at for at, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def cut_after_eos(text: str, eos: str) -> str:
    """Remove the whitespace that some templates write after the last EOS."""
    stripped = text.rstrip()
    return stripped if stripped.endswith(eos) else text


def eos_token(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text of the EOS token, or raise `UserError` if the tokenizer has none."""
    if tokenizer.eos_token is None:
        raise UserError(
            "the tokenizer has no EOS token, so a model cannot learn where an answer ends; "
            'set "eos_token" in its tokenizer_config.json'
        )
    return str(tokenizer.eos_token)


def apply_template(
    tokenizer: PreTrainedTokenizerBase, template: Template, messages: list[Message], tools: Any, *, header: bool
) -> str:
    """Render messages as text, with the generation prompt if `header` is set, or raise `BadRowError`."""
    try:
        text = tokenizer.apply_chat_template(
            messages,
            tools=tools,
            chat_template=template.source,
            add_generation_prompt=header,
            tokenize=False,
            **template.arguments,
        )
    except Exception as error:  # a template is user code that may raise anything
        raise BadRowError(f"the chat template rejects the row: {error}") from error
    return str(text)
