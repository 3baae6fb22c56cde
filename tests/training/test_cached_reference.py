"""Cached reference logps: what a later run reuses, what it must not, and that the numbers stay the same."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from tests.support.compared_runs import merge
from tests.support.tiny_llama import save_tiny_llama
from tests.support.tiny_models import replace_side
from tests.support.tiny_run import PairsInMemory, TinyRun, build_run, noise_pairs
from thresher.builders import checked_engines

PAIRS = 27
PLANNED = {"reference": {"mode": "precompute", "infer_batch_size": 4}}


@pytest.fixture
def forwards(monkeypatch) -> list[int]:
    """The rows of every forward of a precomputing reference, its start-up check included."""
    counted: list[int] = []
    build = checked_engines.build_reference

    def build_counting(config, layout, **place):
        reference = build(config, layout, **place)
        reference.executor.model.backbone.register_forward_hook(
            lambda module, args, output: counted.append(output.last_hidden_state.shape[1])
        )
        return reference

    monkeypatch.setattr(checked_engines, "build_reference", build_counting)
    return counted


def scored(run: TinyRun) -> int:
    """Pairs that went through the reference."""
    return run.reference.train.num_scored


@pytest.mark.parametrize(
    "changes",
    [
        {"beta": 0.5, "actor_train": {"training_args": {"learning_rate": 0.001}}},
        {"pref_loss": "hinge"},
        {"pref_loss": {"sigmoid": 0.5, "sft": 1.0}},
        {"ld_alpha": 0.3},
        {"clamp_log_ratio": [-0.1, 0.1]},
        {"length_normalization": True},
        {"seed": 7},
        {"layout": "padded"},
        {"reference": {"infer_batch_size": 5}},
        {"actor_train": {"model_args": {"lora_rank": 2}}},
        {"actor_train": {"training_args": {"per_device_train_batch_size": 2}}},
    ],
    ids=lambda changes: json.dumps(changes),
)
def test_a_second_run_makes_no_reference_forward(different_reference, forwards, changes):
    first = build_run(merge(different_reference, PLANNED), noise_pairs(PAIRS))
    assert scored(first) == PAIRS
    assert len(forwards) >= 7  # blocks of 4
    forwards.clear()
    second = build_run(merge(merge(different_reference, PLANNED), changes), noise_pairs(PAIRS))
    assert (scored(second), second.reference.train.num_missing, forwards) == (0, 0, [])
    assert np.isfinite(second.trainer.training_step()["loss"].mean)


def test_weight_and_margin_of_a_pair_do_not_change_its_key(different_reference):
    pairs = noise_pairs(PAIRS)
    build_run(merge(different_reference, PLANNED), pairs)
    heavier = PairsInMemory([replace(pair, weight=2.0, margin=0.5) for pair in pairs.pairs])
    assert scored(build_run(merge(different_reference, PLANNED), heavier)) == 0


def test_a_changed_weight_misses(different_reference, tmp_path):
    model = save_tiny_llama(tmp_path / "model", 5)
    values = merge(
        different_reference, merge(PLANNED, {"reference": {"model_args": {"model_name_or_path": str(model)}}})
    )
    assert [scored(build_run(values, noise_pairs(PAIRS))) for _ in range(2)] == [PAIRS, 0]
    weights = load_file(model / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] += 1e-4
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    assert scored(build_run(values, noise_pairs(PAIRS))) == PAIRS


def test_a_changed_setting_of_the_model_misses(different_reference, tmp_path):
    model = save_tiny_llama(tmp_path / "model", 5)
    values = merge(
        different_reference, merge(PLANNED, {"reference": {"model_args": {"model_name_or_path": str(model)}}})
    )
    build_run(values, noise_pairs(PAIRS))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    assert scored(build_run(values, noise_pairs(PAIRS))) == PAIRS


@pytest.mark.parametrize("side", [None, 0, 1], ids=["prompt", "chosen", "rejected"])
def test_a_changed_token_misses_in_its_block_only(different_reference, side):
    pairs = noise_pairs(PAIRS).pairs
    build_run(merge(different_reference, PLANNED), PairsInMemory(pairs))
    ids = (pairs[9].prompt_ids if side is None else pairs[9].responses[side].ids).copy()
    ids[-1] = ids[-1] + 1 if ids[-1] < 60 else ids[-1] - 1
    other = replace(pairs[9], prompt_ids=ids) if side is None else replace_side(pairs[9], side, ids=ids)
    changed = [*pairs[:9], other, *pairs[10:]]
    run = build_run(merge(different_reference, PLANNED), PairsInMemory(changed))
    assert scored(run) == 4  # its full block of 4


def test_a_changed_loss_mask_misses(different_reference):
    pairs = noise_pairs(PAIRS).pairs
    build_run(merge(different_reference, PLANNED), PairsInMemory(pairs))
    mask = np.zeros(len(pairs[9].chosen.ids), dtype=np.bool_)
    mask[0] = True
    every = np.ones(len(pairs[13].chosen.ids), dtype=np.bool_)  # the same as no mask
    assert not mask.all()
    changed = list(pairs)
    changed[9], changed[13] = replace_side(pairs[9], 0, mask=mask), replace_side(pairs[13], 0, mask=every)
    assert scored(build_run(merge(different_reference, PLANNED), PairsInMemory(changed))) == 4


@pytest.mark.parametrize("changes", [{"dtype": "bf16"}, {"dtype": "bf16", "master_dtype": "bf16"}])
def test_another_precision_misses(different_reference, changes):
    for known in ({}, {"dtype": "bf16"}):
        if known != changes:
            build_run(
                merge(different_reference, merge(PLANNED, {"reference": {"model_args": known}})), noise_pairs(PAIRS)
            )
    run = build_run(
        merge(different_reference, merge(PLANNED, {"reference": {"model_args": changes}})), noise_pairs(PAIRS)
    )
    assert scored(run) == PAIRS


def test_a_run_over_more_pairs_scores_only_incomplete_blocks(different_reference):
    pairs = noise_pairs(PAIRS).pairs
    build_run(merge(different_reference, PLANNED), PairsInMemory(pairs[:18]))
    # of blocks 0..3 nothing is missing, of block 4 two pairs are
    assert scored(build_run(merge(different_reference, PLANNED), PairsInMemory(pairs))) == PAIRS - 16


def plain_logps(model_dir: str, pairs: PairsInMemory) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The reference logps from transformers alone, one sequence at a time."""
    model = LlamaForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()

    @torch.no_grad()
    def side(prompt: np.ndarray, response: np.ndarray) -> torch.Tensor:
        ids = torch.tensor([*prompt.tolist(), *response.tolist()])
        logps = model(ids[None]).logits[0].log_softmax(-1)
        return logps[len(prompt) - 1 : -1].gather(1, ids[len(prompt) :, None]).squeeze(1)

    return [(side(p.prompt_ids, p.chosen.ids), side(p.prompt_ids, p.rejected.ids)) for p in pairs.pairs]


def outcome(values: dict, pairs: PairsInMemory) -> tuple[TinyRun, list[float], dict[str, torch.Tensor]]:
    """The run before its first step, then the losses of six steps and the weights after them."""
    run = build_run(values, pairs)
    before = [run.reference.train.logps(pairs.read([i])) for i in range(len(pairs))]
    losses = [run.trainer.training_step()["loss"].mean for _ in range(6)]
    weights = {name: weight.clone() for name, weight in run.trainer.engine.weights().items()}
    return before, losses, weights


@pytest.mark.parametrize("lora", [{}, {"lora_rank": 4}], ids=["all weights", "lora"])
def test_every_reference_mode_gives_the_logps_of_a_plain_forward_and_the_same_training(base, reference_cache, lora):
    pairs = noise_pairs(12)
    values = merge(base, {"actor_train": {"model_args": lora, "training_args": {"learning_rate": 0.05}}})
    expected = plain_logps(base["pretrain"], pairs)
    modes = ["precompute", "precompute", "concurrent", *(["adapter"] if lora else [])]
    outcomes = [outcome(merge(values, {"reference": {"mode": mode}}), pairs) for mode in modes]
    for mode, (logps, losses, weights) in zip(modes, outcomes, strict=True):
        for ours, theirs in zip(logps, expected, strict=True):
            assert torch.allclose(ours.chosen.values, theirs[0], atol=1e-5, rtol=0), mode
            assert torch.allclose(ours.rejected.values, theirs[1], atol=1e-5, rtol=0), mode
        assert losses == pytest.approx(outcomes[0][1], abs=1e-5), mode
        for name, weight in weights.items():
            assert torch.allclose(weight, outcomes[0][2][name], atol=1e-5, rtol=0), (mode, name)
    (cold, warm) = outcomes[:2]
    assert cold[1] == warm[1]  # bitwise, read back from disk
    assert abs(cold[1][0] - cold[1][-1]) > 1e-3


def test_the_pairs_of_a_corrupt_shard_are_scored_again(different_reference, reference_cache):
    values = merge(different_reference, PLANNED)
    first = build_run(values, noise_pairs(PAIRS))
    expected = first.reference.train.logps(noise_pairs(PAIRS).read([20]))
    (shard,) = reference_cache.glob("*/*.arrow")
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    second = build_run(values, noise_pairs(PAIRS))
    assert scored(second) == PAIRS
    assert torch.equal(
        second.reference.train.logps(noise_pairs(PAIRS).read([20])).chosen.values, expected.chosen.values
    )
    assert [path.name for path in reference_cache.glob("*/*.damaged")] == [shard.name + ".damaged"]
    assert scored(build_run(values, noise_pairs(PAIRS))) == 0


def test_the_config_sets_the_cache_directory(different_reference, tmp_path, reference_cache):
    build_run(
        merge(different_reference, merge(PLANNED, {"reference": {"cache_dir": str(tmp_path / "here")}})),
        noise_pairs(PAIRS),
    )
    assert len(list((tmp_path / "here").glob("*/*.arrow"))) == 1
    assert list(reference_cache.glob("[!.]*")) == []  # remembered digests are hidden
