"""The pp axis: which layers of a model a stage of the pipeline keeps.

Embeddings are in the first stage, the last norm and the head in the last. Weights that embeddings and head share are in
both: each has a part of their gradient, and the two parts are added once a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from thresher.distributed.groups import Group
from thresher.errors import UserError
from thresher.models.pipeline_chunk import Chunk, IdentityModule, check_accepts_hidden_states


@dataclass(frozen=True)
class PipelineStageInfo:
    """A process's place in a pipeline, and its chunks of the model: one, or several for an interleaved schedule.

    tied_weights: names of the weights that the first and the last stage both hold.
    """

    pipeline: Group
    chunks: tuple[Chunk, ...]
    tied_weights: frozenset[str] = frozenset()

    @property
    def num_chunks(self) -> int:
        """Of the whole pipeline."""
        return self.pipeline.size * len(self.chunks)

    @property
    def is_last(self) -> bool:
        return self.pipeline.rank == self.pipeline.size - 1

    def broadcast_from_last(self, tensor: Tensor) -> None:
        dist.broadcast(tensor, group=self.pipeline.group, group_src=self.pipeline.size - 1)

    def reduce_tied_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Add up what the first and the last stage have of each gradient; both get the same numbers, bitwise."""
        peer = 0 if self.is_last else self.pipeline.size - 1
        for own in gradients:
            other = torch.empty_like(own)
            group = self.pipeline.group
            trade = [
                dist.P2POp(dist.isend, own, group=group, group_peer=peer),
                dist.P2POp(dist.irecv, other, group=group, group_peer=peer),
            ]
            for work in dist.batch_isend_irecv(trade):
                work.wait()
            own.add_(other)


def keep_stage_layers(model: PreTrainedModel, pipeline: Group, virtual_pp_size: int = 1) -> PipelineStageInfo:
    """Take away from an empty model what other stages compute; parameters that stay keep their names."""
    check_accepts_hidden_states(model)
    decoder = model.get_decoder()
    num_chunks = pipeline.size * virtual_pp_size
    parts = partition_layers(len(decoder.layers), num_chunks)
    chunks = tuple(
        Chunk(index, parts[index], is_last=index == num_chunks - 1)
        for index in range(pipeline.rank, num_chunks, pipeline.size)
    )
    shared = _shared_names(model)
    stage = PipelineStageInfo(pipeline, chunks, shared)
    for number in range(len(decoder.layers)):
        if not any(number in chunk.layers for chunk in chunks):
            decoder.layers[number] = IdentityModule()
    is_first = pipeline.rank == 0
    if not stage.is_last:
        decoder.norm = IdentityModule()
        model.set_output_embeddings(IdentityModule())
        # nothing is left to tie: what the embedding shares is in another process
        model._tied_weights_keys = {}
    if not (is_first or (stage.is_last and shared)):
        model.set_input_embeddings(IdentityModule())
    return stage


def partition_layers(num_layers: int, num_chunks: int) -> list[range]:
    """Cut layers into chunks of nearly the same size; the first chunk has the embedding and the last the head beside
    them, so that what is left over goes to others.
    """
    if num_layers < num_chunks:
        raise UserError(
            f"a model of {num_layers} layers cannot be cut into {num_chunks} chunks; lower pp_size or virtual_pp_size"
        )
    sizes = [num_layers // num_chunks] * num_chunks
    for index in [*range(1, num_chunks - 1), 0][: num_layers % num_chunks]:
        sizes[index] += 1
    return [range(start, stop) for start, stop in pairwise([0, *accumulate(sizes)])]


def _shared_names(model: PreTrainedModel) -> frozenset[str]:
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding.weight is not head.weight:
        return frozenset()
    return frozenset(name for name, parameter in model.named_parameters() if parameter is embedding.weight)
