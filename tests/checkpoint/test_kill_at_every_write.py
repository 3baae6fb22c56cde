"""SIGKILL at every disk operation of a save, a replacement, a deletion and a recovery."""

import gc
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.staged import staging
from thresher.checkpoint.manager import latest, prune
from thresher.checkpoint.manifest import verify
from thresher.checkpoint.save import recover
from thresher.checkpoint.tensor_files import (
    TensorShard,
    load_tensors,
    pack_headers,
    save_indexes,
    save_shards,
    save_tensors,
)
from thresher.checkpoint.tensor_index import ShardFile
from thresher.errors import CheckpointError

_DISK_EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod", "shutil.rmtree"}


def save(root: Path, step: int, value: float) -> None:
    with staging(root, step) as directory:
        names = [
            save_shards(directory, "model", {"weight": TensorShard(torch.full((32,), value), (64,), (32 * k,))}, file)
            for k, file in enumerate([ShardFile(0, 2), ShardFile(1, 2)])
        ]
        save_indexes(directory, [pack_headers(directory, [name]) for name in names])
        (directory / "notes.txt").write_text(f"value {value}")


def run_and_die(action: Callable[[], object], deadly_operation: int) -> bool:
    """Run `action` in a forked child that kills itself before its n-th disk operation; return whether it was killed."""
    child = os.fork()
    if child == 0:
        gc.disable()  # objects of threads that the child does not have, such as those of gRPC, must not be finalized
        count = 0
        fsync = os.fsync

        def maybe_die() -> None:
            nonlocal count
            count += 1
            if count == deadly_operation:
                os.kill(os.getpid(), signal.SIGKILL)

        def counted_fsync(descriptor: int) -> None:
            maybe_die()
            fsync(descriptor)

        os.fsync = counted_fsync
        sys.addaudithook(lambda event, _: maybe_die() if event in _DISK_EVENTS else None)
        try:
            action()
        except BaseException:
            os._exit(1)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


def content(path: Path) -> str:
    verify(path)
    value = load_tensors(path, "model")["weight"].unique().item()
    assert (path / "notes.txt").read_text() == f"value {value}"
    return f"value {value}"


def die_everywhere(tmp_path: Path, prepare: Callable[[Path], object], action: Callable[[Path], object]) -> list[Path]:
    """Make one root per disk operation of `action`, in the state after a kill before that operation."""
    roots = []
    for operation in range(1, 500):
        root = tmp_path / str(operation)
        prepare(root)
        roots.append(root)
        if not run_and_die(lambda root=root: action(root), operation):
            return roots
    raise AssertionError("the action never finished")


def test_a_kill_during_a_save_leaves_the_previous_or_the_new_checkpoint(tmp_path: Path) -> None:
    roots = die_everywhere(tmp_path, lambda root: save(root, 1, 1.0), lambda root: save(root, 2, 2.0))
    assert len(roots) > 15
    survivors = []
    for root in roots:
        found = latest(root)
        assert found is not None
        survivors.append(content(found))
        assert content(root / "step-00000001") == "value 1.0"
        recover(root)
        assert latest(root) == found
        assert {path.name for path in root.iterdir()} <= {"step-00000001", "step-00000002"}
        save(root, 2, 2.0)
        assert content(root / "step-00000002") == "value 2.0"
    # once published, it stays published: the survivors change exactly once
    assert survivors == sorted(survivors)
    assert set(survivors) == {"value 1.0", "value 2.0"}


def test_a_kill_during_a_replacement_keeps_that_step(tmp_path: Path) -> None:
    def prepare(root: Path) -> None:
        save(root, 1, 1.0)
        save(root, 2, 2.0)

    for root in die_everywhere(tmp_path, prepare, lambda root: save(root, 2, 3.0)):
        assert latest(root) is not None
        recover(root)
        assert content(root / "step-00000002") in ("value 2.0", "value 3.0")
        assert {path.name for path in root.iterdir()} == {"step-00000001", "step-00000002"}


def test_a_kill_during_pruning_leaves_no_partial_checkpoint(tmp_path: Path) -> None:
    def prepare(root: Path) -> None:
        for step in range(1, 5):
            save(root, step, float(step))

    for root in die_everywhere(tmp_path, prepare, lambda root: prune(root, 2)):
        recover(root)
        for path in root.iterdir():
            verify(path)
        assert latest(root) == root / "step-00000004"
        prune(root, 2)
        assert {path.name for path in root.iterdir()} == {"step-00000003", "step-00000004"}


def test_a_kill_during_recovery_can_be_recovered_from(tmp_path: Path) -> None:
    def prepare(root: Path) -> None:
        save(root, 1, 1.0)
        (root / "step-00000001").rename(root / ".replaced-step-00000001-abc")
        (root / ".staging-step-00000002-abc").mkdir()
        (root / ".staging-step-00000002-abc" / "half").write_text("x")
        (root / ".staging-step-00000002-abc.lock").touch()
        (root / ".deleted-step-00000000-abc").mkdir()

    for root in die_everywhere(tmp_path, prepare, recover):
        recover(root)
        assert [path.name for path in root.iterdir()] == ["step-00000001"]
        assert content(root / "step-00000001") == "value 1.0"


def test_a_write_that_the_system_rejects_is_a_clear_error(tmp_path: Path) -> None:
    save(tmp_path, 1, 1.0)

    def save_with_a_small_limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        with (
            pytest.raises(CheckpointError, match=r"step 2.*File too large.*intact"),
            staging(tmp_path, 2) as directory,
        ):
            save_tensors(directory, "model", {"weight": torch.zeros(100_000)})

    assert not run_and_die(save_with_a_small_limit, deadly_operation=-1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert content(tmp_path / "step-00000001") == "value 1.0"


_SAVE_FOREVER = """
import sys, itertools, pathlib
from thresher.checkpoint.save import create_staging, publish, recover
from thresher.checkpoint.manager import latest, prune
root = pathlib.Path(sys.argv[1])
recover(root)
found = latest(root)
print("ready", flush=True)
for step in itertools.count(0 if found is None else int(found.name[5:])):
    stage = create_staging(root, step)
    for shard in range(3):
        (stage.path / f"{shard}.bin").write_bytes(bytes([step % 256]) * 300_000)
    publish(stage)
    prune(root, 2)
"""


@pytest.mark.slow
def test_a_process_killed_at_random_moments_never_loses_its_last_checkpoint(tmp_path: Path) -> None:
    last_step = -1
    for _ in range(5):
        process = subprocess.Popen(
            [sys.executable, "-c", _SAVE_FOREVER, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(random.uniform(0.05, 0.5))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        recover(tmp_path)
        found = latest(tmp_path)
        if found is not None:
            step = verify(found).step
            assert step >= last_step
            last_step = step
        for path in tmp_path.iterdir():
            verify(path)
    assert last_step > 0
