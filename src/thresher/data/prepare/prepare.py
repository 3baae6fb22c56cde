"""Prepare source files into a store of tokenized pairs, with a report that accounts for every row.

This process writes the store in file order; an executor decides where rows are rendered, tokenized and hashed. The
bytes of a store depend neither on the executor nor on how often the preparation was interrupted and resumed. A run
reuses a store if and only if the fingerprints of its inputs are equal.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thresher import durable
from thresher.data.prepare.blocks import BadRow, BlockWorker, TaskReader, find_template
from thresher.data.prepare.executor import Executor, local_executor
from thresher.data.prepare.report import PrepareReport, other_truncation
from thresher.data.prepare.stats import PrepareStats
from thresher.data.settings import DataSettings, OnBadRow
from thresher.data.sources.readers import BYTES_PER_SPAN, ROWS_PER_BLOCK, ROWS_PER_SPAN
from thresher.data.sources.resolve import SourceFile, resolve_sources, source_digest
from thresher.data.store.reader import FORMAT_VERSION
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
    newer = {"max_samples": settings.max_samples, "system_prompt": settings.system_prompt}
    return {
        **{name: value for name, value in newer.items() if value is not None},
        "sequence_length": settings.sequence_length,
        "truncation": settings.truncation,
        "on_bad_row": settings.on_bad_row,
        "special_tokens_in_text": _STORED_SPECIAL_TOKENS_IN_TEXT[settings.special_tokens_in_text],
        "column_names": dict(settings.column_names),
    }


def make_fingerprint(
    settings: DataSettings, tokenizer: PreTrainedTokenizerBase, template: Template, source_digests: Sequence[str]
) -> str:
    """Digest everything that determines a store's pairs."""
    content = {
        "format_version": FORMAT_VERSION,
        "tokenization_version": TOKENIZATION_VERSION,
        "sources": list(source_digests),
        "tokenizer": tokenizer_digest(tokenizer),
        "template": template.digest,
        "settings": fingerprinted_settings(settings),
    }
    return _digest([json.dumps(content, sort_keys=True).encode()])


def store_fingerprint(settings: DataSettings, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the fingerprint of the store that these settings would prepare; reads the sources once."""
    template = find_template(settings, tokenizer)
    return make_fingerprint(settings, tokenizer, template, digest_sources(resolve_sources(settings.file_names)))


def digest_sources(sources: Sequence[SourceFile]) -> list[str]:
    """Digest the format and content of each source, in order."""
    return [f"{source.format}:{source_digest(source)}" for source in sources]


def _digest(parts: Sequence[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


# version of the checkpoint state; a checkpoint of another version is not resumed
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
            f"none of {report.rows_read} rows became a pair: {'; '.join(counts)}. Read: {', '.join(names[:3])}{more}"
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
    }
    return hints.get(cause, "raise sequence_length")


def prepare(
    settings: DataSettings,
    tokenizer: PreTrainedTokenizerBase,
    output_dir: str | Path,
    progress: Callable[[PrepareProgress], None] | None = None,
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
    fingerprint = make_fingerprint(settings, tokenizer, template, digests)
    reader = TaskReader(settings, sources)
    execute = executor or local_executor(settings.num_processes)
    with ExitStack() as stack:
        writer = stack.enter_context(
            StoreWriter(output, settings.shard_rows, _resume_fingerprint(fingerprint, settings, sources))
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
        """Copy the file next to the store if it has rows; otherwise remove the one of an earlier preparation."""
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
