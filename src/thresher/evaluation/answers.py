"""Answers to the questions of AlpacaEval and Arena-Hard, in the files that their judges read.

The format follows from the questions: a JSON list with `instruction` is AlpacaEval's (alpaca_eval.json), JSON lines
with `uid` and `prompt` are Arena-Hard's (question.jsonl). Judging is left to those projects.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from thresher import durable
from thresher.data.rows.parsing import BadRowError
from thresher.data.tokenization.chat_template import load_template
from thresher.errors import UserError
from thresher.evaluation.models import EvaluatedModel
from thresher.sampling.generation import GenerationSettings, generate
from thresher.sampling.sampler import end_tokens, prompt_reader, to_answer

Format = Literal["alpaca_eval", "arena_hard"]
_PROMPT_KEY: Mapping[Format, str] = {"alpaca_eval": "instruction", "arena_hard": "prompt"}
_SUFFIX: Mapping[Format, str] = {"alpaca_eval": ".json", "arena_hard": ".jsonl"}
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Questions:
    """The questions of a file, in its order."""

    format: Format
    rows: Sequence[Mapping[str, Any]]

    @property
    def prompts(self) -> list[str]:
        return [row[_PROMPT_KEY[self.format]] for row in self.rows]

    def file_of(self, directory: Path, generator: str) -> Path:
        """The file of a model's answers. Arena-Hard takes the name of the file for the name of the model."""
        return directory / f"{generator}{_SUFFIX[self.format]}"

    def encode(self, generator: str, answers: Sequence[str]) -> bytes:
        """The content of the file of a model's answers."""
        pairs = list(zip(self.rows, answers, strict=True))
        if self.format == "alpaca_eval":
            rows = [
                {"instruction": row["instruction"], "output": answer, "generator": generator}
                | {key: row[key] for key in ("dataset",) if key in row}
                for row, answer in pairs
            ]
            return (json.dumps(rows, ensure_ascii=False, indent=2) + "\n").encode()
        lines = [
            {
                "uid": row["uid"],
                "ans_id": uuid.uuid4().hex,
                "model": generator,
                "messages": [
                    {"role": "user", "content": row["prompt"]},
                    {"role": "assistant", "content": {"answer": answer}},
                ],
                "tstamp": time.time(),
                # lengths in tokens of GPT-4o and counts of Markdown: Arena-Hard's utils/add_markdown_info.py adds them
                "metadata": {},
            }
            for row, answer in pairs
        ]
        return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode()


def read_questions(path: Path, limit: int | None) -> Questions:
    """Read the first questions of a file."""
    try:
        text = path.read_text(encoding="utf-8")
        is_list = text.lstrip().startswith("[")
        rows = json.loads(text) if is_list else [json.loads(line) for line in text.splitlines() if line.strip()]
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"the questions {path} cannot be read: {error}") from error
    name: Format = "alpaca_eval" if is_list else "arena_hard"
    needed = (_PROMPT_KEY[name],) if is_list else (_PROMPT_KEY[name], "uid")
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict) or not all(isinstance(row.get(key), str) for key in needed):
            raise UserError(
                f"question {number} of {path} has no text {' and '.join(needed)}; give AlpacaEval's alpaca_eval.json, "
                "a list of objects with `instruction`, or Arena-Hard's question.jsonl with `uid` and `prompt`"
            )
    if not rows:
        raise UserError(f"{path} has no questions; give the file of AlpacaEval or of Arena-Hard")
    return Questions(name, rows[:limit])


def answer(
    model: EvaluatedModel, prompts: Sequence[str], settings: GenerationSettings, batch_size: int, progress: Progress
) -> list[str]:
    """Generate an answer to each prompt, with the template and system prompt of the training data."""
    loaded, tokenizer = model.load()
    torch.nn.Module.to(loaded, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    args = model.data_args
    read = prompt_reader(
        tokenizer, load_template(tokenizer, args.template, args.template_arguments), args.system_prompt
    )
    token_ids = []
    for number, prompt in enumerate(prompts, start=1):
        try:
            token_ids.append(read(prompt).token_ids)
        except BadRowError as error:
            raise UserError(f"question {number} is not a prompt: {error}; remove it") from error
    end_ids = end_tokens(tokenizer, loaded)
    answers: list[str] = []
    for start, batch in _batches(token_ids, batch_size):
        # with one seed, all batches would draw the same random numbers
        generated = generate(loaded, batch, replace(settings, seed=settings.seed + start), end_ids)
        answers += [to_answer(tokenizer, each, end_ids).text for each in generated]
        progress(f"answers of the {model.name}", len(answers), len(prompts))
    return answers


def _batches(values: Sequence[tuple[int, ...]], size: int) -> Iterator[tuple[int, Sequence[tuple[int, ...]]]]:
    for start in range(0, len(values), size):
        yield start, values[start : start + size]


def write_answers(questions: Questions, output: Path, generator: str, answers: Sequence[str]) -> Path:
    path = questions.file_of(output, generator)
    output.mkdir(parents=True, exist_ok=True)
    durable.replace(path, questions.encode(generator, answers))
    return path
