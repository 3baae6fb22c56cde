"""Source files to a store of token pairs, with an account of every row.

Writing happens in this process, in the order of the files; a runner decides who renders, tokenises and hashes. Which
pairs a store holds, and its bytes, depend neither on that nor on how often a preparation was killed and started again.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from thresher import durable
from thresher.data.prepare.block_worker import BadRow, BlockWorker
from thresher.data.prepare.executor import Executor, local_executor
from thresher.data.prepare.fingerprint import (
    digest_sources,
    fingerprinted_settings,
    make_identity,
    store_identity,
    tokenizer_digest,
)
from thresher.data.prepare.report import PrepareReport
from thresher.data.prepare.stats import PrepareStats
from thresher.data.prepare.tasks import TaskReader
from thresher.data.settings import DataSettings, OnBadRow
from thresher.data.sources.readers import BYTES_PER_SPAN, ROWS_PER_BLOCK, ROWS_PER_SPAN
from thresher.data.sources.resolve import SourceFile, resolve_sources
from thresher.data.store.staging import check_output, open_at
from thresher.data.store.writer import StoreWriter
from thresher.data.tokenization.chat_template import load_template
from thresher.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "DataSettings",
    "NoPairsError",
    "PrepareProgress",
    "PrepareReport",
    "prepare",
    "store_identity",
    "tokenizer_digest",
]

# of what a checkpoint says; one that another version wrote is not continued
_STATE_VERSION = 1


@dataclass(frozen=True)
class PrepareProgress:
    """How far a preparation is; bytes are of the source files as stored."""

    rows_read: int
    pairs_kept: int
    bytes_read: int
    bytes_total: int


class BadRowsError(UserError):
    """A row is bad, and bad rows are not to be left out."""


class NoPairsError(UserError):
    """No row became a pair; `report` tells what became of them."""

    def __init__(self, report: PrepareReport) -> None:
        causes = {**report.dropped, **({"bad_rows": report.bad_rows} if report.bad_rows else {})}
        told = [
            f"{count} {cause} ({_mend_of(cause, report)})"
            for cause, count in sorted(causes.items(), key=lambda each: (-each[1], each[0]))
        ]
        names = [file.name for file in report.files]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        super().__init__(
            f"none of {report.rows_read} rows became a pair: {'; '.join(told)}. Read: {', '.join(names[:3])}{more}"
        )
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
    progress: Callable[[PrepareProgress], None] | None = None,
    *,
    overwrite: bool = False,
    runner: Executor | None = None,
) -> PrepareReport:
    """Build a store at `output_dir` and account for every row; go on where an earlier process was killed.

    runner: who tokenises; processes of this machine, as many as the settings say, if not given.
    """
    output = Path(output_dir)
    check_output(output, overwrite=overwrite)
    template = load_template(tokenizer, settings.template, settings.template_arguments)
    sources = resolve_sources(settings.file_names)
    digests = digest_sources(sources)
    identity = make_identity(settings, tokenizer, template, digests)
    reader = TaskReader(settings, sources)
    run = runner or local_executor(settings.num_processes)
    with ExitStack() as stack:
        writer = stack.enter_context(
            StoreWriter(output, settings.shard_rows, _what_decides_the_bytes(identity, settings, sources))
        )
        check_output(output, overwrite=overwrite)
        resumed = writer.resumed
        account = stack.enter_context(closing(PrepareStats(reader, writer.directory, resumed and resumed["account"])))
        quarantine = stack.enter_context(
            closing(_Quarantine(writer.directory, settings.on_bad_row, resumed["quarantined"] if resumed else 0))
        )
        bytes_before = [0, *itertools.accumulate(source.size for source in sources)]
        remaining = reader.remaining(account.span, account.blocks_of_span)
        results = run(BlockWorker(settings, tokenizer, template), reader, remaining)
        try:
            for result in results:
                # A checkpoint keeps the pairs of whole record batches, and a record batch may end within a block. So it
                # is made between writing a block and counting it: the account ends before this block, and a process
                # that resumes makes the block again and leaves out those of its pairs that were kept.
                num_kept_of_block = writer.num_pairs - account.pairs_kept
                writer.append(result.pairs.slice(num_kept_of_block))
                has_pairs_of_account = writer.pairs_written >= account.pairs_kept
                if writer.checkpoint_due and has_pairs_of_account:
                    writer.checkpoint({"account": account.sync(), "quarantined": quarantine.sync()})
                quarantine.take(account.add(result))
                if progress is not None:
                    bytes_read = bytes_before[reader.spans[account.span].file] + result.bytes_done
                    progress(PrepareProgress(account.rows_read, account.pairs_kept, bytes_read, bytes_before[-1]))
            report = account.report(digests)
            if report.pairs_kept == 0:
                quarantine.publish(output)
                raise NoPairsError(report)
        except (BadRowsError, NoPairsError):
            writer.discard()
            raise
        finally:
            results.close()
        fields = {
            "identity": identity,
            "tokenizer_digest": tokenizer_digest(tokenizer),
            "template": settings.template,
            "template_digest": template.digest,
            "settings": fingerprinted_settings(settings),
            "report": report.to_json(),
        }
        quarantine.publish(output)
        writer.finish(fields, overwrite=overwrite)
    return report


def _what_decides_the_bytes(identity: str, settings: DataSettings, sources: Sequence[SourceFile]) -> str:
    """Digest what must be the same for staged work to be continued; names of files stand in the account."""
    names = [source.name for source in sources]
    how_sources_are_cut = [BYTES_PER_SPAN, ROWS_PER_SPAN, ROWS_PER_BLOCK]
    content = [_STATE_VERSION, identity, settings.shard_rows, names, how_sources_are_cut]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


class _Quarantine:
    """Decide about bad rows: stop at the first, leave them out, or collect them in a file beside the store."""

    def __init__(self, directory: Path, how: OnBadRow, num_bytes: int) -> None:
        self._how = how
        self._path = directory / "quarantine.jsonl"
        self._stream = open_at(self._path, num_bytes)

    def take(self, bad: Sequence[BadRow]) -> None:
        for row in bad:
            if self._how == "fail":
                raise BadRowsError(
                    f"{row.file}, {row.unit} {row.number}: {row.reason}. Mend the row, or set "
                    "data_args.on_bad_row=skip to leave such rows out, or =quarantine to collect them in a file"
                )
            if self._how == "quarantine":
                # a file's name may hold what is no text
                line = json.dumps(asdict(row), ensure_ascii=False, default=str) + "\n"
                self._stream.write(line.encode("utf-8", errors="backslashreplace"))

    def sync(self) -> int:
        """Bring the file to the disk; return its size."""
        durable.sync_stream(self._stream)
        return self._stream.tell()

    def publish(self, output: Path) -> None:
        """Let the file appear beside the store if it holds rows; one from an earlier preparation goes."""
        if self._how == "quarantine":
            target = output.with_name(f"{output.name}.quarantine.jsonl")
            if self.sync():
                # renamed, not written to: a link of that name would lead the rows elsewhere
                shutil.copyfile(self._path, copied := self._path.with_suffix(".copy"))
                copied.replace(target)
            else:
                target.unlink(missing_ok=True)

    def close(self) -> None:
        self._stream.close()
