"""One of two ranks that measure collectives: torchrun -m benchmarks.acceptance.collectives DEVICE."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from thresher.runtime.devices import CPU, claim_gpu, init_process_group, prepare_cuda

_NUM_REPEATS = 5


def main() -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = claim_gpu(f"rank {rank} of {size}", rank) if sys.argv[1] == "cuda" else CPU
    prepare_cuda(device, Path("nccl-"))
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), size, is_master=False)
    init_process_group(rank, size, dist.PrefixStore("collectives", store), "127.0.0.1", device)
    num_values = 1 << (20 if device.type == "cpu" else 27)
    local = torch.full((num_values,), float(rank + 1), device=device)
    gathered = torch.empty(size * num_values, device=device)

    def all_reduce() -> torch.Tensor:
        total = local.clone()
        dist.all_reduce(total)
        return total

    def all_gather() -> torch.Tensor:
        dist.all_gather_into_tensor(gathered, local)
        return gathered

    assert bool((all_reduce() == size * (size + 1) / 2).all())
    assert [float(part[0]) for part in all_gather().chunk(size)] == [each + 1.0 for each in range(size)]
    rates = {each.__name__: _gigabytes_per_second(each, local.nbytes, device) for each in (all_reduce, all_gather)}
    if rank == 0:
        sys.stdout.write(json.dumps({"megabytes": local.nbytes / 1e6, "gigabytes_per_second": rates}) + "\n")
    dist.destroy_process_group()


def _gigabytes_per_second(call: Callable[[], torch.Tensor], num_bytes: int, device: torch.device) -> float:
    dist.barrier()
    started = time.perf_counter()
    for _ in range(_NUM_REPEATS):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return num_bytes * _NUM_REPEATS / (time.perf_counter() - started) / 1e9


if __name__ == "__main__":
    main()
