"""Prepare source files into a store of tokenized pairs, with a report that accounts for every row.

This process writes the store in file order; an executor decides where rows are rendered, tokenized and hashed. The
bytes of a store depend neither on the executor nor on how often the preparation was interrupted and resumed. A run
reuses a store if and only if the fingerprints of its inputs are equal.

Statistics are summed over blocks in file order, in bounded memory: keys that must be compared over all pairs are in
files (`SpilledKeys`), everything else is a count. Their state is saved, so a resumed preparation has the same numbers.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from thresher import durable
from thresher.data.example import Kind, StoredKind
from thresher.data.prepare.blocks import BadRow, BlockResult, BlockWorker, TaskReader, find_kind, find_template
from thresher.data.prepare.executor import Executor, local_executor
from thresher.data.prepare.findings import Finding, LengthBias, SpilledKeys
from thresher.data.prepare.report import PERCENTILES, FileReport, PrepareReport, RowPlace, other_truncation
from thresher.data.settings import DataSettings, OnBadRow
from thresher.data.sources.readers import BYTES_PER_SPAN, ROWS_PER_BLOCK, ROWS_PER_SPAN
from thresher.data.sources.resolve import SourceFile, resolve_sources, source_digest
from thresher.data.store.arrow_schema import lengths_of
from thresher.data.store.reader import FORMAT_VERSION, LENGTH_DTYPE, Lengths
from thresher.data.store.writer import StoreWriter, check_output, open_at, quarantine_file
from thresher.data.tokenization.chat_template import Template
from thresher.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# raise it when the same rows, tokenizer and settings give different tokens: stores are then prepared again
TOKENIZATION_VERSION = 2
# the spelling in stores and fingerprints is older than the one in the settings
_STORED_SPECIAL_TOKENS_IN_TEXT = {"keep_as_text": "text", "reject": "refuse"}


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Digest how text becomes token ids: vocabulary, merges, normalizers, BOS and EOS; not chat template or padding."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        state: dict[str, Any] = json.loads(backend.to_str())
        # set as a side effect of tokenizer calls
        content = {key: value for key, value in state.items() if key not in ("padding", "truncation")}
        parts = [json.dumps(content, sort_keys=True).encode()]
    else:
        with tempfile.TemporaryDirectory() as directory:
            tokenizer.save_vocabulary(directory)
            parts = [file.read_bytes() for file in sorted(Path(directory).iterdir())]
    special = [tokenizer.bos_token, tokenizer.eos_token]
    return _digest([json.dumps(special).encode(), *parts])


def fingerprinted_settings(settings: DataSettings) -> dict[str, Any]:
    """Return the settings that can change a store's pairs, as in its manifest."""
    # absent unless set, as in stores that are older than the setting
    newer = {
        "max_samples": settings.max_samples,
        "system_prompt": settings.system_prompt,
        "margin_from_scores": settings.margin_from_scores or None,
        "subset_key": settings.subset_key,
        "order_key": settings.order_key,
    }
    return {
        **{name: value for name, value in newer.items() if value is not None},
        "sequence_length": settings.sequence_length,
        "truncation": settings.truncation,
        "on_bad_row": settings.on_bad_row,
        "special_tokens_in_text": _STORED_SPECIAL_TOKENS_IN_TEXT[settings.special_tokens_in_text],
        "column_names": dict(settings.column_names),
    }


def make_fingerprint(
    settings: DataSettings,
    tokenizer: PreTrainedTokenizerBase,
    template: Template,
    source_digests: Sequence[str],
    kind: StoredKind = "pairs",
) -> str:
    """Digest everything that determines a store's examples."""
    content = {
        "format_version": FORMAT_VERSION,
        "tokenization_version": TOKENIZATION_VERSION,
        "sources": list(source_digests),
        "tokenizer": tokenizer_digest(tokenizer),
        "template": template.digest,
        "settings": fingerprinted_settings(settings),
        # says whether labelled rows are joined; absent from pairs, as in stores that are older than other kinds
        **({} if kind == "pairs" else {"kind": kind}),
    }
    return _digest([json.dumps(content, sort_keys=True).encode()])


def store_fingerprint(settings: DataSettings, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the fingerprint of the store that these settings would prepare; reads the sources once."""
    template, sources = find_template(settings, tokenizer), resolve_sources(settings.file_names)
    return make_fingerprint(settings, tokenizer, template, digest_sources(sources), find_kind(settings, sources))


def digest_sources(sources: Sequence[SourceFile]) -> list[str]:
    """Digest the format and content of each source, in order."""
    return [f"{source.format}:{source_digest(source)}" for source in sources]


def _digest(parts: Sequence[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


class LengthHistogram:
    """Number of examples per length in tokens, for exact percentiles and length bias; memory grows with the longest."""

    def __init__(self, state: Mapping[str, Any] | None = None, kind: Kind = "pairs") -> None:
        counts: Mapping[str, Mapping[str, int]] = state["counts"] if state else {}
        self._sides = ("chosen", "rejected") if kind == "pairs" else ("response",)
        self._counts = {
            name: Counter({int(length): count for length, count in counts.get(name, {}).items()})
            for name in ("prompt", *self._sides, "total")
        }
        self._num_chosen_longer = int(state["num_chosen_longer"]) if state else 0
        self._num_equal = int(state["num_equal"]) if state else 0

    def add(self, lengths: Lengths) -> None:
        """Count examples; `lengths` is [examples, (prompt, response, response...)]."""
        prompt, responses = lengths[:, 0], lengths[:, 1:]
        sides = list(responses.T) if len(self._sides) == 2 else [responses[responses > 0]]
        for name, column in zip(self._counts, (prompt, *sides, prompt + responses.max(axis=1)), strict=True):
            values, counts = np.unique(column, return_counts=True)
            self._counts[name].update(dict(zip(values.tolist(), counts.tolist(), strict=True)))
        if len(self._sides) == 2:
            self._num_chosen_longer += int(np.count_nonzero(sides[0] > sides[1]))
            self._num_equal += int(np.count_nonzero(sides[0] == sides[1]))

    def state(self) -> dict[str, Any]:
        """Return the state to resume from, as JSON values."""
        return {
            "counts": {name: dict(counts) for name, counts in self._counts.items()},
            "num_chosen_longer": self._num_chosen_longer,
            "num_equal": self._num_equal,
        }

    def percentiles(self) -> dict[str, tuple[int, ...]]:
        """Return token counts at `PERCENTILES`, each the length of an actual pair (not interpolated)."""
        return {
            # rounded down as in numpy.percentile(method="lower")
            name: tuple(_length_at(counts, int((counts.total() - 1) * (each / 100))) for each in PERCENTILES)
            for name, counts in self._counts.items()
        }

    def length_to_keep(self, share: float, dropped: Counter[int]) -> int:
        """Return the smallest length that this share of all pairs does not exceed, including dropped ones."""
        counts = self._counts["total"] + dropped
        return _length_at(counts, math.ceil(share * counts.total()) - 1)

    @property
    def num_responses(self) -> int:
        return sum(self._counts[side].total() for side in self._sides)

    def bias(self) -> LengthBias | None:
        """Compare the lengths of chosen and rejected responses; None for other kinds than pairs."""
        num_pairs = self._counts["total"].total()
        if len(self._sides) == 1:
            return None
        chosen, rejected = (
            sum(length * count for length, count in self._counts[side].items()) / num_pairs for side in self._sides
        )
        return LengthBias(self._num_chosen_longer / num_pairs, self._num_equal / num_pairs, chosen, rejected)


def _length_at(counts: Counter[int], index: int) -> int:
    """Return the length of one pair, by its index among all pairs in order of length."""
    lengths = sorted(counts)
    ends = np.cumsum([counts[length] for length in lengths])
    return lengths[int(np.searchsorted(ends, index, side="right"))]


# reasons may quote a row, so their number is otherwise unbounded
MAX_REASONS = 4096
OTHER_REASONS = "other reasons"
MAX_BAD_EXAMPLES = 3  # per reason
_COUNTS = (
    "rows_read",
    "pairs_kept",
    "rows_joined",
    "splits_moved",
    "headers_shortened",
    "identical_responses",
    "desirable",
)


class PrepareStats:
    """Sums of block results, and their position in the sources; `state` is what `sync` returned before a restart."""

    def __init__(self, reader: TaskReader, directory: Path, state: Mapping[str, Any] | None = None) -> None:
        self._reader = reader
        saved: Mapping[str, Any] = state or {}
        self._counts = Counter({name: int(saved.get(name, 0)) for name in _COUNTS})
        self._bad_reasons: Counter[str] = Counter(saved.get("bad_reasons", {}))
        self._dropped: Counter[str] = Counter(saved.get("dropped", {}))
        self._truncated: Counter[str] = Counter(saved.get("truncated", {}))
        # pairs per length, as in LengthHistogram; JSON has no integer keys
        self._too_long: Counter[int] = Counter({int(k): count for k, count in saved.get("too_long", {}).items()})
        # in the order of the first bad row of each reason
        self._bad_examples: dict[str, list[RowPlace]] = {
            reason: [(file, unit, number) for file, unit, number in places]
            for reason, places in saved.get("bad_examples", {}).items()
        }
        self._findings = {
            name: Finding(name, count, tuple(examples)) for name, (count, examples) in saved.get("findings", {}).items()
        }
        self._rows_of_file: list[int] = list(saved.get("rows_of_file", [0] * len(reader.files)))
        self._lengths = LengthHistogram(saved.get("lengths"), reader.kind)
        # position: current span, its blocks added so far, and the last row number before the span and within it
        self.span = int(saved.get("span", 0))
        self.blocks_of_span = int(saved.get("blocks_of_span", 0))
        self._number_before_span = int(saved.get("number_before_span", 0))
        self._last_number = int(saved.get("last_number", 0))
        self._keys = SpilledKeys(directory, self.pairs_kept)

    @property
    def rows_read(self) -> int:
        return self._counts["rows_read"]

    @property
    def pairs_kept(self) -> int:
        return self._counts["pairs_kept"]

    @property
    def num_bad_rows(self) -> int:
        return self._bad_reasons.total()

    def first_bad_row(self) -> tuple[RowPlace, str]:
        """Return the place of the first bad row, and the reason."""
        reason, places = next(iter(self._bad_examples.items()))
        return places[0], reason

    def add(self, result: BlockResult) -> list[BadRow]:
        """Add a block; return its bad rows in order, numbered from the start of their file."""
        self._advance_to(result)
        bad = [replace(row, number=self._number_before_span + row.number) for row in result.bad]
        bad.sort(key=lambda row: row.number)
        for row in bad:
            known = row.reason in self._bad_reasons or len(self._bad_reasons) < MAX_REASONS
            reason = row.reason if known else OTHER_REASONS
            self._bad_reasons[reason] += 1
            if len(places := self._bad_examples.setdefault(reason, [])) < MAX_BAD_EXAMPLES:
                places.append((row.file, row.unit, row.number))
        self._dropped.update(result.dropped)
        self._truncated.update(result.truncated)
        self._too_long.update(result.too_long)
        self._lengths.add(lengths_of(result.pairs).astype(LENGTH_DTYPE))
        self._keys.append(result.keys, result.swapped_keys)
        for name, positions in result.findings.items():
            numbers = np.asarray(positions) + self.pairs_kept
            self._findings[name] = self._findings.get(name, Finding(name)).with_more(numbers)
        self._rows_of_file[self._reader.spans[result.span].file] += result.rows_read
        self._counts.update(
            rows_read=result.rows_read,
            pairs_kept=result.pairs.num_rows,
            rows_joined=result.rows_joined,
            splits_moved=result.splits_moved,
            headers_shortened=result.headers_shortened,
            identical_responses=result.identical_responses,
            desirable=result.desirable,
        )
        return bad

    def _advance_to(self, result: BlockResult) -> None:
        spans = self._reader.spans
        if result.span != self.span:
            is_new_file = spans[result.span].file != spans[self.span].file
            self._number_before_span = 0 if is_new_file else self._number_before_span + self._last_number
            self.span, self.blocks_of_span = result.span, 0
        self.blocks_of_span += 1
        self._last_number = result.last_number

    def sync(self) -> dict[str, Any]:
        """Flush the keys to the disk; return the state to resume from."""
        self._keys.sync()
        return {
            **self._counts,
            "bad_reasons": dict(self._bad_reasons),
            "dropped": dict(self._dropped),
            "truncated": dict(self._truncated),
            "too_long": dict(self._too_long),
            "bad_examples": self._bad_examples,
            "findings": {name: [each.count, each.examples] for name, each in self._findings.items()},
            "rows_of_file": self._rows_of_file,
            "lengths": self._lengths.state(),
            "span": self.span,
            "blocks_of_span": self.blocks_of_span,
            "number_before_span": self._number_before_span,
            "last_number": self._last_number,
        }

    def close(self) -> None:
        self._keys.close()

    def report(self, digests: Sequence[str]) -> PrepareReport:
        """Build the report after the last block, with one digest per source."""
        dropped = Counter(self._dropped)
        if self._reader.num_unpaired:
            dropped["unpaired"] += self._reader.num_unpaired
        has_pairs = self.pairs_kept > 0
        findings = (*self._keys.find_repeats(), *self._findings.values()) if has_pairs else ()
        bad_reasons = dict(self._bad_reasons.most_common(20))
        return PrepareReport(
            files=tuple(
                FileReport(each.source.shown, digest, each.format_name or "unreadable", rows, each.unused_columns)
                for each, digest, rows in zip(self._reader.files, digests, self._rows_of_file, strict=True)
            ),
            rows_read=self.rows_read,
            pairs_kept=self.pairs_kept,
            rows_joined=self._counts["rows_joined"],
            kind=self._reader.kind,
            num_responses=self._lengths.num_responses if self._reader.kind != "pairs" else 0,
            identical_responses=self._counts["identical_responses"],
            desirable=self._counts["desirable"],
            bad_rows=self.num_bad_rows,
            dropped=dict(sorted(dropped.items())),
            truncated=dict(sorted(self._truncated.items())),
            splits_moved=self._counts["splits_moved"],
            headers_shortened=self._counts["headers_shortened"],
            percentiles=self._lengths.percentiles() if has_pairs else {},
            findings=tuple(each for each in findings if each.count),
            length_bias=self._lengths.bias() if has_pairs else None,
            bad_reasons=bad_reasons,
            length_to_keep_95=self._lengths.length_to_keep(0.95, self._too_long) if self._too_long else None,
            bad_examples={reason: tuple(self._bad_examples[reason]) for reason in bad_reasons},
        )


# version of the checkpoint state; a checkpoint of a different version is not resumed
_STATE_VERSION = 3


@dataclass(frozen=True)
class PrepareProgress:
    """Preparation progress; bytes are counted in the source files on disk, compressed or not."""

    rows_read: int
    pairs_kept: int
    bad_rows: int
    bytes_read: int
    bytes_total: int


class BadRowsError(UserError):
    """Raised for bad rows with `on_bad_row: fail`, after all of them are counted."""

    def __init__(self, stats: PrepareStats, settings: DataSettings) -> None:
        (file, unit, number), reason = stats.first_bad_row()
        count, key = stats.num_bad_rows, settings.key("on_bad_row")
        are, them = ("is", "it") if count == 1 else ("are", "them")
        super().__init__(
            f"{count:,} of {stats.rows_read:,} rows {are} bad; first: {file}, {unit} {number}: {reason}. Fix {them}, "
            f"or set {key}=skip, which drops such rows, or {key}=quarantine, which collects them in a file"
        )


class NoPairsError(UserError):
    """Raised if no row became a pair; `report` has the counts."""

    def __init__(self, report: PrepareReport, settings: DataSettings) -> None:
        causes = {**report.dropped, **({"bad_rows": report.bad_rows} if report.bad_rows else {})}
        counts = [
            f"{count} {cause} ({_hint(cause, report, settings)})"
            for cause, count in sorted(causes.items(), key=lambda each: (-each[1], each[0]))
        ]
        names = [file.name for file in report.files]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        super().__init__(
            f"none of {report.rows_read} rows became {'a pair' if report.kind == 'pairs' else 'an example'}: "
            f"{'; '.join(counts)}. Read: {', '.join(names[:3])}{more}"
        )
        self.report = report


def _hint(cause: str, report: PrepareReport, settings: DataSettings) -> str:
    other = "" if settings.truncation == "drop" else f"={other_truncation(settings.truncation)}"
    hints = {
        "bad_rows": f"most often: {next(iter(report.bad_reasons), '')}",
        "empty_response": "a response is empty",
        "empty_prompt": "the prompt has no text; check prompt_key",
        "identical_sides": "both responses are the same; check chosen_key and rejected_key",
        "too_long": f"raise sequence_length or set {settings.key('truncation')}{other}",
        "unpaired": "a pair needs a good and a bad response to the same prompt",
        "too_few_responses": "a list needs two different responses",
        "equal_values": "the responses of a list have the same score or rank",
    }
    return hints.get(cause, "raise sequence_length")


def prepare(
    settings: DataSettings,
    tokenizer: PreTrainedTokenizerBase,
    output_dir: str | Path,
    progress: Callable[[PrepareProgress], object] | None = None,
    *,
    overwrite: bool = False,
    executor: Executor | None = None,
) -> PrepareReport:
    """Prepare a store; resume if an earlier process was interrupted.

    Args:
        settings: files, template, lengths and what to do with bad rows.
        tokenizer: the policy's tokenizer.
        output_dir: the store to write.
        progress: called after each block of rows.
        overwrite: replace an existing store.
        executor: runs the tokenizer; `settings.num_processes` processes on this machine when absent.
    """
    output = Path(output_dir)
    check_output(output, overwrite=overwrite)
    template = find_template(settings, tokenizer)
    sources = resolve_sources(settings.file_names)
    digests = digest_sources(sources)
    reader = TaskReader(settings, sources)
    fingerprint = make_fingerprint(settings, tokenizer, template, digests, reader.stored_kind)
    execute = executor or local_executor(settings.num_processes)
    with ExitStack() as stack:
        writer = stack.enter_context(
            StoreWriter(
                output,
                settings.shard_rows,
                _resume_fingerprint(fingerprint, settings, sources),
                reader.stored_kind,
                settings.extra_columns,
            )
        )
        check_output(output, overwrite=overwrite)
        resumed, directory = writer.resumed, writer.staging.directory
        stats = stack.enter_context(closing(PrepareStats(reader, directory, resumed and resumed["account"])))
        quarantine = stack.enter_context(
            closing(_Quarantine(directory, settings.on_bad_row, resumed["quarantined"] if resumed else 0))
        )
        bytes_before = [0, *itertools.accumulate(source.size for source in sources)]
        remaining = reader.remaining(stats.span, stats.blocks_of_span)
        results = execute(BlockWorker(settings, tokenizer, template), reader, remaining)
        try:
            for result in results:
                # A checkpoint keeps complete record batches, and a record batch may end within a block. So it is saved
                # after writing a block and before counting it: the saved statistics exclude this block, and a resumed
                # process computes the block again and skips the pairs that were already written.
                num_already_written = writer.num_pairs - stats.pairs_kept
                writer.append(result.pairs.slice(num_already_written))
                if writer.checkpoint_due and writer.pairs_written >= stats.pairs_kept:
                    writer.checkpoint({"account": stats.sync(), "quarantined": quarantine.sync()})
                quarantine.add(stats.add(result))
                if progress is not None:
                    bytes_read = bytes_before[reader.spans[stats.span].file] + result.bytes_done
                    counts = stats.rows_read, stats.pairs_kept, stats.num_bad_rows
                    progress(PrepareProgress(*counts, bytes_read, bytes_before[-1]))
            if settings.on_bad_row == "fail" and stats.num_bad_rows:
                raise BadRowsError(stats, settings)
            report = stats.report(digests)
            if report.pairs_kept == 0:
                quarantine.publish(output)
                raise NoPairsError(report, settings)
        except (BadRowsError, NoPairsError):
            writer.staging.discard()
            raise
        finally:
            results.close()
        fields = {
            "identity": fingerprint,
            "tokenizer_digest": tokenizer_digest(tokenizer),
            "template": settings.template,
            "template_digest": template.digest,
            "settings": fingerprinted_settings(settings),
            "report": report.to_json(),
        }
        quarantine.publish(output)
        writer.finish(fields, overwrite=overwrite)
    return report


def _resume_fingerprint(fingerprint: str, settings: DataSettings, sources: Sequence[SourceFile]) -> str:
    """Digest what must be equal to resume: also the shard and span sizes, and the file names, which are reported."""
    names = [source.name for source in sources]
    span_sizes = [BYTES_PER_SPAN, ROWS_PER_SPAN, ROWS_PER_BLOCK]
    content = [_STATE_VERSION, fingerprint, settings.shard_rows, names, span_sizes]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


class _Quarantine:
    """The bad rows of `on_bad_row: quarantine`, collected in a file next to the store; otherwise nothing."""

    def __init__(self, directory: Path, on_bad_row: OnBadRow, num_bytes: int) -> None:
        self._on_bad_row = on_bad_row
        self._path = directory / "quarantine.jsonl"
        self._stream = open_at(self._path, num_bytes)

    def add(self, bad: Sequence[BadRow]) -> None:
        for row in bad if self._on_bad_row == "quarantine" else ():
            # backslashreplace: a file name need not be valid Unicode
            line = json.dumps(asdict(row), ensure_ascii=False, default=str) + "\n"
            self._stream.write(line.encode("utf-8", errors="backslashreplace"))

    def sync(self) -> int:
        """Flush the file to the disk; return its size."""
        durable.sync_stream(self._stream)
        return self._stream.tell()

    def publish(self, output: Path) -> None:
        """Copy the file next to the store if it has rows; otherwise remove an earlier preparation's file."""
        if self._on_bad_row == "quarantine":
            target = quarantine_file(output)
            if self.sync():
                # renamed, not written in place: a symlink at the target must not be followed
                shutil.copyfile(self._path, copied := self._path.with_suffix(".copy"))
                copied.replace(target)
            else:
                target.unlink(missing_ok=True)

    def close(self) -> None:
        self._stream.close()
