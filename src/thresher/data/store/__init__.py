"""On-disk store of tokenized pairs: memory-mapped Arrow shards, written once."""
