"""max_tokens_per_micro_batch: auto: chosen from a pretended GPU's memory, recorded, and kept when a run resumes."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.compared_runs import merge
from tests.support.published_models import save_config
from tests.support.small_runs import make_base, open_small_inputs
from tests.support.tiny_run import noise_labels
from thresher.builders.hardware import GPUS, Hardware, reported_gpu
from thresher.builders.inputs import DEFAULT_TOKENS_PER_MICRO_BATCH, RunInputs
from thresher.builders.memory import peak_memory
from thresher.builders.token_budget import TokenBudget, choose_budget, with_token_budget
from thresher.config import DPOConfig, parse_config
from thresher.data.batching.mismatched import MismatchedAnswers, VisitPlan
from thresher.plan.estimate import Estimate, KnownRun
from thresher.plan.step import Cluster
from thresher.plan.workload import PairLengths
from thresher.runtime.group import LocalRanks, Runtime
from thresher.runtime.rank import PolicyRank

GIB = 2**30
PAIRS = np.random.default_rng(0).integers(50, 300, (2000, 3)).astype(np.uint32)


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    """The config of an 8B model, without weights."""
    return save_config(tmp_path_factory.mktemp("large"), "Llama-3-8B")


def config_of(model: Path, **changes: Any):
    role = {"model_args": {"dtype": "bf16", "lora_rank": 16}, "training_args": {"global_batch_size": 512}}
    return parse_config({"pretrain": str(model), "actor_train": merge(role, changes), "output_dir": "unused"})


def inputs_of(config: DPOConfig, lengths: Any = PAIRS) -> RunInputs:
    """Parts of a run whose pairs have these lengths."""
    return RunInputs(config).replace(train=SimpleNamespace(lengths=lengths))


@pytest.fixture(scope="module")
def estimate(large):
    """`estimate(gpu, num_gpus, role)`: estimates that share the model and the pairs."""
    known: dict[str, KnownRun] = {}

    def build(gpu: Hardware, num_gpus: int = 1, **changes: Any) -> Estimate:
        config = config_of(large, **changes)
        run = known.setdefault(str(config.actor_train.model_args), KnownRun(config, PairLengths(PAIRS, "given")))
        return Estimate(config, Cluster(gpu, 8, num_gpus), run)

    return build


def budget_of(estimate: Estimate) -> TokenBudget:
    return estimate.budget_choice.choose(estimate.cluster.gpu, estimate.cluster.gpus_per_node)


def with_budget(tokens: int, **training: Any) -> dict[str, Any]:
    return {"training_args": {"max_tokens_per_micro_batch": tokens, **training}}


def test_one_gpu_with_room_keeps_the_default_because_larger_batches_are_not_faster(estimate):
    tokens, reason = budget_of(estimate(reported_gpu("NVIDIA H200", 141 * GIB)))
    assert tokens == DEFAULT_TOKENS_PER_MICRO_BATCH
    assert "fit into NVIDIA H200" in reason


@pytest.mark.parametrize("gigabytes", [36, 40, 44])
def test_a_smaller_gpu_gets_the_largest_budget_that_fits(estimate, gigabytes):
    """With a tenth of the memory to spare, for the error of the formulas, and every row scored."""
    gpu = reported_gpu("NVIDIA L40S", gigabytes * GIB)
    found = estimate(gpu)
    tokens, _ = budget_of(found)
    assert tokens is not None
    assert tokens < DEFAULT_TOKENS_PER_MICRO_BATCH
    usable = 0.9 * found.usable_memory
    assert peak_memory(found.process, tokens, tokens, 2).total <= usable
    assert peak_memory(found.process, tokens + 256, tokens + 256, 2).total > usable
    assert estimate(gpu, **with_budget(tokens)).peak <= usable


def test_gathers_across_nodes_are_hidden_by_larger_micro_batches(estimate):
    gpu, full = reported_gpu("NVIDIA B200", 180 * GIB), {"num_workers": 32, "model_args": {"lora_rank": None}}

    def seconds(tokens: int) -> float:
        return estimate(gpu, 32, **full, **with_budget(tokens, global_batch_size=1984)).step_seconds

    tokens, _ = budget_of(estimate(gpu, 32, **full, training_args={"global_batch_size": 1984}))
    assert tokens is not None
    assert tokens > DEFAULT_TOKENS_PER_MICRO_BATCH
    assert seconds(tokens) < 0.5 * seconds(DEFAULT_TOKENS_PER_MICRO_BATCH)


@pytest.mark.parametrize("axes", [{"zero_stage": 1}, {"pp_size": 4}, {"dp_replicate": 8}])
def test_without_messages_to_hide_the_default_is_enough(estimate, axes):
    role = {"num_workers": 8, "strategy_args": {"strategy_config": axes}}
    tokens, _ = budget_of(estimate(reported_gpu("NVIDIA B200", 180 * GIB), 8, **role))
    assert tokens == DEFAULT_TOKENS_PER_MICRO_BATCH


def test_the_budget_is_never_smaller_than_the_longest_pair(large):
    lengths = np.vstack([PAIRS, [[4000, 3000, 2000]]]).astype(np.uint32)
    tokens, reason = choose_budget(inputs_of(config_of(large), lengths), reported_gpu("NVIDIA L40S", 40 * GIB))
    assert tokens == 4000 + 2999 + 1999
    assert reason.startswith("the longest pair; ")


def test_runs_with_mismatched_answers_get_a_budget(large):
    visits = MismatchedAnswers(noise_labels(10), VisitPlan(10, seed=0, pairs_per_step=4, num_steps=5))
    tokens, reason = choose_budget(inputs_of(config_of(large), visits.lengths), reported_gpu("NVIDIA H200", 141 * GIB))
    assert (tokens, "fit into NVIDIA H200" in reason) == (DEFAULT_TOKENS_PER_MICRO_BATCH, True)


def test_padded_rows_get_a_budget_only_if_their_pairs_do_not_fit(large):
    config = config_of(large).model_copy(update={"layout": "padded"})
    inputs = inputs_of(config)
    assert choose_budget(inputs, reported_gpu("NVIDIA H200", 141 * GIB))[0] is None
    tokens, _ = choose_budget(inputs, reported_gpu("NVIDIA L40S", 46 * GIB))
    assert tokens is not None
    assert tokens >= 2 * (PAIRS[:, 0] + PAIRS[:, 1:].max(axis=1)).max()


def test_a_strategy_without_formulas_keeps_the_default(large):
    config = config_of(large, strategy_args={"strategy_name": "deepspeed_train"})
    tokens, reason = choose_budget(inputs_of(config), reported_gpu("NVIDIA H100 80GB HBM3", 80 * GIB))
    assert (tokens, reason[:20]) == (None, "the default, because")


def test_rates_are_those_of_the_gpu_with_this_name_and_memory_that_of_the_driver():
    assert reported_gpu("NVIDIA A100-SXM4-40GB", 7).memory_bandwidth == GPUS["a100-40gb"].memory_bandwidth
    assert reported_gpu("NVIDIA H100 80GB HBM3", 7).peak_flops == GPUS["h100"].peak_flops
    for name, found in (
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("Tesla V100-SXM2-16GB", "v100"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
    ):
        assert reported_gpu(name, 7).peak_flops == GPUS[found].peak_flops
    assert reported_gpu("Some GPU", 7).memory == 7


@pytest.fixture
def small(tmp_path, monkeypatch):
    """`start(memory, checkpoint)`: a run in this process whose device pretends to be a GPU of that memory."""
    values = merge(make_base(tmp_path), {"output_dir": str(tmp_path / "out"), "reference": {"mode": "concurrent"}})
    values["reference"].pop("infer_batch_size")

    def start(memory: int | None, checkpoint: Path | None = None, budget: int | str | None = "auto"):
        training = {"actor_train": {"training_args": {"max_tokens_per_micro_batch": budget}}}
        config, inputs = open_small_inputs(merge(values, training))
        gpu = None if memory is None else reported_gpu("NVIDIA H100", memory)
        monkeypatch.setattr(PolicyRank, "smallest_gpu", lambda rank: gpu)
        run = Runtime(config, LocalRanks(config))
        run.start(inputs, checkpoint, print)
        return run

    return start


def test_a_resumed_run_keeps_the_recorded_budget_on_another_gpu(small, tmp_path, caplog):
    """The micro-batches after the checkpoint are those of a run that never stopped, on a GPU of any memory."""
    caplog.set_level(logging.INFO, "thresher")
    run = small(10**6)
    chosen = run.inputs.max_tokens
    assert chosen is not None
    assert chosen < DEFAULT_TOKENS_PER_MICRO_BATCH
    assert f"max_tokens_per_micro_batch: auto -> {chosen:,}, " in caplog.text
    next(iter(run.run(1)))
    run.save()
    run.wait_for_saves()
    (checkpoint,) = (tmp_path / "out" / "checkpoints").iterdir()
    assert json.loads((checkpoint / "trainer.json").read_text())["max_tokens_per_micro_batch"] == chosen

    for memory in (10**10, None):
        resumed = small(memory, checkpoint)
        assert resumed.inputs.max_tokens == chosen
        assert resumed.actor_train._micro_batching.max_tokens == chosen
    assert small(10**10).inputs.max_tokens == DEFAULT_TOKENS_PER_MICRO_BATCH
    assert small(10**6, checkpoint, budget=64).inputs.max_tokens == 64


def test_a_cpu_keeps_the_default_and_a_checkpoint_without_a_record_too(small, tmp_path):
    run = small(None)
    assert run.inputs.max_tokens is None
    assert run.actor_train._micro_batching.max_tokens == DEFAULT_TOKENS_PER_MICRO_BATCH
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "trainer.json").write_text("{}")
    _, inputs = open_small_inputs(merge(make_base(tmp_path), {"output_dir": str(tmp_path / "other")}))
    unused = lambda: pytest.fail("a resumed run does not look at the GPU")  # noqa: E731
    assert with_token_budget(inputs, tmp_path / "old", unused).max_tokens is None
