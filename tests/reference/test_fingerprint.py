"""The fingerprint of a reference depends on its weights and settings, not on file names or sharding."""

from __future__ import annotations

import json
import shutil
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.noise_cache import FINGERPRINT
from thresher.errors import UserError
from thresher.models.loading.adapters import CONFIG, WEIGHTS, AdapterFiles
from thresher.reference.fingerprint import config_digest, frozen_digest, weights_digest, with_adapter


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.fixture
def copy(model, tmp_path) -> Path:
    return shutil.copytree(model, tmp_path / "copy")


def settings(path: Path) -> str:
    return config_digest(str(path), trust_remote_code=False)


def test_a_copy_under_another_name_has_the_same_fingerprint(model, copy):
    assert weights_digest(str(copy)) == weights_digest(str(model))
    assert settings(copy) == settings(model)


def test_the_distribution_of_tensors_over_files_does_not_matter(model, tmp_path):
    LlamaForCausalLM.from_pretrained(model).save_pretrained(tmp_path / "sharded", max_shard_size="8KB")
    assert len(list((tmp_path / "sharded").glob("model-*.safetensors"))) > 1
    assert weights_digest(str(tmp_path / "sharded")) == weights_digest(str(model))


def test_one_bit_of_one_weight_matters(model, copy):
    weights = load_file(copy / "model.safetensors")
    weights["model.norm.weight"].view(torch.int32)[3] ^= 1
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    assert weights_digest(str(copy)) != weights_digest(str(model))


def test_swapped_tensors_and_other_dtypes_matter(model, copy):
    weights = load_file(copy / "model.safetensors")
    up, gate = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.gate_proj.weight"
    save_file(weights | {up: weights[gate], gate: weights[up]}, copy / "model.safetensors", metadata={"format": "pt"})
    assert weights_digest(str(copy)) != weights_digest(str(model))
    LlamaForCausalLM.from_pretrained(model, dtype=torch.bfloat16).save_pretrained(copy)
    assert weights_digest(str(copy)) != weights_digest(str(model))


def test_the_shape_of_a_tensor_matters(model, copy):
    weights = load_file(copy / "model.safetensors")
    up = "model.layers.0.mlp.up_proj.weight"
    save_file(weights | {up: weights[up].reshape(16, 24)}, copy / "model.safetensors", metadata={"format": "pt"})
    assert weights_digest(str(copy)) != weights_digest(str(model))


def test_a_missing_file_of_the_index_is_reported(model, tmp_path):
    LlamaForCausalLM.from_pretrained(model).save_pretrained(tmp_path / "sharded", max_shard_size="8KB")
    first = min((tmp_path / "sharded").glob("model-*.safetensors"))
    first.unlink()
    with pytest.raises(UserError, match=f"has no {first.name}, which its index names"):
        weights_digest(str(tmp_path / "sharded"))


def test_a_model_without_safetensors_is_rejected(model, tmp_path):
    (tmp_path / "config.json").write_text((model / "config.json").read_text())
    with pytest.raises(UserError, match=r"has no safetensors weights .*; load it with transformers and save it"):
        weights_digest(str(tmp_path))


@pytest.mark.parametrize(
    ("key", "value", "matters"),
    [
        ("rms_norm_eps", 1e-3, True),
        ("rope_parameters", {"rope_theta": 5e5, "rope_type": "default"}, True),
        ("logit_scale", 2.0, True),
        ("_name_or_path", "elsewhere", False),
        ("transformers_version", "9.9.9", False),
        ("dtype", "bfloat16", False),
        ("use_cache", False, False),
        ("transformers_weights", "model.safetensors", False),
    ],
)
def test_settings_matter_if_they_can_change_a_logp(model, copy, key, value, matters):
    values = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(values | {key: value}))
    assert (settings(copy) != settings(model)) == matters


def test_code_matters_if_it_may_be_executed(copy):
    before = [config_digest(str(copy), trust_remote_code=trust) for trust in (False, True)]
    (copy / "modeling_own.py").write_text("scale = 2")
    after = [config_digest(str(copy), trust_remote_code=trust) for trust in (False, True)]
    assert before[0] == after[0]
    assert before[1] != after[1]


def test_the_digest_of_a_gguf_file_is_over_its_bytes(tmp_path):
    for name, content in (("one.gguf", b"GGUF1"), ("two.gguf", b"GGUF1"), ("three.gguf", b"GGUF2")):
        (tmp_path / name).write_bytes(content)
    one, two, three = (weights_digest(str(tmp_path / f"{name}.gguf")) for name in ("one", "two", "three"))
    assert one == two != three


def test_every_field_of_a_fingerprint_matters():
    for field in fields(FINGERPRINT):
        assert replace(FINGERPRINT, **{field.name: "other"}).digest != FINGERPRINT.digest


def test_the_frozen_digest_depends_on_weights_and_master_dtype():
    assert frozen_digest("a", "fp32") == frozen_digest("a", "fp32")
    assert len({frozen_digest("a", "fp32"), frozen_digest("a", "bf16"), frozen_digest("b", "fp32")}) == 3
    assert frozen_digest(None, "fp32") == frozen_digest(None, "bf16") == "none"


def test_an_adapter_changes_the_digest_by_its_tensors_and_its_settings(tmp_path):
    def digest(weights: str = "base", value: float = 1.0, **changed: object) -> str:
        save_file({"lora_A": torch.full((2, 2), value)}, tmp_path / WEIGHTS)
        settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], **changed}
        (tmp_path / CONFIG).write_text(json.dumps(settings))
        return with_adapter(weights, AdapterFiles.find(str(tmp_path)))

    digests = [digest(), digest("other"), digest(value=2.0), digest(lora_alpha=8), digest(use_rslora=True)]
    assert len(set(digests)) == len(digests)
    assert digest(task_type="CAUSAL_LM") == digest()
