"""Text and lines of the page have enough contrast in both themes, by the formula of WCAG 2.1."""

from __future__ import annotations

import re

import pytest

from tests.support.paths import ROOT

CSS = (ROOT / "src" / "thresher" / "report" / "page_files" / "page.css").read_text(encoding="utf-8")
THEMES = {
    "light": re.search(r"^:root \{(.+?)\}", CSS, re.DOTALL | re.MULTILINE),
    "dark": re.search(r"^:root\[data-theme=\"dark\"\] \{(.+?)\}", CSS, re.DOTALL | re.MULTILINE),
    "dark by preference": re.search(r":root:not\(\[data-theme=\"light\"\]\) \{(.+?)\}", CSS, re.DOTALL),
}


def colors_of(theme: str) -> dict[str, list[str]]:
    match = THEMES[theme]
    assert match is not None
    return {name: re.findall("#[0-9a-f]{6}", value) for name, value in re.findall(r"--([\w-]+): ([^;]+);", match[1])}


def luminance(color: str) -> float:
    channels = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    brighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (brighter + 0.05) / (darker + 0.05)


def test_the_formula_gives_the_published_extreme() -> None:
    assert contrast("#ffffff", "#000000") == pytest.approx(21.0)


@pytest.mark.parametrize("theme", THEMES)
def test_text_has_a_contrast_of_4_5_and_lines_of_3(theme: str) -> None:
    colors = {name: values for name, values in colors_of(theme).items() if values}
    grounds = [colors[name][0] for name in ("background", "panel")]
    for ground in grounds:
        for name in ("text", "muted", "link"):
            assert contrast(colors[name][0], ground) >= 4.5, (name, ground)
        for line in colors["series"]:
            assert contrast(line, ground) >= 3.0, (line, ground)
    for box, text in (("warning", "warning-text"), ("error", "error-text"), ("note", "text")):
        assert contrast(colors[text][0], colors[box][0]) >= 4.5
        assert contrast(colors["text"][0], colors[box][0]) >= 4.5
    assert contrast(colors["warning-text"][0], colors["background"][0]) >= 4.5


def test_both_ways_to_the_dark_theme_have_the_same_colors() -> None:
    assert colors_of("dark") == colors_of("dark by preference")
