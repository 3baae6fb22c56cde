"""A policy on any mesh gives the answers that it gives in one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.engines import parity
from tests.support.engines.sampled_runs import sample_after_steps
from tests.support.engines.saved_runs import Run
from tests.support.small_runs import save_small_tokenizer
from thresher.distributed.mesh import ParallelDims

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("sampled")
    (directory / "tokenizer").mkdir()
    save_small_tokenizer(directory / "tokenizer")
    parity.save_model(directory / "model", "llama", 0)
    return directory


@pytest.fixture(scope="module")
def expected(directory):
    answers, _ = sample_after_steps(Run(directory / "model", directory / "alone", until=2))
    return answers


@pytest.mark.parametrize(
    "sizes", [ParallelDims(dp_shard=2), ParallelDims(tp=2), ParallelDims(pp=2), ParallelDims(dp_replicate=2)], ids=str
)
def test_rank_0_gives_the_answers_of_one_process(pool_of, directory, expected, sizes, tmp_path):
    run = Run(directory / "model", directory / tmp_path.name, sizes, until=2)
    (answers, is_unchanged), (others, _) = pool_of(2).run(sample_after_steps, run)
    assert others is None
    assert is_unchanged
    assert not (run.root / ".weights").exists()
    assert [(each.policy.token_ids, each.reference.token_ids) for each in answers.prompts] == [
        (each.policy.token_ids, each.reference.token_ids) for each in expected.prompts
    ]
    ratios = [each.log_ratio for each in expected.prompts]
    assert [each.log_ratio for each in answers.prompts] == pytest.approx(ratios, abs=1e-3)
    assert max(map(abs, ratios)) > 0.01  # the steps changed the policy
