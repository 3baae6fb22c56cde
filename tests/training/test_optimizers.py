"""`optim`: each optimizer steps as its library does, resumes bitwise, and is planned with the state that it has."""

from __future__ import annotations

import copy
from typing import Any

import bitsandbytes
import pytest
import schedulefree
import torch
from peft.optimizers import create_loraplus_optimizer
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.support.tiny_models import FAMILIES
from thresher.builders.engines import check_engine
from thresher.checkpoint.tensor_files import load_tensors
from thresher.config import parse_config
from thresher.config.roles import ModelArgs, TrainingArgs
from thresher.engines.engine import TrainEngine
from thresher.engines.native.build import train_engine
from thresher.engines.native.optimizers.registry import OPTIMIZERS, MuonAndAdamW, held_bytes, state_bytes
from thresher.engines.native.parallelize import ParallelContext
from thresher.engines.native.parameters import LocalParameters
from thresher.errors import CheckpointError, UserError
from thresher.models.layouts import PackedLayout
from thresher.models.loading.adapters import LoraSettings
from thresher.models.loading.trained import TrainedParts

RATE, DECAY, NUM_STEPS = 0.01, 0.1, 3
CASES: dict[str, dict[str, Any]] = {
    "adamw": {},
    "adamw_8bit": {},
    "paged_adamw_8bit": {},
    "paged_adamw_32bit": {},
    "schedule_free_adamw": {"r": 0.5},
    "sgd": {"momentum": 0.9, "nesterov": True},
    "rmsprop": {"alpha": 0.95, "centered": True},
    "adafactor": {"d": 2.0},
    "muon": {"momentum": 0.9},
}
KINDS: dict[str, Any] = {
    "adamw": torch.optim.AdamW,
    "adamw_8bit": bitsandbytes.optim.AdamW8bit,
    "paged_adamw_8bit": bitsandbytes.optim.PagedAdamW8bit,
    "paged_adamw_32bit": bitsandbytes.optim.PagedAdamW32bit,
    "schedule_free_adamw": schedulefree.AdamWScheduleFree,
    "sgd": torch.optim.SGD,
    "rmsprop": torch.optim.RMSprop,
    "adafactor": torch.optim.Adafactor,
}
# on a CPU, paged state is plain memory
pytestmark = pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")


def wide_model() -> PreTrainedModel:
    """A model whose matrices have 4,096 elements or more, from which on a state is in 8 bits."""
    config = copy.deepcopy(FAMILIES["qwen3"])
    config.hidden_size, config.intermediate_size, config.head_dim, config.num_key_value_heads = 64, 128, 16, 4
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


def training(optim: str, **settings: Any) -> TrainingArgs:
    return TrainingArgs(
        learning_rate=RATE,
        weight_decay=DECAY,
        optim=optim,
        optim_args=CASES[optim],
        lr_scheduler_type="constant",
        **settings,
    )


def engine_of(model: nn.Module, settings: TrainingArgs) -> TrainEngine:
    return train_engine(model, PackedLayout(shares_prompt=True), torch.float32, settings)


def gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def steps(engine: TrainEngine, numbers: range) -> None:
    for number in numbers:
        with engine.within_step(None):
            gradients(engine.model, number)
            engine.parameters.update(RATE / number)


def of_library(model: nn.Module, optim: str) -> list[torch.optim.Optimizer]:
    """The optimizers of the library, made by hand."""
    named = dict(model.named_parameters())
    in_layers = [p for name, p in named.items() if ".layers." in name and p.ndim == 2]
    matrices, vectors = ([p for p in named.values() if (p.ndim >= 2) == wants] for wants in (True, False))
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
    if optim != "muon":
        return [KINDS[optim](groups, lr=RATE, **CASES[optim])]
    outer = {"params": [p for p in matrices if not any(p is each for each in in_layers)], "weight_decay": DECAY}
    muon = torch.optim.Muon(in_layers, lr=RATE, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw", **CASES["muon"])
    return [muon, torch.optim.AdamW([outer, groups[1]], lr=RATE)]


def steps_of_library(model: nn.Module, optim: str) -> None:
    optimizers = of_library(model, optim)
    for number in range(1, NUM_STEPS + 1):
        gradients(model, number)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = RATE / number
            if optim == "schedule_free_adamw":
                optimizer.train()
            optimizer.step()
    if optim == "schedule_free_adamw":
        optimizers[0].eval()


@pytest.mark.parametrize("optim", CASES)
def test_steps_are_those_of_the_library(optim):
    ours, theirs = wide_model(), wide_model()
    steps(engine_of(ours, training(optim)), range(1, NUM_STEPS + 1))
    steps_of_library(theirs, optim)
    for (name, found), expected in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6, msg=name)


@pytest.mark.parametrize("optim", CASES)
def test_a_restored_optimizer_goes_on_bitwise(optim, tmp_path):
    straight = engine_of(wide_model(), training(optim))
    steps(straight, range(1, 3))
    straight.snapshot({})(tmp_path)
    torch.manual_seed(1)
    resumed = engine_of(wide_model().apply(lambda module: getattr(module, "reset_parameters", int)()), training(optim))
    resumed.load(tmp_path)
    for engine in (straight, resumed):
        steps(engine, range(3, 5))
    for found, expected in zip(resumed.model.parameters(), straight.model.parameters(), strict=True):
        assert torch.equal(found, expected)


def test_state_of_8_and_of_32_bits_is_not_exchanged(tmp_path):
    saved = engine_of(wide_model(), training("paged_adamw_32bit"))
    saved.snapshot({})(tmp_path)
    with pytest.raises(CheckpointError, match="has the state of AdamW32bit, this run uses AdamW8bit"):
        engine_of(wide_model(), training("adamw_8bit")).load(tmp_path)


@pytest.mark.parametrize("optim", CASES)
def test_the_size_of_its_state_is_known(optim):
    model, settings = wide_model(), training(optim)
    engine = engine_of(model, settings)
    steps(engine, range(1, 2))
    states = engine.parameters.optimizer.state.values()
    tensors = {
        (at, key): value
        for at, state in enumerate(states)
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and value.ndim and not key.startswith("qmap")
    }
    held = sum(value.nbytes for value in tensors.values()) / sum(parameter.numel() for parameter in model.parameters())
    if optim == "muon":  # one tensor for the matrices of layers, which a large model mostly consists of
        assert isinstance(engine.parameters.optimizer, MuonAndAdamW)
        assert 4.0 < held < 8.0
    else:
        # norms have their state in fp32, and adafactor has sums of rows and columns
        tolerance = {"adafactor": 0.8, "adamw_8bit": 0.05, "paged_adamw_8bit": 0.05}.get(optim, 0.004)
        assert held == pytest.approx(state_bytes(settings, 4), abs=tolerance)
    copies = 4.0 if optim == "schedule_free_adamw" else 0.0
    assert held_bytes(settings, 4) == state_bytes(settings, 4) + copies
    assert CASES.keys() == OPTIMIZERS.keys()


def test_the_weights_of_a_schedule_free_run_are_averages_between_steps(tmp_path):
    """As those in a checkpoint; the gradient is taken elsewhere, and a step that is skipped changes no bit."""
    model = wide_model()
    engine = engine_of(model, training("schedule_free_adamw"))
    steps(engine, range(1, 4))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with engine.within_step(None):
        moved = [name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])]
    assert len(moved) == len(before)
    engine.snapshot({})(tmp_path)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in load_tensors(tmp_path, "weights").items())


def rates(parameters: LocalParameters) -> dict[str, tuple[float, float]]:
    """Learning rate and weight decay by name, as the optimizer has them."""
    groups = parameters.optimizer.param_groups
    by_shard = {each: (group["lr"], group["weight_decay"]) for group in groups for each in group["params"]}
    return {name: by_shard[shard] for shard, name in parameters.shard_names.items()}


GROUPS = [
    {"match": ["embed_tokens", "lm_head"], "lr": RATE / 8, "weight_decay": 0.5},
    {"match": "layers.1", "lr_ratio": 3},
    {"match": "*norm", "weight_decay": 0.2},
]


@pytest.mark.parametrize("optim", CASES)
def test_parameter_groups_reach_the_optimizer(optim):
    model = wide_model()
    engine = engine_of(model, training(optim, param_groups=GROUPS))
    with engine.within_step(None):
        gradients(model, 1)
        engine.parameters.update(RATE / 2)  # as the schedule has it
    found = rates(engine.parameters)
    assert found["model.embed_tokens.weight"] == found["lm_head.weight"] == pytest.approx((RATE / 16, 0.5))
    assert found["model.layers.1.mlp.up_proj.weight"] == pytest.approx((3 * RATE / 2, DECAY))
    assert found["model.layers.1.input_layernorm.weight"] == pytest.approx((3 * RATE / 2, 0.0))
    assert found["model.layers.0.input_layernorm.weight"] == pytest.approx((RATE / 2, 0.2))
    assert found["model.layers.0.mlp.up_proj.weight"] == (RATE / 2, DECAY)


def test_lora_plus_has_the_groups_of_peft():
    model = wide_model()
    trained = TrainedParts(lora=LoraSettings(4, None, ["all-linear"]))
    module = trained.apply(model)
    trained.init(model, seed=0)
    settings = TrainingArgs(learning_rate=RATE)
    parameters = LocalParameters(module, model, ParallelContext(), settings, ModelArgs(lora_rank=4, lora_plus_ratio=16))
    gradients(module, 1)
    parameters.update(RATE)
    theirs = create_loraplus_optimizer(module, torch.optim.AdamW, lr=RATE, loraplus_lr_ratio=16)
    expected = {each: group["lr"] for group in theirs.param_groups for each in group["params"]}
    found = {name: rate for name, (rate, _) in rates(parameters).items()}
    assert found == {name: expected[parameter] for name, parameter in parameters.by_name.items()}
    assert set(found.values()) == {RATE, 16 * RATE}


def test_groups_that_changed_are_an_error_on_resume(tmp_path):
    engine_of(wide_model(), training("adamw")).snapshot({})(tmp_path)
    with pytest.raises(CheckpointError, match=r"has 2 parameter groups, this run's has 8; .* param_groups"):
        engine_of(wide_model(), training("adamw", param_groups=GROUPS)).load(tmp_path)


@pytest.fixture
def config(tmp_path):
    def make(
        strategy: dict[str, Any] | None = None,
        workers: int = 1,
        model: dict[str, Any] | None = None,
        **training_args: Any,
    ):
        if not (tmp_path / "model").exists():
            wide_model().save_pretrained(tmp_path / "model")
        role = {
            "num_workers": workers,
            "model_args": model or {},
            "training_args": training_args,
            "strategy_args": strategy or {},
        }
        return parse_config({"pretrain": str(tmp_path / "model"), "pref_loss": "simpo", "actor_train": role})

    return make


NORMS = {"match": "*norm", "weight_decay": 0.1}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optim": "sgd", "optim_args": {"momentun": 0.9}}, "optim_args: sgd says: .*'momentun'"),
        ({"optim": "sgd", "optim_args": {"momentum": -1.0}}, "Invalid momentum value: -1.0"),
        ({"optim": "muon", "workers": 2}, "optim muon needs whole matrices, .*dp_replicate"),
        ({"optim": "adafactor", "workers": 2}, "optim adafactor needs whole matrices"),
        ({"optim": "sgd", "strategy": {"strategy_name": "deepspeed_train"}}, "optim sgd is not supported by DeepSpeed"),
        ({"optim": "sgd", "strategy": {"strategy_name": "megatron_train"}}, "optim sgd is not supported by megatron"),
        (
            {"param_groups": [NORMS], "strategy": {"strategy_name": "deepspeed_train"}},
            "training_args.param_groups is not supported by DeepSpeed",
        ),
        (
            {"model": {"lora_rank": 4, "lora_plus_ratio": 16}, "strategy": {"strategy_name": "megatron_train"}},
            "model_args.lora_plus_ratio is not supported by megatron_train",
        ),
        ({"param_groups": [{"match": "embed_token", "lr_ratio": 2}]}, "embed_token matches no .* mean embed_tokens?"),
        (
            {"param_groups": [{"match": "lora_B", "lr_ratio": 2}]},
            r"lora_B matches no .*; trained are model.embed_tokens.weight, model.layers.\*.self_attn.q_proj.weight, .* "
            "and 2 more",
        ),
        ({"param_groups": [{"match": "layers", "lr_ratio": 2}, NORMS | {"match": "layers.1"}]}, "in groups before it"),
        (
            {
                "model": {"lora_rank": 4, "lora_plus_ratio": 16},
                "param_groups": [{"match": "lora_*", "weight_decay": 0.1}],
            },
            "lora_plus_ratio: .* in groups before it",
        ),
        (
            {"optim": "adamw_8bit", "workers": 2, "strategy": {"strategy_config": {"tp_size": 2}}},
            "blocks of 256 elements, and tp_size 2 cuts matrices in other places",
        ),
        (
            {"optim": "paged_adamw_8bit", "workers": 3},
            r"3 shards of model.layers.0.*.weight, \[.*\], do not consist of whole blocks",
        ),
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
        ({"optim": "adamw_8bit", "optim_args": {"eps": 0.1}}, "optim_args has no effect with optim adamw_8bit"),
        ({"optim": "sgd", "optim_args": {"lr": 0.1}}, "optim_args has lr; set learning_rate, "),
        ({"optim": "schedule_free_adamw"}, "lr_scheduler_type is cosine; set it to constant"),
        (
            {"optim": "schedule_free_adamw", "lr_scheduler_type": "constant", "optim_args": {"warmup_steps": 4}},
            "optim_args has warmup_steps",
        ),
        (
            {"optim": "schedule_free_adamw", "lr_scheduler_type": "constant", "adam_beta1": 0},
            "interpolates by adam_beta1",
        ),
        (
            {
                "optim": "schedule_free_adamw",
                "lr_scheduler_type": "constant",
                "model": {"dtype": "bf16", "master_dtype": "bf16"},
            },
            "needs model_args.master_dtype fp32",
        ),
        ({"param_groups": [{"match": "a"}]}, "param_groups: the group changes nothing"),
        ({"param_groups": [{"match": "a", "lr": 1, "lr_ratio": 2}]}, "lr and lr_ratio are both set"),
        ({"param_groups": [{"match": "", "lr": 1}]}, "param_groups: Value should have at least 1 item"),
        ({"param_groups": [{"match": "a", "rate": 1}]}, "param_groups.0.rate: unknown key"),
        ({"model": {"lora_plus_ratio": 16}}, "lora_plus_ratio has no effect without lora_rank"),
    ],
    ids=str,
)
def test_settings_that_contradict_each_other_are_errors(config, settings, message):
    with pytest.raises(UserError, match=message):
        config(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"optim": "muon", "workers": 2, "strategy": {"strategy_config": {"dp_replicate": 2}}},
        {"optim": "adamw_8bit", "workers": 2},
        {"optim": "adamw_8bit", "workers": 3, "strategy": {"strategy_config": {"dp_replicate": 3}}},
        {"optim": "paged_adamw_32bit", "workers": 3},
        {"workers": 2, "param_groups": [NORMS], "strategy": {"strategy_config": {"tp_size": 2}}},
        {"model": {"lora_rank": 4, "lora_plus_ratio": 16}, "param_groups": [{"match": "lora_A", "lr": 0.1}]},
    ],
    ids=str,
)
def test_what_is_possible_on_a_mesh(config, settings):
    check_engine(config(**settings), "actor_train")


@pytest.mark.parametrize(
    ("optim", "extra"), [("paged_adamw_8bit", "quantization"), ("schedule_free_adamw", "schedule-free")]
)
def test_a_package_that_is_absent_is_named(config, monkeypatch, optim, extra):
    monkeypatch.setattr("thresher.optional.find_spec", lambda _: None)
    with pytest.raises(UserError, match=rf"optim {optim} needs .* `pip install 'thresher\[{extra}\]'`"):
        check_engine(config(optim=optim, lr_scheduler_type="constant"), "actor_train")
