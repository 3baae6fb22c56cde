"""Fixtures of the tests of sampled answers."""

from tests.support.small_run_fixtures import base, ray_here

__all__ = ["base", "ray_here"]
