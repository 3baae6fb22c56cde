"""Weights & Biases: online if an API key is configured, otherwise offline in `wandb/` in the run directory.

A resumed run keeps its id, stored in `wandb_run.json`. W&B's history is append-only, so steps that it already has are
not sent again. The command line, the code and the git remote are not collected, because they may contain secrets.
"""

import json
import logging
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from thresher.errors import UserError
from thresher.observability.trackers.tracker import RunInfo, Status, Table, import_tracker_library

logger = logging.getLogger(__name__)

WandbMode = Literal["auto", "online", "offline", "disabled"]


class WandbTracker:
    """Log to Weights & Biases, without interactive prompts."""

    name = "wandb"

    def __init__(
        self,
        *,
        project: str,
        entity: str | None = None,
        mode: WandbMode = "auto",
        api_key: str | None = None,
        name: str | None = None,
        notes: str | None = None,
        tags: Sequence[str] = (),
    ) -> None:
        self._library = import_tracker_library("wandb", "wandb")
        self._project = project
        self._entity = entity
        self._mode = mode
        self._api_key = api_key
        self._name = name
        self._notes = notes
        self._tags = tags
        self._run: Any = None
        self._state_path = Path()
        self._run_id = ""
        self._last_step = -1
        self._skip_through = -1

    def start(self, run: RunInfo, resume_step: int | None) -> None:
        """Create a run, or resume the one of this run directory."""
        self._state_path = run.run_dir / "wandb_run.json"
        has_state = resume_step is not None and self._state_path.exists()
        state: dict[str, Any] | None = json.loads(self._state_path.read_text()) if has_state else None
        self._run_id = state["id"] if state else secrets.token_hex(4)
        self._skip_through = self._last_step = state["complete_through"] if state else -1
        mode = self._choose_mode()
        self._run = self._library.init(
            project=self._project,
            entity=self._entity,
            name=self._name or run.exp_name,
            notes=self._notes,
            tags=list(self._tags),
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
        if mode in ("offline", "dryrun"):  # two names of one mode
            self._announce_offline()

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
        if mode in ("offline", "dryrun", "disabled"):
            return mode
        if self._library.login(key=self._api_key, prompt=False, verify=False):
            return "online"
        if mode == "online":
            raise UserError(
                "wandb mode is online, but no API key is configured; "
                "run `wandb login`, set WANDB_API_KEY, or use mode `offline`"
            )
        return "offline"

    def _announce_offline(self) -> None:
        is_chosen = self._mode == "offline" or os.environ.get("WANDB_MODE") in ("offline", "dryrun")
        logger.log(
            logging.INFO if is_chosen else logging.WARNING,
            "wandb: %sthis run is logged offline; upload it later with: wandb sync %s",
            "" if is_chosen else "no API key is configured, so ",
            Path(self._run.dir).parent,
        )

    def _write_state(self, complete_through: int) -> None:
        temporary = self._state_path.with_name(f".{self._state_path.name}.new")
        temporary.write_text(json.dumps({"id": self._run_id, "complete_through": complete_through}))
        temporary.replace(self._state_path)
