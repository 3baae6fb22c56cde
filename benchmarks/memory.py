"""Measure the peak memory of a step over the floor (weights, gradients, optimizer), one process per contestant.

python benchmarks/memory.py                      # both models of docs/internals/benchmarks.md on HH
The peak is the kernel's (VmHWM, reset before the steps), so short-lived buffers count. The floor is the resident memory
before the first step, plus a gradient and two moments per weight.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from resident import kilobytes

os.environ.setdefault("OMP_NUM_THREADS", "1")
# large buffers return to the system when freed: the peak must not include what an allocator kept
os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "1048576")

BASE = "TRL default (checkpointing)"
NO_CHECKPOINTING = "TRL, no checkpointing"
CONTESTANTS = (
    BASE,
    NO_CHECKPOINTING,
    "bare loop, shared",
    "thresher",
    "thresher, micro-batches of 1,024 tokens",
    "thresher, checkpointing",
    "thresher, packed",
)
COLUMNS = ("h384-L6-V8k-fp32", "h512-L8-V32k-bf16")


def peak_over_floor(column_key: str, contestant: str, data: str, num_batches: int) -> float:
    """Return the megabytes over the floor; runs in the child process."""
    import torch
    from contestants import COLUMNS as FORMATS
    from contestants import layouts, thresher_step, thresher_trainer
    from vs_trl import Field

    torch.set_num_threads(1)
    column = FORMATS[column_key]
    field = Field(column, data, num_batches, pairs_per_step=8, max_length=1024)
    if contestant == "thresher, micro-batches of 1,024 tokens":
        shared = layouts()["shared"]
        step = thresher_step(
            thresher_trainer(column, field.store, field.plan, shared, field.reference, max_tokens=1024)
        )
    else:
        step = field.contestants()[contestant]()
    num_weights = sum(p.numel() for p in column.model().parameters())
    floor = kilobytes("VmRSS") * 1024 + 3 * 4 * num_weights
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    for batch in range(num_batches):
        step(batch)
    return (kilobytes("VmHWM") * 1024 - floor) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--columns", nargs="+", default=list(COLUMNS))
    parser.add_argument("--data", default="hh")
    parser.add_argument("--batches", type=int, default=3)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(peak_over_floor(args.columns[0], args.child, args.data, args.batches)))
        return
    for column in args.columns:
        found = {name: _in_a_child(column, name, args.data, args.batches) for name in CONTESTANTS}
        print(f"\n{column}, {args.data}, peak over {args.batches} steps of 8 pairs\n")
        print("| mode | MB over the floor | of TRL default | of TRL without checkpointing |\n|---|---|---|---|")
        for name, megabytes in found.items():
            shares = [megabytes / found[other] for other in (BASE, NO_CHECKPOINTING)]
            print(f"| {name} | {megabytes:,.0f} | {shares[0]:.2f} | {shares[1]:.2f} |", flush=True)


def _in_a_child(column: str, name: str, data: str, batches: int) -> float:
    command = [sys.executable, __file__, "--columns", column, "--child", name, "--data", data, "--batches"]
    run = subprocess.run([*command, str(batches)], check=True, stdout=subprocess.PIPE, text=True)
    return float(json.loads(run.stdout.splitlines()[-1]))


if __name__ == "__main__":
    main()
