"""What a run gained against how far it moved from the reference: one path per run, from evaluation to evaluation."""

from __future__ import annotations

import math
from collections.abc import Sequence

from thresher.report.charts import Chart, path_chart
from thresher.report.run_files import RunFiles
from thresher.report.series import Series, rounded

# measured on answers of the policy if a run has them, else the log-ratio on the responses of the data
_DISTANCES = {"samples/kl": ("KL", "KL on answers (nats)"), "eval/kl": ("log-ratio", "log-ratio on the data (nats)")}
_GAINS = (
    ("samples/win_rate", "Win rate", "win rate", True),
    ("samples/reward", "Reward of answers", "reward", False),
    ("eval/rewards/accuracies", "Reward accuracy", "accuracy", True),
    ("eval/rewards/margins", "Reward margin", "margin", False),
)
_CAPTION = (
    "Good: high and near 0. Each point is an evaluation, the large one the last. Of two runs at the same height, "
    "prefer the one nearer to the reference."
)


def frontier_charts(runs: Sequence[RunFiles]) -> list[Chart]:
    """One chart per measure of gain that a run has logged together with its distance."""
    distance = next((each for each in _DISTANCES if any(run.points(each) for run in runs)), None)
    if distance is None:
        return []
    name, label = _DISTANCES[distance]
    charts = []
    for gain, title, unit, is_percent in _GAINS:
        series = [each for run in runs if (each := _path(run, distance, gain)) is not None]
        if series:
            is_beta_dependent = gain == "eval/rewards/margins" and len(runs) > 1
            note = " Margins of runs with different beta are not comparable." if is_beta_dependent else ""
            spec = path_chart(series, x=label, y=unit, color="run", is_percent=is_percent)
            chart_id = f"frontier-{gain.replace('/', '-').replace('_', '-')}"
            charts.append(Chart(chart_id, f"{title} against {name}", _CAPTION + note, spec, series))
    return charts


def _path(run: RunFiles, distance: str, gain: str) -> Series | None:
    distances, gains = dict(run.points(distance)), dict(run.points(gain))
    steps = [
        step for step in distances if step in gains and math.isfinite(distances[step]) and math.isfinite(gains[step])
    ]
    if not steps:
        return None
    columns: dict[str, list[float | None]] = {
        "x": [rounded(distances[step]) for step in steps],
        "y": [rounded(gains[step]) for step in steps],
        "step": [float(step) for step in steps],
        "is_end": [float(step == steps[-1]) for step in steps],
    }
    return Series({"run": run.name}, columns)
