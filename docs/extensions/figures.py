"""Figures and pictures that follow the theme that the reader chose on the site; an image follows the system only.

SVG files with the class `fig` become a part of the page; their colours are in docs/_static/figures.css. A picture
NAME-light.png with a NAME-dark.png next to it becomes both, each for its theme.
"""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
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


class PictureOfEachTheme(SphinxTransform):
    """Add the dark picture after the light one, before Sphinx collects the images of a page."""

    default_priority = 400

    def apply(self, **_arguments: object) -> None:
        folder = Path(self.env.doc2path(self.env.docname)).parent
        for image in list(self.document.findall(nodes.image)):
            uri = image["uri"]
            other = re.sub(r"-light\.png$", "-dark.png", uri)
            is_chosen = {"only-light", "dark-light"} & set(image["classes"])  # the page says it itself
            if other != uri and not is_chosen and (folder / other).is_file():
                dark = image.deepcopy()
                dark["uri"] = other
                image["classes"].append("only-light")
                dark["classes"].append("only-dark")
                image.parent.insert(image.parent.index(image) + 1, dark)


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_node(nodes.image, override=True, html=(_visit_image, _depart_image))
    app.add_transform(PictureOfEachTheme)
    app.add_css_file("figures.css")
    return {"parallel_read_safe": True, "parallel_write_safe": True}
