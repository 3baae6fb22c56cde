"""Several stores read as one: the examples of the second are numbered after those of the first, and so on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from thresher.data.example import Example, ExampleBatch
from thresher.data.store.reader import HASH_DTYPE, ExampleStore, Hashes
from thresher.data.store.split import IndexedLengths, Lengths
from thresher.errors import UserError

Numbers = npt.NDArray[np.int64]


class JoinedStores:
    """The sources of a mixture, or the sets of an evaluation, by name. Nothing is copied."""

    def __init__(self, parts: Mapping[str, ExampleStore]) -> None:
        self.parts = dict(parts)
        self._stores = list(parts.values())
        self.starts: Numbers = np.cumsum([0, *map(len, self._stores)])  #: first number of each part, and the end
        first = self._stores[0]
        if (other := next((name for name, each in parts.items() if each.kind != first.kind), None)) is not None:
            has_labels = "labels" in (first.kind, parts[other].kind)
            join = ", or join labelled rows to pairs with data_args.join_labelled=true" if has_labels else ""
            name = next(iter(parts))
            raise UserError(
                f"{name} has {first.unit}, but {other} has {parts[other].unit}; name data of one kind{join}"
            )
        self.kind, self.unit = first.kind, first.unit
        self.has_token_weights = any(each.has_token_weights for each in self._stores)
        self.num_responses = max(each.num_responses for each in self._stores)
        self.longest_example = max(each.longest_example for each in self._stores)
        self.columns_in_use = frozenset().union(*(each.columns_in_use for each in self._stores))
        self.digest = hashlib.sha256(" ".join(each.digest for each in self._stores).encode()).hexdigest()

    def split(self, share: float, seed: int, directory: Path | None = None) -> tuple[JoinedStores, JoinedStores]:
        """Return the pairs to train on and the share of each part that is held out, by prompt."""
        sides = {name: store.split(share, seed, directory) for name, store in self.parts.items()}
        train, held_out = (JoinedStores({name: both[at] for name, both in sides.items()}) for at in (0, 1))
        return train, held_out

    @property
    def path(self) -> Path:
        """The directory of the parts, for messages."""
        return self._stores[0].path.parent

    @property
    def lengths(self) -> Lengths:
        """Tokens of the prompt and each response, read when they are indexed."""
        return cast("Lengths", IndexedLengths(len(self), self.lengths_of))

    def __len__(self) -> int:
        return int(self.starts[-1])

    def part_of(self, ids: Numbers) -> Numbers:
        """Return the number of the part of each example."""
        return np.searchsorted(self.starts, ids, side="right").astype(np.int64) - 1

    def subset_of(self, ids: Numbers) -> Numbers:
        """Return the number of the subset of each example in its part."""
        found = np.empty(len(ids), dtype=np.int64)
        for store, where, rows in self._by_part(ids):
            found[where] = store.subset_of(rows)
        return found

    def number_in_files(self, number: int) -> int:
        """Return the number of an example in its own store, which `thresher inspect` shows."""
        part = int(self.part_of(np.array([number]))[0])
        return self._stores[part].number_in_files(number - int(self.starts[part]))

    def __getitem__(self, number: int) -> Example:
        part = int(self.part_of(np.array([number]))[0])
        return self._stores[part][int(number) - int(self.starts[part])]

    def read(self, ids: Numbers) -> ExampleBatch:
        """Read examples in the given order."""
        ids = np.asarray(ids, dtype=np.int64)
        return ExampleBatch(ids, tuple(self[number] for number in ids.tolist()))

    def hashes(self, column: str = "hash") -> Iterator[Hashes]:
        """Yield one shard's hashes at a time."""
        for store in self._stores:
            yield from store.hashes(column)

    def column(self, name: str, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Return a column of fixed width of all examples."""
        return np.concatenate([store.column(name, dtype) for store in self._stores])

    def prompt_hashes(self, ids: Numbers) -> Hashes:
        found = np.empty(len(ids), HASH_DTYPE)
        for store, where, rows in self._by_part(ids):
            found[where] = store.prompt_hashes(rows)
        return found

    def lengths_of(self, ids: Numbers) -> Lengths:
        found = np.zeros((len(ids), 1 + self.num_responses), dtype=np.uint32)
        for store, where, rows in self._by_part(ids):
            found[where, : 1 + store.num_responses] = np.take(store.lengths, rows, axis=0)
        return found

    def _by_part(self, ids: Numbers) -> Iterator[tuple[ExampleStore, Numbers, Numbers]]:
        """Yield each part with the positions of its examples among the ids, and their numbers in it."""
        parts = self.part_of(ids)
        for number, store in enumerate(self._stores):
            where = np.flatnonzero(parts == number)
            if len(where):
                yield store, where, ids[where] - self.starts[number]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.parts,)


Stores: TypeAlias = ExampleStore | JoinedStores


def join(parts: Mapping[str, ExampleStore]) -> Stores:
    """Join stores by name; one without a name stays what it is."""
    return parts[""] if "" in parts else JoinedStores(parts)
