"""Sample answers of policy and reference to fixed prompts at an evaluation: collective, though only rank 0 generates.

The prompts are the first distinct ones of the validation pairs, or of a file.

An engine may shard its weights along any mesh dimensions. Every process writes its part to files, as for a checkpoint,
and rank 0 loads them into a plain transformers model, the one that `thresher export` would write. One model is in
memory at a time, next to the policy in training. The random generators of training are not touched.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from thresher import durable
from thresher.checkpoint.state import capture_rng, restore_rng
from thresher.data.example import Example, ExampleBatch, Response
from thresher.data.rows.formats import FORMAT_BY_NAME, to_preference_row, with_system
from thresher.data.rows.parsing import BadRowError, parse_row
from thresher.data.store.joined import Stores
from thresher.data.tokenization.chat_template import Template, render
from thresher.data.tokenization.control_tokens import ControlTokens
from thresher.data.tokenization.tokenizer import RowTokenizer
from thresher.engines.engine import TrainEngine
from thresher.engines.native.build import infer_engine
from thresher.errors import UserError
from thresher.models.layouts import Layout
from thresher.sampling.answers import Answer, SampledAnswers, SampledPrompt
from thresher.sampling.generation import GenerationSettings, TokenSequence, generate

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prompt:
    """A prompt as the model reads it, with the generation prompt of the chat template, and as people and judges do."""

    text: str
    token_ids: tuple[int, ...]


def file_prompts(
    path: Path, tokenizer: PreTrainedTokenizerBase, template: Template, system_prompt: str | None, num_prompts: int
) -> list[Prompt]:
    """The first distinct prompts of a text file, one per line, or of JSON lines with a `prompt`: a text or messages."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read samples.prompts_file {path}: {error}") from error
    read = prompt_reader(tokenizer, template, system_prompt)
    found: dict[tuple[int, ...], Prompt] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = parse_row(line.encode()) if path.suffix in (".jsonl", ".json") else {"prompt": line}
            if "prompt" not in row:
                raise BadRowError("it has no column `prompt`")
            prompt = read(row["prompt"])
        except BadRowError as error:
            raise UserError(f"line {number} of {path} is not a prompt: {error}; fix or remove it") from error
        found.setdefault(prompt.token_ids, prompt)
        if len(found) == num_prompts:
            break
    if not found:
        raise UserError(f"{path} contains no prompts; write one per line")
    return list(found.values())


def prompt_reader(
    tokenizer: PreTrainedTokenizerBase, template: Template, system_prompt: str | None
) -> Callable[[Any], Prompt]:
    """Return what reads a prompt, a text or messages; it raises BadRowError for anything else."""
    to_tokens = RowTokenizer(tokenizer, template, ControlTokens(tokenizer, template).placeholders)

    def read(value: Any) -> Prompt:
        # the sides must differ at once: the prompt ends where they begin
        # in plain text, an answer is not the rest of the prompt's last word
        space = " " if template.is_raw and isinstance(value, str) and not value[-1:].isspace() else ""
        sides = {"prompt": value, "chosen": f"{space}A", "rejected": f"{space}B"}
        pair = with_system(to_preference_row(sides, FORMAT_BY_NAME["prompt"], {}), system_prompt)
        (tokenized,) = to_tokens([render(pair, template, tokenizer)])
        return Prompt(_shown(value), tuple(tokenized.example.prompt_ids.tolist()))

    return read


def store_prompts(store: Stores, tokenizer: PreTrainedTokenizerBase, num_prompts: int) -> list[Prompt]:
    """The first distinct prompts of the pairs."""
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
    """A prompt as text: its only message, or the messages with their roles."""
    if isinstance(value, str):
        return value
    messages = [each for each in value if isinstance(each, dict)]
    if len(messages) == 1:
        return str(messages[0].get("content"))
    return "\n\n".join(f"{each.get('role')}: {each.get('content')}" for each in messages)


_PAIRS_PER_BATCH = 8
_WEIGHTS = ".weights"


@dataclass(frozen=True)
class AnswerSampler:
    """Answers the same prompts at each evaluation, with the same seed."""

    engine: TrainEngine
    # called on rank 0 with the directory of this step's weights
    load_policy: Callable[[Path], PreTrainedModel]
    load_reference: Callable[[Path], PreTrainedModel]
    reference_key: str | None  # identifies the reference's weights and precision; None if they change during the run
    layout: Layout
    settings: GenerationSettings
    directory: Path  # where the weights of a step pass through, and the reference's answers are kept
    load_prompts: Callable[[], tuple[PreTrainedTokenizerBase, list[Prompt]]]  # called on rank 0 only
    # the tensors that a snapshot of the policy contains besides its weights
    extra: Callable[[], Mapping[str, Mapping[str, Tensor]]] = dict

    def sample(self) -> SampledAnswers | None:
        """Return the answers at the current weights on rank 0, None on the other ranks; collective."""
        world, files = self.engine.dp_group.world, self.directory / _WEIGHTS
        write = self.engine.weight_files(self.extra())
        if world.rank == 0:
            durable.refuse_link(files)
            shutil.rmtree(files, ignore_errors=True)  # of a run that was killed
            files.mkdir(parents=True)
        world.all_gather_object(None)  # the directory exists
        write(files)
        world.all_gather_object(None)  # the files are complete
        if world.rank != 0:
            return None
        training_rng = capture_rng()
        try:
            return self._sample(files)
        finally:
            restore_rng(training_rng)
            shutil.rmtree(files, ignore_errors=True)

    def _sample(self, files: Path) -> SampledAnswers:
        tokenizer, prompts = self.load_prompts()
        token_ids = [each.token_ids for each in prompts]
        policy = self._on_device(self.load_policy(files))
        end_ids = end_tokens(tokenizer, policy)
        answers = generate(policy, token_ids, self.settings, end_ids)
        policy_logps = self._score(policy, token_ids, answers)
        del policy  # one model at a time
        reference = self._on_device(self.load_reference(files))
        others = self._reference_answers(reference, token_ids, end_ids)
        reference_logps = self._score(reference, token_ids, answers)
        return SampledAnswers(
            tuple(
                SampledPrompt(
                    prompt.text,
                    to_answer(tokenizer, answer, end_ids),
                    to_answer(tokenizer, other, end_ids),
                    policy_logp - reference_logp,
                    prompt.token_ids,
                )
                for prompt, answer, other, policy_logp, reference_logp in zip(
                    prompts, answers, others, policy_logps, reference_logps, strict=True
                )
            ),
            draws_from_policy=self.settings.draws_from_model,
        )

    def _on_device(self, model: PreTrainedModel) -> PreTrainedModel:
        torch.nn.Module.to(model, self.engine.device)
        return model

    def _reference_answers(
        self, model: PreTrainedModel, prompts: Sequence[TokenSequence], end_ids: Sequence[int]
    ) -> list[TokenSequence]:
        """Generate the reference's answers, or read them from an earlier evaluation of the same weights and prompts."""
        if self.reference_key is None:
            return generate(model, prompts, self.settings, end_ids)
        identity = [self.reference_key, repr(self.settings), prompts, list(end_ids), str(model.device)]
        identity += [torch.__version__, transformers.__version__]
        key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
        path = self.directory / "reference.json"
        with suppress(OSError, ValueError, KeyError, TypeError):  # missing or damaged: generate them again
            stored = json.loads(path.read_bytes())
            if stored["key"] == key:
                return [tuple(map(int, each)) for each in stored["answers"]]
        answers = generate(model, prompts, self.settings, end_ids)
        durable.replace(path, json.dumps({"key": key, "answers": answers}).encode())
        return answers

    def _score(
        self, model: PreTrainedModel, prompts: Sequence[TokenSequence], answers: Sequence[TokenSequence]
    ) -> list[float]:
        """The logp of each answer, by the code that scores pairs in training."""
        scorer, logps = infer_engine(model, self.layout, model.dtype), []
        examples = []
        for texts in zip(prompts, answers, strict=True):
            prompt, answer = (np.array(token_ids, dtype=np.int32) for token_ids in texts)
            examples.append(Example(prompt, (Response(answer),)))
        for start in range(0, len(examples), _PAIRS_PER_BATCH):
            batch = tuple(examples[start : start + _PAIRS_PER_BATCH])
            scored = scorer.score(ExampleBatch(np.arange(start, start + len(batch), dtype=np.int64), batch))
            logps += scored.chosen.sums().tolist()
        return logps


def end_tokens(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> list[int]:
    """The tokens that end an answer: the one that training pairs end with, and the ones in the model's config."""
    named = model.generation_config.eos_token_id if model.generation_config is not None else None
    others = [] if named is None else [named] if isinstance(named, int) else list(named)
    return list(dict.fromkeys([int(tokenizer.eos_token_id), *others]))


def to_answer(tokenizer: PreTrainedTokenizerBase, token_ids: TokenSequence, end_ids: Sequence[int]) -> Answer:
    text = str(tokenizer.decode(list(token_ids), skip_special_tokens=True))
    return Answer(text, token_ids, token_ids[-1] in end_ids)
