"""What grows with the processes that write a checkpoint: the restore of one of them, and the save and restore by
torch.distributed.checkpoint.

    python benchmarks/growth_checkpoint.py restore output/growth --writers 16 64 256 1024
    python benchmarks/growth_checkpoint.py compare output/growth --ranks 4 --megabytes 384 --rounds 5

`restore` writes synthetic checkpoints: tiny shards, but as many as a model of 723 tensors (Llama-3-70B) and AdamW have.
It reads them in a new process as rank 0 of the same mesh, with the index and without, as a checkpoint of an older
version. `--keep` keeps them, so a different version can `read` them too, with its `src` first in PYTHONPATH.

`compare` saves and restores the same state on the same gloo ranks with both, in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

NUM_TENSORS = 723
STEMS = {"weights": ("",), "optimizer": ("exp_avg/", "exp_avg_sq/")}


def write_synthetic(directory: Path, num_writers: int) -> None:
    """Write the files of one writer, the others as copies with their offset and values, and the index of all."""
    import numpy as np
    import torch

    from thresher.checkpoint.tensor_files import TensorShard, pack_headers, save_indexes, save_shards
    from thresher.checkpoint.tensor_index import ShardFile

    directory.mkdir(parents=True)
    names = [f"model.layers.{at // 9}.self_attn.{'qkvogudab'[at % 9]}_proj.weight" for at in range(NUM_TENSORS)]
    packed, seconds = [], 0.0
    for stem, keys in STEMS.items():
        shard = TensorShard(torch.zeros(1, 2), (num_writers, 2), (0, 0))
        first = save_shards(
            directory, stem, {key + name: shard for key in keys for name in names}, ShardFile(0, num_writers)
        )
        content = (directory / first).read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        for writer in range(num_writers):
            path = directory / ShardFile(writer, num_writers).name(stem)
            header = content[8:end].rstrip().replace(b"[0, 0]]", b"[%d, 0]]" % writer)
            header += b" " * (-len(header) % 8)
            values = np.full((len(content) - end) // 4, writer, np.float32)
            path.write_bytes(len(header).to_bytes(8, "little") + header + values.tobytes())
            started = time.process_time()
            packed.append(pack_headers(directory, [path.name]))
            seconds += time.process_time() - started
    started = time.process_time()
    save_indexes(directory, packed)
    report = {
        "writers": num_writers,
        "CPU ms per rank to report": round(1e3 * seconds / num_writers, 1),
        "KB per rank": round(sum(len(each) for of_rank in packed for each in of_rank.values()) / num_writers / 1e3, 1),
        "CPU s on rank 0 to write the index": round(time.process_time() - started, 2),
        "MB of index": round(sum(path.stat().st_size for path in directory.glob("*.index")) / 1e6, 1),
    }
    print(json.dumps(report), flush=True)


def memory(key: str) -> float:
    """Return an entry of this process's status, in MB."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status[key].split()[0]) / 1e3


def measure_restore(directory: Path, num_writers: int) -> dict[str, object]:
    import torch

    from thresher.checkpoint import tensor_files

    home = sys.modules.get("thresher.checkpoint.tensor_index", tensor_files)
    opened, original = [], home.safe_open

    def counted(path: Path, **options: str) -> object:
        opened.append(path)
        return original(path, **options)

    home.safe_open = counted
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before, descriptors = memory("VmRSS"), 0
    seconds = {"parse": 0.0, "parse CPU": 0.0, "read": 0.0}
    for stem in STEMS:
        started, cpu = time.perf_counter(), time.process_time()
        with tensor_files.ShardedReader(directory, stem) as reader:
            specs = reader.specs()
            seconds["parse CPU"] += time.process_time() - cpu
            seconds["parse"] += time.perf_counter() - started
            started = time.perf_counter()
            for name in specs:
                assert torch.equal(reader.read(name, (slice(0, 1), slice(0, 2))), torch.zeros(1, 2))
            seconds["read"] += time.perf_counter() - started
            descriptors = max(descriptors, len(list(Path("/proc/self/fd").iterdir())))
    return {
        "writers": num_writers,
        **{name: round(value, 2) for name, value in seconds.items()},
        "opened": len(opened),
        "descriptors": descriptors,
        "peak MB": round(memory("VmHWM") - before),
    }


def restore(root: Path, writers: list[int], *, keep: bool) -> None:
    for num_writers in writers:
        directory = root / f"writers-{num_writers}"
        if not directory.exists():
            write_synthetic(directory, num_writers)
        for _ in range(2):
            command = [sys.executable, __file__, "read", str(directory), "--writers", str(num_writers)]
            subprocess.run(command, check=True)
            hidden = [(path, path.with_suffix(".hidden")) for path in directory.glob("*.index")]
            for path, other in hidden:
                path.rename(other)
            subprocess.run([*command, "--label", "without index"], check=True)
            for path, other in hidden:
                other.rename(path)
        if not keep:
            shutil.rmtree(directory)


class Comparison:
    """Saves and restores of one state by one of the two, on a rank of a gloo group."""

    def __init__(self, tool: str, root: Path, megabytes: int):
        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        from thresher.checkpoint.manager import CheckpointManager
        from thresher.distributed.groups import Group

        self.tool, self.root = tool, root / tool
        self.mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.world = Group(dist.get_rank(), dist.get_world_size())
        self.manager = CheckpointManager(self.root, 2, "eval/loss", higher_is_better=False)
        num_layers = megabytes * 2**20 // (3 * 4 * 1024 * 1024)
        generator = torch.Generator().manual_seed(0)
        self.whole = {
            f"{key}layers.{at}.weight": torch.randn(1024, 1024, generator=generator)
            for key in ("", "exp_avg/", "exp_avg_sq/")
            for at in range(num_layers)
        }

    def state(self, dim: int, *, is_empty: bool = False) -> dict[str, Any]:
        import torch
        from torch.distributed.tensor import Shard, distribute_tensor

        whole = {name: torch.zeros_like(each) for name, each in self.whole.items()} if is_empty else self.whole
        return {
            name: distribute_tensor(each, self.mesh, [Shard(dim)], src_data_rank=None) for name, each in whole.items()
        }

    def save(self, step: int, state: dict[str, Any]) -> Path:
        import torch.distributed.checkpoint as dcp

        from thresher.checkpoint.tensor_files import shards_to_write
        from thresher.engines.policy_files import write_policy

        path = self.manager.path_for(step)
        if self.tool == "dcp":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that it overwrites
                dcp.save(state, checkpoint_id=path)
            return path
        shards = shards_to_write(state, state, lambda _: True)
        weights = {name: shard for name, shard in shards.items() if "/" not in name}
        moments = {name: shard for name, shard in shards.items() if "/" in name}
        values = {} if self.world.rank == 0 else None
        write = write_policy({"weights": weights, "optimizer": moments}, values, self.world, None)
        return self.manager.save(step, write, {}, self.world)

    def restore(self, path: Path, state: dict[str, Any]) -> None:
        import torch.distributed.checkpoint as dcp

        from thresher.checkpoint.manifest import find_damage
        from thresher.checkpoint.tensor_files import ShardedReader
        from thresher.distributed.tensors import local_slices, to_local

        if self.tool == "dcp":
            dcp.load(state, checkpoint_id=path)
            return
        if self.tool == "thresher":
            assert not (found := find_damage(path, self.world)), found
        for stem, has_slash in (("weights", False), ("optimizer", True)):
            targets = {
                name: (to_local(each), local_slices(each)) for name, each in state.items() if ("/" in name) == has_slash
            }
            with ShardedReader(path, stem) as reader:
                reader.read_into(targets)

    def is_equal(self, state: dict[str, Any]) -> bool:
        import torch

        equal = all(torch.equal(each.full_tensor(), self.whole[name]) for name, each in state.items())
        return bool(equal)


def compare_on_rank(rank: int, args: argparse.Namespace) -> None:
    """Save, restore on the same mesh, restore with the other dimension sharded; both tools in turn."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{args.root}/store", rank=rank, world_size=args.ranks)
    num_fsyncs, fsync = 0, os.fsync

    def counted(descriptor: int) -> None:
        nonlocal num_fsyncs
        num_fsyncs += 1
        fsync(descriptor)

    os.fsync = counted
    tools = {tool: Comparison(tool, args.root, args.megabytes) for tool in ("thresher", "dcp")}
    seconds: dict[tuple[str, str], list[float]] = {}
    for turn in range(args.rounds):
        for tool, each in sorted(tools.items(), reverse=bool(turn % 2)):
            state = each.state(0)
            num_fsyncs = 0
            path = timed(seconds, tool, "save", partial(each.save, turn + 1, state))
            fsyncs = each.world.all_gather_object(num_fsyncs)
            for label, dim in (("restore", 0), ("resharded", 1)):
                target = each.state(dim, is_empty=True)
                timed(seconds, tool, label, partial(each.restore, path, target))
                assert each.is_equal(target), (tool, label)
            if tool == "thresher":
                each.tool = "unverified"
                target = each.state(0, is_empty=True)
                timed(seconds, tool, "unverified", partial(each.restore, path, target))
                each.tool = tool
            if rank == 0:
                files = [file for file in path.rglob("*") if file.is_file()]
                sizes = sum(file.stat().st_size for file in files)
                print(
                    json.dumps({"tool": tool, "files": len(files), "bytes": sizes, "fsyncs per rank": fsyncs}),
                    flush=True,
                )
                for old in each.manager.root.glob("step-*"):
                    if old != path:
                        shutil.rmtree(old)
            dist.barrier()
    if rank == 0:
        for (tool, label), values in sorted(seconds.items()):
            print(json.dumps({"tool": tool, "what": label, **spread(values)}), flush=True)
        for label in ("save", "restore", "resharded"):
            ratios = [a / b for a, b in zip(seconds["thresher", label], seconds["dcp", label], strict=True)]
            print(json.dumps({"what": f"{label}: thresher / dcp", **spread(ratios)}), flush=True)
    dist.destroy_process_group()


def timed(seconds: dict[tuple[str, str], list[float]], tool: str, label: str, work: Callable[[], Any]) -> Any:
    import torch.distributed as dist

    dist.barrier()
    started = time.perf_counter()
    result = work()
    dist.barrier()
    seconds.setdefault((tool, label), []).append(time.perf_counter() - started)
    return result


def spread(values: list[float]) -> dict[str, float]:
    return {"median": round(median(values), 2), "min": round(min(values), 2), "max": round(max(values), 2)}


def fault_on_rank(rank: int, args: argparse.Namespace, tool: str, fault: str) -> None:
    """Save step 1; then flip a bit and restore, or die in a save of other values, of step 2 or of step 1 again."""
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=f"file://{args.root}/store-{tool}-{fault}", rank=rank, world_size=args.ranks
    )
    each = Comparison(tool, args.root / fault, 24)
    state = each.state(0)
    path = each.save(1, state)
    if fault == "flipped bit":
        if rank == 0:
            file = max(path.rglob("*"), key=lambda file: file.stat().st_size)
            with file.open("r+b") as stream:
                stream.seek(file.stat().st_size // 2 + 100_000)  # in the numbers of a tensor
                byte = stream.read(1)[0]
                stream.seek(-1, 1)
                stream.write(bytes([byte ^ 1]))
        dist.barrier()
    else:
        for tensor in state.values():
            tensor.to_local().add_(1)
        if rank == args.ranks - 1:  # the last rank dies at its first flush, the others a little later
            os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
        each.save(2 if fault == "killed, new step" else 1, state)


def restore_after_fault(rank: int, args: argparse.Namespace, tool: str, fault: str) -> None:
    import torch.distributed as dist

    name = f"store-{tool}-{fault}-restore"
    dist.init_process_group("gloo", init_method=f"file://{args.root}/{name}", rank=rank, world_size=args.ranks)
    each = Comparison(tool, args.root / fault, 24)
    newest = max(path.name for path in each.manager.root.glob("step-*"))
    target = each.state(0, is_empty=True)
    outcome = f"newest directory {newest}: "
    try:
        each.restore(each.manager.root / newest, target)
        outcome += "restored what step 1 saved" if each.is_equal(target) else "restored other values without an error"
    except BaseException as error:  # what dcp raises is not an Exception
        outcome += f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160]}"
    if rank == 0:
        print(json.dumps({"tool": tool, "fault": fault, "outcome": outcome}), flush=True)


def compare(args: argparse.Namespace) -> None:
    from torch.multiprocessing import start_processes

    args.root.mkdir(parents=True)
    start_processes(compare_on_rank, (args,), nprocs=args.ranks, start_method="spawn")
    for fault in ("flipped bit", "killed, new step", "killed, same step"):
        for tool in ("thresher", "dcp"):
            with suppress(Exception):  # of the rank that dies
                start_processes(fault_on_rank, (args, tool, fault), nprocs=args.ranks, start_method="spawn")
            start_processes(restore_after_fault, (args, tool, fault), nprocs=args.ranks, start_method="spawn")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["restore", "read", "compare"])
    parser.add_argument("root", type=Path)
    parser.add_argument("--writers", type=int, nargs="+", default=[16, 64, 256, 1024])
    parser.add_argument("--label", default="with index")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--megabytes", type=int, default=384)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--keep", action="store_true")
    args = parser.parse_args()
    if args.what == "read":
        print(json.dumps({"run": args.label, **measure_restore(args.root, args.writers[0])}), flush=True)
    elif args.what == "restore":
        restore(args.root, args.writers, keep=args.keep)
    else:
        compare(args)


if __name__ == "__main__":
    main()
