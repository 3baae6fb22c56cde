"""Policy and reference: fingerprint of frozen weights, modes that agree, and margin 0 at the start."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.compared_runs import merge
from tests.support.tiny_llama import VOCAB, save_tiny_llama
from tests.support.tiny_models import tiny_model
from tests.support.tiny_run import build_run, noise_pairs
from thresher.builders import engines, inputs, reference
from thresher.builders.checkpoints import config_changes
from thresher.builders.inputs import find_layout
from thresher.builders.objective import build_objective
from thresher.builders.reference_mode import reference_mode, unused_settings
from thresher.config import parse_config
from thresher.engines import spec
from thresher.engines.native.build import infer_engine
from thresher.errors import CheckpointError, UserError
from thresher.models.layouts import PaddedLayout
from thresher.reference.step_zero_check import check_step_zero, tolerance


@pytest.mark.parametrize("changes", [{}, {"pref_loss": "simpo", "actor_train": {"model_args": {"lora_rank": 2}}}])
def test_frozen_weights_are_identified_by_content_not_by_name(base, tmp_path, changes):
    """open-instruct identifies weights by the name of the model. With LoRA and no reference, the base is frozen."""
    model = save_tiny_llama(tmp_path / "model", 3)
    values = merge(merge(base, {"pretrain": str(model)}), changes)
    first = build_run(values, noise_pairs(12))
    first.trainer.training_step()
    checkpoint = first.trainer.save()
    first.trainer.wait_for_saves()

    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"] += 0.01
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="belongs to another run: its reference is"):
        build_run(values, noise_pairs(12)).trainer.resume(checkpoint)


def test_the_frozen_weights_of_a_policy_with_another_reference_are_identified_too(base, tmp_path):
    model, other = (save_tiny_llama(tmp_path / name, seed) for seed, name in enumerate(("model", "other")))
    values = merge(base, {"pretrain": str(model), "actor_train": {"model_args": {"lora_rank": 2}}})
    values = merge(values, {"reference": {"model_args": {"model_name_or_path": str(other)}}})
    first = build_run(values, noise_pairs(12)).trainer
    checkpoint = first.save()
    first.wait_for_saves()
    assert build_run(values, noise_pairs(12)).trainer.resume(checkpoint) == []

    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"] += 0.01
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="belongs to another run: its policy's frozen weights is"):
        build_run(values, noise_pairs(12)).trainer.resume(checkpoint)


@pytest.mark.parametrize(
    ("changed", "changes", "section"),
    [
        ("model", {}, "policy"),
        ("model", {"pref_loss": "simpo"}, "policy"),
        ("other", {"reference": {"mode": "concurrent"}}, "reference"),
    ],
    ids=["with a reference", "without a reference", "of a separate reference"],
)
def test_a_checkpoint_is_rejected_after_a_change_of_a_models_config(base, tmp_path, changed, changes, section):
    models = {name: save_tiny_llama(tmp_path / name, seed) for seed, name in enumerate(("model", "other"))}
    values = merge(merge(base, {"pretrain": str(models["model"])}), changes)
    if changed == "other":
        values = merge(values, {"reference": {"model_args": {"model_name_or_path": str(models["other"])}}})
    first = build_run(values, noise_pairs(12))
    first.trainer.training_step()
    checkpoint = first.trainer.save()
    first.trainer.wait_for_saves()

    file = models[changed] / "config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps(settings | {"transformers_version": "9.9.9"}))
    assert build_run(values, noise_pairs(12)).trainer.resume(checkpoint) == []
    file.write_text(json.dumps(settings | {"rms_norm_eps": 0.5}))
    changed_run = build_run(values, noise_pairs(12)).trainer
    with pytest.raises(CheckpointError, match=f"belongs to another run: its {section}'s config.json is"):
        changed_run.resume(checkpoint)

    # 0.2 wrote no settings
    progress = json.loads((checkpoint / "trainer.json").read_text())
    del progress["identity"]["policy's config.json"]
    progress["identity"].pop("reference's config.json", None)
    (checkpoint / "trainer.json").write_text(json.dumps(progress))
    (note,) = changed_run.resume(checkpoint)
    assert "does not record the policy's config.json" in note


def test_a_checkpoint_that_does_not_record_what_it_belongs_to_is_rejected(base):
    """Only the settings of models may be absent, which 0.2 did not write."""
    run = build_run(base, noise_pairs(12))
    checkpoint = run.trainer.save()
    run.trainer.wait_for_saves()
    file = checkpoint / "trainer.json"
    progress = json.loads(file.read_text())
    for name in ("data", "pairs per step", "seed", "reference"):
        identity = {key: value for key, value in progress["identity"].items() if key != name}
        assert len(identity) == len(progress["identity"]) - 1
        file.write_text(json.dumps(progress | {"identity": identity}))
        with pytest.raises(CheckpointError, match=f"belongs to another run: its {name} is None"):
            run.trainer.resume(checkpoint)
    file.write_text(json.dumps(progress))
    assert run.trainer.resume(checkpoint) == []


def losses_of(values: dict) -> list[float]:
    run = build_run(values, noise_pairs(12))
    return [run.trainer.training_step()["loss"].mean for _ in range(6)]


def test_a_precomputed_reference_equals_a_live_one(different_reference):
    live = losses_of(merge(different_reference, {"reference": {"mode": "concurrent"}}))
    assert losses_of(merge(different_reference, {"reference": {"mode": "precompute"}})) == pytest.approx(live, abs=1e-5)
    assert live[0] != pytest.approx(live[-1], abs=1e-3)


def test_the_adapters_base_equals_a_live_reference(base):
    lora = merge(base, {"actor_train": {"model_args": {"lora_rank": 4}, "training_args": {"learning_rate": 0.05}}})
    live = losses_of(merge(lora, {"reference": {"mode": "concurrent"}}))
    for mode in ("adapter", "precompute"):
        assert losses_of(merge(lora, {"reference": {"mode": mode}})) == pytest.approx(live, abs=1e-5), mode
    assert live[0] != pytest.approx(live[-1], abs=1e-3)


@pytest.mark.parametrize("lora", [{}, {"lora_rank": 4}], ids=["all weights", "lora"])
def test_a_run_starts_at_margin_zero_and_at_the_logarithm_of_two(base, lora):
    run = build_run(merge(base, {"actor_train": {"model_args": lora}}), noise_pairs(12))
    metrics = run.trainer.training_step()
    assert metrics["rewards/margins"].mean == pytest.approx(0.0, abs=1e-6)
    assert metrics["kl"].mean == pytest.approx(0.0, abs=1e-5)
    assert metrics["loss"].mean == pytest.approx(math.log(2), abs=1e-6)
    assert run.trainer.training_step()["loss"].mean != pytest.approx(math.log(2), abs=1e-4)


def test_a_reference_that_differs_from_the_initial_policy_is_an_error_at_step_zero(base):
    run = build_run(base, noise_pairs(12))
    first, objective = run.trainer.first_micro_batch(), run.trainer.objective
    check_step_zero(run.trainer.engine, first, objective, "fp32")
    with torch.no_grad():
        run.trainer.engine.weights()["model.norm.weight"].mul_(1.01)
    with pytest.raises(
        UserError, match=r"disagree by .* nats per token at step 0, more than the .* of rounding; check"
    ):
        check_step_zero(run.trainer.engine, first, objective, "fp32")


def test_the_same_forward_of_another_model_is_an_error_even_within_the_rounding_of_bf16(base):
    """A cache may come from other batches and axes, whose rounding is larger; a live reference may not differ."""
    run = build_run(merge(base, {"actor_train": {"model_args": {"dtype": "bf16"}}}), noise_pairs(12))
    first, objective = run.trainer.first_micro_batch(), run.trainer.objective
    check_step_zero(run.trainer.engine, first, objective, "bf16", "same")
    with torch.no_grad():
        run.trainer.engine.weights()["model.norm.weight"].mul_(1.002)
    check_step_zero(run.trainer.engine, first, objective, "bf16", "other mesh")
    with pytest.raises(UserError, match="nats per token at step 0, more than the 1e-06 of rounding"):
        check_step_zero(run.trainer.engine, first, objective, "bf16", "same")


def test_the_tolerance_at_step_zero_follows_precision_forwards_and_tokens():
    limits = [tolerance(torch.bfloat16, forwards, 1000) for forwards in ("same", "other batches", "other mesh")]
    assert limits == sorted(limits)
    assert tolerance(torch.float32, "other mesh", 1000) < 1e-2 * tolerance(torch.bfloat16, "other mesh", 1000)
    assert tolerance(torch.bfloat16, "other mesh", 1) > tolerance(torch.bfloat16, "other mesh", 1000)
    assert tolerance(torch.bfloat16, "other mesh", 1000) < 0.1
    assert tolerance(torch.float16, "other mesh", 1000) == pytest.approx(
        tolerance(torch.bfloat16, "other mesh", 1000) / 8, rel=0.01
    )


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_nan_is_an_error_at_step_zero(base, dtype):
    run = build_run(merge(base, {"actor_train": {"model_args": {"dtype": dtype}}}), noise_pairs(12))
    first, objective = run.trainer.first_micro_batch(), run.trainer.objective
    check_step_zero(run.trainer.engine, first, objective, dtype)
    with torch.no_grad():
        run.trainer.engine.weights()["model.norm.weight"][0] = math.nan
    with pytest.raises(UserError, match="disagree by nan nats per token at step 0"):
        check_step_zero(run.trainer.engine, first, objective, dtype)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_loss_that_does_not_start_at_its_value_at_margin_zero_is_an_error_in_fp32(base, dtype, monkeypatch):
    """In bf16 the loss at margin 0 is not known exactly, so it is not checked."""
    run = build_run(merge(base, {"actor_train": {"model_args": {"dtype": dtype}}}), noise_pairs(12))
    first, objective = run.trainer.first_micro_batch(), run.trainer.objective
    monkeypatch.setattr(type(objective), "zero_margin_loss", property(lambda _: 0.75))
    message = r"the loss at step 0 is 0\.693147 instead of 0\.75, its value where policy and reference agree"
    with pytest.raises(UserError, match=message) if dtype == "fp32" else nullcontext():
        check_step_zero(run.trainer.engine, first, objective, dtype)


def test_non_finite_steps_are_skipped_counted_and_end_the_run(base):
    """ROLL's overflowing steps raise, or accumulate forever."""
    run = build_run(merge(base, {"max_consecutive_skipped_steps": 3}), noise_pairs(12))
    run.trainer.training_step()
    weights = run.trainer.engine.weights()
    with torch.no_grad():
        weights["model.norm.weight"][0] = float("inf")
    before = {name: weight.clone() for name, weight in weights.items()}
    with pytest.raises(UserError, match="not finite in 3 steps in a row, up to step 4; lower the learning rate"):
        run.fit()
    assert run.trainer.state.skipped_steps == 3
    assert run.trainer.state.pairs_seen == 4
    for name, weight in run.trainer.engine.weights().items():
        assert torch.equal(weight, before[name]), name


def test_a_synced_reference_needs_the_shape_of_the_policy(base, tmp_path):
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "wider")
    wider = {"reference": {"sync_steps": 1, "model_args": {"model_name_or_path": str(tmp_path / "wider")}}}
    with pytest.raises(UserError, match="sync_steps needs a reference with the policy's parameter shapes"):
        build_run(merge(base, wider), noise_pairs(12))


def unused_settings_of(values: dict) -> list[str]:
    config = parse_config(values)
    return unused_settings(config, reference_mode(config, build_objective(config)))


def test_a_synced_reference_moves_by_alpha_towards_the_policy():
    reference = infer_engine(tiny_model("llama"), PaddedLayout(pad_id=0), torch.float32)
    before = {name: weight.clone() for name, weight in reference.weights().items()}
    reference.ema_update({name: weight + 8.0 for name, weight in before.items()}, alpha=0.25)
    for name, weight in reference.weights().items():
        torch.testing.assert_close(weight, before[name] + 2.0)


def test_settings_of_an_unused_reference_are_reported(base):
    unused = {"infer_batch_size": 3, "model_args": {"dtype": "fp32"}, "strategy_args": {"strategy_name": "fsdp2_infer"}}
    assert unused_settings_of(merge(base, {"pref_loss": "simpo", "reference": unused})) == [
        "reference.model_args.dtype has no effect: the reference mode is none",
        "reference.infer_batch_size has no effect: the reference mode is none",
        "reference.strategy_args has no effect: the reference mode is none",
    ]
    assert unused_settings_of(base) == []


def test_settings_of_reference_workers_that_a_run_does_not_start_are_reported(base):
    ahead = {"reference": {"mode": "concurrent", "prefetch_steps": 4, "num_workers": 2}}
    assert unused_settings_of(merge(base, ahead)) == []
    in_one_process = {"reference": {"mode": "concurrent", "prefetch_steps": 4}}
    assert unused_settings_of(merge(base, in_one_process)) == [
        "reference.prefetch_steps has no effect: the reference mode is concurrent",
    ]
    synced = {"reference": {"sync_steps": 2, "num_workers": 2}}
    assert unused_settings_of(merge(base, synced)) == [
        "reference.num_workers has no effect: a synced reference runs in the policy workers",
    ]


def test_the_environment_of_a_reference_without_workers_is_reported(base):
    environment = {"reference": {"system_envs": {"A": "1"}}}
    note = "reference.system_envs has no effect: the reference has no separate workers"
    assert unused_settings_of(merge(base, environment)) == [note]
    workers = {"runtime": "ray", "reference": {"mode": "concurrent", "num_workers": 1}}
    assert unused_settings_of(merge(merge(base, environment), workers)) == []


def test_a_resumed_run_reports_changed_settings(base, tmp_path):
    then, now = parse_config(base), parse_config(merge(base, {"beta": 0.3, "layout": "padded", "output_dir": "other"}))
    (tmp_path / "config.json").write_text(json.dumps(then.model_dump(mode="json")))
    assert config_changes(tmp_path, then) == []
    assert config_changes(tmp_path, now) == [
        "beta was not set, is 0.3",
        "layout was auto, is padded",
    ]


@pytest.mark.parametrize(
    ("policy", "own", "same_model", "expected"),
    [
        (True, None, True, True),
        (True, None, False, False),
        (False, None, False, False),
        (False, True, False, True),
        (True, False, True, False),
    ],
)
def test_trust_remote_code_applies_to_one_model(base, different_reference, policy, own, same_model, expected):
    trust = {"actor_train": {"model_args": {"trust_remote_code": policy}}}
    if own is not None:
        trust["reference"] = {"model_args": {"trust_remote_code": own}}
    assert parse_config(merge(base if same_model else different_reference, trust)).trusts_reference_code is expected


def test_choosing_the_layout_respects_trust_remote_code_of_the_reference(
    different_reference, models, monkeypatch, tiny_dir
):
    trusted = {}
    load = inputs.load_model_config

    def load_and_note(path, *, trust_remote_code):
        trusted[path] = trust_remote_code
        return load(path, trust_remote_code=trust_remote_code)

    monkeypatch.setattr(inputs, "load_model_config", load_and_note)
    values = merge(
        different_reference, {"reference": {"model_args": {"trust_remote_code": True}}, "pretrain": str(tiny_dir)}
    )
    find_layout(parse_config(values))
    assert trusted == {str(tiny_dir): False, str(models[1]): True}


@pytest.mark.parametrize("of_policy", [False, True])
def test_checking_an_engine_trusts_the_code_of_its_own_model_alone(
    different_reference, models, monkeypatch, tiny_dir, of_policy
):
    trusted = {}
    load = spec.load_model_config

    def load_and_note(path, *, trust_remote_code):
        trusted[path] = trust_remote_code
        return load(path)

    monkeypatch.setattr(spec, "load_model_config", load_and_note)
    sharded = {"num_workers": 2, "model_args": {"trust_remote_code": of_policy}}
    frozen = {"num_workers": 2, "model_args": {"trust_remote_code": not of_policy}}
    frozen["strategy_args"] = {"strategy_name": "fsdp2_infer"}
    values = {"pretrain": str(tiny_dir), "actor_train": sharded, "reference": frozen}
    config = parse_config(merge(different_reference, values))
    engines.check_engine(config, "actor_train")
    engines.check_engine(config, "reference")
    assert trusted == {str(tiny_dir): of_policy, str(models[1]): not of_policy}


@pytest.mark.parametrize(("mapping", "device"), [(None, torch.device("cuda", 1)), ([0], None)])
def test_the_reference_of_one_process_is_on_the_policys_gpu_unless_it_has_its_own(
    different_reference, monkeypatch, mapping, device
):
    built = []
    monkeypatch.setattr(reference, "build_checked_reference", lambda _, device: built.append(device))
    values = {"actor_train": {"device_mapping": [1]}, "reference": {"device_mapping": mapping}, "runtime": "local"}
    config = parse_config(merge(different_reference, values))
    reference.build_beside(inputs.RunInputs(config), SimpleNamespace(device=torch.device("cuda", 1)))
    assert built == [device]
