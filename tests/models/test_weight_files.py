"""One process, sharded loading and the digest read the weight files that transformers reads, or reject them alike."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from tests.support.gguf_files import write_gguf
from tests.support.tiny_llama import save_tiny_llama
from thresher.builders.engines import check_engine
from thresher.config import parse_config
from thresher.errors import UserError
from thresher.models.loading import load, load_sharded
from thresher.models.loading.load import load_model, load_model_config
from thresher.models.loading.load_sharded import build_on_meta, load_local_shards
from thresher.reference.fingerprint import weights_digest

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PT = {"format": "pt"}
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    """Two models with different weights, and the files of both in one file and in shards."""
    directory = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("right", "wrong")):
        save_tiny_llama(directory / name, seed)
        model = LlamaForCausalLM.from_pretrained(directory / name)
        model.save_pretrained(directory / f"{name}-shards", max_shard_size="8KB")
    return {path.name: path for path in directory.iterdir()}


@pytest.fixture
def models_in(models, tmp_path) -> Callable[..., Path]:
    """Copy models into one directory, later ones over earlier ones."""

    def copy(*names: str) -> Path:
        for name in names:
            shutil.copytree(models[name], tmp_path / "model", dirs_exist_ok=True)
        return tmp_path / "model"

    return copy


def update_json(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def read_sharded(path: str) -> dict[str, Tensor]:
    model = build_on_meta(path, dtype=torch.float32)
    load_local_shards(model, path, CPU)
    return model.state_dict()


def read_in_one_process(path: str) -> dict[str, Tensor]:
    return load_model(path).state_dict()


READERS = {"one process": read_in_one_process, "sharded": read_sharded, "digest": weights_digest}


def message(read: Callable[[str], object], path: Path | str) -> str:
    with pytest.raises(UserError) as caught:
        read(str(path))
    return str(caught.value)


def single_file(models_in):
    return models_in("right")


def shards(models_in):
    return models_in("right-shards")


def single_file_beside_stale_shards(models_in):
    return models_in("wrong-shards", "right")


def pickles_beside_safetensors(models_in):
    path = models_in("right")
    torch.save({"model.norm.weight": torch.zeros(16)}, path / "pytorch_model.bin")
    return path


def named_file_beside_single_file(models_in):
    path = models_in("right")
    (path / SINGLE).rename(path / "best.safetensors")
    path = models_in("wrong")
    update_json(path / "config.json", transformers_weights="best.safetensors")
    return path


def named_file_in_a_subdirectory(models_in):
    path = models_in("right")
    (path / "best").mkdir()
    (path / SINGLE).rename(path / "best" / SINGLE)
    path = models_in("wrong")
    update_json(path / "config.json", transformers_weights=f"best/{SINGLE}")
    return path


def named_index_beside_single_file(models_in):
    path = models_in("right-shards")
    (path / INDEX).rename(path / "best.safetensors.index.json")
    path = models_in("wrong")
    update_json(path / "config.json", transformers_weights="best.safetensors.index.json")
    return path


def unused_index_without_metadata(models_in):
    path = models_in("right")
    (path / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": "old.safetensors"}}))
    return path


def null_as_the_named_file(models_in):
    path = models_in("wrong-shards", "right")
    update_json(path / "config.json", transformers_weights=None)
    return path


def symlinks_into_a_hub_cache(models_in):
    path = models_in("right-shards")
    blobs = path.parent / "blobs"
    blobs.mkdir()
    for number, file in enumerate(sorted(path.iterdir())):
        file.rename(blobs / str(number))
        file.symlink_to(Path("..", "blobs", str(number)))
    return path


def symlinked_directory(models_in):
    path = models_in("right-shards")
    link = path.parent / "link"
    link.symlink_to(path, target_is_directory=True)
    return link


def snapshot_of_a_hub_cache(models_in):
    path = models_in("right-shards")
    return hub_cache(path.parent / "hub", path)


def dangling_link_beside_shards(models_in):
    path = models_in("right-shards")
    (path / SINGLE).symlink_to("absent")
    return path


def tensor_in_two_shards(models_in):
    path = models_in("right-shards")
    first, *_, last = sorted(path.glob("model-*.safetensors"))
    name, tensor = next(iter(load_file(last).items()))
    save_file(load_file(first) | {name: torch.zeros_like(tensor)}, first, metadata=PT)
    # the index points to the first shard, and transformers reads the last one
    weight_map = json.loads((path / INDEX).read_text())["weight_map"]
    update_json(path / INDEX, weight_map=weight_map | {name: first.name})
    return path


@pytest.mark.parametrize(
    "layout",
    [
        single_file,
        shards,
        single_file_beside_stale_shards,
        pickles_beside_safetensors,
        named_file_beside_single_file,
        named_file_in_a_subdirectory,
        named_index_beside_single_file,
        unused_index_without_metadata,
        null_as_the_named_file,
        symlinks_into_a_hub_cache,
        symlinked_directory,
        snapshot_of_a_hub_cache,
        dangling_link_beside_shards,
        tensor_in_two_shards,
    ],
    ids=lambda layout: layout.__name__,
)
def test_all_readers_read_the_weights_that_transformers_reads(layout, models_in, models):
    path = layout(models_in)
    expected = AutoModelForCausalLM.from_pretrained(path).state_dict()
    right = load_file(models["right"] / SINGLE)
    assert all(torch.equal(expected[name], tensor) for name, tensor in right.items())
    for read in (read_in_one_process, read_sharded):
        weights = read(str(path))
        assert weights.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(weights[name], tensor), f"{read.__name__}: {name}"
    assert weights_digest(str(path)) == weights_digest(str(models["right"]))


def pickles_only(path):
    torch.save(load_file(path / SINGLE), path / "pytorch_model.bin")
    (path / SINGLE).unlink()


def no_weights(path):
    (path / SINGLE).unlink()


def named_file_is_absent(path):
    update_json(path / "config.json", transformers_weights="best.safetensors")


def named_file_is_a_pickle(path):
    torch.save(load_file(path / SINGLE), path / "adapter_model.bin")
    update_json(path / "config.json", transformers_weights="adapter_model.bin")


def named_file_is_outside(path):
    shutil.copy(path / SINGLE, path.parent / SINGLE)
    update_json(path / "config.json", transformers_weights=f"../{SINGLE}")


def named_file_is_a_number(path):
    update_json(path / "config.json", transformers_weights=5)


def named_file_of_a_nested_config(path):
    update_json(path / "config.json", transformers_weights=SINGLE, text_config={"model_type": "llama"})


def corrupt_file(path):
    (path / SINGLE).write_bytes((path / SINGLE).read_bytes()[:-1])


def index_of_pickles(path):
    torch.save(load_file(path / SINGLE), path / "model.bin")
    names = dict.fromkeys(load_file(path / SINGLE), "model.bin")
    (path / SINGLE).unlink()
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))


def index_without_metadata(path):
    (path / SINGLE).rename(path / "a.safetensors")
    (path / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": "a.safetensors"}}))


def absent_shard(path):
    (path / SINGLE).unlink()
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": {"model.norm.weight": "a.safetensors"}}))


def adapter(path):
    (path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(path)}))


def distributed_checkpoint(path):
    shutil.copy(path / SINGLE, path / "shard-00001-model-00001-of-00002.safetensors")


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (
            pickles_only,
            "has no safetensors weights, only pickles (pytorch_model.bin), which can run code when they are",
        ),
        (no_weights, "has no safetensors weights (model.safetensors or model.safetensors.index.json); load it with"),
        (named_file_is_absent, "has no best.safetensors, which its config.json names as transformers_weights; copy"),
        (named_file_is_a_pickle, "names 'adapter_model.bin' as transformers_weights; name a .safetensors file or"),
        (named_file_is_outside, "names '../model.safetensors' as transformers_weights; name a .safetensors file or"),
        (named_file_is_a_number, "names 5 as transformers_weights; name a .safetensors file or a .safetensors.index"),
        (named_file_of_a_nested_config, "has both text_config and transformers_weights, which transformers may ignore"),
        (corrupt_file, "model.safetensors is not a readable safetensors file"),
        (index_of_pickles, "names 'model.bin', which is not a safetensors file; load the model with"),
        (index_without_metadata, "is not a weight index ('metadata'); copy or download the model again"),
        (absent_shard, "has no a.safetensors, which its index names; copy or download the model again"),
        (adapter, "contains a PEFT adapter (adapter_config.json); merge it into its base model with"),
        (distributed_checkpoint, "contains a distributed checkpoint (shard-00001-model-00001-of-00002.safetensors)"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_all_readers_reject_unreadable_weights_with_one_message(spoil, expected, models_in):
    path = models_in("right")
    spoil(path)
    messages = {name: message(read, path) for name, read in READERS.items()}
    assert expected in messages["digest"]
    assert set(messages.values()) == {messages["digest"]}


def hub_cache(root: Path, model: Path) -> Path:
    """Write a model to a Hugging Face cache as org/name: a snapshot of links into blobs; return the snapshot."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = root / "models--org--name"
    shutil.copytree(model, repository / "blobs")
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    for blob in (repository / "blobs").iterdir():
        (snapshot / blob.name).symlink_to(Path("..", "..", "blobs", blob.name))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    return snapshot


@pytest.fixture
def hub_model(models, tmp_path, monkeypatch) -> str:
    """A sharded model in the Hugging Face cache, without network."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    hub_cache(tmp_path / "hub", models["right-shards"])
    return "org/name"


def test_a_model_in_the_hub_cache_is_read_alike(hub_model, models):
    right = load_file(models["right"] / SINGLE)
    weights = read_in_one_process(hub_model)
    assert all(torch.equal(weights[name], tensor) for name, tensor in right.items())
    assert weights_digest(hub_model) == weights_digest(str(models["right"]))


def test_a_missing_gguf_package_names_the_extra_to_install(tmp_path, monkeypatch):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    monkeypatch.setattr("thresher.optional.find_spec", lambda _: None)
    for read in (load.load_tokenizer, load.load_model_config, load.load_model):
        assert (
            message(read, str(path))
            == f"reading {path} needs gguf, which is not installed; run `pip install 'thresher[gguf]'`"
        )


def test_a_model_that_is_not_a_directory_cannot_be_sharded(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    for path in (str(tmp_path / "model.gguf"), "org/name"):
        config = parse_config({"pretrain": path, "actor_train": {"num_workers": 2}})
        messages = {
            message(read_sharded, path),
            message(lambda _, config=config: check_engine(config, "actor_train"), path),
        }
        assert messages == {
            f"{path} cannot be sharded: it is not a directory with safetensors weights; download or convert it, or set "
            "strategy_args.strategy_config.dp_replicate to the number of workers for a full copy per worker"
        }


def test_a_quantized_model_cannot_be_sharded(models_in):
    path = models_in("right")
    update_json(path / "config.json", quantization_config={"quant_method": "fp8"})
    config = parse_config({"pretrain": str(path), "actor_train": {"num_workers": 2}})
    messages = {message(read_sharded, path), message(lambda _: check_engine(config, "actor_train"), path)}
    assert len(messages) == 1
    assert "cannot be sharded: its weights are quantized, and not by bitsandbytes; " in messages.pop()


def test_unreadable_weights_are_rejected_before_any_worker_starts(models_in):
    path = models_in("right")
    pickles_only(path)
    config = parse_config({"pretrain": str(path), "actor_train": {"num_workers": 2}})
    assert message(lambda _: check_engine(config, "actor_train"), path) == message(weights_digest, path)


def test_a_gguf_file_is_read_in_one_process_and_by_the_digest_and_is_never_sharded(models, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", models["right"])
    right = load_file(models["right"] / SINGLE)
    weights = read_in_one_process(str(path))
    assert all(torch.equal(weights[name], tensor) for name, tensor in right.items())
    before = weights_digest(str(path))
    assert before == weights_digest(str(shutil.copy(path, tmp_path / "copy.gguf")))
    path = write_gguf(path, models["wrong"])
    assert weights_digest(str(path)) != before
    assert "cannot be sharded" in message(read_sharded, path)


def test_the_config_of_a_gguf_file_is_read_once_until_the_file_changes(models, tmp_path, monkeypatch):
    path, reads = write_gguf(tmp_path / "model.gguf", models["right"]), []
    read = AutoConfig.from_pretrained
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda *args, **rest: reads.append(args) or read(*args, **rest))
    first = load_model_config(str(path))
    first.hidden_size = 7  # of a copy
    assert load_model_config(str(path)).hidden_size == load_model_config(str(path)).hidden_size != 7
    assert len(reads) == 1
    os.utime(path, ns=(1, 1))
    load_model_config(str(path))
    assert len(reads) == 2


def test_a_model_from_a_gguf_file_is_saved_as_a_plain_model(models, tmp_path):
    load_model(str(write_gguf(tmp_path / "model.gguf", models["right"]))).save_pretrained(tmp_path / "plain")
    right, saved = load_file(models["right"] / SINGLE), load_file(tmp_path / "plain" / SINGLE)
    assert all(torch.equal(saved[name], tensor) for name, tensor in right.items())
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())


LOADERS = (read_in_one_process, read_sharded)


def rewrite(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    weights = load_file(path / SINGLE)
    change(weights)
    save_file(weights, path / SINGLE, metadata=PT)


def check_rejected_alike(path: Path, expected: str) -> None:
    messages = {message(read, path) for read in LOADERS}
    assert len(messages) == 1
    assert expected in messages.pop()


def test_tied_weights_stored_with_different_values_are_rejected(models_in):
    """transformers unties them with a warning, which sharded loading cannot know."""
    path = models_in("right")
    update_json(path / "config.json", tie_word_embeddings=True)
    check_rejected_alike(path, "ties lm_head.weight to model.embed_tokens.weight, but the weight files have different")


def test_tied_weights_that_differ_in_the_last_row_of_a_large_vocabulary_are_rejected(models_in):
    """Sharded loading compares them in blocks of rows; only the second block differs."""
    path, num_rows = models_in("right"), load_sharded._ROWS_AT_ONCE + 1
    update_json(path / "config.json", tie_word_embeddings=True, vocab_size=num_rows)
    matrix = torch.zeros(num_rows, 16)
    other = matrix.clone()
    other[-1] = 1.0
    rewrite(path, lambda weights: weights.update({"model.embed_tokens.weight": matrix, "lm_head.weight": other}))
    check_rejected_alike(path, "ties lm_head.weight to model.embed_tokens.weight, but the weight files have different")


@pytest.mark.parametrize("stored", [("lm_head.weight",), ("model.embed_tokens.weight",), None], ids=str)
def test_tied_weights_are_read_alike_from_either_name_or_both(models_in, stored):
    path = models_in("right")
    update_json(path / "config.json", tie_word_embeddings=True)
    both = ("lm_head.weight", "model.embed_tokens.weight")
    matrix = load_file(path / SINGLE)["lm_head.weight"]

    def tie(weights: dict[str, Tensor]) -> None:
        for name in both:
            weights.pop(name)
        weights.update({name: matrix.clone() for name in stored or both})

    rewrite(path, tie)
    for read in LOADERS:
        weights = read(str(path))
        assert all(torch.equal(weights[name], matrix) for name in both)


def test_an_absent_tensor_is_rejected(models_in):
    path = models_in("right")
    rewrite(path, lambda weights: weights.pop("lm_head.weight"))
    check_rejected_alike(path, "have no tensor lm_head.weight; download the model again")


def test_a_tensor_of_another_shape_is_rejected(models_in):
    path = models_in("right")
    rewrite(path, lambda weights: weights.update({"lm_head.weight": torch.ones(60, 16)}))
    check_rejected_alike(path, "lm_head.weight has shape [60, 16] in ")


def test_sharded_loading_reads_persistent_buffers(models_in):
    path = models_in("right")
    stored = torch.tensor([1.0, 2.0, 3.0])
    rewrite(path, lambda weights: weights.update({"model.scale": stored}))
    model = build_on_meta(str(path), dtype=torch.float32)
    model.model.register_buffer("scale", torch.zeros(3))
    model.model.register_buffer("computed", torch.ones(3), persistent=False)
    load_local_shards(model, str(path), CPU)
    assert torch.equal(model.model.scale, stored)
    assert torch.equal(model.model.computed, torch.ones(3))
    model.model.register_buffer("absent", torch.zeros(3))
    with pytest.raises(UserError, match=r"have no tensor model\.absent"):
        load_local_shards(model, str(path), CPU)


def test_transformers_logs_nothing_while_a_model_is_loaded(models, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    load_model(str(models["right"]))
    assert caplog.messages == []
