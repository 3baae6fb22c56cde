"""What a run returns to Python: metrics under our names and TRL's, and transformers' state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from thresher.builders.checkpoints import build_checkpoint_manager
from thresher.checkpoint.json_io import load_json
from thresher.config import DPOConfig
from thresher.observability.log_files import DESCRIPTION, METRICS
from thresher.observability.trackers import jsonl
from thresher.observability.trackers.callbacks import name_in_trl, read_state

if TYPE_CHECKING:
    from transformers import TrainerState


class Metrics(dict[str, Any]):
    """Metrics under our names, also found under TRL's: `eval_loss` is `eval/loss`, `learning_rate` is `lr`."""

    def __missing__(self, name: str) -> Any:
        for key, value in self.items():
            if name_in_trl(key).replace("/", "_") == name.replace("/", "_"):
                return value
        raise KeyError(name)

    def get(self, name: str, default: Any = None) -> Any:
        """Return a metric, or the default."""
        try:
            return self[name]
        except KeyError:
            return default

    def __contains__(self, name: object) -> bool:
        missing = object()
        return isinstance(name, str) and self.get(name, missing) is not missing


@dataclass(frozen=True)
class TrainResult:
    """The end of a run: the last metrics of training and evaluation, its directory, and its checkpoints."""

    metrics: Metrics  #: the last metrics of training and evaluation
    run_dir: Path  #: output_dir
    checkpoint: Path | None  #: the newest checkpoint
    best_checkpoint: Path | None  #: the best checkpoint by metric_for_best_model
    global_step: int = 0  #: steps of the whole run
    training_loss: float = float("nan")  #: mean over its steps


def read_records(config: DPOConfig) -> list[dict[str, Any]]:
    """Read the metrics that a run has logged; none before it starts."""
    path = config.log_dir / METRICS
    return jsonl.read_metrics(path) if path.is_file() else []


def mean_loss(records: Sequence[dict[str, Any]]) -> float:
    """Average the loss over the steps of a run; a record holds the mean since the one before it."""
    total, last = 0.0, 0
    for record in (record for record in records if "loss" in record):
        total += float(record["loss"]) * (record["step"] - last)
        last = record["step"]
    return total / last if last else float("nan")


def trainer_state(config: DPOConfig, args: SimpleNamespace) -> TrainerState:
    """Rebuild transformers' TrainerState from the files of a run."""
    state = read_state(read_records(config), args)
    description = config.log_dir / DESCRIPTION
    state.max_steps = load_json(description)["num_steps"] if description.is_file() else state.global_step
    state.train_batch_size = config.actor_train.training_args.per_device_train_batch_size
    best = build_checkpoint_manager(config).best()
    state.best_model_checkpoint = None if best is None else str(best)
    return state
