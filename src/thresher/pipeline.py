"""DPOPipeline: a run from config to final checkpoint, top to bottom, on one page."""

from __future__ import annotations

from collections.abc import Callable

from thresher.assembly.data import StoreBuilder, check_pairs, open_stores, probe_pairs
from thresher.assembly.engines import build_policy, check_engines
from thresher.assembly.objective import build_objective, build_schedule
from thresher.assembly.reference import build_reference_parts
from thresher.assembly.run import (
    build_checkpoints,
    build_layout,
    build_micro_batching,
    build_tracking,
    config_changes,
    describe_run,
    fit_settings,
    track,
)
from thresher.config import DPOConfig
from thresher.data.plan import make_plan
from thresher.data.prepare import prepare
from thresher.observe.console import ConsoleTracker
from thresher.observe.redact import redact
from thresher.reference.invariant import check_step_zero
from thresher.trainer import DPOTrainer, Split


class DPOPipeline:
    """One run in this process.

    announce takes lines for a person, progress takes (what, done, total), build_store prepares pairs that are not yet
    there, and console is where a person watches the training.
    """

    def __init__(
        self,
        config: DPOConfig,
        *,
        console: ConsoleTracker | None = None,
        announce: Callable[[str], None] = lambda line: None,
        progress: Callable[[str, int, int], None] = lambda what, done, total: None,
        build_store: StoreBuilder = prepare,
    ):
        self.config = config
        self._console = console
        self._announce = announce
        self._progress = progress
        self._build_store = build_store

    def run(self) -> dict[str, float]:
        """Prepare, train, evaluate, save; return the last evaluation."""
        config, announce = self.config, self._announce

        # what needs no model comes first: a mistake is told in seconds
        check_engines(config)
        objective = build_objective(config)
        trackers = build_tracking(config, self._console)
        checkpoints = build_checkpoints(config, announce)
        checkpoint = checkpoints.resume(config.resume_from_checkpoint)
        tokenizer, layout = build_layout(config, announce)
        train, validation = open_stores(config, tokenizer, announce, self._build_store)
        plan = make_plan(
            len(train),
            seed=config.seed,
            pairs_per_step=config.actor_train.training_args.pairs_per_rank,
            max_steps=config.max_steps,
            num_epochs=config.num_train_epochs,
        )

        policy = build_policy(config, layout)
        check_pairs(config, objective, policy.max_positions, [train, validation])
        probe = probe_pairs(train)
        policy.check_logps(probe)
        reference = build_reference_parts(
            config, objective, policy, layout, plan, train, validation, probe, self._progress, announce
        )
        trainer = DPOTrainer(
            strategy=policy,
            objective=objective,
            plan=plan,
            micro_batching=build_micro_batching(config, layout, train, policy.hidden_size),
            schedule=build_schedule(config, plan.num_steps),
            train=Split(train, reference.train),
            validation=None if validation is None else Split(validation, reference.validation),
            settings=fit_settings(config),
            checkpoints=checkpoints,
            trackers=trackers,
            identity={
                "data": train.digest,
                "pairs per step": plan.pairs_per_step,
                "seed": plan.seed,
                "reference": reference.digest,
            },
            config=redact(config.model_dump(mode="json")),
            extra=reference.synced,
        )
        for line in reference.notes:
            announce(line)
        if checkpoint is not None:
            for line in [*config_changes(checkpoint, config), *trainer.resume(checkpoint)]:
                announce(line)
        announce(describe_run(objective, plan, reference.mode, layout.name, policy.device, checkpoint))

        if trainer.state.step < plan.num_steps:
            reference.score_in_advance()
        if trainer.state.step == 0 and reference.equals_policy:
            check_step_zero(policy, trainer.first_micro_batch(), objective, config.actor_train.model_args.dtype)
        with track(trackers, config, plan, resume_step=None if checkpoint is None else trainer.state.step):
            return trainer.fit()
