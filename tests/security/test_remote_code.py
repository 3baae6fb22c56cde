"""Code that comes with a model, a tokenizer or a checkpoint does not run unless the config says that it is trusted."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.support.attacks import Canary, CommandLine, Run, sign

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
def modules_of_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers copies the code that it runs; into a place of the test."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))


def bring_code(model: Path, canary: Canary) -> None:
    """Let a model be of a family that its own files define."""
    (model / "own.py").write_text(CODE.format(canary=str(canary.path)))
    config = model / "config.json"
    values = json.loads(config.read_text())
    values |= {"model_type": "own", "architectures": ["OwnModel"]}
    values["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    config.write_text(json.dumps(values))


def bring_tokenizer_code(model: Path, canary: Canary) -> None:
    (model / "own.py").write_text(CODE.format(canary=str(canary.path)))
    config = model / "tokenizer_config.json"
    values = json.loads(config.read_text())
    values |= {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]}}
    config.write_text(json.dumps(values))


@pytest.mark.parametrize("role", ["policy", "reference"])
def test_a_model_that_brings_code_is_refused_with_what_to_do(
    attacked: Run, canary: Canary, thresher: CommandLine, role: str
) -> None:
    bring_code(attacked.directory / role, canary)
    shutil.rmtree(attacked.output)
    reference = {"model_args": {"model_name_or_path": str(attacked.directory / "reference")}}
    config = attacked.config(reference=reference)
    for verb in ("train", "score"):
        ended = thresher(verb, config)
        assert ended.code == 2
        assert "trust_remote_code" in ended.text
        assert not canary.sings


def test_a_tokenizer_that_brings_code_does_not_run_it(
    attacked: Run, canary: Canary, thresher: CommandLine, tmp_path: Path
) -> None:
    bring_tokenizer_code(attacked.model, canary)
    options = ("--template", "raw", "--model", attacked.model)
    ended = thresher("prepare", attacked.rows, *options, "--output", tmp_path / "store")
    assert not canary.sings
    assert ended.code == 0 or "trust_remote_code" in ended.text


def test_trust_lets_the_code_run(attacked: Run, canary: Canary, thresher: CommandLine) -> None:
    """Or else the tests above would show nothing."""
    bring_code(attacked.model, canary)
    shutil.rmtree(attacked.output)
    trusted = attacked.config(actor_train={"model_args": {"trust_remote_code": True}}, reference={"mode": "concurrent"})
    thresher("train", trusted)
    assert canary.sings
    canary.path.unlink()


def test_a_checkpoint_cannot_give_its_model_the_trust_of_who_exports_it(
    attacked: Run, canary: Canary, thresher: CommandLine, tmp_path: Path
) -> None:
    """Its config may say anything: that the model lies elsewhere, and that its code is trusted."""
    checkpoint = attacked.checkpoint
    hostile = attacked.directory / "reference"
    bring_code(hostile, canary)
    config = checkpoint / "config.json"
    values = json.loads(config.read_text())
    values["actor_train"]["model_args"] |= {"trust_remote_code": True, "model_name_or_path": str(hostile)}
    config.write_text(json.dumps(values))
    sign(checkpoint)
    ended = thresher("export", checkpoint, "--output", tmp_path / "out")
    assert ended.code == 2
    assert "pass --trust-remote-code if you trust that model" in ended.text
    assert not canary.sings
    resumed = thresher("train", attacked.config(resume_from_checkpoint=str(checkpoint), max_steps=3))
    assert resumed.code == 0  # the trust of the run's own config counts, and its own model
    assert not canary.sings
    thresher("export", checkpoint, "--output", tmp_path / "out", "--trust-remote-code")
    assert canary.sings
    canary.path.unlink()


@pytest.mark.parametrize("key", ["_attn_implementation", "attn_implementation"])
def test_a_model_cannot_ask_for_kernels_to_be_fetched(attacked: Run, thresher: CommandLine, key: str) -> None:
    config = attacked.model / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {key: "somebody/kernel"}))
    shutil.rmtree(attacked.output)
    ended = thresher("train", attacked.config())
    assert ended.code == 2
    assert "somebody/kernel, which would be downloaded and run" in ended.text


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('touch CANARY') }}",
        "{% for x in ().__class__.__base__.__subclasses__() %}{{ x }}{% endfor %}",
        "{{ messages.append({'role': 'user', 'content': 'more'}) }}",
    ],
)
def test_a_chat_template_is_kept_in_its_sandbox(
    attacked: Run, canary: Canary, thresher: CommandLine, tmp_path: Path, template: str
) -> None:
    (attacked.model / "chat_template.jinja").write_text(template.replace("CANARY", str(canary.path)))
    ended = thresher("prepare", attacked.rows, "--model", attacked.model, "--output", tmp_path / "store")
    assert ended.code == 2
    assert not canary.sings
