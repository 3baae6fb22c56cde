"""Find text that spells a control token, such as `<|im_end|>`, and keep it from becoming the token.

Only the template may write control tokens: the text of a row must not end a turn or begin a new one. A row that
spells one is rendered with a mark character inside each occurrence, so the unmarked ones are the template's. They
become placeholders, and the marks are removed. Other rows take the ordinary path.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any

from thresher.data.rows.formats import PlainText, PreferenceRow
from thresher.data.rows.messages import Message, TextSegment
from thresher.data.rows.parsing import BadRowError
from thresher.data.tokenization.chat_template import RenderedRow, SideText, Template, apply_template, render

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Unicode planes 15 and 16 are private use and do not occur in known vocabularies
_FIRST_CHARACTER = 0xF0000


# Unicode noncharacters: the first one that does not occur in a row is its mark
_MARKS = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))


class ControlTokens:
    """A tokenizer's control tokens, with a template.

    All added tokens, special or not, except single characters and whitespace. The text of an assistant may spell those
    that are neither special nor written around turns by the template, such as `<think>`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: Template) -> None:
        self._tokenizer = tokenizer
        self._template = template
        added = [token for token in tokenizer.added_tokens_decoder.values() if _is_control(token.content)]
        special = {token.content for token in added if token.special} | set(tokenizer.all_special_tokens)
        tokens = {token.content for token in added} | {token for token in special if _is_control(token)}
        self._forbidden = _any_of(tokens)
        around_turns = set(self._forbidden.findall(_probe(tokenizer, template, tokens)))
        self._assistant_forbidden = _any_of(tokens & (special | around_turns))
        backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        normalizer: Any = backend.normalizer if backend is not None else None
        # these are matched in normalized text, which other spellings may normalize to
        normalized = [token.content for token in added if token.normalized] if normalizer is not None else []
        self._normalized = {normalizer.normalize_str(token): token for token in normalized}
        self._normalizer = normalizer
        self.placeholders = PlaceholderTokenizer(tokenizer, sorted(tokens))

    def find(self, row: PreferenceRow) -> str | None:
        """Return a control token that the row spells, or None."""
        for text, pattern in self._texts(row):
            if found := pattern.search(text):
                return found.group()
            normalized = self._normalizer.normalize_str(text) if self._normalized else ""
            for spelling, token in self._normalized.items():
                if spelling in normalized and pattern.search(token):
                    return token
        return None

    def _texts(self, row: PreferenceRow) -> Iterator[tuple[str, re.Pattern[str]]]:
        """Yield every text of a row that a template may render, with the pattern of tokens forbidden in it."""
        if self._template.is_raw and row.plain is not None:
            yield row.plain.prompt, self._forbidden
            for side in row.plain.responses:
                for segment in side:
                    yield segment.text, self._pattern(by_assistant=segment.scored)
                # texts are joined without a separator, so they may spell a token together
                yield "".join((row.plain.prompt, *(segment.text for segment in side))), self._assistant_forbidden
            return
        for message in chain(row.prompt, *row.responses):
            pattern = self._pattern(by_assistant=message["role"] == "assistant")
            yield from ((text, pattern) for text in _strings(_without_role(message)))
        yield from ((text, self._forbidden) for text in _strings([row.tools, row.template_arguments]))

    def _pattern(self, *, by_assistant: bool) -> re.Pattern[str]:
        return self._assistant_forbidden if by_assistant else self._forbidden

    def render_as_text(self, row: PreferenceRow) -> RenderedRow:
        """Render a row with placeholders for the template's control tokens, so its own text stays text."""
        dump = json.dumps(asdict(row), ensure_ascii=False, default=str)
        self.placeholders.check(dump)
        mark = next((mark for mark in _MARKS if mark not in dump and _escaped(mark) not in dump), None)
        if mark is None:
            raise BadRowError("the text spells a control token and contains every character that could mark it")
        rendered = render(self._mark(row, mark), self._template, self._tokenizer)
        return replace(
            rendered,
            prompt=self._unmark(rendered.prompt, mark),
            responses=tuple(self._unmark_side(side, mark) for side in rendered.responses),
            has_placeholders=True,
        )

    def _mark(self, row: PreferenceRow, mark: str) -> PreferenceRow:
        return replace(
            row,
            prompt=self._mark_messages(row.prompt, mark),
            responses=tuple(self._mark_messages(response, mark) for response in row.responses),
            tools=_mark_value(row.tools, self._forbidden, mark),
            template_arguments=_mark_value(row.template_arguments, self._forbidden, mark),
            plain=None if row.plain is None else self._mark_plain(row.plain, mark),
        )

    def _mark_messages(self, messages: Sequence[Message], mark: str) -> list[Message]:
        marked = []
        for message in messages:
            pattern = self._pattern(by_assistant=message["role"] == "assistant")
            marked.append({"role": message["role"], **_mark_value(_without_role(message), pattern, mark)})
        return marked

    def _mark_plain(self, plain: PlainText, mark: str) -> PlainText:
        def segments(side: Sequence[TextSegment]) -> tuple[TextSegment, ...]:
            return tuple(
                replace(
                    segment, text=_mark_value(segment.text, self._pattern(by_assistant=segment.scored), mark) + mark
                )
                for segment in side
            )

        # also a mark after each text, because they are joined without a separator
        prompt = _mark_value(plain.prompt, self._forbidden, mark) + mark
        return PlainText(prompt, tuple(map(segments, plain.responses)))

    def _unmark_side(self, side: SideText, mark: str) -> SideText:
        spans = side.scored_spans
        if spans is not None:
            spans = tuple(
                (len(_without(side.text[:begin], mark)), len(_without(side.text[:end], mark))) for begin, end in spans
            )
        return SideText(self._unmark(side.text, mark), spans)

    def _unmark(self, text: str, mark: str) -> str:
        return _without(self._forbidden.sub(lambda found: self.placeholders.by_token[found.group()], text), mark)


def _is_control(token: str) -> bool:
    return len(token) > 1 and not token.isspace()


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """Match any of the tokens, the longest of those at one position, as tokenizers do."""
    longest_first = sorted(tokens, key=lambda token: (-len(token), token))
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _probe(tokenizer: PreTrainedTokenizerBase, template: Template, tokens: Iterable[str]) -> str:
    """Render a minimal conversation, without the generation prompt, which may open a <think> block."""
    if template.is_raw:
        return ""
    turns = [{"role": role, "content": "?"} for role in ("system", "user", "assistant", "user")]
    for messages in (turns, turns[1:]):
        try:
            return apply_template(tokenizer, template, messages, None, header=False)
        except BadRowError:
            continue
    # the template rejects both, so it may write any token around its turns
    return " ".join(tokens)


def _strings(value: Any) -> Iterator[str]:
    """Yield the strings within a value, including keys, because a template may render an object as JSON."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.items():
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _strings(each)


def _mark_value(value: Any, pattern: re.Pattern[str], mark: str) -> Any:
    if isinstance(value, str):
        # occurrences may overlap, so marking one may leave another
        while pattern.search(value):
            value = pattern.sub(lambda found: found.group()[0] + mark + found.group()[1:], value)
        return value
    if isinstance(value, dict):
        return {_mark_value(key, pattern, mark): _mark_value(each, pattern, mark) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_mark_value(each, pattern, mark) for each in value]
    return value


def _without_role(message: Message) -> Message:
    return {key: value for key, value in message.items() if key != "role"}


def _without(text: str, mark: str) -> str:
    # a template that writes JSON may escape the mark
    return text.replace(mark, "").replace(_escaped(mark), "")


def _escaped(mark: str) -> str:
    return f"\\u{ord(mark):04x}"


class PlaceholderTokenizer:
    """Placeholders of a tokenizer's control tokens, and a copy of the tokenizer, made at first use, that reads them.

    A placeholder repeats one private-use character, as long as the token, so offsets stay the same. The copy has the
    placeholders instead of the control tokens, with the same ids and rules, and makes no control token from any other
    text. A full text is tokenized in one call, as by the original tokenizer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str]) -> None:
        self._tokenizer: Any = tokenizer
        self.by_token: Mapping[str, str] = {
            token: chr(_FIRST_CHARACTER + number) * len(token) for number, token in enumerate(sorted(tokens))
        }

    def check(self, text: str) -> None:
        """Raise `BadRowError` for text that contains a placeholder, and for a slow tokenizer."""
        if not self._tokenizer.is_fast:
            raise BadRowError("the text spells a control token, which only a fast tokenizer can keep as text")
        if max(text, default="") >= chr(_FIRST_CHARACTER) and any(name in text for name in self.by_token.values()):
            raise BadRowError("the text spells a control token and contains private-use characters reserved for them")

    def encode(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """Tokenize texts; return for each its ids and the start and end offset of each token."""
        copy, original_ids = self._copy
        return [
            ([original_ids.get(id_, id_) for id_ in encoding.ids], list(encoding.offsets))
            for encoding in copy.encode_batch(list(texts), add_special_tokens=False)
        ]

    @cached_property
    def _copy(self) -> tuple[Any, dict[int, int]]:
        from tokenizers import Tokenizer

        state: dict[str, Any] = json.loads(self._tokenizer.backend_tokenizer.to_str())
        state["padding"] = state["truncation"] = None
        ids = {}
        for token in state["added_tokens"]:
            name = self.by_token.get(token["content"])
            if name is not None:
                # a normalizer must not change placeholders
                token.update(content=name, normalized=False)
            ids[token["content"]] = token["id"]
        _rename(state["model"], self.by_token, ids)
        copy: Any = Tokenizer.from_str(json.dumps(state))
        return copy, {copy.token_to_id(name): number for name, number in ids.items()}


def _rename(model: dict[str, Any], names: Mapping[str, str], ids: Mapping[str, int]) -> None:
    """Rename control tokens to placeholders in a model's vocabulary, so it makes none from other text."""
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        kept = {content: number for content, number in vocabulary.items() if content not in names}
        model["vocab"] = {**kept, **ids}
    else:
        model["vocab"] = [[names.get(content, content), score] for content, score in vocabulary]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        pairs = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"]]
        model["merges"] = [pair for pair in pairs if not names.keys() & {*pair, "".join(pair)}]
