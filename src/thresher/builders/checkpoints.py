"""The checkpoints of a run: where they and its logs are, which one to resume from, and which settings changed since."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic.fields import FieldInfo

from thresher import durable
from thresher.checkpoint.json_io import load_json
from thresher.checkpoint.manager import (
    READ_BY_DRIVER,
    CheckpointManager,
    DamagedCheckpoints,
    best,
    latest,
    list_checkpoints,
)
from thresher.checkpoint.manifest import MANIFEST_NAME, read_manifest
from thresher.checkpoint.save import step_of
from thresher.config import DPOConfig, parse_config
from thresher.config.section import Section, inner_section
from thresher.config.strategies import DEFAULT_TRAIN, find_strategy
from thresher.errors import CheckpointError, UserError
from thresher.observability.log_files import DESCRIPTION, LAUNCH
from thresher.redact import redact

_LOCATION_KEYS = {"output_dir", "logging_dir", "cache_dir", "exp_name", "reference.cache_dir", "ray_address"}
# settings that change no number of a run, and sections of such settings
_FREE_TO_CHANGE = {
    *_LOCATION_KEYS,
    "actor_train.data_args.preprocessing_num_workers",
    "async_save",
    "export_model",
    "graceful_stop_timeout",
    "greater_is_better",
    "health",
    "heartbeat_timeout",
    "ipo",  # pref_loss holds what the switches mean
    "logging_steps",
    "max_restarts",
    "profile",
    "reference.infer_batch_size",
    "reference.prefetch_steps",
    "resume_from_checkpoint",
    "runtime",
    "save_steps",
    "save_strategy",
    "save_total_limit",
    "simpo_loss",
    "spare_workers",  # a key of earlier versions
    "track_with",
    "tracker_kwargs",
}
_FREE_IF_ELASTIC = {
    f"{role}.{key}"
    for role in ("actor_train", "reference")
    for key in ("num_workers", "device_mapping", "strategy_args.strategy_config.dp_replicate")
}
# default of an earlier version, and the current one: a run that leaves the setting out has not changed it
_EARLIER_DEFAULTS = {"actor_train.training_args.torch_compile": (False, "auto")}


def _loss_weights(pref_loss: Any) -> Any:
    names = [pref_loss] if isinstance(pref_loss, str) else pref_loss
    return {str(name): 1.0 for name in names} if isinstance(names, list) else names


# settings with several spellings of one meaning
_MEANING: Mapping[str, Callable[[Any], Any]] = {
    "actor_train.num_workers": lambda value: value or 1,
    "actor_train.strategy_args.strategy_name": lambda value: value or DEFAULT_TRAIN,
    "pref_loss": _loss_weights,
}


# names and values in checkpoints of version 0.2, by the last part of the key
_NAMES_IN_0_2 = {
    "stop_deadline": "graceful_stop_timeout",
    "hang_timeout": "heartbeat_timeout",
    "max_skipped_steps": "max_consecutive_skipped_steps",
    "metric_for_best": "metric_for_best_model",
    "steps_ahead": "prefetch_steps",
    "pp_chunks": "virtual_pp_size",
}
_VALUES_IN_0_2: Mapping[str, Mapping[Any, str]] = {
    "gradient_checkpointing": {True: "full", False: "off"},
    "special_tokens_in_text": {"text": "keep_as_text", "refuse": "reject"},
}


def read_stored(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored config under the current names. Nothing is validated: it may be from a different version."""
    read = {}
    for key, value in values.items():
        name = _NAMES_IN_0_2.get(key, key)
        if isinstance(value, Mapping):
            value = read_stored(value)
        elif isinstance(value, bool | str):
            value = _VALUES_IN_0_2.get(name, {}).get(value, value)
        read[name] = value
    return read


def build_checkpoint_manager(config: DPOConfig) -> CheckpointManager:
    return CheckpointManager(
        root=Path(config.output_dir) / "checkpoints",
        keep_last=config.save_total_limit,
        metric_for_best=config.metric_for_best_model,
        higher_is_better=config.greater_is_better,
    )


def has_checkpoint(source: Path) -> bool:
    """Whether a path is the output_dir of a run, its checkpoints or one of them, though they may be damaged."""
    return (source / MANIFEST_NAME).is_file() or (source / "checkpoints").is_dir() or bool(list_checkpoints(source))


def checkpoint_at(source: Path, *, is_best: bool = False) -> Path:
    """Find the checkpoint that a path names, or the newest or best one of a run."""
    root = source / "checkpoints" if (source / "checkpoints").is_dir() else source
    checkpoint = source if (source / MANIFEST_NAME).is_file() else latest(root)
    if checkpoint is None:
        raise UserError(f"no valid checkpoint in {source}; give the output_dir of a run or a checkpoint")
    if is_best and checkpoint == source:
        raise UserError(f"{source} is a single checkpoint; --best needs the output_dir of a run")
    if is_best:
        try:
            config = read_stored(load_json(checkpoint / "config.json"))
            metric, greater = str(config["metric_for_best_model"]), bool(config["greater_is_better"])
        except (KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"the config in {checkpoint} does not say which checkpoint is best; leave --best out"
            ) from error
        checkpoint = best(root, metric, higher_is_better=greater)
        if checkpoint is None:
            raise UserError(f"no checkpoint in {source} was evaluated, so there is no best one; leave --best out")
    return checkpoint


def find_logs(checkpoint: Path, config: Mapping[str, Any]) -> Path | None:
    """Find the logs of a checkpoint's run: next to its checkpoints, else where its stored config puts them."""
    places = [checkpoint.resolve().parent.parent / "logs"]
    match config:
        case {"logging_dir": str(named)}:
            places.append(Path(named))
        case {"output_dir": str(named)}:
            places.append(Path(named) / "logs")
    return next((each for each in places if (each / DESCRIPTION).is_file()), None)


def find_checkpoint(config: DPOConfig, damaged: DamagedCheckpoints) -> Path | None:
    """Find the checkpoint to resume from; without resume_from_checkpoint, only a run with the same config resumes."""
    found = _find(config, partial(build_checkpoint_manager(config).find_to_resume, damaged=damaged))
    if job := _torchrun_job():
        with durable.translate_os_errors("could not write the logs"):
            config.log_dir.mkdir(parents=True, exist_ok=True)
            durable.replace(config.log_dir / LAUNCH, job.encode())
    return found


def continue_after_restart(config: DPOConfig) -> DPOConfig:
    """Return the config of a run that its launcher has restarted, which resumes from its own newest checkpoint.

    The first launch may have had to start from scratch, or from a checkpoint of a different run. If it was refused,
    the checkpoints are those of an earlier run, and it is refused again.
    """
    given, own = config.resume_from_checkpoint, list_checkpoints(build_checkpoint_manager(config).root)
    if not own or given in (None, "auto") or not _has_started(config):
        return config
    if isinstance(given, str) and read_manifest(Path(given)).step > (step_of(own[-1]) or 0):
        return config  # those of its own are older: of an earlier run
    return parse_config(config.model_dump(exclude_unset=True) | {"resume_from_checkpoint": "auto"})


def _has_started(config: DPOConfig) -> bool:
    """Whether an earlier launch of this torchrun job has found where to start."""
    try:
        return (config.log_dir / LAUNCH).read_text() == _torchrun_job()
    except OSError:
        return False


def _torchrun_job() -> str:
    """Return what only the launches of one torchrun share: its log directory. Its run id is "none" by default."""
    return os.environ.get("TORCHELASTIC_ERROR_FILE", "").rpartition("/attempt_")[0]  # DIRECTORY/attempt_0/RANK/...


def check_resume(config: DPOConfig) -> None:
    """Raise like `find_checkpoint`, but read no weights and leave the files of interrupted saves."""
    _find(config, partial(build_checkpoint_manager(config).look_up, digests=READ_BY_DRIVER))


def _find(config: DPOConfig, find: Callable[[Literal[False] | str], Path | None]) -> Path | None:
    if config.resume_from_checkpoint is not None:
        return find(config.resume_from_checkpoint)
    found = find("auto")
    if found is not None and (changes := config_changes(found, config)):
        more = f"; and {len(changes) - 3} more" if len(changes) > 3 else ""
        raise CheckpointError(
            f"{found.parent} contains checkpoints of a run with other settings (changed since the checkpoint: "
            f"{'; '.join(changes[:3])}{more}); set a different output_dir, or resume_from_checkpoint=auto to "
            "resume with the change"
        )
    return found


def config_changes(checkpoint: Path, config: DPOConfig) -> list[str]:
    """List the settings that have changed since the run that saved the checkpoint."""
    saved = load_json(checkpoint / "config.json")
    if not isinstance(saved, dict):
        raise CheckpointError(f"{checkpoint / 'config.json'} is not a config; resume from a different checkpoint")
    changes = changed_settings(saved, config)
    return [f"{name} was {_shown(old)}, is {_shown(new)}" for name, old, new in changes]


def _shown(value: Any) -> Any:
    return "not set" if value is None else value


def changed_settings(stored: Mapping[str, Any], config: DPOConfig) -> list[tuple[str, Any, Any]]:
    """Compare a config with one that was stored; return name, old and new value of each setting that changes a run."""
    free = _FREE_TO_CHANGE | (_FREE_IF_ELASTIC if config.elastic else set())
    new = redact(config.model_dump(mode="json"))
    return [
        (name, was, now)
        for name, was, now in _differences(read_stored(stored), new, DPOConfig)
        if not any(name == key or name.startswith(f"{key}.") for key in free)
        and (was, now) != _EARLIER_DEFAULTS.get(name)
    ]


def _differences(
    old: Mapping[str, Any], new: Mapping[str, Any], section: type[Section] | None, prefix: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, old and new value of each setting that differs; a key that one side lacks has its default there."""
    fields = {} if section is None else section.model_fields
    for key in dict.fromkeys((*new, *old)):
        name, inner = f"{prefix}{key}", _section_at(section, key, new)
        meaning = _MEANING.get(name, lambda value: value)
        was, now = (meaning(values.get(key, _default(fields.get(key)))) for values in (old, new))
        if isinstance(was, Mapping) and isinstance(now, Mapping):
            yield from _differences(was, now, inner, f"{name}.")
        elif was != now:
            yield name, _without_defaults(was, inner), _without_defaults(now, inner)


def _section_at(section: type[Section] | None, key: str, values: Mapping[str, Any]) -> type[Section] | None:
    """The section that a key of `values` holds; None for a plain value, or a strategy that is not installed here."""
    if section is None or key != "strategy_config":
        return None if section is None else inner_section(section, key)
    try:
        return find_strategy(values.get("strategy_name") or DEFAULT_TRAIN).settings
    except (ValueError, TypeError):  # TypeError: the name in a damaged file may be a list
        return None


def _default(field: FieldInfo | None) -> Any:
    """The default of a key; None for a key that this version does not know, or a mapping without fixed keys."""
    default = None if field is None else field.get_default(call_default_factory=True)
    return default.model_dump(mode="json") if isinstance(default, Section) else default


def _without_defaults(value: Any, section: type[Section] | None) -> Any:
    """Shorten a whole section for a message."""
    if section is None or not isinstance(value, Mapping):
        return value
    fields = section.model_fields
    return {key: each for key, each in value.items() if key not in fields or each != _default(fields[key])}
