"""Names to trackers."""

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from thresher.errors import UserError
from thresher.observability.trackers.console import ConsoleTracker
from thresher.observability.trackers.jsonl import JsonlTracker
from thresher.observability.trackers.mlflow import MlflowTracker
from thresher.observability.trackers.tensorboard import TensorBoardTracker
from thresher.observability.trackers.tracker import Tracker, Trackers
from thresher.observability.trackers.wandb import WandbMode, WandbTracker


@dataclass(frozen=True)
class TrackerSettings:
    """What the trackers beside the local log may be told."""

    wandb_project: str = "thresher"
    wandb_entity: str | None = None
    wandb_mode: WandbMode = "auto"
    mlflow_tracking_uri: str | None = None


_MAKERS: Mapping[str, Callable[[TrackerSettings, ConsoleTracker], Tracker]] = {
    "console": lambda _, console: console,
    "jsonl": lambda _, __: JsonlTracker(),
    "tensorboard": lambda _, __: TensorBoardTracker(),
    "wandb": lambda settings, _: WandbTracker(
        project=settings.wandb_project, entity=settings.wandb_entity, mode=settings.wandb_mode
    ),
    "mlflow": lambda settings, _: MlflowTracker(tracking_uri=settings.mlflow_tracking_uri),
}
TRACKER_NAMES = tuple(_MAKERS)


def make_trackers(
    names: Sequence[str], settings: TrackerSettings | None = None, *, console: ConsoleTracker | None = None
) -> Trackers:
    """Make the named trackers and the local log, which is always on; `console` is used where it is among the names."""
    settings = settings or TrackerSettings()
    console = console or ConsoleTracker()
    for name in names:
        _check(name)
    optional = [_MAKERS[name](settings, console) for name in dict.fromkeys(names) if name != "jsonl"]
    return Trackers([JsonlTracker()], optional)


def _check(name: str) -> None:
    if name in _MAKERS:
        return
    nearest = difflib.get_close_matches(name, _MAKERS, n=1)
    hint = f"did you mean {nearest[0]}? " if nearest else ""
    raise UserError(f"there is no tracker {name!r}; {hint}the trackers are {', '.join(_MAKERS)}")
