"""Configs of ROLL: every key is applied or named in one line, and none is ignored silently."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import yaml

from tests.support.paths import ROOT, shared_path
from thresher.config import DPOConfig, load_config, parse_config
from thresher.errors import UserError
from thresher.importers.convert import convert
from thresher.importers.roll import NEUTRAL, READ, TABLE, read_own_keys
from thresher.importers.translation import nest

MOVED = {key: rule for key, rule in READ.items() if rule.targets}
WITHOUT_EFFECT = {key: rule.note for key, rule in READ.items() if not rule.targets}


def nest_one(path: str, value: object) -> dict:
    return nest({path: value})


def at(config: object, path: str) -> object:
    for name in path.split("."):
        config = config[name] if isinstance(config, dict) else getattr(config, name)
    return config


@pytest.mark.real
@pytest.mark.parametrize("name", ["qwen2.5-3B_dpo_megatron", "qwen3-30BA3B-dpo_megatron_80GB"])
def test_a_published_config_loads_unchanged_and_every_foreign_key_is_named(name, caplog):
    path = shared_path("peer-configs", "roll", f"{name}.yaml")
    caplog.set_level(logging.INFO)
    config = load_config(path)
    given = yaml.safe_load(path.read_text())
    notes = "\n".join(caplog.messages)

    assert config.num_train_epochs == 10
    assert config.max_steps == 500
    assert config.system_envs == {"USE_MODELSCOPE": "1"}
    assert config.actor_train.training_args.gradient_checkpointing == "full"
    assert config.actor_train.training_args.lr_scheduler_type == "constant_with_warmup"
    assert config.actor_train.training_args.per_device_eval_batch_size == given["actor_train"]["infer_batch_size"]
    assert config.actor_train.data_args.dataset_dir == "data"
    assert config.actor_train.data_args.template == "auto"
    assert config.tracker_kwargs.tensorboard_dir == given["tracker_kwargs"]["log_dir"]
    config_of_engine = given["actor_train"]["strategy_args"]["strategy_config"]
    # a field of Megatron-Core that has a key here is taken out of additional_configs
    config_of_engine |= config_of_engine.pop("additional_configs", {})
    assert config.actor_train.strategy_args.strategy_config.items() >= config_of_engine.items()
    for key in ("checkpoint_config", "num_nodes", "reference.model_args.disable_gradient_checkpointing"):
        assert f"config: {key} has no effect: " in notes
    if "is_offload_states" in given:
        assert "config: is_offload_states has no effect: " in notes


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("actor_train.model_args.disable_gradient_checkpointing", False, True),
        ("actor_train.model_args.disable_gradient_checkpointing", True, False),
        ("actor_train.model_args.ulysses_size", 2, 2),
        ("actor_train.max_tokens_per_microbatch_in_train", 4096, 4096),
        ("actor_train.data_args.prompt", "question", "question"),
        ("actor_train.training_args.num_train_epochs", 2, 2.0),
        ("actor_train.training_args.max_steps", 7, 7),
        ("actor_train.training_args.seed", 7, 7),
        ("actor_train.training_args.output_dir", "there", "there"),
        ("max_grad_norm", 0.5, 0.5),
        ("use_ref_model", True, "auto"),
        ("use_ref_model", False, "none"),
        ("max_ckpt_to_keep", 2, 2),
        ("tracker_kwargs.log_dir", "events", "events"),
        ("tracker_kwargs.project", "ours", "ours"),
        ("tracker_kwargs.mode", "offline", "offline"),
        ("tracker_kwargs.api_key", "secret-key", "secret-key"),
    ],
)
def test_a_moved_key_reaches_its_place_and_is_named(key, value, expected):
    target = MOVED[key].targets[0]
    values, (note,) = read_own_keys(nest_one(key, value))
    assert at(values, target) == expected
    assert note.startswith(f"{key} is read as {target}: ")
    assert "secret" not in note


@pytest.mark.parametrize("key", WITHOUT_EFFECT)
def test_a_key_without_effect_is_removed_and_named_with_the_reason(key):
    values, notes = read_own_keys(nest_one(key, 1))
    assert notes == [f"{key} has no effect: {WITHOUT_EFFECT[key]}"]
    assert parse_config(values) == parse_config({})


# a section is removed as a whole
@pytest.mark.parametrize("pattern", [pattern for pattern in NEUTRAL.split() if not pattern.endswith(".*")])
def test_a_key_that_changes_nothing_is_removed_and_named(pattern):
    start = "actor_train.strategy_args" if "gpu_memory" in pattern else "actor_train"
    key = (
        pattern.replace("*", start, 1).replace("*", "any") if pattern.startswith("*.") else pattern.replace("*", "any")
    )
    values, notes = read_own_keys(nest_one(key, 1))
    assert notes == [f"{key} has no effect: changes nothing here"]
    assert parse_config(values) == parse_config({})


def test_roles_of_other_pipelines_are_removed_with_their_settings():
    values = {"critic": {"model_args": {"dtype": "bf16"}}, "pipeline_cls": "roll.pipeline.dpo.dpo_pipeline.DPOPipeline"}
    read, notes = read_own_keys(values)
    assert (read, parse_config(read)) == ({}, parse_config({}))
    assert notes == [
        "critic has no effect: DPO has the roles actor_train and reference",
        "pipeline_cls has no effect: changes nothing here",
    ]


def test_infer_batch_size_of_the_policy_is_the_evaluation_batch():
    values = {"actor_train": {"infer_batch_size": 4}}
    validation = {"validation": {"data_args": {"file_name": "held_out.jsonl"}}}
    assert parse_config(values | validation).actor_train.training_args.pairs_per_eval_batch == 4
    assert read_own_keys(values)[1] == ["actor_train.infer_batch_size has no effect: without validation.data_args"]


def test_a_key_under_rolls_name_and_ours_must_agree():
    both = {"num_train_epochs": 2, "actor_train": {"training_args": {"num_train_epochs": 3}}}
    with pytest.raises(UserError, match="num_train_epochs is set too, and differs; keep num_train_epochs"):
        parse_config(both)
    assert parse_config(both | {"num_train_epochs": 3}).num_train_epochs == 3


@pytest.mark.parametrize(("name", "template"), [("native", "auto"), ("qwen2_5", "auto"), ("chatml", "chatml")])
def test_the_global_template_is_that_of_training_and_validation_pairs(name, template):
    config = parse_config({"global_template": name, "validation": {"data_args": {"file_name": "held_out.jsonl"}}})
    assert config.actor_train.data_args.template == template
    assert config.validation is not None
    assert config.validation.data_args.template == template
    own = {"actor_train": {"data_args": {"template": "raw"}}}
    assert parse_config({"global_template": name} | own).actor_train.data_args.template == "raw"


def test_ipo_true_is_the_sum_form_and_pref_loss_ipo_the_average():
    assert parse_config({"ipo": True}).loss_weights == {"ipo_sum": 1.0}
    assert parse_config({"pref_loss": "ipo"}).loss_weights == {"ipo": 1.0}


@pytest.mark.parametrize(
    ("spelled", "names"),
    [("all", ["all-linear"]), ("q_proj,v_proj", ["q_proj", "v_proj"]), ("o_proj", ["o_proj"])],
)
def test_lora_target_may_be_all_or_a_comma_list(spelled, names):
    config = parse_config({"actor_train": {"model_args": {"lora_rank": 4, "lora_target": spelled}}})
    assert config.actor_train.model_args.lora_target == names


def test_a_constant_schedule_with_warmup_warms_up():
    training = {"lr_scheduler_type": "constant", "warmup_steps": 20}
    values, notes = read_own_keys({"actor_train": {"training_args": training}})
    assert parse_config(values).actor_train.training_args.lr_scheduler_type == "constant_with_warmup"
    assert notes == ["actor_train.training_args.lr_scheduler_type: constant is read as constant_with_warmup"]


def test_numbers_and_booleans_in_an_environment_become_text():
    config = parse_config({"system_envs": {"A": 1, "B": True, "C": "x"}, "reference": {"system_envs": {"A": 2}}})
    assert config.environment_of("actor_train") == {"A": "1", "B": "true", "C": "x"}
    assert config.environment_of("reference") == {"A": "2", "B": "true", "C": "x"}


def test_a_config_of_ours_is_not_changed():
    example = Path(ROOT / "examples" / "polite_smollm2")
    for path in example.glob("*.yaml"):
        values = yaml.safe_load(path.read_text())
        assert read_own_keys(values) == (values, [])


@pytest.mark.parametrize(
    "values", [{"actor_train": "x", "max_grad_norm": 1, "global_template": "chatml"}, {"reference": 3}]
)
def test_a_section_of_a_wrong_type_is_reported(values):
    with pytest.raises(UserError, match="invalid configuration"):
        parse_config(values)


@pytest.mark.parametrize("key", READ)
def test_a_key_has_one_meaning_when_read_and_when_imported(key):
    """Except two keys: an import writes no secret to a file, and translates schedules that thresher lacks."""
    if key not in ("tracker_kwargs.api_key", "actor_train.training_args.lr_scheduler_type"):
        assert TABLE[key] is READ[key]


def test_a_constant_schedule_with_a_warmup_is_imported_as_it_is_read(tmp_path):
    training = {"lr_scheduler_type": "constant", "warmup_steps": 20}
    values = {"pretrain": "m", "actor_train": {"training_args": training}}
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(values))
    (tmp_path / "ours.yaml").write_text(convert(tmp_path / "theirs.yaml", "roll").text)
    for name in ("theirs.yaml", "ours.yaml"):
        args = load_config(tmp_path / name).actor_train.training_args
        assert (args.lr_scheduler_type, args.warmup_steps) == ("constant_with_warmup", 20)


def test_ulysses_size_is_the_context_parallel_size_when_read_and_when_imported(tmp_path):
    values = {"pretrain": "m", "actor_train": {"model_args": {"ulysses_size": 2}, "device_mapping": [0, 1]}}
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(values))
    (tmp_path / "ours.yaml").write_text(convert(tmp_path / "theirs.yaml", "roll").text)
    for name in ("theirs.yaml", "ours.yaml"):
        assert load_config(tmp_path / name).actor_train.strategy_args.settings.cp_size == 2


def test_a_key_under_two_names_stops_an_import_unless_the_values_agree(tmp_path):
    values = {"pretrain": "m", "seed": 3, "max_ckpt_to_keep": 0, "actor_train": {"training_args": {"seed": 4}}}
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(values))
    done = convert(tmp_path / "theirs.yaml", "roll").translation
    assert (done.value("seed"), done.value("save_total_limit")) == (3, None)
    assert [(entry.key, entry.notes) for entry in done.lost] == [
        ("actor_train.training_args.seed", ["seed is set too, and differs; keep seed"])
    ]


@pytest.mark.parametrize(("engine", "axes"), [("megatron", "tensor_model_parallel_size"), ("deepspeed", "zero_stage")])
def test_the_examples_have_the_names_that_users_of_roll_type(engine, axes, caplog):
    caplog.set_level(logging.INFO)
    directory = ROOT / "examples" / f"qwen2.5-3B-dpo_{engine}"
    config = load_config(directory / "dpo_config.yaml")
    assert not caplog.messages  # all keys are ours
    for role, purpose in ((config.actor_train, "train"), (config.reference, "infer")):
        assert role.strategy_name == f"{engine}_{purpose}"
        assert role.device_mapping == list(range(8))
        assert axes in role.strategy_args.strategy_config
        role.strategy_args.settings.check_workers(role.num_processes)
    script = directory / "run_dpo_pipeline.sh"
    assert script.stat().st_mode & 0o100
    assert "start_dpo_pipeline.py" in script.read_text()


@pytest.mark.parametrize("absent", [{"strategy_args": None}, {"strategy_args": {"strategy_config": None}}])
def test_a_section_without_keys_is_the_default(absent):
    """ROLL writes `strategy_config: ~` for engines without settings."""
    assert parse_config({"actor_train": absent, "reference": absent, "system_envs": None}) == parse_config({})


def test_the_switch_of_the_reference_is_its_mode():
    assert parse_config({"use_ref_model": False, "pref_loss": "orpo"}).reference.mode == "none"
    assert parse_config({"use_ref_model": True}).reference.mode == "auto"
    with pytest.raises(UserError, match=r"use_ref_model: unknown key; set `reference\.mode`"):
        DPOConfig(use_ref_model=True)
