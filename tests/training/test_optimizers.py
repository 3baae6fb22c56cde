"""`optim`: each optimizer steps as its library does, resumes bitwise, and is planned with the state that it has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.tiny_models import FAMILIES, tiny_model
from thresher.builders.engines import check_engine
from thresher.checkpoint.state import load_optimizer_state, optimizer_state
from thresher.config import parse_config
from thresher.config.roles import TrainingArgs
from thresher.engines.native.optimizers import OPTIMIZERS, MuonAndAdamW, state_tensors
from thresher.engines.native.parallelize import ParallelContext
from thresher.engines.native.parameters import LocalParameters
from thresher.errors import UserError

RATE, DECAY, NUM_STEPS = 0.01, 0.1, 3
CASES: dict[str, dict[str, Any]] = {
    "adamw": {},
    "sgd": {"momentum": 0.9, "nesterov": True},
    "rmsprop": {"alpha": 0.95, "centered": True},
    "adafactor": {"d": 2.0},
    "muon": {"momentum": 0.9},
}


def training(optim: str, **args: Any) -> TrainingArgs:
    return TrainingArgs(learning_rate=RATE, weight_decay=DECAY, optim=optim, optim_args=args)


def parameters_of(model: nn.Module, settings: TrainingArgs) -> LocalParameters:
    return LocalParameters(model, model, ParallelContext(), settings)


def gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def steps(model: nn.Module, parameters: LocalParameters, numbers: range) -> None:
    for number in numbers:
        gradients(model, number)
        parameters.update(RATE / number)


def of_library(model: nn.Module, optim: str) -> list[torch.optim.Optimizer]:
    """The optimizers of torch, made by hand."""
    named = dict(model.named_parameters())
    in_layers = [p for name, p in named.items() if ".layers." in name and p.ndim == 2]
    matrices, vectors = ([p for p in named.values() if (p.ndim >= 2) == wants] for wants in (True, False))
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
    kinds = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "rmsprop": torch.optim.RMSprop}
    kinds["adafactor"] = torch.optim.Adafactor
    if optim != "muon":
        return [kinds[optim](groups, lr=RATE, **CASES[optim])]
    outer = {"params": [p for p in matrices if not any(p is each for each in in_layers)], "weight_decay": DECAY}
    muon = torch.optim.Muon(in_layers, lr=RATE, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw", **CASES["muon"])
    return [muon, torch.optim.AdamW([outer, groups[1]], lr=RATE)]


@pytest.mark.parametrize("optim", CASES)
def test_steps_are_those_of_the_library(optim):
    ours, theirs = tiny_model("qwen3"), tiny_model("qwen3")
    steps(ours, parameters_of(ours, training(optim, **CASES[optim])), range(1, NUM_STEPS + 1))
    optimizers = of_library(theirs, optim)
    for number in range(1, NUM_STEPS + 1):
        gradients(theirs, number)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = RATE / number
            optimizer.step()
    for (name, found), expected in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6, msg=name)


@pytest.mark.parametrize("optim", CASES)
def test_a_restored_optimizer_goes_on_bitwise(optim):
    settings = training(optim, **CASES[optim])
    model, resumed = tiny_model("qwen3"), tiny_model("qwen3")
    straight = parameters_of(model, settings)
    steps(model, straight, range(1, 3))
    saved = optimizer_state(straight.optimizer, straight.shard_names, straight.by_name)
    resumed.load_state_dict(model.state_dict())
    other = parameters_of(resumed, settings)
    load_optimizer_state(other.optimizer, other.shard_names, saved, other.by_name)
    for each, parameters in ((model, straight), (resumed, other)):
        steps(each, parameters, range(3, 5))
    for found, expected in zip(resumed.parameters(), model.parameters(), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("optim", CASES)
def test_the_size_of_its_state_is_known(optim):
    model, settings = tiny_model("qwen3"), training(optim, **CASES[optim])
    parameters = parameters_of(model, settings)
    steps(model, parameters, range(1, 2))
    held = sum(value.numel() for each in parameters.optimizer.state.values() for value in each.values() if value.ndim)
    elements = sum(parameter.numel() for parameter in model.parameters())
    if optim == "muon":  # one tensor for the matrices of layers, which a large model mostly consists of
        assert isinstance(parameters.optimizer, MuonAndAdamW)
        assert 1.0 < held / elements < 2.0
    else:
        assert held / elements == pytest.approx(state_tensors(settings), abs=0.2 if optim == "adafactor" else 0.001)
    assert CASES.keys() == OPTIMIZERS.keys()


@pytest.fixture
def config(tmp_path):
    def make(strategy: dict[str, Any] | None = None, workers: int = 1, **training_args: Any):
        if not (tmp_path / "model").exists():
            tiny_model("qwen3").save_pretrained(tmp_path / "model")
        role = {"num_workers": workers, "training_args": training_args, "strategy_args": strategy or {}}
        return parse_config({"pretrain": str(tmp_path / "model"), "pref_loss": "simpo", "actor_train": role})

    return make


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optim": "sgd", "optim_args": {"momentun": 0.9}}, "torch's sgd says: .*'momentun'"),
        ({"optim": "sgd", "optim_args": {"momentum": -1.0}}, "Invalid momentum value: -1.0"),
        ({"optim": "muon", "workers": 2}, "optim muon needs whole matrices, .*dp_replicate"),
        ({"optim": "adafactor", "workers": 2}, "optim adafactor needs whole matrices"),
        ({"optim": "sgd", "strategy": {"strategy_name": "deepspeed_train"}}, "optim sgd is not supported by DeepSpeed"),
        ({"optim": "sgd", "strategy": {"strategy_name": "megatron_train"}}, "optim sgd is not supported by megatron"),
    ],
    ids=str,
)
def test_what_an_optimizer_cannot_do_is_an_error_before_the_run(config, settings, message):
    with pytest.raises(UserError, match=message):
        check_engine(config(**settings), "actor_train")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optim": "sgd", "adam_beta1": 0.8}, "adam_beta1 has no effect with optim sgd"),
        ({"optim_args": {"amsgrad": True}}, "optim_args has no effect with optim adamw"),
        ({"optim": "lion"}, "optim: Input should be"),
    ],
    ids=str,
)
def test_settings_that_contradict_each_other_are_errors(config, settings, message):
    with pytest.raises(UserError, match=message):
        config(**settings)


def test_replicas_may_use_an_optimizer_of_whole_matrices(config):
    check_engine(config(optim="muon", workers=2, strategy={"strategy_config": {"dp_replicate": 2}}), "actor_train")
    assert "qwen3" in FAMILIES
