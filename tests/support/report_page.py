"""The parts of a report's page that tests look at."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

VOID = {"meta", "link", "br", "img", "input", "hr"}


@dataclass
class Page(HTMLParser):
    """The elements of a page with their attributes, the text outside of scripts and styles, and the scripts."""

    html: str
    elements: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    text: str = ""
    scripts: list[str] = field(default_factory=list)
    sections: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self._open: list[str] = []
        self.feed(self.html)
        assert not self._open, f"elements that are not closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "section":
            self.sections.append(str(dict(attrs)["id"]))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open[-1:] == ["script"]:
            self.scripts.append(data)
        elif self._open[-1:] != ["style"]:
            self.text += f"{data} "

    @property
    def charts(self) -> dict[str, dict[str, Any]]:
        """The charts by their id, as the page draws them."""
        return {chart["id"]: chart for chart in json.loads(self.scripts[0])}

    def points(self, chart: str, **labels: str) -> list[tuple[float, float]]:
        """The points of the series with these labels."""
        (columns,) = [
            each["columns"] for each in self.charts[chart]["series"] if labels.items() <= each["labels"].items()
        ]
        return list(zip(columns["x"], columns["y"], strict=True))
