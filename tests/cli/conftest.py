"""Runs the command line in the test process."""

from tests.support.cli_runner import command_line

__all__ = ["command_line"]
