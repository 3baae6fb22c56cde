"""Loading of models and adapters, in full or one shard per process."""
