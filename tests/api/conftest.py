"""A config of a small run, without output_dir."""

from tests.support.small_run_fixtures import base

__all__ = ["base"]
