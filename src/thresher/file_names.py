"""Check file names read from untrusted files, such as a weight index or a manifest."""

from pathlib import PurePosixPath, PureWindowsPath


def is_safe_relative_path(name: object) -> bool:
    """Return whether a relative name stays below its directory."""
    if not isinstance(name, str) or not name or "\0" in name or PureWindowsPath(name).is_absolute():
        return False
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and path.name != ""
