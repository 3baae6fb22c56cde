"""The training loop, the trainer of one rank, and restarts after failures."""
