"""The training loop, one rank's trainer, and restarts."""
