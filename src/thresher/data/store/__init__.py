"""The token store on disk: Arrow shards, written once, memory-mapped."""
