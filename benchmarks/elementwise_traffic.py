"""Count the memory traffic of the elementwise operations of a layer: bytes per row and column of its matrices.

python benchmarks/elementwise_traffic.py    # the constants of thresher/plan/elementwise.py

Llama layers of several widths, in bf16 over a residual stream in fp32, forward and backward, on a CPU. Products and
attention kernels are not counted. Operations that are not compiled read their inputs and write their outputs; for
compiled ones, the compiler counts what its kernels read and write. The bytes are nearly linear in the widths, and the
constants are the coefficients of a least squares fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch._inductor import config as inductor_config
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import ExternKernelSchedulerNode
from transformers import LlamaConfig, LlamaModel

from thresher.models.attention import interface
from thresher.models.optimizations.compile import compile_elementwise, compile_layers
from thresher.models.optimizations.llama_layers import use_memory_efficient_layers
from thresher.plan.simulate.attention import attention_without_values
from thresher.plan.simulate.counters import OperationCounter

ROWS, HEAD = 256, 64
# hidden, intermediate, query heads, key heads
WIDTHS = [
    (512, 1024, 8, 2),
    (256, 1024, 8, 2),
    (512, 1536, 8, 2),
    (512, 1024, 16, 2),
    (512, 1024, 8, 4),
    (768, 2048, 12, 4),
]


class Bytes(NamedTuple):
    forward: float
    backward: float


def build(hidden: int, intermediate: int, heads: int, kv_heads: int) -> LlamaModel:
    interface.register_pair_attention()
    interface.KERNELS["cpu"] = attention_without_values
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=HEAD,
        num_hidden_layers=1,
        vocab_size=64,
        attn_implementation=interface.PAIR_ATTENTION,
    )
    model = LlamaModel(config)
    use_memory_efficient_layers(model)
    return model.to(torch.bfloat16)


def count(model: LlamaModel, *, counts_operations: bool) -> Bytes:
    """Bytes of a layer's forward and backward; counts_operations: False to compile, which a dispatch mode prevents."""
    hidden = torch.randn(1, ROWS, model.config.hidden_size, requires_grad=True)
    positions = model.rotary_emb(hidden, torch.arange(ROWS)[None])
    visibility = SimpleNamespace(exchange=None, segments=[SimpleNamespace(context_length=1)], uses_varlen=False)
    forward, backward = OperationCounter("cpu"), OperationCounter("cpu")
    with torch.autocast("cpu", torch.bfloat16), forward if counts_operations else nullcontext():
        out = model.layers[0](hidden, position_embeddings=positions, pair_visibility=visibility)
    grad = torch.randn_like(out)
    with backward if counts_operations else nullcontext():
        out.backward(grad)
    return Bytes(forward.traffic["layers"], backward.traffic["layers"])


@contextmanager
def compiled_bytes() -> Iterator[Callable[[], Bytes]]:
    """Bytes of the kernels that are compiled within the block, by the compiler's count."""
    found = {False: 0, True: 0}
    original = GraphLowering.codegen

    def counting(graph: Any) -> Any:
        made = original(graph)
        nodes = [node for node in graph.scheduler.nodes if not isinstance(node, ExternKernelSchedulerNode)]
        found[bool(graph.is_backward)] += sum(node.get_read_write_buffers_sizes() for node in nodes)
        return made

    GraphLowering.codegen = counting
    try:
        with inductor_config.patch(force_disable_caches=True):
            yield lambda: Bytes(found[False], found[True])
    finally:
        GraphLowering.codegen = original


def compiled(widths: tuple[int, ...], compile_model: Callable[[nn.Module], object]) -> Bytes:
    torch._dynamo.reset()
    model = build(*widths)
    compile_model(model)
    with compiled_bytes() as found:
        count(model, counts_operations=False)
    return found()


def fit(counted: list[Bytes]) -> list[list[float]]:
    """Bytes per row and column: [forward, backward] of hidden, intermediate, queries, and keys and values."""
    columns = np.array([[h, i, q * HEAD, 2 * k * HEAD] for h, i, q, k in WIDTHS], dtype=float)
    per_row = np.array(counted) / ROWS
    found, *_ = np.linalg.lstsq(columns, per_row, rcond=None)
    error = np.abs(columns @ found - per_row).max() / per_row.max()
    print(f"largest error of the fit {error:.2%}")
    return found.round(2).tolist()


def main() -> None:
    print("not compiled", fit([count(build(*widths), counts_operations=True) for widths in WIDTHS]))
    print("layers", fit([compiled(widths, compile_layers) for widths in WIDTHS]))
    print("elementwise functions alone", fit([compiled(widths, compile_elementwise) for widths in WIDTHS]))


if __name__ == "__main__":
    main()
