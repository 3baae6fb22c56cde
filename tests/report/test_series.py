"""How points are thinned, averaged and binned, and the limit of throughput: values derived by hand."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from thresher.report.charts import MEAN, RAW, histograms, lines, thin
from thresher.report.run_files import shortest_names
from thresher.report.tables import format_number, format_seconds, useful_token_limit


def test_thinning_keeps_the_ends_and_every_extreme() -> None:
    points = [(step, math.sin(step / 50)) for step in range(10_000)]
    points[1234], points[7777] = (1234, 90.0), (7777, -90.0)
    kept = thin(points, 400)
    assert len(kept) <= 400
    assert {points[0], points[1234], points[7777], points[-1]} <= set(kept)
    assert kept == sorted(kept)


def test_a_log_shorter_than_the_limit_is_kept_whole() -> None:
    points = [(step, float(step)) for step in range(50)]
    (line,) = lines(points, 600, {"run": "a"}, raw=True)
    assert list(zip(line.columns["x"], line.columns["y"], strict=True)) == points


def test_the_moving_mean_ignores_values_that_are_not_finite() -> None:
    points = [(step, math.nan if step == 50 else 2.0) for step in range(100)]
    raw, mean = lines(points, 600, {}, raw=True)
    assert (raw.labels["part"], mean.labels["part"]) == (RAW, MEAN)
    assert raw.columns["y"][50] is None
    assert set(mean.columns["y"]) == {2.0}


def test_a_straight_line_is_its_own_moving_mean() -> None:
    _, mean = lines([(step, float(step)) for step in range(100)], 600, {}, raw=True)
    assert mean.columns["y"][10:90] == pytest.approx(list(range(10, 90)))


def test_histograms_share_their_bins_and_sum_to_one() -> None:
    one, other = histograms([({}, np.array([0.0, 0.0, 4.0])), ({}, np.array([8.0, math.nan]))])
    assert one.columns["x"] == other.columns["x"]
    assert sum(one.columns["y"]) == pytest.approx(1.0, abs=1e-5)
    assert sum(other.columns["y"]) == 1.0
    assert max(one.columns["y"]) == pytest.approx(2 / 3, abs=1e-5)
    assert (one.columns["y"][0], one.columns["y"][-1]) == (0.0, 0.0)


def test_equal_values_have_a_histogram() -> None:
    (only,) = histograms([({}, np.zeros(5))])
    assert sum(only.columns["y"]) == 1.0


def test_the_limit_has_neither_padding_nor_waiting() -> None:
    """1,000 useful tokens, of which 200 are shared; 200 of 1,000 computed are padding; 1 of 5 seconds is waiting."""
    record = {
        "tokens/useful": 1000.0,
        "tokens/shared": 200.0,
        "tokens/padding": 200.0,
        "time/step": 5.0,
        "time/wait_reference": 1.0,
    }
    assert useful_token_limit(record) == pytest.approx(1000 / (4 * 0.8))
    assert useful_token_limit({"loss": 1.0}) is None


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),  # noqa: RUF001
        (1234567, "1,234,567"),
        (0.5, "0.5000"),
        (-80.7015, "-80.70"),
        (12345.678, "12,346"),
        (3e-5, "3e-05"),
        (math.nan, "nan"),
        ("precompute", "precompute"),
        (150.0, "150"),
    ],
)
def test_numbers_have_four_digits(value: object, text: str) -> None:
    assert format_number(value) == text


@pytest.mark.parametrize(("seconds", "text"), [(1.25, "1.25 s"), (125, "2 min 5 s"), (7260, "2 h 1 min")])
def test_durations_have_two_units(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_runs_are_named_by_the_shortest_ends_of_their_paths_that_differ() -> None:
    assert shortest_names([Path("/a/b"), Path("/a/c")]) == ["b", "c"]
    assert shortest_names([Path("/a/run"), Path("/b/run"), Path("/c/other")]) == ["a/run", "b/run", "c/other"]
