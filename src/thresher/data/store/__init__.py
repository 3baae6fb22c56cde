"""The token store on disk: Arrow shards, written once and memory-mapped."""

from thresher.data.store.reader import PairStore

__all__ = ["PairStore"]
