"""The reference of a run: how its logps are scored, and which pairs the cache has and lacks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from thresher.builders.checked_engines import build_checked_reference
from thresher.builders.data import StoreBuilder, check_examples
from thresher.builders.engines import compilation, device_of, quantization_of
from thresher.builders.hardware import gpu_of
from thresher.builders.inputs import RunInputs, scoring_batching
from thresher.builders.reference_mode import (
    ReferenceMode,
    initial_adapter,
    merged_adapters,
    reference_has_workers,
    same_initial_weights,
)
from thresher.builders.token_budget import with_token_budget
from thresher.config import DPOConfig
from thresher.data.batching.mismatched import Examples
from thresher.data.batching.plan import PairSet
from thresher.distributed.groups import SINGLE_PROCESS, Group
from thresher.engines.engine import Engine, TrainEngine
from thresher.errors import UserError
from thresher.models.loading.load import load_model_config
from thresher.observability.heartbeat import set_activity
from thresher.reference.cache import ReferenceCache, cache_root
from thresher.reference.fingerprint import ReferenceFingerprint, config_digest, frozen_digest, model_digest
from thresher.reference.scorers import (
    Found,
    LiveReference,
    Precomputed,
    Reference,
    SyncedReference,
    precomputed,
)
from thresher.reference.step_zero_check import Forwards

logger = logging.getLogger(__name__)

ProgressCallback = Callable[[str, int, int], None]
FoundSplits = list[Found]  # in the training pairs, and in the validation pairs if there are any
ScoringProgress = tuple[str, int, int]  # split, blocks done, blocks of this rank
DEFAULT_PAIRS_PER_PADDED_BLOCK = 8
_PROGRESS_INTERVAL = 0.5  # seconds


def open_reference(inputs: RunInputs, policy: TrainEngine, found: FoundSplits | None = None) -> Reference:
    """Look up the logps in the cache, or load the model that scores them next to the policy; a collective call.

    found: what a process outside of the policy has found in the cache.
    """
    config, mode = inputs.config, inputs.mode
    same_weights = same_initial_weights(config)
    forwards = _live_forwards(config, policy.device)
    if mode == "none":
        return Reference()
    if mode == "precompute":
        splits = look_up(inputs, policy.device, group=policy.dp_group.world, found=found)
        has_workers = config.uses_ray and reference_has_workers(config, mode)
        # logps that the cache has may be of any mesh
        is_other = forwards == "other mesh" or has_workers or any(split.num_found for split in splits if split)
        return Reference(*splits, same_weights, "other mesh" if is_other else "other batches")
    if mode == "adapter":
        live = LiveReference(policy.score_base, policy.device)
        return Reference(live, live, True, forwards)
    reference = build_beside(inputs, policy)
    live = LiveReference(reference.score, policy.device)
    synced = None
    if config.reference.sync_steps is not None:
        shapes = [{name: each.shape for name, each in model.weights().items()} for model in (reference, policy)]
        if shapes[0] != shapes[1]:
            raise UserError(
                "reference.sync_steps needs a reference with the policy's parameter shapes; remove it or use the same "
                "model"
            )
        synced = SyncedReference(reference, policy, config.reference.sync_steps, config.reference.sync_alpha)
    return Reference(live, live, same_weights, forwards, synced)


def build_beside(inputs: RunInputs, policy: TrainEngine) -> Engine:
    """Build the reference in the policy's processes, sharded like it; alone in one process, by its own section."""
    config = inputs.config
    if not config.uses_ray and config.runtime != "torchrun":
        return build_checked_reference(inputs, device=None if config.reference.device_mapping else policy.device)
    # with the policy's role: a synced reference copies its weights from the policy's shards
    return build_checked_reference(inputs, device=policy.device, world=policy.dp_group.world, role=config.actor_train)


def look_up(
    inputs: RunInputs,
    device: torch.device,
    *,
    all_pairs: bool = False,
    group: Group = SINGLE_PROCESS,
    found: FoundSplits | None = None,
) -> tuple[Precomputed, Precomputed | None]:
    """Look up the training pairs that the run visits, or all of them, and all validation pairs.

    Args:
        group: the processes that make this call; rank 0 looks up and verifies for all of them.
        found: what a process outside of the group has found.
    """
    train, validation, plan = inputs.train_examples, inputs.validation_examples, inputs.plan
    cache = open_cache(inputs.config, str(inputs.frozen_weights))
    # about as many tokens at a time as the policy scores: matrix products in bf16 depend on the number of rows
    size = inputs.config.reference.infer_batch_size
    if size is None and not inputs.layout.needs_pair_attention:
        size = DEFAULT_PAIRS_PER_PADDED_BLOCK
    batching = scoring_batching(inputs, size)

    known = iter(found or ())

    def find(examples: Examples, visited: Callable[[], PairSet] | None, num_visits: int) -> Precomputed:
        return precomputed(
            cache,
            examples,
            visited,
            blocks_of=batching.blocks,
            device=device,
            num_visits=num_visits,
            group=group,
            found=next(known, None),
        )

    return (
        find(train, None if all_pairs else plan.visited_pairs, plan.num_visits),
        None if validation is None else find(validation, None, len(validation)),
    )


def score_missing(splits: Sequence[Precomputed], reference: Engine) -> Iterator[ScoringProgress]:
    """Score this rank's blocks that are missing in the cache; yield the progress now and then."""
    shown = -_PROGRESS_INTERVAL
    for what, split in zip(("training", "validation"), splits, strict=False):
        for done, total in split.iter_score_missing(reference.score, dp_group=reference.dp_group):
            set_activity(f"scoring {what} pairs, block {done + 1} of {total}")
            if done == total or time.monotonic() - shown > _PROGRESS_INTERVAL:
                shown = time.monotonic()
                yield what, done, total


def precompute_reference(
    config: DPOConfig,
    *,
    all_pairs: bool,
    progress: ProgressCallback,
    build_store: StoreBuilder,
) -> None:
    """Fill the reference cache: the training pairs that this run visits, or all of them, and all validation pairs."""
    inputs = RunInputs(config, build_store)
    if inputs.mode != "precompute":
        raise UserError(
            f"the reference mode of this run is {inputs.mode}, which reads no cache; set reference.mode=precompute, "
            "with a loss that needs a reference"
        )
    inputs.open()
    path = str(config.reference_path)
    model_config = load_model_config(path, trust_remote_code=config.trusts_reference_code)
    check_examples(config, inputs.objective, model_config, [inputs.train, inputs.validation])
    device = device_of(config.reference)
    inputs = with_token_budget(inputs, None, lambda: gpu_of(device))
    splits = [split for split in look_up(inputs, device, all_pairs=all_pairs) if split is not None]
    num_found = sum(split.num_found for split in splits)
    if any(split.num_missing for split in splits):
        for what, done, total in score_missing(splits, build_checked_reference(inputs, device=device)):
            progress(f"scoring the reference: {what} {inputs.train.unit}", done, total)
    log_scored(inputs, num_found, sum(split.num_scored for split in splits))


def log_scored(inputs: RunInputs, num_found: int, num_scored: int, scored_by: str = "") -> None:
    """Log how many pairs were cached and how many scored."""
    directory = open_cache(inputs.config, str(inputs.frozen_weights)).directory
    pairs = f"{num_found:,} {inputs.train.unit} from the cache, {num_scored:,} scored{scored_by}"
    logger.info("reference: %s; the cache is %s", pairs, directory)


def open_cache(config: DPOConfig, weights: str) -> ReferenceCache:
    """Open the cache of this config's reference; it may be empty."""
    model = str(config.reference_path)
    identity = ReferenceFingerprint(
        weights=weights,
        settings=config_digest(model, trust_remote_code=config.trusts_reference_code),
        dtype=config.reference_dtype,
        master_dtype=config.reference_master_dtype,
        scores_prompt=not config.apply_loss_mask,
        quantization=str(quantization_of(config.actor_train.model_args) or "") or False,
    )
    return ReferenceCache(cache_root(config.reference_cache_dir), identity, model)


def frozen_policy_digest(inputs: RunInputs) -> str | None:
    """Digest the files of the policy's weights that are not trained, which no checkpoint contains; None if all are."""
    config = inputs.config
    if not config.freezes_weights:
        return None
    is_known = inputs.mode == "none" or (same_initial_weights(config) and initial_adapter(config) is None)
    return inputs.frozen_weights if is_known else model_digest(str(config.policy_path), merged_adapters(config))


def reference_digest(config: DPOConfig, mode: ReferenceMode, weights: str | None) -> str:
    """Identify the frozen weights in their precision in memory, given the digest of their files."""
    args = config.actor_train.model_args
    dtype = args.master_dtype if mode == "none" else config.reference_master_dtype
    # an adapter that starts with a part of the weights belongs to other frozen weights
    held_in = [dtype, args.lora_init] if args.starts_from_weights else [dtype]
    held_in += [str(each) for each in (quantization_of(args),) if each is not None]
    return frozen_digest(weights, " ".join(held_in))


def _live_forwards(config: DPOConfig, device: torch.device) -> Forwards:
    """What policy and a reference in the same process have in common; both score the policy's micro-batches."""
    if config.reference.model_args.non_default("dtype", "master_dtype", "attn_implementation"):
        return "other mesh"
    if config.actor_train.model_args.starts_from_weights:
        return "other mesh"  # the sum of two products rounds differently
    # bitwise reproducible where this is tested: on CPUs, in layers that are not compiled
    is_tested = device.type == "cpu" and compilation(config, device, config.actor_train) is None
    return "same" if is_tested else "other batches"
