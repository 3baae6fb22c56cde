"""On-disk store of tokenized examples: memory-mapped Arrow shards, written once."""

from thresher.data.store.reader import ExampleStore

__all__ = ["ExampleStore"]
