"""Models, the expected outcomes, and the table of cases that agreed.

`pytest tests/engines --parity-table docs/internals/testing.md` writes the table.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from tests.support.engines.parity import Case, Outcome, save_model, train_oracle, train_single_process
from tests.support.engines.parity_cases import ALL_CASES, write_table
from tests.support.engines.rank_pool import RankPool
from thresher.distributed.mesh import ParallelDims

Train = Callable[[Case, int], Outcome]  # the case, and the number of layers of its models


@pytest.fixture
def two_ranks(pool_of) -> RankPool:
    return pool_of(2)


@pytest.fixture
def four_ranks(pool_of) -> RankPool:
    return pool_of(4)


@pytest.fixture(scope="session")
def model_dirs(tmp_path_factory) -> Callable[..., tuple[Path, Path]]:
    """A policy and a different reference of an architecture."""

    @cache
    def save(family: str, num_layers: int = 4) -> tuple[Path, Path]:
        directory = tmp_path_factory.mktemp(family)
        policy, reference = directory / "policy", directory / "reference"
        return save_model(policy, family, 0, num_layers), save_model(reference, family, 1, num_layers)

    return save


@pytest.fixture(scope="session")
def remembered(tmp_path_factory) -> Callable[[str, Train], Train]:
    """Keep outcomes by case and number of layers in files that the processes of a test run share."""
    root = tmp_path_factory.getbasetemp()
    directory = (root.parent if os.environ.get("PYTEST_XDIST_WORKER") else root) / "outcomes"
    directory.mkdir(exist_ok=True)

    def remember(name: str, train: Train) -> Train:
        def find(case: Case, num_layers: int) -> Outcome:
            file = directory / f"{name}-{num_layers}-{hashlib.sha256(repr(case).encode()).hexdigest()}"
            if not file.exists():
                unfinished = file.with_suffix(f".{os.getpid()}")
                unfinished.write_bytes(pickle.dumps(train(case, num_layers)))
                unfinished.rename(file)
            return pickle.loads(file.read_bytes())  # noqa: S301  # written above

        return cache(find)

    return remember


@pytest.fixture(scope="session")
def oracle(model_dirs, remembered) -> Callable[[Case], Outcome]:
    """The outcome of examples/minimal_dpo.py, which ignores mesh, layout and micro-batches."""
    train = remembered("oracle", lambda case, layers: train_oracle(case, *model_dirs(case.family, layers)))
    plain = Case(ParallelDims())
    ignored_by_oracle = {
        name: getattr(plain, name)
        for name in (
            *("sizes", "layout", "also", "tokens_at_once", "dtype"),
            *("virtual_pp_size", "zero_stage", "sequence_parallel", "recompute", "offloads_activations"),
            *("reduce_dtype", "pp_schedule", "pp_dtype", "compiles", "engine"),
        )
    }
    return lambda case: train(replace(case, **ignored_by_oracle), case.num_layers)


@pytest.fixture(scope="session")
def one_process(model_dirs, remembered) -> Callable[[Case], Outcome]:
    """The outcome of the native engine in one process."""
    train = remembered("one process", lambda case, layers: train_single_process(case, *model_dirs(case.family, layers)))
    plain = Case(ParallelDims())
    of_the_mesh = (
        "virtual_pp_size",
        "zero_stage",
        "sequence_parallel",
        "reduce_dtype",
        "pp_schedule",
        "pp_dtype",
        "compiles",
        "engine",
    )
    ignored = {name: getattr(plain, name) for name in ("sizes", "also", *of_the_mesh)}
    return lambda case: train(replace(case, **ignored), case.num_layers)


@pytest.fixture
def agreed(record_property) -> Callable[[Case], None]:
    """Record a case for the table, if its test passes."""
    return lambda case: record_property("parity", str(case))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--parity-table", type=Path, help="write the table of passed cases between the markers in FILE")


def pytest_configure(config: pytest.Config) -> None:
    file = config.getoption("--parity-table", default=None)
    if file is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_ParityTable(file))


class _ParityTable:
    """Collect the cases that passed, also from xdist workers."""

    def __init__(self, file: Path):
        self._file = file
        self._agreed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self._agreed |= {str(case) for name, case in report.user_properties if name == "parity"}

    def pytest_sessionfinish(self) -> None:
        write_table(self._file, [case for case in ALL_CASES if str(case) in self._agreed])
