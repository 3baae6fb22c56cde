"""Trackers of other libraries (TensorBoard, MLflow, Weights & Biases, Trackio), and all trackers by name."""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from thresher.errors import UserError, nearest
from thresher.observability.trackers.console import ConsoleTracker
from thresher.observability.trackers.jsonl import JsonlTracker
from thresher.observability.trackers.ray_metrics import RayMetricsTracker
from thresher.observability.trackers.tracker import RunInfo, Status, Table, Tracker, Trackers, rotate
from thresher.optional import load

logger = logging.getLogger(__name__)

# ASCII punctuation that TensorBoard could read as Markdown or HTML
_MARKUP = re.compile(r"[!-+/:-@\[-`{-~]")
_OFFLINE = ("offline", "dryrun")  # two names of one mode of wandb
WandbMode = Literal["auto", "online", "offline", "disabled"]


def _import_library(module: str, extra: str) -> ModuleType:
    """Import the library of a tracker."""
    return load(f"tracker {extra}", module, extra=extra, otherwise=f"leave {extra} out of track_with")


class TensorBoardTracker:
    """Event files of torch's SummaryWriter, in `tensorboard/` in the run directory or in a given directory."""

    name = "tensorboard"

    def __init__(self, *, tensorboard_dir: str | None = None) -> None:
        _import_library("tensorboard", "tensorboard")  # which torch does not require
        self._library = _import_library("torch.utils.tensorboard", "tensorboard")
        self._directory = tensorboard_dir
        self._writer: Any = None

    def start(self, run: RunInfo, resume_step: int | None) -> None:
        """Open a new event file; when resuming, one that hides the points after `resume_step`."""
        directory = Path(self._directory) / run.exp_name if self._directory else run.run_dir / "tensorboard"
        if resume_step is None:
            rotate(directory)
        purge_step = None if resume_step is None else resume_step + 1
        self._writer = self._library.SummaryWriter(str(directory), purge_step=purge_step)
        if resume_step is None:
            text = json.dumps(dict(run.config), indent=2, default=str)
            self._writer.add_text("config", "\n".join(f"    {line}" for line in text.splitlines()))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one scalar per metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, float(value), step)
        # A killed run loses unflushed points, and a resume would not log them again.
        self._writer.flush()

    def log_table(self, step: int, table: Table) -> None:
        """Write a table as Markdown, which the page of texts shows with a slider over steps."""
        lines = [table.columns, ["---"] * len(table.columns), *table.rows]
        text = "\n".join(f"| {' | '.join(_cell(value) for value in line)} |" for line in lines)
        self._writer.add_text(table.name, text, step)
        self._writer.flush()

    def close(self, status: Status) -> None:  # noqa: ARG002
        """Close the event file."""
        self._writer.close()


def _cell(value: str | float) -> str:
    """Write a value so that no character of it is Markdown, HTML or the end of the cell."""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    escaped = _MARKUP.sub(lambda match: f"&#{ord(match[0])};", text)
    return "<br>".join(escaped.splitlines())


_STATUS = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
# limits of a `log_batch` call and of a parameter's length
_MAX_PARAMS = 100
_MAX_METRICS = 1000
_MAX_PARAM_CHARS = 6000


class MlflowTracker:
    """An SQLite store `mlflow.db` in the run directory, or any tracking server.

    A resumed run keeps its run id, stored in `mlflow_run.json`. MLflow cannot delete points, so points that it already
    has are not sent again. SQLite, because MLflow's file store is deprecated and refuses to open. Its client has no
    global state and collects nothing automatically.
    """

    name = "mlflow"

    def __init__(
        self,
        *,
        mlflow_tracking_uri: str | None = None,
        name: str | None = None,
        notes: str | None = None,
        tags: Sequence[str] = (),
    ) -> None:
        # MLflow sends usage statistics by default, and reads this once, on import.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        self._library = _import_library("mlflow", "mlflow")
        self._entities = _import_library("mlflow.entities", "mlflow")
        # Creating the store logs every table, which would break the progress bar.
        logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)
        if mlflow_tracking_uri is None:
            # mlflow-skinny needs these for an SQLite store, but does not depend on them.
            _import_library("sqlalchemy", "mlflow")
            _import_library("alembic", "mlflow")
        self._tracking_uri = mlflow_tracking_uri
        self._name = name
        # MLflow shows this tag as the description of the run; its tags are pairs, so ours get an empty value
        self._tags = ({"mlflow.note.content": notes} if notes else {}) | dict.fromkeys(tags, "")
        self._client: Any = None
        self._run_id = ""
        self._present: set[tuple[str, int]] = set()

    def start(self, run: RunInfo, resume_step: int | None) -> None:
        """Create a run, or reopen the run directory's run."""
        directory = run.run_dir.resolve()
        uri = self._tracking_uri or f"sqlite:///{directory / 'mlflow.db'}"
        self._client = self._library.MlflowClient(tracking_uri=uri)
        state_path = run.run_dir / "mlflow_run.json"
        if resume_step is not None and state_path.exists():
            self._run_id = json.loads(state_path.read_text())["run_id"]
            self._client.update_run(self._run_id, status="RUNNING")
            self._present = {
                (name, point.step)
                for name in self._client.get_run(self._run_id).data.metrics
                for point in self._client.get_metric_history(self._run_id, name)
                if point.step > resume_step
            }
            return
        # Artifacts of a local store are saved next to it; a server has a default location.
        artifacts = (directory / "mlflow-artifacts").as_uri() if self._tracking_uri is None else None
        experiment = self._client.get_experiment_by_name(run.exp_name)
        if experiment is not None:
            experiment_id = experiment.experiment_id
        else:
            experiment_id = self._client.create_experiment(run.exp_name, artifact_location=artifacts)
        created = self._client.create_run(experiment_id, run_name=self._name or run.exp_name, tags=self._tags)
        self._run_id = created.info.run_id
        state_path.write_text(json.dumps({"run_id": self._run_id}))
        params = [self._entities.Param(k, v[:_MAX_PARAM_CHARS]) for k, v in _flatten(run.config)]
        for start in range(0, len(params), _MAX_PARAMS):
            self._client.log_batch(self._run_id, params=params[start : start + _MAX_PARAMS])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of a step that MLflow does not have yet."""
        now = int(time.time() * 1000)
        points = [
            self._entities.Metric(name, float(value), now, step)
            for name, value in metrics.items()
            if (name, step) not in self._present
        ]
        for start in range(0, len(points), _MAX_METRICS):
            self._client.log_batch(self._run_id, metrics=points[start : start + _MAX_METRICS])

    def log_table(self, step: int, table: Table) -> None:
        """Store a table as an artifact per step, in the form that MLflow's page shows as a table."""
        content = {"columns": list(table.columns), "data": [list(row) for row in table.rows]}
        self._client.log_dict(self._run_id, content, f"{table.name}/step-{step:08d}.json")

    def close(self, status: Status) -> None:
        """Set the run's final status."""
        self._client.set_terminated(self._run_id, _STATUS[status])


def _flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)


class WandbTracker:
    """Weights & Biases: online if an API key is configured, otherwise offline in `wandb/` in the run directory.

    A resumed run keeps its id, stored in `wandb_run.json`. W&B's history is append-only, so steps that it already has
    are not sent again. The command line, the code and the git remote are not collected, because they may contain
    secrets. There are no interactive prompts.
    """

    name = "wandb"

    def __init__(
        self,
        *,
        wandb_project: str = "thresher",
        wandb_entity: str | None = None,
        wandb_mode: WandbMode = "auto",
        wandb_api_key: str | None = None,
        name: str | None = None,
        notes: str | None = None,
        tags: Sequence[str] = (),
    ) -> None:
        # W&B sends its own errors to its makers by default, also from offline runs
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        self._library = _import_library("wandb", "wandb")
        self._mode, self._api_key, self._name = wandb_mode, wandb_api_key, name
        self._described = {"project": wandb_project, "entity": wandb_entity, "notes": notes, "tags": list(tags)}
        self._run: Any = None
        self._state_path = Path()
        self._run_id = ""
        self._last_step = -1
        self._skip_through = -1

    def start(self, run: RunInfo, resume_step: int | None) -> None:
        """Create a run, or resume the run directory's run."""
        self._state_path = run.run_dir / "wandb_run.json"
        has_state = resume_step is not None and self._state_path.exists()
        state: dict[str, Any] | None = json.loads(self._state_path.read_text()) if has_state else None
        self._run_id = state["id"] if state else secrets.token_hex(4)
        self._skip_through = self._last_step = state["complete_through"] if state else -1
        mode = self._choose_mode()
        self._run = self._library.init(
            **self._described,
            name=self._name or run.exp_name,
            id=self._run_id,
            resume="allow",
            mode=mode,
            dir=str(run.run_dir),
            config=dict(run.config),
            # a separate run, even if the calling program has an open one
            reinit="create_new",
            settings=self._library.Settings(
                silent=True,
                console="off",
                disable_git=True,
                disable_code=True,
                x_disable_meta=True,
                # seconds of data that a killed offline run loses; the default is 15
                x_transaction_log_flush_interval=0.1,
            ),
        )
        self._write_state(self._skip_through)
        if mode in _OFFLINE:
            is_chosen = self._mode == "offline" or os.environ.get("WANDB_MODE") in _OFFLINE
            logger.log(
                logging.INFO if is_chosen else logging.WARNING,
                "wandb: %sthis run is logged offline; upload it later with: wandb sync %s",
                "" if is_chosen else "no API key is configured, so ",
                Path(self._run.dir).parent,
            )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of a step, unless W&B has them from before a resume."""
        self._send(step, {name: float(value) for name, value in metrics.items()})

    def log_table(self, step: int, table: Table) -> None:
        """Send a table of a step, which the page of the run shows per step, unless W&B has it from before a resume."""
        rows = [list(row) for row in table.rows]
        # mixed: a log ratio that is not finite is a text
        self._send(step, {table.name: self._library.Table(list(table.columns), rows, allow_mixed_types=True)})

    def close(self, status: Status) -> None:
        """Finish the run."""
        self._run.finish(exit_code=0 if status == "finished" else 1)
        self._write_state(self._last_step)

    def _send(self, step: int, values: Mapping[str, Any]) -> None:
        if step <= self._skip_through or step < self._run.step:
            return
        if step > self._last_step:
            # W&B writes a step when the next one starts; until then it is not stored
            self._write_state(self._last_step)
            self._last_step = step
        self._run.log(dict(values), step=step)

    def _choose_mode(self) -> str:
        mode = os.environ.get("WANDB_MODE", "auto") if self._mode == "auto" else self._mode
        if mode in (*_OFFLINE, "disabled"):
            return mode
        if self._api_key:  # not as an argument of login, which would write it to .netrc
            os.environ["WANDB_API_KEY"] = self._api_key
        if self._library.login(prompt=False, verify=False):
            return "online"
        if mode == "online":
            raise UserError(
                "wandb mode is online, but no API key is configured; "
                "run `wandb login`, set WANDB_API_KEY, or use mode `offline`"
            )
        return "offline"

    def _write_state(self, complete_through: int) -> None:
        temporary = self._state_path.with_name(f".{self._state_path.name}.new")
        temporary.write_text(json.dumps({"id": self._run_id, "complete_through": complete_through}))
        temporary.replace(self._state_path)


class TrackioTracker:
    """Trackio's local database, which `trackio show` displays: $TRACKIO_DIR, else in the Hugging Face cache.

    A resumed run keeps its id, stored in `trackio_run.json`. Trackio cannot delete points, so values that it already
    has are not sent again. A thread of Trackio writes every half second: of a process that is killed, values that have
    not been written are missing if a checkpoint is newer than they are.

    `trackio.init` would print to stdout, measure the machine, end a run that the calling program has open, and take
    the run of the same name for the one to resume. Its class does none of this.
    """

    name = "trackio"

    def __init__(self, *, trackio_project: str = "thresher", name: str | None = None) -> None:
        self._library = _import_library("trackio", "trackio")
        try:
            self._library.SQLiteStorage.validate_project_name(trackio_project)
        except ValueError as error:
            raise UserError(f"tracker_kwargs.trackio_project: {error} Choose a different name.") from error
        self._project, self._name = trackio_project, name
        self._run: Any = None
        self._present: set[tuple[str, int]] = set()

    def start(self, run: RunInfo, resume_step: int | None) -> None:
        """Create a run, or continue the run directory's run."""
        for variable in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
            if os.environ.get(variable):
                logger.warning(
                    "trackio: %s has no effect: a run is logged on this machine; upload it later with: trackio sync "
                    "--project %s --space-id SPACE",
                    variable,
                    self._project,
                )
        state_path, run_id = run.run_dir / "trackio_run.json", secrets.token_hex(16)
        if resume_step is not None and state_path.exists():
            run_id = json.loads(state_path.read_text())["run_id"]
        name = self._name or run.exp_name
        rows = self._library.SQLiteStorage.get_logs(self._project, name, run_id=run_id)
        self._present = {(metric, row["step"]) for row in rows for metric in row}
        self._run = self._library.Run(
            url=None, project=self._project, client=None, name=name, run_id=run_id, config=dict(run.config)
        )
        state_path.write_text(json.dumps({"run_id": run_id}))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a step that Trackio does not have yet."""
        self._send(step, {name: float(value) for name, value in metrics.items()})

    def log_table(self, step: int, table: Table) -> None:
        """Log a table of a step, unless Trackio has it from before a resume."""
        self._send(step, {table.name: self._library.Table(list(table.columns), [list(row) for row in table.rows])})

    def close(self, status: Status) -> None:  # noqa: ARG002  # Trackio has none
        """Write what is queued."""
        with redirect_stdout(None):
            self._run.finish()

    def _send(self, step: int, values: Mapping[str, Any]) -> None:
        if new := {name: value for name, value in values.items() if (name, step) not in self._present}:
            self._run.log(new, step=step)


# by name: the class, and its settings
_LIBRARIES: Mapping[str, tuple[Callable[..., Tracker], tuple[str, ...]]] = {
    "tensorboard": (TensorBoardTracker, ("tensorboard_dir",)),
    "wandb": (
        WandbTracker,
        ("wandb_project", "wandb_entity", "wandb_mode", "wandb_api_key", "name", "notes", "tags"),
    ),
    "mlflow": (MlflowTracker, ("mlflow_tracking_uri", "name", "notes", "tags")),
    "trackio": (TrackioTracker, ("trackio_project", "name")),
}
_NAMES = ("console", *_LIBRARIES)


def make_trackers(
    names: Sequence[str],
    settings: Mapping[str, Any] | None = None,
    *,
    console: ConsoleTracker | None = None,
    callbacks: Tracker | None = None,
    exports_on_ray: bool = False,
) -> Trackers:
    """Create the named trackers and the local log, which is always on; `console` is the instance used for that name."""
    for name in names:
        check_name(name)
    settings, optional = settings or {}, list[Tracker]([RayMetricsTracker()] if exports_on_ray else [])
    for name in dict.fromkeys(names):
        if name == "console":
            optional.append(console or ConsoleTracker())
        elif name != "jsonl":
            library, keys = _LIBRARIES[name]
            optional.append(library(**{key: settings[key] for key in keys if key in settings}))
    return Trackers([JsonlTracker()], optional, callbacks)


def check_name(name: str) -> None:
    """Reject a tracker that does not exist."""
    if name not in (*_NAMES, "jsonl"):  # the local log, which is always on
        meant = nearest(name, _NAMES)
        hint = f"did you mean {meant}? " if meant else ""
        raise UserError(f"unknown tracker {name!r}; {hint}the trackers are {', '.join(_NAMES)}")
