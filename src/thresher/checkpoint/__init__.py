"""Checkpoints: atomic, verified, resumable, and never a pickle."""
