"""Runs on any mesh that save, or resume from the checkpoint of another mesh."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from tests.support.engines import parity
from thresher.checkpoint.manager import CheckpointManager
from thresher.checkpoint.save import Write
from thresher.config import parse_config
from thresher.config.roles import TrainingArgs
from thresher.data.batching.batches import CostModel, MicroBatching, ScoringBatching
from thresher.data.batching.plan import Plan
from thresher.distributed.mesh import ParallelDims
from thresher.distributed.tensors import local_slices
from thresher.engines.engine import TrainEngine
from thresher.engines.native.build import train_engine
from thresher.engines.native.declaration import FSDP2Settings
from thresher.engines.native.parallelize import ParallelContext, parallelize
from thresher.errors import UserError
from thresher.models.loading.load_sharded import build_on_meta
from thresher.models.loading.trained import TrainedParts
from thresher.reference.scorers import Reference
from thresher.training.lr_schedule import LRSchedule
from thresher.training.trainer import RankTrainer

NUM_STEPS, SAVED_STEP = 5, 2
PLAN = Plan(parity.NUM_PAIRS, seed=3, pairs_per_step=parity.PAIRS_PER_STEP, num_steps=NUM_STEPS)
SUBSET = ("q_proj", "input_layernorm")


@dataclass(frozen=True)
class Run:
    """What to train, where its checkpoints go, and the checkpoint that it starts from."""

    model: Path
    root: Path
    sizes: ParallelDims | None = None  # None: one process without a mesh
    engine: SavedEngine | None = None  # None: the native one
    start: Path | None = None
    until: int = NUM_STEPS
    saves_at: tuple[int, ...] = ()
    is_subset: bool = False
    zero_stage: int = 3
    optim: str = "adamw"
    config: dict[str, Any] = field(default_factory=dict)
    trained: TrainedParts = field(default_factory=TrainedParts)


@dataclass(frozen=True)
class Result:
    """State of a rank at the end, with full weights and moments."""

    losses: list[float]
    weights: dict[str, Tensor]
    moments: dict[str, Tensor]
    random_states: list[Tensor]
    notes: list[str]


class SavedEngine(Protocol):
    """Builds a policy for checkpoints on this rank, and gathers its state."""

    def policy_for_saving(self, run: Run, optimizer: TrainingArgs) -> Any: ...

    def full_weights(self, policy: Any) -> dict[str, Tensor]: ...

    def full_moments(self, policy: Any) -> dict[str, Tensor]: ...


class NativeEngine:
    """The native engine on the mesh of a run, or in one process."""

    def policy_for_saving(self, run: Run, optimizer: TrainingArgs) -> TrainEngine:
        return _native_policy(run, optimizer)

    def full_weights(self, policy: TrainEngine) -> dict[str, Tensor]:
        return gathered(policy.weights())

    def full_moments(self, policy: TrainEngine) -> dict[str, Tensor]:
        return moments_of(policy)


def train(run: Run) -> Result:
    """Run on every rank."""
    engine = run.engine or NativeEngine()
    policy = build_policy(run)
    trainer = build_trainer(policy, run)
    torch.manual_seed(100 + policy.dp_group.world.rank)
    notes = [] if run.start is None else trainer.resume(run.start)
    losses, random_states = [], [torch.get_rng_state()]
    while trainer.state.step < run.until:
        torch.rand(policy.dp_group.world.rank + 1)  # every rank draws its own
        losses.append(trainer.training_step()["loss"].mean)
        if trainer.state.step in run.saves_at:
            random_states.append(torch.get_rng_state())
            trainer.save()
    trainer.wait_for_saves()
    return Result(losses, engine.full_weights(policy), engine.full_moments(policy), random_states, notes)


def build_policy(run: Run) -> Any:
    optimizer = TrainingArgs(
        learning_rate=parity.LEARNING_RATE,
        weight_decay=0.1,
        optim=run.optim,
        **({} if run.optim in ("rmsprop", "sgd") else {"adam_epsilon": 1e-5}),
        lr_scheduler_type="constant",
    )
    return (run.engine or NativeEngine()).policy_for_saving(run, optimizer)


def steps_on_given_gradients(run: Run) -> dict[str, Tensor]:
    """Update on this rank's slices of random gradients; return the full weights."""
    policy = build_policy(run)
    draw = torch.Generator().manual_seed(0)
    for _ in range(NUM_STEPS):
        with policy.within_step(None):
            for parameter in policy.parameters.by_name.values():
                gradient = torch.randn(parameter.shape, generator=draw)
                policy.parameters.shards[parameter].grad = gradient[local_slices(parameter)].clone()
            policy.parameters.update(parity.LEARNING_RATE)
    return gathered(policy.weights())


def loss_scales_of_a_resume(case: parity.Case, model: Path, directory: Path) -> tuple[dict[str, float], ...]:
    """Save after a step on this rank and load with the default scale; return the scale when saved, before and after."""
    policy = case.engine.policy(case, model)
    parity.make_trainer(policy, None, case).training_step()
    policy.snapshot({})(directory)
    saved = policy.scaler.state()
    dist.barrier()
    resumed = case.engine.policy(replace(case, initial_loss_scale=parity.Case.initial_loss_scale), model)
    before = resumed.scaler.state()
    resumed.load(directory)
    return saved, before, resumed.scaler.state()


def _native_policy(run: Run, optimizer: TrainingArgs) -> TrainEngine:
    if run.sizes is None:
        model = AutoModelForCausalLM.from_pretrained(run.model, dtype=torch.float32)
        module, parallel = run.trained.apply(model), ParallelContext()
    else:
        model = build_on_meta(str(run.model), dtype=torch.float32)
        module = run.trained.apply(model)
        if run.is_subset:
            freeze(model)
        mesh = parity.mesh_of(run.sizes)
        settings = FSDP2Settings(zero_stage=run.zero_stage)
        parallel = parallelize(model, str(run.model), mesh, settings, torch.float32, parity.CPU)
    run.trained.init(model, seed=0)
    if run.is_subset:
        freeze(model)
    return train_engine(module, parity.LAYOUTS["shared"], torch.float32, optimizer, parallel)


def freeze(model: torch.nn.Module) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(part in name for part in SUBSET))


def build_trainer(policy: TrainEngine, run: Run) -> RankTrainer:
    store = parity.PairsInMemory(parity.PAIRS)
    costs = CostModel(attention_per_key=0.01, shares_prompt=True)
    return RankTrainer(
        parse_config({"async_save": False, "output_dir": "unused", **run.config}),
        policy,
        parity.objective_of("simpo"),
        PLAN,
        train=store,
        validation=None,
        reference=Reference(),
        micro_batching=MicroBatching(store.lengths, costs, 60),
        eval_batching=ScoringBatching(max_tokens=4096, max_pairs=4),
        schedule=LRSchedule("constant", parity.LEARNING_RATE, 0, NUM_STEPS),
        checkpoints=CheckpointManager(run.root, 5, "eval/loss", False),
        identity={"data": "made up"},
    )


def gathered(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: parity.gather_full(tensor) for name, tensor in tensors.items()}


def moments_of(policy: TrainEngine) -> dict[str, Tensor]:
    """Gather the full moments with torch's collectives, independent of checkpoint files."""
    found: dict[str, Tensor] = {}
    for name, parameter in policy.parameters.by_name.items():
        shard = policy.parameters.shards[parameter]
        for key, value in policy.parameters.optimizer.state[shard].items():
            if not isinstance(value, Tensor):
                continue
            if isinstance(parameter, DTensor) and value.shape == shard.shape:
                value = DTensor.from_local(
                    value,
                    parameter.device_mesh,
                    parameter.placements,
                    run_check=False,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                )
            found[f"{key}/{name}"] = parity.gather_full(value)
    return found


def save_with_a_rank_that_cannot_write(run: Run) -> str:
    """Fail to write on the last rank; return the error that each rank gets."""
    policy = build_policy(run)
    trainer = build_trainer(policy, run)
    snapshot = policy.snapshot

    def failing_snapshot(*arguments: Any) -> Write:
        write = snapshot(*arguments)

        def fail_to_write(directory: Path) -> Sequence[str]:
            if dist.get_rank() == dist.get_world_size() - 1:
                raise OSError(errno.ENOSPC, "No space left on device")
            return write(directory)

        return fail_to_write

    policy.snapshot = failing_snapshot
    try:
        trainer.save()
        trainer.wait_for_saves()
    except UserError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def train_during_a_slow_save(run: Run) -> tuple[list[float], list[list[str]]]:
    """Block the writing thread of one rank for two more steps; return losses and published checkpoints."""
    policy = build_policy(run)
    trainer = build_trainer(policy, run)
    may_write = Event()
    snapshot = policy.snapshot

    def slow_snapshot(*arguments: Any) -> Write:
        write = snapshot(*arguments)

        def write_late(directory: Path) -> Sequence[str]:
            if policy.dp_group.world.rank == policy.dp_group.world.size - 1:
                may_write.wait(60)
            return write(directory)

        return write_late

    policy.snapshot = slow_snapshot
    losses = [trainer.training_step()["loss"].mean for _ in range(SAVED_STEP)]
    trainer.save()
    losses += [trainer.training_step()["loss"].mean for _ in range(2)]
    published = [_published(run.root)]
    may_write.set()
    trainer.wait_for_saves()
    published.append(_published(run.root))
    return losses, published


def _published(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if not path.name.startswith("."))
