"""FlexAttention over segments, for GPUs: the segments as a block mask, and a bounded number of compiled kernels.

The blocks are listed on the host, because `create_block_mask` allocates a number per query and key. The backward has no
CPU kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from thresher.distributed.host_copies import copy_arrays_to_device
from thresher.errors import UserError
from thresher.models.attention.block_lists import block_lists, visible_keys
from thresher.models.attention.segments import Segment

BLOCK_SIZE = 128
# variants differ in dtype, in gradients, and in whether queries or keys fit into one block; a model needs 14 at most
MAX_COMPILED_VARIANTS = 32
# fields of two `BlockLists`: key blocks by query block, then query blocks by key block
_LIST_NAMES = [
    f"{full}{side}_{what}" for side in ("kv", "q") for full in ("", "full_") for what in ("num_blocks", "indices")
]


def block_mask(segments: tuple[Segment, ...], num_keys: int, window: int | None, device: torch.device) -> BlockMask:
    """Build the mask from four integers per query; a window is part of them, so that all layers share kernels."""
    keys = visible_keys(segments, window)
    lists = [blocks[None, None] for side in block_lists(keys, num_keys, BLOCK_SIZE) for blocks in side]
    own_start, own_stop, prefix_start, prefix_stop, *listed = copy_arrays_to_device([*keys, *lists], device)

    def is_visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        in_prefix = (key >= prefix_start[query]) & (key < prefix_stop[query])
        return in_prefix | ((key >= own_start[query]) & (key < own_stop[query]))

    named: dict[str, Any] = dict(zip(_LIST_NAMES, listed, strict=True))
    lengths = len(keys.own_start), num_keys
    return BlockMask(lengths, **named, BLOCK_SIZE=(BLOCK_SIZE, BLOCK_SIZE), mask_mod=is_visible)


def flex_segment_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: BlockMask,
    scale: float,
    softcap: float | None,
    attend: Callable[..., Any] = flex_attention,
) -> Tensor:
    """query [1, heads, queries, dim], key and value [1, kv heads, rows, dim] -> [1, heads, queries, dim].

    attend: FlexAttention; uncompiled, it allocates the scores of all queries and keys.
    """

    def capped(score: Tensor, *_indices: Tensor) -> Tensor:
        return score if softcap is None else softcap * torch.tanh(score / softcap)

    out: Tensor = attend(
        query, key, value, score_mod=capped, block_mask=mask, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    return out


@lru_cache(maxsize=1)
def compiled_flex_attention() -> Callable[..., Tensor]:
    """Return the compiled FlexAttention of this process."""
    return compile_flex_attention("inductor", MAX_COMPILED_VARIANTS)


def compile_flex_attention(backend: str | Callable[..., Any], max_variants: int) -> Callable[..., Tensor]:
    """Compile FlexAttention for rows of any length; more than `max_variants` compilations are an error.

    By default torch would continue uncompiled, with scores of heads x queries x keys. The limit is that of this
    function alone.
    """
    from torch._dynamo import config  # slow to import
    from torch._dynamo.exc import FailOnRecompileLimitHit

    compiled: Callable[..., Tensor] = torch.compile(  # type: ignore[call-overload]  # stubs lack two parameters
        flex_attention,
        backend=backend,
        dynamic=True,
        fullgraph=True,
        recompile_limit=max_variants,
        isolate_recompiles=True,
        # one operation for dispatch modes: selective recomputation keeps its results
        options={"wrap_inductor_compiled_regions": True} if backend == "inductor" else None,
    )

    def attend(*tensors: Tensor, **settings: Any) -> Tensor:
        specialized = config.specialize_float
        # a soft cap that is not a constant has no backward in torch 2.13; `config.patch` is slow, and each layer calls
        config.specialize_float = True
        try:
            out: Tensor = compiled(*tensors, **settings)
        except FailOnRecompileLimitHit as error:
            raise UserError(
                f"FlexAttention was compiled for {max_variants} kinds of inputs, and this micro-batch needs another "
                "kernel; set layout=padded, and report the messages of a run with TORCH_LOGS=recompiles"
            ) from error
        finally:
            config.specialize_float = specialized
        return out

    return attend
