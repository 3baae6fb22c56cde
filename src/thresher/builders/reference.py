"""The reference of a run: its mode, the scorers of both data sets, and the digest of its weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from thresher.builders.checked_engines import build_checked_reference
from thresher.builders.data import StoreBuilder, check_pairs
from thresher.builders.engines import compilation, device_of
from thresher.builders.inputs import RunInputs, open_inputs
from thresher.builders.objective import build_objective
from thresher.builders.precompute import PrecomputeJob, ProgressCallback
from thresher.builders.reference_mode import initial_adapter, reference_mode, same_initial_weights
from thresher.config import DPOConfig
from thresher.errors import UserError
from thresher.models.loading.adapters import AdapterFiles
from thresher.models.loading.load import load_model_config
from thresher.reference.fingerprint import frozen_digest, weights_digest, with_adapter
from thresher.reference.modes import ReferenceMode
from thresher.reference.scorers import LiveReference
from thresher.reference.step_zero_check import Forwards
from thresher.reference.synced import SyncedReference
from thresher.strategies.strategy import InferStrategy, TrainStrategy
from thresher.training.trainer import ReferenceScorer


@dataclass(frozen=True)
class ReferenceBundle:
    """The reference as the trainer uses it.

    weights: see `frozen_weights_digest`. equals_policy holds at step 0, up to the rounding of different forwards.
    score_in_advance does the work of mode precompute; the caller runs it, so that a run that cannot start fails before
    hours of scoring.
    """

    mode: ReferenceMode
    train: ReferenceScorer | None
    validation: ReferenceScorer | None
    weights: str | None
    equals_policy: bool
    forwards: Forwards
    synced: SyncedReference | None = None
    score_in_advance: Callable[[], None] = lambda: None


def build_reference_bundle(
    config: DPOConfig,
    inputs: RunInputs,
    policy: TrainStrategy,
    progress: ProgressCallback = lambda what, done, total: None,
    *,
    device: torch.device | None = None,
    weights: str | None = None,
) -> ReferenceBundle:
    """Choose how the reference is scored, and load its model if it has one with pairs to score.

    device is where that model goes, the mapped one if absent; weights is the digest of the frozen weights, for
    callers that know it already.
    """
    mode = reference_mode(config, inputs.objective)
    same_weights = same_initial_weights(config)
    weights = weights or frozen_weights_digest(config, mode)
    forwards = _live_forwards(config, policy.device)
    if mode == "none":
        return ReferenceBundle(mode, None, None, weights, False, forwards)
    if mode == "precompute":
        job = PrecomputeJob(config, inputs, str(weights), policy.device, progress)
        if forwards != "other axes":
            forwards = "other axes" if job.num_found else "other batches"
        return ReferenceBundle(
            mode, job.train, job.validation, weights, same_weights, forwards, score_in_advance=job.run
        )
    if mode == "adapter":
        live = LiveReference(policy.score_base, policy.device)
        return ReferenceBundle(mode, live, live, weights, True, forwards)
    # beside the policy and sharded like it: a synced reference copies its weights from the policy's shards
    world = policy.dp_group.world
    role = config.actor_train if world.size > 1 else config.reference
    reference = build_checked_reference(config, inputs, device=device, world=world, role=role)
    live = LiveReference(reference.score, policy.device)
    synced = None
    if config.reference.sync_steps is not None:
        _check_sync(reference, policy)
        synced = SyncedReference(reference, policy, config.reference.sync_steps, config.reference.sync_alpha)
    return ReferenceBundle(mode, live, live, weights, same_weights, forwards, synced)


def precompute_reference(
    config: DPOConfig,
    *,
    all_pairs: bool,
    progress: ProgressCallback,
    build_store: StoreBuilder,
    choose_budget: Callable[[RunInputs, torch.device], RunInputs] = lambda inputs, device: inputs,
) -> None:
    """Fill the reference cache: the training pairs that this run visits, or all of them, and all validation pairs.

    choose_budget: sets the token budget for a device.
    """
    objective = build_objective(config)
    if (mode := reference_mode(config, objective)) != "precompute":
        raise UserError(
            f"the reference mode of this run is {mode}, which reads no cache; set reference.mode=precompute, with a "
            "loss that needs a reference"
        )
    inputs = open_inputs(config, objective, build_store)
    path = str(config.reference_path)
    model_config = load_model_config(path, trust_remote_code=config.trusts_reference_code)
    check_pairs(config, objective, model_config, [inputs.train, inputs.validation])
    device = device_of(config.reference)
    inputs = choose_budget(inputs, device)
    weights = str(frozen_weights_digest(config, mode))
    PrecomputeJob(config, inputs, weights, device, progress, all_pairs=all_pairs).run()


def frozen_weights_digest(config: DPOConfig, mode: ReferenceMode) -> str | None:
    """Digest the files of the weights that are not trained; None if all weights are trained."""
    if mode != "none":
        weights, adapter = weights_digest(str(config.reference_path)), initial_adapter(config)
        return weights if adapter is None else with_adapter(weights, AdapterFiles.find(adapter))
    # checkpoints do not contain what is not trained: a resumed run must recognize it, even if no loss compares with it
    return weights_digest(str(config.policy_path)) if config.freezes_weights else None


def frozen_policy_digest(config: DPOConfig, reference: ReferenceBundle) -> str | None:
    """Digest the files of the policy's weights that are not trained, which no checkpoint contains; None if all are."""
    if not config.freezes_weights:
        return None
    is_known = reference.mode == "none" or (same_initial_weights(config) and initial_adapter(config) is None)
    return reference.weights if is_known else weights_digest(str(config.policy_path))


def reference_digest(config: DPOConfig, mode: ReferenceMode, weights: str | None) -> str:
    """Identify the frozen weights in their precision in memory, given the digest of their files."""
    args = config.actor_train.model_args
    dtype = args.master_dtype if mode == "none" else config.reference_master_dtype
    # an adapter that starts with a part of the weights belongs to other frozen weights
    return frozen_digest(weights, f"{dtype} {args.lora_init}" if args.starts_from_weights else dtype)


def _live_forwards(config: DPOConfig, device: torch.device) -> Forwards:
    """What policy and a reference in the same process have in common; both score the policy's micro-batches."""
    if config.reference.model_args.non_default("dtype", "master_dtype", "attn_implementation"):
        return "other axes"
    if config.actor_train.model_args.starts_from_weights:
        return "other axes"  # the sum of two products rounds differently
    # bitwise reproducible where this is tested: on CPUs, in layers that are not compiled
    is_tested = device.type == "cpu" and compilation(config, device, config.actor_train) is None
    return "same" if is_tested else "other batches"


def _check_sync(reference: InferStrategy, policy: TrainStrategy) -> None:
    reference_shapes = {name: tensor.shape for name, tensor in reference.weights().items()}
    policy_shapes = {name: tensor.shape for name, tensor in policy.weights().items()}
    if reference_shapes != policy_shapes:
        raise UserError(
            "reference.sync_steps needs a reference with the policy's parameter shapes; remove it or use the same model"
        )
