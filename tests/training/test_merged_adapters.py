"""`merge_adapters`: policy and reference of a run are their base with adapters merged."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from tests.support.compared_runs import merge
from tests.support.engines.adapters import merged_by_peft, save_adapter
from tests.support.tiny_run import build_run, noise_pairs
from tests.training.test_adapter_kinds import (
    logits_of,
    logits_of_policy,
    plain,
    root,
    values_of,
)
from thresher.builders.engines import check_engine
from thresher.builders.export import export_adapter, export_checkpoint
from thresher.builders.inputs import RunInputs
from thresher.builders.reference import frozen_policy_digest
from thresher.builders.reference_mode import frozen_weights_digest
from thresher.config import parse_config
from thresher.errors import CheckpointError, UserError
from thresher.pipeline import DPOPipeline

__all__ = ["root"]  # the fixture
ALL = {"target_modules": "all-linear"}
KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"use_rslora": True, "rank_pattern": {"q_proj": 1}},
    "dora": {"use_dora": True},
    "modules": {"modules_to_save": ["lm_head", "embed_tokens", "norm"]},
}


@pytest.fixture(scope="module")
def adapters(root) -> dict[str, Path]:
    return {name: save_adapter(root / name, root / "llama", **(ALL | each)) for name, each in KINDS.items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["adapter", "precompute"])
def test_policy_and_reference_start_as_the_merged_model(root, adapters, tmp_path, kind, mode):
    given = {"merge_adapters": str(adapters[kind]), "lora_rank": 2}
    values = values_of(root, "llama", tmp_path, **given) | {"reference": {"mode": mode}}
    run = build_run(values, noise_pairs(8))
    expected = merged_by_peft(root / "llama", adapters[kind])
    torch.testing.assert_close(logits_of_policy(run.config), logits_of(expected), atol=1e-5, rtol=0)
    assert (logits_of(expected) - logits_of(plain(root / "llama"))).abs().max() > 0.1
    metrics = run.trainer.training_step()
    assert metrics["rewards/margins"].mean == pytest.approx(0.0, abs=1e-6)
    assert metrics["loss"].mean == pytest.approx(math.log(2), abs=1e-6)


def test_adapters_are_merged_in_their_order_below_one_that_is_continued(root, adapters, tmp_path):
    below, above = [adapters["dora"], adapters["rslora"]], adapters["lora"]
    given = {"merge_adapters": list(map(str, below)), "adapter_name_or_path": str(above)}
    config = parse_config(values_of(root, "llama", tmp_path, **given))
    expected = PeftModel.from_pretrained(merged_by_peft(root / "llama", *below), above)
    torch.testing.assert_close(logits_of_policy(config), logits_of(expected), atol=1e-5, rtol=0)
    in_reverse = merged_by_peft(root / "llama", *reversed(below))
    assert (logits_of(merged_by_peft(root / "llama", *below)) - logits_of(in_reverse)).abs().max() > 1e-3


def test_the_merged_adapter_is_part_of_the_identity(root, adapters, tmp_path):
    same, other = (Path(shutil.copytree(adapters["lora"], tmp_path / name)) for name in ("same", "other"))
    tensors = load_file(other / "adapter_model.safetensors")
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, other / "adapter_model.safetensors")

    def digests(**settings: Any) -> tuple[str | None, ...]:
        config = parse_config(values_of(root, "llama", tmp_path / "run", **settings))
        inputs = RunInputs(config)
        return (
            frozen_weights_digest(config, "precompute"),
            frozen_weights_digest(config, "none"),
            frozen_policy_digest(inputs),
        )

    of = {
        name: digests(lora_rank=2, merge_adapters=[] if path is None else [str(path)])
        for name, path in (("none", None), ("one", adapters["lora"]), ("same", same), ("other", other))
    }
    assert of["one"] == of["same"]
    for three in zip(of["none"], of["one"], of["other"], strict=True):
        assert len(set(three)) == 3
    continued = digests(adapter_name_or_path=str(adapters["lora"]))
    assert continued[0] != of["one"][0]


def test_a_run_is_exported_with_both_adapters_and_resumes_from_the_same_only(root, adapters, tmp_path):
    adapter = Path(shutil.copytree(adapters["lora"], tmp_path / "adapter"))
    values = values_of(root, "llama", tmp_path / "run", lora_rank=2, merge_adapters=[str(adapter)])
    config = parse_config(values)
    DPOPipeline(config).run()
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000001"
    export_checkpoint(checkpoint, tmp_path / "model")
    trained = logits_of_policy(config, checkpoint)
    torch.testing.assert_close(logits_of(plain(tmp_path / "model")), trained, atol=1e-4, rtol=0)
    with pytest.raises(UserError, match="no directory has that model, so its adapter cannot be exported"):
        export_adapter(checkpoint, tmp_path / "alone")
    tensors = load_file(adapter / "adapter_model.safetensors")
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, adapter / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="frozen weights was"):
        export_checkpoint(checkpoint, tmp_path / "again")
    resumed = merge(values, {"resume_from_checkpoint": str(checkpoint), "max_steps": 2})
    with pytest.raises(CheckpointError, match="reference"):
        DPOPipeline(parse_config(resumed)).run()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"target_modules": ["embed_tokens"]}, "embed_tokens, which is no linear module, so it cannot be merged"),
        ({"target_modules": ["q_proj"], "bias": "all"}, "has bias all"),
    ],
)
def test_an_adapter_that_cannot_be_merged_is_an_error_before_the_run(root, tmp_path, settings, reason):
    adapter = save_adapter(tmp_path / "adapter", root / "llama", **settings)
    config = parse_config(values_of(root, "llama", tmp_path, lora_rank=2, merge_adapters=[str(adapter)]))
    with pytest.raises(UserError, match=reason):
        check_engine(config, "actor_train")


def test_all_weights_can_be_trained_above_a_merged_adapter(root, adapters, tmp_path):
    config = parse_config(values_of(root, "llama", tmp_path, merge_adapters=[str(adapters["lora"])]))
    expected = merged_by_peft(root / "llama", adapters["lora"])
    torch.testing.assert_close(logits_of_policy(config), logits_of(expected), atol=1e-5, rtol=0)
