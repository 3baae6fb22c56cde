"""QLoRA: a base in 4 or 8 bits below an adapter equals bitsandbytes and PEFT, and its reference is that base."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from tests.support.compared_runs import merge
from tests.support.engines.config_runs import config_of, train_from_config
from tests.support.engines.parity import BETA, LAYOUTS, LEARNING_RATE, PAIRS, objective_of, save_model
from tests.support.forks import python
from tests.support.real_pairs import minimal_dpo
from tests.support.small_runs import save_small_tokenizer, stored
from tests.support.tiny_run import build_run, noise_pairs
from thresher.builders.engines import build_policy, check_engine
from thresher.builders.export import load_checkpoint
from thresher.config import parse_config
from thresher.data.example import ExampleBatch
from thresher.distributed.groups import Group
from thresher.engines.accumulate import MicroBatch
from thresher.errors import CheckpointError, UserError
from thresher.models.loading.load_sharded import load_dequantized
from thresher.models.loading.quantization import Quantization, quantized_modules

NF4, FP4, INT8 = {"bits": 4}, {"bits": 4, "type": "fp4", "double": False}, {"bits": 8}
KINDS = pytest.mark.parametrize("kind", [NF4, FP4, INT8], ids=["nf4", "fp4", "8 bits"])
BATCH = ExampleBatch(np.arange(8), tuple(PAIRS[:8]))
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """A model with biases, a tied embedding, and matrices whose size is no multiple of a block."""
    return save_model(tmp_path_factory.mktemp("model"), "qwen2", seed=0, intermediate_size=50)


def policy_of(model_dir, kind, **model_args):
    config = config_of(model_dir, 1, {}, **{"lora_rank": 4, "quantization": kind, **model_args})
    policy = build_policy(config, LAYOUTS["shared"], device=CPU, world=Group())
    torch.manual_seed(1)
    for name, weight in policy.weights().items():
        if "lora_B" in name:  # so that every gradient differs from 0
            weight.normal_(0.0, 0.05)
    return policy


def by_bitsandbytes(kind) -> BitsAndBytesConfig:
    if kind["bits"] == 8:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=kind.get("type", "nf4"),
        bnb_4bit_use_double_quant=kind.get("double", True),
        bnb_4bit_compute_dtype=torch.float32,
    )


def plain_base(path, kind=None):
    """A base that transformers and bitsandbytes load, in training: in evaluation it has other numbers."""
    settings = {} if kind is None else {"quantization_config": by_bitsandbytes(kind), "device_map": "cpu"}
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **settings).train().requires_grad_(False)


def plain_policy(path, kind, weights):
    lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(plain_base(path, kind), lora).train()
    assert {name for name, each in model.named_parameters() if each.requires_grad} == weights.keys()
    for name, weight in weights.items():
        model.get_parameter(name).data.copy_(weight)
    return model


@KINDS
def test_forward_gradients_and_a_step_equal_those_of_bitsandbytes_and_peft(model_dir, kind):
    policy = policy_of(model_dir, kind)
    before = {name: weight.clone() for name, weight in policy.weights().items()}
    plain, oracle = plain_policy(model_dir, kind, before), minimal_dpo()
    examples = [(e.prompt_ids.tolist(), *(side.ids.tolist() for side in e.responses)) for e in BATCH.pairs]
    reference = policy.score_base(BATCH)
    for ours, theirs in ((reference, plain_base(model_dir, kind)), (policy.score(BATCH), plain)):
        sums = oracle.score(theirs, examples, oracle.response_logps)
        for side, expected in zip(ours.sides, sums, strict=True):
            torch.testing.assert_close(side.sums().float(), expected.detach(), atol=2e-5, rtol=1e-6)

    gradients = {}
    optimizer = torch.optim.AdamW(
        [each for each in plain.parameters() if each.requires_grad], lr=LEARNING_RATE, eps=1e-5, weight_decay=0.0
    )
    optimizer.register_step_pre_hook(
        lambda *_: gradients.update({n: p.grad.clone() for n, p in plain.named_parameters() if p.requires_grad})
    )
    expected = oracle.train_step(plain, plain_base(model_dir, kind), optimizer, examples, beta=BETA)
    optimizer_of_ours = policy.parameters.optimizer
    ours_gradients = {}
    optimizer_of_ours.register_step_pre_hook(
        lambda *_: ours_gradients.update({n: p.grad.clone() for n, p in policy.parameters.by_name.items()})
    )
    outcome = policy.train_step(
        [MicroBatch(BATCH, reference)], objective_of("sigmoid"), num_pairs_in_step=8, learning_rate=LEARNING_RATE
    )

    assert outcome.metrics["loss"].mean == pytest.approx(expected["loss"], abs=1e-6)
    assert outcome.grad_norm == pytest.approx(expected["grad_norm"], rel=1e-5)
    for name, gradient in gradients.items():
        assert gradient.abs().max() > 0
        torch.testing.assert_close(ours_gradients[name], gradient, atol=1e-6, rtol=1e-4, msg=name)
    for name, weight in policy.weights().items():
        torch.testing.assert_close(weight, plain.get_parameter(name).detach(), atol=1e-5, rtol=0, msg=name)
        assert not torch.equal(weight, before[name])


@KINDS
def test_everything_but_the_matrices_of_layers_is_as_in_the_files(model_dir, kind):
    policy, stored = policy_of(model_dir, kind), plain_base(model_dir).state_dict()
    model = policy.model.get_base_model()
    packed = quantized_modules(model)
    assert len(packed) == 7 * 4
    for name, parameter in model.named_parameters():
        name = name.replace(".base_layer", "")
        if ".lora_" in name:
            assert parameter.dtype == torch.float32
        elif name not in packed:
            assert torch.equal(parameter, stored[name]), name
        else:
            assert parameter.nbytes == -(-stored[name].numel() * kind["bits"] // 8)


@KINDS
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_margins_start_at_exactly_zero_and_the_reference_stays_the_quantized_base(model_dir, kind, dtype):
    outcome = train_from_config(model_dir, {}, "shared", lora_rank=4, quantization=kind, dtype=dtype)
    assert outcome.metrics[0]["rewards/margins"] == 0.0
    assert outcome.metrics[2]["rewards/margins"] != 0.0
    policy = policy_of(model_dir, kind, dtype=dtype)
    other = policy_of(model_dir, kind, dtype=dtype, lora_rank=2)
    for one, two in zip(policy.score_base(BATCH).sides, other.score_base(BATCH).sides, strict=True):
        assert torch.equal(one.values, two.values)


def test_modules_that_are_trained_whole_are_dense_ones(model_dir):
    settings = {"lora_rank": 4, "quantization": NF4, "use_rslora": True, "lora_plus_ratio": 4.0}
    outcome = train_from_config(model_dir, {}, "shared", **settings, modules_to_save="lm_head,model.norm")
    assert outcome.metrics[0]["rewards/margins"] == 0.0
    assert outcome.metrics[2]["rewards/margins"] != 0.0
    with pytest.raises(UserError, match=r"contains .*q_proj, which quantization stores in few bits"):
        train_from_config(model_dir, {}, "shared", **settings, modules_to_save="q_proj")


@pytest.mark.parametrize("mode", ["precompute", "concurrent"])
def test_a_reference_that_is_loaded_is_quantized_alike(base, mode):
    """Also one that starts from an adapter, or is cached."""
    q = merge(base, {"actor_train": {"model_args": {"lora_rank": 4, "quantization": NF4}}})
    by_adapter, loaded = build_run(q, noise_pairs(12)), build_run(q | {"reference": {"mode": mode}}, noise_pairs(12))
    by_adapter.fit()
    loaded.fit()
    assert (by_adapter.mode, loaded.mode) == ("adapter", mode)
    for (_, one), (_, two) in zip(by_adapter.log.records, loaded.log.records, strict=True):
        assert two["loss"] == pytest.approx(one["loss"], abs=1e-6)
    assert abs(loaded.log.records[0][1]["rewards/margins"]) < 1e-6


def test_the_reference_cache_knows_how_its_model_was_quantized(base):
    kinds = [{}, {"quantization": NF4}, {"quantization": FP4}, {"quantization": INT8}, {"quantization": NF4}]
    base = base | {"reference": {"mode": "precompute"}}
    scored = []
    for kind in kinds:
        run = build_run(merge(base, {"actor_train": {"model_args": {"lora_rank": 4, **kind}}}), noise_pairs(12))
        scored.append(sum(split.num_scored for split in run.reference.cached))
    assert scored == [12, 12, 12, 12, 0]


def test_a_resumed_run_is_bitwise_the_uninterrupted_one(base, tmp_path):
    values = merge(base, {"save_steps": 3, "actor_train": {"model_args": {"lora_rank": 4, "quantization": NF4}}})
    whole = build_run(values, noise_pairs(12))
    whole.fit()
    resumed = build_run(values | {"output_dir": str(tmp_path / "resumed")}, noise_pairs(12))
    resumed.trainer.resume(tmp_path / "out" / "checkpoints" / "step-00000003")
    resumed.fit()
    for name, weight in whole.trainer.engine.weights().items():
        assert torch.equal(resumed.trainer.engine.weights()[name], weight), name


@pytest.mark.parametrize(
    ("changed", "shown"), [({"quantization": INT8}, "8 bits"), ({}, "none")], ids=["other bits", "not quantized"]
)
def test_a_resumed_run_with_another_quantization_is_an_error_that_names_both(base, tmp_path, changed, shown):
    lora = {"lora_rank": 4}
    values = merge(base, {"save_steps": 3, "actor_train": {"model_args": {**lora, "quantization": NF4}}})
    build_run(values, noise_pairs(12)).fit()
    other = build_run(merge(base, {"actor_train": {"model_args": {**lora, **changed}}}), noise_pairs(12))
    with pytest.raises(CheckpointError, match=rf"its quantization is 4 bits \(nf4, double\), this run's is {shown}"):
        other.trainer.resume(tmp_path / "out" / "checkpoints" / "step-00000003")


@KINDS
def test_a_checkpoint_that_bitsandbytes_has_quantized_loads_as_it_is(model_dir, tmp_path, kind):
    plain = plain_base(model_dir, kind)
    plain.save_pretrained(tmp_path / "stored")
    stored = policy_of(tmp_path / "stored", None)
    for one, two in zip(stored.score(BATCH).sides, policy_of(model_dir, kind).score(BATCH).sides, strict=True):
        assert torch.equal(one.values, two.values)


def test_a_quantized_checkpoint_is_neither_trained_whole_nor_quantized_again(model_dir, tmp_path):
    plain_base(model_dir, NF4).save_pretrained(tmp_path / "stored")
    with pytest.raises(UserError, match=r"is stored in 4 bits \(nf4, double\), which cannot be trained; set"):
        check_engine(config_of(tmp_path / "stored", 1, {}), "actor_train")
    with pytest.raises(UserError, match=r"remove actor_train\.model_args\.quantization"):
        check_engine(config_of(tmp_path / "stored", 1, {}, lora_rank=4, quantization=INT8), "actor_train")


@pytest.mark.parametrize(
    ("num_workers", "strategy", "reason"),
    [
        (2, {"strategy_config": {"tp_size": 2}}, "tp_size splits matrices, and quantized ones cannot be split"),
        (1, {"strategy_name": "deepspeed_train"}, "deepspeed_train does not support weights in 4 bits"),
        (1, {"strategy_name": "megatron_train"}, "megatron_train does not support weights in 4 bits"),
    ],
)
def test_what_an_engine_cannot_do_is_refused_before_it_starts(model_dir, num_workers, strategy, reason, monkeypatch):
    monkeypatch.setattr("thresher.config.strategies.StrategyDeclaration.check_installed", lambda *_: None)
    values = {
        "model_args": {"lora_rank": 4, "quantization": NF4, "dtype": "bf16"},
        "strategy_args": strategy,
        "num_workers": num_workers,
    }
    with pytest.raises(UserError, match=reason):
        check_engine(parse_config({"pretrain": str(model_dir), "actor_train": values}), "actor_train")


@pytest.mark.parametrize(
    ("model_args", "reason"),
    [
        ({}, "quantization is for frozen weights, and all are trained; set lora_rank, or remove it"),
        ({"lora_rank": 4, "lora_init": "pissa"}, "lora_init pissa decomposes dense weights"),
        ({"lora_rank": 4, "use_dora": True}, "use_dora needs dense weights"),
        ({"lora_rank": 4, "merge_adapters": ["a"]}, "merge_adapters needs dense weights"),
    ],
)
def test_weights_that_are_trained_or_decomposed_are_not_quantized(model_args, reason):
    with pytest.raises(UserError, match=reason):
        parse_config({"pretrain": "m", "actor_train": {"model_args": {**model_args, "quantization": {}}}})


def test_stacked_experts_are_refused(tmp_path):
    path = save_model(tmp_path / "experts", "qwen3_moe", seed=0)
    with pytest.raises(UserError, match="has stacked experts"):
        check_engine(config_of(path, 1, {}, lora_rank=4, quantization=NF4), "actor_train")


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputed_activations_change_nothing(model_dir, recompute):
    def train(recompute):
        config = config_of(model_dir, 1, {}, recompute=recompute, lora_rank=4, quantization=NF4)
        policy = build_policy(config, LAYOUTS["shared"], device=CPU, world=Group())
        policy.train_step(
            [MicroBatch(BATCH, policy.score_base(BATCH))],
            objective_of("sigmoid"),
            num_pairs_in_step=8,
            learning_rate=LEARNING_RATE,
        )
        return policy.weights()

    expected = train("off")
    for name, weight in train(recompute).items():
        assert torch.equal(weight, expected[name]), name


@pytest.mark.parametrize("kind", [NF4, INT8], ids=["nf4", "8 bits"])
def test_a_compiled_layer_has_no_graph_break_and_computes_the_same(model_dir, kind):
    layer = next(iter(quantized_modules(policy_of(model_dir, kind).model).values()))
    results = []
    for forward in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        rows = torch.ones(3, layer.in_features, requires_grad=True)
        out = forward(rows)
        results.append((out.detach(), *torch.autograd.grad(out.square().sum(), rows)))
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)


def test_dequantized_weights_are_those_that_bitsandbytes_dequantizes(model_dir):
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    dense = load_dequantized(str(model_dir), dtype=torch.float32, quantization=Quantization(4)).state_dict()
    for name, weight in plain_base(model_dir).state_dict().items():
        if weight.ndim == 2 and ".layers." in name:
            packed, state = quantize_4bit(weight, compress_statistics=True, quant_type="nf4", blocksize=64)
            weight = dequantize_4bit(packed, state)
        assert torch.equal(dense[name], weight), name


def test_importing_bitsandbytes_fetches_no_code_and_prints_nothing(tmp_path):
    """On CPUs with AVX512-BF16 bitsandbytes asks the package `kernels` for native code from the Hub."""
    (tmp_path / "kernels.py").write_text("raise SystemExit('kernels was imported')")
    code = "from thresher.models.loading.quantization import import_bitsandbytes; import_bitsandbytes()"
    found = subprocess.run(
        [*python(), "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {code}; import kernels"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.stderr.strip() == "kernels was imported"  # by the last statement, and by no other


@pytest.mark.parametrize(
    ("model_args", "reason"),
    [
        ({"lora_rank": 4, "lora_init": "olora"}, "lora_init olora needs dense weights"),
        ({"lora_rank": 4, "use_dora": True}, "DoRA needs dense weights"),
        ({"lora_rank": 4, "merge_adapters": ["adapter"]}, "merge_adapters needs dense weights"),
        ({"adapter_name_or_path": "dora"}, "DoRA needs dense weights"),
    ],
)
def test_a_model_whose_files_are_quantized_has_the_same_limits(model_dir, tmp_path, monkeypatch, model_args, reason):
    plain_base(model_dir, NF4).save_pretrained(tmp_path / "stored")
    for name, use_dora in (("adapter", False), ("dora", True)):
        lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", use_dora=use_dora)
        get_peft_model(plain_base(model_dir), lora).save_pretrained(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=rf"{reason}, and those of .*stored are in 4 bits"):
        check_engine(config_of("stored", 1, {}, **model_args), "actor_train")


def test_a_quantized_reference_is_not_quantized_again(model_dir, tmp_path):
    plain_base(model_dir, NF4).save_pretrained(tmp_path / "stored")
    config = config_of(model_dir, 1, {}, lora_rank=4, quantization=NF4)
    reference = config.reference.model_copy(
        update={
            "model_args": config.reference.model_args.model_copy(
                update={"model_name_or_path": str(tmp_path / "stored")}
            )
        }
    )
    with pytest.raises(UserError, match=r"reference: .*stored is stored in 4 bits .* and cannot be quantized again"):
        check_engine(config.model_copy(update={"reference": reference}), "reference")


def test_an_adapter_on_disk_does_not_train_quantized_modules_whole(model_dir, tmp_path):
    lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", modules_to_save=["k_proj"])
    get_peft_model(plain_base(model_dir), lora).save_pretrained(tmp_path / "adapter")
    with pytest.raises(UserError, match=r"modules_to_save \['k_proj'\] contains .*k_proj, which quantization stores"):
        policy_of(model_dir, NF4, lora_rank=None, adapter_name_or_path=str(tmp_path / "adapter"))


def test_another_base_to_merge_into_is_not_quantized(base, tmp_path, caplog):
    path = save_small_tokenizer(Path(shutil.copytree(base["pretrain"], tmp_path / "model")))
    values = merge(base, {"pretrain": str(path), "actor_train": {"model_args": {"lora_rank": 4, "quantization": NF4}}})
    build_run(values, noise_pairs(12)).fit()
    checkpoint = max((tmp_path / "out" / "checkpoints").iterdir())
    model, _, _ = load_checkpoint(checkpoint, merge_into=str(path))
    assert "is not the model that was trained" in caplog.text
    adapter, original = stored(checkpoint, "weights"), plain_base(path)
    for name, weight in model.named_parameters():
        expected = original.get_parameter(name)
        module = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{module}.lora_A.default.weight" in adapter:
            a, b = (adapter[f"{module}.lora_{letter}.default.weight"] for letter in "AB")
            expected = expected + 2 * b @ a
        torch.testing.assert_close(weight, expected, atol=1e-6, rtol=0)
