"""A made model, the real data and models beside the checkout, and parts that several tests build on."""

from __future__ import annotations

import gc
import os
import pickle
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import settings

from tests.support.ci_cases import mark_other_cases
from tests.support.engines.rank_pool import RankPool, RankPools
from tests.support.paths import ROOT, note_test, shared_path
from tests.support.ray_fixtures import forked_workers, ray_for_megatron, ray_here, shared_node
from tests.support.scheduling import GroupsOfFiles, sort_long_files_first
from thresher.runtime.ray.environment import set_environment

__all__ = ["forked_workers", "ray_for_megatron", "ray_here", "shared_node"]

# Ray reads its environment when it is first imported, so set what a run sets before any test file is. The token of the
# tests is in a directory of its own, so that none is written into a home directory.
_RAY_DIRECTORY = TemporaryDirectory(prefix="thresher-tests-")
if "RAY_AUTH_TOKEN_PATH" not in os.environ:
    token = Path(_RAY_DIRECTORY.name) / "token"
    token.write_text(secrets.token_hex(32))
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(token)
# a busy machine takes longer than Ray's 30 seconds to start an agent
os.environ.setdefault("RAY_agent_register_timeout_ms", "200000")
# or 60 seconds for a worker, of which the first ones wait until the fork server has imported their code
os.environ.setdefault("RAY_worker_register_timeout_seconds", "240")
set_environment(None)

# a shared machine pauses at any moment: the time of one example says nothing
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    covered = mark_other_cases(items)
    if (file := config.getoption("--covered-cases")) is not None:
        file.write_bytes(pickle.dumps(covered))
    sort_long_files_first(items)


def pytest_collection_finish() -> None:
    """Let later collections of garbage skip modules and tests: libraries ask for them, at half a second each."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> GroupsOfFiles:
    return GroupsOfFiles(config, log)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--covered-cases", type=Path, help="write which cases of the tests marked `covered` CI runs")
    parser.addoption("--write-tables", action="store_true", help="write the tables in the docs that tests compare")


_pools = RankPools()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Keep pools of ranks for the files of a folder: idle ones use a few percent of a core per rank."""
    if nextitem is None or nextitem.path.parent != item.path.parent:
        _pools.close()


@pytest.fixture(scope="module")
def pool_of(request, python_path_of_children) -> Callable[[int], RankPool]:
    """Find a pool by its number of ranks. ENGINE of a test file: the engine of its cases, `native` without it."""
    engine = getattr(request.module, "ENGINE", "native")
    return lambda size: _pools.find(size, engine)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    note_test(item)


@pytest.fixture(scope="session", autouse=True)
def python_path_of_children() -> Iterator[None]:
    """Let child processes and Ray workers import `tests.support`, whatever their directory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
        yield


@pytest.fixture(scope="session", autouse=True)
def no_cache_of_the_user(tmp_path_factory) -> Iterator[None]:
    """Keep the caches out of the home directory, for fixtures of any scope and for child processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("THRESHER_CACHE_DIR", str(tmp_path_factory.mktemp("reference_cache")))
        yield


@pytest.fixture(autouse=True)
def reference_cache(no_cache_of_the_user, monkeypatch) -> Path:
    """An empty cache of reference logps and prepared stores for every test."""
    path = Path(os.environ["THRESHER_CACHE_DIR"]) / secrets.token_hex(8)
    monkeypatch.setenv("THRESHER_CACHE_DIR", str(path))
    return path


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory) -> Path:
    """A made Llama of 136 thousand parameters, with a tokenizer and a chat template."""
    from tests.support.tiny_chat_model import save_tiny_chat_model

    return save_tiny_chat_model(tmp_path_factory.mktemp("tiny") / "model")


# fixtures of real files belong to one test: a wider one would hand a file to tests without the mark `real`
@pytest.fixture
def stories_dir() -> Path:
    """A real Llama of 260 thousand parameters."""
    return shared_path("models", "stories260K_hf")


@pytest.fixture
def polite_file() -> Path:
    """1,100 real pairs: polite answers against rude ones."""
    return shared_path("data", "rasbt-preference", "instruction-data-with-preference.json")
