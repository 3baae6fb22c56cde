"""Attack tools for the security tests: a pickle that creates a file, and the output of a finished run."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from tests.support.compared_runs import merge


class CreateFile:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return open, (self.path, "w")


@dataclass(frozen=True)
class Canary:
    """A file that must not be created; `pickled` and `saved` create it when they are unpickled."""

    path: Path

    @property
    def pickled(self) -> bytes:
        return pickle.dumps(CreateFile(self.path))

    @property
    def saved(self) -> bytes:
        """The same in the format of torch.save."""
        stream = io.BytesIO()
        torch.save({"weight": CreateFile(self.path)}, stream)
        return stream.getvalue()

    @property
    def is_triggered(self) -> bool:
        return self.path.exists()


def unsafe_load(content: bytes) -> None:
    torch.load(io.BytesIO(content), weights_only=False)


@dataclass(frozen=True)
class CommandResult:
    """The exit code of a command, and everything that it printed."""

    code: int
    text: str


CommandLine = Callable[..., CommandResult]


@dataclass(frozen=True)
class Run:
    """A run of two steps and its output: checkpoints, prepared pairs, logs and the reference cache."""

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


def values_of(directory: Path) -> dict[str, Any]:
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


def update_manifest(checkpoint: Path) -> None:
    """Write a manifest that matches a checkpoint's files, as an attacker can: digests are not signatures."""
    from thresher.checkpoint.manifest import Manifest, list_files, record_files, write_manifest

    step = int(checkpoint.name.removeprefix("step-"))
    write_manifest(checkpoint, Manifest(step, record_files(checkpoint, list_files(checkpoint))))
