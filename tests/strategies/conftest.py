"""Pools of ranks that serve the tests of a file, what they are compared with, and the table of what agreed.

`pytest tests/strategies --parity-table docs/concepts/parallelism.md` writes the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from tests.support.strategies.parity import Case, Outcome, save_model, train_alone, train_oracle
from tests.support.strategies.parity_cases import ALL_CASES, write_table
from tests.support.strategies.rank_pool import RankPool
from thresher.distributed.mesh import ParallelDims

# every group of gloo has threads that wake a hundred times a second, also when nobody speaks
_MOST_THREADS = 150


@pytest.fixture(scope="module")
def pool_of() -> Iterator[Callable[[int], RankPool]]:
    """Pools by their number of ranks, started when first asked for; one that was given up or has grown is replaced."""
    pools: dict[int, RankPool] = {}

    def find(size: int) -> RankPool:
        if size in pools and pools[size].is_alive and pools[size].num_threads > _MOST_THREADS:
            pools[size].close()
        if size not in pools or not pools[size].is_alive:
            pools[size] = RankPool(size)
        return pools[size]

    yield find
    for pool in pools.values():
        pool.close()


@pytest.fixture
def two_ranks(pool_of) -> RankPool:
    return pool_of(2)


@pytest.fixture
def four_ranks(pool_of) -> RankPool:
    return pool_of(4)


@pytest.fixture(scope="session")
def model_dirs(tmp_path_factory) -> Callable[[str], tuple[Path, Path]]:
    """A policy and a reference of a family, which differ."""

    @cache
    def save(family: str) -> tuple[Path, Path]:
        directory = tmp_path_factory.mktemp(family)
        return save_model(directory / "policy", family, seed=0), save_model(directory / "reference", family, seed=1)

    return save


@pytest.fixture(scope="session")
def oracle(model_dirs) -> Callable[[Case], Outcome]:
    """What examples/minimal_dpo.py makes of a case; how it is split and cut is none of its concern."""
    train = cache(lambda case: train_oracle(case, *model_dirs(case.family)))
    plain = Case(ParallelDims())
    not_its_concern = {
        name: getattr(plain, name) for name in ("sizes", "layout", "also", "tokens_at_once", "dtype", "virtual_pp_size")
    }
    return lambda case: train(replace(case, recomputes_activations=False, **not_its_concern))


@pytest.fixture(scope="session")
def one_process(model_dirs) -> Callable[[Case], Outcome]:
    """What one process of our own engine makes of a case."""
    train = cache(lambda case: train_alone(case, *model_dirs(case.family)))
    return lambda case: train(replace(case, sizes=ParallelDims(), also="", virtual_pp_size=1))


@pytest.fixture
def agreed(record_property) -> Callable[[Case], None]:
    """Note that a case may stand in the table, if its test passes."""
    return lambda case: record_property("parity", str(case))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--parity-table", type=Path, help="write the table of cases that agreed between the marks of FILE")


def pytest_configure(config: pytest.Config) -> None:
    file = config.getoption("--parity-table", default=None)
    if file is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_ParityTable(file))


class _ParityTable:
    """Collect what passed, from processes of xdist too."""

    def __init__(self, file: Path):
        self._file = file
        self._agreed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self._agreed |= {str(case) for name, case in report.user_properties if name == "parity"}

    def pytest_sessionfinish(self) -> None:
        write_table(self._file, [case for case in ALL_CASES if str(case) in self._agreed])
