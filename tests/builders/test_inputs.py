"""The inputs of a run: what a rank receives of them."""

from __future__ import annotations

import pickle

from tests.support.compared_runs import merge
from tests.support.small_runs import make_base, open_small_inputs
from thresher.config import parse_config


def test_a_rank_receives_the_plan_and_the_pairs_and_no_secret_of_the_config(tmp_path):
    values = merge(make_base(tmp_path), {"output_dir": str(tmp_path / "out"), "system_envs": {"TOKEN": "hunter2"}})
    config, inputs = open_small_inputs(values)
    sent = pickle.dumps(inputs)
    assert b"hunter2" not in sent
    assert len(sent) < 10_000  # a store is sent as its path
    received = pickle.loads(sent).replace(config=config)  # noqa: S301  # our own bytes
    assert received.plan == inputs.plan
    assert (received.mode, received.frozen_weights) == (inputs.mode, inputs.frozen_weights)
    assert received.train.digest == inputs.train.digest
    assert received.layout.name == inputs.layout.name


def test_a_rank_with_fewer_workers_keeps_the_plan_of_the_run(tmp_path):
    """Without global_batch_size, the config's number of workers decides the pairs of a step."""
    training = {"global_batch_size": None, "gradient_accumulation_steps": 1}
    own = {"runtime": "ray", "actor_train": {"num_workers": 4, "training_args": training}, "max_steps": 1}
    values = merge(merge(make_base(tmp_path), own), {"output_dir": str(tmp_path / "out")})
    _, inputs = open_small_inputs(values)
    fewer = inputs.replace(config=parse_config(merge(values, {"actor_train": {"num_workers": 2}})))
    assert (inputs.config.pairs_per_step, fewer.config.pairs_per_step) == (8, 4)
    assert fewer.plan.pairs_per_step == 8
