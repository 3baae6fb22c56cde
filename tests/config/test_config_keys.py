"""Keys and values of a config: the known ones, the meaning of each spelling, and the errors for invalid ones."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from thresher.config import DPOConfig, parse_config
from thresher.config.loss import LOSS_NAMES
from thresher.config.roles import TrainingArgs
from thresher.config.section import known_keys
from thresher.errors import UserError
from thresher.losses import loss_names


def nested(path: str, value: object) -> dict:
    """{"a": {"b": value}} of "a.b"."""
    for key in reversed(path.split(".")):
        value = {key: value}
    return value


def refusal(values: dict) -> str:
    with pytest.raises(UserError) as caught:
        parse_config(values)
    return str(caught.value)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("bta", "beta"),
        ("sequnce_length", "sequence_length"),
        ("actor_train.training_args.learning_rat", "learning_rate"),
        ("actor_train.model_args.lora_rnk", "lora_rank"),
        ("reference.sync_step", "sync_steps"),
        ("validation.data_args.file_names", "file_name"),
        ("actor_trian", "actor_train"),
        ("graceful_stop_timeot", "graceful_stop_timeout"),
        ("hearbeat_timeout", "heartbeat_timeout"),
    ],
)
def test_an_unknown_key_suggests_the_nearest_known_one(typed, meant):
    assert f"  - {typed}: unknown key; did you mean `{meant}`?" in refusal(nested(typed, 1)).splitlines()


@pytest.mark.parametrize(
    ("typed", "home"),
    [
        ("learning_rate", "actor_train.training_args.learning_rate"),
        ("actor_train.beta", "beta"),
        ("actor_train.training_args.lora_rank", "actor_train.model_args.lora_rank"),
        ("reference.training_args", "actor_train.training_args"),
        ("validation.file_name", "validation.data_args.file_name"),
        ("file_name", "actor_train.data_args.file_name"),
        ("strategy_name", "actor_train.strategy_args.strategy_name"),
        ("prefetch_steps", "reference.prefetch_steps"),
        ("actor_train.max_consecutive_skipped_steps", "max_consecutive_skipped_steps"),
    ],
)
def test_a_key_in_the_wrong_section_names_the_right_section(typed, home):
    assert f"  - {typed}: unknown key; it belongs at `{home}`" in refusal(nested(typed, 1)).splitlines()


@pytest.mark.parametrize(
    ("typed", "ours"),
    [
        ("loss_type", "pref_loss"),
        ("max_length", "sequence_length"),
        ("dataset_name", "actor_train.data_args.file_name"),
        ("use_peft", "actor_train.model_args.lora_rank"),
        ("report_to", "track_with"),
        ("bf16", "actor_train.model_args.dtype"),
        ("actor_train.training_args.num_epochs", "num_train_epochs"),
    ],
)
def test_a_key_of_another_trainer_names_ours(typed, ours):
    assert f"  - {typed}: unknown key; did you mean `{ours}`?" in refusal(nested(typed, 1)).splitlines()


def test_another_name_of_a_loss_is_never_stored():
    for name in LOSS_NAMES:
        assert parse_config({"pref_loss": name}) == parse_config({"pref_loss": LOSS_NAMES[name]})
        assert LOSS_NAMES[name] in loss_names()
        assert name not in loss_names()


def test_an_unknown_key_without_a_near_match_lists_all_keys_of_its_section():
    message = refusal({"tracker_kwargs": {"zzz": 1}})
    assert message.endswith(
        "known keys here: mlflow_tracking_uri, name, notes, tags, tensorboard_dir, trackio_project, wandb_api_key, "
        "wandb_entity, wandb_mode, wandb_project"
    )


def test_all_errors_are_reported_at_once_one_per_line():
    lines = refusal({"bta": 1, "max_steps": 0, "pref_loss": 5}).splitlines()
    assert lines == [
        "invalid configuration:",
        "  - bta: unknown key; did you mean `beta`?",
        "  - pref_loss: Input should be a valid string, or Input should be a valid list, or Input should be a valid "
        "dictionary (got 5)",
        "  - max_steps: Input should be greater than 0 (got 0)",
    ]


def test_a_long_value_is_cut_short_and_a_section_is_not_repeated_in_a_message():
    assert len(refusal({"seed": "x" * 10_000})) < 300
    assert refusal({"exp_name": "mine", "ipo": True, "simpo_loss": True}).endswith("both true; keep one")


@pytest.mark.parametrize("given_name", ["pairs.json", ["pairs.json"]])
@pytest.mark.parametrize("section", ["actor_train", "validation"])
def test_a_file_name_is_one_name_or_a_list_never_characters(section, given_name):
    config = parse_config({section: {"data_args": {"file_name": given_name}}})
    assert getattr(config, section).data_args.file_name == ["pairs.json"]


def test_a_tracker_is_one_name_or_a_list():
    assert parse_config({"track_with": "wandb"}).track_with == ["wandb"]


@pytest.mark.parametrize(
    ("written", "ids"),
    [
        ("list(range(0,8))", [0, 1, 2, 3, 4, 5, 6, 7]),
        ("range(2)", [0, 1]),
        ("list(range(7, 0, -3))", [7, 4, 1]),
        ("[3, 1]", [3, 1]),
        ("(0, 1)", [0, 1]),
        ("list(range(0,2)) + [6] + list(range(8,10))", [0, 1, 6, 8, 9]),
        ("  [0]\n", [0]),
        ([4, 5], [4, 5]),
        ([], []),
        (None, None),
    ],
)
@pytest.mark.parametrize("role", ["actor_train", "reference"])
def test_device_mapping_is_a_list_or_its_spelling(role, written, ids):
    assert getattr(parse_config({role: {"device_mapping": written}}), role).device_mapping == ids


@pytest.mark.parametrize(
    "written",
    [
        "__import__('os').system('touch {canary}')",
        "[open('{canary}', 'w')]",
        "list(map(open, ['{canary}']))",
        "list(range(0, 8), key=1)",
        "[x for x in range(8)]",
        "[0] * 8",
        "eight",
        "range(0, 8, 0)",
        "range(0, 1000000000000000000000000000000)",
        "range(1, 2, 3, 4)",
        "[True]",
        "[0.5]",
        "[0, 0]",
        "[-1]",
        "(" * 100_000,
        "[" + "1" * 5_000 + "]",
        "[0]\x00",
        5,
        True,
        ["0"],
        [0, None],
        [[0]],
        [1, 1],
        [-2],
        {"0": 1},
    ],
    ids=lambda written: repr(written)[:40],
)
def test_an_invalid_device_mapping_is_rejected_and_never_evaluated(written, tmp_path):
    canary = tmp_path / "canary"
    value = written.replace("{canary}", str(canary)) if isinstance(written, str) else written
    message = refusal({"actor_train": {"device_mapping": value}})
    assert "actor_train.device_mapping: " in message
    assert "write it like `list(range(0,8))` or `[0, 1, 2, 3]`" in message
    assert not canary.exists()


@pytest.mark.parametrize(
    ("written", "meaning"),
    [(False, False), ("false", False), (None, None), ("auto", "auto"), ("runs/a/checkpoints/step-1",) * 2],
)
def test_resume_from_checkpoint_is_false_a_path_or_auto(written, meaning):
    assert parse_config({"resume_from_checkpoint": written}).resume_from_checkpoint == meaning


def test_resume_true_means_the_newest_checkpoint():
    assert parse_config({"resume_from_checkpoint": True}).resume_from_checkpoint == "auto"


def test_minus_one_means_no_limit():
    config = parse_config({"max_steps": -1, "num_train_epochs": -1})
    assert (config.max_steps, config.num_train_epochs) == (None, None)


@pytest.mark.parametrize(
    "values", [{"max_steps": 0}, {"max_steps": -2}, {"num_train_epochs": 0}, {"num_train_epochs": float("nan")}]
)
def test_a_run_without_steps_is_rejected(values):
    assert next(iter(values)) in refusal(values)


def test_a_seed_out_of_range_is_rejected():
    assert parse_config({"seed": 2**32 - 1}).seed == 2**32 - 1
    assert "seed: Input should be less than 4294967296" in refusal({"seed": 2**32})


@pytest.mark.parametrize(
    ("values", "weights"),
    [
        ({}, {"sigmoid": 1.0}),
        ({"pref_loss": "hinge"}, {"hinge": 1.0}),
        ({"pref_loss": ["sigmoid", "sft"]}, {"sigmoid": 1.0, "sft": 1.0}),
        ({"pref_loss": {"sigmoid": 0.8, "bco_pair": 0.2, "sft": 1}}, {"sigmoid": 0.8, "bco_pair": 0.2, "sft": 1.0}),
        ({"pref_loss": "dpo"}, {"sigmoid": 1.0}),
        ({"pref_loss": "dpo_norm"}, {"sigmoid_norm": 1.0}),
        ({"pref_loss": "simpo_loss", "simpo_loss": True}, {"simpo": 1.0}),
        ({"pref_loss": ["dpo", "sft"]}, {"sigmoid": 1.0, "sft": 1.0}),
        ({"pref_loss": {"dpo": 0.8, "sft": 1}, "length_normalization": True}, {"sigmoid_norm": 0.8, "sft": 1.0}),
        ({"ipo": True}, {"ipo_sum": 1.0}),
        ({"ipo": True, "pref_loss": "ipo"}, {"ipo": 1.0}),
        ({"ipo": False, "pref_loss": "sigmoid"}, {"sigmoid": 1.0}),
        ({"simpo_loss": True}, {"simpo": 1.0}),
        ({"length_normalization": True}, {"sigmoid_norm": 1.0}),
        ({"length_normalization": False}, {"sigmoid": 1.0}),
        ({"ipo": True, "length_normalization": True}, {"ipo": 1.0}),
        ({"ipo": True, "length_normalization": False}, {"ipo_sum": 1.0}),
        ({"pref_loss": {"sigmoid": 0.7, "sft": 0.3}, "length_normalization": True}, {"sigmoid_norm": 0.7, "sft": 0.3}),
    ],
)
def test_every_spelling_of_the_losses_resolves_to_names_and_weights(values, weights):
    assert parse_config(values).loss_weights == weights


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"ipo": True, "pref_loss": "sigmoid"}, "ipo: true contradicts pref_loss: sigmoid; keep one"),
        ({"simpo_loss": True, "pref_loss": "ipo"}, "simpo_loss: true contradicts pref_loss: ipo; keep one"),
        ({"ipo": True, "pref_loss": ["ipo", "sft"]}, "ipo: true contradicts pref_loss: ['ipo', 'sft']; keep one"),
        ({"ipo": True, "simpo_loss": True}, "ipo and simpo_loss are both true; keep one"),
        (
            {"pref_loss": ["sigmoid", "sigmoid"]},
            "repeats a loss: sigmoid + sigmoid; name each loss once, with its weight",
        ),
        (
            {"pref_loss": {"ipo": 1, "ipo_sum": 2}, "length_normalization": False},
            "repeats a loss: ipo_sum + ipo_sum; name",
        ),
        ({"pref_loss": {"sigmoid": 0.0}}, "greater than 0"),
        ({"pref_loss": {"sigmoid": 1, "dpo": 2}}, "pref_loss names a loss twice: sigmoid + dpo; name each loss once"),
        (
            {"f_alpha_divergence_coef": 0.3},
            "f_alpha_divergence_coef has no effect without f_divergence_type=alpha_divergence",
        ),
    ],
)
def test_contradicting_losses_are_rejected(values, message):
    assert message in refusal(values)


@pytest.mark.parametrize(
    ("path", "values", "message"),
    [
        ("actor_train.model_args", {"lora_alpha": 16}, "lora_alpha has no effect without lora_rank; set lora_rank"),
        (
            "actor_train.model_args",
            {"lora_dropout": 0.1, "lora_target": "q_proj"},
            "lora_dropout, lora_target have no effect without lora_rank; set lora_rank",
        ),
        (
            "actor_train.training_args",
            {"warmup_steps": 3, "warmup_ratio": 0.1},
            "warmup_steps and warmup_ratio are both set; keep one",
        ),
        (
            "actor_train.training_args",
            {"min_lr_ratio": 0.2},
            "min_lr_ratio has no effect without lr_scheduler_type=cosine_with_min_lr",
        ),
        ("actor_train.training_args", {"lr_power": 2.0}, "lr_power has no effect without lr_scheduler_type=polynomial"),
        ("actor_train.data_args", {"file_name": "a.json", "store": "b"}, "file_name and store are both set; keep one"),
        ("reference", {"sync_alpha": 0.5}, "sync_alpha has no effect without sync_steps; set sync_steps"),
        (
            "reference",
            {"sync_steps": 5, "mode": "precompute"},
            "sync_steps needs a reference in mode concurrent, not precompute; set mode to concurrent",
        ),
    ],
)
def test_a_setting_without_effect_is_rejected(path, values, message):
    assert f"  - {path}: " in refusal(nested(path, values))
    assert message in refusal(nested(path, values))


@pytest.mark.parametrize(
    ("policy", "reference"),
    [
        ({"dtype": "fp32"}, {"master_dtype": "bf16"}),
        ({"dtype": "bf16", "master_dtype": "bf16"}, {"dtype": "fp32"}),
        ({"dtype": "fp16"}, {"master_dtype": "bf16"}),
        ({"dtype": "fp16"}, {"master_dtype": "fp16"}),
    ],
)
def test_an_invalid_precision_of_the_reference_is_rejected(policy, reference):
    values = {"actor_train": {"model_args": policy}, "reference": {"model_args": reference}}
    dtype, stored = {**policy, **reference}["dtype"], {**policy, **reference}["master_dtype"]
    assert (
        f"the reference cannot compute in {dtype} from {stored} weights; remove its dtype and master_dtype"
        in refusal(values)
    )


@pytest.mark.parametrize(
    ("model_args", "message"),
    [
        ({"dtype": "fp16", "master_dtype": "fp16"}, "master_dtype fp16 would round most updates to zero; set master"),
        ({"master_dtype": "fp16"}, "master_dtype fp16 would round most updates to zero; set master_dtype to fp32"),
        ({"dtype": "fp16", "master_dtype": "bf16"}, "dtype fp16 cannot compute from master_dtype bf16; set master"),
    ],
)
def test_fp16_needs_fp32_master_weights(model_args, message):
    assert message in refusal({"actor_train": {"model_args": model_args}})


@pytest.mark.parametrize("key", ["lora_rank", "pad_token"])
def test_the_reference_has_no_setting_that_only_a_policy_can_use(key):
    assert f"reference.model_args.{key}: unknown key; it belongs at `actor_train.model_args.{key}`" in refusal(
        {"reference": {"model_args": {key: 1}}}
    )


def test_a_config_cannot_be_changed_after_it_was_read():
    config = parse_config({})
    for section, field in ((config, "beta"), (config.actor_train.training_args, "learning_rate")):
        with pytest.raises(ValidationError, match="frozen"):
            setattr(section, field, 0.5)


def test_policy_and_reference_default_to_pretrain():
    shared = parse_config({"pretrain": "a"})
    assert (shared.policy_path, shared.reference_path) == ("a", "a")
    own = parse_config({"pretrain": "a", "reference": {"model_args": {"model_name_or_path": "b"}}})
    assert (own.policy_path, own.reference_path) == ("a", "b")
    policy_only = parse_config({"actor_train": {"model_args": {"model_name_or_path": "c"}}})
    assert (policy_only.policy_path, policy_only.reference_path) == ("c", "c")


def test_batch_sizes_are_in_pairs_and_evaluation_takes_the_training_size_by_default():
    sizes = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 5}
    training = parse_config({"actor_train": {"training_args": sizes}}).actor_train.training_args
    assert (training.pairs_per_step(1), training.pairs_per_eval_batch) == (15, 3)


KEYS = sorted({key.rpartition(".")[2] for key, _ in known_keys(DPOConfig)} | {"zzz", ""})
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["auto", "list(range(0,8))", "range(9, 1)", "[0]+[0]", "sigmoid", "-1", "1e400", "fp32"])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS) | SCALARS, inner, max_size=4),
    max_leaves=12,
)


@st.composite
def odd_configs(draw: st.DrawFn) -> dict:
    """Known keys at their places, and others, with values of any kind."""
    values = draw(st.dictionaries(st.sampled_from(KEYS) | SCALARS, VALUES, max_size=4))
    for path in draw(st.lists(st.sampled_from([key for key, _ in known_keys(DPOConfig)]), max_size=5)):
        *parents, last = path.split(".")
        section = values
        for parent in parents:
            if not isinstance(section.get(parent), dict):
                section[parent] = {}
            section = section[parent]
        section[last] = draw(VALUES)
    return values


@settings(max_examples=400, deadline=None)
@given(odd_configs())
def test_arbitrary_values_give_a_config_or_one_readable_error(values):
    message = ""
    config = None
    try:
        config = parse_config(values)
    except UserError as error:
        message = str(error)
    if config is None:
        assert message.startswith("invalid configuration:\n  - ")
    else:
        assert parse_config(config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"eval_steps": 5}, "eval_steps"),
        ({"eval_on_start": True}, "eval_on_start"),
        ({"metric_for_best_model": "eval/rewards/accuracies"}, "metric_for_best_model"),
        (
            {"actor_train": {"training_args": {"per_device_eval_batch_size": 2}}},
            "actor_train.training_args.per_device_eval_batch_size",
        ),
    ],
)
def test_evaluation_settings_need_something_to_evaluate(values, named):
    assert f"{named} has no effect without validation.data_args" in refusal(values)
    parse_config({**values, "validation": {"data_args": {"file_name": "held_out.jsonl"}}})


EVALUATED = {"validation": {"data_args": {"file_name": "held_out.jsonl"}}}


@pytest.mark.parametrize(
    ("metric", "greater"),
    [
        ("eval/loss", False),
        ("eval/sft_loss", False),
        ("eval/rewards/rejected", False),
        ("eval/rewards/chosen", True),
        ("eval/rewards/margins", True),
        ("eval/rewards/accuracies", True),
    ],
)
def test_the_metric_decides_whether_greater_is_better_unless_it_is_set(metric, greater):
    assert parse_config({**EVALUATED, "metric_for_best_model": metric}).greater_is_better is greater
    opposite = parse_config({**EVALUATED, "metric_for_best_model": metric, "greater_is_better": not greater})
    assert opposite.greater_is_better is not greater


def test_the_direction_of_the_best_metric_is_stored_as_a_boolean():
    assert parse_config({}).model_dump()["greater_is_better"] is False
    with pytest.raises(UserError, match="greater_is_better has no effect without validation"):
        parse_config({"greater_is_better": True})


def test_a_token_budget_of_auto_is_stored_as_no_value():
    """So that checkpoints that are older than the word belong to the same run."""
    assert TrainingArgs(max_tokens_per_micro_batch="auto") == TrainingArgs()
    with pytest.raises(ValueError, match="valid integer"):
        TrainingArgs(max_tokens_per_micro_batch="automatic")


def test_the_default_strategy_may_be_imported_before_the_config():
    """The config has strategy_args as a default, and validating them needs the strategy."""
    command = [sys.executable, "-c", "from thresher.engines.native.declaration import TRAIN"]
    assert subprocess.run(command, capture_output=True, text=True, check=False).stderr == ""
