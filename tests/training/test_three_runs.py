"""examples/smollm2 with a tiny model in the place of SmolLM2: its data, and two steps of each run."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from thresher.config import load_config
from thresher.pipeline import DPOPipeline

pytestmark = pytest.mark.slow

EXAMPLE = ROOT / "examples" / "smollm2"
RUNS = sorted(path.stem for path in EXAMPLE.glob("*.yaml"))
SHORT = ["max_steps=2", "eval_steps=2", "save_steps=2", "samples.num_prompts=1", "samples.max_new_tokens=4"]


@pytest.fixture(scope="module")
def directory(tiny_dir, tmp_path_factory) -> Path:
    """A directory in which the example's script has been run."""
    made = tmp_path_factory.mktemp("three_runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(made)
        runpy.run_path(str(EXAMPLE / "prepare.py"))["main"](str(tiny_dir))
    return made


def rows(directory: Path, name: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in (directory / "output/three-runs" / name).read_text().splitlines()]


def test_no_prompt_is_in_both_splits_and_the_labels_are_those_of_the_pairs(directory):
    train, held_out = rows(directory, "train.jsonl"), rows(directory, "validation.jsonl")
    assert (len(train), len(held_out)) == (160, 64)
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in held_out}
    for name, pairs in (("train", train), ("validation", held_out)):
        labelled = {(row["prompt"], row["completion"]): row["label"] for row in rows(directory, f"{name}_labels.jsonl")}
        expected = {(row["prompt"], row[side]): side == "chosen" for row in pairs for side in ("chosen", "rejected")}
        assert labelled == expected


@pytest.mark.parametrize("run", RUNS)
def test_a_run_trains_evaluates_and_answers(run, directory, monkeypatch):
    monkeypatch.chdir(directory)
    config = load_config(EXAMPLE / f"{run}.yaml", SHORT)
    last = DPOPipeline(config).run()
    logs = Path(config.output_dir) / "logs"
    first = json.loads((logs / "metrics.jsonl").read_text().splitlines()[0])
    assert first["eval/loss"] != last["eval/loss"]
    samples = [json.loads(line) for line in (logs / "samples.jsonl").read_text().splitlines()]
    assert [sample["step"] for sample in samples] == [0, 2]
    assert samples[0]["policy"] == samples[0]["reference"]
