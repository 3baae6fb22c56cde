"""Environment variables that Ray reads when it is imported."""

from __future__ import annotations

import os
import sys

_ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray would print a paragraph on stdout, even without log_to_driver; the run reports the death of its workers
    "RAY_DEDUP_LOGS_SKIP_REGEX": "A worker died or was killed while executing a task",
    # a worker without GPUs keeps its CUDA_VISIBLE_DEVICES, which is Ray's announced default
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
_LOCAL_CLUSTER_ENV = {
    # disables multi-node support: Ray uses 127.0.0.1, and its servers listen on loopback only
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # off: Ray would keep 100,000 task events for a dashboard that is not running, a few kilobytes per step
    "RAY_task_events_report_interval_ms": "0",
    # Ray lowers the priority of its workers by default; here they do the training
    "RAY_worker_niceness": "0",
}


def set_environment(address: str | None) -> None:
    """Set Ray's environment variables if Ray is not imported yet; variables that the user set are kept."""
    if "ray" not in sys.modules:
        for name, value in (_ENVIRONMENT | ({} if address else _LOCAL_CLUSTER_ENV)).items():
            os.environ.setdefault(name, value)
