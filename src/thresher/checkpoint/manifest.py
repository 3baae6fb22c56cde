"""The checkpoint manifest: the size and digest of every file, verified by one process or by all of them together.

Decides the format on disk. It contains no time stamp: saving the same state twice writes the same bytes.
"""

from __future__ import annotations

import hashlib
import re
import socket
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeAlias

from thresher import durable
from thresher.checkpoint.json_io import Json, encode, load_json, save_json, translate_read_errors
from thresher.distributed.run_on_all import Communicator, divide_by_size, run_on_all
from thresher.errors import CheckpointError

FORMAT = 1
MANIFEST_NAME = "manifest.json"
# the number of the process that wrote a file
_WRITER = re.compile(r"-(\d{5,})-of-\d{5,}\.safetensors$")
_HINT = "resume from a different checkpoint, or with `auto` from the newest valid one"
# the digests to compare: True is all, False none; or the names of files
Digests: TypeAlias = bool | Collection[str]


@dataclass(frozen=True)
class FileRecord:
    """The size in bytes and the SHA-256 of one file."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The content of one checkpoint. `files` is keyed by POSIX path relative to the checkpoint."""

    step: int
    files: Mapping[str, FileRecord]
    metrics: Mapping[str, float] = field(default_factory=dict)


def list_files(directory: Path) -> list[str]:
    """List all files below a directory, except its manifest, in sorted order."""
    names = []
    for path in sorted(directory.rglob("*")):
        if path.is_symlink():
            # its target could change after the digest was taken
            raise CheckpointError(f"{path} is a symlink, and a checkpoint contains regular files only; remove it")
        if path.is_file() and path != directory / MANIFEST_NAME:
            names.append(path.relative_to(directory).as_posix())
    return names


def record_files(directory: Path, names: Sequence[str]) -> dict[str, FileRecord]:
    """Record the size and digest of files."""
    # hashlib releases the GIL, so a few threads keep a fast disk busy
    with ThreadPoolExecutor(max_workers=4) as pool:
        return dict(zip(names, pool.map(_record, (directory / name for name in names)), strict=True))


def _record(path: Path) -> FileRecord:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileRecord(size=file.tell(), sha256=digest)


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write the manifest, including a digest of its content."""
    body: dict[str, Json] = {
        "format": FORMAT,
        "step": manifest.step,
        "metrics": dict(manifest.metrics),
        "metadata": {},  # unused, but part of format 1
        "files": {name: asdict(record) for name, record in sorted(manifest.files.items())},
    }
    save_json(directory / MANIFEST_NAME, {**body, "sha256": _digest_of(body)})


def _digest_of(body: Mapping[str, Json]) -> str:
    return hashlib.sha256(encode(body, sort_keys=True)).hexdigest()


def read_manifest(directory: Path) -> Manifest:
    """Read and check a checkpoint's manifest, but not the files that it lists."""
    path = directory / MANIFEST_NAME
    if not path.is_file():
        raise CheckpointError(f"{directory} is not a complete checkpoint: it has no {MANIFEST_NAME}; {_HINT}")
    content = load_json(path)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a manifest; {_HINT}")
    if content.get("format") != FORMAT:
        problem = f"{path} has format {content.get('format')!r}, and this version reads format {FORMAT}"
        raise CheckpointError(f"{problem}; resume with the version that wrote it")
    digest = content.pop("sha256", None)
    try:
        if digest != _digest_of(content):
            raise CheckpointError(f"{path} was modified after it was written; {_HINT}")
        files = {name: FileRecord(record["size"], record["sha256"]) for name, record in content["files"].items()}
        step, metrics = content["step"], content["metrics"]
        is_valid = type(step) is int and all(type(value) in (int, float) for value in metrics.values())
        if not is_valid or not all(type(each.size) is int and type(each.sha256) is str for each in files.values()):
            raise TypeError("a value has the wrong type")
        return Manifest(step, files, metrics)
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a manifest ({error}); {_HINT}") from error


def verify(directory: Path, *, digests: Digests = True) -> Manifest:
    """Check names, sizes and digests of files; raise a `CheckpointError` that lists every problem."""
    if not directory.is_dir():
        raise CheckpointError(f"there is no checkpoint at {directory}; check the path, or resume with `auto`")
    manifest = read_manifest(directory)
    with translate_read_errors(directory, "a checkpoint"):
        problems = _find_problems(directory, manifest.files, digests)
    if problems:
        raise failed_verification(directory, problems)
    return manifest


def _find_problems(directory: Path, recorded: Mapping[str, FileRecord], digests: Digests) -> list[str]:
    present = set(list_files(directory))
    problems = [f"{name} is missing" for name in sorted(recorded.keys() - present)]
    problems += [f"{name} is not in the manifest" for name in sorted(present - recorded.keys())]
    sizes = {name: (directory / name).stat().st_size for name in sorted(present & recorded.keys())}
    wrong = [name for name, size in sizes.items() if size != recorded[name].size]
    problems += [f"{name} has {sizes[name]} bytes instead of {recorded[name].size}" for name in wrong]
    compared = sizes if digests is True else () if digests is False else digests
    found = record_files(directory, [name for name in sizes if name in compared and name not in wrong])
    return problems + [f"{name} does not match its digest" for name in found if found[name] != recorded[name]]


def failed_verification(directory: Path, problems: Sequence[str]) -> CheckpointError:
    return CheckpointError(f"{directory} failed verification: {'; '.join(problems)}; {_HINT}")


def find_damage(directory: Path, group: Communicator) -> list[str]:
    """Compare every file with its digest on the ranks that will read it; return what is wrong, the same on all ranks.

    The files that one process wrote are hashed by one process: on the mesh that saved them, by the one that reads them.
    """

    def verify() -> list[str]:
        files = read_manifest(directory).files
        own = []
        for sets in _sets_of_files(sorted(files), group.size):
            ranks = divide_by_size([sum(files[name].size for name in names) for names in sets], group.size)
            own += [name for names, rank in zip(sets, ranks, strict=True) if rank == group.rank for name in names]
        try:
            records = record_files(directory, own)
        except OSError as error:  # the driver has seen all files
            hint = durable.open_files_hint(error) or "all workers must resume from one shared file system"
            raise CheckpointError(
                f"a worker on {socket.gethostname()} cannot read {error.filename or directory} "
                f"({error.strerror or error}); {hint}"
            ) from error
        return [f"{name} does not match its digest" for name in own if records[name] != files[name]]

    gathered = run_on_all(group, verify, "verify the checkpoint")
    return sorted(problem for problems in gathered for problem in problems)


def _sets_of_files(names: Sequence[str], num_ranks: int) -> tuple[list[list[str]], list[list[str]]]:
    """Group files so that one rank gets all files of a writer, unless there are more ranks than writers.

    Returned apart from the files that belong to no writer, to be divided apart.
    """
    by_writer: dict[int, list[str]] = {}
    others = []
    for name in names:
        if found := _WRITER.search(name):
            by_writer.setdefault(int(found[1]), []).append(name)
        else:
            others.append([name])
    of_writers = [by_writer[index] for index in sorted(by_writer)]
    if len(of_writers) < num_ranks:
        of_writers = [[name] for files in of_writers for name in files]
    return of_writers, others
