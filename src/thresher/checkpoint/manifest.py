"""The manifest of a checkpoint: the size and digest of every file, which `verify` checks.

Decides the format on disk. It contains no time stamp: saving the same state twice writes the same bytes.
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thresher.checkpoint.json_io import Json, encode, load_json, save_json
from thresher.errors import CheckpointError

FORMAT = 1
MANIFEST_NAME = "manifest.json"
_HINT = "resume from another checkpoint, or with `auto` from the newest valid one"


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
    files: dict[str, Json] = {
        name: {"size": record.size, "sha256": record.sha256} for name, record in sorted(manifest.files.items())
    }
    body: dict[str, Json] = {
        "format": FORMAT,
        "step": manifest.step,
        "metrics": dict(manifest.metrics),
        "metadata": {},  # unused, but part of format 1
        "files": files,
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
        raise CheckpointError(
            f"{path} has format {content.get('format')!r}, and this version reads format {FORMAT}; "
            "resume with the version that wrote it"
        )
    digest = content.pop("sha256", None)
    try:
        is_modified = digest != _digest_of(content)
        manifest = None if is_modified else _parse(content)
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a manifest ({error}); {_HINT}") from error
    if manifest is None:
        raise CheckpointError(f"{path} was modified after it was written; {_HINT}")
    return manifest


def _parse(content: Mapping[str, Any]) -> Manifest:
    files = {
        name: FileRecord(size=record["size"], sha256=record["sha256"]) for name, record in content["files"].items()
    }
    manifest = Manifest(content["step"], files, content["metrics"])
    is_valid = (
        type(manifest.step) is int
        and all(type(each.size) is int and type(each.sha256) is str for each in files.values())
        and all(type(value) in (int, float) for value in manifest.metrics.values())
    )
    if not is_valid:
        raise TypeError("a value has the wrong type")
    return manifest


def verify(directory: Path, *, digests: bool | Collection[str] = True) -> Manifest:
    """Check names and sizes of all files; raise a `CheckpointError` that lists every problem.

    digests: compare those of all files, of none, or of the named ones.
    """
    if not directory.is_dir():
        raise CheckpointError(f"there is no checkpoint at {directory}; check the path, or resume with `auto`")
    manifest = read_manifest(directory)
    present = set(list_files(directory))
    problems = [f"{name} is missing" for name in sorted(manifest.files.keys() - present)]
    problems += [f"{name} is not in the manifest" for name in sorted(present - manifest.files.keys())]
    right_size = []
    for name in sorted(present & manifest.files.keys()):
        size = (directory / name).stat().st_size
        if size == manifest.files[name].size:
            right_size.append(name)
        else:
            problems.append(f"{name} has {size} bytes instead of {manifest.files[name].size}")
    hashed = [name for name in right_size if digests is True or (digests is not False and name in digests)]
    records = record_files(directory, hashed)
    problems += [f"{name} does not match its digest" for name in hashed if records[name] != manifest.files[name]]
    if problems:
        raise failed_verification(directory, problems)
    return manifest


def failed_verification(directory: Path, problems: Sequence[str]) -> CheckpointError:
    return CheckpointError(f"{directory} failed verification: {'; '.join(problems)}; {_HINT}")
