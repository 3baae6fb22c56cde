"""Draw bar charts as SVG that follow light and dark.

python benchmarks/chart.py RESULTS.json docs/internals/vs_trl.svg           # results of benchmarks/vs_trl.py
python benchmarks/chart.py --summary docs/internals/speed_and_memory.svg    # the summary, for README and docs
The summary reads its figures from the tables of docs/internals/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
from figure import Figure

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "internals" / "benchmarks.md"
# names as in vs_trl.py, which needs torch and TRL; a chart does not
BASE = "TRL default (checkpointing)"
STRONGEST = "TRL, no checkpointing, reference precomputed, GPU head forced"
WIDTH = 480  # readable on a phone

SPEED = "Speed, as a multiple of TRL's fastest configuration"
MODELS = {
    "### h384 L6 V8k fp32, HH": "hidden 384, vocabulary 8k, fp32",
    "### h512 L8 V8k bf16, HH": "hidden 512, vocabulary 8k, bf16",
    "### h512 L8 V32k bf16, HH": "hidden 512, vocabulary 32k, bf16",
}
MEMORY = "Activation memory of a step, relative to TRL's default"
MODES = {
    BASE: "TRL, default (gradient checkpointing)",
    "TRL, no checkpointing": "TRL, no gradient checkpointing",
    "thresher": "thresher",
    "thresher, checkpointing": "thresher, gradient checkpointing",
}
NOTES = (
    "Llama with random weights, 8 pairs of HH-RLHF per step, TRL 1.16,",
    "one CPU thread. Not measured on a GPU. Memory: hidden 384.",
)


@dataclass(frozen=True)
class Bar:
    """A bar with its label and its value in text; quartiles are drawn on it."""

    label: str
    value: float
    text: str
    quartiles: tuple[float, float] | None = None


def tint(label: str) -> str:
    return "red" if label.startswith("TRL") else "line" if label.startswith("bare") else "green"


def draw(title: str, groups: Mapping[str, Sequence[Bar]], notes: Sequence[str] = ()) -> str:
    """Draw groups of bars, each bar below its label, so that long labels fit a phone."""
    rows = sum(len(bars) for bars in groups.values())
    height = 46 * len(groups) + 38 * rows + 17 * len(notes) + 8
    texts = [f"{name}: {', '.join(f'{bar.label} {bar.text}' for bar in bars)}." for name, bars in groups.items()]
    fig = Figure(WIDTH, height, title, " ".join([*texts, *notes]))
    y = 10.0
    for name, bars in groups.items():
        fig.text(10, y + 14, name, "bold")
        y += 30
        scale = (WIDTH - 80) / max(max(bar.value, *(bar.quartiles or (0.0,))) for bar in bars)
        for bar in bars:
            fig.text(10, y + 10, bar.label, "small" if bar.label != "thresher" else "small bold")
            fig.box(10, y + 15, max(bar.value * scale, 1), 14, f"{tint(bar.label)}-solid", radius=2)
            end = bar.value
            if bar.quartiles is not None:
                low, end = bar.quartiles
                fig.line(10 + low * scale, y + 22, 10 + end * scale, y + 22)
            fig.text(18 + end * scale, y + 27, bar.text, "small bold")
            y += 38
        y += 16
    for note in notes:
        fig.text(10, y, note, "small muted")
        y += 17
    return fig.svg()


def chart(results: Mapping) -> str:
    """For every model, the speed of each contestant as a multiple of TRL's default, with quartiles."""
    groups: dict[str, list[Bar]] = {}
    for title, result in results.items():
        seconds = {name: np.array(own) for name, own in result["seconds"].items()}
        for name, own in seconds.items():
            low, middle, high = np.percentile(seconds[BASE] / own, [25, 50, 75])
            groups.setdefault(title, []).append(Bar(name, middle, f"{middle:.2f}x", (low, high)))
    return draw("Speed as a multiple of TRL's default", groups)


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
    """Draw the speed for three models, and the memory for one."""
    speeds = {label: read_column(page, heading, "x strongest TRL")["thresher"] for heading, label in MODELS.items()}
    memory = read_column(page, "h384 L6 V8k fp32:", "of TRL default")
    groups = {
        SPEED: [
            Bar("TRL, fastest configuration", 1.0, "1.00x"),
            *(Bar(f"thresher: {label}", value, f"{value:.2f}x") for label, value in speeds.items()),
        ],
        MEMORY: [Bar(label, memory[name], f"{memory[name]:.2f}") for name, label in MODES.items()],
    }
    return draw("Speed and activation memory of thresher and TRL on the same pairs", groups, NOTES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--summary", action="store_true", help="draw the summary; needs only OUTPUT")
    parser.add_argument("results", type=Path, nargs="?", help="file written by vs_trl.py --results")
    parser.add_argument("output", type=Path, help="SVG file to write")
    args = parser.parse_args()
    if args.summary == (args.results is not None):
        parser.error("give either --summary OUTPUT or RESULTS OUTPUT")
    args.output.write_text(summary(PAGE.read_text()) if args.summary else chart(json.loads(args.results.read_text())))


if __name__ == "__main__":
    main()
