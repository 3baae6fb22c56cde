"""Accept a machine with GPUs: short tests of what no CPU can show, and one JSON report.

scripts/gpu_acceptance [--device cuda|cpu] [--output FILE] [--parts NAME ...]

Each part is ok, failed or skipped. The exit code is 1 if a part failed. docs/scale/gpu-check.md explains the parts.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from benchmarks.acceptance import families, kernels, runs
from benchmarks.acceptance.report import Part, Place, run_parts, write_report

PARTS: dict[str, Part] = {
    "environment": kernels.environment,
    "attention": kernels.attention,
    "attention_heads": kernels.attention_heads,
    "lm_head": kernels.lm_head,
    "families": families.families,
    "compiled": families.compiled,
    "host_reads": kernels.host_reads,
    "speed": kernels.speed,
    "collectives": runs.collectives,
    "parity": runs.parity,
    "failure": runs.failure,
    "stall": runs.stall,
    "ray": runs.ray,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], help="default: cuda if torch finds a GPU")
    parser.add_argument("--output", type=Path, default=Path("gpu_acceptance.json"))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    chosen = parser.parse_args()
    disable_progress_bar()
    if chosen.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks for GPUs
    chosen.device = chosen.device or ("cuda" if torch.cuda.is_available() else "cpu")
    num_devices = 2 if chosen.device == "cpu" else torch.cuda.device_count()
    with tempfile.TemporaryDirectory() as directory:
        place = Place(chosen.device, num_devices, Path(directory))
        outcomes = run_parts({name: PARTS[name] for name in chosen.parts}, place)
        write_report(chosen.output, place, outcomes)
    failed = [name for name, outcome in outcomes.items() if outcome["status"] == "failed"]
    print(f"report: {chosen.output}{'; failed: ' + ', '.join(failed) if failed else ''}")
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
