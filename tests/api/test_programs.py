"""The program of the README, TRL's quick-start program and the notebook of examples/, on local models and data."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from tests.support.cli_runner import exit_code_of
from tests.support.paths import ROOT
from tests.support.processes import descendants
from tests.support.small_runs import last_weights, write_rows
from thresher import DPOConfig, DPOTrainer

GUIDE = ROOT / "docs" / "train" / "python.md"
ROWS = ROOT / "examples" / "quickstart" / "train.jsonl"
# the same with a config, and objects instead of names
TRL_WITH_OBJECTS = """
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B")
tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen3-0.6B")
train_dataset = load_dataset("trl-lib/ultrafeedback_binarized", split="train")

training_args = DPOConfig(output_dir="output")
trainer = DPOTrainer(model=model, args=training_args, processing_class=tokenizer, train_dataset=train_dataset)
trainer.train()
"""


def program_of(page: Path) -> str:
    return next(text for text in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL) if "peft" in text)


def run_program(model: Path, directory: Path, *changes: tuple[str, str]) -> dict[str, Any]:
    """Run the program of the README on a different model, on a few rows, and in a different directory."""
    replaced = {
        '"HuggingFaceTB/SmolLM2-135M-Instruct"': repr(str(model)),
        '"thresher-demo/train.jsonl"': "rows[24:]",
        '"thresher-demo/validation.jsonl"': "rows[:24]",
        '"output/python"': repr(str(directory / "python")),
        '"smollm2-python"': repr(str(directory / "python-model")),
        "learning_rate=5e-6, num_train_epochs=2, save_steps=20": (
            'learning_rate=1e-2, max_length=256, bf16=False, template="raw", per_device_train_batch_size=2'
        ),
        **dict(changes),
    }
    text = program_of(GUIDE)
    for old, new in replaced.items():
        assert old in text, old
        text = text.replace(old, new)
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()[:32]]
    names: dict[str, Any] = {"rows": rows}
    exec(compile(text, str(GUIDE), "exec"), names)  # noqa: S102
    return names


def run_command_line(model: Path, directory: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Path:
    """Run `thresher train` with the settings of the program, written as a file."""
    lines = ROWS.read_text().splitlines(keepends=True)[:32]
    sources = {}
    for name, part in (("train", lines[24:]), ("validation", lines[:24])):
        directory.mkdir(exist_ok=True)
        (directory / f"{name}.jsonl").write_text("".join(part))
        sources[name] = {"file_name": str(directory / f"{name}.jsonl"), "template": "raw"}
    values = {
        "pretrain": str(model),
        "output_dir": str(directory / "run"),
        "num_train_epochs": 1,
        "sequence_length": 256,
        "track_with": [],
        "actor_train": {
            "model_args": {"dtype": "fp32", "lora_rank": 16, "lora_alpha": 32, "lora_target": ["all-linear"]},
            "data_args": sources["train"],
            "training_args": {"learning_rate": 1e-2, "per_device_train_batch_size": 2},
            **changes,
        },
        "validation": {"data_args": sources["validation"]},
    }
    (directory / "config.yaml").write_text(yaml.safe_dump(values))
    assert exit_code_of(monkeypatch, ("train", directory / "config.yaml")) == 0
    return directory / "run"


def assert_equal(one: Path, other: Path) -> None:
    weights, others = last_weights(one), last_weights(other)
    assert weights.keys() == others.keys()
    assert all(torch.equal(weight, others[name]) for name, weight in weights.items())


def test_the_program_of_the_readme_gives_the_weights_of_the_command_line(tiny_dir, tmp_path, monkeypatch):
    run_program(tiny_dir, tmp_path / "program")
    by_file = run_command_line(tiny_dir, tmp_path / "file", monkeypatch)
    assert_equal(tmp_path / "program" / "python", by_file)
    # the saved model is the trained one, not the initial one
    initial = AutoModelForCausalLM.from_pretrained(tiny_dir)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "program" / "python-model")
    assert saved.num_parameters() == initial.num_parameters()
    assert not torch.equal(saved.model.layers[0].mlp.up_proj.weight, initial.model.layers[0].mlp.up_proj.weight)


def test_the_guide_shows_the_program_of_the_readme():
    assert program_of(GUIDE) == program_of(ROOT / "README.md")


def quick_start_of_trl() -> str:
    """The first program in the description of the installed TRL."""
    metadata = importlib.metadata.metadata("trl")
    description = str(metadata.get_payload() or metadata["Description"])
    blocks = re.findall(r"```python\n(.*?)```", description, re.DOTALL)
    return next(text for text in blocks if "import DPOTrainer" in text)


@pytest.mark.parametrize("program", ["installed", TRL_WITH_OBJECTS], ids=["names", "objects"])
def test_a_quick_start_program_of_trl_runs_with_only_its_import_changed(program, base, tmp_path, monkeypatch):
    pytest.importorskip("trl")
    program = quick_start_of_trl() if program == "installed" else program
    import datasets

    model = tmp_path / "Qwen" / "Qwen3-0.6B"
    shutil.copytree(base["pretrain"], model)
    template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    (model / "chat_template.jinja").write_text(template)
    rows = [json.loads(line) for line in write_rows(tmp_path / "rows.jsonl", 8, 0).read_text().splitlines()]
    for row in rows:  # ultrafeedback_binarized has conversations with an implicit prompt
        prompt = [{"role": "user", "content": row.pop("prompt").strip()}]
        row |= {side: [*prompt, {"role": "assistant", "content": row[side]}] for side in ("chosen", "rejected")}
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: datasets.Dataset.from_list(rows))
    monkeypatch.chdir(tmp_path)
    exec(compile(program.replace("from trl import", "from thresher import"), "quick start", "exec"), {})  # noqa: S102
    assert last_weights(tmp_path / "output")


class Interrupt:
    """Interrupts the process after its first step, as Ctrl-C and the stop button of a notebook do."""

    def on_log(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        if state.global_step == 1:
            os.kill(os.getpid(), signal.SIGINT)


def interrupted_trainer(base: dict[str, Any], output: Path, **arguments: Any) -> DPOTrainer:
    values = {name: value for name, value in base.items() if name not in ("validation", "eval_steps")}
    return DPOTrainer(config=DPOConfig(**values, output_dir=output), callbacks=[Interrupt()], **arguments)


@pytest.mark.parametrize("devices", [None, pytest.param(2, marks=[pytest.mark.distributed, pytest.mark.slow])])
def test_after_an_interrupt_no_process_is_left_and_train_continues(devices, base, tmp_path):
    before = set(descendants(os.getpid()))
    trainer = interrupted_trainer(base, tmp_path / "interrupted", devices=devices)
    with pytest.raises(KeyboardInterrupt, match="stopped on request after step"):
        trainer.train()
    assert set(descendants(os.getpid())) <= before
    if devices is None:
        assert trainer.train().checkpoint.name == "step-00000004"
        whole = interrupted_trainer(base, tmp_path / "whole")
        whole.callbacks.clear()
        whole.train()
        assert_equal(tmp_path / "interrupted", tmp_path / "whole")


@pytest.mark.hand  # CI has an interrupted program
@pytest.mark.slow
def test_the_notebook_runs_and_a_cell_can_be_interrupted(tmp_path):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    shutil.copytree(ROOT / "examples" / "quickstart", tmp_path / "quickstart")
    notebook = nbformat.read(ROOT / "examples" / "notebook.ipynb", as_version=4)
    assert all(cell.cell_type != "code" or not cell.outputs for cell in notebook.cells)
    notebook.cells.append(
        nbformat.v4.new_code_cell(
            "import os, signal\n"
            "class Interrupt:\n"
            "    def on_log(self, args, state, control, **_):\n"
            "        if state.global_step == 1:\n"
            "            os.kill(os.getpid(), signal.SIGINT)\n"
            "config = DPOConfig(output_dir='output/second', bf16=False)\n"
            "arguments = dict(train_dataset=train, processing_class=tokenizer, callbacks=[Interrupt()])\n"
            "try:\n"
            "    DPOTrainer(model, config, **arguments).train()\n"
            "except KeyboardInterrupt as error:\n"
            "    print(error, Path(f'/proc/{os.getpid()}/task/{os.getpid()}/children').read_text().split())"
        )
    )
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [json.dumps(cell.get("outputs", [])) for cell in notebook.cells]
    assert "step 5/25" in "".join(shown)  # progress
    assert "stopped on request after step 2" in shown[-1]
    assert "to resume []" in shown[-1]  # no child processes
    assert (tmp_path / "output" / "notebook" / "model" / "config.json").is_file()
