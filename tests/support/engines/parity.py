"""Three optimizer steps on any mesh, in one process, and by the oracle examples/minimal_dpo.py."""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from tests.support.real_pairs import minimal_dpo
from tests.support.stateful_models import STATEFUL
from tests.support.tiny_models import FAMILIES
from tests.support.tiny_run import PairsInMemory
from thresher.checkpoint.manager import CheckpointManager
from thresher.config import DPOConfig
from thresher.config.roles import ModelArgs, TrainingArgs
from thresher.data.batching.batches import CostModel, MicroBatching, ScoringBatching
from thresher.data.batching.mismatched import MismatchedAnswers, VisitPlan
from thresher.data.batching.plan import Plan
from thresher.data.example import Example, ExampleBatch
from thresher.distributed.groups import DataParallelGroup
from thresher.distributed.mesh import MESH_DIMS, Mesh, ParallelDims
from thresher.engines.engine import Engine, TrainEngine
from thresher.engines.native.build import infer_engine, train_engine
from thresher.engines.native.declaration import FSDP2Settings
from thresher.engines.native.parallelize import ParallelContext, parallelize
from thresher.losses.objective import Objective
from thresher.losses.pairs import ExampleLogps
from thresher.losses.registry import make_losses
from thresher.models.layouts import Layout, PackedLayout, PaddedLayout, with_ends
from thresher.models.loading.adapters import LoraSettings
from thresher.models.loading.load import DTYPES, load_model
from thresher.models.loading.load_sharded import build_on_meta
from thresher.models.loading.trained import TrainedParts
from thresher.models.logps import base_model
from thresher.models.optimizations.compile import Compilation
from thresher.models.optimizations.recompute import Recompute, recompute_activations
from thresher.reference.scorers import LiveReference, Reference
from thresher.training.lr_schedule import LRSchedule
from thresher.training.records import SkippedStep
from thresher.training.trainer import RankTrainer

CPU = torch.device("cpu")
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
BETA = 0.1
GAMMA = 0.5
NUM_PAIRS, PAIRS_PER_STEP, NUM_STEPS = 30, 10, 3
LEARNING_RATE = 1e-3
LAYOUTS: dict[str, Layout] = {
    "shared": PackedLayout(shares_prompt=True),
    "packed": PackedLayout(shares_prompt=False),
    "padded": PaddedLayout(pad_id=0),
    "shared, varlen": PackedLayout(shares_prompt=True, uses_varlen=True),
}
LOSSES_WITH_REFERENCE = ("sigmoid", "ipo", "aot", "kto", "plackett_luce")
LOSS_PARAMETERS = {
    "sigmoid": {"beta": BETA},
    "ipo": {"beta": BETA},
    "simpo": {"beta": BETA, "gamma": GAMMA},
    "orpo": {},
    "aot": {"beta": BETA},
    "kto": {"beta": BETA, "undesirable_weight": 1.5},
    "plackett_luce": {"beta": BETA},
    "bradley_terry": {"center_rewards_coefficient": 0.01},
}
# metrics that depend on the clock and the machine
_NOT_REPEATABLE = ("time/", "memory/", "pairs_per_second", "useful_tokens_per_second")


@dataclass(frozen=True)
class Case:
    """What is trained, on which mesh.

    also: what a case covers beside its axes, layout, loss and architecture; text of the table in the docs.
    tokens_at_once: tokens per micro-batch over all data ranks, few enough for several micro-batches per step.
    nonfinite_pair: id of the pair whose reference logps are NaN.
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
    recompute: Recompute = "off"
    offloads_activations: bool = False
    nonfinite_pair: int | None = None
    virtual_pp_size: int = 1
    zero_stage: int = 3
    sequence_parallel: bool = False
    reduce_dtype: str = "fp32"
    pp_schedule: str = "1f1b"
    pp_dtype: str = "fp32"
    router_loss_coef: float = 0.0
    frozen: tuple[str, ...] = ()
    compiles: bool = False
    counts_zeros: bool = False
    initial_loss_scale: float = 2.0**16
    optim: str = "adamw"
    param_groups: tuple[tuple[str, float], ...] = ()  # names and ratios of learning rates
    lora_rank: int | None = None
    lora_target: tuple[str, ...] = ("all-linear",)
    lora_options: tuple[tuple[str, Any], ...] = ()
    engine: TestedEngine | None = None  # None: the native one

    def __str__(self) -> str:
        """A name for `pytest -k`."""
        where = mesh_text(self.sizes) if self.engine is None else f"{self.engine} {self.sizes.num_processes}"
        parts = (where, self.layout, self.loss, self.family, self.also)
        return "-".join(filter(None, parts)).replace(" ", "_")

    @property
    def case_values(self) -> dict[str, str]:
        """What CI must run at least once (tests/support/ci_cases.py)."""
        mesh = mesh_text(self.sizes)
        return {
            "mesh": mesh,
            "mesh, layout": f"{mesh}, {self.layout}",
            "loss": self.loss,
            "family": self.family,
            "also, family": f"{self.also}, {self.family}" if self.also else "",
            "dtype": str(self.dtype),
            "engine": str(self.engine),
        }

    @property
    def is_reward_model(self) -> bool:
        return self.loss == "bradley_terry"

    @property
    def rows(self) -> Layout:
        """The layout of the policy's rows."""
        layout = replace(LAYOUTS[self.layout], scored="end") if self.is_reward_model else LAYOUTS[self.layout]
        return with_ends(layout) if self.router_loss_coef else layout

    @property
    def num_processes(self) -> int:
        return self.sizes.num_processes

    @property
    def num_layers(self) -> int:
        """A layer like all others and the last one, which skips unscored rows; pipelines need one per stage."""
        return 4 if self.sizes.pp > 1 else 2

    @property
    def plan(self) -> Plan:
        kind = VisitPlan if self.loss == "kto" else Plan
        return kind(NUM_PAIRS, seed=3, pairs_per_step=self.pairs_per_step, num_steps=NUM_STEPS)

    @property
    def trained(self) -> TrainedParts:
        lora = (
            None
            if self.lora_rank is None
            else LoraSettings(self.lora_rank, None, self.lora_target, **dict(self.lora_options))
        )
        return TrainedParts(lora=lora, frozen_prefixes=self.frozen)

    @property
    def training(self) -> TrainingArgs:
        return TrainingArgs(
            learning_rate=LEARNING_RATE,
            optim=self.optim,
            # near-zero gradients would be divided by their own rounding
            optim_args={"eps": 1e-5} if self.optim == "rmsprop" else {},
            **({} if self.optim in ("rmsprop", "sgd", "adafactor") else {"adam_epsilon": 1e-5}),
            **({"lr_scheduler_type": "constant"} if self.optim == "schedule_free_adamw" else {}),
            param_groups=[{"match": match, "lr_ratio": ratio} for match, ratio in self.param_groups],
            max_grad_norm=self.max_grad_norm,
            log_num_zeros_in_grad=self.counts_zeros,
            initial_scale_power=int(math.log2(self.initial_loss_scale)),
            gradient_checkpointing=self.recompute,
            activation_offload=self.offloads_activations,
        )

    @property
    def model_args(self) -> ModelArgs:
        return ModelArgs(moe_aux_loss_coef=self.router_loss_coef)

    @property
    def settings(self) -> FSDP2Settings:
        """The native engine's."""
        return FSDP2Settings(
            tp_size=self.sizes.tp,
            pp_size=self.sizes.pp,
            cp_size=self.sizes.cp,
            dp_replicate=self.sizes.dp_replicate,
            ep_size=self.sizes.ep,
            virtual_pp_size=self.virtual_pp_size,
            zero_stage=self.zero_stage,
            sequence_parallel=self.sequence_parallel,
            reduce_dtype=self.reduce_dtype,
            pp_schedule=self.pp_schedule,
            pp_dtype=self.pp_dtype,
        )


class TestedEngine(Protocol):
    """Builds the models of a case on this rank; str: for the name of the case."""

    def policy(self, case: Case, path: Path) -> Any: ...

    def reference(self, case: Case, path: Path) -> Any: ...

    def full_weights(self, policy: Any) -> dict[str, Tensor]:
        """The trained weights of a policy."""
        ...

    def frozen_weights(self, policy: Any) -> dict[str, Tensor]: ...


class NativeEngine:
    """The native engine on the mesh of a case."""

    def policy(self, case: Case, path: Path) -> TrainEngine:
        return make_policy(case, *load_parallel(case, path, case.trained, is_reward_model=case.is_reward_model))

    def reference(self, case: Case, path: Path) -> Engine:
        return make_reference(case, *load_parallel(case, path))

    def full_weights(self, policy: TrainEngine) -> dict[str, Tensor]:
        return {name: gather_full(weight) for name, weight in policy.weights().items()}

    def frozen_weights(self, policy: TrainEngine) -> dict[str, Tensor]:
        return {name: gather_full(each) for name, each in policy.model.named_parameters() if not each.requires_grad}


@dataclass(frozen=True)
class Outcome:
    """metrics: the logged metrics of each step, without time and memory. frozen_weights: before and after."""

    metrics: list[dict[str, float]]
    grad_norms: list[float]
    weights: dict[str, Tensor]
    skipped_steps: int = 0
    skipped: tuple[SkippedStep, ...] = ()
    frozen_weights: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)


def mesh_text(sizes: ParallelDims) -> str:
    """The mesh dimensions with more than one process, as in `dp_shard 2 x tp 2`."""
    split = [f"{dim} {size}" for dim, size in zip(MESH_DIMS, sizes.sizes, strict=True) if size > 1]
    if sizes.ep > 1:
        split.append(f"ep {sizes.ep}")
    return " x ".join(split) or "1 process"


def save_model(directory: Path, family: str, seed: int, num_layers: int = 4, **changes: Any) -> Path:
    """A model with enough layers and heads for every axis; large weights, so that its logits differ.

    changes: other values of its config.
    """
    torch.manual_seed(seed)
    config: PreTrainedConfig = copy.deepcopy({**FAMILIES, **STATEFUL}[family])
    config.num_hidden_layers = num_layers
    config.num_attention_heads, config.num_key_value_heads = 4, 4 if family == "llama" else 2
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[i % len(config.layer_types)] for i in range(num_layers)]
    config.initializer_range = 0.2
    for name, value in changes.items():
        setattr(config, name, value)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


def made_up_pairs(count: int, seed: int = 0) -> list[Example]:
    generator = np.random.default_rng(seed)

    def ids(low: int, high: int) -> np.ndarray:
        return generator.integers(3, 96, size=int(generator.integers(low, high))).astype(np.int32)

    return [Example.pair(ids(1, 12), ids(1, 10), ids(1, 10)) for _ in range(count)]


PAIRS = made_up_pairs(NUM_PAIRS)
# the first response of a pair is desirable or not; the lists have two to four responses
LABELLED = [replace(pair, responses=(pair.chosen._replace(value=float(at % 3 == 0)),)) for at, pair in enumerate(PAIRS)]
LISTS = [
    replace(pair, responses=tuple(each._replace(value=-float(rank)) for rank, each in enumerate(responses)))
    for at, (pair, other) in enumerate(zip(PAIRS, made_up_pairs(NUM_PAIRS, seed=1), strict=True))
    if (responses := (*pair.responses, *other.responses)[: 2 + at % 3])
]


def examples_of(case: Case) -> PairsInMemory | MismatchedAnswers:
    """The training set of a case, as its loss reads it."""
    if isinstance(case.plan, VisitPlan):
        return MismatchedAnswers(PairsInMemory(LABELLED), case.plan)
    return PairsInMemory(LISTS if case.loss == "plackett_luce" else PAIRS)


@cache
def mesh_of(sizes: ParallelDims) -> Mesh:
    """Make the groups of a mesh once per process: those of a hundred cases would be thousands of threads."""
    return Mesh.create(sizes, CPU)


def train_parallel(case: Case, policy_dir: Path, reference_dir: Path) -> Outcome:
    """Train on this rank; return the full weights."""
    engine = case.engine or NativeEngine()
    return _train(case, engine, engine.policy(case, policy_dir), engine.reference(case, reference_dir))


def train_replicated(case: Case, policy_dir: Path, reference_dir: Path) -> Outcome:
    """Train on this rank with a full copy of the model, as workers do whose number is dp_replicate."""
    dp_group = DataParallelGroup(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)
    parallel = ParallelContext(dp_group=dp_group)
    policy, reference = (load_model(str(path)) for path in (policy_dir, reference_dir))
    return _train(case, NativeEngine(), make_policy(case, policy, parallel), make_reference(case, reference, parallel))


def train_single_process(case: Case, policy_dir: Path, reference_dir: Path) -> Outcome:
    """Train with the native engine in one process."""
    policy = load_model(str(policy_dir), is_reward_model=case.is_reward_model)
    reference = load_model(str(reference_dir))
    module = case.trained.apply(policy)
    case.trained.init(policy, seed=0)
    return _train(
        case,
        NativeEngine(),
        make_policy(case, module, ParallelContext()),
        make_reference(case, reference, ParallelContext()),
    )


def score_parallel(case: Case, model_dir: Path) -> tuple[int, int, list[list[float]]]:
    """Score the pairs of this data-parallel rank; return rank, number of ranks, and the logps of each batch."""
    model, parallel = load_parallel(case, model_dir)
    rank, num_ranks = parallel.dp_group.rank, parallel.dp_group.size
    return rank, num_ranks, _scores(case, model, parallel, rank, num_ranks)


def score_single_process(case: Case, model_dir: Path, rank: int, num_ranks: int) -> list[list[float]]:
    return _scores(case, load_model(str(model_dir)), ParallelContext(), rank, num_ranks)


def _scores(
    case: Case, model: PreTrainedModel, parallel: ParallelContext, rank: int, num_ranks: int
) -> list[list[float]]:
    scorer = infer_engine(model, LAYOUTS[case.layout], case.dtype, parallel)
    pairs = PAIRS[rank::num_ranks]
    batches = [tuple(pairs[i : i + 3]) for i in range(0, len(pairs), 3)]
    scored = [scorer.score(ExampleBatch(np.arange(len(batch)), batch)) for batch in batches]
    return [torch.cat([sides.chosen.values, sides.rejected.values]).tolist() for sides in scored]


def leaves_rows_out(case: Case, model_dir: Path) -> bool:
    """Whether the last layer of a parallelized model computes only the scored rows."""
    model, parallel = load_parallel(case, model_dir)
    return infer_engine(model, LAYOUTS[case.layout], case.dtype, parallel).executor.model.skips_unscored_rows


def load_parallel(
    case: Case,
    path: Path,
    trained: TrainedParts = TrainedParts(),  # noqa: B008  # frozen
    *,
    is_reward_model: bool = False,
) -> tuple[torch.nn.Module, ParallelContext]:
    model = build_on_meta(str(path), dtype=torch.float32, is_reward_model=is_reward_model)
    module = trained.apply(model)
    parallel = parallelize(model, str(path), mesh_of(case.sizes), case.settings, case.dtype, CPU)
    trained.init(model, seed=0)
    return module, parallel


def _train(case: Case, engine: TestedEngine, policy: Any, reference: Any) -> Outcome:
    frozen_before = engine.frozen_weights(policy)
    trainer = make_trainer(policy, reference.score if case.loss in LOSSES_WITH_REFERENCE else None, case)
    metrics, norms, skipped = [], [], []
    for _, logged in trainer.run(NUM_STEPS):
        if isinstance(logged, SkippedStep):
            skipped.append(logged)
            continue
        metrics.append({name: value for name, value in logged.items() if not name.startswith(_NOT_REPEATABLE)})
        norms.append(trainer.state.grad_norm)
    weights = engine.full_weights(policy)
    frozen_after = engine.frozen_weights(policy)
    frozen_weights = {name: (before, frozen_after[name]) for name, before in frozen_before.items()}
    return Outcome(metrics, norms, weights, trainer.state.skipped_steps, tuple(skipped), frozen_weights)


def make_policy(case: Case, model: torch.nn.Module, parallel: ParallelContext) -> TrainEngine:
    recompute_activations(base_model(model), case.recompute, offload=case.offloads_activations)
    compilation = None
    if case.compiles:
        has_messages = max(case.sizes.pp, case.sizes.cp, case.sizes.tp) > 1
        keeps_parts = has_messages or case.recompute == "selective"
        compilation = Compilation("functions" if keeps_parts else "layers")
    return train_engine(
        model,
        case.rows,
        case.dtype,
        case.training,
        parallel,
        model_args=case.model_args,
        compilation=compilation,
    )


def make_reference(case: Case, model: torch.nn.Module, parallel: ParallelContext) -> Engine:
    return infer_engine(model.requires_grad_(False), LAYOUTS[case.layout], case.dtype, parallel)


def micro_batching_of(case: Case) -> MicroBatching:
    layout, num_ranks = LAYOUTS[case.layout], case.sizes.num_data_ranks
    max_tokens, max_pairs = case.tokens_at_once // num_ranks, max(1, 4 // num_ranks)
    limits = (max_tokens, None) if layout.needs_pair_attention else (None, max_pairs)
    costs = CostModel(attention_per_key=0.01, shares_prompt=layout.shares_prompt)
    return MicroBatching(examples_of(case).lengths, costs, *limits)


def make_trainer(
    policy: TrainEngine, reference: Callable[[ExampleBatch], ExampleLogps] | None, case: Case
) -> RankTrainer:
    def score(batch: ExampleBatch) -> ExampleLogps:
        assert reference is not None
        sides = reference(batch)
        is_nonfinite = torch.from_numpy(batch.pair_ids == case.nonfinite_pair).repeat_interleave(sides.chosen.lengths)
        values = sides.chosen.values.masked_fill(is_nonfinite, torch.nan)
        return ExampleLogps.of(replace(sides.chosen, values=values), *sides.sides[1:])

    unused = Path(tempfile.gettempdir()) / "unused"
    return RankTrainer(
        DPOConfig(output_dir=str(unused)),
        policy,
        objective_of(case.loss),
        case.plan,
        train=examples_of(case),
        validation=None,
        reference=Reference(None if reference is None else LiveReference(score, CPU)),
        micro_batching=micro_batching_of(case),
        eval_batching=ScoringBatching(max_tokens=4096, max_pairs=4),
        schedule=LRSchedule("constant", LEARNING_RATE, 0, NUM_STEPS),
        checkpoints=CheckpointManager(unused, 1, "eval/loss", False),
        identity={},
    )


def objective_of(loss: str) -> Objective:
    return Objective(terms=((make_losses([loss], LOSS_PARAMETERS[loss])[0], 1.0),), measures_entropy=True)


def gather_full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def train_oracle(case: Case, policy_dir: Path, reference_dir: Path) -> Outcome:
    """examples/minimal_dpo.py on the same pairs of each step."""
    oracle = minimal_dpo()
    load = {"dtype": torch.float32, "attn_implementation": "eager"}
    if case.is_reward_model:
        policy = AutoModelForSequenceClassification.from_pretrained(policy_dir, num_labels=1, **load).eval()
        torch.nn.init.zeros_(policy.score.weight)
        reference = policy
    else:
        policy, reference = (
            AutoModelForCausalLM.from_pretrained(path, **load).eval() for path in (policy_dir, reference_dir)
        )
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LEARNING_RATE, eps=1e-5, weight_decay=0.0)
    metrics, norms = [], []
    for step in range(NUM_STEPS):
        examples = examples_of(case).read(case.plan.pair_ids(step)).pairs
        ids = [(each.prompt_ids.tolist(), *(answer.ids.tolist() for answer in each.responses)) for each in examples]
        step_metrics = oracle.train_step(
            policy,
            reference,
            optimizer,
            ids,
            beta=BETA,
            max_grad_norm=case.max_grad_norm,
            losses=_oracle_losses(case.loss, examples, oracle),
            by=oracle.rewards if case.is_reward_model else oracle.response_logps,
        )
        norms.append(step_metrics.pop("grad_norm"))
        metrics.append(step_metrics)
    return Outcome(metrics, norms, {name: p.detach() for name, p in policy.named_parameters()})


def _oracle_losses(loss: str, examples: Sequence[Example], oracle: Any) -> Any:
    """The formulas of the papers over summed log-probabilities, without any code of thresher."""
    if loss == "kto":
        weights = (1.0, LOSS_PARAMETERS["kto"]["undesirable_weight"])
        good = torch.tensor([each.chosen.value == 1.0 for each in examples])
        return partial(oracle.kto_losses, good=good, weights=weights)
    if loss == "plackett_luce":
        return partial(oracle.list_losses, counts=[len(each.responses) for each in examples])
    chosen_length, rejected_length = (
        torch.tensor([len(each.responses[side].ids) for each in examples]) for side in range(2)
    )

    def bradley_terry(scores, _reference, _beta):
        center = LOSS_PARAMETERS["bradley_terry"]["center_rewards_coefficient"]
        return -F.logsigmoid(scores[0] - scores[1]) + center * (scores[0] + scores[1]) ** 2

    def ipo(policy, reference, beta):
        margin = (policy[0] - reference[0]) / chosen_length - (policy[1] - reference[1]) / rejected_length
        return (margin - 1 / (2 * beta)) ** 2

    def simpo(policy, _reference, beta):
        return -F.logsigmoid(beta * (policy[0] / chosen_length - policy[1] / rejected_length) - GAMMA)

    def orpo(policy, _reference, _beta):
        chosen, rejected = policy[0] / chosen_length, policy[1] / rejected_length
        log_odds = (chosen - rejected) - (torch.log1p(-chosen.exp()) - torch.log1p(-rejected.exp()))
        return -chosen - 0.1 * F.logsigmoid(log_odds)

    return {
        "sigmoid": oracle.dpo_losses,
        "ipo": ipo,
        "simpo": simpo,
        "orpo": orpo,
        "bradley_terry": bradley_terry,
    }[loss]
