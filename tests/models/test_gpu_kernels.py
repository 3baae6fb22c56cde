"""Kernels for GPUs that this machine does not have: FlexAttention compiled, and the arguments of other packages'."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.bound_kernels import KERNELS, OWN_NAMES, RECORDED
from tests.support.compile_for_gpu import GPUS
from tests.support.stateful_models import STATEFUL
from tests.support.tiny_models import MIXED
from thresher.data.store.cache import user_cache_dir
from thresher.models import branching_state
from thresher.models.layouts import PackedLayout
from thresher.models.logps import PairModel
from thresher.plan.simulate.fake_cuda import compile_guard

# names of parameters that transformers' functions and the packages' give differently
SHORT = {"query": "q", "key": "k", "value": "v", "hidden_states": "x"}


@pytest.mark.hand  # a minute or more per GPU; CI runs the traced graphs (test_flex_attention.py)
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton: pip install triton==3.9.0")
@pytest.mark.parametrize("capability", GPUS)
def test_attention_compiles_for_a_gpu_forward_and_backward(capability):
    """In bf16 with heads of 64, 128 and 256, also with a soft cap, and forward in fp32; 8 query heads share keys.

    Every kernel fits into the shared memory of the GPU.
    """
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
    assert len(attention) == 10
    assert sum("backward" in name for name in attention) == 4
    for kernel in kernels:
        assert kernel["ptx_target"].startswith(f"sm_{capability}"), kernel
        assert kernel["cubin_bytes"] > 0, kernel
        assert kernel["shared_memory"] <= GPUS[capability][0], kernel


def parameters_of(package: str, module: str, name: str, recorded: str) -> list[str]:
    """Of the installed package, otherwise as recorded."""
    if importlib.util.find_spec(package) is None:
        return recorded.split()
    return list(inspect.signature(getattr(importlib.import_module(module), name)).parameters)


@pytest.mark.parametrize(("kernel", "recorded"), RECORDED.items(), ids=lambda each: each[0] if len(each) == 4 else "")
def test_a_kernel_of_another_package_takes_what_layers_with_state_pass(kernel, recorded, monkeypatch):
    """transformers drops the arguments whose names a kernel does not know: a lost state would be no error."""
    package, _, module, own_name = kernel
    parameters = parameters_of(package, module, own_name, recorded)
    name = next(name for name, each in OWN_NAMES.items() if each == own_name)
    family = next(family for family, *of in KERNELS if of == [package, name])
    model = AutoModelForCausalLM.from_config(copy.deepcopy(STATEFUL[family]))
    functions = vars(sys.modules[type(model).__module__])
    compute, calls = inspect.unwrap(functions[name]), []

    def recording(*args, **rest):
        calls.append((args, rest))
        return compute(*args, **rest)

    branched = branching_state._on_segments(recording, branching_state._BRANCHED[name])
    monkeypatch.setitem(functions, name, branched)
    layout = PackedLayout(shares_prompt=True)
    PairModel.for_layout(model, torch.float32, layout).score(layout.collate(MIXED))
    ours = list(inspect.signature(compute).parameters)
    assert calls
    for args, rest in calls:
        # by position: queries, keys and values, or x, dt, A, B and C
        assert [SHORT.get(each, each) for each in ours[: len(args)]] == parameters[: len(args)]
        assert rest.keys() - {"use_cache"} <= set(parameters)  # use_cache is the model's
