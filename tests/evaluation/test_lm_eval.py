"""`thresher eval`: lm-eval's environment, program and results.

`results.json` was written by lm-eval 0.4.13 for the model of small runs; the keys that thresher does not read, which
describe the machine, are left out. Programs in place of lm-eval's show how any program is run, ended and reported.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.small_runs import make_base
from thresher.builders.export import export_checkpoint
from thresher.checkpoint.manager import list_checkpoints
from thresher.config import parse_config
from thresher.errors import UserError
from thresher.evaluation import lm_eval
from thresher.evaluation.lm_eval import (
    Benchmarks,
    evaluate,
    install,
    install_commands,
    log_results,
    read_results,
    require_lm_eval,
    versions_in,
)
from thresher.evaluation.models import find_models
from thresher.observability.log_files import EVAL_EXTERNAL
from thresher.observability.trackers.jsonl import read_records
from thresher.pipeline import DPOPipeline
from thresher.report.page import render_page
from thresher.report.run_files import read_runs
from thresher.report.tables import benchmark_rows

RESULTS = Path(__file__).with_name("results.json")
# writes the results that lm-eval wrote, and keeps the config that it was given
REPLAY = """
import json, pathlib, shutil, sys
config = json.loads(pathlib.Path(sys.argv[3]).read_text())
assert sys.argv[1:3] == ["run", "--config"]
assert (pathlib.Path(config["model_args"]["pretrained"]) / "config.json").is_file()
output = pathlib.Path(config["output_path"]) / "model"
output.mkdir(parents=True)
shutil.copy({results!r}, output / "results_2026-11-19T20-00-00.json")
with open({calls!r}, "a") as calls:
    calls.write(json.dumps(config) + "\\n")
"""


def make_program(environment: Path, code: str) -> Path:
    """Make an environment with a Python program where lm-eval's would be."""
    (environment / "bin").mkdir(parents=True, exist_ok=True)
    (environment / "lib" / "lm_eval").mkdir(parents=True, exist_ok=True)
    (environment / "lib" / "lm_eval" / "__main__.py").write_text(code)
    python = environment / "bin" / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={shlex.quote(str(environment / "lib"))} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return environment


@pytest.fixture
def replay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Callable[[], list[dict[str, Any]]]]:
    """An environment whose program writes lm-eval's results, and the configs that it was called with; no cache yet."""
    monkeypatch.setenv("THRESHER_CACHE_DIR", str(tmp_path / "cache"))
    calls = tmp_path / "calls.jsonl"
    calls.touch()
    environment = make_program(tmp_path / "env", REPLAY.format(results=str(RESULTS), calls=str(calls)))
    return environment, lambda: [json.loads(line) for line in calls.read_text().splitlines()]


def test_results_of_lm_eval_are_read_with_their_errors() -> None:
    rows = {(row["task"], row["metric"], row["filter"]): row for row in read_results(json.loads(RESULTS.read_text()))}
    written = json.loads(RESULTS.read_text())["results"]
    assert rows.keys() == {
        *(("words", "acc", "none"), ("words", "acc_norm", "none")),
        *(("more_words", "acc", "none"), ("more_words", "acc_norm", "none"), ("all_words", "acc", "none")),
        *(
            (("spell", metric, name))
            for metric in ("exact_match", "bleu")
            for name in ("strict-match", "flexible-extract")
        ),
    }
    for (task, metric, name), row in rows.items():
        assert row["value"] == written[task][f"{metric},{name}"]
        assert row["stderr"] == written[task][f"{metric}_stderr,{name}"]
    row = rows["words", "acc", "none"]
    # the standard error of a mean of zeros and ones, with n - 1
    assert row["stderr"] == pytest.approx((row["value"] * (1 - row["value"]) / 15) ** 0.5)
    assert (row["num_samples"], row["num_fewshot"]) == (16, 0)
    assert rows["all_words", "acc", "none"]["num_samples"] == 32


def row_of(model: str, value: float, stderr: float | None = 0.03, **more: Any) -> dict[str, Any]:
    row = {"step": 4, "model": model, "task": "gsm8k", "metric": "exact_match", "filter": "strict-match"}
    return {**row, "value": value, "stderr": stderr, "num_samples": 1319, "num_fewshot": 5, "settings": {}, **more}


def test_before_and_after_are_side_by_side_with_the_error_of_the_difference() -> None:
    rows = [row_of("reference", 0.5, 0.03, step=0), row_of("policy", 0.6, 0.04, step=8), row_of("policy", 0.4)]
    (row,) = benchmark_rows(rows)
    assert row.heading == "gsm8k exact_match, strict-match, 5-shot"
    # sqrt(0.03^2 + 0.04^2) = 0.05; the policy's result at its highest step counts, not the last one
    assert row.cells == ["1,319", "8", "0.5000 ± 0.0300", "0.6000 ± 0.0400", "+0.1000 ± 0.0500"]


def test_results_of_different_settings_or_limits_are_not_compared() -> None:
    rows = [row_of("reference", 0.5), row_of("policy", 0.6, settings={"apply_chat_template": True})]
    assert [row.cells[4] for row in benchmark_rows(rows)] == ["–", "–"]  # noqa: RUF001
    rows = [row_of("reference", 0.5, limit=20), row_of("policy", 0.6, limit=None)]
    assert [(row.heading[-8:], row.cells[4]) for row in benchmark_rows(rows)] == [
        ("limit 20", "–"),  # noqa: RUF001
        (", 5-shot", "–"),  # noqa: RUF001
    ]


def test_a_value_without_an_error_and_a_model_without_a_run_are_shown() -> None:
    (row,) = benchmark_rows([row_of("model", 0.25, None)])
    assert row.cells == ["1,319", "–", "–", "0.2500", "–"]  # noqa: RUF001


def test_policy_and_reference_are_evaluated_once_logged_and_reported(
    command_line: Callable[..., Any], finished: Path, replay: Any, tmp_path: Path
) -> None:
    environment, calls = replay
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "words.yaml").write_text("task: words")
    command = (
        *("eval", run, "--tasks", "all_words,spell", "--limit", 16, "--include-path", "tasks"),
        *("--environment", environment, "batch_size=8", "model_args.max_length=64", "gen_kwargs.temperature=0"),
        "hf_hub_log_args.token=c4n4ry",
    )
    result = command_line(*command)
    assert result.code == 0, result.err
    one, other = calls()
    for config in (one, other):
        assert config["tasks"] == ["all_words", "spell"]
        assert (config["limit"], config["batch_size"], config["gen_kwargs"]) == (16, 8, {"temperature": 0})
        assert config["include_path"] == str(tmp_path / "tasks")
        assert {"dtype": "float32", "max_length": 64}.items() <= config["model_args"].items()
    assert [Path(each["model_args"]["pretrained"]).name for each in (one, other)] == ["reference", "policy"]
    rows = read_records(run / "logs" / EVAL_EXTERNAL)
    assert [row["value"] for row in rows if row["model"] == "policy"] == [
        row["value"] for row in read_results(json.loads(RESULTS.read_text()))
    ]
    assert "c4n4ry" not in (run / "logs" / EVAL_EXTERNAL).read_text() + result.out + result.err
    assert {(row["model"], row["step"]) for row in rows} == {("reference", 0), ("policy", 4)}
    assert "more_words acc_norm, 0-shot" in result.out.replace("\n", " ")

    assert command_line(*command).code == 0
    assert len(calls()) == 2, "both results are in the cache"
    assert read_records(run / "logs" / EVAL_EXTERNAL) == rows
    assert command_line(*command, "--fresh").code == 0
    assert len(calls()) == 4
    (tmp_path / "tasks" / "words.yaml").write_text("task: words\nnum_fewshot: 0")
    assert command_line(*command).code == 0
    assert len(calls()) == 6, "the task is a different one"

    page = render_page(read_runs([run]), datetime(2026, 11, 19))
    assert 'id="benchmarks"' in page
    for row in benchmark_rows(rows):
        assert all(cell in page for cell in row.cells)


def test_two_runs_share_the_result_of_their_reference(finished: Path, replay: Any, tmp_path: Path) -> None:
    environment, calls = replay
    shutil.copytree(finished, tmp_path / "other")
    for run in (finished, tmp_path / "other"):
        models, logs = find_models(str(run), trust_remote_code=False)
        assert [model.name for model in models] == ["reference", "policy"]
        assert logs == run / "logs"
        for model in models[:1]:
            evaluate(model, Benchmarks(["words"], None, None, {}), environment, lambda _: None)
    assert len(calls()) == 1


def test_a_result_belongs_to_a_template_and_to_versions_and_not_to_a_readme(finished: Path) -> None:
    benchmarks, versions = Benchmarks(["words"], None, None, {}), {"lm_eval": "0.4.13", "torch": "2.13.0"}

    def policy_key() -> str:
        _, policy = find_models(str(finished / "checkpoints"), trust_remote_code=False)[0]
        return benchmarks.key(policy, versions)

    before, policy = policy_key(), finished.parent / "policy"
    readme, template = policy / "README.md", policy / "chat_template.jinja"
    try:
        readme.write_text("# A base")
        assert policy_key() == before
        template.write_text("{{ messages[0].content }}")
        assert policy_key() != before
    finally:
        readme.unlink()
        template.unlink(missing_ok=True)
    versions["torch"] = "2.13.1"
    assert policy_key() != before


def test_a_model_without_adapters_is_evaluated_where_it_is(finished: Path, replay: Any) -> None:
    environment, calls = replay
    ((model,), logs) = find_models(str(finished.parent / "reference"), trust_remote_code=False)
    assert logs is None
    rows = evaluate(model, Benchmarks(["words"], None, None, {}), environment, lambda _: None)
    assert calls()[0]["model_args"] == {"pretrained": str(finished.parent / "reference")}
    assert {row["model"] for row in rows} == {"model"}


@pytest.mark.parametrize("resumed", [False, True])
def test_a_run_drops_results_that_belong_to_later_steps_or_to_an_earlier_run(tmp_path: Path, resumed: bool) -> None:
    values = {**make_base(tmp_path), "output_dir": str(tmp_path / "run"), "max_steps": 2}
    if resumed:
        DPOPipeline(parse_config(values)).run()
    (tmp_path / "run" / "logs").mkdir(parents=True, exist_ok=True)
    log_results(tmp_path / "run" / "logs", [row_of("policy", 0.5, step=step) for step in (2, 7)])
    DPOPipeline(parse_config({**values, "max_steps": 4, "resume_from_checkpoint": "auto"})).run()
    kept = tmp_path / "run" / "logs" / EVAL_EXTERNAL
    assert ([row["step"] for row in read_records(kept)] if kept.exists() else []) == ([2] if resumed else [])


def evaluate_with(environment: Path, finished: Path, **options: Any) -> None:
    (model,), _ = find_models(str(finished.parent / "reference"), trust_remote_code=False)
    evaluate(model, Benchmarks(["words"], None, None, {}), environment, lambda _: None, is_fresh=True, **options)


def test_a_program_that_fails_is_reported_with_its_last_lines_without_secrets(finished: Path, tmp_path: Path) -> None:
    code = (
        "import sys\nfor line in range(40): print('line', line)\n"
        "print('token hf_' + 'a' * 34)\nsys.stderr.write('10%|#\\r20%|##\\rno such task: words\\n')\nsys.exit(3)"
    )
    with pytest.raises(UserError, match=r"lm-eval failed with exit code 3; its last lines:\nline 2") as raised:
        evaluate_with(make_program(tmp_path / "env", code), finished)
    assert str(raised.value).endswith("\n10%|#\n20%|##\nno such task: words")
    assert "hf_a" not in str(raised.value)


def test_a_program_without_results_is_reported(finished: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="lm-eval wrote no results for words; check the names"):
        evaluate_with(make_program(tmp_path / "env", "print('done')"), finished)


def test_a_program_that_takes_too_long_is_ended_with_its_children_though_they_ignore_sigterm(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lm_eval, "_SECONDS_TO_END", 0.5)
    code = (
        "import os, signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"if os.fork(): open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)"
    )
    started = time.monotonic()
    with pytest.raises(UserError, match=r"lm-eval failed: it did not end within 0\.05 min; raise --timeout"):
        evaluate_with(make_program(tmp_path / "env", code), finished, timeout=3)
    assert time.monotonic() - started < 30, "the child holds the pipe that is read to its end"
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.hand)])
def test_a_signal_ends_the_program_too(finished: Path, tmp_path: Path, number: int) -> None:
    code = f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(f'{{os.getpid()}}\\n')\ntime.sleep(600)"
    environment = make_program(tmp_path / "env", code)
    command = [sys.executable, "-m", "thresher", "eval", finished, "--tasks", "words", "--environment", environment]
    started = subprocess.Popen(
        [str(part) for part in command],
        env={**os.environ, "THRESHER_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": os.pathsep.join(sys.path)},
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 120
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().endswith("\n"):
        assert started.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    started.send_signal(number)
    _, printed = started.communicate(timeout=60)
    assert started.returncode == 128 + number
    assert "Traceback" not in printed
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_missing_program_is_an_error_with_the_commands_that_install_it(
    command_line: Callable[..., Any], finished: Path, tmp_path: Path
) -> None:
    result = command_line("eval", finished, "--tasks", "words", "--environment", tmp_path / "my env")
    assert result.code == 2
    assert "pass --install to run these commands" in result.err
    for command in install_commands(tmp_path / "my env"):
        assert command in result.err


@pytest.mark.slow
def test_an_environment_finds_the_packages_of_this_one_behind_its_own(tmp_path: Path) -> None:
    environment = tmp_path / "my env"
    for command in install_commands(environment)[:2]:  # the third one downloads
        subprocess.run(["/bin/sh", "-c", command], check=True)
    code = "import importlib.util as u; print(u.find_spec('torch').origin, u.find_spec('pip').origin)"
    printed = subprocess.run(
        [environment / "bin" / "python", "-P", "-c", code],
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.rstrip("\n")
    assert printed.startswith(torch.__file__)
    assert str(environment) in printed.removeprefix(torch.__file__)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no task is named; pass --tasks"),
        (("--tasks", "a", "limit=3"), "the setting limit cannot be given; use --limit"),
        (("--tasks", "a", "model_args.pretrained=x"), "model_args.pretrained cannot be given; thresher sets it"),
        (("--tasks", "a", "model_args=x"), "model_args=x has no keys; write model_args.KEY=VALUE"),
        (("--tasks", "a", "model_args=x", "--trust-remote-code"), "model_args=x has no keys"),
        (("--tasks", "a", "batch"), "'batch' is not a setting; write it KEY=VALUE"),
        (("--tasks", "a", "--include-path", "nowhere"), "--include-path nowhere is not a directory"),
    ],
)
def test_a_command_that_cannot_work_is_rejected(
    command_line: Callable[..., Any], arguments: tuple[str, ...], message: str
) -> None:
    result = command_line("eval", "no-run", *arguments)
    assert result.code == 2
    assert message in result.err


TASK = """
task: words
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
"""


@pytest.mark.hand
def test_lm_eval_gives_the_accuracy_that_transformers_gives(
    command_line: Callable[..., Any], finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Installs lm-eval with pip, unless LM_EVAL_ENVIRONMENT names an environment that has it."""
    monkeypatch.setenv("THRESHER_CACHE_DIR", str(tmp_path / "cache"))
    environment = Path(os.environ.get("LM_EVAL_ENVIRONMENT") or tmp_path / "env")
    if not versions_in(environment):
        install(environment, print)
    require_lm_eval(environment)
    draw = torch.Generator().manual_seed(0)
    numbers = torch.randint(4, 64, (40, 4), generator=draw).tolist()
    rows = [
        {"question": f"w{a} w{b}", "choices": [f"w{c}", f"w{d}"], "answer": at % 2}
        for at, (a, b, c, d) in enumerate(numbers)
    ]
    data = tmp_path / "tasks" / "words.jsonl"
    data.parent.mkdir()
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (data.parent / "words.yaml").write_text(TASK.format(data=data))
    result = command_line(
        *("eval", finished, "--tasks", "words", "--include-path", "tasks", "--environment", environment, "device=cpu")
    )
    assert result.code == 0, result.err
    logged = {row["model"]: row for row in read_records(finished / "logs" / EVAL_EXTERNAL)}
    exported = tmp_path / "exported"
    export_checkpoint(list_checkpoints(finished / "checkpoints")[-1], exported)
    tokenizer = AutoTokenizer.from_pretrained(exported)
    for side, path in (("policy", exported), ("reference", finished.parent / "reference")):
        model = AutoModelForCausalLM.from_pretrained(path)
        hits = 0
        for row in rows:
            ids = tokenizer(row["question"], add_special_tokens=False, return_tensors="pt")["input_ids"]
            with torch.no_grad():
                logits = model(ids).logits[0, -1]
            choices = [logits[tokenizer.convert_tokens_to_ids(each)] for each in row["choices"]]
            hits += int(torch.stack(choices).argmax()) == row["answer"]
        assert logged[side]["value"] == pytest.approx(hits / len(rows))
        assert logged[side]["num_samples"] == len(rows)
