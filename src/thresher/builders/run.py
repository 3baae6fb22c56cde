"""What surrounds the training of a run: layout, checkpoints, trackers, and the lines that say what starts."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from thresher.checkpoint.json_io import load_json
from thresher.checkpoint.manager import CheckpointManager
from thresher.checkpoint.manifest import read_manifest
from thresher.config import DPOConfig
from thresher.config.stored import from_stored
from thresher.data.batching.balance import CostModel
from thresher.data.batching.micro_batches import MicroBatching
from thresher.data.batching.plan import Plan
from thresher.data.store.reader import PairStore
from thresher.errors import CheckpointError, RescaleRequested, RunStopped, UserError
from thresher.losses.objective import Objective
from thresher.models.layouts import Layout
from thresher.models.layouts.choose import choose_layout
from thresher.models.loading.load import load_model_config, load_tokenizer, set_pad_token
from thresher.observability.trackers.console import ConsoleTracker
from thresher.observability.trackers.factory import TrackerSettings, make_trackers
from thresher.observability.trackers.tracker import RunInfo, Trackers
from thresher.redact import redact
from thresher.training import preemption as stopping
from thresher.training.loop import LoopSettings
from thresher.training.skipped_steps import SkippedStepLog
from thresher.training.supervisor import Supervisor
from thresher.training.trainer import TrainerSettings

logger = logging.getLogger(__name__)

# large enough for matrix products to run at full speed, small enough for activations to stay small
DEFAULT_TOKENS_PER_MICRO_BATCH = 4096


def build_layout(config: DPOConfig) -> tuple[PreTrainedTokenizerBase, Layout]:
    """Load the tokenizer and choose how pairs lie in a batch."""
    if config.policy_path is None:
        raise UserError("no model is named; set pretrain to a model directory or a .gguf file")
    args = config.actor_train.model_args
    tokenizer = load_tokenizer(config.policy_path, trust_remote_code=args.trust_remote_code)
    pad_id = set_pad_token(tokenizer, args.pad_token, config.policy_path)
    attention = args.attn_implementation or config.reference.model_args.attn_implementation
    layout, note = choose_layout(config.layout, _families(config), attention, pad_id)
    if note is not None:
        logger.info("%s", note)
    return tokenizer, layout


def _families(config: DPOConfig) -> list[PreTrainedConfig]:
    """The families that must bear the layout: the policy's, and the reference's where it is another model."""
    trusted = {config.policy_path: config.actor_train.model_args.trust_remote_code}
    trusted.setdefault(config.reference_path, config.trusts_reference_code)
    return [load_model_config(path, trust_remote_code=trust) for path, trust in trusted.items() if path is not None]


def trainer_settings(config: DPOConfig) -> TrainerSettings:
    return TrainerSettings(
        pairs_per_eval_batch=config.actor_train.training_args.pairs_per_eval_batch,
        logging_steps=config.logging_steps,
        max_consecutive_skipped_steps=config.max_consecutive_skipped_steps,
        seed=config.seed,
        stop_file=stop_file(config),
        async_save=config.async_save,
    )


def stop_file(config: DPOConfig) -> Path:
    """Where a run is asked to stop; absolute, since workers may stand in another directory."""
    return Path(config.output_dir).resolve() / stopping.FILE_NAME


def logging_dir(config: DPOConfig) -> Path:
    """Where the metrics of a run lie, and what else is told of its course."""
    return Path(config.logging_dir or Path(config.output_dir) / "logs")


def loop_settings(config: DPOConfig) -> LoopSettings:
    return LoopSettings(eval_steps=config.eval_steps, save_steps=config.save_steps, eval_on_start=config.eval_on_start)


def build_micro_batching(config: DPOConfig, layout: Layout, train: PairStore, hidden_size: int) -> MicroBatching:
    """Cut steps by a token budget where rows are packed, by pairs where they are padded."""
    training = config.actor_train.training_args
    costs = CostModel(attention_per_key=1 / (6 * hidden_size), shares_prompt=layout.shares_prompt)
    if not layout.needs_pair_attention:
        pairs = training.per_device_train_batch_size
        return MicroBatching(train.lengths, costs, training.max_tokens_per_micro_batch, max_pairs=pairs)
    return MicroBatching(train.lengths, costs, training.max_tokens_per_micro_batch or DEFAULT_TOKENS_PER_MICRO_BATCH)


def build_checkpoint_manager(config: DPOConfig) -> CheckpointManager:
    return CheckpointManager(
        root=Path(config.output_dir) / "checkpoints",
        keep_last=config.save_total_limit,
        metric_for_best=config.metric_for_best_model,
        higher_is_better=config.greater_is_better,
    )


def find_checkpoint(config: DPOConfig) -> Path | None:
    """The checkpoint to go on from. Without a word on it, a run goes on that has this very config; none other."""
    checkpoints = build_checkpoint_manager(config)
    if config.resume_from_checkpoint is not None:
        return checkpoints.resume(config.resume_from_checkpoint)
    found = checkpoints.resume("auto")
    if found is not None and (changes := config_changes(found, config)):
        raise CheckpointError(
            f"{checkpoints.root} holds checkpoints of a run with other settings ({'; '.join(changes[:3])}); set "
            "another output_dir, or resume_from_checkpoint=auto to go on with the change"
        )
    return found


def build_supervisor(config: DPOConfig) -> Supervisor:
    checkpoints = build_checkpoint_manager(config)
    return Supervisor(
        config.max_restarts if config.uses_ray else 0,
        latest_checkpoint=lambda: checkpoints.resume("auto"),
        recovery_log=logging_dir(config) / "recoveries.jsonl",
    )


def build_tracking(config: DPOConfig, console: ConsoleTracker | None) -> Trackers:
    settings = TrackerSettings(**config.tracker_kwargs.model_dump())
    return make_trackers(config.track_with, settings, console=console)


@contextlib.contextmanager
def track(trackers: Trackers, config: DPOConfig, plan: Plan, *, resume_step: int | None) -> Iterator[SkippedStepLog]:
    """Open the trackers for the length of a run and tell them how it ended; give the record of skipped steps."""
    run = RunInfo(
        exp_name=config.exp_name,
        run_dir=logging_dir(config),
        config=redact(config.model_dump(mode="json")),
        total_steps=plan.num_steps,
        total_pairs=plan.num_visits,
    )
    trackers.start(run, resume_step)
    try:
        yield SkippedStepLog(run.run_dir, resume_step)
    except BaseException as error:
        is_asked = isinstance(error, (KeyboardInterrupt, RunStopped, RescaleRequested))
        with contextlib.suppress(UserError):  # a log that cannot be closed is not what ended the run
            trackers.close("interrupted" if is_asked else "failed")
        raise
    trackers.close("finished")


def config_changes(checkpoint: Path, config: DPOConfig) -> list[str]:
    """Say where a resumed run is set otherwise than the run that saved the checkpoint."""
    saved = load_json(checkpoint / "config.json")
    if not isinstance(saved, dict):
        raise CheckpointError(f"the config in {checkpoint} is none; resume from another checkpoint")
    then = _flat(from_stored(saved))
    now = _flat(redact(config.model_dump(mode="json")))
    free = _FREE_TO_CHANGE | (_ELASTIC if config.elastic else set())
    names = [name for name in now if name not in free and then.get(name) != now[name]]
    return [f"changed since the checkpoint: {name} was {then.get(name)}, is {now[name]}" for name in names]


_PLACES = {"output_dir", "logging_dir", "exp_name", "reference.cache_dir", "ray_address"}
_FREE_TO_CHANGE = {
    *_PLACES,
    "async_save",
    "graceful_stop_timeout",
    "heartbeat_timeout",
    "max_restarts",
    "resume_from_checkpoint",
}
_ELASTIC = {f"{role}.{key}" for role in ("actor_train", "reference") for key in ("num_workers", "device_mapping")} | {
    f"{role}.strategy_args.strategy_config.dp_replicate" for role in ("actor_train", "reference")
}


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat


def describe_run(objective: Objective, plan: Plan, mode: str, layout: str, place: str, checkpoint: Path | None) -> str:
    """One line on what is about to happen."""
    losses = " + ".join(f"{weight:g} x {loss}" for loss, weight in objective.terms)
    line = (
        f"{losses}; {plan.num_steps} steps of {plan.pairs_per_step} pairs = {plan.num_epochs:.3g} epochs of "
        f"{plan.num_pairs} pairs; reference: {mode}; layout: {layout}; on {place}"
    )
    if checkpoint is None:
        return line
    step = read_manifest(checkpoint).step
    if step >= plan.num_steps:
        return f"{line}; all steps are done already, as {checkpoint} shows; set another output_dir to train anew"
    return f"{line}; resuming from {checkpoint}"
