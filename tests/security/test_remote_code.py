"""Code in a model, a tokenizer or a checkpoint is not executed unless the config trusts it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.support.attacks import Canary, CommandLine, Run, update_manifest
from thresher.errors import UserError
from thresher.models.loading.load import load_model, load_model_config

CODE = """
open({canary!r}, "w")
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


class OwnConfig(LlamaConfig):
    model_type = "own"


class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig


class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture(autouse=True)
def modules_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let transformers copy the code that it executes into the directory of the test."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))


def add_model_code(model: Path, canary: Canary) -> None:
    """Give a model an architecture that its own files define."""
    (model / "own.py").write_text(CODE.format(canary=str(canary.path)))
    config = model / "config.json"
    values = json.loads(config.read_text())
    values |= {"model_type": "own", "architectures": ["OwnModel"]}
    values["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    config.write_text(json.dumps(values))


def add_tokenizer_code(model: Path, canary: Canary) -> None:
    (model / "own.py").write_text(CODE.format(canary=str(canary.path)))
    config = model / "tokenizer_config.json"
    values = json.loads(config.read_text())
    values |= {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]}}
    config.write_text(json.dumps(values))


@pytest.mark.parametrize("role", ["policy", "reference"])
def test_a_model_with_code_is_rejected_with_a_hint(
    attacked: Run, canary: Canary, thresher: CommandLine, role: str
) -> None:
    add_model_code(attacked.directory / role, canary)
    shutil.rmtree(attacked.output)
    reference = {"model_args": {"model_name_or_path": str(attacked.directory / "reference")}}
    config = attacked.config(reference=reference)
    for command in ("train", "precompute-reference"):
        result = thresher(command, config)
        assert result.code == 2
        assert "trust_remote_code" in result.text
        assert not canary.is_triggered


def test_tokenizer_code_is_not_executed(attacked: Run, canary: Canary, thresher: CommandLine, tmp_path: Path) -> None:
    add_tokenizer_code(attacked.model, canary)
    options = ("--template", "raw", "--model", attacked.model)
    result = thresher("prepare", attacked.rows, *options, "--output", tmp_path / "store")
    assert not canary.is_triggered
    assert result.code == 0 or "trust_remote_code" in result.text


def test_trusted_code_is_executed(attacked: Run, canary: Canary, thresher: CommandLine) -> None:
    """Without this, the tests above would prove nothing."""
    add_model_code(attacked.model, canary)
    shutil.rmtree(attacked.output)
    trusted = attacked.config(actor_train={"model_args": {"trust_remote_code": True}}, reference={"mode": "concurrent"})
    thresher("train", trusted)
    assert canary.is_triggered
    canary.path.unlink()


def test_a_checkpoint_cannot_declare_its_model_trusted(
    attacked: Run, canary: Canary, thresher: CommandLine, tmp_path: Path
) -> None:
    """The config in it may name another model and set trust_remote_code."""
    checkpoint = attacked.checkpoint
    hostile = attacked.directory / "reference"
    add_model_code(hostile, canary)
    config = checkpoint / "config.json"
    values = json.loads(config.read_text())
    values["actor_train"]["model_args"] |= {"trust_remote_code": True, "model_name_or_path": str(hostile)}
    config.write_text(json.dumps(values))
    update_manifest(checkpoint)
    result = thresher("export", checkpoint, "--output", tmp_path / "out")
    assert result.code == 2
    assert "pass --trust-remote-code if you trust that model" in result.text
    assert not canary.is_triggered
    resumed = thresher("train", attacked.config(resume_from_checkpoint=str(checkpoint), max_steps=3))
    assert resumed.code == 0  # the run's own config decides on model and trust
    assert not canary.is_triggered
    trusted = thresher("export", checkpoint, "--output", tmp_path / "out", "--trust-remote-code")
    assert "is not the one that the run of" in trusted.text  # by its digest, before any of its code runs
    assert not canary.is_triggered


@pytest.mark.parametrize("key", ["_attn_implementation", "attn_implementation"])
def test_a_model_cannot_request_a_kernel_download(attacked: Run, thresher: CommandLine, key: str) -> None:
    config = attacked.model / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {key: "owner/kernel"}))
    shutil.rmtree(attacked.output)
    result = thresher("train", attacked.config())
    assert result.code == 2
    assert "owner/kernel, which would be downloaded and run" in result.text
    with pytest.raises(UserError, match="owner/kernel, which would be downloaded and run"):
        load_model(str(attacked.model))


@pytest.mark.parametrize("key", ["_attn_implementation", "attn_implementation"])
def test_the_text_part_of_a_model_cannot_request_a_kernel_download(tmp_path: Path, key: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", key: {"text_config": "owner/kernel"}}))
    with pytest.raises(UserError, match="owner/kernel, which would be downloaded and run"):
        load_model_config(str(tmp_path))


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('touch CANARY') }}",
        "{% for x in ().__class__.__base__.__subclasses__() %}{{ x }}{% endfor %}",
        "{{ messages.append({'role': 'user', 'content': 'more'}) }}",
    ],
)
def test_a_chat_template_cannot_escape_its_sandbox(
    attacked: Run, canary: Canary, thresher: CommandLine, tmp_path: Path, template: str
) -> None:
    (attacked.model / "chat_template.jinja").write_text(template.replace("CANARY", str(canary.path)))
    result = thresher("prepare", attacked.rows, "--model", attacked.model, "--output", tmp_path / "store")
    assert result.code == 2
    assert not canary.is_triggered
