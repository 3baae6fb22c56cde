"""`model_args.revision`: policy, reference and tokenizer are read from one revision of a Hub model."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch

from tests.support.small_runs import save_small_model
from thresher.builders.engines import build_policy, build_reference
from thresher.builders.export import trained_model
from thresher.builders.inputs import RunInputs, find_layout
from thresher.builders.reference_mode import frozen_weights_digest
from thresher.checkpoint.json_io import save_json
from thresher.config import DPOConfig, parse_config
from thresher.errors import UserError
from thresher.models.loading.load import load_model, load_model_config, load_tokenizer
from thresher.reference.fingerprint import config_digest, weights_digest

NAME = "org/revised"


@pytest.fixture
def revisions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """A Hub cache with a model of two revisions, `main` and `v1`, which differ in weights, config and tokenizer."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "hub" / "models--org--revised"
    (repository / "refs").mkdir(parents=True)
    models = {}
    for seed, name in enumerate(("main", "v1")):
        models[name] = save_small_model(tmp_path / name, seed)
        commit = hashlib.sha1(name.encode()).hexdigest()  # noqa: S324
        (repository / "refs" / name).write_text(commit)
        if name == "v1":
            for file, before, after in (("config.json", "1e-06", "1e-05"), ("tokenizer.json", '"w10"', '"x10"')):
                path = models[name] / file
                assert before in path.read_text()
                path.write_text(path.read_text().replace(before, after))
        shutil.copytree(models[name], repository / "snapshots" / commit)
    return models


def config_of(revision: str | None) -> DPOConfig:
    return parse_config({"pretrain": NAME, "actor_train": {"model_args": {"dtype": "fp32", "revision": revision}}})


@pytest.mark.parametrize("revision", ["main", "v1", hashlib.sha1(b"v1").hexdigest()])  # noqa: S324
def test_every_reader_reads_the_revision(revisions, revision):
    path, directory = f"{NAME}@{revision}", str(revisions["main" if revision == "main" else "v1"])
    assert load_model_config(path).rms_norm_eps == load_model_config(directory).rms_norm_eps
    assert load_tokenizer(path).get_vocab() == load_tokenizer(directory).get_vocab()
    assert weights_digest(path) == weights_digest(directory)
    assert config_digest(path, trust_remote_code=False) == config_digest(directory, trust_remote_code=False)
    expected = load_model(directory).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in load_model(path).state_dict().items())


def test_policy_reference_tokenizer_and_checks_of_a_run_use_the_revision(revisions):
    for revision, name in ((None, "main"), ("v1", "v1")):
        config, expected = config_of(revision), load_model(str(revisions[name])).state_dict()
        tokenizer, layout, _ = find_layout(config)
        assert ("x10" in tokenizer.get_vocab()) == (name == "v1")
        for engine in (build_policy(config, layout), build_reference(config, layout)):
            assert all(torch.equal(weight, expected[key]) for key, weight in engine.weights().items())
        assert frozen_weights_digest(config, "precompute") == weights_digest(str(revisions[name]))
        parts = RunInputs(config)
        assert parts.model_configs[parts.policy_path].rms_norm_eps == (1e-5 if name == "v1" else 1e-6)
        assert parts.num_parameters[0] == sum(tensor.numel() for tensor in expected.values())


def test_the_reference_has_the_policys_revision_of_the_same_model_only():
    values = {"pretrain": "org/a", "actor_train": {"model_args": {"revision": "v1"}}}
    assert parse_config(values).reference_path == "org/a@v1"
    other = parse_config(values | {"reference": {"model_args": {"model_name_or_path": "org/b"}}})
    assert (other.policy_path, other.reference_path) == ("org/a@v1", "org/b")
    own = parse_config(values | {"reference": {"model_args": {"revision": "v2"}}})
    assert (own.tokenizer_path, own.reference_path) == ("org/a@v1", "org/a@v2")


def test_an_export_reads_the_revision_of_the_run(tmp_path):
    save_json(tmp_path / "config.json", config_of("v1").model_dump(mode="json"))
    assert trained_model(tmp_path)[0] == f"{NAME}@v1"


def test_a_revision_that_is_not_cached_is_rejected_in_offline_mode(revisions):
    with pytest.raises(UserError) as raised:
        load_model_config(f"{NAME}@v9")
    assert str(raised.value) == (
        f"{NAME}@v9 is neither a model directory nor in the Hugging Face cache, and HF_HUB_OFFLINE is set; give the "
        f"path of a model directory, or run `hf download {NAME} --revision v9` with a network"
    )


def test_a_revision_of_a_directory_is_rejected(revisions):
    with pytest.raises(UserError, match=r"revision v1 has no effect on .*, which is on this machine; remove it"):
        load_model_config(f"{revisions['main']}@v1")
