"""Read tokenized examples from a memory-mapped store; `writer` creates it.

A store is a directory with `manifest.json`, `lengths.bin`, Arrow IPC files in `shards/`, and `scored.bin` if there are
loss masks; one of labels or lists also has `prompts.bin`, the hashes of the prompts. Opening reads only the manifest; a
shard is mapped on first access, so opening takes the same time for ten pairs and for a hundred million.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from thresher.data.example import SUBSET_BYTES, UNITS, Example, ExampleBatch, Kind, Response, StoredKind, kind_of
from thresher.data.store.split import IndexedLengths, Side, Split, SplitRows
from thresher.data.store.split import Lengths as Lengths
from thresher.durable import is_safe_relative_path
from thresher.errors import UserError

FORMAT_VERSION = 1  # of pairs
RESPONSES_VERSION = 2  # of other kinds and with extra columns, which earlier versions cannot read
ROWS_PER_RECORD_BATCH = 1024
HASH_BYTES = 16
# each mapped shard uses a file descriptor, of which 1024 is a common limit, and a run maps the shards of the training
# store, the validation store and the reference cache
MAX_OPEN_SHARDS = 256
# a view of a record batch takes 7 kB; of a shard, at least so many are kept
_MAX_VIEWS, _VIEWS_PER_SHARD = 8192, 16

_TOKEN_IDS = pa.list_(pa.field("item", pa.int32(), nullable=False))
_MASK = pa.list_(pa.field("item", pa.bool_(), nullable=False))
_NUMBERS = (
    pa.field("weight", pa.float32(), nullable=False),
    pa.field("margin", pa.float32(), nullable=False),
    pa.field("hash", pa.binary(HASH_BYTES), nullable=False),
    pa.field("prompt_hash", pa.binary(HASH_BYTES), nullable=False),
)
SCHEMA = pa.schema(
    [
        pa.field("prompt_ids", _TOKEN_IDS, nullable=False),
        pa.field("chosen_ids", _TOKEN_IDS, nullable=False),
        pa.field("rejected_ids", _TOKEN_IDS, nullable=False),
        pa.field("chosen_mask", _MASK),
        pa.field("rejected_mask", _MASK),
        *_NUMBERS,
    ]
)
# of other kinds: the responses of an example are concatenated
_RESPONSES_SCHEMA = pa.schema(
    [
        pa.field("prompt_ids", _TOKEN_IDS, nullable=False),
        pa.field("response_ids", _TOKEN_IDS, nullable=False),
        pa.field("response_lengths", _TOKEN_IDS, nullable=False),
        pa.field("response_mask", _MASK),
        pa.field("values", pa.list_(pa.field("item", pa.float32(), nullable=False)), nullable=False),
        *_NUMBERS,
    ]
)
_NUMBERS_OF_TOKENS = pa.list_(pa.field("item", pa.float32(), nullable=False))
# columns that a source may have: the subset that an evaluation measures separately, and the position in a curriculum
EXTRA_COLUMNS = {"subset": pa.binary(SUBSET_BYTES), "order": pa.float64()}
_WEIGHTED_SCHEMA = pa.schema(
    [*SCHEMA, *(pa.field(f"{side}_weights", _NUMBERS_OF_TOKENS, nullable=False) for side in ("chosen", "rejected"))]
)
LENGTH_DTYPE = np.dtype("<u4")
HASH_DTYPE = np.dtype(f"V{HASH_BYTES}")
Hashes = npt.NDArray[np.void]


def schema_of(kind: StoredKind, extra: Sequence[str] = ()) -> Any:
    """Return the columns of a shard."""
    schema = {"pairs": SCHEMA, "weighted_pairs": _WEIGHTED_SCHEMA}.get(kind, _RESPONSES_SCHEMA)
    return pa.schema([*schema, *(pa.field(name, EXTRA_COLUMNS[name], nullable=False) for name in extra)])


class _PairsView:
    """A record batch as numpy views, because indexing Arrow scalars costs more than reading the tokens."""

    def __init__(self, batch: Any) -> None:
        self._ids = [list_views(batch.column(at)) for at in range(3)]
        # None if the whole column is null, as mask columns usually are
        self._masks = [column if column.null_count < len(column) else None for column in batch.columns[3:5]]
        self._weights, self._margins = (np.from_dlpack(batch.column(at)) for at in (5, 6))
        self._token_weights = [list_views(column) for column in batch.columns[9:] if pa.types.is_list(column.type)]

    def example(self, row: int) -> Example:
        prompt, chosen, rejected = _row(self._ids, row)
        chosen_mask, rejected_mask = (None if column is None else _mask(column[row]) for column in self._masks)
        chosen_weights, rejected_weights = _row(self._token_weights, row) or (None, None)
        responses = (
            Response(chosen, chosen_mask, weights=chosen_weights),
            Response(rejected, rejected_mask, weights=rejected_weights),
        )
        return Example(prompt, responses, float(self._weights[row]), float(self._margins[row]))


class _ResponsesView:
    """The same for the other kinds."""

    def __init__(self, batch: Any) -> None:
        self._lists = [list_views(batch.column(at)) for at in (0, 1, 2, 4)]
        self._masks = batch.column(3)
        self._weights, self._margins = (np.from_dlpack(batch.column(at)) for at in (5, 6))

    def example(self, row: int) -> Example:
        prompt, ids, lengths, values = _row(self._lists, row)
        ends = np.cumsum(lengths)[:-1]
        mask = _mask(self._masks[row])
        # a response without a mask has a true one if another response of the example has one
        masks = [None] * len(lengths) if mask is None else [None if m.all() else m for m in np.split(mask, ends)]
        responses = map(Response, np.split(ids, ends), masks, values.tolist())
        return Example(prompt, tuple(responses), float(self._weights[row]), float(self._margins[row]))


class StoreShard:
    """One memory-mapped Arrow file; each record batch but the last holds `ROWS_PER_RECORD_BATCH` examples."""

    def __init__(
        self, path: Path, kind: StoredKind = "pairs", extra: Sequence[str] = (), max_views: int = _MAX_VIEWS
    ) -> None:
        self._path = path
        self._max_views = max_views
        self._view = _PairsView if kind_of(kind) == "pairs" else _ResponsesView
        with self._reading():
            self._reader = pa.ipc.open_file(pa.memory_map(str(path)))
            if not self._reader.schema.equals(schema_of(kind, extra)):
                raise ValueError("unexpected columns")
        self._batches: dict[int, _PairsView | _ResponsesView] = {}

    def example(self, row: int) -> Example:
        number, row = divmod(row, ROWS_PER_RECORD_BATCH)
        if number not in self._batches:
            if len(self._batches) >= self._max_views:
                del self._batches[next(iter(self._batches))]
            with self._reading():
                self._batches[number] = self._view(self._batch(number, check_offsets=True))
        try:
            return self._batches[number].example(row)
        except IndexError:
            raise UserError(f"{self._path} has fewer pairs than its manifest states; prepare the store again") from None

    def hashes(self, column: str) -> Hashes:
        return self.values(column, HASH_DTYPE)

    def values(self, column: str, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Return a column of fixed width."""
        with self._reading():
            batches = [self._batch(number, check_offsets=False) for number in range(self._reader.num_record_batches)]
            return np.concatenate([fixed_width_values(batch.column(column), dtype) for batch in batches])

    def _batch(self, number: int, *, check_offsets: bool) -> Any:
        batch = self._reader.get_batch(number)
        # an unvalidated offset beyond the end of the file would crash the process
        batch.validate(full=check_offsets)
        return batch

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (pa.ArrowException, OSError, ValueError, TypeError, IndexError) as error:
            raise UserError(f"{self._path} of the store is damaged ({error}); prepare the store again") from error


def _mask(item: Any) -> npt.NDArray[np.bool_] | None:
    # stored as bits, so this always copies
    return np.array(item.values.to_numpy(zero_copy_only=False)) if item.is_valid else None


def _row(lists: Sequence[tuple[npt.NDArray[Any], npt.NDArray[Any]]], row: int) -> list[npt.NDArray[Any]]:
    """Copy one row of each of these views: it stays valid and writable after its shard is unmapped."""
    return [flat[offsets[row] : offsets[row + 1]].copy() for offsets, flat in lists]


def list_views(column: Any) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """View the offsets and the values of a list column; raise if there are nulls."""
    # not to_numpy, which imports pandas
    return np.from_dlpack(column.offsets), np.from_dlpack(column.values)


def fixed_width_values(array: Any, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """View a fixed-width column without nulls as a numpy array."""
    return np.frombuffer(array.buffers()[1], dtype, count=array.offset + len(array))[array.offset :]


@dataclass(frozen=True)
class StoreFile:
    """A manifest entry for one file; num_pairs is 0 for files other than shards."""

    name: str
    size: int
    sha256: str
    num_pairs: int = 0

    def __post_init__(self) -> None:
        if not is_safe_relative_path(self.name):
            raise UserError(
                f"the store's manifest names {self.name!r}, a path outside the store; prepare the store again"
            )


class ExampleStore:
    """Examples of a prepared directory, or of a split of it, read by number."""

    def __init__(
        self, path: Path, manifest: Mapping[str, Any], split: Split | None = None, directory: Path | None = None
    ) -> None:
        self.path = path
        self.manifest = manifest
        self._split, self._directory = split, directory
        self._side: Side | None = None
        files = [StoreFile(**entry) for entry in manifest["shards"]]
        stored_kind: StoredKind = manifest.get("kind", "pairs")
        self.kind: Kind = kind_of(stored_kind)
        self.has_token_weights = stored_kind == "weighted_pairs"
        self.unit = UNITS[self.kind]
        self.num_responses = int(manifest.get("num_responses", 2))  #: of the example with most
        self._shard_starts = np.cumsum([0, *(shard.num_pairs for shard in files)])
        self.extra_columns = tuple(manifest.get("extra_columns", ()))
        max_views = max(_VIEWS_PER_SHARD, _MAX_VIEWS // len(files))
        self._shard = lru_cache(MAX_OPEN_SHARDS)(
            lambda number: StoreShard(path / files[number].name, stored_kind, self.extra_columns, max_views)
        )
        self.digest = str(manifest["content_digest"])  #: of all examples in order, independent of the shard size
        self.fingerprint = str(manifest["identity"])  #: of sources, tokenizer, template and settings
        self.tokenizer_digest = str(manifest.get("tokenizer_digest", "unknown"))
        self.longest_example = int(manifest["longest_pair"])  #: tokens of a prompt plus its longest response
        #: `weight` and `margin`, each if it differs from the default in at least one example
        self.columns_in_use = frozenset(manifest["columns_in_use"])
        #: tokens of the prompt and each response, such as (prompt, chosen, rejected); 0 for absent responses
        self.lengths: Lengths = _map_lengths(path / "lengths.bin", len(self), 1 + self.num_responses)
        has_masks = any(entry["name"] == "scored.bin" for entry in manifest["indexes"])
        #: scored tokens of each response
        self.scored_lengths = self.lengths[:, 1:]
        if has_masks:
            self.scored_lengths = _map_lengths(path / "scored.bin", len(self), self.num_responses)
        if split is not None:
            self._select(split)

    def _select(self, split: Split) -> None:
        """Restrict the store to the pairs of a split."""
        self._side = side = Side(self._find_rows(split), split.held_out)

        def indexed(lengths: Lengths) -> Lengths:
            looked_up = IndexedLengths(len(side), lambda ids: np.take(lengths, side.rows_of(ids), axis=0))
            return cast("Lengths", looked_up)

        self.lengths, self.scored_lengths = indexed(self.lengths), indexed(self.scored_lengths)
        self.longest_example = side.longest_example or self.longest_example
        self.digest = hashlib.sha256(f"{self.digest} {split}".encode()).hexdigest()

    def _find_rows(self, split: Split) -> SplitRows:
        """Map the file of the split, which the first process writes."""
        name = hashlib.sha256(f"{self.digest} {split.share} {split.seed}".encode()).hexdigest()[:16]
        path = None if self._directory is None else self._directory / f"held-out-{name}.rows"
        rows = None if path is None else SplitRows.map(path, len(self))
        if rows is None:
            rows = SplitRows.of(split.held_out_rows(self.hashes("prompt_hash")), self.lengths)
            if path is not None:
                rows.write(path)
        return rows

    def split(self, share: float, seed: int, directory: Path | None = None) -> tuple[ExampleStore, ExampleStore]:
        """Return the pairs to train on and the share of pairs that is held out, by prompt.

        directory: where processes find the rows of each side, computed by the first; None computes them in memory.
        """
        train, held_out = (
            ExampleStore(self.path, self.manifest, Split(share, seed, side), directory) for side in (False, True)
        )
        if len(train) == 0:
            raise UserError(f"all {len(self)} pairs of {self.path} have one prompt, so none can be held out")
        return train, held_out

    @classmethod
    def open(cls, path: str | Path, expected_fingerprint: str | None = None) -> ExampleStore:
        """Open a store; check the sizes of its files and, if given, its fingerprint."""
        path = Path(path)
        manifest = read_manifest(path)
        if expected_fingerprint is not None and manifest["identity"] != expected_fingerprint:
            raise UserError(
                f"the store {path} was prepared from different rows, tokenizer, template or settings "
                f"(fingerprint {manifest['identity'][:12]}, expected {expected_fingerprint[:12]}); "
                "prepare it again, or choose a different output directory"
            )
        for file in _files(manifest):
            size = (path / file.name).stat().st_size if (path / file.name).is_file() else None
            if size != file.size:
                found = "is missing" if size is None else f"has {size} bytes instead of {file.size}"
                raise UserError(f"the store {path} is damaged: {file.name} {found}; prepare it again")
        return cls(path, manifest)

    def __len__(self) -> int:
        return int(self._shard_starts[-1]) if self._side is None else len(self._side)

    def number_in_files(self, pair_id: int) -> int:
        """Return the number of a pair in the whole store, which `thresher inspect` shows."""
        return int(self._rows(np.array([pair_id]))[0])

    def _rows(self, pair_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return pair_ids if self._side is None else self._side.rows_of(pair_ids)

    def __getitem__(self, pair_id: int) -> Example:
        """Read one pair by its number, from 0."""
        return self.read(np.array([pair_id])).pairs[0]

    def read(self, pair_ids: npt.NDArray[np.int64]) -> ExampleBatch:
        """Read pairs in the given order."""
        pair_ids = np.asarray(pair_ids, dtype=np.int64)
        if (is_outside := (pair_ids < 0) | (pair_ids >= len(self))).any():
            raise IndexError(f"pair {pair_ids[is_outside][0]} is outside the store of {len(self)} pairs")
        rows = self._rows(pair_ids)
        numbers = np.searchsorted(self._shard_starts, rows, side="right") - 1
        places = zip(numbers.tolist(), (rows - self._shard_starts[numbers]).tolist(), strict=True)
        return ExampleBatch(pair_ids, tuple(self._shard(number).example(row) for number, row in places))

    def hashes(self, column: str = "hash") -> Iterator[Hashes]:
        """Yield one shard's hashes at a time: column `hash` for whole pairs, or `prompt_hash`."""
        return self._values(column, HASH_DTYPE)

    def _values(self, column: str, dtype: np.dtype[Any]) -> Iterator[npt.NDArray[Any]]:
        """Yield a column of fixed width, one shard at a time."""
        for number, start in enumerate(self._shard_starts[:-1].tolist()):
            values = self._shard(number).values(column, dtype)
            yield values if self._side is None else self._side.select(values, start)

    def prompt_hashes(self, pair_ids: npt.NDArray[np.int64]) -> Hashes:
        """Return the hashes of some examples' prompts; of pairs, it reads the hashes of their shards."""
        numbers = self._rows(pair_ids)
        if self.kind != "pairs":
            return np.take(np.memmap(self.path / "prompts.bin", HASH_DTYPE, "r"), numbers)
        found, shards = np.empty(len(numbers), HASH_DTYPE), np.searchsorted(self._shard_starts, numbers, "right") - 1
        for shard in np.unique(shards):
            is_here = shards == shard
            rows = numbers[is_here] - self._shard_starts[shard]
            found[is_here] = self._shard(int(shard)).hashes("prompt_hash")[rows]
        return found

    @property
    def parts(self) -> dict[str, ExampleStore]:
        """Itself, without a name, where several stores are joined."""
        return {"": self}

    def part_of(self, pair_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return np.zeros(len(pair_ids), dtype=np.int64)

    @cached_property
    def _subsets(self) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
        values = self.column("subset", np.dtype(f"S{SUBSET_BYTES}"))
        names, numbers = np.unique(values, return_inverse=True)
        return names, numbers.astype(np.int64)

    @property
    def subsets(self) -> list[str]:
        """The subsets that are measured separately, in order of their names; none without such a column."""
        return [name.decode() for name in self._subsets[0].tolist()] if "subset" in self.extra_columns else []

    def subset_of(self, pair_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return self._subsets[1][pair_ids]

    def column(self, name: str, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Return a column of fixed width of all examples."""
        return np.concatenate(list(self._values(name, dtype)))

    @property
    def file_names(self) -> list[str]:
        """The store's files, relative to its directory."""
        return ["manifest.json", *(file.name for file in _files(self.manifest))]

    def verify(self) -> None:
        """Compare the digest of every file with the manifest."""
        for file in _files(self.manifest):
            if sha256_of_file(self.path / file.name) != file.sha256:
                raise UserError(f"the store {self.path} is damaged: {file.name} has a wrong digest; prepare it again")

    def __reduce__(self) -> tuple[Any, ...]:
        # memory maps cannot be pickled; the receiving process maps the files again
        return type(self), (self.path, self.manifest, self._split, self._directory)


def sha256_of_file(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def read_manifest(path: Path) -> dict[str, Any]:
    """Read and validate a store's manifest."""
    file = path / "manifest.json"
    if not file.is_file():
        raise UserError(f"{path} is not a pair store: it has no manifest.json; create one with `thresher prepare`")
    try:
        manifest: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        version = manifest["format_version"]
        is_first = manifest.get("kind", "pairs") == "pairs" and not manifest.get("extra_columns")
        if is_known := version == (FORMAT_VERSION if is_first else RESPONSES_VERSION):
            _check_fields(manifest)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{file} is damaged ({error}); prepare the store again") from error
    if not is_known:
        raise UserError(f"{path} has store format {version}, but this version reads {FORMAT_VERSION}; prepare it again")
    return manifest


def _check_fields(manifest: Mapping[str, Any]) -> None:
    """Raise for a manifest that `writer` cannot have written: stores may come from untrusted sources."""
    files = _files(manifest)
    for each in files:
        if not (type(each.size) is type(each.num_pairs) is int and min(each.size, each.num_pairs) >= 0):
            raise ValueError(f"invalid size of {each.name}")
    num_pairs = sum(each.num_pairs for each in files)
    sizes = {each.name: each.size for each in files}
    kind, width = manifest.get("kind", "pairs"), manifest.get("num_responses", 2)
    kinds = (*get_args(Kind), "weighted_pairs")
    if kind not in kinds or type(width) is not int or width < 1 or (kind_of(kind) == "pairs" and width != 2):
        raise ValueError(f"invalid kind {kind!r} with {width!r} responses")
    if not set(extra := manifest.get("extra_columns", [])) <= EXTRA_COLUMNS.keys() or len(set(extra)) < len(extra):
        raise ValueError(f"invalid columns {extra!r}")
    expected = {"lengths.bin": (1 + width) * LENGTH_DTYPE.itemsize, "scored.bin": width * LENGTH_DTYPE.itemsize}
    if kind_of(kind) != "pairs":
        expected["prompts.bin"] = HASH_BYTES
    for name, row_size in expected.items():
        size = num_pairs * row_size
        if sizes.get(name, size if name == "scored.bin" else None) != size:
            raise ValueError(f"the size of {name} does not match {num_pairs} pairs")
    texts = [manifest["content_digest"], manifest["identity"], *manifest["columns_in_use"]]
    texts += [each.sha256 for each in files]
    if num_pairs == 0 or type(manifest["longest_pair"]) is not int or not all(type(each) is str for each in texts):
        raise ValueError("a field has the wrong type")


def _files(manifest: Mapping[str, Any]) -> list[StoreFile]:
    return [StoreFile(**entry) for entry in (*manifest["shards"], *manifest["indexes"])]


def _map_lengths(path: Path, num_pairs: int, width: int) -> Lengths:
    return np.memmap(path, dtype=LENGTH_DTYPE, mode="r", shape=(num_pairs, width))
