"""In bf16, policy and reference are equal in the first step, on every axis and for every kind of reference.

Most tests use a narrow model: its matrix products do not depend on the other rows, so that a cache equals the policy
for every size of a batch. Those of a wide model do not depend on them in batches of thousands of tokens. Wide models on
every axis, and four workers: `benchmarks/step_zero.py`.
"""

from __future__ import annotations

import pytest

from tests.support.engines.parity import save_model
from tests.support.engines.step_zero import (
    StepZero,
    long_pairs,
    measure,
    save_wide_model,
    with_trained_vectors,
)

pytestmark = pytest.mark.distributed

LORA = {"lora_rank": 4}
REFERENCES = [
    pytest.param("adapter", LORA, id="adapter"),
    pytest.param("concurrent", {}, id="concurrent"),
    pytest.param("precomputed", {}, id="precomputed"),
]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return with_trained_vectors(save_model(tmp_path_factory.mktemp("model"), "llama", seed=0))


def assert_equal(distances):
    found = [each for each in distances if each is not None]
    assert found
    for distance in found:
        assert distance.margin <= 1e-6
        assert distance.mean <= 1e-6


@pytest.mark.parametrize(("reference", "model_args"), [*REFERENCES, pytest.param("precomputed", LORA, id="lora")])
def test_one_process_starts_at_margin_0(model_dir, tmp_path, reference, model_args):
    assert_equal([measure(StepZero(reference, {}, model_args), model_dir, tmp_path, long_pairs(96))])


@pytest.mark.covered
@pytest.mark.parametrize("axes", [{}, {"dp_replicate": 2}, {"tp_size": 2}, {"cp_size": 2}, {"pp_size": 2}], ids=str)
@pytest.mark.parametrize(("reference", "model_args"), REFERENCES)
def test_two_workers_start_at_margin_0(two_ranks, model_dir, tmp_path, reference, model_args, axes):
    assert_equal(two_ranks.run(measure, StepZero(reference, axes, model_args), model_dir, tmp_path, long_pairs(96)))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_dora_and_modules_trained_whole_start_at_margin_0(two_ranks, model_dir, tmp_path, num_ranks):
    model_args = LORA | {"use_dora": True, "modules_to_save": ["lm_head", "embed_tokens", "norm", "v_proj"]}
    model_args |= {"lora_exclude": ["v_proj"]}
    arguments = StepZero("adapter", {}, model_args), model_dir, tmp_path, long_pairs(96)
    assert_equal(two_ranks.run(measure, *arguments) if num_ranks == 2 else [measure(*arguments)])


# tp rounds partial sums to bf16, and cp computes all rows of the last layer: both differ from one process by rounding
@pytest.mark.parametrize("axes", [{}, {"dp_replicate": 2}, {"pp_size": 2}, {"cpu_offload": True}], ids=str)
def test_two_workers_start_at_margin_0_from_a_cache_of_one_process(two_ranks, model_dir, tmp_path, axes):
    assert_equal(two_ranks.run(measure, StepZero("one process", axes, {}), model_dir, tmp_path, long_pairs(96)))


@pytest.mark.parametrize(("reference", "model_args"), REFERENCES[::2])
def test_four_workers_on_two_axes_start_at_margin_0(four_ranks, model_dir, tmp_path, reference, model_args):
    run = StepZero(reference, {"cp_size": 2, "tp_size": 2}, model_args)
    assert_equal(four_ranks.run(measure, run, model_dir, tmp_path, long_pairs(96)))


@pytest.mark.slow
@pytest.mark.hand  # CI has the same with small micro-batches, on one, two and four workers
def test_full_micro_batches_of_a_wide_model_start_at_margin_0_from_a_cache(tmp_path):
    run = StepZero("precomputed", {}, {}, tokens=3000)
    model = save_wide_model(tmp_path / "model", num_layers=2)
    # 7 blocks and 6 micro-batches: none is a block of the cache
    assert_equal([measure(run, model, tmp_path / "cache", long_pairs(4096, count=200))])
