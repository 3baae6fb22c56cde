"""User errors: one message with a suggested fix, exit code 2, no traceback. The texts are asserted here."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import yaml

from tests.support.forks import python
from tests.support.paths import ROOT

ROW = {"prompt": "Say hello.\n", "chosen": "Hello, dear friend!", "rejected": "Go away."}
OFFLINE = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@pytest.fixture
def thresher(command_line):
    """Run the command line in this process; return its exit code and its one message."""

    def run(*arguments: str) -> tuple[int, str]:
        result = command_line(*arguments)
        return result.code, error_message(result.err)

    return run


def error_message(stderr: str) -> str:
    """Return the text after `error: `, which must occur at most once, without a traceback."""
    assert "Traceback" not in stderr
    assert stderr.count("error: ") <= 1
    return stderr.rpartition("error: ")[2].strip()


def run_in_subprocess(directory: Path, *arguments: str) -> tuple[int, str]:
    """As users start it; the other tests run in this process."""
    done = subprocess.run(
        [*python(), "-m", "thresher", *arguments],
        cwd=directory,
        env=os.environ | OFFLINE,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, error_message(done.stderr)


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def config(tmp_path, tiny_dir):
    """Write a valid config, changed by keys joined with `__`; return its path."""
    write_rows(tmp_path / "pairs.jsonl", [{**ROW, "prompt": f"Say hello {i}.\n"} for i in range(8)])

    def write(**changes: object) -> str:
        values = {
            "pretrain": str(tiny_dir),
            "output_dir": "out",
            "max_steps": 1,
            "track_with": [],
            "actor_train": {
                "model_args": {"dtype": "fp32"},
                "data_args": {"file_name": "pairs.jsonl", "template": "raw"},
                "training_args": {"per_device_train_batch_size": 4},
            },
        }
        for key, value in changes.items():
            *sections, last = key.split("__")
            target = values
            for section in sections:
                target = target.setdefault(section, {})
            target[last] = value
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
        return "run.yaml"

    return write


def test_the_unmodified_config_runs(thresher, config, tmp_path):
    assert thresher("train", config())[0] == 0
    assert (tmp_path / "out" / "checkpoints" / "step-00000001").is_dir()


def test_a_data_set_smaller_than_one_batch(thresher, config, tmp_path):
    path = config(actor_train__training_args__per_device_train_batch_size=16)
    assert thresher("train", path) == (
        2,
        "the training set has 8 pairs, fewer than one global batch of 16; lower "
        "actor_train.training_args.global_batch_size, or per_device_train_batch_size and gradient_accumulation_steps, "
        "or add data",
    )
    assert not (tmp_path / "out" / "checkpoints").exists()


def test_an_empty_file(thresher, config, tmp_path):
    (tmp_path / "empty.jsonl").touch()
    assert thresher("train", config(actor_train__data_args__file_name="empty.jsonl")) == (
        2,
        "'empty.jsonl' is empty; write it again, or do not name it",
    )


def test_a_file_that_does_not_exist(thresher, config):
    code, message = thresher("train", config(actor_train__data_args__file_name="./pears.jsonl"))
    assert (code, message) == (2, "'./pears.jsonl' does not exist; did you mean ./pairs.jsonl?")


def test_no_file_at_all(thresher, config):
    assert thresher("train", config(actor_train__data_args__file_name=[])) == (
        2,
        "actor_train.data_args.file_name names no file; give a path, a glob, a URL or a list of them",
    )


def test_a_missing_column(thresher, config, tmp_path):
    write_rows(tmp_path / "odd.jsonl", [{"prompt": "a", "chosen": "b", "rejectd": "c"}] * 8)
    code, message = thresher("train", config(actor_train__data_args__file_name="odd.jsonl"))
    assert code == 2
    assert message.startswith(
        "odd.jsonl, line 1: unrecognized row format with columns prompt, chosen, rejectd: no rejected column. "
        "Name your columns with rejected_key=rejectd, or use one of these formats:\n"
    )


def test_a_column_that_a_key_names_and_the_data_lacks(thresher, config):
    assert thresher("train", config(chosen_key="chosn")) == (
        2,
        "pairs.jsonl, line 1: chosen_key='chosn' names no column; the columns are prompt, chosen, rejected; "
        "did you mean 'chosen'?",
    )


def test_a_mistyped_key_in_a_subprocess(config, tmp_path):
    path = config(actor_train__training_args__lerning_rate=1e-6)
    assert run_in_subprocess(tmp_path, "train", path, "bta=0.2") == (
        2,
        "invalid configuration:\n"
        "  - actor_train.training_args.lerning_rate: unknown key; did you mean `learning_rate`?\n"
        "  - bta: unknown key; did you mean `beta`?",
    )


def test_an_unknown_loss(thresher, config):
    code, message = thresher("train", config(pref_loss="sigmod"))
    assert code == 2
    assert message.startswith(
        "unknown loss 'sigmod', did you mean 'sigmoid'?; the losses are alphapo, aot, aot_unpaired, apo_"
    )


def test_a_pad_token_that_the_vocabulary_lacks(thresher, config, tiny_dir):
    assert thresher("train", config(actor_train__model_args__pad_token="<pad>")) == (
        2,
        f"pad_token '<pad>' is not in the vocabulary of {tiny_dir}; name an existing token",
    )


def test_a_model_directory_without_a_chat_template(thresher, config, tiny_dir, tmp_path):
    shutil.copytree(tiny_dir, tmp_path / "model", ignore=shutil.ignore_patterns("chat_template.jinja"))
    assert thresher("train", config(pretrain="./model", actor_train__data_args__template="auto")) == (
        2,
        "the tokenizer has no chat template; use actor_train.data_args.template=raw for plain text, "
        "actor_train.data_args.template=FAMILY for a model of the family chatml, gemma, llama3, mistral, phi4, "
        "qwen2_5, qwen3, or actor_train.data_args.template=FILE.jinja for a custom template",
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"pretrain": "./nowhere"},
            "model directory ./nowhere does not exist; give the path of a model directory or of a `.gguf` file",
        ),
        (
            {"pretrain": "./nowhere.gguf"},
            "model file ./nowhere.gguf does not exist; give the path of a `.gguf` file or of a model directory",
        ),
        ({"pretrain": None}, "no model is named; set pretrain to a model directory or a .gguf file"),
        (
            {"pretrain": "."},
            "model directory . has no config.json; give a Hugging Face model directory, or the path of a `.gguf` file",
        ),
        (
            {"gamma": 0.5, "pref_loss": "orpo"},
            "gamma has no effect on orpo; turn it off, or use a loss that supports it: discopop, dpop, exo_pair, "
            "hinge, ipo, ipo_sum, robust, sigmoid, sigmoid_norm",
        ),
        (
            {"pref_loss": "simpo", "reference__mode": "precompute"},
            "this loss needs no reference, so the reference settings would do nothing; remove reference.mode and "
            "reference.sync_steps, or choose a loss that needs one",
        ),
        (
            {"reference__mode": "none", "pref_loss": "bco_pair"},
            "reference.mode=none (reference-free) has no effect on bco_pair; turn it off, or use a loss that supports "
            "it: discopop, exo_pair, hinge, ipo, ipo_sum, robust, sigmoid, sigmoid_norm",
        ),
        (
            {"pref_loss": "orpo", "length_normalization": False},
            "length_normalization: false conflicts with orpo: alphapo, ipo, orpo, sft, sigmoid_norm, simpo average "
            "logps over length, all other losses sum them; choose a different loss or remove length_normalization",
        ),
        (
            {"actor_train__strategy_args__strategy_name": "megatron_infer"},
            "actor_train.strategy_args.strategy_name is megatron_infer; use deepspeed_train or fsdp2_train or "
            "megatron_train",
        ),
        (
            {"reference__strategy_args__strategy_name": "fsdp2_train"},
            "reference.strategy_args.strategy_name is fsdp2_train; use deepspeed_infer or fsdp2_infer or hf_infer or "
            "megatron_infer",
        ),
        (
            {"actor_train__strategy_args__strategy_config": {"tp_size": 4}},
            "actor_train has 1 worker, which is not a multiple of tp_size 4; use 4 workers (device_mapping, or "
            "num_workers on CPUs), or smaller parallel sizes",
        ),
        (
            {"actor_train__strategy_args__strategy_config": {"tensor_parallel_size": 4}},
            "invalid configuration:\n  - actor_train.strategy_args: strategy_config has no key "
            "tensor_parallel_size; known: tp_size, pp_size, virtual_pp_size, pp_schedule, pp_dtype, "
            "sequence_parallel, cp_size, ep_size, dp_replicate, zero_stage, reduce_dtype, cpu_offload",
        ),
        (
            {"actor_train__device_mapping": "list(range(0,8))", "runtime": "local"},
            "invalid configuration:\n  - runtime: local is one process, but "
            "actor_train.device_mapping needs 8; use runtime: ray",
        ),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_an_invalid_setting(thresher, config, tmp_path, changes, message):
    assert thresher("train", config(**changes)) == (2, message)
    if "strategy" in message or "device" in message:
        assert not (tmp_path / "out").exists()  # rejected before the data was prepared


def test_an_output_directory_that_an_earlier_run_occupies(thresher, config):
    assert thresher("train", config())[0] == 0
    code, message = thresher("train", config(seed=7))
    assert code == 2
    assert message == (
        "out/checkpoints contains checkpoints of a run with other settings (changed since the checkpoint: seed was 42, "
        "is 7); set a different output_dir, or resume_from_checkpoint=auto to resume with the change"
    )
    assert thresher("train", config(resume_from_checkpoint=False)) == (
        2,
        "out/checkpoints contains checkpoints of an earlier run, up to step-00000001; continue it with "
        "resume_from_checkpoint=auto, or start again: delete out/checkpoints, or set a different output_dir, such as "
        "output_dir=out-2",
    )


def test_rerunning_a_finished_run_changes_nothing(thresher, config, tmp_path):
    assert thresher("train", config())[0] == 0
    log = (tmp_path / "out" / "logs" / "metrics.jsonl").read_bytes()
    assert thresher("train", config())[0] == 0
    assert (tmp_path / "out" / "logs" / "metrics.jsonl").read_bytes() == log


def test_a_checkpoint_of_other_lora_settings(thresher, config):
    assert thresher("train", config(actor_train__model_args__lora_rank=2))[0] == 0
    path = config(actor_train__model_args__lora_rank=4, max_steps=2, resume_from_checkpoint="auto")
    code, message = thresher("train", path)
    assert code == 2
    assert message.startswith("the checkpoint in out/checkpoints/step-00000001 was made for a different model: ")
    assert message.endswith("resume with the same pretrain, master_dtype and lora settings")


def test_exporting_a_directory_without_checkpoints(thresher, tmp_path):
    (tmp_path / "empty").mkdir()
    for source in ("empty", "nowhere"):
        assert thresher("export", source, "--output", "model") == (
            2,
            f"no valid checkpoint in {source}; give the output_dir of a run or a checkpoint",
        )


def test_exporting_in_an_unknown_precision(thresher):
    assert thresher("export", ".", "--output", "model", "--dtype", "fp8") == (
        2,
        "--dtype fp8 is unknown; use fp32, bf16 or fp16",
    )


def test_exporting_a_run_and_its_best_checkpoint(thresher, config, tmp_path):
    assert thresher("train", config())[0] == 0
    assert thresher("export", "out", "--output", "best", "--best") == (
        2,
        "no checkpoint in out was evaluated, so there is no best one; leave --best out",
    )
    assert thresher("export", "out", "--output", "model")[0] == 0
    assert (tmp_path / "model" / "model.safetensors").is_file()


def test_exporting_into_a_directory_with_a_model(thresher, config, tmp_path):
    assert thresher("train", config())[0] == 0
    assert thresher("export", "out", "--output", "model")[0] == 0
    weights = tmp_path / "model" / "model.safetensors"
    written = weights.read_bytes()
    weights.write_bytes(b"of an earlier run")
    assert thresher("export", "out", "--output", "model") == (
        2,
        "model is not an empty directory; name a new one, or replace the model in it with --overwrite",
    )
    assert weights.read_bytes() == b"of an earlier run"
    assert thresher("export", "out", "--output", "model", "--overwrite")[0] == 0
    assert weights.read_bytes() == written


def test_a_config_file_that_does_not_exist(thresher):
    assert thresher("train", "nowhere.yaml") == (
        2,
        "config file nowhere.yaml does not exist; give the path of a YAML file",
    )
    assert thresher("config", "show", "nowhere.yaml")[0] == 2


def test_the_example_that_starts_a_pipeline_takes_a_directory_and_a_name(tmp_path):
    script = ROOT / "examples" / "start_dpo_pipeline.py"

    def start(*arguments: str) -> tuple[int, str]:
        command = [*python(), str(script), *arguments]
        done = subprocess.run(
            command, cwd=tmp_path, env=os.environ | OFFLINE, capture_output=True, text=True, check=False
        )
        return done.returncode, error_message(done.stderr)

    assert start("--config_path", "nowhere", "--config_name", "dpo") == (
        2,
        "config file nowhere/dpo.yaml does not exist; give the path of a YAML file",
    )
    code, message = start("--config_path", "polite_smollm2", "--config_name", "dpo_config", "bta=1")
    assert (code, message.splitlines()[-1]) == (2, "  - bta: unknown key; did you mean `beta`?")


@pytest.mark.parametrize(
    ("arguments", "setting"),
    [
        (["--beta", "0.2"], "--beta; settings are written KEY=VALUE, here beta=0.2"),
        (["--beta=0.2"], "--beta; settings are written KEY=VALUE, here beta=0.2"),
        (
            ["--learning-rate", "1e-6"],
            "--learning-rate; settings are written KEY=VALUE, here actor_train.training_args.learning_rate=1e-6",
        ),
        (["--seed"], "--seed; settings are written KEY=VALUE, here seed=VALUE"),
    ],
)
@pytest.mark.parametrize("command", [("train",), ("config", "show")], ids=" ".join)
def test_a_setting_written_as_an_option_is_answered_with_its_spelling(thresher, command, arguments, setting):
    assert thresher(*command, "dpo.yaml", *arguments) == (2, f"no such option: {setting}")


def test_a_message_is_not_read_as_markup(thresher):
    """Square brackets in a message are printed verbatim."""
    assert thresher("train", "[bold]nowhere[/].yaml")[1].startswith("config file [bold]nowhere[/].yaml does not exist")


def test_help_imports_few_modules_and_no_torch():
    """Imports are what a user waits for: 345 modules take half a second."""
    script = (
        "import sys; sys.argv = ['thresher', '--help']\n"
        "from thresher.cli import main\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n    assert not end.code\n"
        "heavy = {'torch', 'transformers', 'hydra', 'pyarrow', 'datasets', 'peft', 'ray'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert len(sys.modules) < 400, len(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    for command in (
        "check",
        "prepare",
        "inspect",
        "precompute-reference",
        "train",
        "sweep",
        "submit",
        "report",
        "export",
        "losses",
        "cache",
        "config",
    ):
        assert command in done.stdout


def test_the_console_script_is_this_command_line():
    (script,) = entry_points(group="console_scripts", name="thresher")
    assert script.value == "thresher.cli:main"


@pytest.mark.parametrize("place", ["pairs.jsonl", "pairs.jsonl/out"])
def test_an_output_dir_that_cannot_be_written_is_a_user_error(thresher, config, place, tiny_dir):
    file = config(output_dir=place)
    for command in (
        ("train", file),
        ("prepare", "pairs.jsonl", "--model", str(tiny_dir), "--template", "raw", "--output", "pairs.jsonl/out"),
    ):
        code, message = thresher(*command)
        assert code == 2
        assert re.fullmatch(r"cannot use .*pairs\.jsonl.*: .+; check the path and its permissions", message)


@pytest.mark.parametrize("command", [(), ("export",), ("cache", "prune"), ("submit",)], ids="-".join)
def test_help_shows_no_value_for_a_flag(command_line, command):
    result = command_line(*command, "--help")
    assert result.code == 0
    assert "--" in result.out
    assert "bool" not in result.out.lower()
