"""The page in headless Chromium: charts are drawn, nothing is requested, and axe finds no violation."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from thresher.report.page import render_page
from thresher.report.run_files import read_runs

pytest.importorskip("vl_convert", reason="the extra report is not installed")
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [pytest.mark.hand, pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")]

RULES = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module", params=[1, 2], ids=["one run", "two runs"])
def report_file(request: pytest.FixtureRequest, run_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report on one run, or on two."""
    copy = tmp_path_factory.mktemp("page") / "copy"
    shutil.copytree(run_dir, copy)
    file = copy.parent / "report.html"
    runs = read_runs([run_dir, copy][: request.param])
    file.write_text(render_page(runs, datetime(2026, 11, 16)), encoding="utf-8")
    return file


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_works_offline_at_any_width_and_theme(browser: Any, report_file: Path, width: int, theme: str) -> None:
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme)
    page = context.new_page()
    messages: list[str] = []
    requests: list[str] = []
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(report_file.as_uri())
    page.wait_for_function("document.documentElement.dataset.drawn", timeout=60_000)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.evaluate("document.querySelector('nav').scrollWidth <= document.querySelector('nav').clientWidth")
    assert page.locator(".chart").count() == page.locator(".chart svg").count() > 10
    violations = axe.Axe().run(page, options=RULES).response["violations"]
    assert [(each["id"], each["nodes"][0]["html"]) for each in violations] == []

    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.click("#theme")
    other = {"light": "dark", "dark": "light"}[theme]
    page.wait_for_function(f"document.documentElement.dataset.drawn === '{other}'", timeout=60_000)
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
    assert messages == []
    assert requests == [report_file.as_uri()]
    context.close()
