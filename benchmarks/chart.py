"""Bars of benchmarks/vs_trl.py's results: python benchmarks/chart.py RESULTS.json docs/internals/vs_trl.svg"""

from __future__ import annotations

import json
import sys
from html import escape
from pathlib import Path

import numpy as np
from vs_trl import BASE

BAR, GAP, LABEL, WIDTH = 16, 6, 430, 360


def chart(results: dict) -> str:
    """An SVG: for every column, each contestant's speed as a multiple of TRL's default, with quartiles."""
    parts: list[str] = []
    y = 10
    for title, result in results.items():
        seconds = {name: np.array(own) for name, own in result["seconds"].items()}
        ratios = {name: np.percentile(seconds[BASE] / own, [25, 50, 75]) for name, own in seconds.items()}
        scale = WIDTH / max(quartiles[2] for quartiles in ratios.values())
        parts.append(f'<text x="0" y="{y + 12}" font-weight="bold">{escape(title)}</text>')
        y += BAR + GAP
        for name, (low, middle, high) in ratios.items():
            colour = "#c0392b" if name.startswith("TRL") else "#7f8c8d" if name.startswith("bare") else "#1f6f54"
            parts.append(f'<text x="{LABEL - 8}" y="{y + 12}" text-anchor="end">{escape(name)}</text>')
            parts.append(f'<rect x="{LABEL}" y="{y}" width="{middle * scale:.1f}" height="{BAR}" fill="{colour}"/>')
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


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:3])
    target.write_text(chart(json.loads(source.read_text())))
