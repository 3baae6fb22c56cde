"""Source files to a store of token pairs, with an account of every row.

Reading and writing happen in this process, in the order of the files; rendering, tokenising and hashing in
`num_processes` others. Which pairs a store holds, and its bytes, do not depend on how many there are.
"""

from __future__ import annotations

import json
import multiprocessing
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

from thresher.data.blocks import BadRow, BlockResult, BlockTask, BlockWorker, run_in_worker, start_worker
from thresher.data.identity import digest_sources, make_identity, settings_that_matter, store_identity, tokenizer_digest
from thresher.data.lint import Finding, find_repeats, measure_length_bias
from thresher.data.report import PrepareReport, measure_percentiles
from thresher.data.settings import DataSettings
from thresher.data.sources import SourceFile, resolve_sources
from thresher.data.store import LENGTH_DTYPE, Lengths
from thresher.data.store_writer import StoreWriter, check_output
from thresher.data.tasks import TaskReader
from thresher.data.template import Template, load_template
from thresher.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["DataSettings", "NoPairsError", "PrepareReport", "Progress", "prepare", "store_identity", "tokenizer_digest"]


@dataclass(frozen=True)
class Progress:
    """How far a preparation is; bytes are of the source files as stored."""

    rows_read: int
    pairs_kept: int
    bytes_read: int
    bytes_total: int


class NoPairsError(UserError):
    """No row became a pair; `report` tells what became of them."""

    def __init__(self, report: PrepareReport) -> None:
        causes = {**report.dropped, **({"bad_rows": report.bad_rows} if report.bad_rows else {})}
        told = [
            f"{count} {cause} ({_mend_of(cause, report)})"
            for cause, count in sorted(causes.items(), key=lambda each: (-each[1], each[0]))
        ]
        super().__init__(f"none of {report.rows_read} rows became a pair: {'; '.join(told)}")
        self.report = report


def _mend_of(cause: str, report: PrepareReport) -> str:
    mends = {
        "bad_rows": f"most often: {next(iter(report.bad_reasons), '')}",
        "empty_response": "a side says nothing",
        "empty_prompt": "the prompt has no token and the tokenizer adds none",
        "identical_sides": "the sides are the same; check chosen_key and rejected_key",
        "too_long": "raise sequence_length or set data_args.truncation",
        "unpaired": "a pair needs a good and a bad answer to the same prompt",
    }
    return mends.get(cause, "raise sequence_length")


def prepare(
    settings: DataSettings,
    tokenizer: PreTrainedTokenizerBase,
    output_dir: str | Path,
    progress: Callable[[Progress], None] | None = None,
    *,
    overwrite: bool = False,
) -> PrepareReport:
    """Build a store at `output_dir` and account for every row."""
    output = Path(output_dir)
    check_output(output, overwrite=overwrite)
    template = load_template(tokenizer, settings.template, settings.template_arguments)
    sources = resolve_sources(settings.file_names)
    digests = digest_sources(sources)
    account = _Account()
    reader = TaskReader(settings, sources, digests)
    with ExitStack() as stack:
        writer = stack.enter_context(StoreWriter(output, settings.shard_rows))
        quarantine = stack.enter_context(_Quarantine(output, settings))
        for result in _run_tasks(reader.tasks(), settings, tokenizer, template, stack):
            account.add(result)
            quarantine.take(result.bad)
            writer.append(result.pairs)
            if progress is not None:
                progress(_progress_of(account, result, sources))
        report = account.close(reader)
        if report.pairs_kept == 0:
            raise NoPairsError(report)
        fields = {
            "identity": make_identity(settings, tokenizer, template, digests),
            "tokenizer_digest": tokenizer_digest(tokenizer),
            "template": settings.template,
            "template_digest": template.digest,
            "settings": settings_that_matter(settings),
            "report": report.to_json(),
        }
        writer.finish(fields, overwrite=overwrite)
    return report


def _run_tasks(
    tasks: Iterator[BlockTask],
    settings: DataSettings,
    tokenizer: PreTrainedTokenizerBase,
    template: Template,
    stack: ExitStack,
) -> Iterator[BlockResult]:
    """Yield results in the order of the tasks, whoever finishes first."""
    if settings.num_processes == 1:
        yield from map(BlockWorker(settings, tokenizer, template), tasks)
        return
    pool = ProcessPoolExecutor(
        settings.num_processes,
        # spawn: a fork would copy the locks of threads that torch and the tokenizers may have started
        mp_context=multiprocessing.get_context("spawn"),
        initializer=start_worker,
        initargs=(settings, tokenizer, template),
    )
    stack.callback(pool.shutdown, wait=True, cancel_futures=True)
    # a bounded window: the reader must not run ahead of the writer by the whole data set
    waiting: deque[Future[BlockResult]] = deque()
    try:
        for task in tasks:
            waiting.append(pool.submit(run_in_worker, task))
            if len(waiting) > 2 * settings.num_processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise UserError(
            f"one of {settings.num_processes} processes that tokenise was killed, most often for want of memory; "
            "use fewer processes"
        ) from error


@dataclass
class _Account:
    """Sums over blocks, in the order of the files."""

    rows_read: int = 0
    pairs_kept: int = 0
    rows_joined: int = 0
    bad_reasons: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    truncated: Counter[str] = field(default_factory=Counter)
    splits_moved: int = 0
    headers_shortened: int = 0
    keys: list[Any] = field(default_factory=list)
    swapped_keys: list[Any] = field(default_factory=list)
    lengths: list[Any] = field(default_factory=list)
    control_tokens: list[int] = field(default_factory=list)

    def add(self, result: BlockResult) -> None:
        self.rows_read += result.task.rows_read
        self.rows_joined += result.task.rows_joined
        self.bad_reasons.update(bad.reason for bad in result.bad)
        self.dropped.update(result.dropped)
        self.truncated.update(result.truncated)
        self.splits_moved += result.splits_moved
        self.headers_shortened += result.headers_shortened
        self.keys.append(result.keys)
        self.swapped_keys.append(result.swapped_keys)
        self.lengths.append(_lengths_of(result.pairs))
        self.control_tokens.extend(self.pairs_kept + position for position in result.control_tokens)
        self.pairs_kept += result.pairs.num_rows

    def close(self, reader: TaskReader) -> PrepareReport:
        if reader.num_unpaired:
            self.dropped["unpaired"] += reader.num_unpaired
        lengths = np.concatenate(self.lengths)
        has_pairs = self.pairs_kept > 0
        repeats = find_repeats(np.concatenate(self.keys), np.concatenate(self.swapped_keys))
        control = Finding("control_tokens_in_text", len(self.control_tokens), tuple(self.control_tokens[:5]))
        return PrepareReport(
            files=tuple(reader.files),
            rows_read=self.rows_read,
            pairs_kept=self.pairs_kept,
            rows_joined=self.rows_joined,
            bad_rows=self.bad_reasons.total(),
            dropped=dict(sorted(self.dropped.items())),
            truncated=dict(sorted(self.truncated.items())),
            splits_moved=self.splits_moved,
            headers_shortened=self.headers_shortened,
            percentiles=measure_percentiles(lengths) if has_pairs else {},
            findings=tuple(each for each in (*repeats, control) if each.count),
            length_bias=measure_length_bias(lengths) if has_pairs else None,
            bad_reasons=dict(self.bad_reasons.most_common(20)),
        )


def _lengths_of(pairs: Any) -> Lengths:
    columns = [np.diff(pairs.column(column).offsets.to_numpy()) for column in range(3)]
    return np.stack(columns, axis=1).astype(LENGTH_DTYPE)


def _progress_of(account: _Account, result: BlockResult, sources: list[SourceFile]) -> Progress:
    done = 0
    for source in sources:
        if source.name == result.task.block.file:
            break
        done += source.size
    return Progress(
        account.rows_read, account.pairs_kept, done + result.task.block.bytes_done, sum(each.size for each in sources)
    )


class _Quarantine:
    """Decide about bad rows: stop at the first, leave them out, or write them beside the store."""

    def __init__(self, output: Path, settings: DataSettings) -> None:
        self._how = settings.on_bad_row
        self.path = output.with_name(f"{output.name}.quarantine.jsonl")
        self._stream: TextIO | None = None

    def __enter__(self) -> _Quarantine:
        if self._how == "quarantine":
            self.path.unlink(missing_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            self._stream.close()

    def take(self, bad: list[BadRow]) -> None:
        for row in sorted(bad, key=lambda each: each.number):
            if self._how == "fail":
                raise UserError(
                    f"{row.file}, {row.unit} {row.number}: {row.reason}. Mend the row, or set "
                    "data_args.on_bad_row=skip to leave such rows out, or =quarantine to collect them in a file"
                )
            if self._how == "quarantine":
                if self._stream is None:
                    self._stream = self.path.open("w", encoding="utf-8")
                self._stream.write(json.dumps(asdict(row), ensure_ascii=False, default=str) + "\n")
