"""SVG figures that follow light and dark, for the diagrams of the docs and the charts of the benchmarks.

An SVG that a page shows as an image follows the reader's system, by the media query in its own style. The site writes
it into the page instead, where docs/_static/figures.css sets the same colours by the theme that the reader chose there.
"""

from __future__ import annotations

from html import escape

# name: light, dark
COLOURS = {
    "ink": ("#1f2328", "#e6edf3"),
    "muted": ("#59636e", "#9da7b3"),
    "line": ("#818b98", "#7d8590"),
    "surface": ("#f6f8fa", "#1c2128"),
    "border": ("#d1d9e0", "#3d444d"),
    "green": ("#1f7a5c", "#4fbf94"),
    "green-soft": ("#dff3ea", "#16372c"),
    "blue": ("#2f66b0", "#79b0f5"),
    "blue-soft": ("#e1ecfa", "#162c49"),
    "red": ("#b3382c", "#f08a7f"),
    "red-soft": ("#fbe5e2", "#44201c"),
    "amber": ("#8a6100", "#dcae4c"),
    "amber-soft": ("#fdf2d0", "#3a2d0c"),
}
_RULES = """\
.fig text { fill: var(--ink); }
.fig .muted { fill: var(--muted); }
.fig .line { fill: none; stroke: var(--line); stroke-width: 1.5; }
.fig .line-solid { fill: var(--line); }
.fig .box { fill: var(--surface); stroke: var(--border); }
.fig .bold { font-weight: 600; }
.fig .small { font-size: 12px; }
.fig .mono { font-family: ui-monospace, SFMono-Regular, Menlo, monospace; font-size: 12.5px; }"""
# charts that Vega draws: their colours are attributes, which CSS overrides
_VEGA = {
    '[fill="white"]': "fill: none",
    '[fill="#000"]': "fill: var(--ink)",
    '[stroke="#ddd"]': "stroke: var(--border)",
    '[stroke="#888"]': "stroke: var(--line)",
    '[stroke="black"]': "stroke: var(--ink)",
}
TINTS = ("green", "blue", "red", "amber")


def variables(theme: int) -> str:
    """Write the colours of a theme, 0 for light and 1 for dark, as CSS variables."""
    return " ".join(f"--{name}: {both[theme]};" for name, both in COLOURS.items())


def _rules() -> list[str]:
    tints = [
        f".fig .{tint} {{ fill: var(--{tint}-soft); stroke: var(--{tint}); }}\n"
        f".fig .{tint}-solid {{ fill: var(--{tint}); }}\n"
        f".fig text.{tint}-text {{ fill: var(--{tint}); }}\n"
        f".fig .{tint}-line {{ fill: none; stroke: var(--{tint}); stroke-width: 1.5; }}"
        for tint in TINTS
    ]
    return [_RULES, *tints, *(f".fig {selector} {{ {rule}; }}" for selector, rule in _VEGA.items())]


def style() -> str:
    """Write the style of a figure that stands alone: the reader's system decides on light or dark."""
    themes = [f".fig {{ {variables(0)} }}", f"@media (prefers-color-scheme: dark) {{ .fig {{ {variables(1)} }} }}"]
    return "\n".join([*themes, *_rules()])


def site_style() -> str:
    """Write the style of all figures on the site, whose theme the reader may choose."""
    themes = [f".fig {{ {variables(0)} }}", f'html[data-theme="dark"] .fig {{ {variables(1)} }}']
    return "\n".join(["/* Written by scripts/docs_diagrams.py. */", *themes, *_rules(), ""])


def follow_theme(svg: str) -> str:
    """Let an SVG that Vega drew follow light and dark."""
    return svg.replace('class="marks"', 'class="marks fig"', 1).replace(">", f"><style>\n{style()}\n</style>", 1)


class Figure:
    """Boxes, arrows and text on a canvas, in pixels from its top left corner."""

    def __init__(self, width: int, height: int, title: str, description: str) -> None:
        self.width, self.height, self.title, self.description = width, height, title, description
        self._parts: list[str] = []

    def text(self, x: float, y: float, text: str, classes: str = "", *, anchor: str = "start") -> None:
        """Write a line of text; y is its baseline."""
        named = f' class="{classes}"' if classes else ""
        at = "" if anchor == "start" else f' text-anchor="{anchor}"'
        self._parts.append(f'<text x="{x:g}" y="{y:g}"{at}{named}>{escape(text, quote=False)}</text>')

    def box(self, x: float, y: float, width: float, height: float, classes: str = "box", *, radius: float = 6) -> None:
        """Draw a rectangle."""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" class="{classes}"/>'
        )

    def card(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        classes: str,
        title: str,
        *lines: str,
        anchor: str = "start",
    ) -> None:
        """Draw a box with a title and smaller lines below it."""
        self.box(x, y, width, height, classes)
        at = x + width / 2 if anchor == "middle" else x + 12
        top = y + (height - 17 * len(lines)) / 2 + 5
        self.text(at, top, title, "bold", anchor=anchor)
        for number, line in enumerate(lines, 1):
            self.text(at, top + 17 * number, line, "small muted", anchor=anchor)

    def arrow(self, *points: tuple[float, float], classes: str = "line") -> None:
        """Draw a line through points, with a head at the last one."""
        (x0, y0), (x1, y1) = points[-2:]
        length = ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5
        dx, dy = 6 * (x1 - x0) / length, 6 * (y1 - y0) / length
        side_x, side_y = -0.7 * dy, 0.7 * dx
        ends = [(x1 - dx + side_x, y1 - dy + side_y), (x1, y1), (x1 - dx - side_x, y1 - dy - side_y)]
        head = "L".join(f"{x:g} {y:g}" for x, y in ends)
        path = "L".join(f"{x:g} {y:g}" for x, y in points)
        self._parts.append(f'<path d="M{path}M{head}" class="{classes}"/>')

    def line(self, x0: float, y0: float, x1: float, y1: float, classes: str = "line") -> None:
        """Draw a line."""
        self._parts.append(f'<path d="M{x0:g} {y0:g}L{x1:g} {y1:g}" class="{classes}"/>')

    def svg(self) -> str:
        """Return the whole file."""
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" class="fig" viewBox="0 0 {self.width} {self.height}" '
                f'width="{self.width}" height="{self.height}" role="img" '
                'font-family="system-ui, -apple-system, Segoe UI, Roboto, Arial, sans-serif" font-size="14">',
                f"<title>{escape(self.title)}</title>",
                f"<desc>{escape(self.description)}</desc>",
                f"<style>\n{style()}\n</style>",
                *self._parts,
                "</svg>\n",
            ]
        )
