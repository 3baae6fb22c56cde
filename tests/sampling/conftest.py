"""Fixtures of the tests of sampled answers."""

from tests.support.small_run_fixtures import base

__all__ = ["base"]
