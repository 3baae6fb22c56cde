"""Resolve paths, globs and URLs to source files, open them, and digest their content; `readers` reads their rows.

Order: names as listed, files of a glob sorted. A digest depends on content only, never on a file's name or time.
"""

from __future__ import annotations

import difflib
import glob
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
_HUB_NAME = re.compile(r"hf://((?:datasets/)?[^/:@]+/[^/:@]+)(.*)")
_HUB_DATASET = re.compile(r"\w[\w-]*/\w[\w.-]*(:[\w./-]+)*")


def find_in_directory(name: str, directory: str | None) -> str:
    """Return a relative path or glob in `directory`, unless it exists as it is, exists nowhere or is a URL."""
    if directory is None or "://" in name:
        return name
    inside = str(Path(directory) / name)
    return inside if not glob.glob(name) and glob.glob(inside) else name  # noqa: PTH207


def at_revision(name: str, revision: str | None) -> str:
    """Name a revision of a Hub dataset, hf://OWNER/NAME@REVISION, unless the name has one."""
    match = _HUB_NAME.fullmatch(name)
    if revision is None or match is None or match[2].startswith("@"):
        return name
    return f"{_HUB}{match[1]}@{revision}{match[2]}"


def at_split(name: str, split: str | None) -> str:
    """Name a split: hf://OWNER/NAME:SPLIT, or a directory below a saved dataset."""
    if split is None:
        return name
    if _suffixes(name)[0] in FORMAT_OF_SUFFIX or (name.startswith(_HUB) and ":" in name.removeprefix(_HUB)):
        raise UserError(f"{name} is a file or names a split itself, so split={split} has no effect; remove split")
    return f"{name}:{split}" if name.startswith(_HUB) else f"{name.rstrip('/')}/{split}"


@dataclass(frozen=True)
class SourceFile:
    """One file, saved dataset directory or Hub dataset."""

    name: str
    format: Format
    compression: str | None = None
    size: int = 0  # in bytes, 0 if unknown
    max_rows: int | None = None  # only the first rows are read

    @property
    def shown(self) -> str:
        """The name for messages and reports, with secrets masked: a URL may contain a login or a signature."""
        return redact_text(self.name)

    @property
    def is_local(self) -> bool:
        return "://" not in self.name or self.name.startswith("file://")


def resolve_sources(file_names: Sequence[str]) -> list[SourceFile]:
    """List the files of names, globs and URLs; a name without a readable file is a `UserError`."""
    return [source for name in file_names for source in _resolve(name)]


def _resolve(name: str) -> list[SourceFile]:
    if _is_hub_dataset(name):
        return [SourceFile(name, "hub_dataset")]
    try:
        return _find_files(name)
    except UserError:
        raise
    except Exception as error:  # remote filesystem libraries may raise anything
        if "://" not in name:
            raise
        raise UserError(f"{name!r} cannot be reached: {error}; check the URL, the network and your login") from error


def _is_hub_dataset(name: str) -> bool:
    """Tell a Hub dataset from a file on the Hub; a dot in OWNER/NAME or in a revision is not a suffix."""
    suffix, match = _suffixes(name)[0], _HUB_NAME.fullmatch(name)
    is_whole = match is not None and match[2][:1] in ("", "@", ":") and suffix not in FORMAT_OF_SUFFIX
    return name.startswith(_HUB) and (not suffix or is_whole)


def _find_files(name: str) -> list[SourceFile]:
    filesystem, path = _filesystem(name)
    if any(character in path for character in "*?[") and not filesystem.exists(path):
        found = sorted(match for match in filesystem.glob(path) if not filesystem.isdir(match))
        if not found:
            raise UserError(f"no file matches {name!r}; {_suggestion(filesystem, path)}")
        return [_file(filesystem, match, _name_like_glob(filesystem, name, match)) for match in found]
    if filesystem.isdir(path):
        return _resolve_directory(filesystem, path, name)
    if not filesystem.exists(path):
        _reject_broken_link(filesystem, path, name)
        is_hub_name = _HUB_DATASET.fullmatch(name) and _suffixes(name)[0] not in FORMAT_OF_SUFFIX
        hub = f"; a dataset of the Hugging Face Hub is named {_HUB}{name}" if is_hub_name else ""
        raise UserError(f"{name!r} does not exist; {_suggestion(filesystem, path)}{hub}")
    return [_file(filesystem, path, name)]


def _resolve_directory(filesystem: Any, path: str, name: str) -> list[SourceFile]:
    directory = name.rstrip("/")
    if filesystem.exists(f"{path}/state.json") or filesystem.exists(f"{path}/dataset_info.json"):
        size = sum(entry["size"] or 0 for entry in filesystem.ls(path, detail=True) if entry["type"] == "file")
        return [SourceFile(directory, "saved_dataset", size=size)]
    if filesystem.exists(f"{path}/dataset_dict.json"):
        splits = sorted(Path(entry).name for entry in filesystem.ls(path, detail=False) if filesystem.isdir(entry))
        split = "train" if "train" in splits or not splits else splits[0]
        raise UserError(f"{name!r} has several splits ({', '.join(splits)}); name one, such as {directory}/{split}")
    names = sorted(Path(entry).name for entry in filesystem.ls(path, detail=False))
    names = [each for each in names if not each.startswith(".")]  # not data: .gitattributes, .cache
    parts = [each for each in names if filesystem.isdir(f"{path}/{each}")]
    # shards of one dataset, as ColossalChat writes them
    if parts and all(filesystem.exists(f"{path}/{part}/state.json") for part in parts):
        return [each for part in parts for each in _resolve_directory(filesystem, f"{path}/{part}", f"{name}/{part}")]
    if not parts and len({FORMAT_OF_SUFFIX.get(_suffixes(each)[0]) for each in names}) == 1:
        return [_file(filesystem, f"{path}/{each}", f"{directory}/{each}") for each in names]
    raise UserError(_mixed_directory(directory, names))


def _mixed_directory(directory: str, names: Sequence[str]) -> str:
    found = f"contains {', '.join(names[:8])}{', ...' if names[8:] else ''}" if names else "is empty"
    data = next((each for each in names if _suffixes(each)[0] in FORMAT_OF_SUFFIX), None)
    if data is None:
        return f"{directory!r} is a directory without data files: it {found}"
    suffixes = Path(data).suffixes[-2 if _suffixes(data)[1] else -1 :]
    return (
        f"{directory!r} is a directory that contains more than files of one format: it {found}; name the files, such "
        f"as '{directory}/*{''.join(suffixes)}'"
    )


def _file(filesystem: Any, path: str, name: str) -> SourceFile:
    suffix, compression = _suffixes(path)
    if suffix not in FORMAT_OF_SUFFIX:
        known = " ".join(FORMAT_OF_SUFFIX)
        raise UserError(
            f"{name!r}: unknown suffix {suffix or '(none)'}; use one of {known}, optionally with .gz .bz2 .zst"
        )
    _reject_broken_link(filesystem, path, name)
    info = filesystem.info(path)
    if info["type"] not in ("file", "link"):
        # reading a pipe may block, and works only once
        raise UserError(f"{name!r} is a pipe, a socket or a device; write its rows to a regular file")
    size = int(info["size"] or 0)
    if size == 0:
        raise UserError(f"{name!r} is empty; write it again, or do not name it")
    return SourceFile(name, FORMAT_OF_SUFFIX[suffix], compression, size)


def _reject_broken_link(filesystem: Any, path: str, name: str) -> None:
    link = Path(path)
    if "file" in filesystem.protocol and link.is_symlink() and not link.exists():
        raise UserError(f"{name!r} is a broken symlink to {str(link.readlink())!r}; fix or remove it")


def _suffixes(path: str) -> tuple[str, str | None]:
    # a signed URL has a query string after the name
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


def _name_like_glob(filesystem: Any, glob: str, match: str) -> str:
    # a URL, absolute or relative like the glob
    if "://" in glob:
        return str(filesystem.unstrip_protocol(match))
    return match if Path(glob).expanduser().is_absolute() else match.removeprefix(f"{Path.cwd()}/")


def _suggestion(filesystem: Any, path: str) -> str:
    parent = path.rsplit("/", 1)[0] if "/" in path else "."
    if not filesystem.isdir(parent):
        return f"its directory {parent!r} does not exist either"
    entries = (entry.rstrip("/").rsplit("/", 1)[-1] for entry in filesystem.ls(parent, detail=False))
    wanted = path.rsplit("/", 1)[-1]
    names = sorted(name for name in entries if wanted.startswith(".") or not name.startswith("."))
    nearest = difflib.get_close_matches(wanted, names, n=1, cutoff=0.4)
    if nearest:
        return f"did you mean {parent}/{nearest[0]}?"
    return f"{parent!r} contains {', '.join(names[:8]) or 'no files'}"


def open_binary(source: SourceFile) -> Any:
    """Open a source for reading its stored bytes, without decompression."""
    filesystem, path = _filesystem(source.name)
    try:
        return filesystem.open(path, "rb")
    except OSError as error:
        raise UserError(f"{source.name!r} cannot be opened: {error}") from error


def source_digest(source: SourceFile) -> str:
    """Digest the content of a source; for a Hub dataset, return the fingerprint from `datasets`."""
    if source.format == "hub_dataset":
        return f"fingerprint:{load_hub_dataset(source.name)._fingerprint}"
    names = [source.name]
    if source.format == "saved_dataset":
        filesystem, path = _filesystem(source.name)
        names = [f"{source.name}/{Path(file).name}" for file in sorted(filesystem.glob(f"{path}/*.arrow"))]
    digest = hashlib.sha256()
    for name in names:
        with open_binary(replace(source, name=name)) as stream:
            while piece := stream.read(1 << 20):
                digest.update(piece)
    return f"sha256:{digest.hexdigest()}"


def load_hub_dataset(name: str) -> Any:
    """Load `hf://OWNER/NAME[@REVISION][:SPLIT[:CONFIG]]`; the default split is `train`."""
    import datasets

    repo, _, rest = name.removeprefix("hf://").removeprefix("datasets/").partition(":")
    repo, _, revision = repo.partition("@")
    split, _, config = rest.partition(":")
    try:
        return datasets.load_dataset(repo, config or None, split=split or "train", revision=revision or None)
    # RuntimeError: a dataset with a loading script, which `datasets` refuses to run
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"cannot load {name!r} from the Hub: {error}; write hf://OWNER/NAME:SPLIT") from error
