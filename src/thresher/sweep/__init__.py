"""Sweeps: a run per combination of settings, scheduled by Ray Tune, resumed after a kill, and compared at the end."""
