"""A stand-in for the packages whose kernels transformers binds to the functions of layers with state."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from transformers import PreTrainedConfig
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

# the packages' names of the functions, by transformers' in its modeling files
OWN_NAMES = {
    "torch_chunk_gated_delta_rule": "chunk_gated_delta_rule",
    "mamba2_chunk_scan": "mamba_chunk_scan_combined",
    "mamba2_split_conv1d_scan_combined": "mamba_split_conv1d_scan_combined",
    "causal_conv1d_fn": "causal_conv1d_fn",
}
# a family of tests/support/stateful_models.py, a package, and the function that it replaces
KERNELS = [
    ("qwen3_5_text", "fla", "torch_chunk_gated_delta_rule"),
    ("nemotron_h", "mamba_ssm", "mamba2_chunk_scan"),
    ("nemotron_h", "mamba_ssm", "mamba2_split_conv1d_scan_combined"),
    ("lfm2", "causal_conv1d", "causal_conv1d_fn"),
]

_Function = Callable[..., Any]


def bind_kernel(
    monkeypatch: pytest.MonkeyPatch, config: PreTrainedConfig, package: str, name: str, kernel: _Function | None = None
) -> _Function:
    """Let transformers bind a kernel as if its package were installed; return the function that it makes.

    kernel: what computes; None: it refuses a CPU, as the real ones do.
    """

    def refuse(*_args: Any, **_rest: Any) -> None:
        raise AssertionError("Expected a tensor on a GPU")

    kernel = kernel or refuse
    module = ModuleType(package)
    own_name = OWN_NAMES[name]
    setattr(module, own_name, kernel)
    monkeypatch.setitem(sys.modules, package, module)
    functions = vars(sys.modules[MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__module__])
    bound = use_kernel_func_from_hub_with_fallback(own_name, package)(inspect.unwrap(functions[name]))
    monkeypatch.setitem(functions, name, bound)
    return bound
