"""Which files a run reads, in which order, and what their bytes are; `readers` turns them into rows.

Order: names as listed, files of a glob sorted. A digest depends on content only, never on a file's name or time.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import fsspec

from thresher.errors import UserError
from thresher.redact import redact_text

Format = Literal["json", "jsonl", "csv", "parquet", "arrow", "saved_dataset", "hub_dataset"]

FORMAT_OF_SUFFIX: dict[str, Format] = {
    ".json": "json",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".ipc": "arrow",
    ".feather": "arrow",
}
COMPRESSION_OF_SUFFIX = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}
_HUB = "hf://"


@dataclass(frozen=True)
class SourceFile:
    """One file, directory or hub data set; `size` is in bytes, 0 where unknown."""

    name: str
    format: Format
    compression: str | None = None
    size: int = 0

    @property
    def shown(self) -> str:
        """The name for messages and reports: a URL may carry a login or a signature."""
        return redact_text(self.name)

    @property
    def is_local(self) -> bool:
        return "://" not in self.name or self.name.startswith("file://")


def resolve_sources(file_names: Sequence[str]) -> list[SourceFile]:
    """List the files behind names, globs and URLs; a name that leads to no rows is a `UserError`."""
    return [source for name in file_names for source in _resolve(name)]


def _resolve(name: str) -> list[SourceFile]:
    if name.startswith(_HUB) and not _suffixes(name)[0]:
        return [SourceFile(name, "hub_dataset")]
    try:
        return _look_up(name)
    except UserError:
        raise
    except Exception as error:  # what a library for a remote place raises may be anything
        if "://" not in name:
            raise
        raise UserError(f"{name!r} cannot be reached: {error}; check the URL, the network and your login") from error


def _look_up(name: str) -> list[SourceFile]:
    filesystem, path = _filesystem(name)
    if any(mark in path for mark in "*?[") and not filesystem.exists(path):
        found = sorted(match for match in filesystem.glob(path) if not filesystem.isdir(match))
        if not found:
            raise UserError(f"no file matches {name!r}; {_nearest_mend(filesystem, path)}")
        return [_file(filesystem, match, _written_name(filesystem, name, match)) for match in found]
    if filesystem.isdir(path):
        return _resolve_directory(filesystem, path, name)
    if not filesystem.exists(path):
        _refuse_broken_link(filesystem, path, name)
        raise UserError(f"{name!r} does not exist; {_nearest_mend(filesystem, path)}")
    return [_file(filesystem, path, name)]


def _resolve_directory(filesystem: Any, path: str, name: str) -> list[SourceFile]:
    join = name.rstrip("/")
    if filesystem.exists(f"{path}/state.json") or filesystem.exists(f"{path}/dataset_info.json"):
        size = sum(entry["size"] or 0 for entry in filesystem.ls(path, detail=True) if entry["type"] == "file")
        return [SourceFile(join, "saved_dataset", size=size)]
    if filesystem.exists(f"{path}/dataset_dict.json"):
        splits = sorted(Path(entry).name for entry in filesystem.ls(path, detail=False) if filesystem.isdir(entry))
        raise UserError(
            f"{name!r} holds several splits ({', '.join(splits)}); name one, such as {join}/{(splits or ['train'])[0]}"
        )
    raise UserError(f"{name!r} is a directory that is no saved data set; name its files, such as '{join}/*.jsonl'")


def _file(filesystem: Any, path: str, name: str) -> SourceFile:
    suffix, compression = _suffixes(path)
    if suffix not in FORMAT_OF_SUFFIX:
        known = " ".join(FORMAT_OF_SUFFIX)
        raise UserError(
            f"{name!r}: cannot tell the format from {suffix or 'no suffix'}; known: {known} (+ .gz .bz2 .zst)"
        )
    _refuse_broken_link(filesystem, path, name)
    info = filesystem.info(path)
    if info["type"] not in ("file", "link"):
        # a pipe would keep its reader waiting, and could be read only once
        raise UserError(f"{name!r} is no file but a pipe, a socket or a device; write its rows to a file")
    size = int(info["size"] or 0)
    if size == 0:
        raise UserError(f"{name!r} is empty; remove it from data_args.file_name or write it again")
    return SourceFile(name, FORMAT_OF_SUFFIX[suffix], compression, size)


def _refuse_broken_link(filesystem: Any, path: str, name: str) -> None:
    link = Path(path)
    if "file" in filesystem.protocol and link.is_symlink() and not link.exists():
        raise UserError(f"{name!r} is a link to {str(link.readlink())!r}, where there is no file; mend the link")


def _suffixes(path: str) -> tuple[str, str | None]:
    # a signed URL goes on behind the name
    path = path.partition("?")[0] if "://" in path else path
    suffixes = [suffix.lower() for suffix in Path(path).suffixes]
    compression = COMPRESSION_OF_SUFFIX.get(suffixes[-1]) if suffixes else None
    if compression:
        suffixes.pop()
    return (suffixes[-1] if suffixes else ""), compression


def _filesystem(name: str) -> tuple[Any, str]:
    if "://" not in name:
        return fsspec.filesystem("file"), str(Path(name).expanduser())
    try:
        filesystem, path = fsspec.core.url_to_fs(name)
    except (ValueError, ImportError) as error:
        raise UserError(f"cannot open {name!r}: {error}") from error
    return filesystem, path


def _written_name(filesystem: Any, glob: str, match: str) -> str:
    # a file of a glob is named the way the user wrote the glob: URL, absolute or relative
    if "://" in glob:
        return str(filesystem.unstrip_protocol(match))
    return match if Path(glob).expanduser().is_absolute() else match.removeprefix(f"{Path.cwd()}/")


def _nearest_mend(filesystem: Any, path: str) -> str:
    parent = path.rsplit("/", 1)[0] if "/" in path else "."
    if not filesystem.isdir(parent):
        return f"its directory {parent!r} does not exist either"
    names = sorted(entry.rstrip("/").rsplit("/", 1)[-1] for entry in filesystem.ls(parent, detail=False))
    nearest = difflib.get_close_matches(path.rsplit("/", 1)[-1], names, n=1, cutoff=0.4)
    if nearest:
        return f"did you mean {parent}/{nearest[0]}?"
    return f"{parent!r} holds {', '.join(names[:8]) or 'nothing'}"


def open_binary(source: SourceFile) -> Any:
    """Open a source's stored bytes, not decompressed, for reading."""
    filesystem, path = _filesystem(source.name)
    try:
        return filesystem.open(path, "rb")
    except OSError as error:
        raise UserError(f"{source.name!r} cannot be opened: {error}") from error


def source_digest(source: SourceFile) -> str:
    """Digest a source's content; for a hub data set, the fingerprint that `datasets` keeps."""
    if source.format == "hub_dataset":
        return f"fingerprint:{load_hub_dataset(source.name)._fingerprint}"
    digest = hashlib.sha256()
    if source.format == "saved_dataset":
        filesystem, path = _filesystem(source.name)
        for file in sorted(filesystem.glob(f"{path}/*.arrow")):
            with filesystem.open(file, "rb") as stream:
                _feed(digest, stream)
    else:
        with open_binary(source) as stream:
            _feed(digest, stream)
    return f"sha256:{digest.hexdigest()}"


def _feed(digest: Any, stream: Any) -> None:
    while piece := stream.read(1 << 20):
        digest.update(piece)


def load_hub_dataset(name: str) -> Any:
    """Load `hf://OWNER/NAME[:SPLIT[:CONFIG]]`; the split is `train` if not named."""
    import datasets

    repo, _, rest = name.removeprefix("hf://").removeprefix("datasets/").partition(":")
    split, _, config = rest.partition(":")
    try:
        return datasets.load_dataset(repo, config or None, split=split or "train")
    # RuntimeError: a data set that is a script, which is never run
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"cannot load {name!r} from the hub: {error}; write hf://OWNER/NAME:SPLIT") from error
