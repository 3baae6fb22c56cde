"""Loading models and adapters, whole or one shard per process."""
