"""Losses of the user in pref_loss: the digests of their files, which a checkpoint keeps with the config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from thresher.imported_function import digest_of


def with_digests(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config's values with the digest of each Python file that pref_loss names."""
    given = values.get("pref_loss")
    names = [given] if isinstance(given, str) else given if isinstance(given, (list, Mapping)) else []
    files = {name: digest_of(name) for name in names if isinstance(name, str) and ".py:" in name}
    found = {name: digest for name, digest in files.items() if digest is not None}
    kept = {name: value for name, value in values.items() if name != "pref_loss_digests"}
    return {**kept, "pref_loss_digests": found} if found else kept
