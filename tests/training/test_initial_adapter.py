"""`adapter_name_or_path`: training starts from a PEFT adapter, and the reference is the policy at step 0."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.support.compared_runs import merge
from tests.support.engines.adapters import save_adapter
from tests.support.small_runs import make_base
from tests.support.tiny_run import build_run, noise_pairs
from thresher.builders.engines import build_policy, trained_parts
from thresher.builders.export import export_checkpoint
from thresher.builders.inputs import find_layout
from thresher.builders.objective import build_objective
from thresher.builders.reference_mode import frozen_weights_digest, initial_adapter, reference_mode
from thresher.config import DPOConfig, parse_config
from thresher.errors import UserError
from thresher.models.loading.load import load_model
from thresher.models.logps import original_forward
from thresher.pipeline import DPOPipeline

IDS = torch.tensor([[1, 5, 9, 33, 7, 12]])


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """A directory with `policy`, `reference`, `adapter` and rows."""
    directory = tmp_path_factory.mktemp("adapters")
    values = make_base(directory)
    (directory / "base.json").write_text(json.dumps(values))
    save_adapter(directory / "adapter", directory / "policy")
    return directory


@pytest.fixture(scope="module")
def values(root) -> dict[str, Any]:
    """A run of one step whose reference is the policy's model."""
    base = json.loads((root / "base.json").read_text())
    args = {"model_args": {"adapter_name_or_path": str(root / "adapter")}}
    changes = {"actor_train": args, "max_steps": 1, "save_steps": 0, "eval_steps": 0}
    unshared = {"reference": {}, "output_dir": str(root / "run"), "cache_dir": str(root / "cache")}
    return {name: value for name, value in (merge(base, changes) | unshared).items() if name != "validation"}


def adapted(root: Path, adapter: Path | None = None) -> Any:
    model = AutoModelForCausalLM.from_pretrained(root / "policy")
    return PeftModel.from_pretrained(model, adapter or root / "adapter").eval()


@pytest.mark.parametrize("settings", [{}, {"use_rslora": True}, {"alpha_pattern": {"q_proj": 20}}], ids=str)
def test_the_policy_starts_as_the_adapted_model(root, values, tmp_path, settings):
    adapter = Path(shutil.copytree(root / "adapter", tmp_path / "adapter"))
    edit(adapter, **settings)
    args = {"model_args": {"adapter_name_or_path": str(adapter)}}
    config = parse_config(merge(values, {"actor_train": args}))
    policy = build_policy(config, find_layout(config)[1])
    base = AutoModelForCausalLM.from_pretrained(root / "policy").eval()
    with torch.no_grad(), original_forward(policy.model):
        logits = policy.model.eval()(input_ids=IDS).logits
        torch.testing.assert_close(logits, adapted(root, adapter)(input_ids=IDS).logits, atol=1e-5, rtol=1e-5)
        assert (logits - base(input_ids=IDS).logits).abs().max() > 0.1
    assert all(".lora_" in name for name in policy.weights())


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_the_adapter_is_trained_with_the_dropout_of_the_config(values, dropout):
    config = parse_config(merge(values, {"actor_train": {"model_args": {"lora_dropout": dropout}}}))
    policy = build_policy(config, find_layout(config)[1])
    with torch.no_grad(), original_forward(policy.model):
        one, other = (policy.model.train()(input_ids=IDS).logits for _ in range(2))
    assert torch.equal(one, other) == (dropout == 0.0)


@pytest.mark.parametrize("mode", ["auto", "concurrent"])
def test_margins_start_at_zero(values, mode):
    changes = {"reference": {"mode": mode}, "actor_train": {"training_args": {"global_batch_size": 8}}}
    run = build_run(merge(values, changes), noise_pairs(8))
    assert run.mode == ("precompute" if mode == "auto" else mode)
    assert run.reference.equals_policy
    metrics = run.trainer.training_step()
    assert metrics["rewards/margins"].mean == pytest.approx(0.0, abs=1e-6)
    assert metrics["loss"].mean == pytest.approx(math.log(2), abs=1e-6)


def test_mode_adapter_is_an_error_with_the_reason(values):
    config = parse_config(merge(values, {"reference": {"mode": "adapter"}}))
    with pytest.raises(UserError) as raised:
        reference_mode(config, build_objective(config))
    assert str(raised.value) == (
        "reference.mode=adapter compares with the model without its adapter, but the policy starts from "
        "adapter_name_or_path, so margins would not start at 0; use auto, precompute or concurrent"
    )


def test_a_reference_of_its_own_has_no_adapter(root, values):
    other = {"reference": {"model_args": {"model_name_or_path": str(root / "reference")}}}
    assert initial_adapter(parse_config(merge(values, other))) is None
    assert initial_adapter(parse_config(values)) == str(root / "adapter")


def test_the_adapter_is_part_of_the_references_identity(root, values, tmp_path):
    def digest(path: Path | None) -> str | None:
        args = {"adapter_name_or_path": None if path is None else str(path)}
        return frozen_weights_digest(parse_config(merge(values, {"actor_train": {"model_args": args}})), "precompute")

    same, other = (Path(shutil.copytree(root / "adapter", tmp_path / name)) for name in ("same", "other"))
    tensors = load_file(other / "adapter_model.safetensors")
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, other / "adapter_model.safetensors")
    alpha = Path(shutil.copytree(root / "adapter", tmp_path / "alpha"))
    edit(alpha, lora_alpha=7)
    digests = [digest(path) for path in (root / "adapter", other, alpha, None)]
    assert digest(same) == digests[0]
    assert len(set(digests)) == 4


def edit(adapter: Path, **settings: Any) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"lora_rank": 4}, r"lora_rank is 4, but the adapter .* has 2; remove lora_rank"),
        ({"lora_alpha": 4}, r"lora_alpha is 4\.0, but the adapter .* has 6"),
        ({"lora_target": ["q_proj"]}, r"lora_target is \['q_proj'\], but the adapter .* has \['q_proj', 'v_proj'\]"),
    ],
)
def test_settings_that_contradict_the_adapter_are_errors(values, settings, reason):
    config = parse_config(merge(values, {"actor_train": {"model_args": settings}}))
    with pytest.raises(UserError, match=reason):
        trained_parts(config.actor_train.model_args)


def test_settings_that_agree_with_the_adapter_are_accepted(values):
    agreeing = {"lora_rank": 2, "lora_alpha": 6, "lora_target": ["v_proj", "q_proj"], "lora_dropout": 0.1}
    config = parse_config(merge(values, {"actor_train": {"model_args": agreeing}}))
    assert trained_parts(config.actor_train.model_args).adapter is not None


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"lora_bias": True}, "has lora_bias, which is not supported"),
        ({"trainable_token_indices": [3]}, "has trainable_token_indices, which is not supported"),
        ({"bias": "all"}, "has bias all, which is not supported"),
        ({"peft_type": "IA3"}, "has type IA3, which is not supported"),
        ({"init_lora_weights": "pissa"}, "was initialized with pissa, which changed the base weights"),
    ],
)
def test_an_adapter_that_is_not_plain_lora_is_rejected(root, values, tmp_path, settings, reason):
    edit(Path(shutil.copytree(root / "adapter", tmp_path / "adapter")), **settings)
    with pytest.raises(UserError, match=reason):
        trained_parts(with_path(values, tmp_path / "adapter").actor_train.model_args)


def test_a_model_directory_is_not_an_adapter(root, values):
    with pytest.raises(UserError, match=r"is not a LoRA adapter: it has no adapter_config\.json"):
        trained_parts(with_path(values, root / "policy").actor_train.model_args)


def with_path(values: dict[str, Any], path: Path) -> DPOConfig:
    return parse_config(merge(values, {"actor_train": {"model_args": {"adapter_name_or_path": str(path)}}}))


def test_an_adapter_of_another_model_is_rejected(root, values, tmp_path):
    path = Path(shutil.copytree(root / "adapter", tmp_path / "adapter"))
    tensors = load_file(path / "adapter_model.safetensors")
    name = min(tensors)
    extra = {name.replace("layers.0", "layers.9"): tensors[name].clone()}
    save_file(tensors | extra, path / "adapter_model.safetensors")
    args = with_path(values, path).actor_train.model_args
    model, parts = load_model(str(root / "policy")), trained_parts(args)
    parts.apply(model)
    with pytest.raises(UserError, match=r"layers\.9.*, which the model has not"):
        parts.init(model, seed=0)


def test_a_run_is_exported_with_its_adapter_merged(root, values):
    config = parse_config(values)
    DPOPipeline(config).run()
    checkpoint = root / "run" / "checkpoints" / "step-00000001"
    export_checkpoint(checkpoint, root / "exported")
    policy = build_policy(config, find_layout(config)[1])
    policy.load(checkpoint)
    exported = AutoModelForCausalLM.from_pretrained(root / "exported", dtype=torch.float32).eval()
    with torch.no_grad(), original_forward(policy.model):
        logits = policy.model.eval()(input_ids=IDS).logits
        torch.testing.assert_close(exported(input_ids=IDS).logits, logits, atol=1e-5, rtol=1e-4)
        assert (logits - adapted(root)(input_ids=IDS).logits).abs().max() > 1e-3
