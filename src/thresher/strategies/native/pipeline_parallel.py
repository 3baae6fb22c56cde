"""The pp axis: decides which layers a pipeline stage keeps.

The first stage has the embedding, the last one the final norm and the head. Both hold a tied embedding, and sum its
gradient once per step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from thresher.distributed.groups import Group
from thresher.errors import UserError
from thresher.models.pipeline_chunk import Chunk, IdentityModule, check_accepts_hidden_states, decoder_of


@dataclass(frozen=True)
class PipelineSettings:
    """How stages run. sent_dtype: of hidden states between stages, and of their gradients; None: the stored one."""

    schedule: Literal["1f1b", "zero_bubble"] = "1f1b"
    sent_dtype: torch.dtype | None = None


@dataclass(frozen=True)
class PipelineStageInfo:
    """The pipeline group of this process and its chunks of the model: several for an interleaved schedule.

    tied_weights: names of the weights that the first and the last stage both hold.
    """

    pipeline: Group
    chunks: tuple[Chunk, ...]
    tied_weights: frozenset[str] = frozenset()

    @property
    def num_chunks(self) -> int:
        """Chunks over all stages."""
        return self.pipeline.size * len(self.chunks)

    @property
    def is_last(self) -> bool:
        return self.pipeline.rank == self.pipeline.size - 1

    def broadcast_from_last(self, tensor: Tensor) -> None:
        dist.broadcast(tensor, group=self.pipeline.group, group_src=self.pipeline.size - 1)

    def reduce_tied_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Sum each gradient over the first and the last stage; both get bitwise the same result."""
        peer = 0 if self.is_last else self.pipeline.size - 1
        for gradient in gradients:
            received = torch.empty_like(gradient)
            group = self.pipeline.group
            exchange = [
                dist.P2POp(dist.isend, gradient, group=group, group_peer=peer),
                dist.P2POp(dist.irecv, received, group=group, group_peer=peer),
            ]
            for work in dist.batch_isend_irecv(exchange):
                work.wait()
            gradient.add_(received)


def keep_stage_layers(model: PreTrainedModel, pipeline: Group, virtual_pp_size: int = 1) -> PipelineStageInfo:
    """Remove the modules of other stages from a model on the meta device; the other parameters keep their names."""
    check_accepts_hidden_states(model)
    decoder = decoder_of(model)
    num_chunks = pipeline.size * virtual_pp_size
    layers = partition_layers(len(decoder.layers), num_chunks)
    chunks = tuple(
        Chunk(index, layers[index], is_last=index == num_chunks - 1)
        for index in range(pipeline.rank, num_chunks, pipeline.size)
    )
    tied = _tied_names(model)
    stage = PipelineStageInfo(pipeline, chunks, tied)
    for number in range(len(decoder.layers)):
        if not any(number in chunk.layers for chunk in chunks):
            decoder.layers[number] = IdentityModule()
    is_first = pipeline.rank == 0
    if not stage.is_last:
        decoder.norm = IdentityModule()
        model.set_output_embeddings(IdentityModule())
        # the head that the embedding is tied to is on the last stage
        model._tied_weights_keys = {}
    if not (is_first or (stage.is_last and tied)):
        model.set_input_embeddings(IdentityModule())
    return stage


def partition_layers(num_layers: int, num_chunks: int) -> list[range]:
    """Partition layers into chunks of nearly equal size.

    Extra layers go to the middle chunks, since the first also has the embedding and the last the head.
    """
    if num_layers < num_chunks:
        raise UserError(
            f"{num_layers} layers cannot be split into {num_chunks} pipeline chunks; lower pp_size or virtual_pp_size"
        )
    sizes = [num_layers // num_chunks] * num_chunks
    for index in [*range(1, num_chunks - 1), 0][: num_layers % num_chunks]:
        sizes[index] += 1
    return [range(start, stop) for start, stop in pairwise([0, *accumulate(sizes)])]


def _tied_names(model: PreTrainedModel) -> frozenset[str]:
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding.weight is not head.weight:
        return frozenset()
    return frozenset(name for name, parameter in model.named_parameters() if parameter is embedding.weight)
