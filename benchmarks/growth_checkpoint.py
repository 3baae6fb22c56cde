"""What grows with the processes that write a checkpoint: the restore of one of them, and the save and restore by
torch.distributed.checkpoint.

    python benchmarks/growth_checkpoint.py restore output/growth --writers 16 64 256 1024
    python benchmarks/growth_checkpoint.py compare output/growth --ranks 4 --megabytes 256 --rounds 5

`restore` writes synthetic checkpoints: tiny shards, but as many as a model of 723 tensors (Llama-3-70B) and AdamW have.
It reads them in a new process as rank 0 of the same mesh, with the index and without, as a checkpoint of an older
version. `--keep` keeps them, so a different version can `read` them too, with its `src` first in PYTHONPATH.

`compare` saves and restores the same state on the same gloo ranks with both, in turn.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

NUM_TENSORS = 723
STEMS = {"weights": ("",), "optimizer": ("exp_avg/", "exp_avg_sq/")}


def write_synthetic(directory: Path, num_writers: int) -> None:
    import torch

    from thresher import durable
    from thresher.checkpoint import tensor_files
    from thresher.checkpoint.tensor_files import TensorShard, save_shards
    from thresher.checkpoint.tensor_index import ShardFile

    durable.sync_file = lambda path: None  # of the files of a benchmark
    directory.mkdir(parents=True)
    names = [f"model.layers.{at // 9}.self_attn.{'qkvogudab'[at % 9]}_proj.weight" for at in range(NUM_TENSORS)]
    packed, seconds = [], 0.0
    for writer in range(num_writers):
        written = []
        for stem, keys in STEMS.items():
            shards = {
                key + name: TensorShard(torch.full((1, 2), float(writer)), (num_writers, 2), (writer, 0))
                for key in keys
                for name in names
            }
            written.append(save_shards(directory, stem, shards, ShardFile(writer, num_writers)))
        started = time.perf_counter()
        packed.append(tensor_files.pack_headers(directory, written))
        seconds += time.perf_counter() - started
    started = time.perf_counter()
    tensor_files.save_indexes(directory, packed)
    report = {
        "writers": num_writers,
        "ms per rank to report": round(1e3 * seconds / num_writers, 1),
        "KB per rank": round(sum(map(len, packed[0].values())) / 1e3, 1),
        "s on rank 0 to write the index": round(time.perf_counter() - started, 2),
        "MB of index": round(sum(p.stat().st_size for p in directory.glob("*.index")) / 1e6, 1),
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["restore", "read", "compare"])
    parser.add_argument("root", type=Path)
    parser.add_argument("--writers", type=int, nargs="+", default=[16, 64, 256, 1024])
    parser.add_argument("--label", default="with index")
    parser.add_argument("--keep", action="store_true")
    args = parser.parse_args()
    if args.what == "read":
        print(json.dumps({"run": args.label, **measure_restore(args.root, args.writers[0])}), flush=True)
    elif args.what == "restore":
        restore(args.root, args.writers, keep=args.keep)


if __name__ == "__main__":
    main()
