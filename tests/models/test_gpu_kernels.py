"""Kernels of FlexAttention, compiled for GPUs that this machine does not have."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.compile_for_gpu import GPUS
from thresher.data.store.cache import user_cache_dir
from thresher.plan.simulate.fake_cuda import compile_guard


@pytest.mark.hand  # a minute or more per GPU; CI runs the traced graphs (test_flex_attention.py)
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton: pip install triton==3.9.0")
@pytest.mark.parametrize("capability", GPUS)
def test_attention_compiles_for_a_gpu_forward_and_backward(capability):
    """In bf16, also with a soft cap, and forward in fp32; every kernel fits into the shared memory of the GPU."""
    guard = "" if torch.version.cuda else str(compile_guard(user_cache_dir() / "simulate"))
    program = [sys.executable, "-W", "ignore", "-m", "tests.support.compile_for_gpu", str(capability), guard]
    ended = subprocess.run(
        program,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    kernels = json.loads(ended.stdout.splitlines()[-1])
    attention = [kernel["name"] for kernel in kernels if kernel["name"].startswith("triton_tem")]
    assert len(attention) == 5
    assert sum("backward" in name for name in attention) == 2
    for kernel in kernels:
        assert kernel["ptx_target"].startswith(f"sm_{capability}"), kernel
        assert kernel["cubin_bytes"] > 0, kernel
        assert kernel["shared_memory"] <= GPUS[capability][0], kernel
