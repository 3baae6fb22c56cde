"""A strategy of another package: `install` lays it out as pip would, in a directory for PYTHONPATH."""

from __future__ import annotations

import shutil
from pathlib import Path


def install(directory: Path) -> Path:
    """Write the package `toy_strategy` with the metadata that declares its entry points; return the directory."""
    source = Path(__file__).parent
    package = directory / "toy_strategy"
    package.mkdir(parents=True)
    for name in ("declaration.py", "engine.py"):
        shutil.copy(source / name, package)
    (package / "__init__.py").touch()
    metadata = directory / "toy_strategy-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-strategy\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[thresher.strategies]\n"
        "toy_train = toy_strategy.declaration:TRAIN\n"
        "toy_infer = toy_strategy.declaration:INFER\n"
        "absent_train = toy_strategy.declaration:ABSENT\n"
    )
    return directory
