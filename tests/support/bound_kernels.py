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
# parameters of the packages' functions in the versions that were read, for machines without a GPU's packages
RECORDED = {
    ("fla", "0.5.2", "fla.ops.gated_delta_rule", "chunk_gated_delta_rule"): (
        "q k v g beta scale initial_state output_final_state use_qk_l2norm_in_kernel use_beta_sigmoid_in_kernel "
        "allow_neg_eigval state_v_first cu_seqlens cu_seqlens_cpu chunk_indices cp_context kwargs"
    ),
    ("mamba_ssm", "2.3.2", "mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined"): (
        "x dt A B C chunk_size D z dt_bias initial_states seq_idx cu_seqlens dt_softplus dt_limit return_final_states "
        "return_varlen_states state_dtype"
    ),
    ("causal_conv1d", "1.6.1", "causal_conv1d", "causal_conv1d_fn"): (
        "x weight bias seq_idx initial_states return_final_states final_states_out activation"
    ),
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
