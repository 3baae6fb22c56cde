"""A package that is not thresher adds a loss through an entry point: names, config, training, also on Ray.

Each test runs a process with the package on PYTHONPATH: importing it registers its loss for the rest of a process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support import toy_loss
from tests.support.compared_runs import merge, metric_log
from tests.support.small_run_fixtures import base

__all__ = ["base"]  # a fixture


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_loss.install(tmp_path_factory.mktemp("toy"))


def python(arguments: list[str], *directories: Path) -> subprocess.CompletedProcess[str]:
    """Run Python with installed packages in the directories."""
    paths = [*map(str, directories), *filter(None, sys.path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False, timeout=600
    )


def described(losses: list[Any], *directories: Path) -> list[str]:
    """Build an objective of each loss in a process; return their formulas, or the messages of their UserErrors."""
    code = (
        "import json, sys\n"
        "from thresher.builders.objective import build_objective\n"
        "from thresher.config import parse_config\n"
        "from thresher.errors import UserError\n"
        "def described(loss):\n"
        "    try:\n"
        "        return build_objective(parse_config({'pref_loss': loss})).describe()\n"
        "    except UserError as error:\n"
        "        return str(error)\n"
        "print(json.dumps([described(loss) for loss in json.loads(sys.argv[1])]))\n"
    )
    done = python(["-c", code, json.dumps(losses)], *directories)
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout)
    return found


def test_its_loss_is_listed(directory):
    table = python(["-m", "thresher", "losses"], directory).stdout
    assert "toy_floor" in table
    assert "beta=0.1, floor=0" in table
    assert "toy_absent" not in table


def test_its_loss_takes_its_parameters_and_a_mistake_is_reported_by_name(directory):
    cases: list[tuple[Any, str]] = [
        (
            {"toy_floor": {"weight": 0.5, "floor": 0.2}, "sft": 1.0},
            "0.5 * toy_floor(beta=0.1, floor=0.2) + 1.0 * sft",
        ),
        ({"toy_floor": {"ceiling": 1.0}}, "unknown parameter 'ceiling'; toy_floor has beta, floor"),
        ("toy_flor", "unknown loss 'toy_flor', did you mean 'toy_floor'?; the losses are "),
        (
            "toy_absent",
            "the loss toy_absent cannot be loaded from toy_loss.no_such_module:Loss: ModuleNotFoundError: No module",
        ),
        (
            "toy_renamed",
            "toy_loss.loss:ToyFloor is not registered as the loss toy_renamed; decorate its class with "
            "@register('toy_renamed')",
        ),
    ]
    texts = described([loss for loss, _ in cases], directory)
    for text, (_, start) in zip(texts, cases, strict=True):
        assert text.startswith(start)


def test_a_name_of_two_packages_is_an_error(directory, tmp_path):
    twin = toy_loss.install(tmp_path, "toy_twin", "[thresher.losses]\ntoy_floor = toy_twin.loss:ToyFloor\n")
    (message,) = described(["toy_floor"], directory, twin)
    assert message.startswith("two installed packages declare the loss toy_floor: ")
    assert message.endswith("uninstall one of them")


def test_a_package_cannot_replace_a_loss_of_thresher(tmp_path):
    taken = toy_loss.install(tmp_path, "toy_taken", "[thresher.losses]\nsigmoid = toy_taken.loss:ToyFloor\n")
    loss = tmp_path / "toy_taken" / "loss.py"
    loss.write_text(loss.read_text().replace('"toy_floor"', '"sigmoid"'))
    clash, other = described(["sigmoid", "hinge"], taken)
    assert clash.endswith("cannot be loaded from toy_taken.loss:ToyFloor: ValueError: two losses are named sigmoid")
    assert other == "hinge(beta=0.1)"


@pytest.fixture
def losses_of(base, directory, tmp_path):
    """Train in a process that sees the package; return the losses of the steps."""

    def train(name: str, changes: dict[str, Any]) -> list[float]:
        values = merge(base, {"output_dir": str(tmp_path / name), "max_steps": 2, **changes})
        config = tmp_path / f"{name}.yaml"
        config.write_text(yaml.safe_dump(values))
        done = python(["-m", "thresher", "train", str(config)], directory)
        assert done.returncode == 0, done.stdout + done.stderr
        return [record["loss"] for record in metric_log(tmp_path / name) if "loss" in record]

    return train


def test_a_run_trains_with_its_loss(losses_of):
    assert losses_of("plain", {"pref_loss": "toy_floor"}) == losses_of("sigmoid", {"pref_loss": "sigmoid"})


@pytest.mark.distributed
def test_workers_on_ray_import_its_package(losses_of):
    # Ray that the run starts itself: its workers inherit PYTHONPATH, which a node that runs already has not seen
    two = {"runtime": "ray", "actor_train": {"num_workers": 2}}
    assert losses_of("ray", {"pref_loss": {"toy_floor": {"floor": 10.0}}, **two}) == [10.0, 10.0]
