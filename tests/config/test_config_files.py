"""A config from a file: Hydra's composition, overrides, `config show` and `config schema`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from thresher.cli import app
from thresher.config import DPOConfig, load_config, parse_config
from thresher.config.section import known_keys
from thresher.errors import UserError

ROLL_STYLE = """
hydra:
  run:
    dir: .
  output_subdir: null

exp_name: "qwen2.5-7B-dpo-config"
seed: 42
logging_dir: ./output/logs
output_dir: ./output/${exp_name}
track_with: tensorboard

max_steps: -1
num_train_epochs: 1.5
save_steps: 500
eval_steps: 100
logging_steps: 1
resume_from_checkpoint: false

pretrain: Qwen/Qwen2.5-7B-Instruct
sequence_length: 2048
pref_loss: sigmoid
ipo: false
beta: 0.1
label_smoothing: 0.0
chosen_key: chosen
rejected_key: rejected

validation:
  data_args:
    template: auto
    file_name: data/comparison_gpt4_data_zh_val.json

actor_train:
  model_args:
    model_type: causal_lm
    dtype: bf16
    attn_implementation: sdpa
    lora_rank: 32
    lora_alpha: 32
    lora_target: [o_proj, q_proj, k_proj, v_proj]
  training_args:
    learning_rate: 2.0e-6
    lr_scheduler_type: cosine
    weight_decay: 1.0e-2
    per_device_train_batch_size: 2
    gradient_accumulation_steps: 32
    warmup_steps: 20
    max_grad_norm: 1.0
  data_args:
    template: auto
    file_name:
      - data/comparison_gpt4_data_zh.json
    preprocessing_num_workers: 4
  strategy_args:
    strategy_name: megatron_train
    strategy_config:
      tensor_model_parallel_size: 2
      pipeline_model_parallel_size: 2
      use_distributed_optimizer: true
  device_mapping: list(range(0,8))

reference:
  model_args:
    model_type: causal_lm
    dtype: bf16
  strategy_args:
    strategy_name: megatron_infer
    strategy_config:
      tensor_model_parallel_size: 1
  device_mapping: list(range(0,8))
"""


@pytest.fixture
def write(tmp_path):
    def write_config(text: str, name: str = "run.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write_config


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def test_a_config_of_rolls_dpo_pipeline_is_understood(write):
    config = load_config(write(ROLL_STYLE))
    assert config.output_dir == "./output/qwen2.5-7B-dpo-config"  # interpolated
    assert config.track_with == ["tensorboard"]
    assert (config.max_steps, config.num_train_epochs) == (None, 1.5)
    assert config.loss_weights == {"sigmoid": 1.0}
    assert config.given_parameters == {"beta": 0.1, "label_smoothing": 0.0}
    assert config.actor_train.training_args.learning_rate == 2e-6
    assert config.actor_train.training_args.pairs_per_step(8) == 512
    assert config.actor_train.model_args.lora_target == ["o_proj", "q_proj", "k_proj", "v_proj"]
    assert config.actor_train.data_args.file_name == ["data/comparison_gpt4_data_zh.json"]
    assert config.validation.data_args.file_name == ["data/comparison_gpt4_data_zh_val.json"]
    assert config.actor_train.device_mapping == list(range(8))
    assert config.actor_train.strategy_args.strategy_config["tensor_model_parallel_size"] == 2
    assert config.reference.strategy_args.strategy_name == "megatron_infer"


def test_an_override_sets_a_key_that_the_file_has_and_one_that_it_lacks(write):
    path = write("beta: 0.1\nactor_train:\n  training_args: {learning_rate: 1.0e-6}\n")
    config = load_config(
        path,
        [
            "beta=0.3",
            "label_smoothing=0.05",
            "actor_train.training_args.learning_rate=2e-5",
            "actor_train.training_args.warmup_ratio=0.1",
            "validation.data_args.file_name=held out.json",
            "pref_loss={sigmoid:0.8,sft:0.2}",
            "+seed=7",
        ],
    )
    assert (config.beta, config.label_smoothing, config.seed) == (0.3, 0.05, 7)
    assert config.actor_train.training_args.learning_rate == 2e-5
    assert config.actor_train.training_args.warmup_ratio == 0.1
    assert config.validation.data_args.file_name == ["held out.json"]
    assert config.loss_weights == {"sigmoid": 0.8, "sft": 0.2}


@pytest.mark.parametrize("written", ["list(range(0,4))", "[0,1,2,3]", '"list(range(0,4))"', "[0,1]+list(range(2,4))"])
def test_a_device_mapping_override_uses_the_yaml_syntax(write, written):
    config = load_config(write("seed: 1\n"), [f"actor_train.device_mapping={written}"])
    assert config.actor_train.device_mapping == [0, 1, 2, 3]


def test_an_override_with_a_tilde_removes_a_key(write):
    assert load_config(write("beta: 0.5\n"), ["~beta"]).beta is None


def test_a_config_group_is_chosen_by_an_override(write, tmp_path):
    (tmp_path / "reference").mkdir()
    write("mode: concurrent\n", "reference/live.yaml")
    write("mode: precompute\n", "reference/table.yaml")
    path = write("defaults:\n  - reference: live\n  - _self_\n")
    assert load_config(path).reference.mode == "concurrent"
    assert load_config(path, ["reference=table"]).reference.mode == "precompute"
    with pytest.raises(UserError, match=r"includes reference/gone, which does not exist; use one of live, table$"):
        load_config(path, ["reference=gone"])


@pytest.mark.parametrize("text", ["<pad>", "<|end|>", "a=b", "données/(1)", "\N{WHITE HEAVY CHECK MARK}"])
def test_an_override_that_can_only_be_text_needs_no_quotes(write, text):
    path = write("seed: 1\n")
    assert load_config(path, [f"exp_name={text}"]).exp_name == text
    assert load_config(path, [f"exp_name='{text}'"]).exp_name == text


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("beta", "override 'beta' is not of the form key=value"),
        ("=3", "override '=3' is not of the form key=value"),
        ("bta=3", "bta: unknown key; did you mean `beta`?"),
        ("beta=((", "beta: Input should be a valid number"),
        ("beta=[(", "override 'beta=[(' cannot be read: no viable alternative at input '[('; balance its brackets and"),
        ("beta=many", "beta: Input should be a valid number"),
    ],
)
def test_an_invalid_override_is_rejected(write, override, message):
    assert message in refusal(write("seed: 1\n"), override)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n- b\n", "must be a DictConfig, got ListConfig"),
        ("beta: [1\nseed: 2", "line 2"),
        ("beta: 1\nbeta: 2\n", "found duplicate key beta"),
        ("beta: ${nowhere}\n", "Interpolation key 'nowhere' not found"),
        ("beta: \x07\n", "special characters are not allowed"),
    ],
)
@pytest.mark.parametrize("name", ["run.yaml", "run.yml"])
def test_an_invalid_config_file_is_rejected_with_its_name_and_the_cause(write, text, message, name):
    path = write(text, name)
    assert refusal(path).startswith(f"config {path} cannot be read: ")
    assert message in refusal(path)


def test_a_missing_file_of_the_defaults_is_named_with_what_to_do(write):
    """As in a config of ROLL that was copied without the files next to it."""
    path = write("defaults:\n  - ../config/deepspeed_zero@_here_\n  - _self_\n")
    assert refusal(path) == (
        f"config {path} includes ../config/deepspeed_zero, which does not exist; copy it too, or remove it from "
        "`defaults` and write its settings here"
    )


def test_a_binary_file_is_rejected(tmp_path):
    (tmp_path / "model.yaml").write_bytes(b"\xff\xfe\x00")
    assert "model.yaml cannot be read: 'utf-8' codec" in refusal(tmp_path / "model.yaml")


def test_a_missing_file_or_another_extension_is_rejected(write, tmp_path):
    assert refusal(tmp_path / "none.yaml").endswith("none.yaml does not exist; give the path of a YAML file")
    assert refusal(write("seed: 1\n", "run.json")).endswith("run.json does not end in `.yaml` or `.yml`; rename it")


def test_a_yml_file_is_read_like_a_yaml_file(write, tmp_path):
    (tmp_path / "reference").mkdir()
    write("mode: concurrent\n", "reference/live.yaml")
    write("seed: 1\n", "run.yaml")  # not read: another file
    for seed in (7, 8):  # a second file of the same name replaces the first
        path = write(f"defaults:\n  - reference: live\n  - _self_\nseed: {seed}\nbeta: 0.5\n", "run.yml")
        config = load_config(path, ["beta=0.3", "output_dir=run-${seed}"])
        assert (config.seed, config.beta, config.output_dir) == (seed, 0.3, f"run-{seed}")
        assert config.reference.mode == "concurrent"
    assert load_config(write("", "empty.yml")) == DPOConfig()


def test_an_empty_file_is_a_config_of_defaults(write):
    assert load_config(write("")) == DPOConfig()


SHOWN = {
    "rolls": ROLL_STYLE,
    "defaults": "seed: 1\n",
    "switch": "ipo: true\nlength_normalization: false\n",
    "everything turned": yaml.safe_dump(
        {
            "pref_loss": {"sigmoid": 0.5, "sft": 0.5},
            "f_divergence_type": "alpha_divergence",
            "f_alpha_divergence_coef": 0.3,
            "resume_from_checkpoint": "auto",
            "reference": {"sync_steps": 4, "sync_alpha": 0.2, "mode": "concurrent"},
            "validation": {"data_args": {"file_name": "v.json", "truncation": "prompt_start"}},
            "actor_train": {
                "model_args": {"pad_token": "<unk>", "dtype": "fp32"},
                "training_args": {"lr_scheduler_type": "polynomial", "lr_power": 2.0, "warmup_ratio": 0.1},
            },
        }
    ),
}


# sections that a run may lack
ABSENT = ("validation.", "samples.", "actor_train.model_args.quantization.")


@pytest.mark.parametrize("text", SHOWN.values(), ids=SHOWN)
def test_the_output_of_config_show_is_an_equal_config(write, text):
    path = write(text)
    shown = CliRunner().invoke(app, ["config", "show", str(path), "seed=3"])
    assert shown.exit_code == 0, shown.output
    again = load_config(write(shown.stdout, "shown.yaml"))
    assert again == load_config(path, ["seed=3"])
    assert again.reference.model_args == load_config(path).reference.model_args
    every_key = {key for key, _ in known_keys(DPOConfig) if not key.startswith(ABSENT)}
    assert every_key <= set(dotted(yaml.safe_load(shown.stdout)))  # every default is filled in


def dotted(values: dict, prefix: str = "") -> list[str]:
    keys = []
    for key, value in values.items():
        keys.append(f"{prefix}{key}")
        if isinstance(value, dict):
            keys += dotted(value, f"{prefix}{key}.")
    return keys


def test_the_schema_lists_every_key_with_its_type_and_its_description():
    printed = CliRunner().invoke(app, ["config", "schema"])
    schema = json.loads(printed.stdout)
    described = 0
    for key, field in known_keys(DPOConfig):
        found = find_in_schema(schema, key)
        assert {"type", "anyOf", "enum", "const", "$ref"} & found.keys(), key
        assert found.get("description") == field.description, key
        described += field.description is not None
    assert described > 30
    assert schema["additionalProperties"] is False


def find_in_schema(schema: dict, key: str) -> dict:
    """Follow a dotted key through $refs and optional sections."""
    node = schema
    for part in key.split("."):
        candidates = [node, *node.get("anyOf", [])]
        sections = [resolved(schema, each) for each in candidates]
        node = next(section["properties"][part] for section in sections if part in section.get("properties", {}))
    return node


def resolved(schema: dict, node: dict) -> dict:
    return schema["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node


def test_a_resolved_config_survives_json():
    config = parse_config(yaml.safe_load(SHOWN["everything turned"]))
    assert parse_config(json.loads(json.dumps(config.model_dump(mode="json")))) == config


@pytest.mark.parametrize("command", [("config", "show"), ("import",)], ids="-".join)
def test_aliases_that_stand_for_a_billion_values_are_rejected_at_once(write, command):
    names = zip("abcdefgh", "bcdefghi", strict=True)
    levels = [f"{name}: &{name} [{', '.join([f'*{inner}'] * 9)}]" for inner, name in names]
    path = write("\n".join(["a: &a [x, x, x, x, x, x, x, x, x]", *levels]))
    result = CliRunner().invoke(app, [*command, str(path)])
    assert isinstance(result.exception, UserError)
    assert "values, most of them aliases (*name); write out what they stand for" in str(result.exception)


def test_an_alias_may_be_used_twice(write):
    config = load_config(write("system_envs: &envs {A: b}\nactor_train: {system_envs: *envs}"))
    assert config.system_envs == config.actor_train.system_envs == {"A": "b"}


@pytest.mark.parametrize(
    "values",
    [
        {"track_with": ["wandb"], "tracker_kwargs": {"wandb_api_key": ["hunter2"]}},
        {"track_with": ["wandb"], "tracker_kwargs": {"wandb_api_key": 31337}},
        {"system_envs": {"DB_PASSWORD": ["hunter2", 31337]}},
    ],
)
def test_a_secret_of_a_wrong_type_is_not_shown(values):
    with pytest.raises(UserError, match=r"\*\*\*") as caught:
        parse_config(values)
    assert "hunter2" not in str(caught.value)
    assert "31337" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "recompute"),
    [("true", "full"), ("false", "off"), ("off", "off"), ("selective", "selective"), ("full", "full")],
)
def test_gradient_checkpointing_takes_booleans_and_is_off_in_yaml_too(write, given, recompute):
    key = "actor_train.training_args.gradient_checkpointing"
    path = write("exp_name: e\n")
    assert load_config(path, [f"{key}={given}"]).actor_train.training_args.gradient_checkpointing == recompute
    path = write(f"actor_train: {{training_args: {{gradient_checkpointing: {given}}}}}\n")
    assert load_config(path).actor_train.training_args.gradient_checkpointing == recompute


@pytest.mark.parametrize(("key", "meant"), [("health", "off"), ("save_strategy", "no"), ("eval_strategy", "no")])
def test_false_is_the_off_or_no_that_yaml_reads_as_false_and_zero_is_not(key, meant):
    assert getattr(parse_config({key: False}), key) == meant
    with pytest.raises(UserError, match=key):
        parse_config({key: 0})
