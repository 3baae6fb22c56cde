"""Draw bar charts as SVG.

python benchmarks/chart.py RESULTS.json docs/internals/vs_trl.svg           # results of benchmarks/vs_trl.py
python benchmarks/chart.py --summary docs/internals/speed_and_memory.svg    # the figure of the README
The summary reads its figures from the tables of docs/internals/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from html import escape
from pathlib import Path

import numpy as np

PAGE = Path(__file__).resolve().parents[1] / "docs" / "internals" / "benchmarks.md"
# names as in vs_trl.py, which needs torch and TRL; a chart does not
BASE = "TRL default (checkpointing)"
STRONGEST = "TRL, no checkpointing, reference precomputed, GPU head forced"
BAR, GAP, LABEL, WIDTH = 16, 6, 430, 360
RED, GREY, GREEN = "#c0392b", "#7f8c8d", "#1f6f54"

# title, heading above the table in PAGE, column, unit, row in the table to label in the figure
SUMMARY = (
    (
        "Speed, as a multiple of TRL's default (higher is better)",
        "### h384 L6 V8k fp32, HH",
        "x TRL default",
        "x",
        {
            BASE: "TRL, default",
            STRONGEST: "TRL, fastest configuration",
            "thresher, checkpointing": "thresher, gradient checkpointing",
            "thresher": "thresher",
        },
    ),
    (
        "Peak memory of a step, relative to TRL's default (lower is better)",
        "h384 L6 V8k fp32:",
        "of TRL default",
        "",
        {
            BASE: "TRL, default",
            "TRL, no checkpointing": "TRL, no gradient checkpointing",
            "thresher, checkpointing": "thresher, gradient checkpointing",
            "thresher": "thresher",
        },
    ),
)
NOTES = (
    "Llama with random weights (hidden 384, 6 layers, fp32), 8 pairs of HH-RLHF per step, one CPU thread, TRL 1.16.",
    "Memory is what a step needs beyond weights, gradients and optimizer state.",
)


def colour(name: str) -> str:
    return RED if name.startswith("TRL") else GREY if name.startswith("bare") else GREEN


def chart(results: Mapping) -> str:
    """For every model, the speed of each contestant as a multiple of TRL's default, with quartiles."""
    parts: list[str] = []
    y = 10
    for title, result in results.items():
        seconds = {name: np.array(own) for name, own in result["seconds"].items()}
        ratios = {name: np.percentile(seconds[BASE] / own, [25, 50, 75]) for name, own in seconds.items()}
        scale = WIDTH / max(quartiles[2] for quartiles in ratios.values())
        parts.append(f'<text x="0" y="{y + 12}" font-weight="bold">{escape(title)}</text>')
        y += BAR + GAP
        for name, (low, middle, high) in ratios.items():
            parts.append(f'<text x="{LABEL - 8}" y="{y + 12}" text-anchor="end">{escape(name)}</text>')
            parts.append(
                f'<rect x="{LABEL}" y="{y}" width="{middle * scale:.1f}" height="{BAR}" fill="{colour(name)}"/>'
            )
            parts.append(
                f'<line x1="{LABEL + low * scale:.1f}" x2="{LABEL + high * scale:.1f}" y1="{y + BAR / 2}" '
                f'y2="{y + BAR / 2}" stroke="black"/>'
            )
            parts.append(f'<text x="{LABEL + high * scale + 6:.1f}" y="{y + 12}">{middle:.2f}x</text>')
            y += BAR + GAP
        y += 2 * GAP
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LABEL + WIDTH + 70}" height="{y}" '
        'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
    )
    return "\n".join([head, *parts, "</svg>\n"])


def read_column(page: str, heading: str, column: str) -> dict[str, float]:
    """Read the first table below a heading: the first number of a column, by the name in the first column."""
    _, found, rest = page.partition(f"\n{heading}")
    lines = [line for line in rest.splitlines() if line]
    start = next((i for i, line in enumerate(lines) if line.startswith("|")), None)
    if not found or start is None:
        raise SystemExit(f"{PAGE} has no table below {heading!r}")
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip().strip("*") for cell in line.strip("|").split("|")])
    at = rows[0].index(column)
    return {row[0]: float(row[at].split()[0].replace(",", "")) for row in rows[2:]}


def summary(page: str) -> str:
    """Two groups of bars on a white card, readable on light and dark pages."""
    left, room, bar, width = 265, 375, 22, 720
    parts: list[str] = []
    texts: list[str] = []
    y = 20
    for title, heading, column, unit, rows in SUMMARY:
        values = read_column(page, heading, column)
        scale = room / max(values[name] for name in rows)
        parts.append(f'<text x="20" y="{y + 14}" font-weight="bold">{escape(title)}</text>')
        texts.append(
            f"{title}: " + ", ".join(f"{label} {values[name]:.2f}{unit}" for name, label in rows.items()) + "."
        )
        y += 28
        for name, label in rows.items():
            length = values[name] * scale
            weight = ' font-weight="bold"' if name == "thresher" else ""
            parts.append(f'<text x="{left - 10}" y="{y + 16}" text-anchor="end"{weight}>{escape(label)}</text>')
            parts.append(f'<rect x="{left}" y="{y}" width="{length:.1f}" height="{bar}" rx="2" fill="{colour(name)}"/>')
            parts.append(
                f'<text x="{left + length + 8:.1f}" y="{y + 16}"{weight}>{values[name]:.2f}{escape(unit)}</text>'
            )
            y += bar + 6
        y += 14
    for note in NOTES:
        parts.append(f'<text x="20" y="{y + 6}" font-size="11" fill="#57606a">{escape(note)}</text>')
        y += 16
    height = y + 8
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'role="img" aria-labelledby="title desc" font-family="system-ui, sans-serif" font-size="14" fill="#1f2328">',
        '<title id="title">Speed and peak memory of thresher and TRL on the same pairs</title>',
        f'<desc id="desc">{escape(" ".join([*texts, *NOTES]))}</desc>',
        f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8" fill="#ffffff" stroke="#d0d7de"/>',
    ]
    return "\n".join([*head, *parts, "</svg>\n"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--summary", action="store_true", help="draw the figure of the README; needs only OUTPUT")
    parser.add_argument("results", type=Path, nargs="?", help="file written by vs_trl.py --results")
    parser.add_argument("output", type=Path, help="SVG file to write")
    args = parser.parse_args()
    if args.summary == (args.results is not None):
        parser.error("give either --summary OUTPUT or RESULTS OUTPUT")
    args.output.write_text(summary(PAGE.read_text()) if args.summary else chart(json.loads(args.results.read_text())))


if __name__ == "__main__":
    main()
