"""Three optimizer steps under any layout of ranks, in one process of our own, and by the oracle on one page."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from tests.support.real_pairs import minimal_dpo
from tests.support.tiny_models import FAMILIES
from tests.support.tiny_run import PairsInMemory
from thresher.checkpoint.manager import CheckpointManager
from thresher.data.batching.balance import CostModel
from thresher.data.batching.micro_batches import MicroBatching
from thresher.data.batching.plan import Plan
from thresher.data.pair import Pair, PairBatch
from thresher.distributed.mesh import AXES, Mesh, ParallelDims
from thresher.losses.objective import Objective
from thresher.losses.pairs import ChosenRejectedLogps
from thresher.losses.registry import make_losses
from thresher.models.layouts import Layout, PackedLayout, PaddedLayout
from thresher.models.loading.load import load_model
from thresher.models.loading.load_sharded import build_on_meta
from thresher.reference.scorers import LiveReference
from thresher.strategies.native.infer import NativeInfer
from thresher.strategies.native.parallelize import ParallelContext, parallelize
from thresher.strategies.native.train import NativeTrain, OptimizerSettings
from thresher.training.lr_schedule import LRSchedule
from thresher.training.skipped_steps import SkippedStep
from thresher.training.trainer import DPOTrainer, ScoredDataset, TrainerSettings

CPU = torch.device("cpu")
BETA = 0.1
GAMMA = 0.5
NUM_PAIRS, PAIRS_PER_STEP, NUM_STEPS = 30, 10, 3
LEARNING_RATE = 1e-3
LAYOUTS: dict[str, Layout] = {
    "shared": PackedLayout(shares_prompt=True),
    "packed": PackedLayout(shares_prompt=False),
    "padded": PaddedLayout(pad_id=0),
}
LOSSES_WITH_REFERENCE = ("sigmoid", "ipo", "aot")
KNOBS = {
    "sigmoid": {"beta": BETA},
    "ipo": {"beta": BETA},
    "simpo": {"beta": BETA, "gamma": GAMMA},
    "orpo": {},
    "aot": {"beta": BETA},
}
# what a log says of the clock and the machine
_NOT_OF_THE_RUN = ("time/", "memory/", "pairs_per_second", "useful_tokens_per_second")


@dataclass(frozen=True)
class Case:
    """What is trained and how it is split.

    also: what a case shows beside its axes, layout, loss and family, in the words of the table in the docs.
    tokens_at_once: in the packed rows of all data ranks together, few enough for several micro-batches a step.
    spoilt_pair: the reference says NaN of this one.
    """

    sizes: ParallelDims
    layout: str = "shared"
    loss: str = "sigmoid"
    family: str = "llama"
    dtype: torch.dtype = torch.float32
    also: str = ""
    pairs_per_step: int = PAIRS_PER_STEP
    tokens_at_once: int = 100
    max_grad_norm: float = 1.0
    recomputes_activations: bool = False
    spoilt_pair: int | None = None
    virtual_pp_size: int = 1

    def __str__(self) -> str:
        """A name that `pytest -k` takes."""
        parts = (axes_text(self.sizes), self.layout, self.loss, self.family, self.also)
        return "-".join(filter(None, parts)).replace(" ", "_")

    @property
    def plan(self) -> Plan:
        return Plan(NUM_PAIRS, seed=3, pairs_per_step=self.pairs_per_step, num_steps=NUM_STEPS)


@dataclass(frozen=True)
class Outcome:
    """metrics: what is logged of each step, less clocks and memory."""

    metrics: list[dict[str, float]]
    grad_norms: list[float]
    weights: dict[str, Tensor]
    skipped_steps: int = 0
    skipped: tuple[SkippedStep, ...] = ()


def axes_text(sizes: ParallelDims) -> str:
    """The axes that are more than one process wide, as in `dp_shard 2 x tp 2`."""
    return " x ".join(f"{axis} {size}" for axis, size in zip(AXES, sizes.sizes, strict=True) if size > 1) or "1 process"


def save_model(directory: Path, family: str, seed: int) -> Path:
    """A model of four layers, with enough heads for every axis; large weights, so that its logits differ."""
    torch.manual_seed(seed)
    config: PreTrainedConfig = copy.deepcopy(FAMILIES[family])
    config.num_hidden_layers = 4
    config.num_attention_heads, config.num_key_value_heads = 4, 4 if family == "llama" else 2
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[i % len(config.layer_types)] for i in range(4)]
    config.initializer_range = 0.2
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


def made_up_pairs(count: int, seed: int = 0) -> list[Pair]:
    generator = np.random.default_rng(seed)

    def ids(low: int, high: int) -> np.ndarray:
        return generator.integers(3, 96, size=int(generator.integers(low, high))).astype(np.int32)

    return [Pair(ids(1, 12), ids(1, 10), ids(1, 10)) for _ in range(count)]


PAIRS = made_up_pairs(NUM_PAIRS)


@cache
def mesh_of(sizes: ParallelDims) -> Mesh:
    """The groups of a mesh, made once a process: those of a hundred cases would be thousands of threads."""
    return Mesh.create(sizes, CPU)


def train_split(case: Case, policy_dir: Path, reference_dir: Path) -> Outcome:
    """Run on every rank; the weights are put together again."""
    return _train(case, split_model(case, policy_dir), split_model(case, reference_dir))


def train_alone(case: Case, policy_dir: Path, reference_dir: Path) -> Outcome:
    """The same by one process of our own engine."""
    return _train(case, *((load_model(str(path)), ParallelContext()) for path in (policy_dir, reference_dir)))


def score_split(case: Case, model_dir: Path) -> tuple[int, int, list[list[float]]]:
    """Score this rank's share of the pairs; give its number, the number of shares, and the logps of each batch."""
    model, placement = split_model(case, model_dir)
    share, num_shares = placement.dp_group.rank, placement.dp_group.size
    return share, num_shares, _scores(case, model, placement, share, num_shares)


def score_alone(case: Case, model_dir: Path, share: int, num_shares: int) -> list[list[float]]:
    return _scores(case, load_model(str(model_dir)), ParallelContext(), share, num_shares)


def _scores(
    case: Case, model: PreTrainedModel, placement: ParallelContext, share: int, num_shares: int
) -> list[list[float]]:
    scorer = NativeInfer(model, LAYOUTS[case.layout], case.dtype, placement)
    pairs = PAIRS[share::num_shares]
    batches = [tuple(pairs[i : i + 3]) for i in range(0, len(pairs), 3)]
    scored = [scorer.score(PairBatch(np.arange(len(batch)), batch)) for batch in batches]
    return [torch.cat([sides.chosen.values, sides.rejected.values]).tolist() for sides in scored]


def leaves_rows_out(case: Case, model_dir: Path) -> bool:
    """Say if the last layer of a split model computes the rows that count, and no others."""
    model, placement = split_model(case, model_dir)
    return NativeInfer(model, LAYOUTS[case.layout], case.dtype, placement).pair_model.skips_unscored_rows


def split_model(case: Case, path: Path) -> tuple[PreTrainedModel, ParallelContext]:
    model = build_on_meta(str(path), dtype=torch.float32)
    return model, parallelize(
        model, str(path), mesh_of(case.sizes), case.dtype, CPU, virtual_pp_size=case.virtual_pp_size
    )


def _train(
    case: Case,
    policy_parts: tuple[PreTrainedModel, ParallelContext],
    reference_parts: tuple[PreTrainedModel, ParallelContext],
) -> Outcome:
    policy = make_policy(case, *policy_parts)
    frozen, placement = reference_parts
    reference = NativeInfer(frozen.requires_grad_(False), LAYOUTS[case.layout], case.dtype, placement)
    trainer = make_trainer(policy, reference.score if case.loss in LOSSES_WITH_REFERENCE else None, case)
    metrics, norms, skipped = [], [], []
    for _, logged in trainer.run(NUM_STEPS):
        if isinstance(logged, SkippedStep):
            skipped.append(logged)
            continue
        metrics.append({name: value for name, value in logged.items() if not name.startswith(_NOT_OF_THE_RUN)})
        norms.append(trainer.state.grad_norm)
    weights = {name: whole(weight) for name, weight in policy.weights().items()}
    return Outcome(metrics, norms, weights, trainer.state.skipped_steps, tuple(skipped))


def make_policy(case: Case, model: PreTrainedModel, placement: ParallelContext) -> NativeTrain:
    if case.recomputes_activations:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = OptimizerSettings(learning_rate=LEARNING_RATE, epsilon=1e-5, max_grad_norm=case.max_grad_norm)
    return NativeTrain(model, LAYOUTS[case.layout], case.dtype, optimizer, placement)


def micro_batching_of(case: Case) -> MicroBatching:
    layout, num_ranks = LAYOUTS[case.layout], case.sizes.num_data_ranks
    max_tokens, max_pairs = case.tokens_at_once // num_ranks, max(1, 4 // num_ranks)
    limits = (max_tokens, None) if layout.needs_pair_attention else (None, max_pairs)
    costs = CostModel(attention_per_key=0.01, shares_prompt=layout.shares_prompt)
    return MicroBatching(PairsInMemory(PAIRS).lengths, costs, *limits)


def make_trainer(
    policy: NativeTrain, reference: Callable[[PairBatch], ChosenRejectedLogps] | None, case: Case
) -> DPOTrainer:
    def score(batch: PairBatch) -> ChosenRejectedLogps:
        assert reference is not None
        sides = reference(batch)
        is_spoilt = torch.from_numpy(batch.pair_ids == case.spoilt_pair).repeat_interleave(sides.chosen.lengths)
        return replace(
            sides, chosen=replace(sides.chosen, values=sides.chosen.values.masked_fill(is_spoilt, torch.nan))
        )

    return DPOTrainer(
        strategy=policy,
        objective=objective_of(case.loss),
        plan=case.plan,
        micro_batching=micro_batching_of(case),
        schedule=LRSchedule("constant", LEARNING_RATE, 0, NUM_STEPS),
        train=ScoredDataset(PairsInMemory(PAIRS), None if reference is None else LiveReference(score, CPU)),
        validation=None,
        settings=TrainerSettings(pairs_per_eval_batch=4),
        checkpoints=CheckpointManager(Path(tempfile.gettempdir()) / "unused", 1, "eval/loss", False),
        identity={},
        config={},
    )


def objective_of(loss: str) -> Objective:
    return Objective(terms=((make_losses([loss], KNOBS[loss])[0], 1.0),))


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def train_oracle(case: Case, policy_dir: Path, reference_dir: Path) -> Outcome:
    """examples/minimal_dpo.py on the same pairs of each step."""
    oracle = minimal_dpo()
    policy, reference = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
        for path in (policy_dir, reference_dir)
    )
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LEARNING_RATE, eps=1e-5, weight_decay=0.0)
    metrics, norms = [], []
    for step in range(NUM_STEPS):
        pairs = [PAIRS[i] for i in case.plan.pair_ids(step)]
        lengths = [
            torch.tensor([len(getattr(pair, side)) for pair in pairs]) for side in ("chosen_ids", "rejected_ids")
        ]
        ids = [(pair.prompt_ids.tolist(), pair.chosen_ids.tolist(), pair.rejected_ids.tolist()) for pair in pairs]
        losses = _oracle_losses(case.loss, lengths, oracle.dpo_losses)
        measured = oracle.train_step(
            policy, reference, optimizer, ids, beta=BETA, max_grad_norm=case.max_grad_norm, losses=losses
        )
        norms.append(measured.pop("grad_norm"))
        metrics.append(measured)
    return Outcome(metrics, norms, {name: p.detach() for name, p in policy.named_parameters()})


def _oracle_losses(loss: str, lengths: list[Tensor], dpo: Any) -> Any:
    """The formulas of the papers over sums of log-probabilities, without any code of the product."""
    chosen_length, rejected_length = lengths

    def ipo(policy, reference, beta):
        margin = (policy[0] - reference[0]) / chosen_length - (policy[1] - reference[1]) / rejected_length
        return (margin - 1 / (2 * beta)) ** 2

    def simpo(policy, _reference, beta):
        return -F.logsigmoid(beta * (policy[0] / chosen_length - policy[1] / rejected_length) - GAMMA)

    def orpo(policy, _reference, _beta):
        chosen, rejected = policy[0] / chosen_length, policy[1] / rejected_length
        log_odds = (chosen - rejected) - (torch.log1p(-chosen.exp()) - torch.log1p(-rejected.exp()))
        return -chosen - 0.1 * F.logsigmoid(log_odds)

    return {"sigmoid": dpo, "ipo": ipo, "simpo": simpo, "orpo": orpo}[loss]
