"""Logps and gradients of Megatron-Core models equal those of transformers models in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.support.engines import megatron_models
from tests.support.engines.parity import PAIRS, save_model
from tests.support.tiny_models import MIXED, batch_of
from thresher.engines.megatron.declaration import MegatronSizes
from thresher.errors import UserError
from thresher.models.forward_check import TOLERANCES

pytest.importorskip("megatron.core", reason="megatron-core is not installed; install thresher[megatron]")
pytestmark = [pytest.mark.distributed, pytest.mark.slow]
ENGINE = "megatron"

LAYOUTS = ("shared", "packed", "padded")
DENSE = ("llama", "qwen2", "qwen3")
SEQUENCE_PARALLEL = MegatronSizes(tp=2, sequence_parallel=True)
DENSE_SIZES = (
    MegatronSizes(),
    MegatronSizes(tp=2),
    SEQUENCE_PARALLEL,
    MegatronSizes(pp=2),
    MegatronSizes(pp=2, virtual_pp=2),
)
MOE_SIZES = (MegatronSizes(), MegatronSizes(ep=2), SEQUENCE_PARALLEL, MegatronSizes(tp=2, ep=2, sequence_parallel=True))
BATCHES = (batch_of(*PAIRS[:3]), batch_of(*PAIRS[3:8]))


def name_of(sizes: MegatronSizes) -> str:
    axes = [f"{name}{size}" for name in ("tp", "pp", "cp", "ep") if (size := getattr(sizes, name)) > 1]
    axes += ["virtual"] * (sizes.virtual_pp > 1) + ["sequence_parallel"] * sizes.sequence_parallel
    return "-".join(axes) or "one_shard"


def case_id(value: object) -> str:
    if isinstance(value, MegatronSizes):
        return name_of(value)
    return "-".join(map(str, value.values())) if isinstance(value, dict) else str(value)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Callable[..., Path]:
    @cache
    def save(family: str, **changes: object) -> Path:
        return save_model(tmp_path_factory.mktemp(family), family, seed=0, **changes)

    return save


@pytest.mark.parametrize("family", DENSE)
@pytest.mark.parametrize("sizes", DENSE_SIZES, ids=name_of)
def test_dense_logps_equal_native(sizes, family, two_ranks, model_dir):
    check_logps(two_ranks, model_dir(family), sizes)


@pytest.mark.parametrize("normalizes", [True, False], ids=["normalized", "not_normalized"])
@pytest.mark.parametrize("sizes", MOE_SIZES, ids=name_of)
def test_moe_logps_equal_native(sizes, normalizes, two_ranks, model_dir):
    check_logps(two_ranks, model_dir("qwen3_moe", norm_topk_prob=normalizes), sizes)


def test_mistral_logps_equal_native(two_ranks, model_dir):
    check_logps(two_ranks, model_dir("mistral", sliding_window=None), MegatronSizes(tp=2))


def test_context_parallel_logps_equal_native(two_ranks, model_dir):
    check_logps(two_ranks, model_dir("llama"), MegatronSizes(cp=2), ["shared", "packed"])


@pytest.mark.parametrize("vocab_size", [97, 99])
def test_vocabulary_padding_is_not_in_the_softmax(vocab_size, two_ranks, model_dir):
    check_logps(two_ranks, model_dir("qwen2", vocab_size=vocab_size), MegatronSizes(tp=2), ["shared"])


def test_more_tensor_parallel_ranks_than_key_value_heads(four_ranks, model_dir):
    check_logps(four_ranks, model_dir("qwen3"), MegatronSizes(tp=4))


def test_tensor_and_pipeline_parallel(four_ranks, model_dir):
    check_logps(four_ranks, model_dir("qwen2"), MegatronSizes(tp=2, pp=2, sequence_parallel=True))


@pytest.mark.parametrize("residual", ["low", "fp32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_low_precision_logps_are_near_those_of_fp32(family, dtype, residual, two_ranks, model_dir):
    path, options = model_dir(family), {"additional_configs": {"fp32_residual_connection": residual == "fp32"}}
    expected = megatron_models.native_logps(path, "shared", MIXED)
    for (values,) in two_ranks.run(megatron_models.score, path, SEQUENCE_PARALLEL, ["shared"], MIXED, dtype, options):
        assert values.dtype == torch.float32
        assert 0 < (values - expected).abs().mean() < TOLERANCES[dtype]


ROPES = {
    "linear": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
        "rope_theta": 1e4,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4},
}


@pytest.mark.parametrize("rope", ROPES)
def test_scaled_positions_equal_native(rope, two_ranks, tmp_path):
    path = save_model(tmp_path, "llama", seed=0, rope_parameters=ROPES[rope])
    check_logps(two_ranks, path, MegatronSizes(tp=2), ["shared"])


FULL = {"recompute_granularity": "full"}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "mlp", "layernorm")}
OF_EXPERTS = {"recompute_granularity": "selective", "recompute_modules": ("moe", "layernorm")}


@pytest.mark.covered
@pytest.mark.parametrize(
    ("family", "sizes", "options"),
    [
        ("qwen3", MegatronSizes(tp=2), {}),
        ("qwen3", MegatronSizes(tp=2), SELECTIVE),
        ("qwen3", SEQUENCE_PARALLEL, {}),
        ("qwen2", SEQUENCE_PARALLEL, FULL),
        ("qwen3_moe", SEQUENCE_PARALLEL, FULL),
        ("qwen2", MegatronSizes(pp=2), {}),
        ("qwen2", MegatronSizes(pp=2), FULL),
        ("qwen2", MegatronSizes(pp=2, virtual_pp=2), SELECTIVE),
        ("llama", MegatronSizes(cp=2), {}),
        ("qwen3_moe", MegatronSizes(ep=2), {}),
        ("qwen3_moe", MegatronSizes(ep=2), OF_EXPERTS),
        ("qwen3_moe", MegatronSizes(tp=2, ep=2, sequence_parallel=True), {}),
    ],
    ids=case_id,
)
def test_gradients_equal_native(family, sizes, options, two_ranks, model_dir):
    """Two micro-batches of different shape, both forwards before the first backward."""
    path = model_dir(family)
    by_rank = two_ranks.run(_gradients, path, sizes, "shared", BATCHES, options)
    found = megatron_models.assemble(by_rank, atol=1e-6)
    expected = megatron_models.native_gradients(path, "shared", BATCHES)
    assert set(found) == set(expected)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=2e-5, msg=lambda text, n=name: f"{n}: {text}")


def _gradients(path, sizes, layout, batches, options):
    return megatron_models.gradients(path, sizes, layout, batches, **options)


def check_logps(pool, path: Path, sizes: MegatronSizes, layouts: Sequence[str] = LAYOUTS) -> None:
    by_rank = pool.run(megatron_models.score, path, sizes, layouts, MIXED)
    for index, layout in enumerate(layouts):
        expected = megatron_models.native_logps(path, layout, MIXED)
        found = [of_layouts[index] for of_layouts in by_rank if of_layouts[index] is not None]
        assert found
        for values in found:
            torch.testing.assert_close(values, expected, rtol=0, atol=1e-5)


def test_a_worker_without_a_gpu_is_a_user_error(monkeypatch):
    """As a worker with `num_workers` is on a machine with GPUs, where only the workers lack one."""

    def lacks_cuda() -> int:
        raise RuntimeError("No CUDA GPUs are available")

    from thresher.engines.megatron.build import _load_chunks

    monkeypatch.setattr(torch.cuda, "current_device", lacks_cuda)
    with pytest.raises(UserError, match=r"needs a GPU per worker, .* is on cpu \(No CUDA GPUs are available\)"):
        _load_chunks(SimpleNamespace(device=torch.device("cpu")))
