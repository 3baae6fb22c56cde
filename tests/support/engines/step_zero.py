"""Distances between policy and reference in the first step of a run, on the ranks of a pool."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.support.engines.config_runs import config_of, world_of_pool
from tests.support.engines.parity import LAYOUTS
from tests.support.tiny_run import PairsInMemory
from thresher.builders.engines import build_policy, build_reference
from thresher.builders.reference import open_cache
from thresher.data.batching.batches import Blocks, CostModel
from thresher.data.example import Example, ExampleBatch
from thresher.distributed.groups import SINGLE_PROCESS, Group
from thresher.losses.pairs import NO_STATISTICS, ExampleLogps
from thresher.reference.fingerprint import weights_digest
from thresher.reference.scorers import PrecomputedReference

CPU = torch.device("cpu")
PAIRS_PER_BLOCK = 8


@dataclass(frozen=True)
class StepZero:
    """Where a first step is computed.

    reference: `adapter` (the base of the policy's adapter), `concurrent` (a second model on the policy's axes),
    `precomputed` (a cache written on the policy's axes) or `one process` (a cache written by one process).
    tokens: about those of a micro-batch and of a block of the cache; when absent, 1 to 5 pairs and 8 pairs.
    """

    reference: str
    axes: dict[str, int]
    model_args: dict[str, Any]
    layout: str = "shared"
    dtype: str = "bf16"
    tokens: int | None = None


@dataclass(frozen=True)
class Distance:
    """Nats per token: the mean and the largest difference of a logp, and the largest margin of a pair."""

    mean: float
    largest: float
    margin: float
    num_tokens: int


def measure(run: StepZero, model_dir: Path, cache_dir: Path, pairs: list[Example]) -> Distance | None:
    """Compare the logps of a training forward with the reference; None on stages without logps."""
    world, layout = world_of_pool(), LAYOUTS[run.layout]
    config = config_of(model_dir, world.size, run.axes, dtype=run.dtype, **run.model_args)
    config = config.model_copy(update={"reference": config.reference.model_copy(update={"cache_dir": str(cache_dir)})})
    policy = build_policy(config, layout, device=CPU, world=world)
    policy.check_logps(PairsInMemory(pairs).read([0, 1]))  # as every run does before its first step
    rank, num_ranks = policy.dp_group.rank, policy.dp_group.size
    ids = np.arange(rank, len(pairs), num_ranks)
    if run.tokens is None:
        parts = np.split(ids, np.cumsum(range(1, 5)))  # none of them is a block of the cache
    else:
        parts = np.array_split(ids, max(1, int(_tokens(pairs)[ids].sum()) // run.tokens))
    batches = [PairsInMemory(pairs).read(part) for part in parts if len(part)]
    if run.reference == "adapter":
        references = [policy.score_base(batch) for batch in batches]
    elif run.reference == "concurrent":
        live = build_reference(config, layout, device=CPU, world=world, role=config.actor_train)
        references = [live.score(batch) for batch in batches]
    else:
        references = _precomputed(run, config, pairs, batches)
    scored: dict[int, ExampleLogps] = {}

    def loss_fn(index: int, logps: ExampleLogps) -> torch.Tensor:
        scored[index] = logps.detach()
        return logps.chosen.values.sum()

    policy.executor.backward(batches, loss_fn, statistics=NO_STATISTICS)
    return _distance([(scored[index], reference) for index, reference in enumerate(references) if index in scored])


def _precomputed(run: StepZero, config: Any, pairs: list[Example], batches: list[ExampleBatch]) -> list[ExampleLogps]:
    """Fill a cache as reference workers do, then read it."""
    layout, world = LAYOUTS[run.layout], world_of_pool()
    on_axes = run.reference == "precomputed"
    cache = open_cache(config, weights_digest(config.pretrain))

    def look_up(group: Group = SINGLE_PROCESS) -> PrecomputedReference:
        if run.tokens is None:
            blocks = Blocks.by_pairs(len(pairs), PAIRS_PER_BLOCK)
        else:
            tokens = _tokens(pairs)
            blocks = Blocks.by_tokens(len(pairs), lambda rows: tokens[rows], run.tokens)
        return PrecomputedReference(
            cache, PairsInMemory(pairs), None, blocks=blocks, device=CPU, num_visits=1, group=group
        )

    if on_axes:
        model = build_reference(config, layout, device=CPU, world=world, role=config.actor_train)
        list(look_up(world).iter_score_missing(model.score, dp_group=model.dp_group))
    elif world.rank == 0:
        list(look_up().iter_score_missing(build_reference(config, layout, device=CPU).score))
    if world.size > 1:
        dist.barrier()
    cached = look_up()
    return [cached.logps(batch) for batch in batches]


def _tokens(pairs: list[Example]) -> np.ndarray:
    """Tokens of each pair in layout shared."""
    return CostModel(attention_per_key=0, shares_prompt=True).tokens(PairsInMemory(pairs).lengths)


def _distance(compared: list[tuple[ExampleLogps, ExampleLogps]]) -> Distance | None:
    if not compared:
        return None
    tokens, margins = [], []
    for policy, reference in compared:
        chosen = policy.chosen.sums() - reference.chosen.sums()
        rejected = policy.rejected.sums() - reference.rejected.sums()
        margins.append((chosen - rejected) / (policy.chosen.lengths + policy.rejected.lengths))
        for ours, theirs in ((policy.chosen, reference.chosen), (policy.rejected, reference.rejected)):
            tokens.append((ours.values - theirs.values).abs())
    all_tokens, all_margins = torch.cat(tokens), torch.cat(margins).abs()
    return Distance(float(all_tokens.mean()), float(all_tokens.max()), float(all_margins.max()), all_tokens.numel())


def long_pairs(vocab_size: int, count: int = 30) -> list[Example]:
    """Pairs of 50 to 150 tokens: a shard of a row has the shape of a real one, not of a few tokens."""
    draw = np.random.default_rng(0)

    def ids(low: int, high: int) -> np.ndarray:
        return draw.integers(3, vocab_size, int(draw.integers(low, high))).astype(np.int32)

    return [Example.pair(ids(10, 50), ids(20, 50), ids(20, 50)) for _ in range(count)]


def with_trained_vectors(directory: Path) -> Path:
    """Make the norms and biases of a model not representable in bf16, as after training; new norms are all 1."""
    weights = load_file(directory / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for name, weight in weights.items():
        if weight.ndim == 1:
            weights[name] = weight + 0.1 * torch.randn(weight.shape, generator=generator)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def save_wide_model(directory: Path, num_layers: int = 8) -> Path:
    """A model as wide as the smallest in use: its matrix products round differently for other numbers of rows."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        initializer_range=0.05,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return with_trained_vectors(directory)
