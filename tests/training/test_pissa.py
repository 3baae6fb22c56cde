"""`lora_init: pissa`: the adapter starts with a part of the weights, and the reference is the original model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from tests.config.test_config_keys import refusal
from tests.support.compared_runs import merge
from tests.support.small_runs import make_base
from tests.support.tiny_run import build_run, noise_pairs
from thresher.builders.engines import build_policy, check_engine
from thresher.builders.export import export_checkpoint
from thresher.builders.inputs import RunInputs, find_layout
from thresher.builders.objective import build_objective
from thresher.builders.reference import reference_digest
from thresher.builders.reference_mode import reference_mode
from thresher.config import parse_config
from thresher.errors import UserError
from thresher.models.logps import original_forward
from thresher.pipeline import DPOPipeline

IDS = torch.tensor([[1, 5, 9, 33, 7, 12]])
INITS = ["pissa", "pissa_niter_4", "olora"]


def pissa(init: str = "pissa") -> dict[str, Any]:
    return {"actor_train": {"model_args": {"lora_rank": 2, "lora_init": init}}}


@pytest.fixture(scope="module")
def values(tmp_path_factory) -> dict[str, Any]:
    """A run of one step whose reference is the policy's model."""
    root = tmp_path_factory.mktemp("pissa")
    base = merge(make_base(root), pissa()) | {"max_steps": 1, "save_steps": 0, "eval_steps": 0, "reference": {}}
    base |= {"output_dir": str(root / "run"), "cache_dir": str(root / "cache")}
    return {name: value for name, value in base.items() if name != "validation"}


@pytest.mark.parametrize("init", INITS)
def test_the_policy_starts_as_the_model_with_pefts_factors(values, init):
    config = parse_config(merge(values, pissa(init)))
    layout = find_layout(config)[1]
    policy, again = build_policy(config, layout), build_policy(config, layout)
    original = AutoModelForCausalLM.from_pretrained(values["pretrain"]).eval()
    with torch.no_grad(), original_forward(policy.model):
        logits = policy.model.eval()(input_ids=IDS).logits
        torch.testing.assert_close(logits, original(input_ids=IDS).logits, atol=1e-5, rtol=1e-5)
    parameters = dict(again.model.named_parameters())
    assert all(torch.equal(p, parameters[name]) for name, p in policy.model.named_parameters())
    for name, weight in policy.weights().items():
        assert weight.abs().max() > 0, name
    if init != "pissa_niter_4":
        lora = LoraConfig(r=2, lora_alpha=4, target_modules="all-linear", init_lora_weights=init)
        theirs = dict(get_peft_model(original, lora).named_parameters())
        for name, weight in policy.weights().items():
            torch.testing.assert_close(weight, theirs[name], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("mode", ["auto", "concurrent"])
def test_margins_to_the_original_model_start_at_zero(values, mode):
    changes = {"reference": {"mode": mode}, "actor_train": {"training_args": {"global_batch_size": 8}}}
    run = build_run(merge(values, changes), noise_pairs(8))
    assert run.mode == ("precompute" if mode == "auto" else mode)
    assert (run.reference.equals_policy, run.reference.forwards) == (True, "other mesh")
    metrics = run.trainer.training_step()
    assert metrics["rewards/margins"].mean == pytest.approx(0.0, abs=1e-5)
    assert metrics["loss"].mean == pytest.approx(math.log(2), abs=1e-5)


def test_mode_adapter_is_an_error_with_the_reason(values):
    config = parse_config(merge(values, {"reference": {"mode": "adapter"}}))
    with pytest.raises(UserError, match="lora_init pissa moves a part of its weights into the adapter, so margins"):
        reference_mode(config, build_objective(config))


@pytest.mark.parametrize("init", INITS)
def test_a_run_resumes_and_is_exported_merged(values, tmp_path, init):
    config = parse_config(merge(values, pissa(init)) | {"output_dir": str(tmp_path / "run")})
    DPOPipeline(config).run()
    checkpoint = Path(config.output_dir) / "checkpoints" / "step-00000001"
    export_checkpoint(checkpoint, tmp_path / "exported")
    policy = build_policy(config, find_layout(config)[1])
    policy.load(checkpoint)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float32).eval()
    original = AutoModelForCausalLM.from_pretrained(values["pretrain"]).eval()
    with torch.no_grad(), original_forward(policy.model):
        logits = policy.model.eval()(input_ids=IDS).logits
        torch.testing.assert_close(exported(input_ids=IDS).logits, logits, atol=1e-5, rtol=1e-4)
        assert (logits - original(input_ids=IDS).logits).abs().max() > 1e-3


def test_a_checkpoint_belongs_to_its_initialization(values):
    digests = {
        reference_digest(parse_config(merge(values, pissa(init))), "precompute", "w") for init in ("default", *INITS)
    }
    assert len(digests) == 4


def test_checks_without_weights_accept_it(values):
    total, trained = RunInputs(parse_config(values)).num_parameters
    assert 0 < trained < total


def test_a_sharded_policy_is_an_error_before_the_run(values):
    config = parse_config(merge(values, {"actor_train": {"num_workers": 2}}))
    with pytest.raises(UserError, match="decomposes whole weight matrices, which cannot be sharded"):
        check_engine(config, "actor_train")
    replicas = {"num_workers": 2, "strategy_args": {"strategy_config": {"dp_replicate": 2}}}
    check_engine(parse_config(merge(values, {"actor_train": replicas})), "actor_train")


def test_settings_that_contradict_it_are_rejected():
    bf16 = merge(pissa(), {"actor_train": {"model_args": {"master_dtype": "bf16"}}})
    assert "lora_init pissa needs master_dtype fp32" in refusal(bf16)
    adapter = {"actor_train": {"model_args": {"adapter_name_or_path": "a", "lora_init": "pissa"}}}
    assert "lora_init has no effect with adapter_name_or_path" in refusal(adapter)
    assert "lora_init" in refusal(pissa("eva"))
