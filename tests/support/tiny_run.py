"""A run from config to trained weights with the objects that `builders` makes, on random pairs and models."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.tiny_llama import VOCAB
from thresher.builders.engines import build_policy
from thresher.builders.inputs import RunInputs, scored_of
from thresher.builders.reference import build_beside, open_reference, score_missing
from thresher.builders.trainer import build_trainer
from thresher.config import DPOConfig, parse_config
from thresher.data.example import Example, ExampleBatch
from thresher.data.store.arrow_schema import hash_example
from thresher.models.layouts import PackedLayout, choose_layout
from thresher.models.loading.load import load_model_config
from thresher.observability.log_files import SKIPPED_STEPS
from thresher.observability.trackers.jsonl import StepLog
from thresher.reference.scorers import Reference
from thresher.training.loop import fit
from thresher.training.trainer import RankTrainer

LAYOUT = PackedLayout(shares_prompt=True)


class PairsInMemory:
    """The part of ExampleStore that a trainer uses."""

    unit = "pairs"
    subsets: list[str] = []

    @property
    def parts(self) -> dict[str, Any]:
        return {"": self}

    def part_of(self, ids: np.ndarray) -> np.ndarray:
        return np.zeros(len(ids), dtype=np.int64)

    def __init__(self, pairs: Sequence[Example]):
        self.pairs = list(pairs)
        num_sides = max((len(pair.responses) for pair in self.pairs), default=2)
        self.lengths = np.zeros((len(self.pairs), 1 + num_sides), dtype=np.uint32)
        for row, pair in zip(self.lengths, self.pairs, strict=True):
            sides = [pair.prompt_ids, *(response.ids for response in pair.responses)]
            row[: len(sides)] = [len(ids) for ids in sides]

    def __len__(self) -> int:
        return len(self.pairs)

    @property
    def digest(self) -> str:
        return hashlib.sha256(b"".join(hash_example(pair).pair for pair in self.pairs)).hexdigest()

    @property
    def longest_example(self) -> int:
        return int((self.lengths[:, 0] + self.lengths[:, 1:].max(axis=1)).max())

    def __getitem__(self, pair_id: int) -> Example:
        return self.pairs[pair_id]

    def prompt_hashes(self, ids: np.ndarray) -> np.ndarray:
        return np.frombuffer(b"".join(hash_example(self.pairs[int(i)]).prompt for i in ids), dtype="V16")

    def number_in_files(self, pair_id: int) -> int:
        return pair_id

    def hashes(self) -> Iterator[np.ndarray]:
        yield np.frombuffer(b"".join(hash_example(pair).pair for pair in self.pairs), dtype="V16")

    def read(self, ids: Sequence[int]) -> ExampleBatch:
        return ExampleBatch(np.asarray(ids, dtype=np.int64), tuple(self.pairs[int(i)] for i in ids))


def noise_pairs(count: int, seed: int = 0) -> PairsInMemory:
    """Pairs of random tokens, 1 to 4 in a prompt and 1 to 9 in a response."""
    draw = np.random.default_rng(seed)

    def tokens(most: int) -> np.ndarray:
        return draw.integers(3, VOCAB, draw.integers(1, most + 1)).astype(np.int32)

    return PairsInMemory([Example.pair(tokens(4), tokens(9), tokens(9)) for _ in range(count)])


def noise_labels(count: int, seed: int = 0) -> PairsInMemory:
    """The chosen side of noise pairs; two of three are desirable."""
    pairs = noise_pairs(count, seed).pairs
    labels = [float(at % 3 != 0) for at in range(count)]
    return PairsInMemory(
        [
            replace(pair, responses=(pair.chosen._replace(value=label),))
            for pair, label in zip(pairs, labels, strict=True)
        ]
    )


def noise_lists(count: int, seed: int = 0) -> PairsInMemory:
    """Two to four random responses per prompt, with scores."""
    others = zip(noise_pairs(count, seed).pairs, noise_pairs(count, seed + 100).pairs, strict=True)
    examples = []
    for at, (pair, other) in enumerate(others):
        responses = (*pair.responses, *other.responses)[: 2 + at % 3]
        ranked = tuple(each._replace(value=5.0 - rank) for rank, each in enumerate(responses))
        examples.append(replace(pair, responses=ranked))
    return PairsInMemory(examples)


class MetricsInMemory:
    """A tracker that keeps its records."""

    def __init__(self) -> None:
        self.records: list[tuple[int, dict[str, float]]] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.records.append((step, dict(metrics)))

    def evaluations(self) -> list[dict[str, float]]:
        return [metrics for _, metrics in self.records if "eval/loss" in metrics]


@dataclass(frozen=True)
class TinyRun:
    """The objects of a run."""

    config: DPOConfig
    trainer: RankTrainer
    reference: Reference
    mode: str  # of the reference
    log: MetricsInMemory

    def fit(self) -> dict[str, float]:
        """Train to the end of the plan."""
        resume_step = self.trainer.step or None
        skipped = StepLog(Path(self.config.output_dir) / "logs" / SKIPPED_STEPS, resume_step=resume_step)
        return fit(self.trainer, self.config, self.trainer.plan, self.log, skipped)


def build_run(values: Mapping[str, Any], train: PairsInMemory, validation: PairsInMemory | None = None) -> TinyRun:
    """Build a run as the pipeline does, from the same config."""
    section = {} if validation is None else {"validation": {"data_args": {"file_name": "in memory"}}}
    config = parse_config({**section, **values})
    attention = config.actor_train.model_args.attn_implementation or config.reference.model_args.attn_implementation
    configs = [load_model_config(str(config.policy_path))]
    layout, _ = choose_layout(config.layout, configs, attention, pad_id=0, scored=scored_of(config))
    policy = build_policy(config, layout)
    inputs = RunInputs(config).replace(layout=layout, train=train, validation=validation)
    reference = open_reference(inputs, policy)
    if any(split.num_missing for split in reference.cached):
        deque(score_missing(reference.cached, build_beside(inputs, policy)), maxlen=0)
    return TinyRun(config, build_trainer(inputs, policy, reference), reference, inputs.mode, MetricsInMemory())
