"""A rank holds only its shard of a model, after a step and while loading."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.engines.held_memory import PeakOfProcesses, held_after_a_step, load, process_id
from tests.support.engines.parity import Case, mesh_text
from tests.support.engines.rank_pool import RankPool
from thresher.distributed.mesh import ParallelDims

MEGABYTE = 1e6


@pytest.fixture(scope="module")
def larger_model(tmp_path_factory) -> tuple[Path, int]:
    """A model with only a thousandth of its weights in norms, and its bytes in fp32."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=128,
    )
    model = LlamaForCausalLM(config)
    directory = tmp_path_factory.mktemp("larger")
    model.save_pretrained(directory)
    return directory, sum(parameter.nbytes for parameter in model.parameters())


@pytest.mark.distributed
@pytest.mark.parametrize(
    "sizes",
    [ParallelDims(dp_shard=2), ParallelDims(dp_shard=4), ParallelDims(tp=2), ParallelDims(tp=4), ParallelDims(cp=2)],
    ids=mesh_text,
)
def test_a_rank_holds_its_shard_of_weights_gradients_and_moments(sizes, pool_of, larger_model):
    model_dir, total = larger_model

    held = pool_of(sizes.num_processes).run(held_after_a_step, Case(sizes, loss="simpo"), model_dir)

    for held_by_rank in held:
        print(mesh_text(sizes), held_by_rank, f"of {total}")
        assert held_by_rank.parameters == pytest.approx(total / sizes.num_processes, rel=0.05)
        assert held_by_rank.gradients == pytest.approx(total / sizes.num_processes, rel=0.05)
        assert held_by_rank.optimizer == pytest.approx(2 * total / sizes.num_processes, rel=0.05)


@pytest.fixture(scope="module")
def shape_of_smollm2(tmp_path_factory) -> tuple[Path, int]:
    """Random weights in the shape of SmolLM2-135M, and their bytes in fp32."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    directory = tmp_path_factory.mktemp("smollm2")
    model.save_pretrained(directory)
    return directory, sum(parameter.nbytes for parameter in model.parameters())


def growth_of_a_load(sizes: ParallelDims, model_dir: Path) -> list[int]:
    """Measured in new processes: memory that earlier cases freed would be reused."""
    pool = RankPool(sizes.num_processes)
    try:
        peak = PeakOfProcesses(pool.run(process_id, sizes))
        with peak:
            pool.run(load, sizes, model_dir)
        return peak.growth
    finally:
        pool.close()


@pytest.mark.distributed
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_no_rank_holds_the_full_model_while_loading(num_ranks, shape_of_smollm2):
    model_dir, total = shape_of_smollm2

    growth = growth_of_a_load(ParallelDims(dp_shard=num_ranks), model_dir)

    print(f"{num_ranks} ranks:", [f"{bytes_ / MEGABYTE:.0f} MB" for bytes_ in growth], f"of {total / MEGABYTE:.0f} MB")
    # the case of one rank shows that a rank with too much memory would be detected
    for bytes_ in growth:
        assert 0.95 * total / num_ranks < bytes_ < total / num_ranks + 40 * MEGABYTE
