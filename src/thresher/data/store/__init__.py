"""On-disk store of tokenized pairs: memory-mapped Arrow shards, written once."""

from thresher.data.store.reader import PairStore

__all__ = ["PairStore"]
