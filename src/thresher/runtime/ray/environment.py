"""What Ray must find in the environment before it is imported."""

from __future__ import annotations

import os
import sys

_ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    # a worker without GPUs keeps its CUDA_VISIBLE_DEVICES, as Ray will do by itself one day
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
_OF_OUR_OWN = {
    # Ray's switch for systems without clusters: addresses are then 127.0.0.1 and its servers listen nowhere else
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # off: Ray would remember 100,000 calls for a dashboard that is not there, a few kilobytes for each step
    "RAY_task_events_report_interval_ms": "0",
    # Ray would have its workers give way to everything else on the machine; here they are the run
    "RAY_worker_niceness": "0",
}


def set_environment(address: str | None) -> None:
    """Tell Ray how to start, before it is imported: it reads this once. What a person has set stays."""
    if "ray" not in sys.modules:
        for name, value in (_ENVIRONMENT | ({} if address else _OF_OUR_OWN)).items():
            os.environ.setdefault(name, value)
