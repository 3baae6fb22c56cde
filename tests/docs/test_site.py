"""The documentation site: builds without a warning, lists every page, and needs no other host."""

from __future__ import annotations

import os
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import config_doc
import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md"))

pytestmark = pytest.mark.slow


class Page(HTMLParser):
    """What a page loads, links to, can be linked at, and how its paragraphs start."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.paragraphs: list[str] = []
        self._in_paragraph = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.ids.add(values.get("id", ""))
        if tag == "p":
            self._in_paragraph = True
            self.paragraphs.append("")
        if tag == "a":
            self.links.append(values.get("href", ""))
        elif tag == "link" and values.get("rel") not in ("next", "prev", "search"):
            self.loaded.append(values.get("href", ""))
        self.loaded += [values[name] for name in ("src", "srcset", "poster", "data") if name in values]

    def handle_endtag(self, tag: str) -> None:
        self._in_paragraph = self._in_paragraph and tag != "p"

    def handle_data(self, data: str) -> None:
        if self._in_paragraph:
            self.paragraphs[-1] += data


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page((site / path).read_text(encoding="utf-8")) for path in PAGES}


def test_every_page_is_reached_from_the_navigation(site: Path, pages: dict[Path, Page]) -> None:
    reached, waiting = set(), [Path("index.html")]
    while waiting:
        path = waiting.pop()
        if path not in reached:
            reached.add(path)
            targets = [Path(os.path.normpath(path.parent / urlsplit(link).path)) for link in pages[path].links if link]
            waiting += [target for target in targets if target in pages]
    assert reached == set(PAGES)


def test_llms_txt_lists_every_page_with_a_description(site: Path) -> None:
    text = (site / "llms.txt").read_text(encoding="utf-8")
    assert re.match(r"# thresher\n\n> \S.*\n\n## ", text)
    listed = re.findall(r"^- \[.+\]\((.+\.html)\): \S", text, re.MULTILINE)
    assert sorted(listed) == sorted(str(path) for path in PAGES if path != Path("index.html"))


def test_no_page_loads_anything_from_another_host(site: Path, pages: dict[Path, Page]) -> None:
    for path, page in pages.items():
        for address in page.loaded:
            assert not urlsplit(address).netloc, f"{path} loads {address}"
    for style in site.rglob("*.css"):
        found = re.findall(r"(?:url\(|@import )['\"]?((?:https?:)?//[^'\")]+)", style.read_text(encoding="utf-8"))
        assert not found, f"{style} loads {found}"


def test_every_local_link_and_anchor_of_the_site_resolves(site: Path, pages: dict[Path, Page]) -> None:
    for path, page in pages.items():
        for link in page.links + page.loaded:
            address = urlsplit(link)
            if address.scheme or address.netloc:
                continue
            target = Path(os.path.normpath(path.parent / unquote(address.path))) if address.path else path
            assert (site / target).is_file(), f"{path} links to {link}"
            if address.fragment and target in pages:
                assert unquote(address.fragment) in pages[target].ids, f"{path} links to {link}"


def test_no_row_of_a_table_is_printed_as_text(pages: dict[Path, Page]) -> None:
    """A blank line ends a table, and Sphinx does not notice the rows after it."""
    broken = {
        str(path): paragraph
        for path, page in pages.items()
        for paragraph in page.paragraphs
        if re.match(r"\s*\|.*\|", paragraph)
    }
    assert broken == {}


def test_every_config_key_has_an_anchor_and_is_found_by_search(site: Path, pages: dict[Path, Page]) -> None:
    anchors = {anchor for chapter in config_doc.chapters() for key in chapter.keys for anchor in key.anchors}
    assert anchors <= pages[Path("reference/config.html")].ids
    index = (site / "searchindex.js").read_text(encoding="utf-8")
    for prefix, name in (("actor_train.training_args", "learning_rate"), ("", "beta"), ("deepspeed", "zero_stage")):
        assert re.search(rf'"{re.escape(prefix)}":\[(?:[^\]]|\][^\]])*?"{name}"', index), name


def test_figures_are_a_part_of_the_page_and_follow_its_theme(site: Path) -> None:
    figures = [path for path in (ROOT / "docs").rglob("*.svg") if path.name != "favicon.svg"]
    assert len(figures) >= 9
    assert [path.name for path in figures if 'fig"' not in path.read_text(encoding="utf-8")[:400]] == []
    assert 'html[data-theme="dark"] .fig' in (site / "_static" / "figures.css").read_text(encoding="utf-8")
    benchmarks = (site / "internals" / "benchmarks.html").read_text(encoding="utf-8")
    assert '<span class="figure"><svg' in benchmarks
    assert not re.search(r"<img[^>]*vs_trl", benchmarks)


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        ("reference/cli.html", ["thresher train", "thresher cache verify", "--sequence-length"]),
        ("reference/losses.html", ["sigmoid", "https://arxiv.org/abs/2305.18290", "<math"]),
        ("reference/recipes.html", ['href="#tulu3-8b"', 'id="tulu3-8b"', "sigmoid_norm(beta=5)", "not run on a GPU"]),
        ("reference/api.html", ['id="thresher.DPOPipeline.run"', 'id="thresher.load_config"']),
        ("reference/api.html", ['href="config.html#actor_train.training_args.learning_rate"', "peft_config"]),
        ("reference/config.html", ["gradient_accumulation_steps"]),
        ("project/contributing.html", ["The oracle"]),
    ],
)
def test_generated_pages_hold_what_the_code_says(site: Path, page: str, expected: list[str]) -> None:
    text = (site / page).read_text(encoding="utf-8")
    plain = re.sub(r"</span>(\s*)<span[^>]*>", r"\1", text)
    assert [each for each in expected if each not in text and each not in plain] == []
