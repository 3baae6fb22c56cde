"""Process groups, the device mesh, context parallelism and sharded tensors."""
