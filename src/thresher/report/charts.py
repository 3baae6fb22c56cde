"""Charts as Vega-Lite specifications. Colors, fonts and the width come from the page, which knows its theme and screen.

A chart holds its points as columns; the page turns them into the rows that Vega reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from thresher.report.series import MEAN, RAW, Series

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

    def complete_spec(self) -> Spec:
        """The specification with its points, as the page builds it."""
        return {**self.to_json()["spec"], "data": {"values": [row for each in self.series for row in each.rows()]}}


def line_chart(
    series: Sequence[Series],
    *,
    title: str,
    color: str = "run",
    dash: str | None = None,
    order: Sequence[str] = (),
    is_log: bool = False,
    is_percent: bool = False,
    at: float | None = None,
) -> Spec:
    """Lines over steps; long ones are drawn faintly, below their moving mean.

    color, dash: the labels that tell lines apart. order: of the colors. at: draw a horizontal line at this value.
    """
    scale = {"type": "log"} if is_log else {"zero": False}
    y_axis = {"format": ".0%"} if is_percent else {"format": "~g", "grid": False} if is_log else {}
    x_axis = {"tickMinStep": 1, "grid": False}
    encoding = {
        "x": {"field": "x", "type": "quantitative", "title": "step", "axis": x_axis, "scale": {"nice": False}},
        "y": {"field": "y", "type": "quantitative", "title": title, "scale": scale, "axis": y_axis},
        "color": _color(series, color, order),
    }
    labels = (color,) if dash is None else (color, dash)
    # of lines alone: the legend would show the dashes of points, which have none
    dashes = {} if dash is None else {"strokeDash": {"field": dash, "type": "nominal", "title": None, "sort": None}}
    thin, thick = {"type": "line", "strokeWidth": 1, "opacity": 0.35}, {"type": "line", "strokeWidth": 2}
    faint = {"mark": thin, "transform": _filter(f"=== '{RAW}'"), "encoding": dashes}
    strong = {"mark": thick, "transform": _filter(f"!== '{RAW}'"), "encoding": dashes}
    near = _hover_point(_tooltip(labels, "step", title, ".1%" if is_percent else ".4~g"))
    layers = [strong, near]
    if any(each.labels["part"] == RAW for each in series):  # Vega warns of a layer without points
        layers = [faint, strong, {**near, "transform": _filter(f"!== '{MEAN}'")}]
    return _layered(encoding, layers, [] if at is None else [_rule(y=at)])


def distribution_chart(
    series: Sequence[Series], *, title: str, color: str, order: Sequence[str] = (), at: float | None = None
) -> Spec:
    """Outlines of histograms over each other."""
    encoding = {
        "x": {"field": "x", "type": "quantitative", "title": title, "axis": {"grid": False}},
        "y": {"field": "y", "type": "quantitative", "title": "share", "stack": None, "axis": {"format": ".0%"}},
        "color": _color(series, color, order),
    }
    outline = {"type": "area", "interpolate": "step", "opacity": 0.25, "line": {"strokeWidth": 2, "opacity": 1}}
    near = _hover_point(_tooltip((color,), title, "share", ".1%"))
    return _layered(encoding, [{"mark": outline}, near], [] if at is None else [_rule(x=at)])


def scatter_chart(series: Sequence[Series], *, x: str, y: str, color: str) -> Spec:
    """Points with a line at zero on both axes, and a straight line fitted to each color."""
    encoding = {
        "x": {"field": "x", "type": "quantitative", "title": x, "axis": {"grid": False}},
        "y": {"field": "y", "type": "quantitative", "title": y, "axis": {"grid": False}},
        "color": _color(series, color),
    }
    points = {
        "mark": {"type": "point", "filled": True, "size": 24, "opacity": 0.45},
        "encoding": {"tooltip": _tooltip((color,), x, y, ".4~g")},
    }
    fit = {
        "transform": [{"regression": "y", "on": "x", "groupby": [color]}],
        "mark": {"type": "line", "strokeWidth": 2},
    }
    return _layered(encoding, [points, fit], [_rule(x=0.0), _rule(y=0.0)])


def path_chart(series: Sequence[Series], *, x: str, y: str, color: str, is_percent: bool) -> Spec:
    """The way of each run through a plane, from evaluation to evaluation; the last one is a large point."""
    encoding = {
        "x": {"field": "x", "type": "quantitative", "title": x, "scale": {"zero": False}},
        "y": {
            "field": "y",
            "type": "quantitative",
            "title": y,
            "scale": {"zero": False},
            "axis": {"format": ".0%"} if is_percent else {},
        },
        "color": _color(series, color),
    }
    step = {"field": "step", "type": "quantitative", "title": "step"}
    tooltip = {"tooltip": [*_tooltip((color,), x, y, ".1%" if is_percent else ".4~g"), step]}
    way = {"mark": {"type": "line", "opacity": 0.5, "strokeWidth": 1.5}, "encoding": {"order": step}}
    stops = {"mark": {"type": "point", "filled": True, "size": 25, "opacity": 0.8}, "encoding": tooltip}
    ends = {
        "transform": [{"filter": "datum.is_end === 1"}],
        "mark": {"type": "point", "filled": True, "size": 130, "opacity": 1},
        "encoding": tooltip,
    }
    return _layered(encoding, [way, stops, ends], [], height=300)


def _layered(encoding: Spec, layers: list[Spec], rules: list[Spec], height: int = _HEIGHT) -> Spec:
    # in a group of their own: rules must not inherit the encoding of the points
    return {"width": "container", "height": height, "layer": [*rules, {"encoding": encoding, "layer": layers}]}


def _color(series: Sequence[Series], field: str, order: Sequence[str] = ()) -> Spec:
    names = {each.labels[field] for each in series}
    # a legend with one entry says nothing
    legend = {} if len(names) > 1 else {"legend": None}
    sort = [name for name in order if name in names] or None
    return {"field": field, "type": "nominal", "title": None, "sort": sort, **legend}


def _filter(condition: str) -> list[Spec]:
    return [{"filter": f"datum.part {condition}"}]


def _tooltip(labels: Sequence[str], x: str, y: str, number_format: str) -> list[Spec]:
    return [
        *({"field": label, "type": "nominal", "title": label} for label in labels),
        {"field": "x", "type": "quantitative", "title": x, "format": "," if x == "step" else ",.4~g"},
        {"field": "y", "type": "quantitative", "title": y, "format": number_format},
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
