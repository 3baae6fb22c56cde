"""A package that is not thresher adds a strategy through an entry point: config, checks, training, reference."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import toy_strategy
from tests.support.compared_runs import merge
from tests.support.small_runs import last_weights, make_base
from thresher.builders.engines import check_engine
from thresher.builders.inputs import find_layout
from thresher.config import parse_config, strategies
from thresher.errors import UserError
from thresher.pipeline import DPOPipeline


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_strategy.install(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def base(directory: Path) -> dict[str, Any]:
    return {**make_base(directory), "max_steps": 2, "layout": "padded"}


@pytest.fixture
def installed(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package is visible in this process."""
    caches = (strategies._entry_points, strategies.find_strategy)
    monkeypatch.syspath_prepend(str(directory))
    for each in caches:
        each.cache_clear()
    yield
    for each in caches:
        each.cache_clear()


@pytest.mark.usefixtures("installed")
def test_a_run_on_it_trains_and_its_settings_have_their_effect(directory, base):
    runs = {
        "native": None,
        "same": {"strategy_name": "toy_train"},
        "slower": {"strategy_name": "toy_train", "strategy_config": {"rate": 0.5, "nested": {"a": [1, 2]}}},
    }
    for name, strategy in runs.items():
        changes: dict[str, Any] = {"output_dir": str(directory / name)}
        if strategy is not None:
            changes["actor_train"] = {"strategy_args": strategy}
            changes["reference"] = {"strategy_args": {"strategy_name": "toy_infer"}}
        DPOPipeline(parse_config(merge(base, changes))).run()
    native, same, slower = (last_weights(directory / name) for name in runs)
    assert all(tensor.equal(native[name]) for name, tensor in same.items())
    assert not all(tensor.equal(native[name]) for name, tensor in slower.items())
    checkpoint = max((directory / "slower" / "checkpoints").iterdir())
    stored = json.loads((checkpoint / "config.json").read_text())
    assert stored["actor_train"]["strategy_args"]["strategy_config"] == {
        "learning_rate_factor": 0.5,
        "nested": {"a": [1, 2]},
    }


@pytest.mark.usefixtures("installed")
def test_its_limits_are_reported_before_anything_starts(base):
    def message(strategy: dict[str, Any], values: dict[str, Any] = base, **policy: Any) -> str:
        with pytest.raises(UserError) as caught:  # noqa: PT012
            config = parse_config(
                {**values, "actor_train": {**base["actor_train"], "strategy_args": strategy, **policy}}
            )
            check_engine(config, "actor_train")
            find_layout(config)
        return str(caught.value)

    toy = {"strategy_name": "toy_train"}
    assert message(toy, num_workers=3) == "actor_train has 3 workers; toys have at most 2"
    assert message(toy, model_args={}) == (
        "actor_train: toy_train does not compute in bf16; set model_args.dtype to fp32"
    )
    lora = {"dtype": "fp32", "lora_rank": 2}
    assert "toy_train does not support LoRA adapters" in message(toy, model_args=lora)
    assert "toy_train does not support layout shared; use layout=auto or layout=padded" in message(
        toy, {**base, "layout": "shared"}
    )
    wrong = {**toy, "strategy_config": {"learning_rate_factor": -1}}
    assert "strategy_config.learning_rate_factor: Input should be greater than 0" in message(wrong)
    both = {**toy, "strategy_config": {"learning_rate_factor": 1, "rate": 1}}
    assert "rate and learning_rate_factor are the same setting; keep one" in message(both)
    assert "known: learning_rate_factor, nested" in message({**toy, "strategy_config": {"tp_size": 2}})
    assert "needs no_such_engine, which is not installed" in message({"strategy_name": "absent_train"})
    assert "there is no strategy toy_trian; did you mean toy_train?" in message({"strategy_name": "toy_trian"})
    assert "strategy_name is toy_infer; use absent_train or" in message({"strategy_name": "toy_infer"})


@pytest.mark.usefixtures("installed")
def test_the_layout_auto_becomes_one_that_it_supports(base):
    values = {
        **base,
        "layout": "auto",
        "actor_train": {**base["actor_train"], "strategy_args": {"strategy_name": "toy_train"}},
    }
    _, layout, note = find_layout(parse_config(values))
    assert layout.name == "padded"
    assert note == "using layout padded: toy_train does not support packed rows"
