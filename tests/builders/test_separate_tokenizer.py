"""`model_args.tokenizer_name_or_path`: pairs, checks and the exported model use its tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoTokenizer
from typer.testing import CliRunner

from tests.support.compared_runs import merge
from tests.support.small_runs import make_base, save_small_model
from thresher.builders.data import open_given_store
from thresher.builders.export import export_checkpoint
from thresher.builders.preflight import check_run
from thresher.cli import app
from thresher.config import parse_config
from thresher.data.store.reader import ExampleStore
from thresher.errors import UserError
from thresher.models.loading.load import load_tokenizer
from thresher.pipeline import DPOPipeline

TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


def swap_words(directory: Path) -> None:
    """Give w10 and w20 the ids of each other."""
    file = directory / "tokenizer.json"
    values = json.loads(file.read_text())
    words = values["model"]["vocab"]
    words["w10"], words["w20"] = words["w20"], words["w10"]
    file.write_text(json.dumps(values))


@pytest.fixture
def tokenizer_dir(tmp_path: Path) -> Path:
    """A directory with a tokenizer and nothing else."""
    model = save_small_model(tmp_path / "other", 0)
    directory = tmp_path / "tokenizer"
    directory.mkdir()
    for name in TOKENIZER:
        shutil.copy(model / name, directory)
    swap_words(directory)
    return directory


@pytest.fixture
def values(tmp_path: Path, tokenizer_dir: Path) -> dict[str, Any]:
    base = make_base(tmp_path)
    args = {"dtype": "fp32", "tokenizer_name_or_path": str(tokenizer_dir)}
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "w10 ", "chosen": "w20 w11", "rejected": "w12"}) + "\n")
    changes = {"max_steps": 1, "save_steps": 0, "eval_steps": 0, "validation": None, "reference": {"model_args": {}}}
    data = {"file_name": str(rows), "template": "raw"}
    training = {"global_batch_size": 1, "per_device_train_batch_size": 1}
    role = {"model_args": args, "data_args": data, "training_args": training}
    return merge(base, changes) | {
        "actor_train": merge(base["actor_train"], role),
        "reference": {},
        "output_dir": str(tmp_path / "run"),
        "cache_dir": str(tmp_path / "cache"),
    }


def test_a_tokenizer_directory_needs_no_model(tokenizer_dir):
    assert load_tokenizer(str(tokenizer_dir))("w10 w11")["input_ids"] == [20, 11]


def test_a_directory_without_a_tokenizer_is_rejected(tmp_path, values):
    (tmp_path / "empty").mkdir()
    args = {"actor_train": {"model_args": {"tokenizer_name_or_path": str(tmp_path / "empty")}}}
    with pytest.raises(UserError, match=r"tokenizer directory .*empty has neither tokenizer\.json"):
        check_run(parse_config(merge(values, args)))


def test_a_run_prepares_and_exports_with_the_separate_tokenizer(tmp_path, values, tokenizer_dir):
    config = parse_config(values)
    check_run(config)
    DPOPipeline(config).run()
    (store,) = (ExampleStore.open(path) for path in (tmp_path / "run" / "data").iterdir())
    pair = store[0]
    assert [pair.prompt_ids.tolist(), pair.chosen.ids.tolist()] == [[20], [10, 11, 2]]
    export_checkpoint(tmp_path / "run" / "checkpoints" / "step-00000001", tmp_path / "exported")
    assert AutoTokenizer.from_pretrained(tmp_path / "exported")("w10")["input_ids"] == [20]


def test_the_tokenizer_is_part_of_the_stores_identity_by_its_content(tmp_path, values, tokenizer_dir):
    """The same files elsewhere are the same tokenizer; the model's own is another one."""
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    command = ["prepare", "--config", str(tmp_path / "config.yaml"), "--output", str(tmp_path / "store")]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    copy = shutil.copytree(tokenizer_dir, tmp_path / "copy")
    store = tmp_path / "store"
    for path in (tokenizer_dir, copy):
        config = parse_config(merge(values, {"actor_train": {"model_args": {"tokenizer_name_or_path": str(path)}}}))
        open_given_store(config, str(store), load_tokenizer(str(config.tokenizer_path)))
    own = parse_config(merge(values, {"actor_train": {"model_args": {"tokenizer_name_or_path": None}}}))
    with pytest.raises(UserError, match=f"prepare it again with --model {own.policy_path}"):
        open_given_store(own, str(store), load_tokenizer(str(own.tokenizer_path)))
    shown = CliRunner().invoke(app, ["inspect", str(store), "--model", str(tokenizer_dir), "--pair", "0"])
    assert shown.exit_code == 0, shown.output
    assert "w20" in shown.output
