"""DPOPipeline by hand: ROLL's argument and attributes, and evaluation without training."""

from __future__ import annotations

import re

import pytest

from tests.support.compared_runs import metric_log
from tests.support.paths import ROOT
from thresher.builders import inputs
from thresher.config import parse_config
from thresher.errors import UserError
from thresher.pipeline import DPOPipeline
from thresher.runtime.rank import PolicyRank


def test_the_config_may_be_named_as_in_roll(base, tmp_path):
    config = parse_config({**base, "output_dir": str(tmp_path)})
    assert DPOPipeline(pipeline_config=config).config is config
    with pytest.raises(UserError, match="takes one config"):
        DPOPipeline(config, pipeline_config=config)
    with pytest.raises(UserError, match="takes one config"):
        DPOPipeline()


def test_the_roles_of_an_open_pipeline_make_the_steps_of_a_run(base, tmp_path):
    by_hand = DPOPipeline(parse_config({**base, "output_dir": str(tmp_path / "hand")}))
    with pytest.raises(UserError, match=r"the constructor loads no models; use .* inside `with pipeline.open\(\):`"):
        _ = by_hand.actor_train
    with by_hand.open():
        losses = [by_hand.actor_train.training_step()["loss"].mean for _ in range(2)]
        assert by_hand.reference.cached
    DPOPipeline(parse_config({**base, "output_dir": str(tmp_path / "run")})).run()
    assert losses == [record["loss"] for record in metric_log(tmp_path / "run") if "loss" in record][:2]


def test_evaluation_of_the_newest_checkpoint_equals_that_of_the_run(base, tmp_path):
    config = parse_config({**base, "output_dir": str(tmp_path)})
    initial = DPOPipeline(config).evaluate()
    assert DPOPipeline(config).run() == DPOPipeline(config).evaluate() != initial


def test_the_checks_and_the_run_share_their_inputs(base, tmp_path, monkeypatch):
    found = []
    find_layout = inputs.find_layout
    monkeypatch.setattr(inputs, "find_layout", lambda config: found.append(config) or find_layout(config))
    DPOPipeline(parse_config({**base, "output_dir": str(tmp_path)})).run()
    assert len(found) == 1


def test_the_workers_of_the_policy_have_the_methods_that_the_page_calls():
    page = (ROOT / "docs" / "train" / "python.md").read_text(encoding="utf-8")
    called = re.findall(r'call\("(\w+)"\)', page)
    assert {"training_step", "evaluate", "save"} <= set(called)
    for name in called:
        assert callable(getattr(PolicyRank, name))
