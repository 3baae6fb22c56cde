"""The catalog of recipes: configs that start with a comment header, which says where their settings come from.

The header is YAML below `# `, up to the first line that is not a comment. Reading it imports neither torch nor the
config.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from thresher.errors import UserError, nearest

DIRECTORY = Path(__file__).parent
_HARDWARE = re.compile(r"(?:(?P<nodes>\d+) nodes of )?(?P<gpus>\d+) x (?P<gpu>[\w-]+)")
_EXPECTED = re.compile(
    r"([\d.]+) GB per GPU, ([\d.,]+) hours with full-length examples by `thresher plan`; not run on a GPU"
)


@dataclass(frozen=True)
class Recipe:
    """One recipe."""

    name: str
    text: str  # of the file, header included
    title: str
    source: str  # repository, file and commit
    hardware: str  # such as `4 nodes of 8 x h100`
    expected: str = ""  # written by scripts/update-recipes
    differs: list[str] = field(default_factory=list)  # from the source
    published: str | None = None  # the result that the source reports

    @cached_property
    def values(self) -> dict[str, Any]:
        """The config as it is written, without defaults."""
        values: dict[str, Any] = yaml.safe_load(self.text)
        return values

    @property
    def model(self) -> str:
        return str(self.values["pretrain"])

    @property
    def losses(self) -> str:
        names = self.values.get("pref_loss", "sigmoid")
        return names if isinstance(names, str) else " + ".join(names)

    @property
    def datasets(self) -> list[str]:
        """Training data, such as OWNER/NAME:SPLIT on the Hub."""
        data = self.values["actor_train"]["data_args"]
        return [part["file_name"].removeprefix("hf://") for part in data.get("sources", {"": data}).values()]

    @property
    def nodes(self) -> int:
        return int(self._hardware["nodes"] or 1)

    @property
    def gpus_per_node(self) -> int:
        return int(self._hardware["gpus"])

    @property
    def num_gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def gpu(self) -> str:
        return self._hardware["gpu"]

    @cached_property
    def _hardware(self) -> re.Match[str]:
        return _parse(_HARDWARE, self.hardware)

    @property
    def gigabytes(self) -> str:
        """Expected peak memory of a GPU."""
        return _parse(_EXPECTED, self.expected)[1]

    @property
    def hours(self) -> str:
        """Expected hours if every pair is as long as sequence_length allows."""
        return _parse(_EXPECTED, self.expected)[2]


def all_recipes() -> list[Recipe]:
    return [_read(path) for path in sorted(DIRECTORY.glob("*.yaml"), key=lambda path: path.stem)]


def find_recipe(name: str) -> Recipe:
    """Return the recipe of this name; UserError with the nearest one if there is none."""
    names = [path.stem for path in DIRECTORY.glob("*.yaml")]
    if name not in names:
        near = nearest(name, names)
        hint = f"did you mean {near}? " if near else ""
        raise UserError(f"no recipe is called {name}; {hint}`thresher recipes ls` lists all")
    return _read(DIRECTORY / f"{name}.yaml")


def _read(path: Path) -> Recipe:
    text = path.read_text(encoding="utf-8")
    lines = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").removeprefix(" "))
    return Recipe(name=path.stem, text=text, **yaml.safe_load("\n".join(lines)))


def _parse(pattern: re.Pattern[str], text: str) -> re.Match[str]:
    if (found := pattern.fullmatch(text)) is None:
        raise ValueError(f"{text!r} is not written as {pattern.pattern!r}")
    return found
