"""What a config names outside of thresher: package.module:function, path/to/file.py:function, or an entry point."""

from __future__ import annotations

import hashlib
import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from thresher.errors import UserError


def find_entry_points(group: str, kind: str) -> dict[str, EntryPoint]:
    """Return the entry points of a group in all installed packages, by name; a name of two of them is an error."""
    found: dict[str, EntryPoint] = {}
    for each in entry_points(group=group):
        other = found.setdefault(each.name, each)
        if other.value != each.value:
            both = f"{other.value} and {each.value}"
            raise UserError(f"two installed packages declare the {kind} {each.name}: {both}; uninstall one of them")
    return found


def import_function(location: str, setting: str, source: bytes | None = None) -> Callable[..., Any]:
    """Import the function that a setting names, from `source` if another process has read the file."""
    module, separator, name = location.rpartition(":")
    if not separator or not name:
        raise UserError(
            f"{setting} is {location!r}, which names no function; write package.module:function or "
            "path/to/file.py:function"
        )
    try:
        if module.endswith(".py"):
            imported = _run_file(Path(module), read_source(location) if source is None else source)
        else:
            imported = importlib.import_module(module)
    except Exception as error:  # the user's module may raise anything
        raise UserError(f"{setting}: cannot import {module}: {type(error).__name__}: {error}") from error
    function = getattr(imported, name, None)
    if not callable(function):
        raise UserError(f"{setting}: {module} has no function {name}; check the spelling")
    return function  # type: ignore[no-any-return]


def read_source(location: str) -> bytes | None:
    """Read the file of a location; None for a location in a package."""
    module = location.rpartition(":")[0]
    if not module.endswith(".py"):
        return None
    try:
        return Path(module).read_bytes()
    except FileNotFoundError:
        raise FileNotFoundError(f"{module} does not exist") from None


def digest_of(location: str) -> str | None:
    """Return the SHA-256 of a location's file; None for a location in a package or a file that cannot be read."""
    try:
        source = read_source(location)
    except OSError:  # reported when the function is imported
        return None
    return None if source is None else hashlib.sha256(source).hexdigest()


class _Source(importlib.abc.InspectLoader):
    """Loads a module from the content of its file, which may be on another machine."""

    def __init__(self, path: Path, source: bytes) -> None:
        self._path = path
        self._source = source

    def get_source(self, fullname: str) -> str:  # noqa: ARG002
        return importlib.util.decode_source(self._source)

    def get_code(self, fullname: str) -> CodeType:  # noqa: ARG002
        return self.source_to_code(self._source, str(self._path))


def _run_file(path: Path, source: bytes | None) -> ModuleType:
    content = source or b""
    name = f"thresher_user_{path.stem}_{hashlib.sha256(content).hexdigest()[:8]}"
    spec = importlib.util.spec_from_loader(name, _Source(path, content), origin=str(path.resolve()))
    assert spec is not None  # noqa: S101
    assert spec.loader is not None  # noqa: S101
    module = importlib.util.module_from_spec(spec)
    module.__file__ = str(path.resolve())
    sys.modules[name] = module  # dataclasses of the file look their module up
    spec.loader.exec_module(module)
    return module
