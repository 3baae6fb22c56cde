"""No pickle is loaded from checkpoints, models, adapters, tokenizers, caches, stores or data sets."""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.attacks import Canary, CommandLine, Run, update_manifest

CHECKPOINT_FILES = (
    *("weights.safetensors", "optimizer.safetensors", "rng.safetensors", "optimizer.json", "rng.json"),
    *("config.json", "trainer.json", "manifest.json"),
)


def test_checkpoint_files_is_the_list_of_files_in_a_checkpoint(finished_run: Run) -> None:
    assert {path.name for path in finished_run.checkpoint.iterdir()} == set(CHECKPOINT_FILES)


@pytest.mark.parametrize("name", CHECKPOINT_FILES)
def test_a_pickle_in_place_of_a_checkpoint_file_is_rejected(
    attacked: Run, canary: Canary, thresher: CommandLine, tmp_path: Path, name: str
) -> None:
    for content in (canary.pickled, canary.saved):
        (attacked.checkpoint / name).write_bytes(content)
        if name != "manifest.json":
            update_manifest(attacked.checkpoint)
        resumed = thresher("train", attacked.config(resume_from_checkpoint=str(attacked.checkpoint), max_steps=3))
        assert resumed.code == 2
        exported = thresher("export", attacked.checkpoint, "--output", tmp_path / "out")
        assert exported.code == (0 if name.startswith(("optimizer", "rng")) else 2)
        shutil.rmtree(tmp_path / "out", ignore_errors=True)


def test_extra_pickles_in_a_checkpoint_are_not_opened(
    attacked: Run, canary: Canary, thresher: CommandLine, tmp_path: Path
) -> None:
    for name in ("pytorch_model.bin", "model.pt", "optimizer.pt", "training_args.bin", "rng_state.pth", "scheduler.pt"):
        (attacked.checkpoint / name).write_bytes(canary.saved)
    update_manifest(attacked.checkpoint)
    resumed = attacked.config(resume_from_checkpoint="auto", max_steps=3)
    assert thresher("train", resumed).code == 0
    assert thresher("export", attacked.output, "--output", tmp_path / "out").code == 0


def replace_weights_by_pickle(model: Path, content: bytes) -> None:
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(content)


@pytest.mark.parametrize("axes", [{}, {"runtime": "local"}])
def test_a_model_with_only_pickled_weights_is_rejected(
    attacked: Run, canary: Canary, thresher: CommandLine, tmp_path: Path, axes: dict[str, str]
) -> None:
    for content in (canary.pickled, canary.saved):
        shutil.rmtree(attacked.model)
        shutil.copytree(attacked.directory / "reference", attacked.model)
        replace_weights_by_pickle(attacked.model, content)
        shutil.rmtree(attacked.output, ignore_errors=True)  # a rejected run writes nothing
        for mode in ("precompute", "concurrent"):
            config = attacked.config(reference={"mode": mode}, **axes)
            result = thresher("train", config)
            assert result.code == 2
            assert "safetensors" in result.text
        assert thresher("precompute-reference", attacked.config()).code == 2


def test_a_run_whose_model_was_replaced_by_pickles_is_not_exported(
    attacked: Run, canary: Canary, thresher: CommandLine, tmp_path: Path
) -> None:
    replace_weights_by_pickle(attacked.model, canary.saved)
    result = thresher("export", attacked.output, "--output", tmp_path / "out")
    assert result.code == 2
    assert not (tmp_path / "out").exists()


def test_a_sharded_model_is_read_from_safetensors_only(attacked: Run, canary: Canary) -> None:
    from thresher.errors import UserError
    from thresher.models.loading.load_sharded import SafetensorsReader

    replace_weights_by_pickle(attacked.model, canary.saved)
    with pytest.raises(UserError, match="has no safetensors weights"):
        SafetensorsReader(attacked.model)
    (attacked.model / "model.safetensors").write_bytes(canary.saved)
    with pytest.raises(UserError):
        SafetensorsReader(attacked.model)


@pytest.mark.parametrize("name", ["adapter_model.bin", "adapter_model.safetensors"])
def test_a_pickled_adapter_is_not_loaded(attacked: Run, canary: Canary, thresher: CommandLine, name: str) -> None:
    adapter = attacked.directory / "adapter"
    shutil.copytree(attacked.model, adapter)
    (adapter / "model.safetensors").unlink()
    values = {"peft_type": "LORA", "base_model_name_or_path": str(attacked.model), "r": 2, "target_modules": ["q_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(values | {"task_type": "CAUSAL_LM"}))
    for content in (canary.pickled, canary.saved):
        (adapter / name).write_bytes(content)
        shutil.rmtree(attacked.output, ignore_errors=True)
        assert thresher("train", attacked.config(pretrain=str(adapter), max_steps=1)).code == 2


@pytest.mark.parametrize(
    "name",
    ["tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.pkl", "tokenizer.pickle", "vocab.json"],
)
def test_a_pickle_among_tokenizer_files_is_not_loaded(
    attacked: Run, canary: Canary, thresher: CommandLine, tmp_path: Path, name: str
) -> None:
    (attacked.model / name).write_bytes(canary.pickled)
    if name not in ("tokenizer.json", "tokenizer_config.json"):
        # without its main file, a tokenizer is loaded from the others
        (attacked.model / "tokenizer.json").unlink()
    result = thresher(
        "prepare", attacked.rows, "--template", "raw", "--model", attacked.model, "--output", tmp_path / "s"
    )
    assert result.code == 2


def test_pickles_in_the_reference_cache_are_not_loaded(attacked: Run, canary: Canary, thresher: CommandLine) -> None:
    (reference,) = attacked.cache.iterdir()
    (reference / "identity.json").write_bytes(canary.pickled)
    for shard in list(reference.glob("*.arrow")):
        time, count, _ = shard.stem.split("-")
        shard.unlink()
        for content in (canary.pickled, canary.saved):
            name = f"{time}-{count}-{hashlib.sha256(content).hexdigest()}.arrow"
            (reference / name).write_bytes(content)
    assert thresher("cache", "ls", "--cache-dir", attacked.cache).code == 0
    assert thresher("cache", "verify", "--cache-dir", attacked.cache).code == 1
    shutil.rmtree(attacked.output)
    assert thresher("train", attacked.config()).code == 0  # scored again
    assert thresher("cache", "prune", "--yes", "--cache-dir", attacked.cache).code == 0
    assert not reference.exists()


@pytest.mark.parametrize("name", ["manifest.json", "lengths.bin", "shards/00000.arrow"])
def test_pickles_in_a_store_are_not_loaded(attacked: Run, canary: Canary, thresher: CommandLine, name: str) -> None:
    file = attacked.store / name
    manifest = attacked.store / "manifest.json"
    values = json.loads(manifest.read_text())
    # of the same length: memory maps take a file's length from the manifest
    content = canary.pickled.ljust(file.stat().st_size, b"\0")
    file.write_bytes(content)
    for each in (*values["shards"], *values["indexes"]):
        if each["name"] == name:
            each |= {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            manifest.write_text(json.dumps(values))
    inspected = thresher("inspect", attacked.store, "--pair", 0)
    data = {"data_args": {"store": str(attacked.store), "file_name": [], "template": "auto"}}
    trained = thresher("train", attacked.config(output_dir=str(attacked.directory / "new"), actor_train=data))
    assert {inspected.code, trained.code} <= ({0, 2} if name == "lengths.bin" else {2})


@pytest.mark.parametrize(
    "suffix", ["jsonl", "json", "csv", "tsv", "parquet", "arrow", "feather", "jsonl.gz", "jsonl.zst", "pkl", "pt"]
)
def test_a_pickle_named_like_data_is_rejected(
    attacked: Run, canary: Canary, thresher: CommandLine, tmp_path: Path, suffix: str
) -> None:
    path = tmp_path / f"rows.{suffix}"
    for content in (canary.pickled, canary.saved):
        path.write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
        for how in ("fail", "skip", "quarantine"):
            options = ("--on-bad-row", how, "--template", "raw", "--model", attacked.model)
            assert thresher("prepare", path, *options, "--output", tmp_path / "store").code == 2
        train = {"data_args": {"file_name": str(path)}}
        config = attacked.config(output_dir=str(tmp_path / "new"), actor_train=train)
        assert thresher("train", config).code == 2


def save_data_set(directory: Path) -> Path:
    import datasets

    rows = [{"prompt": "w4 ", "chosen": "w5", "rejected": "w6"}] * 4
    datasets.Dataset.from_list(rows).save_to_disk(str(directory))
    return directory


@pytest.mark.parametrize("name", ["state.json", "dataset_info.json", "data-00000-of-00001.arrow"])
def test_a_pickle_in_a_saved_data_set_is_rejected(
    attacked: Run, canary: Canary, thresher: CommandLine, tmp_path: Path, name: str
) -> None:
    saved = save_data_set(tmp_path / "saved")
    (saved / name).write_bytes(canary.pickled)
    options = ("--template", "raw", "--model", attacked.model, "--output", tmp_path / "store")
    assert thresher("prepare", saved, *options).code == 2


def test_a_loading_script_is_not_executed(attacked: Run, canary: Canary, thresher: CommandLine, tmp_path: Path) -> None:
    script = f"open({str(canary.path)!r}, 'w')\n"
    saved = save_data_set(tmp_path / "saved")
    (saved / "saved.py").write_text(script)
    options = ("--template", "raw", "--model", attacked.model)
    assert thresher("prepare", saved, *options, "--output", tmp_path / "store").code == 0
    named = tmp_path / "owner" / "rows"
    named.mkdir(parents=True)
    (named / "rows.py").write_text(script)
    (named / "rows.pkl").write_bytes(canary.pickled)
    for name in (named, named / "rows.py", "hf://owner/rows", "hf://owner/rows/rows.py"):
        result = thresher("prepare", name, *options, "--output", tmp_path / "other")
        assert result.code == 2
        assert not canary.is_triggered


def test_values_that_ray_would_unpickle_are_read_as_bytes(canary: Canary, tmp_path: Path) -> None:
    """Ray registers an Arrow type whose values are unpickled by any reader of a file that names the type."""
    import ray.data  # noqa: F401
    from ray.data._internal.object_extensions.arrow import ArrowPythonObjectType

    from thresher.data.sources.readers import read_blocks
    from thresher.data.sources.resolve import resolve_sources

    kind = ArrowPythonObjectType()
    pickles = pa.ExtensionArray.from_storage(kind, pa.array([canary.pickled], kind.storage_type))
    nested = pa.ListArray.from_arrays(pa.array([0, 1], pa.int32()), pickles)
    inside = pa.StructArray.from_arrays([nested], names=["deep"])
    table = pa.table(
        {
            **{name: ["w4"] for name in ("prompt", "chosen")},
            "rejected": pickles,
            "extra": nested,
            "more": inside,
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    with pa.ipc.new_file(tmp_path / "a.arrow", table.schema) as sink:
        sink.write_table(table)
    with pa.ipc.new_stream(tmp_path / "b.arrow", table.schema) as sink:
        sink.write_table(table)
    for name in ("a.parquet", "a.arrow", "b.arrow"):
        (source,) = resolve_sources([str(tmp_path / name)])
        (block,) = read_blocks(source)
        assert block.contents[0]["rejected"] == canary.pickled
        assert block.contents[0]["more"] == {"deep": [canary.pickled]}
    pq.read_table(tmp_path / "a.parquet").to_pylist()
    assert canary.is_triggered  # a plain read does unpickle
    canary.path.unlink()
