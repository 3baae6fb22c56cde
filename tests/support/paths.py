"""The checkout, and the real data and models beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared"


def shared_path(*parts: str) -> Path:
    """A file of the real data beside the checkout; the test is skipped where it is missing."""
    path = SHARED.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"needs ../shared/{'/'.join(parts)}, which is not beside this checkout")
    return path
