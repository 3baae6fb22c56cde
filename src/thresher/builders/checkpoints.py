"""The checkpoints of a run: where they are, which one to resume from, and which settings changed since."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

from thresher.checkpoint.json_io import load_json
from thresher.checkpoint.manager import READ_BY_DRIVER, CheckpointManager
from thresher.checkpoint.retention import DamagedCheckpoints
from thresher.config import DPOConfig
from thresher.config.section import known_keys
from thresher.config.stored import from_stored
from thresher.errors import CheckpointError
from thresher.redact import redact

_LOCATION_KEYS = {"output_dir", "logging_dir", "cache_dir", "exp_name", "reference.cache_dir", "ray_address"}
_FREE_TO_CHANGE = {
    *_LOCATION_KEYS,
    "async_save",
    "graceful_stop_timeout",
    "greater_is_better",
    "health",
    "heartbeat_timeout",
    "max_restarts",
    "reference.infer_batch_size",
    "resume_from_checkpoint",
    "runtime",
    "spare_workers",
}
_FREE_IF_ELASTIC = {
    f"{role}.{key}"
    for role in ("actor_train", "reference")
    for key in ("num_workers", "device_mapping", "strategy_args.strategy_config.dp_replicate")
}
# values that an earlier version had chosen by default; a run that leaves the setting out has not changed it
_EARLIER_DEFAULTS = {"actor_train.training_args.torch_compile": False}
_DEFAULTS = {name: field.get_default(call_default_factory=True) for name, field in known_keys(DPOConfig)}


def build_checkpoint_manager(config: DPOConfig) -> CheckpointManager:
    return CheckpointManager(
        root=Path(config.output_dir) / "checkpoints",
        keep_last=config.save_total_limit,
        metric_for_best=config.metric_for_best_model,
        higher_is_better=config.greater_is_better,
    )


def find_checkpoint(config: DPOConfig, damaged: DamagedCheckpoints) -> Path | None:
    """Find the checkpoint to resume from; without resume_from_checkpoint, only a run with the same config resumes.

    damaged: checkpoints that the ranks have rejected.
    """
    return _find(config, partial(build_checkpoint_manager(config).find_to_resume, damaged=damaged))


def check_resume(config: DPOConfig) -> None:
    """Raise like `find_checkpoint`, but read no weights and leave the files of interrupted saves."""
    _find(config, partial(build_checkpoint_manager(config).look_up, digests=READ_BY_DRIVER))


def _find(config: DPOConfig, find: Callable[[Literal[False] | str], Path | None]) -> Path | None:
    if config.resume_from_checkpoint is not None:
        return find(config.resume_from_checkpoint)
    found = find("auto")
    if found is not None and (changes := config_changes(found, config)):
        raise CheckpointError(
            f"{found.parent} contains checkpoints of a run with other settings ({'; '.join(changes[:3])}); set "
            "another output_dir, or resume_from_checkpoint=auto to resume with the change"
        )
    return found


def config_changes(checkpoint: Path, config: DPOConfig) -> list[str]:
    """List the settings that differ from those of the run that saved the checkpoint."""
    saved = load_json(checkpoint / "config.json")
    if not isinstance(saved, dict):
        raise CheckpointError(f"{checkpoint / 'config.json'} is not a config; resume from another checkpoint")
    changes = changed_settings(saved, config)
    return [f"changed since the checkpoint: {name} was {old}, is {new}" for name, old, new in changes]


def changed_settings(stored: Mapping[str, Any], config: DPOConfig) -> list[tuple[str, Any, Any]]:
    """Compare a config with one that was stored; return name, old and new value of each setting that changes a run."""
    # a key that is newer than the stored config had the effect of its default
    old = _DEFAULTS | _flatten(from_stored(stored))
    new = _flatten(redact(config.model_dump(mode="json")))
    free = _FREE_TO_CHANGE | (_FREE_IF_ELASTIC if config.elastic else set())
    changed = [name for name in new if name not in free and old.get(name) != new[name]]
    return [(name, old.get(name), new[name]) for name in changed if not _was_left_out(name, old.get(name), new[name])]


def _was_left_out(name: str, old: Any, new: Any) -> bool:
    return name in _EARLIER_DEFAULTS and (old, new) == (_EARLIER_DEFAULTS[name], _DEFAULTS[name])


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flatten(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat
