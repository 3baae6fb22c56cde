"""Three optimizer steps under any layout of ranks, and the same three steps by the oracle on one page."""

from __future__ import annotations

import copy
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedConfig

HERE = Path(__file__).parent
for neighbour in ("trainer", "models"):
    sys.path.append(str(HERE.parent / neighbour))

from real_pairs import minimal_dpo  # noqa: E402
from tiny_models import FAMILIES  # noqa: E402
from tiny_run import PairsInMemory  # noqa: E402

from thresher.checkpoint.keeper import CheckpointKeeper  # noqa: E402
from thresher.data.balance import CostModel  # noqa: E402
from thresher.data.batch import Pair  # noqa: E402
from thresher.data.micro_batches import MicroBatching  # noqa: E402
from thresher.data.plan import Plan  # noqa: E402
from thresher.losses.objective import Objective  # noqa: E402
from thresher.losses.registry import make_losses  # noqa: E402
from thresher.models.layouts import Layout, PackedLayout, PaddedLayout  # noqa: E402
from thresher.models.load_split import empty_model  # noqa: E402
from thresher.reference.scorers import LiveReference  # noqa: E402
from thresher.schedule import Schedule  # noqa: E402
from thresher.strategies.native.infer import NativeInfer  # noqa: E402
from thresher.strategies.native.mesh import AxisSizes, Mesh  # noqa: E402
from thresher.strategies.native.placement import place_model  # noqa: E402
from thresher.strategies.native.train import NativeTrain, OptimizerSettings  # noqa: E402
from thresher.trainer import DPOTrainer, Split, TrainerSettings  # noqa: E402

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
KNOBS = {
    "sigmoid": {"beta": BETA},
    "ipo": {"beta": BETA},
    "simpo": {"beta": BETA, "gamma": GAMMA},
    "orpo": {},
    "aot": {"beta": BETA},
}


@dataclass(frozen=True)
class Case:
    sizes: AxisSizes
    layout: str = "shared"
    loss: str = "sigmoid"
    family: str = "llama"
    dtype: torch.dtype = torch.float32
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    metrics: list[dict[str, float]]
    grad_norms: list[float]
    weights: dict[str, Tensor]


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
PLAN = Plan(NUM_PAIRS, seed=3, pairs_per_step=PAIRS_PER_STEP, num_steps=NUM_STEPS)


def train_split(case: Case, policy_dir: Path, reference_dir: Path) -> Outcome:
    """Run on every rank; the weights are put together again."""
    mesh = Mesh.of(case.sizes, CPU)
    layout = LAYOUTS[case.layout]
    models = []
    for path in (policy_dir, reference_dir):
        model = empty_model(str(path), dtype=torch.float32)
        models.append((model, place_model(model, str(path), mesh, case.dtype, CPU, **case.settings)))
    (model, placement), (frozen, frozen_placement) = models
    frozen.requires_grad_(False)
    optimizer = OptimizerSettings(learning_rate=LEARNING_RATE, epsilon=1e-5, max_grad_norm=1.0)
    policy = NativeTrain(model, layout, case.dtype, optimizer, placement)
    reference = NativeInfer(frozen, layout, case.dtype, frozen_placement)
    trainer = make_trainer(
        policy, LiveReference(reference.score, CPU) if case.loss in ("sigmoid", "ipo", "aot") else None, case
    )
    metrics, norms = [], []
    for _ in range(NUM_STEPS):
        metrics.append({name: metric.mean for name, metric in trainer.training_step().items()})
        norms.append(trainer.state.grad_norm)
    return Outcome(metrics, norms, {name: whole(weight) for name, weight in policy.weights().items()})


def make_trainer(policy: NativeTrain, reference: LiveReference | None, case: Case) -> DPOTrainer:
    store = PairsInMemory(PAIRS)
    packed = LAYOUTS[case.layout].needs_pair_attention
    costs = CostModel(attention_per_key=0.01, shares_prompt=LAYOUTS[case.layout].shares_prompt)
    return DPOTrainer(
        strategy=policy,
        objective=objective_of(case.loss),
        plan=PLAN,
        micro_batching=MicroBatching(store.lengths, costs, 60 if packed else None, None if packed else 3),
        schedule=Schedule("constant", LEARNING_RATE, 0, NUM_STEPS),
        train=Split(store, reference),
        validation=None,
        settings=TrainerSettings(pairs_per_eval_batch=4),
        checkpoints=CheckpointKeeper(Path(tempfile.gettempdir()) / "unused", 1, "eval/loss", False, print),
        identity={},
        config={},
    )


def objective_of(loss: str) -> Objective:
    return Objective(terms=((make_losses([loss], KNOBS[loss])[0], 1.0),))


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def train_oracle(loss: str, policy_dir: Path, reference_dir: Path) -> Outcome:
    """examples/minimal_dpo.py on the same pairs of each step."""
    oracle = minimal_dpo()
    policy, reference = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
        for path in (policy_dir, reference_dir)
    )
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LEARNING_RATE, eps=1e-5, weight_decay=0.0)
    metrics, norms = [], []
    for step in range(NUM_STEPS):
        pairs = [PAIRS[i] for i in PLAN.pair_ids(step)]
        lengths = [
            torch.tensor([len(getattr(pair, side)) for pair in pairs]) for side in ("chosen_ids", "rejected_ids")
        ]
        ids = [(pair.prompt_ids.tolist(), pair.chosen_ids.tolist(), pair.rejected_ids.tolist()) for pair in pairs]
        measured = oracle.train_step(
            policy, reference, optimizer, ids, beta=BETA, losses=_oracle_losses(loss, lengths, oracle.dpo_losses)
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
