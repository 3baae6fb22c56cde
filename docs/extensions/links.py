"""Links that work both on a code host and on the site.

Pages of docs/ link to files of the repository (`../../SECURITY.md`), and files at its root link into docs/. A file at
the root with a page on the site is listed in `ROOT_PAGES`. A link to any other file becomes a download of it; a link
to a directory, of which the site has none, becomes its text.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[2]
ROOT_PAGES = {
    "CHANGELOG.md": "docs/project/changelog.md",
    "CODE_OF_CONDUCT.md": "docs/project/code-of-conduct.md",
    "CONTRIBUTING.md": "docs/project/contributing.md",
    "README.md": "docs/index.md",
    "RELEASING.md": "docs/project/releasing.md",
    "SECURITY.md": "docs/project/security.md",
}
_LINK = re.compile(r"\]\((?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?\)")
_WHOLE_LINK = re.compile(r"\[([^\[\]]*)\]\((?![a-z]+:|#)([^)#\s]+)\)")


def relink(text: str, written_in: Path, page: Path) -> str:
    """Rewrite relative links of a file so that they hold on the page that shows it; both paths start at the root."""

    def rewrite(match: re.Match[str]) -> str:
        target = os.path.normpath(written_in.parent / match[1])
        shown = ROOT_PAGES.get(target, target)
        return f"]({os.path.relpath(shown, page.parent)}{match[2] or ''})"

    def drop_directory(match: re.Match[str]) -> str:
        return match[1] if (ROOT / written_in.parent / match[2]).is_dir() else match[0]

    return _LINK.sub(rewrite, _WHOLE_LINK.sub(drop_directory, text))


def _relink_page(app: Sphinx, docname: str, source: list[str]) -> None:
    page = app.env.doc2path(docname).relative_to(ROOT)
    source[0] = relink(source[0], page, page)


def _relink_included(app: Sphinx, path: Path, _parent: str, source: list[str]) -> None:
    # the event names the parent by the stem of its file only, which several sections share
    page = app.env.doc2path(app.env.docname).relative_to(ROOT)
    source[0] = relink(source[0], (app.srcdir / path).resolve().relative_to(ROOT), page)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", _relink_page)
    app.connect("include-read", _relink_included)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
