"""EleutherAI's lm-eval as a program in an environment of its own: set up, run, and its results read.

thresher never imports it: its many requirements must not decide the versions of a training environment. A config file
holds all of its arguments, so no path or setting has to survive its parsing of a command line.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from thresher import durable
from thresher.data.store.cache import chosen_cache_dir, user_cache_dir
from thresher.data.store.reader import sha256_of_file
from thresher.errors import RunStopped, UserError
from thresher.evaluation.models import EvaluatedModel
from thresher.models.loading.load import DTYPES
from thresher.observability.log_files import EVAL_EXTERNAL
from thresher.observability.trackers.jsonl import StepLog, encode_number, read_records
from thresher.redact import redact, redact_text

logger = logging.getLogger(__name__)

REQUIREMENT = "lm_eval[hf,ifeval]==0.4.13"
_SECONDS_TO_END = 10.0
_LAST_LINES = 20
# lm-eval and what computes its results
_ASK_VERSIONS = """
import json
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

found = {}
for name in ("lm_eval", "torch", "transformers", "vllm"):
    if find_spec(name) is not None:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "unknown"
print(json.dumps(found))
"""
# what an evaluation decides itself
_RESERVED = ("tasks", "limit", "include_path", "output_path", "model_args.pretrained")

Row = dict[str, Any]
Show = Callable[[str], None]


@dataclass(frozen=True)
class Benchmarks:
    """What to evaluate, and how: settings are keys of lm-eval's config file."""

    tasks: Sequence[str]
    limit: int | None
    include_path: Path | None
    settings: Mapping[str, Any]
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        arguments = self.settings.get("model_args") or {}
        if not isinstance(arguments, Mapping):
            raise UserError(f"model_args={arguments} has no keys; write model_args.KEY=VALUE for each argument")
        flat = {*self.settings, *(f"model_args.{key}" for key in arguments)}
        if found := sorted(flat.intersection(_RESERVED)):
            name = found[0].replace("_", "-")
            hint = f"use --{name}" if found[0] in _RESERVED[:3] else "thresher sets it"
            raise UserError(f"the setting {found[0]} cannot be given; {hint}")

    def config(self, model: Path, dtype: str | None) -> dict[str, Any]:
        """The config file of lm-eval for a model directory."""
        arguments: dict[str, Any] = {"pretrained": str(model)}
        if self.trust_remote_code:
            arguments["trust_remote_code"] = True
        if dtype is not None:
            arguments["dtype"] = str(DTYPES[dtype]).removeprefix("torch.")
        return {
            **self.settings,
            "model_args": arguments | dict(self.settings.get("model_args") or {}),
            "tasks": list(self.tasks),
            "limit": self.limit,
            "include_path": None if self.include_path is None else str(self.include_path.resolve()),
        }

    def key(self, model: EvaluatedModel, versions: Mapping[str, str]) -> str:
        """Digest everything that decides a result, except the data that tasks download."""
        config = self.config(Path(), model.dtype) | {"include_path": None}
        files = sorted(each for each in self.include_path.rglob("*") if each.is_file()) if self.include_path else []
        tasks = [[str(each.relative_to(str(self.include_path))), sha256_of_file(each)] for each in files]
        content = [
            model.identity,
            dict(versions),
            config,
            str(self.include_path and self.include_path.resolve()),
            tasks,
        ]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def default_environment() -> Path:
    """The directory of the environment that uses the packages of this one."""
    this = f"{sys.prefix} {sys.version_info.major}.{sys.version_info.minor}"
    return _cache_dir() / f"lm-eval-{hashlib.sha256(this.encode()).hexdigest()[:8]}"


def _cache_dir() -> Path:
    return chosen_cache_dir(None) or user_cache_dir()


def install_commands(environment: Path) -> list[str]:
    """The shell commands that make the environment.

    It finds the packages of this one, such as torch, after its own: pip installs what is missing or too new.
    """
    packages = [each for each in sys.path if Path(each).name in ("site-packages", "dist-packages")]
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    shared = environment / "lib" / version / "site-packages" / "packages.pth"
    return [
        shlex.join([sys.executable, "-m", "venv", str(environment)]),
        shlex.join(["printf", "%s\\n", *packages]) + " > " + shlex.quote(str(shared)),
        shlex.join([str(environment / "bin" / "python"), "-m", "pip", "install", REQUIREMENT]),
    ]


def install(environment: Path, show: Show) -> None:
    """Make the environment."""
    for command in install_commands(environment):
        logger.info("%s", command)
        # exec: a signal to the shell would leave pip running
        _run(["/bin/sh", "-c", f"exec {command}"], show, None, f"{command} failed")


def versions_in(environment: Path) -> dict[str, str]:
    """Return the versions of lm-eval and of what computes its results; nothing if its Python cannot import lm-eval."""
    command = [str(environment / "bin" / "python"), "-c", _ASK_VERSIONS]
    try:
        printed = subprocess.run(command, env=_variables(), capture_output=True, check=True).stdout
        found: dict[str, str] = json.loads(printed)
    except (OSError, subprocess.CalledProcessError, ValueError):
        return {}
    return found if "lm_eval" in found else {}


def require_lm_eval(environment: Path) -> dict[str, str]:
    """Return the versions in an environment, or raise with the commands that install lm-eval."""
    if not (versions := versions_in(environment)):
        raise UserError(
            f"{environment} has no lm_eval; pass --install to run these commands, or run them, or name an environment "
            "that has it with --environment:\n  " + "\n  ".join(install_commands(environment))
        )
    return versions


def evaluate(
    model: EvaluatedModel,
    benchmarks: Benchmarks,
    environment: Path,
    show: Show,
    *,
    timeout: float | None = None,
    is_fresh: bool = False,
) -> list[Row]:
    """Evaluate a model, or return its results from the cache; is_fresh: do not."""
    versions = require_lm_eval(environment)
    cached = _cache_dir() / "evaluations" / f"{benchmarks.key(model, versions)}.json"
    content = None if is_fresh else durable.read_own_record(cached)
    if content is None:
        with model.directory() as directory:
            content = _evaluate(environment, benchmarks.config(directory, model.dtype), show, timeout)
        durable.write_own_record(cached, content)
    else:
        logger.info("%s: evaluated before, results from %s", model.name, cached)
    settings = redact({key: value for key, value in benchmarks.settings.items() if value is not None})
    common = {"step": model.step, "model": model.name, "lm_eval": versions["lm_eval"], "limit": benchmarks.limit}
    return [{**common, "settings": settings, **row} for row in read_results(content)]


def _evaluate(environment: Path, config: Mapping[str, Any], show: Show, timeout: float | None) -> dict[str, Any]:
    with TemporaryDirectory(prefix="thresher-") as scratch:
        output, file = Path(scratch) / "results", Path(scratch) / "config.yaml"
        file.write_text(json.dumps({**config, "output_path": str(output)}), encoding="utf-8")  # JSON is YAML
        # not bin/lm_eval, which is missing if the environment finds lm-eval in this one
        command = [str(environment / "bin" / "python"), "-m", "lm_eval", "run", "--config", str(file)]
        _run(command, show, timeout, "lm-eval failed")
        found = sorted(output.rglob("results_*.json"))
        if not found:
            raise UserError(f"lm-eval wrote no results for {', '.join(config['tasks'])}; check the names of the tasks")
        results: dict[str, Any] = json.loads(found[-1].read_bytes())
        kept = ("results", "n-shot", "n-samples")
        return {key: results[key] for key in kept if key in results}


def read_results(content: Mapping[str, Any]) -> list[Row]:
    """Return the metrics of lm-eval's results: a value per task, metric and filter, with its standard error."""
    rows = []
    for task, values in content["results"].items():
        for key, value in values.items():
            metric, comma, filtered = key.partition(",")
            if not comma or metric.endswith("_stderr") or not _is_number(value):
                continue
            error = values.get(f"{metric}_stderr,{filtered}")
            counts = content.get("n-samples", {}).get(task, {})
            rows.append(
                {
                    "task": task,
                    "metric": metric,
                    "filter": filtered,
                    "value": encode_number(value),
                    "stderr": error if _is_number(error) else None,  # N/A where lm-eval has none
                    "num_samples": counts.get("effective", values.get("sample_len")),  # a group has no counts
                    "num_fewshot": content.get("n-shot", {}).get(task),
                }
            )
    return rows


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def log_results(log_dir: Path, rows: Sequence[Row]) -> None:
    """Append results to the log of a run, except those that it has."""
    log = StepLog(log_dir / EVAL_EXTERNAL, sys.maxsize)
    known = read_records(log.path) if log.path.is_file() else []
    for row in rows:
        if row not in known:
            log.write(row)


def _run(command: Sequence[str], show: Show, timeout: float | None, failed: str) -> None:
    """Run a program, show each line that it prints, and raise with its last lines if it fails."""
    last: deque[str] = deque(maxlen=_LAST_LINES)
    with _ended(
        subprocess.Popen(
            command,
            env=_variables(),
            start_new_session=True,  # a process group, which is ended as one
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,  # a progress bar's carriage return ends a line too
            encoding="utf-8",
            errors="replace",
        )
    ) as process:
        is_late = threading.Event()

        def end() -> None:
            is_late.set()
            _end(process)

        timer = threading.Timer(timeout or threading.TIMEOUT_MAX, end)
        timer.daemon = True
        timer.start()
        try:
            for line in process.stdout or ():
                if line := line.strip():
                    last.append(redact_text(line))
                    show(last[-1])
            code = process.wait()
        finally:
            timer.cancel()
    if timeout is not None and is_late.is_set():
        raise UserError(f"{failed}: it did not end within {timeout / 60:g} min; raise --timeout, or set a --limit")
    if code:
        raise UserError(f"{failed} with exit code {code}; its last lines:\n" + "\n".join(last))


def _variables() -> dict[str, str]:
    """The environment variables of lm-eval."""
    # the progress bars that thresher's command line turns off for itself
    kept = {name: value for name, value in os.environ.items() if name != "TQDM_DISABLE"}
    # no module of the current directory, such as a clone of lm-eval, replaces an installed one
    return kept | {"PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1"}


@contextmanager
def _ended(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """End a process and the ones that it started with the block, also if this one is interrupted or terminated."""

    def stop(number: int, _: object) -> None:
        raise RunStopped(None, 128 + number, "terminated")

    # a terminal that is closed sends SIGHUP to this process alone; nohup ignores it
    numbers = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) is not signal.SIG_IGN]
    is_main = threading.current_thread() is threading.main_thread()
    previous = {each: signal.signal(each, stop) for each in numbers if is_main}
    try:
        with process:
            try:
                yield process
            finally:
                _end(process)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _end(process: subprocess.Popen[str]) -> None:
    """End a process and what it started, such as vLLM's workers, which may hold the pipe open."""
    try:
        _signal_group(process, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_SECONDS_TO_END)
    finally:
        _signal_group(process, signal.SIGKILL)


def _signal_group(process: subprocess.Popen[str], number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):  # all have ended
        os.killpg(process.pid, number)
