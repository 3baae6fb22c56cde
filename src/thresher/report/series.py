"""Series of points for charts: rounded, and thinned where a screen could not show more."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_DIGITS = 6
_SMOOTHED_FROM = 60  # points of a line; shorter ones are readable as they are
_SMOOTHED_SHARE = 0.04  # of a line, on each side of a point
LINE, RAW, MEAN = "line", "raw", "mean"
Point = tuple[float, float]
Values = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Parts:
    """What a long line consists of. raw: its values, which hide the lines of other runs. mean: its moving mean."""

    raw: bool
    mean: bool = True


@dataclass(frozen=True)
class Series:
    """Points that share labels. columns: values by field, all of one length; None where a value is not finite."""

    labels: Mapping[str, str]
    columns: Mapping[str, Sequence[float | None]]

    def rows(self) -> list[dict[str, object]]:
        """One object per point, as Vega reads them."""
        names, values = list(self.columns), list(self.columns.values())
        return [{**self.labels, **dict(zip(names, each, strict=True))} for each in zip(*values, strict=True)]


def lines(points: Sequence[Point], max_points: int, labels: Mapping[str, str], parts: Parts) -> list[Series]:
    """Make a line of at most about max_points points; a long one becomes raw values and their moving mean."""
    if len(points) < _SMOOTHED_FROM or not parts.mean:
        return [_line(thin(points, max_points), {**labels, "part": LINE})]
    means = _moving_means(points, max(1, int(len(points) * _SMOOTHED_SHARE)))
    interval = -(-len(means) // max_points)
    mean = _line([*means[:-1:interval], means[-1]], {**labels, "part": MEAN})
    return [_line(thin(points, max_points), {**labels, "part": RAW}), mean] if parts.raw else [mean]


def _line(points: Sequence[Point], labels: Mapping[str, str]) -> Series:
    return Series(labels, {"x": [x for x, _ in points], "y": [rounded(y) for _, y in points]})


def _moving_means(points: Sequence[Point], num_each_side: int) -> list[Point]:
    """Mean of the finite values around each point."""
    values = np.array([y for _, y in points])
    is_finite = np.isfinite(values)
    sums, counts = (np.concatenate([[0.0], np.cumsum(each)]) for each in (np.where(is_finite, values, 0.0), is_finite))
    at = np.arange(len(points))
    start, stop = np.maximum(at - num_each_side, 0), np.minimum(at + num_each_side + 1, len(points))
    with np.errstate(invalid="ignore"):
        means = (sums[stop] - sums[start]) / (counts[stop] - counts[start])
    return [(x, float(mean)) for (x, _), mean in zip(points, means, strict=True)]


def thin(points: Sequence[Point], max_points: int) -> list[Point]:
    """Keep the first, the last, the smallest and the largest point of equal intervals: peaks must stay visible."""
    if len(points) <= max_points:
        return list(points)
    num_intervals = max(1, max_points // 4)
    kept: list[Point] = []
    for part in np.array_split(np.arange(len(points)), num_intervals):
        finite = [i for i in part.tolist() if math.isfinite(points[i][1])] or [int(part[0])]
        lowest, highest = min(finite, key=lambda i: points[i][1]), max(finite, key=lambda i: points[i][1])
        kept += [points[i] for i in sorted({int(part[0]), lowest, highest, int(part[-1])})]
    return kept


def histograms(samples: Iterable[tuple[Mapping[str, str], Values]], max_bins: int = 40) -> list[Series]:
    """Shares of values in bins that all samples have in common; x is the middle of a bin."""
    finite = [(labels, values[np.isfinite(values)]) for labels, values in samples]
    finite = [(labels, values) for labels, values in finite if len(values)]
    if not finite:
        return []
    together = np.concatenate([values for _, values in finite])
    low, high = np.quantile(together, [0.0, 1.0])
    if low == high:
        low, high = low - 0.5, high + 0.5
    width = (high - low) / int(np.clip(np.sqrt(len(together)), 8, max_bins))
    # an empty bin on each side closes the outline
    edges = np.arange(low - width, high + 1.5 * width, width)
    middles = [rounded(float(x)) for x in (edges[:-1] + edges[1:]) / 2]
    return [
        Series(labels, {"x": middles, "y": [rounded(n / len(values)) for n in np.histogram(values, edges)[0].tolist()]})
        for labels, values in finite
    ]


def rounded(value: float) -> float | None:
    """Round to the digits that a chart can show; None if it is not finite."""
    return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
