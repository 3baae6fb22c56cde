"""Every setting of losses, schedule, optimizer, adapter and synced reference reaches the computation.

The settings are read from the config classes, so a field that is added without a case here fails. Each case runs twice,
through the config and the builders of a real run: losses, rates or weights must change, or must not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch

from tests.support.compared_runs import merge
from tests.support.tiny_llama import save_tiny_llama
from tests.support.tiny_run import build_run, noise_labels, noise_lists, noise_pairs
from thresher.config import DPOConfig, LossConfig, ModelArgs, ReferenceConfig, ReferenceModelArgs, TrainingArgs
from thresher.config.dpo import COLUMN_KEYS

Effect = Literal["first loss", "some loss", "later losses", "rates", "weights", "nothing"]


@dataclass(frozen=True)
class Case:
    """Changes on top of `start`, and what must differ. beside: settings of other sections."""

    changes: dict[str, Any]
    effect: Effect
    start: dict[str, Any] | None = None
    beside: dict[str, Any] | None = None


@dataclass(frozen=True)
class Outcome:
    """The numbers of a run; evaluation is on the validation pairs after its last step."""

    losses: list[float]
    rates: list[float]
    weights: dict[str, torch.Tensor]
    evaluation: dict[str, float]


# of losses that do not read pairs
EXAMPLES = {"kto": noise_labels, "infonca": noise_lists, "rpo_sq": noise_lists}
LOSS_CASES = {
    "pref_loss": Case({"pref_loss": "hinge"}, "first loss"),
    "ipo": Case({"ipo": True}, "first loss"),
    "simpo_loss": Case({"simpo_loss": True}, "first loss"),
    "beta": Case({"beta": 0.4}, "first loss"),
    "label_smoothing": Case({"label_smoothing": 0.2}, "first loss"),
    "gamma": Case({"gamma": 0.3}, "first loss", {"pref_loss": "simpo"}),
    "length_normalization": Case({"length_normalization": True}, "first loss"),
    "cpo_alpha": Case({"cpo_alpha": 0.5}, "first loss", {"pref_loss": "cpo"}),
    "discopop_tau": Case({"discopop_tau": 0.5}, "first loss", {"pref_loss": "discopop"}),
    "alphapo_alpha": Case({"alphapo_alpha": 1.0}, "first loss", {"pref_loss": "alphapo"}),
    "dpop_lambda": Case({"dpop_lambda": 1.0}, "first loss", {"pref_loss": "dpop"}),
    "clamp_log_ratio": Case({"clamp_log_ratio": [-0.01, 0.02]}, "first loss"),
    "desirable_weight": Case({"desirable_weight": 1.5}, "first loss", {"pref_loss": "kto"}),
    "undesirable_weight": Case({"undesirable_weight": 1.5}, "first loss", {"pref_loss": "kto"}),
    "infonca_alpha": Case({"infonca_alpha": 3.0}, "first loss", {"pref_loss": "infonca"}),
    "reward_scale": Case({"reward_scale": 3.0}, "first loss", {"pref_loss": "rpo_sq"}),
    # the rewards of a new head are 0 in the first step
    "center_rewards_coefficient": Case(
        {"center_rewards_coefficient": 0.5}, "later losses", {"pref_loss": "bradley_terry"}
    ),
    "comparisons": Case({"comparisons": "best_worst"}, "first loss", {"comparisons": "adjacent"}),
    "rpo_alpha": Case({"rpo_alpha": 0.7}, "first loss"),
    "f_divergence_type": Case({"f_divergence_type": "js_divergence"}, "first loss"),
    "f_alpha_divergence_coef": Case(
        {"f_alpha_divergence_coef": 0.2}, "first loss", {"f_divergence_type": "alpha_divergence"}
    ),
    "ld_alpha": Case({"ld_alpha": 0.3}, "first loss"),
    "use_wpo": Case({"use_wpo": True}, "first loss"),
    "length_penalty": Case({"length_penalty": 0.1}, "first loss"),
}
TRAINING_CASES = {
    "learning_rate": Case({"learning_rate": 0.005}, "weights"),
    "per_device_train_batch_size": Case(
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}, "nothing"
    ),
    "max_tokens_per_micro_batch": Case({"max_tokens_per_micro_batch": 30}, "nothing"),
    "gradient_accumulation_steps": Case({"gradient_accumulation_steps": 1}, "first loss"),
    "global_batch_size": Case({"global_batch_size": 8}, "first loss", {"gradient_accumulation_steps": 1}),
    "per_device_eval_batch_size": Case({"per_device_eval_batch_size": 3}, "nothing"),
    "weight_decay": Case({"weight_decay": 0.5}, "weights"),
    "adam_beta1": Case({"adam_beta1": 0.5}, "weights"),
    "adam_beta2": Case({"adam_beta2": 0.5}, "weights"),
    "adam_epsilon": Case({"adam_epsilon": 1e-8}, "weights"),
    "max_grad_norm": Case({"max_grad_norm": 0.01}, "weights"),
    "log_num_zeros_in_grad": Case({"log_num_zeros_in_grad": True}, "nothing"),
    # every step overflows, so no weight changes
    "initial_scale_power": Case(
        {"initial_scale_power": 64}, "weights", beside={"actor_train": {"model_args": {"dtype": "fp16"}}}
    ),
    "lr_scheduler_type": Case({"lr_scheduler_type": "cosine"}, "rates"),
    "warmup_steps": Case({"warmup_steps": 2}, "rates"),
    "warmup_ratio": Case({"warmup_ratio": 0.5}, "rates"),
    "min_lr_ratio": Case({"min_lr_ratio": 0.5}, "rates", {"lr_scheduler_type": "cosine_with_min_lr"}),
    "optim": Case({"optim": "muon"}, "later losses"),
    "optim_args": Case({"optim_args": {"momentum": 0.1}}, "later losses", {"optim": "muon"}),
    "param_groups": Case({"param_groups": [{"match": "embed_tokens", "lr_ratio": 9}]}, "later losses"),
    "lr_power": Case({"lr_power": 3.0}, "rates", {"lr_scheduler_type": "polynomial"}),
    "gradient_checkpointing": Case({"gradient_checkpointing": "selective"}, "nothing"),
    "activation_offload": Case({"activation_offload": True}, "nothing", {"gradient_checkpointing": "full"}),
    "torch_compile": Case({"torch_compile": True}, "nothing"),
}
MODEL_CASES = {
    "lora_rank": Case({"lora_rank": 2}, "later losses", {"lora_rank": 4, "lora_alpha": 8}),
    "lora_alpha": Case({"lora_alpha": 64}, "later losses", {"lora_rank": 4}),
    "lora_dropout": Case({"lora_dropout": 0.5}, "later losses", {"lora_rank": 4}),
    "lora_target": Case({"lora_target": "q_proj"}, "later losses", {"lora_rank": 4}),
    "lora_init": Case({"lora_init": "pissa"}, "later losses", {"lora_rank": 4}),
    "lora_plus_ratio": Case({"lora_plus_ratio": 16.0}, "later losses", {"lora_rank": 4}),
    "use_rslora": Case({"use_rslora": True}, "later losses", {"lora_rank": 4}),
    "use_dora": Case({"use_dora": True}, "later losses", {"lora_rank": 4}),
    "lora_rank_pattern": Case({"lora_rank_pattern": {"q_proj": 2}}, "later losses", {"lora_rank": 4, "lora_alpha": 8}),
    "lora_alpha_pattern": Case({"lora_alpha_pattern": {"q_proj": 64}}, "later losses", {"lora_rank": 4}),
    "modules_to_save": Case({"modules_to_save": "lm_head"}, "later losses", {"lora_rank": 4}),
    "lora_exclude": Case({"lora_exclude": "q_proj"}, "later losses", {"lora_rank": 4}),
    "quantization": Case({"quantization": {"bits": 4}}, "first loss", {"lora_rank": 4}),
    "freeze_module_prefix": Case(
        {"freeze_module_prefix": "model.layers.1"}, "later losses", {"freeze_module_prefix": "model.embed"}
    ),
    "dtype": Case({"dtype": "bf16"}, "first loss"),
    "master_dtype": Case({"master_dtype": "bf16"}, "weights", {"dtype": "bf16"}),
    "attn_implementation": Case({"attn_implementation": "eager"}, "nothing"),
}
REFERENCE_CASES = {
    "sync_steps": Case({"sync_steps": 1}, "later losses"),
    "sync_alpha": Case({"sync_alpha": 0.1}, "later losses", {"sync_steps": 1}),
    "mode": Case({"mode": "concurrent"}, "nothing"),
    "infer_batch_size": Case({"infer_batch_size": 3}, "nothing"),
    "prefetch_steps": Case({"prefetch_steps": 3}, "nothing", {"mode": "concurrent"}),
}
REFERENCE_MODEL_CASES = {
    # rounding moves each margin a little, up or down, so the mean of one step may stay the same by chance
    "dtype": Case({"dtype": "bf16"}, "some loss"),
    "master_dtype": Case({"master_dtype": "bf16"}, "some loss", {"dtype": "bf16"}),
    "attn_implementation": Case({"attn_implementation": "eager"}, "nothing"),
}
RUN_CASES = {
    "seed": Case({"seed": 1}, "first loss"),
    "max_steps": Case({"max_steps": 2}, "rates"),
    "num_train_epochs": Case({"num_train_epochs": 0.5}, "rates"),
    "layout": Case({"layout": "padded"}, "nothing"),
    "apply_loss_mask": Case({"apply_loss_mask": False}, "first loss", {"pref_loss": "sigmoid_norm"}),
}
# fields without effect on the numbers; a new field must be in a table above or here
NO_NUMBERS = {
    LossConfig: {"pref_loss_digests"},  # recorded, not set
    TrainingArgs: {"loss_scale_window"},  # tests/training/test_loss_scale.py
    ModelArgs: {
        "model_name_or_path",
        "revision",
        "tokenizer_name_or_path",
        "model_type",
        "pad_token",
        "trust_remote_code",
    },
    ReferenceModelArgs: {"model_name_or_path", "revision", "model_type", "trust_remote_code"},
    ReferenceConfig: {"model_args", "strategy_args", "device_mapping", "num_workers", "cache_dir", "system_envs"},
    DPOConfig: {
        *(
            "exp_name",
            "output_dir",
            "logging_dir",
            "cache_dir",
            "save_strategy",
            "save_steps",
            "eval_strategy",
            "eval_steps",
            "eval_on_start",
            "logging_steps",
        ),
        "async_save",
        *(
            "resume_from_checkpoint",
            "save_total_limit",
            "export_model",
            "metric_for_best_model",
            "greater_is_better",
            "max_consecutive_skipped_steps",
        ),
        *("max_restarts", "graceful_stop_timeout", "heartbeat_timeout", "elastic", "health"),
        *("pretrain", "sequence_length", *COLUMN_KEYS, "track_with", "tracker_kwargs", "profile"),
        *(
            "actor_train",
            "reference",
            "validation",
            "samples",
            "runtime",
            "ray_address",
            "num_gpus_per_node",
            "system_envs",
        ),
    },
}
# fields that need other models or files; test_moe_aux_loss.py, test_initial_adapter.py and test_merged_adapters.py show
# their effect
OTHER_MODELS = {ModelArgs: {"moe_aux_loss_coef", "adapter_name_or_path", "merge_adapters"}}
TABLES = {
    LossConfig: (LOSS_CASES, ()),
    TrainingArgs: (TRAINING_CASES, ("actor_train", "training_args")),
    ModelArgs: (MODEL_CASES, ("actor_train", "model_args")),
    ReferenceConfig: (REFERENCE_CASES, ("reference",)),
    ReferenceModelArgs: (REFERENCE_MODEL_CASES, ("reference", "model_args")),
    DPOConfig: (RUN_CASES, ()),
}


@pytest.mark.parametrize("section", TABLES, ids=lambda section: section.__name__)
def test_every_config_field_has_a_case(section):
    own = set(section.model_fields) - (set(LossConfig.model_fields) if section is DPOConfig else set())
    cases, excluded = set(TABLES[section][0]), NO_NUMBERS.get(section, set()) | OTHER_MODELS.get(section, set())
    assert not cases & excluded
    assert cases | excluded == own


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Policy and reference are different models, so that no margin is 0 and every setting has an effect."""
    directory = tmp_path_factory.mktemp("models")
    policy, reference = (str(save_tiny_llama(directory / name, seed)) for seed, name in enumerate(("policy", "ref")))
    return {
        "output_dir": str(directory / "out"),
        "pretrain": policy,
        "num_train_epochs": 1,
        "actor_train": {
            "model_args": {"dtype": "fp32"},
            "training_args": {
                "learning_rate": 0.01,
                "per_device_train_batch_size": 4,
                "gradient_accumulation_steps": 2,
                "lr_scheduler_type": "linear",
                "adam_epsilon": 1e-3,  # the default would amplify rounding noise to the size of an effect
            },
        },
        "reference": {"model_args": {"model_name_or_path": reference}},
    }


@pytest.fixture(scope="module")
def outcome_of(base):
    """Train on 27 pairs and evaluate on 7; results are cached."""
    known: dict[str, Outcome] = {}

    def outcome(changes: dict[str, Any]) -> Outcome:
        key = repr(changes)
        if key not in known:
            examples = EXAMPLES.get(str(changes.get("pref_loss")), noise_pairs)
            examples = noise_lists if "comparisons" in changes else examples
            run = build_run(merge(base, changes), examples(27), examples(7, seed=1))
            steps = range(run.trainer.plan.num_steps)
            known[key] = Outcome(
                losses=[run.trainer.training_step()["loss"].mean for _ in steps],
                rates=[run.trainer._schedule(step) for step in steps],
                weights={name: weight.float().clone() for name, weight in run.trainer.engine.weights().items()},
                evaluation=run.trainer.evaluate(),
            )
        return known[key]

    return outcome


def nested(path: tuple[str, ...], values: dict[str, Any]) -> dict[str, Any]:
    for key in reversed(path):
        values = {key: values}
    return values


# CI compares compiled layers with others in tests/models/test_compile.py
BY_HAND = ("torch_compile",)
ALL_SETTINGS = [
    pytest.param(path, case, id=".".join((*path, name)), marks=[pytest.mark.hand] * (name in BY_HAND))
    for cases, path in TABLES.values()
    for name, case in cases.items()
]


@pytest.mark.parametrize(("path", "case"), ALL_SETTINGS)
def test_the_setting_reaches_the_computation(outcome_of, path, case):
    start = case.start or {}
    beside = case.beside or {}
    before = outcome_of(merge(beside, nested(path, start)))
    after = outcome_of(merge(beside, nested(path, {**start, **case.changes})))
    if case.effect == "nothing":
        assert after.losses == pytest.approx(before.losses, abs=1e-5)
        assert after.rates == before.rates
        assert after.evaluation == pytest.approx(before.evaluation, abs=1e-4)
        assert distance(before.weights, after.weights) < 1e-5
    elif case.effect == "first loss":
        assert abs(after.losses[0] - before.losses[0]) > 1e-4
        assert distance(before.weights, after.weights) > 1e-4
    elif case.effect == "some loss":
        assert max(abs(a - b) for a, b in zip(after.losses, before.losses, strict=True)) > 1e-4
    elif case.effect == "later losses":
        assert after.losses[0] == pytest.approx(before.losses[0], abs=1e-6)
        assert abs(after.losses[-1] - before.losses[-1]) > 1e-4
    elif case.effect == "rates":
        assert after.rates != before.rates
        assert distance(before.weights, after.weights) > 1e-4
    else:
        assert distance(before.weights, after.weights) > 1e-4


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)


def test_loss_weights_reach_the_computation(outcome_of):
    """The loss of a sum is the sum of the losses: 0.5 x sigmoid + 2 x sft, at the first step."""
    sigmoid, sft = (outcome_of({"pref_loss": name}).losses[0] for name in ("sigmoid", "sft"))
    both = outcome_of({"pref_loss": {"sigmoid": 0.5, "sft": 2.0}}).losses[0]
    assert both == pytest.approx(0.5 * sigmoid + 2 * sft, rel=1e-6)


def test_the_optimizer_uses_the_rates_of_the_schedule(base):
    """At a rate of 0 nothing moves: a linear warm-up of one step leaves the first step without effect."""
    warm = {"actor_train": {"training_args": {"warmup_steps": 1}}}
    run = build_run(merge(base, warm), noise_pairs(27))
    start = {name: weight.clone() for name, weight in run.trainer.engine.weights().items()}
    run.trainer.training_step()
    assert distance(start, run.trainer.engine.weights()) == 0.0
    run.trainer.training_step()
    assert distance(start, run.trainer.engine.weights()) > 1e-3
