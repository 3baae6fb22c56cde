"""Padded layout: two rows per pair, right-padded to the longest. Tests compare the other layouts with it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from thresher.data.pair import PairBatch, TokenIds, scored_positions
from thresher.errors import UserError
from thresher.models.layouts.layout import ModelInputs, check_token_ids


@dataclass(frozen=True)
class PaddedLayout:
    """All chosen rows, then all rejected rows. vocab_size: of the smallest vocabulary."""

    pad_id: int
    vocab_size: int | None = None
    scores_prompt: bool = False
    name: str = "padded"
    shares_prompt: bool = False
    needs_pair_attention: bool = False

    def collate(self, batch: PairBatch) -> ModelInputs:
        """Pad and stack both sides; list the positions that predict scored tokens."""
        check_token_ids(batch, self.vocab_size)
        sides = [(pair.prompt_ids, pair.chosen_ids, pair.chosen_mask) for pair in batch.pairs]
        sides += [(pair.prompt_ids, pair.rejected_ids, pair.rejected_mask) for pair in batch.pairs]
        width = max(len(prompt) + len(response) for prompt, response, _ in sides)
        input_ids = np.full((len(sides), width), self.pad_id, dtype=np.int64)
        attention_mask = np.zeros((len(sides), width), dtype=np.int64)
        rows: list[TokenIds] = []
        targets: list[TokenIds] = []
        for i, (prompt, response, mask) in enumerate(sides):
            if len(prompt) == 0:
                raise UserError(
                    f"pair {batch.pair_ids[i % len(batch)]} has an empty prompt, so nothing predicts its first token"
                )
            end = len(prompt) + len(response)
            input_ids[i, : len(prompt)] = prompt
            input_ids[i, len(prompt) : end] = response
            attention_mask[i, :end] = 1
            scored = scored_positions(prompt, response, mask, with_prompt=self.scores_prompt)
            # the hidden state at t predicts the token at t + 1
            rows.append((i * width + scored - 1).astype(np.int32))
            targets.append(input_ids[i, scored].astype(np.int32))
        lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        num_useful = int(attention_mask.sum())
        # the last token of each sequence predicts nothing
        row_weights = np.pad(attention_mask[:, 1:], ((0, 0), (0, 1)))
        return ModelInputs(
            model_inputs={
                "input_ids": torch.from_numpy(input_ids),
                "attention_mask": torch.from_numpy(attention_mask),
                "position_ids": torch.arange(width).expand(len(sides), width),
            },
            scored_rows=torch.from_numpy(np.concatenate(rows).astype(np.int64)),
            targets=torch.from_numpy(np.concatenate(targets).astype(np.int64)),
            chosen_lengths=lengths[: len(batch)],
            rejected_lengths=lengths[len(batch) :],
            num_useful_tokens=num_useful,
            num_padding_tokens=input_ids.size - num_useful,
            row_weights=torch.from_numpy(row_weights.reshape(-1)),
        )
