"""The data settings of a run, read from its config."""

from __future__ import annotations

import json

import pytest

from tests.support.logged import logged
from tests.support.small_runs import save_small_model
from thresher.builders.data_parts import data_parts, data_settings
from thresher.builders.inputs import find_layout
from thresher.builders.preflight.files import check_data
from thresher.config import parse_config


def file_names(*names: str, dataset_dir: str | None) -> tuple[str, ...]:
    config = parse_config({"actor_train": {"data_args": {"file_name": list(names), "dataset_dir": dataset_dir}}})
    return data_settings(config, data_parts(config)[""]).file_names


def test_a_relative_file_name_that_does_not_exist_is_found_in_dataset_dir(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for name in ("here.jsonl", "data/here.jsonl", "data/there.jsonl"):
        (tmp_path / name).touch()
    names = ("here.jsonl", "there.jsonl", "data/there.jsonl", "t*.jsonl", "nowhere.jsonl", "hf://org/name")
    found = ("here.jsonl", "data/there.jsonl", "data/there.jsonl", "data/t*.jsonl", "nowhere.jsonl", "hf://org/name")
    assert file_names(*names, dataset_dir="data") == found
    assert file_names(*names, dataset_dir=None) == names


def test_template_arguments_reach_the_preparation():
    config = parse_config(
        {"actor_train": {"data_args": {"template_arguments": {"enable_thinking": False}, "file_name": "a"}}}
    )
    assert data_settings(config, data_parts(config)[""]).template_arguments == {"enable_thinking": False}


def test_the_check_before_a_run_finds_files_in_dataset_dir(tmp_path):
    (tmp_path / "rows.jsonl").write_text("{}\n")
    data = {"file_name": ["rows.jsonl", "other.jsonl"], "dataset_dir": str(tmp_path)}
    problems = list(check_data(parse_config({"actor_train": {"data_args": data}})))
    assert [str(problem).partition(" ")[0] for problem in problems] == ["'other.jsonl'"]


@pytest.mark.parametrize(("layout", "pad_id"), [("auto", None), ("shared", None), ("packed", None), ("padded", 2)])
def test_a_tokenizer_without_a_pad_token_needs_one_only_to_pad_and_uses_eos(tmp_path, layout, pad_id):
    model = save_small_model(tmp_path / "model", 0)
    file = model / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    del settings["pad_token"]
    file.write_text(json.dumps(settings))
    with logged() as messages:
        tokenizer, found, note = find_layout(parse_config({"pretrain": str(model), "layout": layout}))
    assert (tokenizer.pad_token, getattr(found, "pad_id", None), note) == (None, pad_id, None)
    assert messages == []


def test_a_revision_names_the_hub_data_sets_of_a_run():
    config = parse_config(
        {"actor_train": {"data_args": {"file_name": ["a.jsonl", "hf://org/b:test"], "revision": "v2"}}}
    )
    assert data_settings(config, data_parts(config)[""]).file_names == ("a.jsonl", "hf://org/b@v2:test")
