"""The site in headless Chromium: it fits, it is quiet, and search finds the right page first."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [pytest.mark.hand, pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")]

# boxes that are wider than what they are in; code blocks and formulas scroll by themselves
TOO_WIDE = """() => [...document.querySelectorAll(".bd-article table")]
    .filter(table => table.getBoundingClientRect().width > table.parentElement.clientWidth + 1)
    .map(table => table.innerText.slice(0, 60))"""
RESULTS = "#search-results ul.search li a"


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_arguments: Any) -> None:
        """Print nothing."""


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(site)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_every_page_fits_and_asks_no_other_host(browser: Any, address: str, site: Path, width: int, theme: str) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=theme)
    messages: list[str] = []
    page.on(
        "console",
        lambda message: message.type in ("error", "warning") and messages.append(f"{page.url}: {message.text}"),
    )
    page.on("pageerror", lambda error: messages.append(f"{page.url}: {error}"))
    page.on("request", lambda request: request.url.startswith(address) or messages.append(request.url))
    wide = {}
    for path in sorted(site.rglob("*.html")):
        name = str(path.relative_to(site))
        if name.startswith(("_", "search")):
            continue
        page.goto(f"{address}/{name}")
        assert page.evaluate("document.documentElement.dataset.theme") == theme
        if tables := page.evaluate(TOO_WIDE):
            wide[name] = tables
        if page.evaluate("document.documentElement.scrollWidth") > width:
            wide[name] = [*wide.get(name, []), "the page itself"]
    page.close()
    assert wide == {}
    assert messages == []


@pytest.mark.parametrize(
    ("query", "first"),
    [
        ("beta", ("train/", "reference/losses", "reference/config")),
        ("learning rate", ("train/", "reference/config")),
        ("out of memory", ("operate/", "scale/")),
        ("multi node", ("scale/",)),
        ("LoRA", ("train/",)),
        ("actor_train.training_args.learning_rate", ("reference/config.html#actor_train.training_args.learning_rate",)),
    ],
)
def test_search_has_the_page_that_a_reader_wants_first(
    browser: Any, address: str, query: str, first: tuple[str, ...]
) -> None:
    page = browser.new_page()
    page.goto(f"{address}/search.html?q={query.replace(' ', '+')}")
    page.wait_for_selector(RESULTS, timeout=30_000)
    page.wait_for_timeout(500)
    found = page.eval_on_selector_all(RESULTS, "links => links.slice(0, 5).map(link => link.getAttribute('href'))")
    page.close()
    assert found[0].startswith(first), found
