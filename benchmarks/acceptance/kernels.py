"""Parts on one device: its environment, attention against dense, the LM head against fp64, host reads, speed."""

from __future__ import annotations

import itertools
import platform
import random
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.acceptance.report import Facts, Place, check
from tests.support.tiny_llama import VOCAB
from tests.support.tiny_run import PairsInMemory, TinyRun, build_run, noise_pairs
from thresher.builders.hardware import GPUS
from thresher.data.example import Example
from thresher.models.attention.interface import Window, dense_attention, pair_attention
from thresher.models.attention.segments import PackedAttention, Segment
from thresher.models.lm_head import LMHead, LogitTransform, target_logps_and_entropy

_aten = torch.ops.aten
_HOST_READS = {_aten._local_scalar_dense.default, _aten.nonzero.default, _aten.is_nonzero.default, _aten.equal.default}


def environment(place: Place) -> Facts:
    """Versions, devices and connections; the host has no name in the report."""
    facts: Facts = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cpus": torch.get_num_threads(),
    }
    if place.device == "cpu":
        return facts
    check(torch.cuda.is_available(), "torch finds no GPU; run with --device cpu, or check nvidia-smi")
    devices = range(torch.cuda.device_count())
    facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    facts["devices"] = [
        {
            "name": torch.cuda.get_device_name(index),
            "memory_gb": round(torch.cuda.get_device_properties(index).total_memory / 1e9, 1),
            "capability": list(torch.cuda.get_device_capability(index)),
        }
        for index in devices
    ]
    facts["peer_access"] = [
        [one == other or torch.cuda.can_device_access_peer(one, other) for other in devices] for one in devices
    ]
    return facts


def attention(place: Place) -> Facts:
    """Output and gradients of both attentions of packed rows, against dense attention in fp64."""
    draw, errors, flash_errors = random.Random(0), [], []
    sizes = [5, 40, 200] if place.device == "cpu" else [5, 300, 3000, 16_000]
    for size in sizes:
        for window, softcap, kv_heads, has_sinks in [
            (None, None, 2, False),
            (None, None, 4, True),
            (7, None, 2, True),
            (None, 1.5, 2, False),
            (7, 1.5, 4, False),
        ]:
            segments = _random_pack(size, draw)
            kind = (segments, kv_heads, window, softcap, has_sinks)
            expected = _attend(*kind, device="cpu", dtype=torch.float64, is_dense=True)
            errors.append(_largest_error(_attend(*kind, device=place.device, dtype=torch.float32), expected))
            if window is None and softcap is None:
                found = _attend(*kind, device=place.device, dtype=torch.bfloat16, uses_varlen=True)
                flash_errors.append(_largest_error(found, expected))
    check(max(errors) < 1e-4, f"attention differs from dense attention in fp64 by {max(errors):.2e}")
    check(max(flash_errors) < 3e-2, f"flash kernels in bf16 differ from dense attention by {max(flash_errors):.2e}")
    counters = torch._dynamo.utils.counters["stats"]  # type: ignore[attr-defined]
    return {
        "num_cases": len(errors),
        "largest_error": max(errors),
        "largest_error_of_flash_in_bf16": max(flash_errors),
        "compiled_graphs": counters["unique_graphs"],
    }


def attention_heads(place: Place) -> Facts:
    """Attention in bf16 with heads of 64, 128 and 256, grouped and not, against dense attention in fp32.

    Both have the same inputs, rounded to bf16. A kernel rounds its products to bf16, 0.2 % each.
    """
    draw, errors = random.Random(0), dict[str, list[float]]()
    sizes = [200] if place.device == "cpu" else [200, 3000]
    for head_dim, (heads, kv_heads), size in itertools.product((64, 128, 256), ((8, 1), (4, 4)), sizes):
        segments = _random_pack(size, draw)
        for window, softcap in [(None, None), (100, 30.0)]:
            kind = (segments, kv_heads, window, softcap, False)
            shape = {"heads": heads, "head_dim": head_dim}
            found = _attend(*kind, **shape, device=place.device, dtype=torch.bfloat16)
            expected = _attend(*kind, **shape, device="cpu", dtype=torch.float32, is_dense=True)
            differences = [_relative(one, other) for one, other in zip(found, expected, strict=True)]
            errors.setdefault(f"{head_dim}, {heads} heads, {kv_heads} of keys", []).extend(differences)
    for name, found_errors in errors.items():
        check(max(found_errors) < 1e-2, f"{name}: bf16 differs from fp32 by {max(found_errors):.2%} of the norm")
    return {"tolerance": 1e-2, "largest_error": {name: max(each) for name, each in errors.items()}}


def _relative(found: Tensor, expected: Tensor) -> float:
    return float((found.cpu().double() - expected.double()).norm() / expected.double().norm())


def _largest_error(found: list[Tensor], expected: list[Tensor]) -> float:
    """Relative to the largest value, or absolute if that is below 1."""
    return max(
        float((one.cpu().double() - other).abs().max() / other.abs().max().clamp(min=1.0))
        for one, other in zip(found, expected, strict=True)
    )


def _random_pack(size: int, draw: random.Random) -> tuple[Segment, ...]:
    """Pairs of a prompt with the chosen response, and the rejected response, until the row has `size` rows."""
    segments: list[Segment] = []
    start = 0
    while start < size:
        prompt, chosen, rejected = (draw.randint(1, max(1, size // 4)) for _ in range(3))
        middle = start + prompt + chosen
        segments += [Segment(start, middle), Segment(middle, middle + rejected, start, start + prompt)]
        start = middle + rejected
    return tuple(segments)


def _attend(
    segments: tuple[Segment, ...],
    kv_heads: int,
    window: int | None,
    softcap: float | None,
    has_sinks: bool,
    *,
    device: str,
    dtype: torch.dtype,
    is_dense: bool = False,
    uses_varlen: bool = False,
    heads: int = 4,
    head_dim: int = 16,
) -> list[Tensor]:
    """Return the output and the gradients of all inputs, whose values in bf16 are the same for any device and dtype."""
    generator, rows, scale = torch.Generator().manual_seed(0), segments[-1].stop, 1.2 * head_dim**-0.5
    of_keys = (1, kv_heads, rows, head_dim)
    shapes = [(1, heads, rows, head_dim), of_keys, of_keys, (1, rows, heads, head_dim)]
    values = [torch.randn(shape, generator=generator).bfloat16().to(device, dtype) for shape in shapes]
    inputs, weights = [each.requires_grad_() for each in values[:3]], values[3]
    sinks = torch.linspace(-1, 3, heads).to(device, dtype).requires_grad_() if has_sinks else None
    if is_dense:
        out = dense_attention(*inputs, segments, scale, softcap=softcap, window=window, sinks=sinks).transpose(1, 2)
    else:
        packed = PackedAttention(segments, uses_varlen=uses_varlen)
        mask = None if window is None else Window(window)
        settings = {"pair_visibility": packed, "scaling": scale, "softcap": softcap, "s_aux": sinks}
        out, _ = pair_attention(nn.Identity(), *inputs, mask, **settings)
    (out * weights).sum().backward()
    inputs = inputs if sinks is None else [*inputs, sinks]
    return [out.detach(), *(each.grad for each in inputs if each.grad is not None)]


def lm_head(place: Place) -> Facts:
    """Log-probabilities and gradients of the head, against full logits in fp64 of the same rounded factors."""
    rows, hidden, vocab = (65, 64, 1003) if place.device == "cpu" else (2048, 2048, 128_256)
    facts: Facts = {"rows": rows, "hidden": hidden, "vocab": vocab}
    for dtype, limit, gradient_limit in ((torch.float32, 1e-4, 1e-4), (torch.bfloat16, 1e-3, 2e-2)):
        generator = torch.Generator().manual_seed(0)
        states, weight = (torch.randn(size, hidden, generator=generator).to(dtype).float() for size in (rows, vocab))
        weight *= hidden**-0.5
        weight = weight.to(dtype).float()
        targets = torch.randint(0, vocab, (rows,), generator=generator).to(place.device)
        states, weight = (each.to(place.device).requires_grad_() for each in (states, weight))
        head = LMHead(weight, None, dtype, LogitTransform())
        found, _ = target_logps_and_entropy(head, states, targets, with_entropy=False)
        found.sum().backward()
        exact = states.detach().double().requires_grad_()
        expected = (exact @ weight.detach().double().T).log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
        expected.sum().backward()
        error = float((found.detach().double() - expected.detach()).abs().max())
        assert states.grad is not None
        assert exact.grad is not None
        gradient_error = float((states.grad.double() - exact.grad).norm() / exact.grad.norm())
        name = str(dtype).removeprefix("torch.")
        facts[name] = {"largest_error": error, "relative_gradient_error": gradient_error}
        check(error < limit, f"log-probabilities in {name} differ from fp64 by {error:.2e}")
        check(gradient_error < gradient_limit, f"gradients in {name} differ from fp64 by {gradient_error:.2e}")
    return facts


def host_reads(place: Place) -> Facts:
    """Reads of values by the host in a step, of a GPU or counted on the CPU; more micro-batches must not add any."""
    few, many = (_reads_of_a_step(place, pairs) for pairs in (4, 1))
    more = many - few
    check(not more, f"each micro-batch makes the host wait: {dict(more)}")
    return {"micro_batches": [2, 8], "reads_per_step": [few.total(), many.total()]}


def _reads_of_a_step(place: Place, pairs_per_micro_batch: int) -> Counter[str]:
    run = _tiny_run(place, f"reads-{pairs_per_micro_batch}", pairs_per_micro_batch)
    run.trainer.training_step()  # the first allocates and compiles
    if place.device == "cpu":
        with _CountedReads() as counted:
            run.trainer.training_step()
        return counted.reads
    with _cuda_syncs() as syncs:
        run.trainer.training_step()
    return syncs


class _CountedReads(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reads: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.reads[str(func)] += func in _HOST_READS
        return func(*args, **(kwargs or {}))


@contextmanager
def _cuda_syncs() -> Iterator[Counter[str]]:
    """Count the lines at which the host waits for the GPU, as torch reports them."""
    syncs: Counter[str] = Counter()
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield syncs
        finally:
            torch.cuda.set_sync_debug_mode(before)
    syncs.update(f"{Path(each.filename).name}:{each.lineno}" for each in caught if "synchroniz" in str(each.message))


def speed(place: Place) -> Facts:
    """Median time of a step, and on a known GPU the share of its peak."""
    is_cpu = place.device == "cpu"
    run = _tiny_run(place, "speed", 4 if is_cpu else 8, is_large=not is_cpu)
    times, tokens = [], []
    for _ in range(8 if is_cpu else 20):
        before, started = run.trainer.state.useful_tokens_seen, time.perf_counter()
        run.trainer.training_step()
        if not is_cpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
        tokens.append(run.trainer.state.useful_tokens_seen - before)
    seconds = statistics.median(times[2:])
    parameters = sum(each.numel() for each in run.trainer.engine.model.parameters() if each.requires_grad)
    rate = statistics.median(tokens[2:]) / seconds
    facts: Facts = {"seconds_per_step": seconds, "tokens_per_second": rate, "parameters": parameters}
    if not is_cpu:
        facts["peak_memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
        name = torch.cuda.get_device_name().lower()
        gpu = next((gpu for gpu in GPUS.values() if gpu.name.partition("-")[0] in name), None)
        facts["mfu"] = None if gpu is None else 6 * parameters * rate / gpu.peak_flops
    return facts


def _tiny_run(place: Place, name: str, pairs_per_micro_batch: int, *, is_large: bool = False) -> TinyRun:
    directory = place.directory / name
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    if is_large:  # about one billion
        shape = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
    torch.manual_seed(0)
    sizes = {"vocab_size": 32_000, "max_position_embeddings": 2048} if is_large else {"vocab_size": VOCAB}
    LlamaForCausalLM(LlamaConfig(**sizes, **shape)).save_pretrained(directory)
    training = {"per_device_train_batch_size": pairs_per_micro_batch, "global_batch_size": 8, "learning_rate": 1e-6}
    values = {
        "pretrain": str(directory),
        "output_dir": str(directory / "out"),
        "max_steps": 100,
        "save_strategy": "no",
        "track_with": [],
        "sequence_length": 2048 if is_large else 64,
        "actor_train": {
            "data_args": {"file_name": "in memory"},
            "training_args": training,
            "model_args": {"dtype": "bf16" if is_large else "fp32"},
        },
    }
    return build_run(values, _long_pairs(64) if is_large else noise_pairs(64))


def _long_pairs(count: int) -> PairsInMemory:
    """Pairs of 256 tokens in the prompt and 128 to 384 in each response."""
    draw = np.random.default_rng(0)

    def tokens(most: int, least: int) -> np.ndarray:
        return draw.integers(3, VOCAB, draw.integers(least, most + 1)).astype(np.int32)

    return PairsInMemory([Example.pair(tokens(256, 256), tokens(384, 128), tokens(384, 128)) for _ in range(count)])
