"""DeepSpeed as an engine for the cases that other tests run on the native one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.engines import saved_runs
from tests.support.engines.parity import CPU, DTYPE_NAMES, LAYOUTS, Case
from thresher.config.roles import TrainingArgs
from thresher.distributed.groups import SINGLE_PROCESS, Group
from thresher.engines.deepspeed import build
from thresher.engines.deepspeed.declaration import DeepSpeedInferSettings, DeepSpeedTrainSettings, ZeroSettings
from thresher.engines.engine import TrainEngine
from thresher.engines.spec import ModelSpec
from thresher.models.layouts import Layout
from thresher.models.loading.trained import TrainedParts


@dataclass(frozen=True)
class Zero:
    """A ZeRO stage on all ranks. reduce_bucket_size is small, so that a step reduces several buckets.

    persists: elements up to which stage 3 keeps a parameter gathered; 0 partitions all of them. options: others of
    zero_optimization.
    """

    stage: int
    offloads_optimizer: bool = False
    offloads_param: bool = False
    persists: int = 0
    options: tuple[tuple[str, bool], ...] = ()

    def __str__(self) -> str:
        offloads = " offload" if self.offloads_optimizer or self.offloads_param else ""
        options = "".join(f" {name}={value}" for name, value in self.options)
        return f"zero {self.stage}{offloads}{options}"

    @property
    def settings(self) -> DeepSpeedTrainSettings:
        zero: dict[str, Any] = {"stage": self.stage, "reduce_bucket_size": 5000, "sub_group_size": 20_000}
        zero |= dict(self.options)
        if self.stage == 3:
            zero["stage3_param_persistence_threshold"] = self.persists
        return DeepSpeedTrainSettings(
            zero_optimization=zero, offload_optimizer=self.offloads_optimizer, offload_param=self.offloads_param
        )

    def policy(self, case: Case, path: Path) -> TrainEngine:
        settings = {"model_args": case.model_args, "is_reward_model": case.is_reward_model}
        return self._policy(path, case.rows, case.dtype, case.training, case.trained, **settings)

    def _policy(
        self,
        path: Path,
        layout: Layout,
        dtype: torch.dtype,
        training: TrainingArgs,
        trained: TrainedParts,
        **settings: Any,
    ) -> TrainEngine:
        spec = _spec(path, dtype, layout, self.settings)
        return build.build_train(replace(spec, training=training, trained=trained, **settings))

    def reference(self, case: Case, path: Path) -> Any:
        settings = DeepSpeedInferSettings(zero_stage=3 if self.stage == 3 else 0, offload_param=self.offloads_param)
        return build.build_infer(_spec(path, case.dtype, LAYOUTS[case.layout], settings))

    def policy_for_saving(self, run: saved_runs.Run, optimizer: TrainingArgs) -> TrainEngine:
        return self._policy(run.model, LAYOUTS["shared"], torch.float32, optimizer, run.trained)

    def full_weights(self, policy: TrainEngine) -> dict[str, Tensor]:
        return _joined({each.name: (each.shape, each.start, each.weight) for each in policy.parameters.partitions})

    def full_moments(self, policy: TrainEngine) -> dict[str, Tensor]:
        state = policy.parameters.optimizer.state
        found = {}
        for each in policy.parameters.partitions:
            for key, value in state[each.flat].items():
                part = (each.shape, each.start, each.in_flat(value)) if value.ndim else ((), 0, value.view(1))
                found[f"{key}/{each.name}"] = part
        return _joined(found)

    def frozen_weights(self, policy: TrainEngine) -> dict[str, Tensor]:
        frozen = {name: p for name, p in policy.model.named_parameters() if not p.requires_grad}
        if self.stage < 3:
            return {name: p.detach().clone() for name, p in frozen.items()}
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(frozen.values())):
            return {name: p.detach().clone() for name, p in frozen.items()}


def _joined(parts: dict[str, tuple[tuple[int, ...], int, Tensor]]) -> dict[str, Tensor]:
    """Put the parts of all ranks together, without the code of checkpoints."""
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, {name: (*position, values.clone()) for name, (*position, values) in parts.items()})
    full: dict[str, Tensor] = {}
    for parts_of_rank in by_rank:
        for name, (shape, start, values) in parts_of_rank.items():
            full.setdefault(name, torch.full(shape, torch.nan)).view(-1)[start : start + len(values)] = values
    return full


def _spec(path: Path, dtype: torch.dtype, layout: Layout, settings: ZeroSettings) -> ModelSpec:
    return ModelSpec(
        path=str(path),
        dtype=DTYPE_NAMES[dtype],
        settings=settings,
        world=_world(),
        device=CPU,
        find_layout=lambda: layout,
    )


def _world() -> Group:
    if not dist.is_initialized():
        return SINGLE_PROCESS
    return Group(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)
