"""Runtime for a run in this process."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from thresher.builders.checked_engines import build_checked_policy
from thresher.builders.engines import device_of
from thresher.builders.inputs import RunInputs
from thresher.builders.precompute import ProgressCallback
from thresher.builders.reference import build_reference_bundle
from thresher.builders.run import logging_dir
from thresher.builders.trainer import build_trainer
from thresher.checkpoint.manifest import find_damage
from thresher.config import DPOConfig
from thresher.distributed.groups import SINGLE_PROCESS
from thresher.observability.details import DETAIL
from thresher.observability.run_log import WORKERS
from thresher.plan.budget import with_token_budget
from thresher.plan.hardware import Gpu, gpu_of
from thresher.runtime import RunHandle
from thresher.runtime.cuda_environment import prepare_cuda

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LocalRuntime:
    """Trains in this process, which is the only rank. find_gpu: returns the GPU of a device, None for a CPU."""

    config: DPOConfig
    find_gpu: Callable[[torch.device], Gpu | None] = gpu_of

    def find_damage(self, checkpoint: Path) -> list[str]:
        return find_damage(checkpoint, SINGLE_PROCESS)

    def start(self, inputs: RunInputs, checkpoint: Path | None, progress: ProgressCallback) -> RunHandle:
        """Load the models, check them on real pairs, and restore a checkpoint if there is one."""
        device = device_of(self.config.actor_train)
        for note in prepare_cuda(device, logging_dir(self.config).resolve() / WORKERS / "actor_train-nccl-"):
            logger.info("%s", note, extra=DETAIL)
        inputs = with_token_budget(self.config, inputs, checkpoint, lambda: self.find_gpu(device))
        checked = build_checked_policy(self.config, inputs)
        policy, inputs = checked.policy, checked.inputs
        reference = build_reference_bundle(self.config, inputs, policy, progress)
        bundle = build_trainer(self.config, inputs, policy, reference, checkpoint)
        return RunHandle(
            bundle.trainer,
            bundle.progress,
            reference.mode,
            inputs.layout.name,
            str(policy.device),
            policy.parameter_counts,
            (*checked.notes, *bundle.notes),
            bundle.begin,
            bundle.trainer,
            reference,
            inputs.max_tokens,
        )
