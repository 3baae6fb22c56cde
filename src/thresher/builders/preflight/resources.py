"""Checks of what a run needs of this machine: devices, disk space, packages, and a free run directory."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from rich import filesize

from thresher.builders.checkpoints import check_resume
from thresher.builders.preflight.files import existing_parent
from thresher.builders.preflight.findings import Finding, problems_of, warning
from thresher.builders.preflight.parts import RunParts
from thresher.builders.run import build_tracking
from thresher.checkpoint.manager import list_checkpoints
from thresher.models.layouts import VARLEN
from thresher.models.loading.load import DTYPES

_TENSORS_PER_PARAMETER = 3  # the weight and the two moments of AdamW


def check_devices(parts: RunParts) -> Iterator[Finding]:
    """Compare the roles with the GPUs of this machine; those of a cluster are checked when the run connects to it."""
    config, count = parts.config, torch.cuda.device_count()
    if config.ray_address is not None:
        return
    for section, role in (("actor_train", config.actor_train), ("reference", config.reference)):
        is_policy = section == "actor_train"
        # a strategy of the other role is another problem
        is_used = (role.strategy.build_train is not None) == is_policy and (is_policy or parts.loads_reference)
        if is_used and role.strategy.needs_gpu and not (count or role.device_mapping):
            other = "fsdp2_train" if is_policy else "hf_infer"
            yield Finding(
                f"{section}.strategy_args.strategy_name is {role.strategy_name}, which needs a GPU per worker, but "
                f"this machine has no CUDA device; use one with GPUs, or set it to {other}, which also runs on CPUs"
            )
        if config.runtime == "torchrun" and count:  # each rank finds its device on its own node
            continue
        if role.device_mapping and max(role.device_mapping) >= count:
            here = f"only devices 0 to {count - 1}" if count else "no CUDA device"
            yield Finding(
                f"{section}.device_mapping requests device {max(role.device_mapping)}, but this machine has {here}; "
                "use available devices, or remove device_mapping and set num_workers to run on CPUs"
            )


def check_compiler(parts: RunParts) -> Iterator[Finding]:
    """Warn if Triton, which compiles FlexAttention and compiled layers for a GPU, lacks the C compiler it calls."""
    config, policy = parts.config, parts.config.actor_train
    uses_gpu = torch.cuda.device_count() and (policy.device_mapping or not config.uses_ray)
    is_packed = parts.layout.needs_pair_attention and policy.model_args.attn_implementation != VARLEN
    if not uses_gpu or not (is_packed or policy.training_args.torch_compile):
        return
    if not any(map(shutil.which, (os.environ.get("CC", ""), "gcc", "clang"))):
        yield warning(
            "this machine has no C compiler, which Triton needs to compile GPU kernels; install gcc on every node, or "
            "set the environment variable CC to a compiler"
        )


def check_run_directory(parts: RunParts) -> Iterator[Finding]:
    yield from problems_of(check_resume, parts.config)


def check_tracker_packages(parts: RunParts) -> Iterator[Finding]:
    yield from problems_of(build_tracking, parts.config, None)


def check_disk_space(parts: RunParts) -> Iterator[Finding]:
    config, size = parts.config, checkpoint_size(parts)
    root = Path(config.output_dir) / "checkpoints"
    usage, num_existing = shutil.disk_usage(existing_parent(root)), len(list_checkpoints(root))
    if usage.total == 0:  # such as /proc
        yield Finding(f"{config.output_dir} is on a file system that cannot store files; set output_dir to another one")
        return
    free = usage.free
    # the best one is kept as well, and a new one is complete before an old one is deleted
    num_kept = config.save_total_limit + (config.validation is not None) + 1
    if config.save_strategy == "no":
        num_kept = 1
    elif config.max_steps is not None and config.save_strategy == "steps":
        num_kept = min(num_kept, -(-config.max_steps // (config.save_steps or config.max_steps)))
    num_new = max(1, num_kept - num_existing)
    needs = f"{config.output_dir} is on a disk with {filesize.decimal(free)} free"
    if size > free and not num_existing:
        yield Finding(
            f"{needs}, but a checkpoint takes about {filesize.decimal(size)}; free space, or set output_dir to another "
            "disk"
        )
    elif size * num_new > free:
        yield warning(
            f"{needs}, but the checkpoints to keep take about {filesize.decimal(size * num_new)} "
            f"({filesize.decimal(size)} each); lower save_total_limit, or set output_dir to another disk"
        )


def checkpoint_size(parts: RunParts) -> int:
    """Estimate the bytes of a checkpoint: trained weights and optimizer state, and a reference that moves."""
    counts = parts.parameters
    num_values = _TENSORS_PER_PARAMETER * counts.trained
    num_values += counts.total if parts.config.reference.sync_steps is not None else 0
    return num_values * DTYPES[parts.config.actor_train.model_args.master_dtype].itemsize


DEVICES = (check_devices, check_compiler)
TRAINING = (check_tracker_packages, check_disk_space)
