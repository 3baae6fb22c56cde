"""The data and the model of examples/quickstart; scripts/first-hour runs its commands."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import torch

from tests.support.paths import ROOT
from thresher.data.prepare.findings import find_leaks
from thresher.data.prepare.prepare import prepare
from thresher.data.settings import DataSettings
from thresher.data.store.reader import ExampleStore

EXAMPLE = ROOT / "examples" / "quickstart"
MAKE = runpy.run_path(str(EXAMPLE / "make_tiny_model.py"))


def test_the_pairs_are_distinct_and_the_sides_of_similar_length(tmp_path: Path) -> None:
    tokenizer = MAKE["make_tokenizer"]()
    for name, num_pairs in (("train", 200), ("validation", 24)):
        report = prepare(DataSettings(str(EXAMPLE / f"{name}.jsonl"), sequence_length=256), tokenizer, tmp_path / name)
        assert (report.rows_read, report.pairs_kept, report.dropped) == (num_pairs, num_pairs, {})
        assert [finding for finding in report.findings if finding.count] == []
        assert report.length_bias is not None
        assert 0.4 < report.length_bias.share_chosen_longer < 0.6
    leaks = find_leaks(ExampleStore.open(tmp_path / "validation"), ExampleStore.open(tmp_path / "train"))
    assert [leak.count for leak in leaks] == [0, 0]


def test_no_text_occurs_twice() -> None:
    lines = [line for name in ("train", "validation") for line in (EXAMPLE / f"{name}.jsonl").read_text().splitlines()]
    for key in ("prompt", "chosen", "rejected"):
        texts = [json.loads(line)[key].lower() for line in lines]
        assert len(set(texts)) == len(texts), key


def test_the_script_makes_the_same_model_each_time() -> None:
    tokenizers = [MAKE["make_tokenizer"]() for _ in range(2)]
    assert tokenizers[0].backend_tokenizer.to_str() == tokenizers[1].backend_tokenizer.to_str()
    first, second = (MAKE["make_model"](tokenizer).state_dict() for tokenizer in tokenizers)
    assert all(torch.equal(weight, second[name]) for name, weight in first.items())
