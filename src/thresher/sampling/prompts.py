"""The fixed prompts of a run: the first different ones of the validation pairs, or those of a file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from thresher.data.rows.formats import FORMAT_BY_NAME, to_preference_row, with_system
from thresher.data.rows.parsing import BadRowError, parse_row
from thresher.data.store.reader import PairStore
from thresher.data.tokenization.chat_template import Template, render
from thresher.data.tokenization.control_tokens import ControlTokens
from thresher.data.tokenization.tokenizer import PairTokenizer
from thresher.errors import UserError


@dataclass(frozen=True)
class Prompt:
    """A prompt as the model reads it, with the generation prompt of the chat template, and as people and judges do."""

    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class PromptFile:
    """Prompts of a text file, one per line, or of a file of JSON lines with a `prompt`: a text or messages.

    template, system_prompt: those of the training data.
    """

    path: Path
    template: Template
    system_prompt: str | None = None

    def read(self, tokenizer: PreTrainedTokenizerBase, num_prompts: int) -> list[Prompt]:
        """Read the first different prompts, rendered and tokenized like those of training pairs."""
        to_tokens = PairTokenizer(tokenizer, self.template, ControlTokens(tokenizer, self.template).placeholders)
        found: dict[tuple[int, ...], Prompt] = {}
        for number, line in self._lines():
            try:
                value = self._prompt(line)
                # the sides must differ at once, so that the prompt ends where they begin
                row = to_preference_row({"prompt": value, "chosen": "A", "rejected": "B"}, FORMAT_BY_NAME["prompt"], {})
                (tokenized,) = to_tokens([render(with_system(row, self.system_prompt), self.template, tokenizer)])
            except BadRowError as error:
                raise UserError(f"line {number} of {self.path} is not a prompt: {error}; fix or remove it") from error
            token_ids = tuple(tokenized.pair.prompt_ids.tolist())
            found.setdefault(token_ids, Prompt(_shown(value), token_ids))
            if len(found) == num_prompts:
                break
        if not found:
            raise UserError(f"{self.path} contains no prompts; write one per line")
        return list(found.values())

    def _lines(self) -> Iterator[tuple[int, str]]:
        try:
            lines = self.path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"cannot read samples.prompts_file {self.path}: {error}") from error
        return ((number, line) for number, line in enumerate(lines, start=1) if line.strip())

    def _prompt(self, line: str) -> Any:
        if self.path.suffix not in (".jsonl", ".json"):
            return line
        row = parse_row(line.encode())
        if "prompt" not in row:
            raise BadRowError("it has no column `prompt`")
        return row["prompt"]


def store_prompts(store: PairStore, tokenizer: PreTrainedTokenizerBase, num_prompts: int) -> list[Prompt]:
    """The first different prompts of the pairs."""
    found: dict[tuple[int, ...], Prompt] = {}
    for pair_id in range(len(store)):
        token_ids = tuple(store[pair_id].prompt_ids.tolist())
        if token_ids and token_ids not in found:  # transcripts without a shared start have an empty prompt
            found[token_ids] = Prompt(str(tokenizer.decode(list(token_ids), skip_special_tokens=True)), token_ids)
            if len(found) == num_prompts:
                break
    if not found:
        raise UserError("the validation pairs have no prompts to sample answers to; set samples.prompts_file")
    return list(found.values())


def _shown(value: Any) -> str:
    """A prompt as text: that of its only message, or the messages with their roles."""
    if isinstance(value, str):
        return value
    messages = [each for each in value if isinstance(each, dict)]
    if len(messages) == 1:
        return str(messages[0].get("content"))
    return "\n\n".join(f"{each.get('role')}: {each.get('content')}" for each in messages)
