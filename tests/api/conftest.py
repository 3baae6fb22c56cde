"""A config of a small run, without output_dir, and a Ray session."""

from tests.support.small_run_fixtures import base, ray_here

__all__ = ["base", "ray_here"]
