"""Messages of the command line and of runs: levels, log files, and the output that a library user gets."""

from __future__ import annotations

import io
import logging
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

import thresher
from tests.support.forks import python
from tests.support.logged import logged
from tests.support.small_runs import make_base
from thresher.config import parse_config
from thresher.errors import UserError
from thresher.observability.run_log import LogFile, open_worker_log, run_log

PACKAGE = logging.getLogger("thresher")
SECRET = "hf_canaryofthehubcanary01"
STEP_LINE = re.compile(r"step \d/\d  loss")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run in one process whose validation pairs are also training pairs, which causes a warning."""
    values = make_base(tmp_path_factory.mktemp("logging"))
    leak = {"data_args": values["actor_train"]["data_args"]}
    return {**values, "validation": leak, "max_steps": 2, "save_steps": 0, "eval_steps": 0, "track_with": ["console"]}


@pytest.fixture
def config(base: dict[str, Any], tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({**base, "output_dir": "out"}))
    return path


def logging_state() -> tuple[object, ...]:
    return PACKAGE.level, PACKAGE.propagate, PACKAGE.handlers[:]


@pytest.fixture(autouse=True)
def logging_is_restored():
    before = logging_state()
    yield
    assert logging_state() == before


def test_information_is_printed_plainly_and_warnings_have_a_prefix(command_line, config):
    result = command_line("train", config)
    assert result.code == 0
    lines = result.err.splitlines()
    assert any(line.startswith("warning: of 21 training pairs, 21 are also in the validation set") for line in lines)
    assert "steps       2 steps of 6 pairs (0.5 epochs)" in lines
    assert STEP_LINE.search(result.err)
    assert lines[-1] == "done; export the model with: thresher export out --output DIR"
    assert "debug: " not in result.err


def test_results_go_to_stdout_and_messages_to_stderr(command_line, config):
    """A pipe after `train` gets the checkpoint and nothing else."""
    for _ in ("a run", "a finished run, which is left as it is"):
        assert command_line("train", config).out == "out/checkpoints/step-00000002\n"
    (store,) = Path("out/data").glob("train-*")
    for arguments in (("inspect", store), ("cache", "ls"), ("cache", "verify"), ("config", "show", config)):
        result = command_line(*arguments)
        assert result.out
        assert result.err == ""


PHASES = [
    "importing torch and transformers",
    "checking the config, its files and its models",
    "opening the data",
    "loading the models",
    "preparing the first step",
]


def test_a_run_shows_its_phases_and_at_most_12_lines_before_its_first_step(command_line, config, base):
    result = command_line("train", config)
    before, first, _ = result.err.partition("step 1/2  loss")
    assert first
    (warning,) = [line for line in before.splitlines() if line.startswith("warning: ")]
    lines = [line for line in before.splitlines() if line != warning]
    phases = [line for line in lines if line in PHASES]
    assert phases == PHASES
    assert len(lines) - len(phases) <= 12, "\n".join(lines)
    model = base["pretrain"]
    for line in (
        f"model       {model} in fp32",
        "parameters  6,480, all trained",
        "data        21 pairs, 21 for validation",
        "loss        sigmoid(beta=0.1)",
        "steps       2 steps of 6 pairs (0.5 epochs)",
        f"reference   precompute, {base['reference']['model_args']['model_name_or_path']}",
        "layout      shared",
        "device      cpu",
    ):
        assert line in lines, before
    log = Path("out/logs/run.log").read_text()
    for detail in ("rows read 21, pairs kept 21", "tokens of prompt: min ", "train.jsonl: 21 rows of format prompt"):
        assert detail in log
        assert detail not in result.err


def test_a_run_warns_of_many_dropped_pairs_also_when_they_are_prepared(command_line, config):
    for _ in ("prepared by this run", "by the one before"):
        result = command_line("-q", "train", config, "sequence_length=9", "resume_from_checkpoint=auto")
        train, validation = (line for line in result.err.splitlines() if "too long" in line)
        assert re.fullmatch(
            r"warning: out/data/train-[0-9a-f]{12}: \d+ of 21 pairs \(\d+%\) are too long and were dropped; "
            r"sequence_length=\d+ keeps "
            r"95 %, and actor_train\.data_args\.truncation=prompt_start or .*=response_end truncates pairs instead",
            train,
        )
        assert validation == train.replace("actor_train", "validation").replace("data/train-", "data/validation-")


def test_lora_shows_the_share_of_trained_parameters(command_line, config):
    result = command_line("train", config, "actor_train.model_args.lora_rank=2")
    line = next(line for line in result.err.splitlines() if line.startswith("parameters"))
    total, trained, share = re.fullmatch(
        r"parameters  ([\d,]+), of which ([\d,]+) \(([\d.]+)%\) are trained: LoRA of rank 2", line
    ).groups()
    total, trained = int(total.replace(",", "")), int(trained.replace(",", ""))
    assert total == 6480 + trained
    assert float(share) == pytest.approx(100 * trained / total, abs=1e-3)


def test_an_evaluation_is_one_line_and_verbose_shows_all_its_metrics(command_line, config):
    short = command_line("train", config).err
    (line,) = [line for line in short.splitlines() if "evaluation:" in line]
    assert re.fullmatch(r"step 2/2  evaluation: loss [\d.]+  accuracy [\d.]+  margin -?[\d.]+", line)
    full = r"evaluation after step 2: eval/loss .* eval/rewards/chosen .* eval/sft_loss "
    assert re.search(full, Path("out/logs/run.log").read_text())
    assert not re.search(full, short)
    assert re.search(full, command_line("train", config, "output_dir=again", "-v").err)


def test_only_work_that_takes_long_shows_its_progress(caplog):
    from thresher.cli.terminal import progress_lines

    caplog.set_level("INFO", "thresher")
    seconds = 0.0
    show = progress_lines(clock=lambda: seconds)
    for what, duration, total in (("short", 1, 4), ("long", 3, 15)):
        for done in range(1, total + 1):
            seconds += duration
            show(what, done, total)
    # from 5 seconds on, every 30 seconds, and the end
    assert caplog.messages == ["long: 3/15", "long: 13/15", "long: 15/15"]


@pytest.mark.parametrize("where", ["before", "after", "environment"])
def test_quiet_shows_only_warnings(command_line, config, monkeypatch, where):
    if where == "environment":
        monkeypatch.setenv("THRESHER_LOG_LEVEL", "Warning")
    flags = {"before": ["-q", "train", config], "after": ["train", config, "--quiet"], "environment": ["train", config]}
    result = command_line(*flags[where])
    assert (result.code, result.out) == (0, "out/checkpoints/step-00000002\n")
    (line,) = result.err.splitlines()
    assert line.startswith("warning: of 21 training pairs, 21 are also in the validation set")


@pytest.mark.parametrize("arguments", [("-v", "train"), ("train", "-v"), ("train", "--verbose")])
def test_verbose_shows_details_and_wins_over_the_environment(command_line, config, monkeypatch, arguments):
    monkeypatch.setenv("THRESHER_LOG_LEVEL", "error")
    result = command_line(*arguments, config)
    assert result.code == 0
    assert "debug: step 2: " in result.err
    assert STEP_LINE.search(result.err)
    assert (
        " DEBUG thresher.observability.heartbeat: step 2: " in (config.parent / "out" / "logs" / "run.log").read_text()
    )


def test_quiet_does_not_hide_the_result_of_a_command(command_line, config):
    for arguments in (("config", "show", config), ("losses",), ("cache", "ls"), ("cache", "verify")):
        loud, quiet = command_line(*arguments), command_line("-q", *arguments)
        assert quiet == loud
        assert loud.out + loud.err
    assert command_line("-q", "train", config).code == 0
    (store,) = Path("out/data").glob("train-*")
    assert command_line("-q", "inspect", store) == command_line("inspect", store)
    assert "pairs kept" in command_line("-q", "inspect", store).out


def test_an_unknown_level_is_reported_with_the_valid_ones(command_line, monkeypatch):
    monkeypatch.setenv("THRESHER_LOG_LEVEL", "loud")
    result = command_line("losses")
    assert (result.code, result.out) == (2, "")
    assert result.err == ("error: THRESHER_LOG_LEVEL is 'loud'; use one of debug, info, warning, error\n")
    assert command_line("-q", "losses").code == 0  # a flag wins


def test_quiet_and_verbose_exclude_each_other(command_line):
    result = command_line("-q", "losses", "-v")
    assert (result.code, result.err) == (2, "error: --quiet and --verbose exclude each other; pass one of them\n")


def test_flags_after_two_dashes_are_arguments(command_line):
    result = command_line("train", "--", "-q")
    assert "config file -q does not exist" in result.err


def test_the_version(command_line):
    assert command_line("--version") == (0, f"thresher {thresher.__version__}\n", "")


def test_terminal_messages_are_colored_with_markup_and_control_characters_escaped(monkeypatch):
    from thresher.cli import terminal

    stream = io.StringIO()
    monkeypatch.setattr(terminal, "console", Console(file=stream, force_terminal=True, highlight=False, width=40))
    logger = logging.getLogger("thresher.test")
    with terminal.log_to_terminal(logging.INFO):
        logger.info("[red]%s[/] %s", "x" * 100, "\x1b[2J:smile:")
        logger.warning("token=%s at https://me:%s@host/", SECRET, "hunter2")
        logger.error("bad")
        logger.debug("not shown")
    plain, warning, error = stream.getvalue().splitlines()
    assert plain == f"[red]{'x' * 100}[/] \\x1b[2J:smile:"
    assert warning == "\x1b[1;33mwarning: \x1b[0mtoken=*** at https://***@host/"
    assert error == "\x1b[1;31merror: \x1b[0mbad"


def test_a_message_that_fails_to_format_does_not_raise_or_leak_secrets(capsys):
    from thresher.cli.terminal import log_to_terminal

    with log_to_terminal(logging.INFO):
        logging.getLogger("thresher.test").info("%d", SECRET)
    printed = capsys.readouterr().err
    assert "TypeError" in printed
    assert SECRET not in printed


LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (DEBUG|INFO|WARNING|ERROR) (thresher[\w.]*): .+")


def test_run_log_has_all_messages_at_every_terminal_level(command_line, config, tmp_path):
    assert command_line("-q", "train", config).code == 0
    log = tmp_path / "out" / "logs" / "run.log"
    lines = log.read_text().splitlines()
    assert all(LINE.fullmatch(line) for line in lines), lines
    text = log.read_text()
    assert " WARNING thresher.builders.data: of 21 training pairs, 21 are also in the validation set" in text
    assert " INFO thresher.pipeline: steps       2 steps of 6 pairs (" in text
    assert command_line("train", config).code == 0  # the same command again appends to the same file
    assert log.read_text().startswith(text)
    assert "has completed all steps" in log.read_text()[len(text) :]


def test_run_log_has_the_error_of_a_run_with_secrets_masked(base, tmp_path):
    from thresher.pipeline import DPOPipeline

    rows = tmp_path / f"token={SECRET}" / "a.jsonl"
    rows.parent.mkdir()
    rows.write_text('{"prompt": 3, "chosen": "a", "rejected": "b"}\n')  # found by the run, not by the checks before it
    data = {**base["actor_train"]["data_args"], "file_name": str(rows)}
    values = {**base, "output_dir": str(tmp_path), "actor_train": {**base["actor_train"], "data_args": data}}
    with pytest.raises(UserError):
        DPOPipeline(parse_config(values)).run()
    text = (tmp_path / "logs" / "run.log").read_text()
    assert " ERROR thresher.observability.run_log: the run ended: " in text
    assert "token=***" in text
    assert "Traceback" not in text
    assert SECRET not in text


def test_run_log_has_the_traceback_of_a_bug_with_further_lines_indented(tmp_path):
    def fail() -> None:
        logging.getLogger("thresher.x").warning("one\n2000-01-01 00:00:00,000 INFO thresher: forged")
        raise ZeroDivisionError(f"api_key={SECRET}")

    with pytest.raises(ZeroDivisionError), run_log(tmp_path):
        fail()
    lines = (tmp_path / "run.log").read_text().splitlines()
    assert lines[1] == "    2000-01-01 00:00:00,000 INFO thresher: forged"
    assert "    Traceback (most recent call last):" in lines
    assert lines[-1] == "    ZeroDivisionError: api_key=***"


def test_two_runs_in_one_process_have_separate_logs_and_leave_no_handler(base, tmp_path):
    from thresher.pipeline import DPOPipeline

    before = logging_state()
    for name in ("one", "two"):
        DPOPipeline(parse_config({**base, "track_with": [], "output_dir": str(tmp_path / name)})).run()
        assert logging_state() == before
    one, two = ((tmp_path / name / "logs" / "run.log").read_text() for name in ("one", "two"))
    assert one.count("2 steps of 6 pairs") == two.count("2 steps of 6 pairs") == 1
    assert str(tmp_path / "two") not in one


def test_a_library_user_sees_nothing_without_a_handler(base, tmp_path):
    """In a subprocess, since pytest installs handlers; run.log is complete anyway."""
    values = {**base, "track_with": [], "output_dir": str(tmp_path / "out")}
    program = (
        "import logging, sys, yaml; from thresher import DPOPipeline; from thresher.config import parse_config\n"
        "import transformers.utils.logging; transformers.utils.logging.disable_progress_bar()\n"
        "values = yaml.safe_load(sys.stdin)\n"
        "for level in (None, 'WARNING', 'INFO'):\n"
        "    print(f'next: {level}', file=sys.stderr)\n"
        "    format = '%(levelname)s %(name)s %(message)s'\n"
        "    if level is not None: logging.basicConfig(level=level, format=format, force=True)\n"
        "    DPOPipeline(parse_config(values)).run()"
    )
    command = [*python(), "-c", program]
    done = subprocess.run(command, input=yaml.safe_dump(values), capture_output=True, text=True, check=True)
    assert done.stdout == ""
    without_handler, with_warnings, with_info = done.stderr.split("next: ")[1:]
    assert without_handler == "None\n"
    text = (tmp_path / "out" / "logs" / "run.log").read_text()
    assert " INFO thresher.pipeline: steps       2 steps of 6 pairs (" in text
    warnings = with_warnings.splitlines()[1:]
    assert [line.split()[:2] for line in warnings] == [["WARNING", "thresher.builders.data"]]
    assert "\nINFO thresher.pipeline steps       2 steps of 6 pairs (" in with_info


def test_run_log_does_not_lower_the_level_of_other_handlers(tmp_path, caplog):
    """The level is lowered for run.log only."""
    logger, stream = logging.getLogger("thresher.test"), io.StringIO()
    PACKAGE.addHandler(handler := logging.StreamHandler(stream))
    with run_log(tmp_path):
        logger.info("for the file")
        logger.warning("for all")
    PACKAGE.removeHandler(handler)
    assert caplog.messages == ["for all"]
    assert stream.getvalue() == "for all\n"
    assert (tmp_path / "run.log").read_text().count(": for ") == 2


def test_a_log_that_cannot_be_opened_or_written_is_a_warning(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with logged() as records, run_log(tmp_path / "file" / "logs"):
        pass
    assert [record.levelname for record in records] == ["WARNING"]
    assert "run.log: Not a directory; the run continues without this file" in records[0].getMessage()

    with logged() as records, run_log(tmp_path):
        file = next(handler for handler in PACKAGE.handlers if isinstance(handler, LogFile))
        os.dup2(os.open("/dev/full", os.O_WRONLY), file.stream.fileno())
        for _ in range(2):
            logging.getLogger("thresher.test").info("message")
    messages = [record.getMessage().partition(":")[0] for record in records]
    assert messages == ["message", f"could not write {tmp_path}/run.log", "message"]


def test_the_stack_of_a_worker_that_crashes_is_in_its_log(tmp_path):
    program = (
        "import logging, os, pathlib, signal, sys; from thresher.observability.run_log import open_worker_log\n"
        "open_worker_log(pathlib.Path(sys.argv[1]), 'actor_train', 1, logging.INFO)\n"
        "os.kill(os.getpid(), signal.SIGSEGV)"
    )
    crashed = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, check=False)
    assert crashed.returncode == -signal.SIGSEGV
    assert "Segmentation fault" in (tmp_path / "workers" / "actor_train-1.log").read_text()


def test_logs_are_not_written_through_links(tmp_path):
    logs, precious = tmp_path / "logs", tmp_path / "precious"
    logs.mkdir()
    precious.mkdir()
    (logs / "run.log").symlink_to(precious / "run.log")
    with pytest.raises(UserError, match=r"run\.log is a symlink, and logs are not written through"), run_log(logs):
        pytest.fail("the run began")
    (logs / "run.log").unlink()
    (logs / "workers").symlink_to(precious)
    with pytest.raises(OSError, match="symbolic links"):
        open_worker_log(logs, "actor_train", 0, logging.INFO)
    (logs / "workers").unlink()
    (logs / "workers").mkdir()
    (logs / "workers" / "actor_train-0.log").symlink_to(precious / "new")
    with pytest.raises(OSError, match="symbolic links"):
        open_worker_log(logs, "actor_train", 0, logging.INFO)
    assert list(precious.iterdir()) == []


# each takes a tenth of a second or more, and no worker of a run with the default settings uses them
OPTIONAL = {
    *("datasets", "deepspeed", "hydra", "megatron", "mlflow", "pandas", "peft", "tensorboard", "trl", "wandb"),
    *("rich", "thresher.importers.translation", "thresher.plan", "torch.distributed.pipelining"),
}
HEAVY = (OPTIONAL - {"rich"}) | {"numpy", "pyarrow", "ray", "torch", "transformers"}


@pytest.mark.parametrize(
    ("program", "unneeded"),
    [
        ("import thresher", HEAVY | {"pydantic", "rich"}),
        ("from thresher.cli import main; main()", HEAVY),
        ("import thresher.runtime.ray.workers, thresher.engines.native.build", OPTIONAL),
    ],
    ids=["import", "help", "worker"],
)
def test_nothing_heavy_is_imported_before_it_is_needed(program, unneeded):
    code = f"import sys; sys.argv[1:] = ['--help']\ntry:\n    {program}\nexcept SystemExit:\n    pass\n"
    code += f"print('imported:', *sorted({unneeded} & {{*sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "imported:"


def test_completion_is_offered_and_completes_commands():
    def bash(*arguments: str, **environment: str) -> str:
        command = [*python(), "-m", "thresher", *arguments]
        return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=True).stdout

    script = bash("--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert "_THRESHER_COMPLETE=complete_bash" in script
    words = bash(_THRESHER_COMPLETE="complete_bash", COMP_WORDS="thresher p", COMP_CWORD="1").split()
    assert words == ["plan", "prepare", "precompute-reference"]
    words = bash(_THRESHER_COMPLETE="complete_bash", COMP_WORDS="thresher d", COMP_CWORD="1").split()
    assert words == ["demo"]
