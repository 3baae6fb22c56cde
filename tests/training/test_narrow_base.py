"""Under an adapter, the frozen matrices of the layers are stored in the precision of their products."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.engines.config_runs import config_of, train_from_config
from tests.support.engines.parity import LAYOUTS, PAIRS, save_model
from thresher.builders.engines import build_policy
from thresher.data.example import ExampleBatch
from thresher.distributed.groups import Group
from thresher.models.loading import trained
from thresher.models.loading.trained import widest_dtype

LORA = {"lora_rank": 4, "lora_target": ["all-linear"], "dtype": "bf16"}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"), "qwen2", seed=0)


def policy_of(model_dir, **settings):
    config = config_of(model_dir, 1, {}, **settings)
    return build_policy(config, LAYOUTS["shared"], device=torch.device("cpu"), world=Group())


def bytes_of(parameters) -> int:
    return sum(parameter.nbytes for parameter in parameters)


def test_a_frozen_matrix_takes_two_bytes_per_element_and_everything_else_four(model_dir):
    model = policy_of(model_dir, **LORA).model.get_base_model()
    linear = [module for module in model.model.layers.modules() if isinstance(module, nn.Linear)]
    narrow = {module.weight for module in linear if not module.weight.requires_grad}
    others = [parameter for parameter in model.parameters() if parameter not in narrow]
    assert len(narrow) == 7 * len(model.model.layers)
    assert bytes_of(narrow) == 2 * sum(parameter.numel() for parameter in narrow)
    assert bytes_of(others) == 4 * sum(parameter.numel() for parameter in others)
    assert widest_dtype(model) == torch.float32


@pytest.mark.parametrize("settings", [{"dtype": "bf16"}, LORA | {"dtype": "fp32"}], ids=["full training", "fp32"])
def test_no_other_run_has_narrow_matrices(model_dir, settings):
    assert {parameter.dtype for parameter in policy_of(model_dir, **settings).model.parameters()} == {torch.float32}


@pytest.mark.parametrize("settings", [{}, {"lora_init": "pissa"}], ids=["default", "pissa"])
def test_training_is_bitwise_that_with_frozen_matrices_in_fp32(model_dir, monkeypatch, settings):
    narrow = train_from_config(model_dir, {}, "shared", **LORA, **settings)
    monkeypatch.setattr(trained, "narrow_frozen_matrices", lambda *_: None)
    wide = train_from_config(model_dir, {}, "shared", **LORA, **settings)

    assert narrow.metrics == wide.metrics
    assert narrow.grad_norms == wide.grad_norms
    for name, weight in wide.weights.items():
        assert torch.equal(narrow.weights[name], weight), name


def test_the_start_up_check_computes_in_fp32_and_leaves_the_matrices_narrow(model_dir):
    policy = policy_of(model_dir, **LORA)
    before = [parameter.dtype for parameter in policy.model.parameters()]
    # fails if the precisions of rows and matrices differ
    policy.check_logps(ExampleBatch(np.arange(2), tuple(PAIRS[:2])))
    assert [parameter.dtype for parameter in policy.model.parameters()] == before
