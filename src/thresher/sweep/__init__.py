"""Sweeps: runs of a grid of settings, scheduled by Ray Tune, resumed after a kill, and compared at the end."""
