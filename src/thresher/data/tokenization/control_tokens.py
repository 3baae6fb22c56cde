"""Text of a row that spells a control token, such as `<|im_end|>`: found, and kept from becoming the token.

Whoever wrote the row must not be able to end a turn or begin another one: only the template writes control tokens. A
row that spells none is rendered and tokenised as ever. One that does is rendered with a mark inside every spelling, so
that what is still whole afterwards is the template's; that becomes stand-ins (`stand_ins`), and the marks are removed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from thresher.data.rows.formats import PlainText, PreferenceRow
from thresher.data.rows.messages import Message, TextSegment
from thresher.data.rows.parsing import BadRowError
from thresher.data.tokenization.chat_template import RenderedRow, SideText, Template, apply_template, render
from thresher.data.tokenization.placeholders import PlaceholderTokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# not characters, by Unicode's own word: one that a row does not hold marks its spellings
_MARKS = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))


class ControlTokens:
    """The control tokens of a tokenizer under a template.

    Every added token is one, flagged special or not, but for single characters and blanks, which are text. An
    assistant may say those that are not flagged and that the template does not write around turns, such as `<think>`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: Template) -> None:
        self._tokenizer = tokenizer
        self._template = template
        added = [token for token in tokenizer.added_tokens_decoder.values() if _is_control(token.content)]
        flagged = {token.content for token in added if token.special} | set(tokenizer.all_special_tokens)
        every = {token.content for token in added} | {token for token in flagged if _is_control(token)}
        self._every = _any_of(every)
        around_turns = set(self._every.findall(_probe(tokenizer, template, every)))
        self._never_said = _any_of(every & (flagged | around_turns))
        backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        normalizer: Any = backend.normalizer if backend is not None else None
        # such tokens are looked for in text that is normalised already, which other text may become
        loose = [token.content for token in added if token.normalized] if normalizer is not None else []
        self._loose = {normalizer.normalize_str(token): token for token in loose}
        self._normalizer = normalizer
        self.stand_ins = PlaceholderTokenizer(tokenizer, sorted(every))

    def find(self, row: PreferenceRow) -> str | None:
        """Return a control token that the row spells, or None."""
        for text, pattern in self._texts(row):
            if found := pattern.search(text):
                return found.group()
            if self._loose and (loose := self._find_normalized(text, pattern)):
                return loose
        return None

    def _find_normalized(self, text: str, pattern: re.Pattern[str]) -> str | None:
        normal = self._normalizer.normalize_str(text)
        return next((token for shape, token in self._loose.items() if shape in normal and pattern.search(token)), None)

    def _texts(self, row: PreferenceRow) -> Iterator[tuple[str, re.Pattern[str]]]:
        """Yield every text of a row that a template may show, and what must not be spelled there."""
        if self._template.is_raw and row.plain is not None:
            yield row.plain.prompt, self._every
            for side in (row.plain.chosen, row.plain.rejected):
                for segment in side:
                    yield segment.text, self._pattern_of(said=segment.scored)
                # texts that are joined with nothing between may spell a token together
                yield "".join((row.plain.prompt, *(segment.text for segment in side))), self._never_said
            return
        for message in (*row.prompt, *row.chosen, *row.rejected):
            pattern = self._pattern_of(said=message["role"] == "assistant")
            for key, value in message.items():
                if key != "role":
                    yield from ((text, pattern) for text in _strings((key, value)))
        yield from ((text, self._every) for text in _strings(row.tools))

    def _pattern_of(self, *, said: bool) -> re.Pattern[str]:
        return self._never_said if said else self._every

    def render_as_text(self, row: PreferenceRow) -> RenderedRow:
        """Render a row so that what its texts spell is text: the template's control tokens are stand-ins."""
        dump = json.dumps(asdict(row), ensure_ascii=False, default=str)
        self.stand_ins.check(dump)
        mark = next((mark for mark in _MARKS if mark not in dump and _escaped(mark) not in dump), None)
        if mark is None:
            raise BadRowError("the text spells a control token and holds every character that could mark it")
        rendered = render(self._mark(row, mark), self._template, self._tokenizer)
        sides = [self._unmark_side(side, mark) for side in (rendered.chosen, rendered.rejected)]
        return replace(
            rendered,
            prompt=self._unmark(rendered.prompt, mark),
            chosen=sides[0],
            rejected=sides[1],
            has_placeholders=True,
        )

    def _mark(self, row: PreferenceRow, mark: str) -> PreferenceRow:
        return replace(
            row,
            prompt=self._mark_messages(row.prompt, mark),
            chosen=self._mark_messages(row.chosen, mark),
            rejected=self._mark_messages(row.rejected, mark),
            tools=_mark_value(row.tools, self._every, mark),
            plain=None if row.plain is None else self._mark_plain(row.plain, mark),
        )

    def _mark_messages(self, messages: Sequence[Message], mark: str) -> list[Message]:
        marked = []
        for message in messages:
            pattern = self._pattern_of(said=message["role"] == "assistant")
            marked.append({"role": message["role"], **_mark_value(_without_role(message), pattern, mark)})
        return marked

    def _mark_plain(self, plain: PlainText, mark: str) -> PlainText:
        def segments(side: Sequence[TextSegment]) -> tuple[TextSegment, ...]:
            return tuple(
                replace(each, text=_mark_value(each.text, self._pattern_of(said=each.scored), mark) + mark)
                for each in side
            )

        # a mark after each piece, too: nothing stands between them
        prompt = _mark_value(plain.prompt, self._every, mark) + mark
        return PlainText(prompt, segments(plain.chosen), segments(plain.rejected))

    def _unmark_side(self, side: SideText, mark: str) -> SideText:
        spans = side.scored_spans
        if spans is not None:
            places = [
                (len(_without(side.text[:begin], mark)), len(_without(side.text[:end], mark))) for begin, end in spans
            ]
            spans = tuple(places)
        return SideText(self._unmark(side.text, mark), spans)

    def _unmark(self, text: str, mark: str) -> str:
        return _without(self._every.sub(lambda found: self.stand_ins.of_token[found.group()], text), mark)


def _is_control(token: str) -> bool:
    return len(token) > 1 and not token.isspace()


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """Match any of the tokens, the longest where several begin at one place, as tokenizers do."""
    longest_first = sorted(tokens, key=lambda token: (-len(token), token))
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _probe(tokenizer: PreTrainedTokenizerBase, template: Template, every: Iterable[str]) -> str:
    """Render a plain conversation, without the header of an answer that may open a thought."""
    if template.is_raw:
        return ""
    turns = [{"role": role, "content": "?"} for role in ("system", "user", "assistant", "user")]
    for messages in (turns, turns[1:]):
        try:
            return apply_template(tokenizer, template, messages, None, header=False)
        except BadRowError:
            continue
    # a template that refuses both: any token may be one of its turns
    return " ".join(every)


def _strings(value: Any) -> Iterator[str]:
    """Yield the texts within a value, keys too: a template may show a whole object."""
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
        # spellings may overlap, so that breaking one leaves another
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
    # templates that write JSON may write the mark as an escape
    return text.replace(mark, "").replace(_escaped(mark), "")


def _escaped(mark: str) -> str:
    return f"\\u{ord(mark):04x}"
