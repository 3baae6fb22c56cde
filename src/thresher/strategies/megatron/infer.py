"""Inference with Megatron-Core: scores pairs for evaluation and for the reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from thresher.data.pair import PairBatch
from thresher.errors import UserError
from thresher.losses.pairs import NO_STATISTICS, ChosenRejectedLogps, TokenStatistics
from thresher.models.forward_check import TOLERANCES, LayoutError
from thresher.models.layouts import Layout, PaddedLayout
from thresher.strategies.megatron.model import MegatronPairModel
from thresher.strategies.megatron.schedule import ScheduleExecutor


class MegatronInfer:
    """A model that only scores; chunks: those of this process."""

    def __init__(self, chunks: Sequence[MegatronPairModel], layout: Layout, wrapped: Sequence[nn.Module] | None = None):
        """wrapped: the chunks with gradient buffers, of a policy."""
        self.chunks = list(chunks)
        self.dp_group = self.chunks[0].groups.dp
        self.executor = ScheduleExecutor(self.chunks, list(wrapped or chunks), layout)

    @torch.no_grad()
    def score(self, batch: PairBatch, *, statistics: TokenStatistics = NO_STATISTICS) -> ChosenRejectedLogps:
        """Score a micro-batch; the models have no dropout."""
        return self.executor.score(batch, statistics=statistics).detach()

    def check_logps(self, batch: PairBatch) -> None:
        """Compare the logps with those of plain causal attention over one pair at a time.

        No process has the model of transformers, whose forward other engines compare with. Context parallelism does not
        shard padded rows, so that its all-to-all is checked too.
        """
        layout = self.executor.layout
        padded = PaddedLayout(pad_id=0, scores_prompt=layout.scores_prompt)
        one_by_one = replace(self.executor, layout=padded)
        pairs = [PairBatch(batch.pair_ids[i : i + 1], batch.pairs[i : i + 1]) for i in range(len(batch))]
        scored = [one_by_one.score(pair) for pair in pairs]
        expected = torch.cat([sides.chosen.values for sides in scored] + [sides.rejected.values for sides in scored])
        ours = self.score(batch)
        found = torch.cat([ours.chosen.values, ours.rejected.values])
        distance = (found - expected).abs().mean().item() if len(expected) else 0.0
        if not distance <= TOLERANCES[self.chunks[0].config.params_dtype]:
            has_cp = self.chunks[0].groups.context_parallel is not None  # which the padded layout does not allow
            hint = "remove context_parallel_size and use layout=padded" if has_cp else "use layout=padded"
            raise LayoutError(
                f"log-probabilities of layout `{layout.name}` differ from those of single padded pairs by "
                f"{distance:.2g} nats per token under Megatron-Core; {hint}"
            )

    def weights(self) -> Mapping[str, Tensor]:
        """This process's slices of the weights, by the names of transformers."""
        return {
            piece.hf_name: piece.values()
            for chunk in self.chunks
            for name, parameter in chunk.named_parameters()
            for piece in chunk.weight_map.pieces(name, parameter.detach())
        }

    def ema_update(self, weights: Mapping[str, Tensor], alpha: float) -> None:  # noqa: ARG002
        raise UserError("megatron_infer cannot follow the policy (reference.sync_steps); use fsdp2_train")
