"""`thresher check`: everything that can be known without a device, with all problems in one list, before any work."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml

from tests.support.compared_runs import merge
from tests.support.small_runs import save_small_model, write_rows
from thresher import DPOConfig, DPOTrainer
from thresher.builders.preflight import checks
from thresher.errors import UserError


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """A directory with `policy`, `reference`, and changed copies of them."""
    root = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("policy", "reference")):
        save_small_model(root / name, seed)
    shutil.copytree(root / "reference", root / "without-tokenizer")
    for file in (root / "without-tokenizer").glob("*token*"):
        file.unlink()
    for name, edit in {"other-words": swap_words, "long-eos": move_eos}.items():
        shutil.copytree(root / "reference", root / name)
        file = root / name / "tokenizer.json"
        file.write_text(json.dumps(edit(json.loads(file.read_text()))))
    shutil.copytree(root / "reference", root / "one-head")
    file = root / "one-head" / "config.json"
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16}
    file.write_text(json.dumps(json.loads(file.read_text()) | heads))
    return root


def swap_words(tokenizer: dict[str, Any]) -> dict[str, Any]:
    words = tokenizer["model"]["vocab"]
    words["w10"], words["w20"] = words["w20"], words["w10"]
    return tokenizer


def move_eos(tokenizer: dict[str, Any]) -> dict[str, Any]:
    tokenizer["model"]["vocab"]["</s>"] = 64  # one past the last row of the embedding
    for token in tokenizer["added_tokens"]:
        token["id"] = 64 if token["content"] == "</s>" else token["id"]
    return tokenizer


@pytest.fixture
def config(tmp_path, models):
    """Write a valid config, merged with changes; return its name."""
    write_rows(tmp_path / "pairs.jsonl", 8, seed=0)

    def write(changes: dict[str, Any] | None = None) -> str:
        values = {
            "pretrain": str(models / "policy"),
            "output_dir": "out",
            "max_steps": 1,
            "sequence_length": 64,
            "track_with": [],
            "actor_train": {
                "model_args": {"dtype": "fp32"},
                "data_args": {"file_name": "pairs.jsonl", "template": "raw"},
                "training_args": {"per_device_train_batch_size": 4},
            },
        }
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(merge(values, changes or {})))
        return "run.yaml"

    return write


def error_of(result) -> str:
    assert result.code == 2, result
    return result.err.rpartition("error: ")[2].strip()


def test_a_config_without_problems_is_described_and_nothing_is_written(command_line, config, models, tmp_path):
    result = command_line("check", config())
    assert result.code == 0
    assert result.out.splitlines() == [
        f"policy: {models / 'policy'}, 6,480 parameters, 6,480 of them trained",
        "loss: sigmoid(beta=0.1); reference: precompute; layout: shared",
        "checkpoints: about 77.8 kB each, in out",
        "no problems found; not checked: the rows of the data, and the memory that a step needs",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pairs.jsonl", "run.yaml"]


def test_all_wrong_paths_are_in_one_list(command_line, config):
    data = {"file_name": ["pears.jsonl", "trl-lib/x"], "template": "none.jinja"}
    path = config(
        {
            "pretrain": "./policy",
            "output_dir": "pairs.jsonl/out",
            "track_with": ["wnadb"],
            "resume_from_checkpoint": "nowhere",
            "actor_train": {"data_args": data},
            "reference": {"model_args": {"model_name_or_path": "./reference.gguf"}},
            "validation": {"data_args": {"store": "stores/none"}},
        }
    )
    expected = [
        "unknown tracker 'wnadb'; did you mean wandb? the trackers are console, tensorboard, wandb, mlflow, trackio",
        "model directory ./policy does not exist; give the path of a model directory or of a `.gguf` file",
        "model file ./reference.gguf does not exist; give the path of a `.gguf` file or of a model directory",
        "'pears.jsonl' does not exist; did you mean ./pairs.jsonl?",
        "'trl-lib/x' does not exist; its directory 'trl-lib' does not exist either; a dataset of the Hugging Face Hub "
        "is named hf://trl-lib/x",
        "actor_train.data_args.template='none.jinja': no such file; use auto, raw, one of chatml, gemma, llama3, "
        "mistral, phi4, qwen2_5, qwen3, or the path of a Jinja file",
        "stores/none is not a pair store: it has no manifest.json; create one with `thresher prepare`",
        "cannot use pairs.jsonl/out: Not a directory; check the path and its permissions",
        "there is no checkpoint at nowhere; check the path, or resume with `auto`",
    ]
    for command in ("check", "train", "precompute-reference"):
        lines = error_of(command_line(command, path)).splitlines()
        assert lines == ["9 problems:", *(f"  - {each}" for each in expected)], command


@pytest.mark.parametrize("command", ["check", "train", "precompute-reference"])
def test_a_wrong_path_is_reported_without_importing_much(config, tmp_path, command):
    path = config({"actor_train": {"data_args": {"file_name": "pears.jsonl"}}})
    script = (
        f"import sys; sys.argv = ['thresher', {command!r}, {path!r}]\n"
        "from thresher.cli import main\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n    assert end.code == 2\n"
        "heavy = {'torch', 'transformers', 'pyarrow', 'datasets', 'peft', 'ray'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "print(len(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip() == "error: 'pears.jsonl' does not exist; did you mean ./pairs.jsonl?"
    # counted, not timed: about 0.7 s on an idle core, and several times more on a busy machine
    assert int(done.stdout) < 1000


class Mistake(NamedTuple):
    """A change of the config and the message for it; MODELS stands for the directory of the models."""

    changes: dict[str, Any]
    message: str


def reference(**args: Any) -> dict[str, Any]:
    return {"reference": {"model_args": args}}


def policy(**args: Any) -> dict[str, Any]:
    return {"actor_train": {"model_args": args}}


MISTAKES = {
    "an unknown loss": Mistake({"pref_loss": "sigmod"}, "unknown loss 'sigmod', did you mean 'sigmoid'?; the losses "),
    "a reference mode without effect": Mistake(
        {"pref_loss": "simpo", "reference": {"mode": "precompute"}}, "this loss needs no reference, so the reference "
    ),
    "a misspelled LoRA target": Mistake(
        policy(lora_rank=2, lora_target=["q_prj", "v_proj"]),
        "lora_target ['q_prj'] matches nothing in this model; its linear modules are down_proj, gate_proj, k_proj, "
        "lm_head, o_proj, q_proj, up_proj, v_proj",
    ),
    "a sequence_length beyond the context": Mistake(
        {"sequence_length": 65},
        "sequence_length is 65, but the context of MODELS/policy is 64; set sequence_length=64",
    ),
    "no chat template": Mistake(
        {"actor_train": {"data_args": {"template": "auto"}}},
        "the tokenizer has no chat template; use actor_train.data_args.template=raw for plain text, ",
    ),
    "no chat template for the validation pairs": Mistake(
        {"validation": {"data_args": {"file_name": "pairs.jsonl"}}},
        "the tokenizer has no chat template; use validation.data_args.template=raw for plain text, ",
    ),
    "an EOS token beyond the vocabulary": Mistake(
        {"pretrain": "MODELS/long-eos"},
        "the tokenizer of MODELS/long-eos has the EOS token '</s>' with id 64, but the vocabulary of the model "
        "MODELS/long-eos has 64 tokens; use the tokenizer that belongs to the model",
    ),
    "a reference with a different tokenizer": Mistake(
        reference(model_name_or_path="MODELS/other-words"),
        "the reference MODELS/other-words has a different tokenizer than the policy MODELS/policy: id 10 is 'w20' for "
        "it and 'w10' for the policy; use a reference with the policy's tokenizer",
    ),
    "a reference in a lower precision than the policy": Mistake(
        reference(dtype="bf16"),
        "reference.model_args.dtype is bf16 and actor_train.model_args.dtype is fp32, but both start from the same "
        "weights, so margins would not start at 0; remove reference.model_args.dtype",
    ),
    "a bf16 reference of an fp16 policy": Mistake(
        merge(reference(dtype="bf16"), {"actor_train": {"model_args": {"dtype": "fp16"}}}),
        "reference.model_args.dtype is bf16 and actor_train.model_args.dtype is fp16, but both start from the same "
        "weights, so margins would not start at 0; remove reference.model_args.dtype",
    ),
    "a device without CUDA": Mistake(
        {"actor_train": {"device_mapping": [0]}},
        "actor_train.device_mapping requests device 0, but this machine has no CUDA device; use available devices, or "
        "remove device_mapping and set num_workers to run on CPUs",
    ),
    "axes that do not divide the workers": Mistake(
        {
            "reference": {
                "num_workers": 3,
                "strategy_args": {"strategy_name": "fsdp2_infer", "strategy_config": {"tp_size": 2}},
            }
        },
        "reference has 3 workers, which is not a multiple of tp_size 2; use 2 or 4 workers ",
    ),
    "axes that do not divide the heads": Mistake(
        {"actor_train": {"num_workers": 4, "strategy_args": {"strategy_config": {"tp_size": 4}}}},
        "actor_train: tp_size is 4, but the model has 2 attention heads and 2 key/value heads; valid sizes are 1, 2",
    ),
    "a reference that the policy's axes do not fit under torchrun": Mistake(
        {
            "runtime": "torchrun",
            "actor_train": {"num_workers": 2, "strategy_args": {"strategy_config": {"tp_size": 2}}},
            **reference(model_name_or_path="MODELS/one-head"),
        },
        "reference: tp_size is 2, but the model has 1 attention heads and 1 key/value heads; valid sizes are 1",
    ),
    "a concurrent reference that is sharded": Mistake(
        {"reference": {"mode": "concurrent", "num_workers": 2, "strategy_args": {"strategy_name": "fsdp2_infer"}}},
        "a concurrent reference cannot be sharded; set reference.strategy_args.strategy_name to hf_infer, or ",
    ),
    "a Hub name in offline mode": Mistake(
        {"pretrain": "some-org/no-such-model"},
        "some-org/no-such-model is neither a model directory nor in the Hugging Face cache, and HF_HUB_OFFLINE is set",
    ),
    "a layout that the attention does not support": Mistake(
        {"layout": "shared", **policy(attn_implementation="eager")}, "layout shared is not possible: "
    ),
}


def with_models(value: Any, models: Path) -> Any:
    return json.loads(json.dumps(value).replace("MODELS", str(models)))


@pytest.fixture
def offline(monkeypatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_message(command_line, config, models, offline, mistake):
    message = error_of(command_line("check", config(with_models(mistake.changes, models))))
    assert message.startswith(with_models(mistake.message, models))
    assert "\n" not in message


def test_problems_of_models_loss_and_devices_are_in_one_list(command_line, config, tmp_path):
    changes = {
        "pref_loss": "sigmod",
        "sequence_length": 100,
        "actor_train": {"device_mapping": [0], "model_args": {"lora_rank": 2, "lora_target": ["x"]}},
    }
    for command in ("check", "train"):
        lines = error_of(command_line(command, config(changes))).splitlines()
        assert lines[0] == "4 problems:"
        starts = ["unknown loss 'sigmod'", "lora_target ['x']", "sequence_length is 100", "actor_train.device_mapping"]
        assert [line.startswith(f"  - {start}") for line, start in zip(lines[1:], starts, strict=True)] == [True] * 4
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["without-tokenizer", "reference"])
def test_a_reference_with_the_policys_tokenizer_or_none_is_accepted(command_line, config, models, name):
    assert command_line("check", config(reference(model_name_or_path=str(models / name)))).code == 0


def test_checkpoints_that_are_never_evaluated_are_announced(command_line, config):
    steps = {"save_steps": 70, "eval_steps": 50, "max_steps": 400}
    path = config({**steps, "validation": {"data_args": {"file_name": "pairs.jsonl", "template": "raw"}}})
    warning = (
        "warning: save_steps 70 is not a multiple of eval_steps 50: only the checkpoints of every 350 steps and of the "
        "last step are evaluated, so only they can be the best one"
    )
    result = command_line("check", path)
    assert (result.code, result.err.splitlines()[0]) == (0, warning)
    mixed = command_line("check", path, "save_strategy=epoch", "~save_steps").err.splitlines()[0]
    assert mixed.startswith("warning: save_strategy is epoch and eval_strategy is steps: only checkpoints of steps")
    for fine in ("save_steps=100", "save_steps=0", "max_steps=70"):
        assert "warning" not in command_line("check", path, fine).err


def test_a_default_sequence_length_beyond_the_context_is_a_warning(command_line, config, models):
    result = command_line("check", config(), "~sequence_length")
    assert result.code == 0
    assert result.err.splitlines()[0] == (
        f"warning: sequence_length is 1024 by default, but the context of {models / 'policy'} is 64: a longer pair "
        "stops the run after preparation; set sequence_length=64"
    )


def test_rows_of_token_ids_need_no_chat_template(command_line, config, tmp_path):
    sides = [(f"{side}_input_ids", [5, 6, 7]) for side in ("chosen", "rejected")]
    masks = [(f"{side}_loss_mask", [0, 1, 1]) for side in ("chosen", "rejected")]
    (tmp_path / "ids.jsonl").write_text(json.dumps(dict(sides + masks)) + "\n")
    data = {"file_name": "ids.jsonl", "template": "auto"}
    assert command_line("check", config({"actor_train": {"data_args": data}})).code == 0


def test_a_file_system_that_cannot_store_files_is_named(command_line, config, monkeypatch):
    """Such as /proc, which has no space at all."""
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(0, 0, 0))
    assert error_of(command_line("check", config())) == (
        "out is on a file system that cannot store files; set output_dir to a different one"
    )


@pytest.mark.parametrize(("free", "code"), [(50_000, 2), (100_000, 0), (10**9, 0)])
def test_the_disk_must_have_space_for_a_checkpoint(command_line, config, monkeypatch, free, code):
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 0, free))
    result = command_line("check", config(), "max_steps=1000")
    assert result.code == code
    if free == 50_000:
        assert error_of(result) == (
            "out is on a disk with 50.0 kB free, but a checkpoint takes about 77.8 kB; free space, or set output_dir "
            "to a different disk"
        )
    assert ("warning: out is on a disk with 100.0 kB free, but the checkpoints to keep" in result.err) == (
        free == 10**5
    )


@pytest.mark.parametrize(("strategy", "warns"), [("no", False), ("epoch", True), ("steps", False)])
def test_the_strategy_decides_how_many_checkpoints_the_disk_must_hold(
    command_line, config, monkeypatch, strategy, warns
):
    """A run of 50 steps saves at most one checkpoint in steps of 100, but may have many epochs."""
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 0, 10**5))
    result = command_line("check", config(), "max_steps=50", f"save_strategy={strategy}")
    assert ("but the checkpoints to keep take about" in result.err) is warns


def test_a_tracker_whose_package_is_missing(command_line, config, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    message = error_of(command_line("check", config(), "track_with=[wandb]"))
    assert message == (
        "tracker wandb needs wandb, which is not installed; run `pip install 'thresher[wandb]'`, or leave wandb out of "
        "track_with"
    )


@pytest.mark.parametrize(
    ("arguments", "user", "otherwise"),
    [
        (("check", "run.yaml", "actor_train.num_workers=2"), "a run with several workers", True),
        (("check", "run.yaml", "ray_address=head:6379"), "ray_address: head:6379", False),
        (("train", "run.yaml", "runtime=ray"), "runtime: ray", False),
        (("precompute-reference", "run.yaml", "runtime=ray"), "runtime: ray", False),
        (("sweep", "run.yaml", "beta=0.1,0.2"), "a sweep", False),
        (("submit", "run.yaml", "--address", "http://head:8265"), "thresher submit", False),
        (("prepare", "--config", "run.yaml", "--output", "store", "runtime=ray"), "preparation on Ray", False),
        (("prepare", "pairs.jsonl", "--model", "m", "--output", "s", "--runtime", "ray"), "preparation on Ray", False),
    ],
)
def test_what_needs_ray_names_the_extra(command_line, config, monkeypatch, arguments, user, otherwise):
    monkeypatch.setitem(sys.modules, "ray", None)
    config()
    message = f"{user} needs ray, which is not installed; run `pip install 'thresher[ray]'`"
    assert error_of(command_line(*arguments)) == message + (", or start it with torchrun" if otherwise else "")


def test_a_trainer_with_several_workers_names_the_extra_of_ray(models, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    pairs = [{"prompt": "w1", "chosen": "w2", "rejected": "w3"}]
    config = DPOConfig(output_dir=str(tmp_path / "out"), template="raw", max_steps=1)
    with pytest.raises(UserError, match=r"a run with several workers needs ray, .* `pip install 'thresher\[ray\]'`"):
        DPOTrainer(models / "policy", config, train_dataset=pairs, devices=2).train()


def test_a_run_directory_with_other_settings(command_line, config, tmp_path):
    """The first run also shows that a config without problems trains, and with which checks."""
    assert command_line("train", config()).code == 0
    assert command_line("check", config()).code == 0
    message = error_of(command_line("check", config(), "seed=7"))
    assert message.startswith("out/checkpoints contains checkpoints of a run with other settings (")
    # another problem hides it: a typo is a changed setting too
    assert error_of(command_line("check", config(), "pref_loss=sigmod")).startswith("unknown loss 'sigmod'")
    assert command_line("check", config(), "track_with=[tensorboard]").code == 0
    assert command_line("precompute-reference", config(), "seed=7").code == 0  # it writes no checkpoint


def test_a_job_is_checked_before_anything_is_sent(command_line, config, tmp_path):
    """Its files may be on the cluster only."""
    path = config({"pretrain": "/on/the/cluster", "output_dir": "/shared/out", "actor_train": {"num_workers": 2}})
    arguments = ("submit", path, "--address=http://127.0.0.1:1")
    tp_size = {"actor_train.strategy_args.strategy_config.tp_size=4"}
    lines = error_of(command_line(*arguments, "pref_loss=sigmod", *tp_size)).splitlines()
    assert lines[0] == "2 problems:"
    assert lines[1].startswith("  - unknown loss 'sigmod'")
    assert lines[2].startswith("  - actor_train has 2 workers, which is not a multiple of tp_size 4")
    result = command_line(*arguments)
    assert result.err.startswith(
        "checked the settings; the job checks files, models, devices and disk space on the cluster\n"
    )


@pytest.mark.parametrize(("section", "other"), [("actor_train", "fsdp2_train"), ("reference", "hf_infer")])
def test_an_engine_that_needs_a_gpu_is_rejected_without_one(command_line, config, monkeypatch, section, other):
    name = f"megatron_{'train' if section == 'actor_train' else 'infer'}"
    path = config({section: {"strategy_args": {"strategy_name": name}}})
    lacks_gpu = (
        f"{section}.strategy_args.strategy_name is {name}, which needs a GPU per worker, but this machine has no CUDA "
        f"device; use one with GPUs, or set it to {other}, which also runs on CPUs"
    )
    assert lacks_gpu in error_of(command_line("check", path))
    if section == "reference":  # which this loss does not load
        assert "needs a GPU" not in command_line("check", path, "pref_loss=orpo").err
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert "needs a GPU" not in command_line("check", path).err


def test_a_setting_that_describes_the_machine_is_a_warning_where_it_has_no_effect(command_line, config):
    result = command_line("check", config(), "num_gpus_per_node=8")
    assert result.code == 0
    assert "warning: num_gpus_per_node has no effect without a device_mapping" in result.err


def test_a_learning_rate_of_no_pretrained_model_is_a_warning(command_line, config):
    rate = "actor_train.training_args.learning_rate"
    result = command_line("check", config(), f"{rate}=1.0")
    assert result.code == 0
    assert f"warning: {rate} is 1, which destroys most pretrained models within steps; usual are 5e-7" in result.err
    assert "learning_rate" not in command_line("check", config(), f"{rate}=1e-4").err


SIZES = {
    "text": ("num_hidden_layers", "x", "Validation error for field 'num_hidden_layers': TypeError"),
    "NaN": ("num_hidden_layers", float("nan"), "has num_hidden_layers nan, which no model has (1 to 1,000 are"),
    "a billion layers": ("num_hidden_layers", 10**9, "has num_hidden_layers 1000000000, which no model has"),
    "no layers": ("num_hidden_layers", -1, "has num_hidden_layers -1, which no model has"),
    "a huge width": ("hidden_size", 2**31, "has hidden_size 2147483648, which no model has"),
    "a huge vocabulary": ("vocab_size", 1e12, "has vocab_size 1000000000000.0, which no model has"),
    "nested lists": ("x", "DEEP", "is nested too deeply"),
}


@pytest.mark.parametrize(("key", "value", "message"), SIZES.values(), ids=SIZES)
def test_a_malformed_model_config_is_one_message(command_line, config, models, tmp_path, key, value, message):
    shutil.copytree(models / "policy", tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    text = json.dumps(json.loads(file.read_text()) | {key: value})
    file.write_text(text.replace('"DEEP"', "[" * 50_000 + "]" * 50_000))
    assert message in error_of(command_line("check", config({"pretrain": str(tmp_path / "model")})))


def test_a_directory_in_place_of_the_stop_file_is_one_message(command_line, config, tmp_path):
    (tmp_path / "out" / "stop").mkdir(parents=True)
    message = error_of(command_line("train", config()))
    assert message.startswith("could not remove the stop file of an earlier run (")


def test_a_gpu_without_a_c_compiler_is_a_warning(command_line, config, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert "compiler" not in command_line("check", config()).err  # the machines of the tests have gcc
    monkeypatch.setattr(checks.shutil, "which", lambda _name: None)
    result = command_line("check", config())
    assert result.code == 0
    assert "this machine has no C compiler, which Triton needs to compile GPU kernels; install gcc" in result.err
