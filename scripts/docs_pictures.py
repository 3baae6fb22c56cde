"""Make the pictures of the docs and the README from real runs: a report, in light and dark.

python scripts/docs_pictures.py                  # runs the demo, about a minute
python scripts/docs_pictures.py --report FILE    # takes the report of a demo that has run
python scripts/docs_pictures.py --report FILE --name three-runs --charts 4    # docs/train/three-runs.md

Needs playwright, Pillow and a Chromium (`chromium` or `google-chrome` on the path, or --chromium). The tables of the
report, its version and its date are left out: the summary and the first curves fit one screen, and stay true.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from io import BytesIO
from pathlib import Path
from typing import Any

STATIC = Path(__file__).resolve().parents[1] / "docs" / "_static"
WIDTH, MAX_BYTES = 1080, 150_000
LEFT_OUT = "#summary table, #summary h3, #health, [href='#health'], header button, header p { display: none }"
CLIP = """count => {
    const charts = [...document.querySelectorAll("#curves figure")].slice(0, count);
    return Math.max(...charts.map(each => each.getBoundingClientRect().bottom)) + 16;
}"""


def run_demo(directory: Path) -> Path:
    """Run the demo, and return its report."""
    subprocess.run([sys.executable, "-m", "thresher", "demo", "--output", str(directory / "demo")], check=True)
    return directory / "demo" / "report.html"


def picture(browser: Any, report: Path, theme: str, num_charts: int) -> bytes:
    """Photograph the top of a report in a theme."""
    page = browser.new_page(viewport={"width": WIDTH, "height": 700}, color_scheme=theme, device_scale_factor=1.4)
    page.goto(report.as_uri())
    page.wait_for_function("document.documentElement.dataset.drawn", timeout=60_000)
    page.add_style_tag(content=LEFT_OUT)
    height = page.evaluate(CLIP, num_charts)
    shot = page.screenshot(full_page=True, clip={"x": 0, "y": 0, "width": WIDTH, "height": height})
    page.close()
    return shot


def compress(shot: bytes) -> bytes:
    """Write a PNG with a palette, which charts and text do not need more than."""
    from PIL import Image

    buffer = BytesIO()
    Image.open(BytesIO(shot)).convert("RGB").quantize(colors=128, dither=Image.Dither.NONE).save(
        buffer, "PNG", optimize=True
    )
    if buffer.tell() > MAX_BYTES:
        raise SystemExit(f"the picture has {buffer.tell():,} bytes, more than {MAX_BYTES:,}")
    return buffer.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", type=Path, help="an HTML report; without it, the demo runs")
    parser.add_argument(
        "--name", default="report", help="the pictures are docs/_static/NAME-light.png and NAME-dark.png"
    )
    parser.add_argument("--charts", type=int, default=2, help="charts to show below the summary")
    parser.add_argument("--chromium", help="program to start", default=None)
    args = parser.parse_args()
    chromium = args.chromium or shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        parser.error("there is no Chromium; give its path with --chromium")
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as directory, sync_playwright() as started:
        report = (args.report or run_demo(Path(directory))).resolve()
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for theme in ("light", "dark"):
            path = STATIC / f"{args.name}-{theme}.png"
            path.write_bytes(compress(picture(browser, report, theme, args.charts)))
            print(f"{path.relative_to(STATIC.parents[1])}: {path.stat().st_size:,} bytes")
        browser.close()


if __name__ == "__main__":
    main()
