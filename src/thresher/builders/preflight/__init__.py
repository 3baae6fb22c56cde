"""Checks before any work: everything that can be known without a device, with all problems in one message.

`files` imports neither torch nor transformers, so that a wrong path is reported within a second. If the files are
there, `settings`, `models` and `resources` check the rest: they load configs and tokenizers, and build the policy
without its weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from thresher.builders.preflight import files
from thresher.builders.preflight.findings import report
from thresher.config import DPOConfig


@dataclass(frozen=True)
class RunCheck:
    """The result for a run without known problems; summary: lines that describe the run."""

    warnings: tuple[str, ...]
    summary: tuple[str, ...]


def check_files(config: DPOConfig) -> list[str]:
    """Raise the problems that need no torch: wrong paths and unknown trackers. Return warnings."""
    return report(partial(check, config) for check in (*files.SETTINGS, *files.PATHS))


def check_run(config: DPOConfig, *, trains: bool = True) -> RunCheck:
    """Raise all problems of a run on this machine. trains: false if it only fills the reference cache."""
    warnings = check_files(config)

    from rich import filesize

    from thresher.builders.preflight import models, resources, settings
    from thresher.builders.preflight.parts import RunParts

    parts = RunParts(config)
    of_parts = (*models.MODELS, *resources.DEVICES, *(resources.TRAINING if trains else ()))
    checks = [partial(check, config) for check in settings.SETTINGS] + [partial(check, parts) for check in of_parts]
    warnings += report(checks)
    if trains:  # by itself: a typo above it is a changed setting too
        report([partial(resources.check_run_directory, parts)])
    counts = parts.parameters
    summary = (
        f"policy: {parts.policy_path}, {counts.total:,} parameters, {counts.trained:,} of them trained",
        f"loss: {parts.objective.describe()}; reference: {parts.mode}; layout: {parts.layout.name}",
        f"checkpoints: about {filesize.decimal(resources.checkpoint_size(parts))} each, in {config.output_dir}",
    )
    return RunCheck(tuple(warnings), summary)


def check_submission(config: DPOConfig) -> list[str]:
    """Raise the problems of a job that are known without its files, models and devices. Return warnings."""
    from thresher.builders.preflight import settings

    return report(partial(check, config) for check in (*files.SETTINGS, *settings.SETTINGS))
