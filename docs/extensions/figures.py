"""SVG figures become a part of the page, so that they follow the theme that the reader chose on the site.

An image could follow the reader's system only. Figures are the SVG files with the class `fig`; their colours on the
site are in docs/_static/figures.css.
"""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator

_STYLE = re.compile(r"<style>.*?</style>\n?", re.DOTALL)
_SIZE = re.compile(r'^(<svg[^>]*?) width="([\d.]+)" height="[\d.]+"')


def inline(svg: str, description: str) -> str:
    """Return the element to write into a page: without its own style, as wide as the page allows."""
    sized = _SIZE.sub(r'\1 style="max-width: \2px"', _STYLE.sub("", svg).strip(), count=1)
    return sized.replace("<svg ", f'<svg aria-label="{escape(description)}" ', 1) if description else sized


def _visit_image(translator: HTML5Translator, node: nodes.image) -> None:
    path = Path(translator.builder.srcdir) / node["uri"]
    svg = path.read_text(encoding="utf-8") if path.suffix == ".svg" and path.is_file() else ""
    if not re.match(r'<svg[^>]*class="[^"]*\bfig\b', svg):
        HTML5Translator.visit_image(translator, node)
        return
    translator.body.append(f'<span class="figure">{inline(svg, node.get("alt", ""))}</span>')
    raise nodes.SkipNode


def _depart_image(translator: HTML5Translator, node: nodes.image) -> None:
    HTML5Translator.depart_image(translator, node)


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_node(nodes.image, override=True, html=(_visit_image, _depart_image))
    app.add_css_file("figures.css")
    return {"parallel_read_safe": True, "parallel_write_safe": True}
