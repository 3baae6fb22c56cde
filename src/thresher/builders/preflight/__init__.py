"""Checks before any work: everything that can be known without a device, with all problems in one message.

`files` and `machine` import neither torch nor transformers, so a wrong path is reported within a second. If the files
are there, `checks` does the rest: it loads configs and tokenizers, and builds the policy without its weights.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from thresher.builders.preflight import files, machine
from thresher.config import DPOConfig

if TYPE_CHECKING:
    from thresher.builders.inputs import RunInputs


def check_files(config: DPOConfig) -> list[str]:
    """Raise the problems that need no torch: wrong paths and unknown trackers. Return warnings."""
    checks = (*files.SETTINGS, *files.PATHS, machine.check_locks, machine.check_here)
    return files.report(partial(check, config) for check in checks)


def check_run(config: DPOConfig, *, trains: bool = True) -> tuple[RunInputs, list[str]]:
    """Raise all problems of a run on this machine; return what was built to check it, and warnings.

    trains: false if the run only fills the reference cache.
    """
    warnings = check_files(config)

    from thresher.builders.inputs import RunInputs

    inputs = RunInputs(config)
    return inputs, warnings + check_inputs(inputs, trains=trains)


def check_inputs(inputs: RunInputs, *, trains: bool = True) -> list[str]:
    """Raise all other problems of a run whose files were checked. Return warnings."""
    from thresher.builders.checkpoints import check_resume
    from thresher.builders.preflight import checks

    of_config = [partial(check, inputs.config) for check in checks.SETTINGS]
    of_inputs = [partial(check, inputs) for check in (*checks.INPUTS, *(checks.TRAINING if trains else ()))]
    warnings = files.report([*of_config, *of_inputs])
    if trains:  # by itself: a typo above it is a changed setting too
        check_resume(inputs.config)
    return warnings


def check_submission(config: DPOConfig) -> list[str]:
    """Raise the problems of a job that are known without its files, models and devices. Return warnings."""
    from thresher.builders.preflight import checks

    return files.report(partial(check, config) for check in (*files.SETTINGS, *checks.SETTINGS))
