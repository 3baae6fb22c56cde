"""Write a store: pairs in, a complete directory out, or nothing at all but what a later process can continue."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa

from thresher import durable
from thresher.data.staging import Staging
from thresher.data.store import FORMAT_VERSION
from thresher.data.store_files import StoreFiles

# what a crash costs at most; noting it takes a few hundredths of a second
PAIRS_PER_CHECKPOINT = 32_768


class StoreWriter:
    """Collect record batches beside the output directory; `finish` renames the whole into place.

    fits: see `Staging`; the state of a caller that goes on from a crash is `resumed`.
    """

    def __init__(self, output: Path, shard_rows: int, fits: str | None = None) -> None:
        self._output = output
        self._staging = Staging(output, fits)
        self._files = self._open_files(shard_rows)
        state = self._staging.state
        self.resumed: Mapping[str, Any] | None = state["caller"] if state else None
        self._pairs_per_checkpoint = min(shard_rows, PAIRS_PER_CHECKPOINT)
        self._pairs_saved = self._files.pairs_written

    def _open_files(self, shard_rows: int) -> StoreFiles:
        state = self._staging.state
        if state is not None:
            try:
                return StoreFiles(self._staging.content, shard_rows, state["files"])
            except (pa.ArrowInvalid, OSError):
                # a disk or a person has damaged what was staged; everything in it can be made again
                self._staging.clear()
        return StoreFiles(self._staging.content, shard_rows)

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.close()
        self._staging.__exit__(kind, error, trace)

    @property
    def directory(self) -> Path:
        """Where a caller keeps files of its own until the store is finished."""
        return self._staging.directory

    @property
    def num_pairs(self) -> int:
        return self._files.num_pairs

    @property
    def pairs_written(self) -> int:
        """Pairs in whole record batches, which `checkpoint` keeps; others are still pending."""
        return self._files.pairs_written

    @property
    def wants_checkpoint(self) -> bool:
        return self.pairs_written - self._pairs_saved >= self._pairs_per_checkpoint

    def append(self, batch: Any) -> None:
        """Add pairs, as `pairs_to_record_batch` lays them out."""
        self._files.append(batch)

    def checkpoint(self, caller: Mapping[str, Any]) -> None:
        """Let a later process go on from here, with `caller` as its `resumed`."""
        self._staging.save({"files": self._files.sync(), "caller": caller})
        self._pairs_saved = self.pairs_written

    def give_up(self) -> None:
        """Keep nothing for a later process, which would come to the same end."""
        self._staging.give_up()

    def finish(self, fields: Mapping[str, Any], *, overwrite: bool = False) -> Path:
        """Write the manifest and let the store appear under its name."""
        described = self._files.finish()
        listed = {name: described.pop(name) for name in ("indexes", "shards")}
        manifest = {"format_version": FORMAT_VERSION, **described, **fields, **listed}
        content = json.dumps(manifest, indent=1, ensure_ascii=False) + "\n"
        durable.write(self._staging.content / "manifest.json", content.encode())
        self._staging.publish(overwrite=overwrite)
        return self._output
