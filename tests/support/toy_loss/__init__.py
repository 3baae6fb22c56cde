"""A loss of another package: `install` lays it out as pip would, in a directory for PYTHONPATH."""

from __future__ import annotations

import shutil
from pathlib import Path

ENTRY_POINTS = """[thresher.losses]
toy_floor = toy_loss.loss:ToyFloor
toy_renamed = toy_loss.loss:ToyFloor
toy_absent = toy_loss.no_such_module:Loss
"""


def install(directory: Path, name: str = "toy_loss", entry_points: str = ENTRY_POINTS) -> Path:
    """Write the package with the metadata that declares its entry points; return the directory."""
    package = directory / name
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    shutil.copy(Path(__file__).parent / "loss.py", package)
    metadata = directory / f"{name}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(entry_points)
    return directory
