"""Megatron-Core as an engine of the parity cases and of the runs that save."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from tests.support.engines.config_runs import config_of, world_of_pool
from tests.support.engines.parity import CPU, DTYPE_NAMES, LAYOUTS, NUM_STEPS, Case, make_trainer, mesh_text
from tests.support.engines.saved_runs import Run
from tests.support.megatron_cpu import use_cpu_as_cuda
from thresher.builders.engines import build_policy
from thresher.config.roles import TrainingArgs
from thresher.data.example import ExampleBatch
from thresher.distributed.groups import Group
from thresher.distributed.mesh import ParallelDims
from thresher.engines.megatron.declaration import MegatronSettings
from thresher.engines.spec import ModelSpec
from thresher.errors import CheckpointError
from thresher.models.forward_check import LayoutError
from thresher.models.layouts import Layout, ModelInputs, PackedLayout
from thresher.models.loading.adapters import AdapterFiles
from thresher.models.loading.trained import TrainedParts


@dataclass(frozen=True)
class MegatronEngine:
    """Axes of Megatron-Core, the data-parallel one as dp_replicate, and further settings."""

    sizes: ParallelDims
    settings: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return f"megatron {mesh_text(self.sizes)}"

    def policy(self, case: Case, path: Path) -> Any:
        return self._build_train(path, case.layout, case.dtype, case.training, case.trained, case)

    def reference(self, case: Case, path: Path) -> Any:
        """On the axes of the policy, which was built before."""
        from thresher.engines.megatron.build import build_infer

        return build_infer(self._spec(path, LAYOUTS[case.layout], case.dtype, case.virtual_pp_size))

    def policy_for_saving(self, run: Run, optimizer: TrainingArgs) -> Any:
        return self._build_train(run.model, "shared", torch.float32, optimizer, run.trained)

    def full_weights(self, policy: Any) -> dict[str, Tensor]:
        return _gather_full(policy, "weight")

    def frozen_weights(self, policy: Any) -> dict[str, Tensor]:
        frozen = [
            (chunk.weight_map.pieces, name, parameter.detach())
            for chunk in policy.executor.chunks
            for name, parameter in chunk.named_parameters()
            if not parameter.requires_grad
        ]
        return _join([piece for pieces, name, tensor in frozen for piece in pieces(name, tensor)])

    def full_moments(self, policy: Any) -> dict[str, Tensor]:
        """Moments and steps of all processes, gathered without checkpoint files."""
        found = {
            f"{key}/{name}": moment
            for key in ("exp_avg", "exp_avg_sq")
            for name, moment in _gather_full(policy, key).items()
        }
        steps = [(name, each.num_steps) for each in policy.checkpoint.states for name in each.shapes]
        known = {name: torch.tensor(step) for name, step in _gather_objects(steps) if step is not None}
        return found | {f"step/{name}": step for name, step in known.items()}

    def _build_train(
        self,
        path: Path,
        layout: str,
        dtype: torch.dtype,
        training: TrainingArgs,
        trained: TrainedParts,
        case: Case | None = None,
    ) -> Any:
        """Build a policy in this process, which may have had other axes before."""
        use_cpu_as_cuda()
        from thresher.engines.megatron.build import build_train
        from thresher.engines.megatron.parallel import destroy_groups

        destroy_groups()
        spec = self._spec(path, LAYOUTS[layout], dtype, 1 if case is None else case.virtual_pp_size)
        return build_train(replace(spec, training=training, trained=trained))

    def _spec(self, path: Path, layout: Layout, dtype: torch.dtype, virtual_pp_size: int) -> ModelSpec:
        settings = {
            "tp_size": self.sizes.tp,
            "pp_size": self.sizes.pp,
            "cp_size": self.sizes.cp,
            **({"virtual_pp_size": virtual_pp_size} if virtual_pp_size > 1 else {}),
            **dict(self.settings),
        }
        world = Group(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)
        return ModelSpec(
            path=str(path),
            dtype=DTYPE_NAMES[dtype],
            settings=MegatronSettings(**settings),
            world=world,
            device=CPU,
            find_layout=lambda: layout,
        )


def on_megatron(case: Case, **settings: Any) -> Case:
    """The same case on Megatron-Core."""
    return replace(case, engine=MegatronEngine(case.sizes, tuple(settings.items())))


def train_with_skipped_step(case: Case, policy_dir: Path, reference_dir: Path) -> list[tuple[bool, bool, float | None]]:
    """Per step: was it skipped, are all weights and moments bitwise those before it, and the loss scale after it."""
    engine: Any = case.engine
    policy, reference = engine.policy(case, policy_dir), engine.reference(case, reference_dir)
    trainer = make_trainer(policy, reference.score, case)
    steps = []
    for _ in range(NUM_STEPS):
        before = engine.full_weights(policy) | engine.full_moments(policy)
        trainer.training_step()
        after = engine.full_weights(policy) | engine.full_moments(policy)
        is_same = before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
        steps.append((trainer.skipped is not None, is_same, policy.loss_scale))
    return steps


def score_with_and_without_adapter(case: Case, path: Path, batch: ExampleBatch) -> tuple[Tensor, Tensor]:
    """Scores of a policy whose adapter was trained for some steps, and those of its base."""
    engine: Any = case.engine
    policy = engine.policy(case, path)
    trainer = make_trainer(policy, None, replace(case, loss="simpo"))
    for _ in range(NUM_STEPS):
        trainer.training_step()
    scored = [policy.score(batch), policy.score_base(batch)]
    return tuple(torch.cat([sides.chosen.values, sides.rejected.values]) for sides in scored)


def load_adapter(
    case: Case, path: Path, adapter_dir: Path, batch: ExampleBatch
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """The adapter on disk as a policy has it, and the scores of that policy and of a reference with this adapter."""
    from thresher.engines.megatron.build import build_infer

    engine: Any = case.engine
    adapter = AdapterFiles.find(str(adapter_dir))
    trained = TrainedParts(adapter=adapter)
    policy = engine._build_train(path, case.layout, case.dtype, case.training, trained, case)
    frozen = build_infer(replace(engine._spec(path, LAYOUTS[case.layout], case.dtype, 1), adapter=adapter))
    scored = [each.score(batch) for each in (policy, frozen)]
    ours, theirs = (torch.cat([sides.chosen.values, sides.rejected.values]) for sides in scored)
    return engine.full_weights(policy), ours, theirs


def check_logps(path: Path, axes: dict[str, int], layout: Layout, batch: ExampleBatch) -> str | None:
    """Build a policy from a config and run its start-up check; return its error."""
    use_cpu_as_cuda()
    from thresher.engines.megatron.parallel import destroy_groups

    destroy_groups()
    world = world_of_pool()
    config = config_of(path, world.size, axes, strategy="megatron_train")
    policy = build_policy(config, layout, device=CPU, world=world)
    try:
        policy.check_logps(batch)
    except LayoutError as error:
        return str(error)
    return None


@dataclass(frozen=True)
class ReversedPositions(PackedLayout):
    """Packed rows that are wrong in every layer."""

    def collate(self, batch: ExampleBatch) -> ModelInputs:
        inputs = super().collate(batch)
        inputs.model_inputs["position_ids"] = inputs.model_inputs["position_ids"].flip(1)
        return inputs


def saved_dtypes(case: Case, path: Path) -> tuple[set[str], dict[str, Tensor]]:
    """The dtypes in the files of a snapshot, as safetensors names them, and the full weights."""
    engine: Any = case.engine
    policy = engine.policy(case, path)
    write = policy.snapshot({})
    with tempfile.TemporaryDirectory() as directory:
        files = [Path(directory) / name for name in write(Path(directory)) if name.endswith(".safetensors")]
        opened = [safe_open(file, framework="pt") for file in files]
        dtypes = {file.get_slice(name).get_dtype() for file in opened for name in file.keys()}  # noqa: SIM118
    return dtypes, engine.full_weights(policy)


def load_and_write(case: Case, path: Path, checkpoint: Path, directory: Path) -> None:
    """Load a checkpoint and write it again."""
    engine: Any = case.engine
    policy = engine.policy(case, path)
    policy.load(checkpoint)
    policy.snapshot({})(directory)


def load_other_model(case: Case, path: Path, checkpoint: Path) -> tuple[str, bool]:
    """Load the checkpoint of another model; return the error, and whether the weights stayed the same."""
    engine: Any = case.engine
    policy = engine.policy(case, path)
    before = engine.full_weights(policy)
    message = "nothing"
    try:
        policy.load(checkpoint)
    except CheckpointError as error:
        message = str(error)
    after = engine.full_weights(policy)
    return message, all(torch.equal(before[name], after[name]) for name in before)


def _gather_full(policy: Any, key: str) -> dict[str, Tensor]:
    """Gather the weights or a moment of all processes by the names of transformers."""
    gathered = [(each, each.gather(key)) for each in policy.checkpoint.states]
    return _join([piece for each, whole in gathered if whole is not None for piece in each.pieces(whole)])


def _join(pieces: Sequence[Any]) -> dict[str, Tensor]:
    """Join the pieces of all processes."""
    local = [(piece.hf_name, piece.hf_shape, piece.slices, piece.values().clone()) for piece in pieces]
    full: dict[str, Tensor] = {}
    for name, shape, slices, values in _gather_objects(local):
        full.setdefault(name, torch.full(shape, torch.nan))[slices] = values
    return full


def _gather_objects(local: Sequence[Any]) -> list[Any]:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, local)
    return [each for of_rank in gathered for each in of_rank]
