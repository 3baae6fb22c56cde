"""Charts as Vega-Lite specifications, and their points, rounded and thinned to what a screen can show.

Colors, fonts and the width come from the page, which knows its theme and screen. A chart holds its points as columns;
the page turns them into the rows that Vega reads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

_DIGITS = 6
_SMOOTHED_FROM = 60  # points of a line; shorter ones are readable as they are
_SMOOTHED_SHARE = 0.04  # of a line, on each side of a point
LINE, RAW, MEAN = "line", "raw", "mean"
Point = tuple[float, float]
Values = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Series:
    """Points that share labels."""

    labels: Mapping[str, str]
    columns: Mapping[str, Sequence[float | None]]  # by field, all of one length; None where a value is not finite


def lines(
    points: Sequence[Point], max_points: int, labels: Mapping[str, str], *, raw: bool, mean: bool = True
) -> list[Series]:
    """Make a line of at most about max_points points; a long one becomes its moving mean, and its raw values."""
    if len(points) < _SMOOTHED_FROM or not mean:
        return [_line(thin(points, max_points), {**labels, "part": LINE})]
    means = _moving_means(points, max(1, int(len(points) * _SMOOTHED_SHARE)))
    interval = -(-len(means) // max_points)
    smoothed = _line([*means[:-1:interval], means[-1]], {**labels, "part": MEAN})
    return [_line(thin(points, max_points), {**labels, "part": RAW}), smoothed] if raw else [smoothed]


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


Spec = dict[str, Any]
_HEIGHT = 230


@dataclass(frozen=True)
class Chart:
    """A chart with its title, and one line that says what good looks like."""

    id: str
    title: str
    caption: str
    spec: Spec
    series: Sequence[Series]

    def to_json(self) -> dict[str, Any]:
        """What the page needs to draw it."""
        return {
            "id": self.id,
            "spec": {**self.spec, "description": f"{self.title}. {self.caption}"},
            "series": [{"labels": each.labels, "columns": each.columns} for each in self.series],
        }


def line_chart(
    series: Sequence[Series],
    *,
    title: str,
    label: str,
    order: Sequence[str],
    is_single: bool,
    is_log: bool = False,
    is_percent: bool = False,
    at: float | None = None,
    x: str = "step",
) -> Spec:
    """Lines over steps; long ones are drawn faintly, below their moving mean.

    Args:
        label: What the lines of a run differ in: their color, or their dashes if there is more than a single run.
        order: The order of the colors of a single run.
        at: Draw a horizontal line at this value.
    """
    color = label if is_single else "run"
    dash = label if not is_single and len({each.labels[label] for each in series}) > 1 else None
    scale = {"type": "log"} if is_log else {"zero": False}
    y_axis = {"format": ".0%"} if is_percent else {"format": "~g", "grid": False} if is_log else {}
    encoding = {
        "x": _number("x", x, axis={"tickMinStep": 1, "grid": False}, scale={"nice": False}),
        "y": _number("y", title, scale=scale, axis=y_axis),
        "color": _color(series, color, order if is_single else ()),
    }
    labels = (color,) if dash is None else (color, dash)
    # for lines only: the legend would show the dashes of points, which have none
    dashes = {} if dash is None else {"strokeDash": {"field": dash, "type": "nominal", "title": None, "sort": None}}
    line = {"type": "line", "strokeJoin": "round"}  # a mitered peak would be drawn above 100%
    thin, thick = {**line, "strokeWidth": 1, "opacity": 0.35}, {**line, "strokeWidth": 2}
    faint = {"mark": thin, "transform": [{"filter": f"datum.part === '{RAW}'"}], "encoding": dashes}
    strong = {"mark": thick, "transform": [{"filter": f"datum.part !== '{RAW}'"}], "encoding": dashes}
    near = _hover_point(_tooltip(labels, x, title, ".1%" if is_percent else ".4~g"))
    layers = [strong, near]
    if any(each.labels["part"] == RAW for each in series):  # Vega warns of a layer without points
        layers = [faint, strong, {**near, "transform": [{"filter": f"datum.part !== '{MEAN}'"}]}]
    return _layered(encoding, layers, [] if at is None else [_rule(y=at)])


def distribution_chart(
    series: Sequence[Series], *, title: str, color: str, order: Sequence[str] = (), at: float | None = None
) -> Spec:
    """Outlines of histograms over each other."""
    encoding = {
        "x": _number("x", title, axis={"grid": False}),
        "y": _number("y", "share", stack=None, axis={"format": ".0%"}),
        "color": _color(series, color, order),
    }
    outline = {"type": "area", "interpolate": "step", "opacity": 0.25, "line": {"strokeWidth": 2, "opacity": 1}}
    near = _hover_point(_tooltip((color,), title, "share", ".1%"))
    return _layered(encoding, [{"mark": outline}, near], [] if at is None else [_rule(x=at)])


def scatter_chart(series: Sequence[Series], *, x: str, y: str, color: str) -> Spec:
    """Points with a line at zero on both axes, and a straight line fitted to each color."""
    encoding = {
        "x": _number("x", x, axis={"grid": False}),
        "y": _number("y", y, axis={"grid": False}),
        "color": _color(series, color),
    }
    point = {"type": "point", "filled": True, "size": 24, "opacity": 0.45}
    points = {"mark": point, "encoding": {"tooltip": _tooltip((color,), x, y, ".4~g")}}
    regression = [{"regression": "y", "on": "x", "groupby": [color]}]
    fit = {"transform": regression, "mark": {"type": "line", "strokeWidth": 2}}
    return _layered(encoding, [points, fit], [_rule(x=0.0), _rule(y=0.0)])


def path_chart(series: Sequence[Series], *, x: str, y: str, color: str, is_percent: bool) -> Spec:
    """Each run's path through a plane, from evaluation to evaluation; the last one is a large point."""
    encoding = {
        "x": _number("x", x, scale={"zero": False}),
        "y": _number("y", y, scale={"zero": False}, axis={"format": ".0%"} if is_percent else {}),
        "color": _color(series, color),
    }
    step = _number("step", "step")
    tooltip = {"tooltip": [*_tooltip((color,), x, y, ".1%" if is_percent else ".4~g"), step]}
    way = {"mark": {"type": "line", "opacity": 0.5, "strokeWidth": 1.5}, "encoding": {"order": step}}
    stops = {"mark": {"type": "point", "filled": True, "size": 25, "opacity": 0.8}, "encoding": tooltip}
    end = {"type": "point", "filled": True, "size": 130, "opacity": 1}
    ends = {"transform": [{"filter": "datum.is_end === 1"}], "mark": end, "encoding": tooltip}
    return _layered(encoding, [way, stops, ends], [], height=300)


def _layered(encoding: Spec, layers: list[Spec], rules: list[Spec], height: int = _HEIGHT) -> Spec:
    # in their own group: rules must not inherit the encoding of the points
    return {"width": "container", "height": height, "layer": [*rules, {"encoding": encoding, "layer": layers}]}


def _number(field: str, title: str, **options: Any) -> Spec:
    return {"field": field, "type": "quantitative", "title": title, **options}


def _color(series: Sequence[Series], field: str, order: Sequence[str] = ()) -> Spec:
    names = {each.labels[field] for each in series}
    # a legend with one entry says nothing
    legend = {} if len(names) > 1 else {"legend": None}
    sort = [name for name in order if name in names] or None
    return {"field": field, "type": "nominal", "title": None, "sort": sort, **legend}


def _tooltip(labels: Sequence[str], x: str, y: str, number_format: str) -> list[Spec]:
    return [
        *({"field": label, "type": "nominal", "title": label} for label in labels),
        _number("x", x, format="," if x == "step" else ",.4~g"),
        _number("y", y, format=number_format),
    ]


def _hover_point(tooltip: list[Spec]) -> Spec:
    """Points that appear near the pointer, with a tooltip."""
    select = {"type": "point", "nearest": True, "on": "pointerover", "clear": "pointerout"}
    shown = {"condition": {"param": "near", "empty": False, "value": 1}, "value": 0}
    return {
        "params": [{"name": "near", "select": select}],
        "mark": {"type": "point", "filled": True, "size": 60},
        "encoding": {"opacity": shown, "tooltip": tooltip},
    }


def _rule(x: float | None = None, y: float | None = None) -> Spec:
    position = {"x": {"datum": x}} if x is not None else {"y": {"datum": y}}
    return {"mark": {"type": "rule", "strokeDash": [3, 3], "opacity": 0.6, "aria": False}, "encoding": position}
