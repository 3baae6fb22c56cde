"""Fill the reference cache ahead of a run: what `thresher precompute-reference` does."""

from __future__ import annotations

import numpy as np

from thresher.builders.data import StoreBuilder, check_pairs, probe_pairs
from thresher.builders.engines import check_engines, device_of
from thresher.builders.inputs import open_inputs
from thresher.builders.objective import build_objective
from thresher.builders.precompute import ProgressCallback, plan_precompute
from thresher.builders.reference import reference_mode
from thresher.config import DPOConfig
from thresher.errors import UserError
from thresher.models.loading.load import load_model_config, max_positions
from thresher.reference.fingerprint import weights_digest


def precompute_reference(
    config: DPOConfig, *, every_pair: bool, progress: ProgressCallback, build_store: StoreBuilder
) -> None:
    """Score the pairs that the run of this config visits, or every training pair, and all held-out pairs."""
    check_engines(config)
    objective = build_objective(config)
    if (mode := reference_mode(config, objective)) != "precompute":
        raise UserError(
            f"the reference's mode is {mode} here, which reads no cache, so there is nothing to score ahead; set "
            "reference.mode=precompute, with a loss that needs a reference"
        )
    inputs = open_inputs(config, objective, build_store)
    train, validation = inputs.train, inputs.validation
    path = str(config.reference_path)
    family = load_model_config(path, trust_remote_code=config.trusts_reference_code)
    check_pairs(config, objective, max_positions(family), [train, validation])
    pair_ids = np.arange(len(train), dtype=np.int64) if every_pair else inputs.plan.visited_pairs()
    job = plan_precompute(
        config,
        inputs.layout,
        train,
        pair_ids,
        validation,
        probe_pairs(train),
        weights_digest(path),
        device_of(config.reference),
        num_visits=len(pair_ids),
        progress=progress,
    )
    job.run()
