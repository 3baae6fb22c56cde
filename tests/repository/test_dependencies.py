"""The table of supported versions in docs/project/versions.md agrees with pyproject.toml and constraints.txt."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from scripts.audit import read_pins
from scripts.lowest_versions import lowest_versions
from scripts.try_dockerfile import instructions
from tests.support.paths import ROOT

# what vLLM 0.32.0 requires of the packages that thresher requires too; numpy through mistral_common and numba
VLLM = {
    "numpy": "<2.4",
    "pydantic": ">=2.12.0",
    "safetensors": ">=0.6.2",
    "torch": "==2.13.0",
    "transformers": ">=5.16.1,<5.20.0",
}


def test_the_page_lists_the_lowest_and_the_pinned_version_of_every_package() -> None:
    page = (ROOT / "docs" / "project" / "versions.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\S+) \| (\S+) \| (\S+) \| .+ \|$", page, flags=re.MULTILINE)
    pins = read_pins((ROOT / "constraints.txt").read_text(encoding="utf-8")).versions
    expected = [(name, lowest, str(pins[name])) for name, lowest in lowest_versions().items()]
    assert sorted(row for row in rows if row[0] != "package") == sorted(expected)


@pytest.mark.parametrize("name", VLLM)
def test_the_lowest_versions_fit_those_of_vllm(name: str) -> None:
    assert Version(lowest_versions()[name]) in SpecifierSet(VLLM[name])


def test_every_package_that_is_imported_is_declared() -> None:
    """A package that comes only with another one disappears when that one changes."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    declared = {canonicalize_name(Requirement(each).name) for group in groups for each in group}
    imported = {name for path in (ROOT / "src" / "thresher").rglob("*.py") for name in imports_of(path)}
    distributions = packages_distributions()
    undeclared = {
        name
        for name in imported - sys.stdlib_module_names - {"thresher"}
        if declared.isdisjoint(map(canonicalize_name, distributions.get(name, ())))
    }
    assert undeclared == set()


def imports_of(path: Path) -> set[str]:
    """The top-level packages that a file imports, also within functions."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    members = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    return {name.partition(".")[0] for name in plain | members}


DOCKERFILE, SKYPILOT = ROOT / "docker" / "Dockerfile", ROOT / "examples" / "skypilot" / "train.yaml"
INSTALLERS = [ROOT / "scripts" / name for name in ("install", "test-oldest", "first-hour", "sbom")]


@pytest.mark.parametrize("path", [*INSTALLERS, DOCKERFILE, SKYPILOT], ids=lambda path: path.name)
def test_whatever_installs_torch_installs_the_pinned_version(path: Path) -> None:
    pinned = read_pins((ROOT / "constraints.txt").read_text(encoding="utf-8")).versions["torch"]
    assert set(re.findall(r"torch==[\w.]+", path.read_text(encoding="utf-8"))) == {f"torch=={pinned}"}


@pytest.mark.parametrize(("path", "num_commands"), [(DOCKERFILE, 3), (SKYPILOT, 2)], ids=["image", "task"])
def test_images_and_tasks_install_by_the_documented_commands(path: Path, num_commands: int) -> None:
    page = (ROOT / "docs" / "get-started" / "install.md").read_text(encoding="utf-8")
    documented = re.findall(r"^pip install .+$", page, flags=re.MULTILINE)
    steps = re.findall(r"^(?:RUN|  ) ?(pip install .+)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert steps == documented[:num_commands]
    assert "torch==" in steps[0]
    assert "github.com/thresher-ai/thresher" in steps[1]


def test_the_image_runs_as_a_user_and_holds_no_secret() -> None:
    steps = list(instructions(DOCKERFILE.read_text(encoding="utf-8")))
    assert [rest for name, rest in steps if name == "USER"] == ["1000"]
    assert [rest for name, rest in steps if name == "COPY"] == ["constraints.txt /opt/constraints.txt"]
    settings = [rest for name, rest in steps if name in ("ARG", "ENV")]
    assert settings == [
        'PIP_EXTRA_INDEX_URL=""',
        "PIP_CONSTRAINT=/opt/constraints.txt PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore",
    ]
