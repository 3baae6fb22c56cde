"""Names of files that stand in a file, an index of weights or a manifest: whoever wrote it chose them."""

from pathlib import PurePosixPath, PureWindowsPath


def is_safe_relative_path(name: object) -> bool:
    """Say whether a name leads to a file below the directory that it is relative to, and nowhere else."""
    if not isinstance(name, str) or not name or "\0" in name or PureWindowsPath(name).is_absolute():
        return False
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and path.name != ""
