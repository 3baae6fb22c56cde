"""No secret is written or printed: every setting and variable that may contain one has its own canary."""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.attacks import CommandLine, Run
from tests.support.compared_runs import merge
from tests.support.forks import python

ENVIRONMENT = {
    "HF_TOKEN": "hf_canaryofthehubcanary01",
    "HUGGING_FACE_HUB_TOKEN": "hf_canaryofthehubcanary02",
    "WANDB_API_KEY": "ca9a41e5" * 5,
    "AWS_ACCESS_KEY_ID": "AKIACANARYCANARY0001",
    "AWS_SECRET_ACCESS_KEY": "awssecretcanary0002",
    "AWS_SESSION_TOKEN": "awssessioncanary0003",
    "RAY_AUTH_TOKEN": "0ca9a41eca9a41eca9a41eca9a41e0" * 2,
    "MLFLOW_TRACKING_PASSWORD": "mlflowcanary0004",
    "GITHUB_TOKEN": "ghp_canarycanarycanary0005",
}
IN_URLS = {name: f"urlcanary{number:04d}" for number, name in enumerate(("login", "token", "signature", "key"), 10)}
QUERY = f"token={IN_URLS['token']}&X-Amz-Signature={IN_URLS['signature']}&api_key={IN_URLS['key']}"
ENCODED = base64.b64encode(f"user:{IN_URLS['login']}".encode()).decode()
CANARIES = (*ENVIRONMENT.values(), *IN_URLS.values(), ENCODED)


class Handler(SimpleHTTPRequestHandler):
    """Serve files and byte ranges of files."""

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        if not path.is_file():
            self.send_error(404)
            return
        content = path.read_bytes()
        wanted = self.headers.get("Range", "").removeprefix("bytes=").partition("-")
        start, stop = int(wanted[0] or 0), int(wanted[2] or len(content) - 1) + 1
        part = content[start:stop]
        self.send_response(206 if "Range" in self.headers else 200)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(part)))
        self.send_header("Content-Range", f"bytes {start}-{start + len(part) - 1}/{len(content)}")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(part)

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def served(directory: Path) -> Iterator[str]:
    """Serve a directory on loopback; yield `host:port`."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(directory))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def secret_url(host: str, name: str) -> str:
    return f"http://user:{IN_URLS['login']}@{host}/{name}?{QUERY}"


def leaks(*directories: Path) -> list[str]:
    """List every file that contains a canary."""
    files = [
        path for directory in directories for path in directory.rglob("*") if path.is_file() and not path.is_symlink()
    ]
    return [f"{path}: {found}" for path in files if (found := canaries_in(path.read_bytes()))]


def canaries_in(content: bytes) -> list[str]:
    return [canary for canary in CANARIES if canary.encode() in content]


# the command line, but a run leaves the files of the Ray that it started, to be searched
KEEP_RAYS_SESSION = """
from thresher.runtime.ray import environment
environment.set_environment(None)
from types import SimpleNamespace
from thresher.runtime.ray import session
session.shutil = SimpleNamespace(rmtree=lambda *_, **__: None)
from thresher.cli import main
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["local", pytest.param("ray", marks=[pytest.mark.distributed, pytest.mark.hand])])
def test_a_run_writes_and_prints_no_secret(finished_run: Run, tmp_path: Path, runtime: str) -> None:
    """A run in a separate process, with every tracker; its home and Ray's session are in directories to search."""
    home, written, session = tmp_path / "home", tmp_path / "written", Path(tempfile.mkdtemp(prefix="ray-"))
    for directory in (home, written):
        directory.mkdir()
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("RAY", "XDG", "WANDB"))},
        **ENVIRONMENT,
        "HOME": str(home),
        "RAY_TMPDIR": str(session),
        "TMPDIR": str(written),
        "COLUMNS": "1000",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    with served(finished_run.directory) as host:
        data = {"file_name": secret_url(host, "train.jsonl"), "on_bad_row": "quarantine"}
        changes = {
            "output_dir": str(written / "output"),
            "runtime": runtime,
            "track_with": ["console", "tensorboard", "wandb", "mlflow", "trackio"],
            "tracker_kwargs": {"wandb_mode": "offline"},
            "actor_train": {"data_args": data},
            "reference": {"cache_dir": str(written / "cache")},
        }
        config = tmp_path / "config.yaml"
        config.write_text(yaml.safe_dump(merge(finished_run.values, changes)))
        # one bad row, so that the quarantine file names its source
        with finished_run.rows.open("a") as rows:
            rows.write('{"prompt": 5}\n')

        def thresher(*arguments: object) -> bytes:
            starts_ray = runtime == "ray" and arguments[0] in ("train", "prepare")
            program = ["-c", KEEP_RAYS_SESSION] if starts_ray else ["-m", "thresher"]
            command = [*python(), *program, *map(str, arguments)]
            result = subprocess.run(command, env=environment, capture_output=True, timeout=300, check=False)
            assert result.returncode == 0, result.stderr.decode()
            return result.stdout + result.stderr

        try:
            printed = thresher("train", config)
            printed += thresher("config", "show", config)
            printed += thresher("prepare", "--config", config, "--output", written / "store")
            printed += thresher("inspect", written / "store")
            printed += thresher("cache", "ls", "--cache-dir", written / "cache")
        finally:
            finished_run.rows.write_text("".join(finished_run.rows.read_text().splitlines(keepends=True)[:-1]))
    assert b"train.jsonl" in printed  # the file is named, without the secrets in its URL
    assert canaries_in(printed) == []
    assert (written / "store.quarantine.jsonl").read_text().startswith('{"file": "http://***@')
    assert any(home.rglob("*")) or any((written / "output" / "logs").glob("wandb/offline-*"))
    assert leaks(home, written, session) == []
    if runtime == "ray":
        assert any(session.rglob("session_*/logs/*"))
    shutil.rmtree(session)


ERRORS = {
    "a file that does not exist": {"actor_train": {"data_args": {"file_name": "URL/gone.jsonl?QUERY"}}},
    "a server that does not exist": {
        "actor_train": {"data_args": {"file_name": "http://user:LOGIN@127.0.0.1:9/a.jsonl"}}
    },
    "an unknown format": {"actor_train": {"data_args": {"file_name": "URL/train.xyz?QUERY"}}},
    "a scheme that does not exist": {
        "actor_train": {"data_args": {"file_name": "nowhere://user:LOGIN@h/a.jsonl?QUERY"}}
    },
    "a store that does not exist": {
        "actor_train": {"data_args": {"store": "s3://user:LOGIN@h/a?QUERY", "file_name": []}}
    },
    "a bad row": {"actor_train": {"data_args": {"file_name": "URL/bad.jsonl?QUERY"}}},
    "a model that does not exist": {"pretrain": "https://user:LOGIN@h/m?QUERY"},
    "a cluster that does not exist": {"ray_address": "user:pw@127.0.0.1:9?QUERY"},
    "a checkpoint that does not exist": {"resume_from_checkpoint": "https://user:LOGIN@h/c?QUERY"},
    "a template that does not exist": {
        "actor_train": {"data_args": {"template": "https://user:LOGIN@h/t.jinja?QUERY"}}
    },
    "a key for a tracker": {"tracker_kwargs": {"wandb_api_key": "KEY"}},
    "a token among the keys": {"hf_token": "KEY"},
    "a value of another type": {"max_steps": "https://user:LOGIN@h/c?QUERY"},
}


def filled_in(value: Any, host: str) -> Any:
    """Replace the placeholders by canaries."""
    if isinstance(value, dict):
        return {key: filled_in(each, host) for key, each in value.items()}
    if not isinstance(value, str):
        return value
    value = value.replace("URL", f"http://user:LOGIN@{host}").replace("QUERY", QUERY)
    return value.replace("LOGIN", IN_URLS["login"]).replace("KEY", IN_URLS["key"])


@pytest.mark.parametrize("error", ERRORS)
def test_an_error_is_reported_without_the_secret_in_it(attacked: Run, thresher: CommandLine, error: str) -> None:
    (attacked.directory / "bad.jsonl").write_text('{"prompt": 5, "chosen": "a", "rejected": "b"}\n')
    shutil.rmtree(attacked.output)
    with served(attacked.directory) as host:
        config = attacked.config(**filled_in(ERRORS[error], host))
        result = thresher("train", config)
    config.unlink()
    assert result.code == 2
    assert canaries_in(result.text.encode()) == []
    assert leaks(attacked.directory) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ("train", "CONFIG", "tracker_kwargs.wandb_api_key=KEY"),
        ("train", "CONFIG", "tracker_kwargs.wandb_api_key={KEY"),
        ("train", "CONFIG", "hf_token=[KEY"),
        ("submit", "CONFIG", "--address", "http://user:LOGIN@127.0.0.1:9/?QUERY"),
        ("submit", "CONFIG", "--address", "user:LOGIN@127.0.0.1:9?QUERY"),
        ("prepare", "http://user:LOGIN@127.0.0.1:9/a.jsonl?QUERY", "--model", "MODEL", "--output", "out"),
    ],
)
def test_a_secret_on_the_command_line_is_not_repeated(
    attacked: Run, thresher: CommandLine, arguments: tuple[str, ...]
) -> None:
    values = {"CONFIG": str(attacked.config()), "MODEL": str(attacked.model)}
    result = thresher(*(filled_in(values.get(each, each), "") for each in arguments))
    assert result.code == 2
    assert IN_URLS["key"] not in result.text
    assert IN_URLS["token"] not in result.text
    assert "://user:" not in result.text


def test_a_failing_tracker_is_reported_without_its_login(
    attacked: Run, thresher: CommandLine, monkeypatch: Any
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    shutil.rmtree(attacked.output)
    uri = f"http://user:{IN_URLS['login']}@127.0.0.1:9/?{QUERY}"
    config = attacked.config(track_with=["console", "mlflow"], tracker_kwargs={"mlflow_tracking_uri": uri})
    result = thresher("train", config)
    config.unlink()
    assert result.code == 0
    assert "tracker mlflow failed" in result.text
    assert canaries_in(result.text.encode()) == []
    assert leaks(attacked.directory) == []


def test_an_unexpected_error_is_shown_without_secrets(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Libraries quote URLs in unexpected errors."""
    import thresher.cli

    def fail(**_: object) -> None:
        raise RuntimeError(f"no answer from https://user:{IN_URLS['login']}@h/a?{QUERY}")

    monkeypatch.setattr(thresher.cli, "app", fail)
    with pytest.raises(SystemExit) as left:
        thresher.cli.main()
    printed = capsys.readouterr().err
    assert left.value.code == 1
    assert "RuntimeError: no answer from https://***@h/a?token=***" in printed
    assert canaries_in(printed.encode()) == []
