"""The built packages: same bytes from any checkout, the files of the commit, and metadata that an index accepts."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.test_commands import checkout

pytestmark = pytest.mark.slow
YEARS_AGO = 1_000_000_000


@pytest.fixture(scope="module")
def commit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with one commit, which has the files of this one."""
    return checkout(tmp_path_factory.mktemp("commit"))


@pytest.fixture(scope="module")
def built(commit: Path) -> Path:
    return build(commit, timezone="UTC", umask=0o022)


def build(source: Path, *, timezone: str, umask: int) -> Path:
    """Run scripts/build, which also runs `twine check --strict`, and return the directory of the packages."""
    inherited = {name: value for name, value in os.environ.items() if name != "SOURCE_DATE_EPOCH"}
    subprocess.run(
        [source / "scripts" / "build"],
        env={**inherited, "PYTHON": sys.executable, "TZ": timezone},
        umask=umask,
        check=True,
        timeout=300,
    )
    return source / "dist"


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_commit_gives_the_same_bytes_in_another_directory_at_another_time(
    commit: Path, built: Path, tmp_path: Path
) -> None:
    clone = tmp_path / "a clone" / "of it"
    clone.parent.mkdir()
    subprocess.run(["git", "clone", "--quiet", commit, clone], check=True, umask=0o077)  # noqa: S607
    for path in files_of(clone):
        os.utime(path, (YEARS_AGO, YEARS_AGO))
    again = build(clone, timezone="Asia/Tokyo", umask=0o077)
    assert len(names(built)) == 2
    assert {name: (again / name).read_bytes() for name in names(again)} == {
        name: (built / name).read_bytes() for name in names(built)
    }


def files_of(directory: Path) -> Iterator[Path]:
    return (path for path in directory.rglob("*") if path.is_file() and ".git" not in path.relative_to(directory).parts)


def test_the_sdist_has_the_files_of_the_commit_and_no_others(commit: Path, built: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=commit, capture_output=True, text=True, check=True)  # noqa: S607
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert packed == {"PKG-INFO", *listed.stdout.rstrip("\0").split("\0")}


def test_the_packages_are_small(built: Path) -> None:
    """Data, weights or results that slip into a commit would be published."""
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    assert wheel.stat().st_size < 1.5 * 2**20
    assert sdist.stat().st_size < 4 * 2**20
    with zipfile.ZipFile(wheel) as archive:
        assert {name.split("/")[0].partition("-")[0] for name in archive.namelist()} == {"thresher"}
