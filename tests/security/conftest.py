"""A small finished run to attack, the command line in this process, and a pickle that leaves a trace when it is read."""

from __future__ import annotations

import io
import pickle
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "runtime"))
from small_runs import make_base

from compared_runs import merge


class Leave:
    """Make a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return open, (self.path, "w")


@dataclass(frozen=True)
class Canary:
    """A file that must not come to be; `pickled` and `saved` make it when they are unpickled."""

    path: Path

    @property
    def pickled(self) -> bytes:
        return pickle.dumps(Leave(self.path))

    @property
    def saved(self) -> bytes:
        """The same as torch.save writes it."""
        stream = io.BytesIO()
        torch.save({"weight": Leave(self.path)}, stream)
        return stream.getvalue()

    @property
    def sings(self) -> bool:
        return self.path.exists()


@pytest.fixture
def canary(tmp_path: Path) -> Iterator[Canary]:
    """A canary that was seen to sing, and that must not have sung again when the test ends."""
    canary = Canary(tmp_path / "canary")
    for loads in (lambda: pickle.loads(canary.pickled), lambda: unsafe_load(canary.saved)):  # noqa: S301
        loads()
        assert canary.sings
        canary.path.unlink()
    yield canary
    assert not canary.sings


def unsafe_load(content: bytes) -> None:
    torch.load(io.BytesIO(content), weights_only=False)


@dataclass(frozen=True)
class Ended:
    """How a command ended, and all that it printed."""

    code: int
    text: str


CommandLine = Callable[..., Ended]


@pytest.fixture
def thresher(monkeypatch: pytest.MonkeyPatch, capfd: Any, tmp_path: Path) -> CommandLine:
    """Run `thresher` with arguments; a mistake may show no traceback."""
    from thresher.cli import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: object) -> Ended:
        monkeypatch.setattr(sys, "argv", ["thresher", *map(str, arguments)])
        code = 0
        try:
            main()
        except SystemExit as left:
            code = int(left.code or 0)
        printed = capfd.readouterr()
        assert "Traceback" not in printed.err, printed.err
        return Ended(code, printed.out + printed.err)

    return run


@dataclass(frozen=True)
class Run:
    """A run of two steps with all that it left: checkpoints, prepared pairs, logs and the reference cache."""

    directory: Path
    values: dict[str, Any]

    @property
    def output(self) -> Path:
        return self.directory / "output"

    @property
    def cache(self) -> Path:
        return self.directory / "cache"

    @property
    def model(self) -> Path:
        return self.directory / "policy"

    @property
    def rows(self) -> Path:
        return self.directory / "train.jsonl"

    @property
    def checkpoint(self) -> Path:
        return max((self.output / "checkpoints").iterdir())

    @property
    def store(self) -> Path:
        return next(path for path in (self.output / "data").iterdir() if path.is_dir())

    def config(self, **changes: Any) -> Path:
        """Write the config of a run like this one, with some values changed."""
        path = self.directory / "config.yaml"
        path.write_text(yaml.safe_dump(merge(self.values, changes)))
        return path


def _values(directory: Path) -> dict[str, Any]:
    data = {"file_name": str(directory / "train.jsonl"), "template": "raw"}
    return merge(
        {
            "pretrain": str(directory / "policy"),
            "output_dir": str(directory / "output"),
            "max_steps": 2,
            "save_steps": 1,
            "sequence_length": 64,
            "track_with": [],
            "async_save": False,
        },
        {
            "actor_train": {
                "model_args": {"dtype": "fp32"},
                "data_args": data,
                "training_args": {"learning_rate": 0.01, "per_device_train_batch_size": 4},
            },
            "reference": {"mode": "precompute", "cache_dir": str(directory / "cache")},
        },
    )


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    from thresher.config import parse_config
    from thresher.pipeline import DPOPipeline

    directory = tmp_path_factory.mktemp("finished")
    make_base(directory)
    run = Run(directory, _values(directory))
    DPOPipeline(parse_config(run.values)).run()
    return run


@pytest.fixture
def attacked(finished_run: Run, tmp_path: Path) -> Run:
    """A copy of a finished run to do harm to."""
    directory = tmp_path / "attacked"
    shutil.copytree(finished_run.directory, directory)
    for checkpoint in (directory / "output" / "checkpoints").iterdir():
        config = checkpoint / "config.json"
        config.write_text(config.read_text().replace(str(finished_run.directory), str(directory)))
        sign(checkpoint)
    return Run(directory, _values(directory))


def sign(checkpoint: Path) -> None:
    """Write the manifest that a checkpoint's files deserve, as a hostile writer would: digests are no signatures."""
    from thresher.checkpoint.manifest import Manifest, list_files, record_files, write_manifest

    step = int(checkpoint.name.removeprefix("step-"))
    write_manifest(checkpoint, Manifest(step, record_files(checkpoint, list_files(checkpoint))))
