"""`apply_loss_mask: false` scores all tokens of prompt and response but the first, in every layout."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.models.test_packed_layouts import LATE, ODD, PACKED, PADDED, SHARED, gradient, score, values
from tests.support.compared_runs import merge
from tests.support.real_pairs import minimal_dpo
from tests.support.tiny_llama import save_tiny_llama
from tests.support.tiny_models import MIXED, tiny_model
from tests.support.tiny_run import build_run, noise_pairs
from thresher.builders.reference import open_cache
from thresher.config import parse_config
from thresher.data.example import Example, ExampleBatch
from thresher.models.forward_check import check_logps
from thresher.models.loading.load import disable_dropout, load_model
from thresher.models.logps import PairModel
from thresher.reference.fingerprint import ReferenceFingerprint

LAYOUTS = [dataclasses.replace(layout, scored="all") for layout in (SHARED, PACKED, PADDED)]
BATCHES = pytest.mark.parametrize("batch", [MIXED, ODD, LATE], ids=["mixed", "odd", "masks"])


@pytest.fixture(scope="module")
def model():
    model = tiny_model("llama").train()
    disable_dropout(model)
    return model


def with_one_prompt_token(batch: ExampleBatch) -> ExampleBatch:
    """The same sequences, of which all tokens but the first are the response."""

    def moved(pair: Example) -> Example:
        rest = pair.prompt_ids[1:]
        return Example.pair(
            pair.prompt_ids[:1], *(np.concatenate([rest, ids]) for ids in (pair.chosen.ids, pair.rejected.ids))
        )

    return ExampleBatch(batch.pair_ids, tuple(map(moved, batch.pairs)))


@BATCHES
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_the_tokens_of_the_prompt_count_for_both_sides(model, layout, batch):
    """As if the prompt were its first token; masks do not apply, and padding has no logps."""
    expected = with_one_prompt_token(batch)
    ours, theirs = score(model, layout, batch), score(model, PADDED, expected)
    torch.testing.assert_close(values(ours), values(theirs), atol=1e-5, rtol=1e-5)
    assert ours.chosen.lengths.tolist() == [len(p.prompt_ids) + len(p.chosen.ids) - 1 for p in batch.pairs]
    assert ours.rejected.lengths.tolist() == [len(p.prompt_ids) + len(p.rejected.ids) - 1 for p in batch.pairs]
    wanted = gradient(model, PADDED, expected)
    assert (gradient(model, layout, batch) - wanted).norm() <= 1e-5 * wanted.norm()


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_the_forward_check_knows_the_scored_tokens(layout):
    check_logps(PairModel.for_layout(tiny_model("llama"), torch.float32, layout), layout, MIXED)


def test_the_loss_is_the_formula_in_float64(tmp_path):
    """sigmoid_norm, -log sigmoid(beta * (mean log ratio of chosen - of rejected)), by the oracle's logps."""
    policy, reference = (save_tiny_llama(tmp_path / name, seed) for seed, name in enumerate(("policy", "reference")))
    pairs = noise_pairs(6)
    values = {
        "pretrain": str(policy),
        "output_dir": str(tmp_path / "out"),
        "pref_loss": "sigmoid_norm",
        "beta": 2.0,
        "apply_loss_mask": False,
        "actor_train": {"model_args": {"dtype": "fp32"}, "training_args": {"per_device_train_batch_size": 6}},
        "reference": {"model_args": {"model_name_or_path": str(reference)}},
    }
    loss = build_run(values, pairs).trainer.training_step()["loss"].mean

    def mean_logps(path):
        model, sides = load_model(str(path)).double(), ([], [])
        for pair in pairs.pairs:
            first, *rest = pair.prompt_ids.tolist()
            for side, ids in zip(sides, (pair.chosen.ids, pair.rejected.ids), strict=True):
                response = [*rest, *ids.tolist()]
                with torch.no_grad():
                    side.append(minimal_dpo().response_logps(model, [[first]], [response])[0].double() / len(response))
        return torch.stack(sides[0]), torch.stack(sides[1])

    (chosen, rejected), (ref_chosen, ref_rejected) = mean_logps(policy), mean_logps(reference)
    expected = -F.logsigmoid(2.0 * ((chosen - ref_chosen) - (rejected - ref_rejected))).mean().item()
    assert loss == pytest.approx(expected, abs=1e-6)
    masked = build_run(merge(values, {"apply_loss_mask": True}), pairs).trainer.training_step()["loss"].mean
    assert abs(loss - masked) > 1e-4


def test_cached_logps_of_responses_are_not_those_of_whole_sequences(tmp_path):
    values = {"pretrain": str(save_tiny_llama(tmp_path / "m", 0)), "cache_dir": str(tmp_path / "cache")}
    directories = {
        open_cache(parse_config({**values, "apply_loss_mask": applied}), "w").directory for applied in (True, False)
    }
    assert len(directories) == 2


def test_the_fingerprint_of_a_reference_that_scores_responses_is_that_of_earlier_versions():
    import hashlib
    import json

    content = {"scoring_version": 1, "weights": "w", "settings": "s", "dtype": "fp32", "master_dtype": "fp32"}
    expected = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    assert ReferenceFingerprint("w", "s", "fp32", "fp32").digest == expected
    assert ReferenceFingerprint("w", "s", "fp32", "fp32", scores_prompt=True).digest != expected
