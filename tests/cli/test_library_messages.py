"""Messages of libraries during a run: in a file, and only errors on the terminal."""

from __future__ import annotations

import logging
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from thresher.cli.run_display import keep_library_messages
from thresher.cli.terminal import log_to_terminal

SECRET = "hf_canaryofthehubcanary01"


def speak() -> None:
    logging.getLogger("some_library").warning("deprecated, token=%s", SECRET)
    logging.getLogger("some_library").error("this failed")
    warnings.warn("use something else", FutureWarning, stacklevel=2)


def test_messages_go_to_a_file_and_errors_also_to_the_terminal(tmp_path: Path, capsys):
    with log_to_terminal(logging.INFO), keep_library_messages(tmp_path):
        speak()
    log, shown = (tmp_path / "libraries.log").read_text(), capsys.readouterr().err
    assert "WARNING some_library: deprecated, token=***" in log
    assert "FutureWarning: use something else" in log
    assert shown == "error: some_library: this failed\n"


def test_a_run_without_messages_has_no_file(tmp_path: Path):
    with keep_library_messages(tmp_path):
        logging.getLogger("some_library").info("not important")
    assert list(tmp_path.iterdir()) == []


def test_messages_wait_until_the_run_has_a_directory(tmp_path: Path):
    directory = tmp_path / "logs"
    with log_to_terminal(logging.ERROR), keep_library_messages(directory):
        speak()
        assert not directory.exists()
        directory.mkdir()
    assert "deprecated" in (directory / "libraries.log").read_text()


def test_a_failure_says_where_the_messages_are(tmp_path: Path, capsys):
    def fail() -> None:
        speak()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), log_to_terminal(logging.INFO), keep_library_messages(tmp_path):
        fail()
    assert f"messages of libraries are in {tmp_path / 'libraries.log'}" in capsys.readouterr().err.replace("\n", "")


def test_handlers_and_warnings_are_restored(tmp_path: Path):
    before, show = logging.getLogger().handlers[:], warnings.showwarning
    with keep_library_messages(tmp_path):
        assert warnings.showwarning is not show
    assert logging.getLogger().handlers == before
    assert warnings.showwarning is show


def test_the_command_line_shows_no_bars_of_libraries():
    program = """
import sys
from thresher.cli import main
sys.argv = ["thresher", "--version"]
try:
    main()
except SystemExit:
    from tqdm.auto import tqdm
    list(tqdm([1], file=sys.stdout))
"""
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert shown.startswith("thresher ")
    assert len(shown.splitlines()) == 1
