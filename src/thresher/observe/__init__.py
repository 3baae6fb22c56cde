"""What a run tells the world: trackers, rates and memory; `thresher.redact` keeps secrets out of it."""

from thresher.observe.console import ConsoleTracker
from thresher.observe.jsonl import JsonlTracker, read_metrics
from thresher.observe.make import TRACKER_NAMES, TrackerSettings, make_trackers
from thresher.observe.memory import memory_metrics
from thresher.observe.tracker import RunInfo, Status, Tracker, Trackers

__all__ = [
    "TRACKER_NAMES",
    "ConsoleTracker",
    "JsonlTracker",
    "RunInfo",
    "Status",
    "Tracker",
    "TrackerSettings",
    "Trackers",
    "make_trackers",
    "memory_metrics",
    "read_metrics",
]
