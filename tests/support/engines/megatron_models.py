"""Megatron-Core models on the ranks of a pool: their logps, gradients and weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig

from tests.support.engines.parity import CPU, LAYOUTS
from tests.support.megatron_cpu import use_cpu_as_cuda
from thresher.data.example import ExampleBatch
from thresher.engines.megatron.declaration import MegatronSettings, MegatronSizes
from thresher.models.layouts import ModelInputs
from thresher.models.loading.load import load_model
from thresher.models.loading.load_sharded import SafetensorsReader
from thresher.models.logps import PairModel

# sizes of the groups that this process has
_built: set[MegatronSizes] = set()


class HFPiece(NamedTuple):
    """A slice of a transformers tensor, on some rank."""

    name: str
    shape: tuple[int, ...]
    slices: tuple[slice, ...]
    values: Tensor


def settings_of(sizes: MegatronSizes, **options: Any) -> MegatronSettings:
    return MegatronSettings(
        tp_size=sizes.tp,
        pp_size=sizes.pp,
        virtual_pp_size=sizes.virtual_pp,
        cp_size=sizes.cp,
        ep_size=sizes.ep,
        sequence_parallel=sizes.sequence_parallel,
        **options,
    )


def build(path: Path, sizes: MegatronSizes, dtype: torch.dtype = torch.float32, **options: Any) -> list[Any]:
    """The model chunks of this rank, with their weights."""
    use_cpu_as_cuda()
    from thresher.engines.megatron.build import build_chunks, load_weights
    from thresher.engines.megatron.parallel import destroy_groups

    if sizes not in _built:  # groups of the same sizes are shared, since each has threads
        destroy_groups()
        _built.clear()
        _built.add(sizes)
    settings = settings_of(sizes, **options)
    chunks = build_chunks(AutoConfig.from_pretrained(path), str(path), settings, "off", dtype, CPU)
    load_weights(chunks, str(path))
    return chunks


def score(
    path: Path,
    sizes: MegatronSizes,
    layouts: Sequence[str],
    batch: ExampleBatch,
    dtype: torch.dtype = torch.float32,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> list[Tensor | None]:
    """The logps of a batch in each layout, on the ranks of the last stage; hidden states go from stage to stage."""
    chunks = build(path, sizes, dtype, **options)
    with torch.no_grad():
        return [_forward(chunks, LAYOUTS[layout].collate(batch), []) for layout in layouts]


def gradients(
    path: Path, sizes: MegatronSizes, layout: str, batches: Sequence[ExampleBatch], **options: Any
) -> list[HFPiece]:
    """The gradients of the pieces that this rank holds, of a weighted sum of the logps of all batches.

    Forwards of all batches come before the first backward, as in the warm-up of a pipeline.
    """
    chunks = build(path, sizes, **options)
    runs = []
    for batch in batches:
        hidden: list[tuple[Tensor | None, Tensor]] = []
        values = _forward(chunks, LAYOUTS[layout].collate(batch), hidden)
        runs.append((hidden, None if values is None else weighted_sum(values)))
    for hidden, loss in runs:
        _backward(chunks, hidden, loss)
    _reduce_gradients(chunks)
    return [piece for chunk in chunks for piece in _pieces(chunk, of_gradients=True)]


def weights(path: Path, sizes: MegatronSizes) -> tuple[list[HFPiece], int, int]:
    """The weights of this rank as transformers has them, the elements read from files and those of all parameters."""
    num_read = 0
    read_slices = SafetensorsReader.read_slices

    def counting(*args: Any) -> Tensor:
        nonlocal num_read
        values = read_slices(*args)
        num_read += values.numel()
        return values

    SafetensorsReader.read_slices = counting  # type: ignore[method-assign]
    try:
        chunks = build(path, sizes)
    finally:
        SafetensorsReader.read_slices = read_slices  # type: ignore[method-assign]
    pieces = [piece for chunk in chunks for piece in _pieces(chunk, of_gradients=False)]
    return pieces, num_read, sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters())


def native_logps(path: Path, layout: str, batch: ExampleBatch) -> Tensor:
    model = PairModel.for_layout(load_model(str(path)), torch.float32, LAYOUTS[layout])
    with torch.no_grad():
        return _native_score(model, layout, batch)


def native_gradients(path: Path, layout: str, batches: Sequence[ExampleBatch]) -> dict[str, Tensor]:
    model = PairModel.for_layout(load_model(str(path)), torch.float32, LAYOUTS[layout])
    for batch in batches:
        weighted_sum(_native_score(model, layout, batch)).backward()
    return {name: p.grad for name, p in model.causal_lm.named_parameters() if p.grad is not None}


def weighted_sum(values: Tensor) -> Tensor:
    return (values * torch.arange(len(values)).cos()).sum()


def assemble(by_rank: Sequence[Sequence[HFPiece]], atol: float = 0.0) -> dict[str, Tensor]:
    """The full tensors; pieces on several ranks have to be equal, and together they have to cover each tensor."""
    full: dict[str, Tensor] = {}
    for piece in (piece for pieces in by_rank for piece in pieces):
        tensor = full.setdefault(piece.name, torch.full(piece.shape, torch.nan))
        known = tensor[piece.slices]
        assert torch.equal(known.isnan(), torch.full_like(known, known.isnan().any(), dtype=torch.bool))
        if not known.isnan().any():
            torch.testing.assert_close(known, piece.values, rtol=0, atol=atol)
        tensor[piece.slices] = piece.values
    missing = [name for name, tensor in full.items() if tensor.isnan().any()]
    assert not missing, f"no rank has all of {missing}"
    return full


def _native_score(model: PairModel, layout: str, batch: ExampleBatch) -> Tensor:
    sides = model.score(LAYOUTS[layout].collate(batch))
    return torch.cat([sides.chosen.values, sides.rejected.values])


def _forward(chunks: Sequence[Any], inputs: ModelInputs, hidden: list[tuple[Tensor | None, Tensor]]) -> Tensor | None:
    """Run the chunks; append the input and output of each, and return the logps in the last stage."""
    pp, values = chunks[0].groups.pp, None
    for chunk in chunks:
        entering = None
        if not chunk.pre_process:
            sequences, rows = chunk._padded(inputs).model_inputs["input_ids"].shape
            entering = torch.empty(rows // chunk._num_row_shards(inputs), sequences, chunk.config.hidden_size)
            dist.recv(entering, group=pp.group, group_src=(pp.rank - 1) % pp.size)
            entering.requires_grad_()
            chunk.set_input_tensor(entering)
        out = chunk(inputs)
        if chunk.post_process:
            values = out = out[0]
        else:
            dist.send(out.detach(), group=pp.group, group_dst=(pp.rank + 1) % pp.size)
        hidden.append((entering, out))
    return values


def _backward(chunks: Sequence[Any], hidden: list[tuple[Tensor | None, Tensor]], loss: Tensor | None) -> None:
    pp = chunks[0].groups.pp
    for chunk, (entering, out) in reversed(list(zip(chunks, hidden, strict=True))):
        if chunk.post_process:
            assert loss is not None
            loss.backward()
        else:
            grad = torch.empty_like(out)
            dist.recv(grad, group=pp.group, group_src=(pp.rank + 1) % pp.size)
            out.backward(grad)
        if entering is not None:
            dist.send(entering.grad, group=pp.group, group_dst=(pp.rank - 1) % pp.size)


def _reduce_gradients(chunks: Sequence[Any]) -> None:
    """Sum gradients as Megatron-Core's training does; dp ranks have the same batches, so theirs are divided."""
    from megatron.core import parallel_state

    for name, parameter in (item for chunk in chunks for item in chunk.named_parameters()):
        gradient, is_expert = parameter.grad, not getattr(parameter, "allreduce", True)
        assert gradient is not None, name
        if getattr(parameter, "sequence_parallel", False) or "q_layernorm" in name or "k_layernorm" in name:
            dist.all_reduce(gradient, group=parallel_state.get_tensor_model_parallel_group())
        if getattr(parameter, "shared_embedding", False):
            dist.all_reduce(gradient, group=parallel_state.get_embedding_group())
        data_and_context = parallel_state.get_data_parallel_group(with_context_parallel=True)
        dist.all_reduce(
            gradient, group=parallel_state.get_expert_data_parallel_group() if is_expert else data_and_context
        )
        gradient /= parallel_state.get_data_parallel_world_size()


def _pieces(chunk: Any, *, of_gradients: bool) -> Iterator[HFPiece]:
    for name, parameter in chunk.named_parameters():
        tensor = parameter.grad if of_gradients else parameter.detach()
        for piece in chunk.weight_map.pieces(name, tensor):
            yield HFPiece(piece.hf_name, piece.hf_shape, piece.slices, piece.values().clone())
