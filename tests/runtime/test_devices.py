"""A GPU that is mapped must exist: workers fail with what was found, and never compute on the CPU instead."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from thresher.errors import ResourceError, UserError
from thresher.runtime.devices import CPU, check_same_device_type, claim_gpu

GPU = torch.device("cuda", 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has GPUs")
def test_a_worker_without_its_gpu_says_where_and_what_it_found():
    with pytest.raises(ResourceError, match=r"^actor_train worker 3 of 8 on \S+ needs GPU 0, but ") as caught:
        claim_gpu("actor_train worker 3 of 8", 0)
    found = "is built without CUDA" if torch.version.cuda is None else "torch finds 0 GPUs there"
    assert found in str(caught.value)
    assert "set num_workers to train on CPUs" in str(caught.value)


def test_only_an_explicit_request_replaces_a_gpu_by_the_cpu(monkeypatch):
    monkeypatch.setenv("THRESHER_DEVICE", "cpu")
    assert claim_gpu("actor_train worker 0 of 1", 0) == CPU
    monkeypatch.setenv("THRESHER_DEVICE", "cuda")
    with pytest.raises(UserError, match="THRESHER_DEVICE is 'cuda'; set it to cpu, or unset it and use device_mapping"):
        claim_gpu("actor_train worker 0 of 1", 0)


def errors_of(devices: list[torch.device]) -> list[Exception | None]:
    """Run the check of all ranks at once, over a real store."""
    store, errors = HashStore(), [None] * len(devices)

    def check(rank: int) -> None:
        try:
            check_same_device_type(store, rank, len(devices), devices[rank], timedelta(seconds=30))
        except ResourceError as error:
            errors[rank] = error  # type: ignore[call-overload]

    threads = [threading.Thread(target=check, args=[rank]) for rank in range(len(devices))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors  # type: ignore[return-value]


@pytest.mark.parametrize("device", [CPU, GPU])
def test_ranks_on_one_kind_of_device_pass(device):
    assert errors_of([device] * 4) == [None] * 4


def test_one_rank_without_a_gpu_fails_all_ranks_alike():
    errors = errors_of([GPU, GPU, CPU, GPU])
    assert len({str(error) for error in errors}) == 1
    assert str(errors[0]).startswith("rank 2 of 4 on ")
    assert "has no GPU that torch can use, but rank " in str(errors[0])
