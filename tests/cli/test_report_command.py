"""`thresher report`: what it prints and writes, and its messages."""

from __future__ import annotations

import json
import sys

import pytest


@pytest.fixture
def metrics(tmp_path):
    """The log of one step, in the directory `run`."""
    file = tmp_path / "run" / "logs" / "metrics.jsonl"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"step": 1, "loss": 0.5}) + "\n")
    return file


def test_the_name_of_the_report_is_printed(command_line, metrics, tmp_path):
    pytest.importorskip("vl_convert", reason="the extra report is not installed")
    result = command_line("report", "run", "--output", "new/first.html")
    assert (result.code, result.out) == (0, "new/first.html\n")
    assert result.err.startswith("report on 1 run, 0.9 MB")
    assert (tmp_path / "new" / "first.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "there is no metrics.jsonl in "),
        (["run", "run/"], "is given twice; name each run once"),
        (["run", "-o", "report.pdf"], "--output report.pdf does not end in .html"),
    ],
)
def test_a_mistake_is_one_message(command_line, metrics, arguments, message):
    result = command_line("report", *arguments)
    assert result.code == 2
    assert message in result.err
    assert result.err.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty; the run has not logged a step yet"),
        ('{"step": 1, "loss": "much"}\n', "has a value that is not a number"),
        ("[]\n", "is not a metrics record"),
    ],
)
def test_a_damaged_log_is_named(command_line, metrics, content, message):
    metrics.write_text(content)
    result = command_line("report", "run")
    assert result.code == 2
    assert "metrics.jsonl" in result.err
    assert message in result.err


def test_a_missing_package_is_named_with_its_extra(command_line, metrics, monkeypatch):
    from thresher.report.page import vega_bundle

    vega_bundle.cache_clear()
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    result = command_line("report", "run")
    assert result.code == 2
    assert "vl_convert" in result.err
    assert "run `pip install 'thresher[report]'`" in result.err
