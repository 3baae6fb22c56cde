"""Create trackers by name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from thresher.errors import UserError, nearest
from thresher.observability.trackers.console import ConsoleTracker
from thresher.observability.trackers.jsonl import JsonlTracker
from thresher.observability.trackers.mlflow import MlflowTracker
from thresher.observability.trackers.tensorboard import TensorBoardTracker
from thresher.observability.trackers.tracker import Tracker, Trackers
from thresher.observability.trackers.wandb import WandbMode, WandbTracker


@dataclass(frozen=True)
class TrackerSettings:
    """Settings of the trackers other than the local log."""

    wandb_project: str = "thresher"
    wandb_entity: str | None = None
    wandb_mode: WandbMode = "auto"
    wandb_api_key: str | None = None
    mlflow_tracking_uri: str | None = None
    tensorboard_dir: str | None = None
    name: str | None = None
    notes: str | None = None
    tags: Sequence[str] = ()


_FACTORIES: Mapping[str, Callable[[TrackerSettings, ConsoleTracker], Tracker]] = {
    "console": lambda _, console: console,
    "jsonl": lambda _, __: JsonlTracker(),
    "tensorboard": lambda settings, _: TensorBoardTracker(settings.tensorboard_dir),
    "wandb": lambda settings, _: WandbTracker(
        project=settings.wandb_project,
        entity=settings.wandb_entity,
        mode=settings.wandb_mode,
        api_key=settings.wandb_api_key,
        name=settings.name,
        notes=settings.notes,
        tags=settings.tags,
    ),
    "mlflow": lambda settings, _: MlflowTracker(
        tracking_uri=settings.mlflow_tracking_uri, name=settings.name, notes=settings.notes, tags=settings.tags
    ),
}


def make_trackers(
    names: Sequence[str],
    settings: TrackerSettings | None = None,
    *,
    console: ConsoleTracker | None = None,
    callbacks: Tracker | None = None,
) -> Trackers:
    """Create the named trackers and the local log, which is always on; `console` is the instance used for that name."""
    for name in names:
        check_name(name)
    settings = settings or TrackerSettings()
    console = console or ConsoleTracker()
    optional = [_FACTORIES[name](settings, console) for name in dict.fromkeys(names) if name != "jsonl"]
    return Trackers([JsonlTracker()], optional, callbacks)


def check_name(name: str) -> None:
    """Reject a tracker that does not exist."""
    if name not in _FACTORIES:
        meant = nearest(name, _FACTORIES)
        hint = f"did you mean {meant}? " if meant else ""
        raise UserError(f"unknown tracker {name!r}; {hint}the trackers are {', '.join(_FACTORIES)}")
