"""The pairs of a run, and the rows that its steps have in a layout, from the lengths of the pairs alone.

Every response token counts as scored: a store's lengths do not say which turns of a conversation are masked.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from thresher.builders.data import find_store, shares_of
from thresher.builders.data_parts import data_parts, data_settings
from thresher.builders.inputs import RunInputs
from thresher.config import DPOConfig
from thresher.data.batching.batches import MicroBatching, num_sequences
from thresher.data.batching.plan import Plan
from thresher.data.example import UNITS
from thresher.data.prepare.prepare import prepare
from thresher.data.store.joined import Stores, join
from thresher.data.store.reader import ExampleStore, Lengths
from thresher.errors import UserError
from thresher.models.layouts import Layout

# of data files that are prepared for a plan: about ten seconds
_BYTES_TO_PREPARE = 20e6
_ASSUMED_STEPS = 100
_ROWS_TO_LOOK_AT = 64
# of an example, by what the losses read; lists have four in UltraFeedback
_RESPONSES = {"labels": 1, "pairs": 2, "lists": 4}
_SAMPLED_STEPS, _SAMPLED_RANKS = 8, 64


@dataclass(frozen=True)
class PairLengths:
    lengths: Lengths  # [examples, (prompt, response, response...)]
    source: str  # where they come from, for the report
    is_assumed: bool = False
    has_mismatched: bool = False  # the second response is KTO's mismatched answer
    unit: str = "pairs"  # what the examples are called


def find_lengths(config: DPOConfig, parts: RunInputs, pairs_per_step: int) -> PairLengths:
    """Lengths of the training examples. Writes nothing into the directories of the run."""
    found = _find_lengths(config, parts, pairs_per_step)
    if not parts.objective.reads_mismatched:
        return found
    return replace(found, lengths=_with_mismatched(found.lengths, config.seed), has_mismatched=True)


def _find_lengths(config: DPOConfig, parts: RunInputs, pairs_per_step: int) -> PairLengths:
    try:
        sources = data_parts(config)
        found = {name: find_store(config, each, parts.tokenizer) for name, each in sources.items()}
        stores = {name: store for name, store in found.items() if store is not None}
        if len(stores) == len(sources):
            joined = join(stores)
            source = f"prepared {joined.unit} in {', '.join(dict.fromkeys(str(each.path) for each in stores.values()))}"
            return PairLengths(_training_lengths(config, joined), source, unit=joined.unit)
        if _is_cheap(config):
            lengths, unit = _prepare(config, parts.tokenizer)
            return PairLengths(lengths, f"{unit} prepared for this plan", unit=unit)
        reason = "the data is not prepared"
    except (UserError, OSError) as error:
        if any(each.args.store for each in data_parts(config).values()):
            raise
        reason = f"the data cannot be read: {error}"
    return _assumed(config, parts, pairs_per_step, reason)


def _training_lengths(config: DPOConfig, stores: Stores) -> Lengths:
    """The lengths of the examples that the first epoch visits."""
    if config.validation is not None and config.validation.split is not None:
        stores = stores.split(config.validation.split, config.seed)[0]
    shares = shares_of(config, stores)
    if not shares:
        return stores.lengths
    return np.concatenate(
        [
            np.take(store.lengths, share.rows(np.arange(share.count, dtype=np.uint64), config.seed, 0, at), axis=0)
            for at, (store, share) in enumerate(zip(stores.parts.values(), shares, strict=True))
        ]
    )


def _prepare(
    config: DPOConfig, tokenizer: PreTrainedTokenizerBase, max_samples: int | None = None
) -> tuple[Lengths, str]:
    """Prepare the data, or its first rows, in a temporary directory; also return what its examples are called."""
    stores: dict[str, ExampleStore] = {}
    with tempfile.TemporaryDirectory() as directory:
        for number, (name, part) in enumerate(data_parts(config).items()):
            if part.args.store:
                stores[name] = ExampleStore.open(part.args.store)
                continue
            settings, path = data_settings(config, part), Path(directory) / str(number)
            prepare(settings if max_samples is None else replace(settings, max_samples=max_samples), tokenizer, path)
            stores[name] = ExampleStore.open(path)
        joined = join(stores)
        return np.array(_training_lengths(config, joined) if max_samples is None else joined.lengths), joined.unit


def _local_files(config: DPOConfig) -> list[Path] | None:
    """The data files; None if one of them is not local."""
    settings = [data_settings(config, part) for part in data_parts(config).values() if not part.args.store]
    files = [Path(name) for each in settings for name in each.file_names]
    return files if files and all(file.is_file() for file in files) else None


def _is_cheap(config: DPOConfig) -> bool:
    files = _local_files(config)
    return files is not None and sum(file.stat().st_size for file in files) <= _BYTES_TO_PREPARE


def _assumed(config: DPOConfig, parts: RunInputs, pairs_per_step: int, reason: str) -> PairLengths:
    """Examples as long as sequence_length allows, half of it prompt: an upper bound.

    The first rows of local files say how many responses they have at most, the losses if they cannot be read.
    """
    half = config.sequence_length // 2
    count = pairs_per_step * min(config.max_steps or _ASSUMED_STEPS, _ASSUMED_STEPS)
    num_responses, origin = _RESPONSES[parts.objective.reads], "as its losses read"
    unit = UNITS[parts.objective.reads]
    with suppress(UserError, OSError):
        if _local_files(config) is not None:
            first, unit = _prepare(config, parts.tokenizer, _ROWS_TO_LOOK_AT)
            num_responses, origin = first.shape[1] - 1, "as its first rows have"
    lengths = np.full((count, 1 + num_responses), half, dtype=np.uint32)
    what = f"{unit} of {num_responses} responses, {origin}," if unit == UNITS["lists"] else unit
    source = f"assumed: {count:,} {what} of sequence_length {config.sequence_length} tokens, because {reason}"
    return PairLengths(lengths, source, is_assumed=True, unit=unit)


def _with_mismatched(lengths: Lengths, seed: int) -> Lengths:
    """Add the length of a second response: the answer of the example before, in a random order, cut to the longest."""
    lengths = np.asarray(lengths)
    order = np.random.default_rng(seed).permutation(len(lengths))
    before = np.empty(len(lengths), dtype=np.int64)
    before[order] = np.roll(lengths[order, 1], 1)
    longest = lengths[:, :2].sum(axis=1, dtype=np.int64).max()
    room = np.maximum(1, longest - lengths[:, 0].astype(np.int64))
    return np.column_stack([lengths[:, :2], np.minimum(before, room)]).astype(lengths.dtype)


def split_mismatched(lengths: Lengths, has_mismatched: bool) -> tuple[Lengths, Lengths | None]:
    """Return what is trained, and what is scored in a forward of its own: the prompts with KTO's mismatched answers."""
    return (lengths[:, :2], lengths[:, ::2]) if has_mismatched else (lengths, None)


@dataclass(frozen=True)
class Rows:
    """Rows of micro-batches."""

    total: int  # in the model's input, padding included
    scored: int  # that reach the LM head
    attended: int  # keys that the queries attend to, summed
    useful: int  # tokens of the sequences, of which an example has one per response


def rows_of(lengths: Lengths, layout: Layout) -> Rows:
    """Count the rows of a micro-batch: lengths [examples, (prompt, response, response...)]."""
    return rows_of_batches(lengths, [np.arange(len(lengths))], layout)[0]


def rows_of_batches(lengths: Lengths, batches: Sequence[npt.NDArray[np.int64]], layout: Layout) -> tuple[Rows, ...]:
    """Count the rows of micro-batches, each as positions in lengths."""
    if not batches:
        return ()
    order, sizes = np.concatenate(batches), [len(batch) for batch in batches]
    starts = np.cumsum([0, *sizes[:-1]])
    prompt, responses = lengths[order, 0].astype(np.int64), lengths[order, 1:].astype(np.int64)
    count = num_sequences(lengths[order])
    sequences = (prompt[:, None] + responses) * (responses > 0)
    useful = sequences.sum(axis=1)
    scored = {"response": responses.sum(axis=1), "all": useful - count, "end": count}[layout.scored]
    if layout.needs_pair_attention:
        omitted = layout.scored != "end"  # the last token of each sequence
        total, attended = useful - omitted * count, _causal(sequences - omitted).sum(axis=1)
        if layout.shares_prompt:
            total, attended = total - (count - 1) * prompt, attended - (count - 1) * _causal(prompt)
    else:
        width = np.maximum.reduceat(sequences.max(axis=1), starts).repeat(sizes)
        total, attended = count * width, count * _causal(width)
    sums = np.add.reduceat(np.stack([total, scored, attended, useful], axis=1), starts)
    return tuple(Rows(*numbers) for numbers in sums.tolist())


def _causal(length: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Keys that the queries of causal sequences attend to."""
    return length * (length + 1) // 2


@dataclass(frozen=True)
class Workload:
    """Steps of a run, sampled and averaged, as the slowest data-parallel rank computes them."""

    step: Rows
    micro_batches: float
    most_micro_batches: int  # of a rank in a step
    largest: Rows  # the micro-batch with most rows
    useful_per_step: float  # of all ranks
    rows_per_step: float
    padded_rows_per_step: float
    mismatched: Rows | None = None  # of KTO's forward over mismatched answers, per data-parallel rank

    @property
    def saved_rows(self) -> float:
        """Share of rows that the layout saves, compared with rows padded to the longest of each micro-batch."""
        return 1 - self.rows_per_step / self.padded_rows_per_step


def sampled_steps(plan: Plan, *, is_assumed: bool) -> list[int]:
    """Evenly spaced steps of the first epoch; assumed pairs are alike, and so are their steps."""
    num_steps = min(plan.num_steps, plan.steps_per_epoch)
    numbers = np.unique(np.linspace(0, num_steps - 1, 1 if is_assumed else _SAMPLED_STEPS).astype(int))
    return [int(number) for number in numbers]


def sample_workload(
    plan: Plan,
    batching: MicroBatching,
    layout: Layout,
    num_ranks: int,
    *,
    is_assumed: bool,
    has_mismatched: bool = False,
) -> Workload:
    """Split the sampled steps as training would."""
    numbers = sampled_steps(plan, is_assumed=is_assumed)
    ranks = np.unique(np.linspace(0, num_ranks - 1, _SAMPLED_RANKS).astype(int)).tolist()
    lengths, others = split_mismatched(batching.lengths, has_mismatched)
    slowest, everything, counts, padded, useful, scored = [], [], [], 0.0, 0, []
    for number in numbers:
        ids = plan.pair_ids(number)
        split = batching.split_ranks(ids, ranks, num_ranks)
        rows = iter(rows_of_batches(lengths, [batch for batches in split for batch in batches], layout))
        by_rank = [list(islice(rows, len(batches))) for batches in split]
        counts.append(max(map(len, by_rank)))
        slowest.append(max(map(sum_rows, by_rank), key=lambda each: each.total))
        everything += [each for batches in by_rank for each in batches]
        useful += rows_of(lengths[ids], layout).useful
        scored += [] if others is None else [rows_of(others[ids], layout)]
        padded += _padded_rows(lengths[ids], max(1, round(len(ids) / num_ranks / counts[-1])))
    total, count = sum_rows(slowest), len(numbers)
    return Workload(
        Rows(*(round(each / count) for each in vars(total).values())),
        sum(counts) / count,
        max(counts),
        max(everything, key=lambda each: each.total),
        useful / count,
        sum(each.total for each in everything) * num_ranks / len(ranks) / count,
        padded / count,
        Rows(*(round(each / count / num_ranks) for each in vars(sum_rows(scored)).values())) if scored else None,
    )


def sum_rows(rows: Sequence[Rows]) -> Rows:
    return Rows(*(sum(getattr(each, field.name) for each in rows) for field in fields(Rows)))


def _padded_rows(lengths: Lengths, pairs_per_batch: int) -> float:
    """Rows of padded micro-batches of consecutive pairs."""
    widths = (lengths[:, :1] + lengths[:, 1:]).max(axis=1).astype(np.int64)
    starts = np.arange(0, len(widths), pairs_per_batch)
    rows = np.add.reduceat(num_sequences(lengths), starts)
    return float((rows * np.maximum.reduceat(widths, starts)).sum())
