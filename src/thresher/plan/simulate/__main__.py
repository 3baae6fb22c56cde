"""Simulate a rank in its own process, because that changes torch.

    python -m thresher.plan.simulate GUARD REQUEST RESULT

GUARD: library of the device guard; empty for a build of torch with CUDA. REQUEST, RESULT: JSON, see request.py.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

from thresher.plan.simulate.fake_cuda import load_guard, pretend_one_gpu
from thresher.plan.simulate.request import RankRequest


def main(guard: str, request_file: str, result_file: str) -> None:
    if guard:
        load_guard(Path(guard))
    request = RankRequest(**json.loads(Path(request_file).read_text(encoding="utf-8")))
    if find_spec("bitsandbytes") is not None:
        import bitsandbytes  # noqa: F401  # PEFT imports it, and it would call functions of a CUDA build

    pretend_one_gpu(request.memory)
    # imports torch, which must find the guard and the device
    from thresher.plan.simulate.rank import run_rank

    Path(result_file).write_text(json.dumps(asdict(run_rank(request))), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
