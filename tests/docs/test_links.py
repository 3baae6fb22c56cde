"""Links between the files of the repository lead somewhere, as a code host shows them."""

from __future__ import annotations

import itertools
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parents[2]


def tracked(*patterns: str) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z", "--", *patterns], cwd=ROOT, capture_output=True, text=True)  # noqa: S607
    if listed.returncode:
        pytest.skip("no git checkout, so no list of its files")
    # a file may be deleted or moved and not yet committed
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def flat(tokens: list[Token]) -> Iterator[Token]:
    for token in tokens:
        yield token
        yield from flat(token.children or [])


def parse(path: Path) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(path.read_text(encoding="utf-8"))


def anchors(path: Path) -> set[str]:
    """Name headings as code hosts do (lower case, spaces as dashes, repeats numbered), and list each `<a id>`."""
    tokens = parse(path)
    named = set(re.findall(r'<a id="([^"]+)"></a>', path.read_text(encoding="utf-8")))
    counts: dict[str, int] = {}
    for opening, inline in itertools.pairwise(tokens):
        if opening.type == "heading_open":
            text = "".join(token.content for token in inline.children or [] if token.type in ("text", "code_inline"))
            slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
            counts[slug] = counts.get(slug, 0) + 1
    return named | {slug if n == 0 else f"{slug}-{n}" for slug, count in counts.items() for n in range(count)}


def test_every_relative_link_and_anchor_resolves() -> None:
    pages = tracked("*.md")
    assert {page.name for page in pages} >= {"README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"}
    broken = []
    for page in pages:
        for token in flat(parse(page)):
            link = str(token.attrGet("href") or token.attrGet("src") or "")
            if not link or re.match(r"[a-z]+:", link):
                continue
            name, _, fragment = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            if not target.exists() or (fragment and fragment not in anchors(target)):
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert broken == []


def test_every_page_that_a_file_names_exists() -> None:
    """Messages, docstrings and scripts name pages by their path from the root."""
    broken = []
    for path in tracked("*.md", "*.py", "*.yaml", "*.toml", "scripts", ".ci"):
        if path.parent.name == "recipes":  # name files of the repositories that they are from
            continue
        names = re.findall(r"(?<![\w./-])docs/[\w/-]+\.(?:md|svg)", path.read_text(encoding="utf-8"))
        broken += [f"{path.relative_to(ROOT)}: {name}" for name in names if not (ROOT / name).is_file()]
    assert broken == []
