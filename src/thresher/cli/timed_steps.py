"""Make the first steps of configs in another process and time them, for `thresher plan --calibrate`.

python -m thresher.cli.timed_steps FILE reads configs from a JSON file and writes the seconds of their steps into it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from thresher.config import DPOConfig
from thresher.errors import UserError

_LINES_SHOWN = 5


def time_steps(configs: Sequence[DPOConfig], num_steps: int) -> list[list[float]]:
    """Return the seconds of the first steps of each config, on the workers that it names. Nothing is saved."""
    with tempfile.TemporaryDirectory(prefix="thresher-plan-") as directory:
        file = Path(directory) / "steps.json"
        values = [config.model_dump(mode="json", exclude_unset=True) for config in configs]
        file.write_text(json.dumps({"configs": values, "num_steps": num_steps}))
        command = [sys.executable, "-m", "thresher.cli.timed_steps", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = done.stderr.strip().splitlines()[-_LINES_SHOWN:]
            raise UserError("the steps for --calibrate failed:\n" + "\n".join(lines))
        seconds: list[list[float]] = json.loads(file.read_text())
    return seconds


def _time(values: dict[str, Any], num_steps: int) -> list[float]:
    from thresher.pipeline import DPOPipeline

    with DPOPipeline(DPOConfig(**values)).open() as run:
        return [record["time/step"] for _, record in run.run(num_steps) if isinstance(record, dict)]


def main() -> None:
    file = Path(sys.argv[1])
    given = json.loads(file.read_text())
    try:
        seconds = [_time(values, given["num_steps"]) for values in given["configs"]]
    except UserError as error:
        sys.exit(str(error))
    file.write_text(json.dumps(seconds))


if __name__ == "__main__":
    main()
