"""The seam for other trainers' names. A run needs none of them, so this file imports none.

The command line and `import thresher` install the importers; configs then read ROLL's keys, accept TRL's names in
Python, and explain the unknown keys of other trainers.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, cast


class ForeignNames:
    """What is known about names that are not ours: nothing, unless importers are installed."""

    def read_own_keys(self, values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """Translate ROLL's own keys in a config's values; also return a line for each."""
        return dict(values), []

    def from_python(self, root: type[Any], given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:  # noqa: ARG002
        """Return the arguments of `DPOConfig(...)` in sections, and the options that only DPOTrainer uses."""
        return dict(given), {}

    def trl_arguments(self, config: Any) -> dict[str, Any]:
        """Return the settings under TRL's names."""
        return {name: getattr(config, name) for name in type(config).model_fields}

    def hint(self, path: str) -> str | None:  # noqa: ARG002
        """Say what a key of another trainer is called here, or why there is none."""
        return None

    def names_of_other_trainers(self) -> dict[str, str]:
        """Map other trainers' names to our keys, for suggestions by spelling."""
        return {}

    def find_trainer(self, path: Path) -> str | None:  # noqa: ARG002
        """Return the title of the trainer whose config a file is; None for ours, and for ROLL's."""
        return None


_installed: str | None = None


def install(module: str | None) -> None:
    """Use the functions of a module from now on; it is imported when a config needs them, because it is large."""
    global _installed
    _installed = module


def foreign() -> ForeignNames:
    """Return what is installed."""
    return ForeignNames() if _installed is None else cast("ForeignNames", import_module(_installed))
