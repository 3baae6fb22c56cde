"""A quantized base on ranks: sharded by FSDP2, copied, split by layers or over the rows of a sequence."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from tests.support.engines.config_runs import config_of, train_from_config, world_of_pool
from tests.support.engines.parity import LAYOUTS
from thresher.builders.engines import build_policy
from thresher.distributed.tensors import to_local
from thresher.models.loading.quantization import quantized_modules

pytestmark = pytest.mark.distributed

CASES = {
    "dp_shard": ({}, 4),
    "dp_shard, 8 bits": ({}, 8),
    "dp_shard, zero_stage 1": ({"zero_stage": 1}, 4),
    "dp_shard, cpu_offload": ({"cpu_offload": True}, 4),
    "dp_replicate": ({"dp_replicate": 2}, 4),
    "cp": ({"cp_size": 2}, 4),
    "pp": ({"pp_size": 2}, 4),
}


@pytest.mark.parametrize(("axes", "bits"), CASES.values(), ids=CASES)
def test_two_ranks_equal_one_process(two_ranks, model_dirs, axes, bits):
    train = partial(train_from_config, model_dirs("qwen2")[0], lora_rank=4, quantization={"bits": bits})
    one = train({}, "shared")
    for outcome in two_ranks.run(train, axes, "shared"):
        assert outcome.metrics[0]["rewards/margins"] == 0.0
        for step, metrics in enumerate(outcome.metrics):
            for name in ("loss", "rewards/margins", "logps/chosen"):
                assert metrics.get(name, one.metrics[step][name]) == pytest.approx(one.metrics[step][name], abs=1e-5)
        for name, weight in outcome.weights.items():
            torch.testing.assert_close(weight, one.weights[name], atol=1e-6, rtol=0, msg=name)


def bytes_of_matrices(model: Path, bits: int) -> tuple[int, int]:
    """Bytes of the packed elements of this rank, and of their constants."""
    world = world_of_pool()
    config = config_of(model, world.size, {}, lora_rank=4, quantization={"bits": bits})
    policy = build_policy(config, LAYOUTS["shared"], device=torch.device("cpu"), world=world)
    packed = quantized_modules(policy.model.get_base_model()).values()
    constants = sum(each.nbytes for module in packed for each in module.buffers())
    return sum(to_local(module.weight).nbytes for module in packed), constants


@pytest.mark.parametrize("bits", [4, 8])
def test_a_rank_holds_its_part_of_the_elements_and_all_constants(two_ranks, model_dirs, bits):
    model, _ = model_dirs("qwen2")
    elements, constants = bytes_of_matrices(model, bits)
    assert two_ranks.run(bytes_of_matrices, model, bits) == [(elements // 2, constants)] * 2
