"""MLflow: an SQLite store `mlflow.db` in the run directory, or any tracking server.

A resumed run keeps its run id, stored in `mlflow_run.json`. MLflow cannot delete points, so points that it already has
are not sent again. SQLite, because MLflow's file store is deprecated and refuses to open.
"""

import json
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from thresher.observability.trackers.tracker import RunInfo, Status, Table, import_tracker_library

_STATUS = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
# limits of a `log_batch` call and of a parameter's length
_MAX_PARAMS = 100
_MAX_METRICS = 1000
_MAX_PARAM_CHARS = 6000


class MlflowTracker:
    """Log to MLflow through its client, which has no global state and collects nothing automatically."""

    name = "mlflow"

    def __init__(
        self,
        *,
        tracking_uri: str | None = None,
        name: str | None = None,
        notes: str | None = None,
        tags: Sequence[str] = (),
    ) -> None:
        # MLflow sends usage statistics by default, and reads this once, on import.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        self._library = import_tracker_library("mlflow", "mlflow")
        self._entities = import_tracker_library("mlflow.entities", "mlflow")
        # Creating the store logs every table, which would break the progress bar.
        logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)
        if tracking_uri is None:
            # mlflow-skinny needs these for an SQLite store, but does not depend on them.
            import_tracker_library("sqlalchemy", "mlflow")
            import_tracker_library("alembic", "mlflow")
        self._tracking_uri = tracking_uri
        self._name = name
        # MLflow shows this tag as the description of the run; its tags are pairs, so ours get an empty value
        self._tags = ({"mlflow.note.content": notes} if notes else {}) | dict.fromkeys(tags, "")
        self._client: Any = None
        self._run_id = ""
        self._present: set[tuple[str, int]] = set()

    def start(self, run: RunInfo, resume_step: int | None) -> None:
        """Create a run, or reopen the one of this run directory."""
        directory = run.run_dir.resolve()
        uri = self._tracking_uri or f"sqlite:///{directory / 'mlflow.db'}"
        self._client = self._library.MlflowClient(tracking_uri=uri)
        state_path = run.run_dir / "mlflow_run.json"
        if resume_step is not None and state_path.exists():
            self._run_id = json.loads(state_path.read_text())["run_id"]
            self._client.update_run(self._run_id, status="RUNNING")
            self._present = self._points_after(resume_step)
            return
        # Artifacts of a local store are saved beside it; a server has a default location.
        artifacts = (directory / "mlflow-artifacts").as_uri() if self._tracking_uri is None else None
        experiment = self._client.get_experiment_by_name(run.exp_name)
        experiment_id = (
            experiment.experiment_id
            if experiment is not None
            else self._client.create_experiment(run.exp_name, artifact_location=artifacts)
        )
        self._run_id = self._client.create_run(
            experiment_id, run_name=self._name or run.exp_name, tags=self._tags
        ).info.run_id
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

    def _points_after(self, step: int) -> set[tuple[str, int]]:
        names = self._client.get_run(self._run_id).data.metrics
        return {
            (name, point.step)
            for name in names
            for point in self._client.get_metric_history(self._run_id, name)
            if point.step > step
        }


def _flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)
