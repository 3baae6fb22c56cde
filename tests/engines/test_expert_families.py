"""Mixtures of experts train in shards from every layout of their files like one process, and are written as read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, JetMoeConfig

from tests.support.engines.agreement import assert_logs_of_one_process, assert_same_weights
from tests.support.engines.expert_routes import with_fixed_routes
from tests.support.engines.parity import LAYOUTS, Case, mesh_text, save_model, train_parallel, train_single_process
from tests.support.small_runs import save_small_tokenizer
from tests.support.tiny_models import EXPERT_FAMILIES
from thresher.builders.engines import check_engine
from thresher.config import DPOConfig, parse_config
from thresher.distributed.mesh import ParallelDims
from thresher.engines.native.check import check_axes
from thresher.engines.native.declaration import FSDP2Settings
from thresher.errors import UserError

pytestmark = pytest.mark.distributed

SHARDED = (ParallelDims(dp_shard=2), ParallelDims(dp_shard=2, ep=2))


def save(directory: Path, family: str, layout: str, seed: int, **changes: Any) -> Path:
    path = save_model(directory / layout / str(seed), family, seed, num_layers=2, **changes)
    if layout == "stacked":
        model = AutoModelForCausalLM.from_pretrained(path)
        model.save_pretrained(path, save_original_format=False)
    return path


def is_stacked(path: Path) -> bool:
    return any(tensor.ndim == 3 for name, tensor in load_file(path / "model.safetensors").items() if "expert" in name)


@pytest.mark.parametrize("layout", ["hub", "stacked"])
@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_three_steps_of_two_ranks_equal_one_process(family, layout, two_ranks, tmp_path):
    directories = [save(tmp_path, family, layout, seed) for seed in (0, 1)]
    assert is_stacked(directories[0]) == (layout == "stacked" or family == "gpt_oss")
    alone = train_single_process(Case(ParallelDims(), family=family), *directories)
    for sizes in SHARDED:
        outcomes = two_ranks.run(train_parallel, Case(sizes, family=family), *directories)
        for outcome in outcomes:
            assert_same_weights(outcome.weights, alone.weights)
        assert_logs_of_one_process(outcomes, alone)


EXPERT = "model.layers.1.mlp.experts"
Tensors = dict[str, torch.Tensor]


def lose(part: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if part not in name}


def rename(name: str, other: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {each.replace(name, other): tensor for each, tensor in tensors.items()}


def widen(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: torch.cat([tensors[name], tensors[name]])}


@pytest.mark.parametrize(
    ("family", "layout", "damage", "message"),
    [
        (
            "qwen3_moe",
            "hub",
            lose(f"{EXPERT}.2.up_proj"),
            "have up_proj.weight of 3 of the 4 experts of model.layers.1",
        ),
        ("qwen3_moe", "hub", rename(f"{EXPERT}.2.", f"{EXPERT}.9."), "have gate_proj.weight of 3 of the 4 experts"),
        ("qwen3_moe", "hub", lose("1.mlp.experts.*.up_proj".replace("*", "0")), "have up_proj.weight of 3 of the 4"),
        ("qwen3_moe", "hub", widen(f"{EXPERT}.2.up_proj.weight"), "experts.2.up_proj.weight has shape .32, 32."),
        ("qwen3_moe", "hub", widen("model.embed_tokens.weight"), "model.embed_tokens.weight has shape .192, 32."),
        ("mixtral", "hub", lose("layers.0.self_attn.q_proj"), "have no tensor model.layers.0.self_attn.q_proj"),
        ("deepseek_v3", "hub", lose("e_score_correction_bias"), "have no tensor model.layers.1.mlp.gate.e_score"),
        ("qwen3_moe", "stacked", lose(f"{EXPERT}.down_proj"), "have no tensor model.layers.1.mlp.experts.down_proj"),
    ],
)
def test_files_that_make_no_model_are_refused_before_workers_start(family, layout, damage, message, tmp_path):
    path = save_small_tokenizer(save(tmp_path, family, layout, 0))
    file = path / "model.safetensors"
    save_file(damage(load_file(file)), file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=message):
        check_engine(policy_of(path), "actor_train")


@pytest.mark.parametrize("sizes", [ParallelDims(dp_shard=4), ParallelDims(dp_shard=4, ep=2)], ids=mesh_text)
@pytest.mark.parametrize("layout", ["hub", "stacked"])
def test_more_shards_than_experts(layout, sizes, four_ranks, tmp_path):
    """Each process has columns of all experts."""
    directories = [save(tmp_path, "qwen3_moe", layout, seed, num_experts=2) for seed in (0, 1)]
    alone = train_single_process(Case(ParallelDims(), family="qwen3_moe"), *directories)
    for outcome in four_ranks.run(train_parallel, Case(sizes, family="qwen3_moe"), *directories):
        assert_same_weights(outcome.weights, alone.weights)
        assert_logs_of_one_process([outcome], alone)


@pytest.mark.parametrize(
    ("family", "sizes", "message"),
    [
        ("qwen3_moe", {"tp_size": 2}, "tensor parallelism does not split the experts .* set ep_size too, such as to 2"),
        ("llama", {"ep_size": 2}, "ep_size is 2, but the architecture llama has no experts; remove ep_size"),
        ("qwen3_moe", {"ep_size": 3}, "ep_size 3 does not divide the 2 workers .* use a divisor of 2"),
        ("qwen3_moe", {"ep_size": 2, "pp_size": 2}, "ep_size 2 does not divide the 1 workers"),
    ],
)
def test_sizes_that_cannot_be_split_are_refused_with_advice(family, sizes, message, tmp_path):
    path = save_small_tokenizer(save_model(tmp_path / "model", family, 0, num_layers=2))
    with pytest.raises(UserError, match=message):
        check_engine(policy_of(path, **sizes), "actor_train")


def test_experts_without_a_plan_are_refused():
    with pytest.raises(UserError, match="jetmoe has experts that transformers has no plan to split; remove ep_size"):
        check_axes(FSDP2Settings(ep_size=2), 2, "actor_train", JetMoeConfig(), LAYOUTS["packed"])


def policy_of(path: Path, **sizes: int) -> DPOConfig:
    role = {"num_workers": 2, "strategy_args": {"strategy_config": sizes}, "model_args": {"dtype": "fp32"}}
    return parse_config({"pretrain": str(path), "pref_loss": "simpo", "actor_train": role})


@pytest.mark.parametrize("ep", [2, 4])
@pytest.mark.parametrize("chosen", ["none of some process", "one expert"])
def test_a_process_may_get_no_row_or_all(ep, chosen, pool_of, model_dirs):
    case = Case(ParallelDims(dp_shard=ep, ep=ep), family="qwen3_moe", router_loss_coef=0.1)
    directories = model_dirs(case.family, case.num_layers)
    expected = with_fixed_routes(case, chosen, *directories, alone=True)
    for outcome in pool_of(ep).run(with_fixed_routes, case, chosen, *directories):
        assert_same_weights(outcome.weights, expected.weights)
        assert_logs_of_one_process([outcome], expected)
