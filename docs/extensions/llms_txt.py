"""Write llms.txt (https://llmstxt.org) next to index.html: every page by section, with a one-line description.

Sections are the root's toctree, pages those below each section's index. An index describes its pages in a list of
`- [title](page.md): description`; the same text becomes the description in the head of each page.
"""

from __future__ import annotations

import html
from collections.abc import Iterator
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging

_LOGGER = logging.getLogger(__name__)


def describe_pages(env: BuildEnvironment) -> dict[str, str]:
    """Map each page to its description; for a section, and for the site, its first paragraph."""
    root = env.config.root_doc
    described = {root: _first_paragraph(env, root)}
    described |= {section: _first_paragraph(env, section) for section in env.toctree_includes[root]}
    for index in (page for section in env.toctree_includes[root] for page in _pages_below(env, section)):
        if index not in env.toctree_includes:
            continue
        for item in env.get_doctree(index).findall(nodes.list_item):
            start = item[0][0] if item.children and item[0].children else None
            if isinstance(start, addnodes.pending_xref):  # other items may link to a page in their text
                described[start["reftarget"]] = _one_line(item).partition(": ")[2]
    for page in sorted(env.found_docs - {page for page, text in described.items() if text}):
        _LOGGER.warning("no description; list the page in the index of its section", location=page)
        described[page] = ""
    return described


def render(env: BuildEnvironment, described: dict[str, str], suffix: str) -> str:
    """Write the text of llms.txt; links are relative to the site's root."""
    root = env.config.root_doc
    lines = [f"# {env.titles[root].astext()}", "", f"> {described[root]}"]
    for section in env.toctree_includes[root]:
        lines += ["", f"## {env.titles[section].astext()}", ""]
        for page in _pages_below(env, section):
            lines.append(f"- [{env.titles[page].astext()}]({page}{suffix}): {described[page]}")
    return "\n".join([*lines, ""])


def _pages_below(env: BuildEnvironment, page: str) -> Iterator[str]:
    """Yield a page, and every page that its toctree names, at any depth."""
    yield page
    for each in env.toctree_includes.get(page, ()):
        yield from _pages_below(env, each)


def _first_paragraph(env: BuildEnvironment, page: str) -> str:
    return next((_one_line(node) for node in env.get_doctree(page).findall(nodes.paragraph)), "")


def _one_line(node: nodes.Element) -> str:
    return " ".join(node.astext().split())


def _write(app: Sphinx, error: Exception | None) -> None:
    if error is None and app.builder.format == "html":
        suffix = app.builder.get_target_uri("index").removeprefix("index")
        text = render(app.env, app.page_descriptions, suffix)  # type: ignore[attr-defined]
        (app.outdir / "llms.txt").write_text(text, encoding="utf-8")


def _describe(app: Sphinx, env: BuildEnvironment) -> None:
    app.page_descriptions = describe_pages(env)  # type: ignore[attr-defined]


def _add_to_head(app: Sphinx, page: str, _template: str, context: dict[str, Any], _doctree: object) -> None:
    if text := app.page_descriptions.get(page):  # type: ignore[attr-defined]
        context["metatags"] = f'{context.get("metatags", "")}<meta name="description" content="{html.escape(text)}">\n'


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("env-check-consistency", _describe)
    app.connect("html-page-context", _add_to_head)
    app.connect("build-finished", _write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
