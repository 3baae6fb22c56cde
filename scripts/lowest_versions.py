"""Print pip constraints: the lowest version of each package that thresher imports, others not above constraints.txt.

Run from the checkout: python -m scripts.lowest_versions
"""

from __future__ import annotations

import tomllib

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts.audit import ROOT, read_pins

# the other extras hold tools, or engines that are planned
EXTRAS = ("ray", "gguf", "tensorboard", "wandb", "mlflow", "trackio", "report", "quantization", "schedule-free")


def lowest_versions() -> dict[str, str]:
    """The lower bound of each requirement of the package and of `EXTRAS`, by canonical name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    texts = [*project["dependencies"], *(text for extra in EXTRAS for text in project["optional-dependencies"][extra])]
    lowest: dict[str, str] = {}
    for requirement in map(Requirement, texts):
        (bound,) = [part.version for part in requirement.specifier if part.operator == ">="]
        lowest[canonicalize_name(requirement.name)] = bound
    return lowest


def main() -> None:
    lowest = lowest_versions()
    pinned = read_pins((ROOT / "constraints.txt").read_text(encoding="utf-8")).versions
    for name, version in lowest.items():
        print(f"{name}=={version}")
    for name, version in pinned.items():
        if name not in lowest:
            print(f"{name}<={version}")


if __name__ == "__main__":
    main()
