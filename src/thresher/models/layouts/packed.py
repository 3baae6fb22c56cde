"""Packed layouts: all pairs of a micro-batch in one row, without padding.

`packed` has two sequences per pair; `shared` computes the prompt once: [prompt | chosen | rejected], where the rejected
side does not attend to the chosen side and its positions continue after the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from thresher.data.pair import Pair, PairBatch, TokenIds, scored_positions
from thresher.errors import UserError
from thresher.models.attention.segments import KeptRows, PackedAttention, Segment
from thresher.models.layouts.layout import ModelInputs, check_token_ids

Rows = npt.NDArray[np.int64]


@dataclass
class _PackedRow:
    """A packed row under construction."""

    tokens: list[TokenIds]
    weights: list[Rows]
    positions: list[Rows]
    segments: list[Segment]
    length: int = 0

    def add(self, ids: TokenIds, first_position: int, *, weight: int = 1) -> int:
        """Append tokens, each of which stands for `weight` tokens, and return the row of the first."""
        start = self.length
        self.weights.append(np.full(len(ids), weight))
        self.tokens.append(ids)
        self.positions.append(np.arange(first_position, first_position + len(ids)))
        self.length += len(ids)
        return start


@dataclass(frozen=True)
class PackedLayout:
    """One row per micro-batch; shares_prompt: `shared`, else `packed`. vocab_size: of the smallest vocabulary.

    uses_varlen: `attn_implementation: varlen`.
    """

    shares_prompt: bool
    vocab_size: int | None = None
    scores_prompt: bool = False
    uses_varlen: bool = False

    @property
    def name(self) -> str:
        return "shared" if self.shares_prompt else "packed"

    @property
    def needs_pair_attention(self) -> bool:
        return True

    def collate(self, batch: PairBatch) -> ModelInputs:
        """Concatenate the pairs; the last token of a response predicts nothing and is omitted."""
        check_token_ids(batch, self.vocab_size)
        row = _PackedRow([], [], [], [])
        sides: tuple[list[tuple[Rows, TokenIds]], ...] = ([], [])
        for pair_id, pair in zip(batch.pair_ids, batch.pairs, strict=True):
            if len(pair.prompt_ids) == 0:
                raise UserError(f"pair {pair_id} has an empty prompt, so nothing predicts its first token")
            packed = self._pack_shared(row, pair) if self.shares_prompt else self._pack_separate(row, pair)
            for side, rows, ids, mask in zip(
                sides, packed, (pair.chosen_ids, pair.rejected_ids), (pair.chosen_mask, pair.rejected_mask), strict=True
            ):
                scored = scored_positions(pair.prompt_ids, ids, mask, with_prompt=self.scores_prompt)
                # the row of a token predicts the next token of its sequence
                side.append((rows[scored - 1], np.concatenate([pair.prompt_ids, ids])[scored]))
        both = [*sides[0], *sides[1]]
        scored_rows = np.concatenate([rows for rows, _ in both]).astype(np.int64)
        kept, scored_in_kept = _rows_to_keep(row.segments, scored_rows, self.uses_varlen)
        num_useful = sum(2 * len(p.prompt_ids) + len(p.chosen_ids) + len(p.rejected_ids) for p in batch.pairs)
        return ModelInputs(
            model_inputs={
                "input_ids": torch.from_numpy(np.concatenate(row.tokens).astype(np.int64))[None],
                "position_ids": torch.from_numpy(np.concatenate(row.positions))[None],
            },
            scored_rows=torch.from_numpy(scored_rows),
            targets=torch.from_numpy(np.concatenate([ids for _, ids in both]).astype(np.int64)),
            chosen_lengths=torch.tensor([len(ids) for _, ids in sides[0]], dtype=torch.int64),
            rejected_lengths=torch.tensor([len(ids) for _, ids in sides[1]], dtype=torch.int64),
            num_useful_tokens=num_useful,
            num_padding_tokens=0,
            row_weights=torch.from_numpy(np.concatenate(row.weights)),
            num_shared_tokens=num_useful - row.length,
            segments=tuple(row.segments),
            uses_varlen=self.uses_varlen,
            kept=kept,
            scored_in_kept=torch.from_numpy(scored_in_kept),
        )

    @staticmethod
    def _pack_shared(row: _PackedRow, pair: Pair) -> tuple[Rows, Rows]:
        """Append prompt, chosen and rejected; return the rows of each side's sequence."""
        prompt_length = len(pair.prompt_ids)
        start = row.add(pair.prompt_ids, 0, weight=2)
        chosen = row.add(pair.chosen_ids[:-1], prompt_length)
        row.segments.append(Segment(start, row.length))
        rejected = row.add(pair.rejected_ids[:-1], prompt_length)
        if row.length > rejected:
            row.segments.append(Segment(rejected, row.length, start, start + prompt_length))
        prompt = np.arange(start, start + prompt_length)  # the rows that both sides share
        return (
            np.concatenate([prompt, np.arange(chosen, chosen + len(pair.chosen_ids) - 1)]),
            np.concatenate([prompt, np.arange(rejected, rejected + len(pair.rejected_ids) - 1)]),
        )

    @staticmethod
    def _pack_separate(row: _PackedRow, pair: Pair) -> tuple[Rows, Rows]:
        rows = []
        for ids in (pair.chosen_ids, pair.rejected_ids):
            start = row.add(pair.prompt_ids, 0)
            row.add(ids[:-1], len(pair.prompt_ids))
            row.segments.append(Segment(start, row.length))
            rows.append(np.arange(start, row.length))
        return rows[0], rows[1]


def _rows_to_keep(segments: list[Segment], scored_rows: Rows, uses_varlen: bool) -> tuple[KeptRows, Rows]:
    """Return the rows from each segment's first scored row to its last, and the scored rows' indices among them."""
    needed = np.unique(scored_rows)
    tails = []
    for segment in segments:
        low, high = np.searchsorted(needed, [segment.start, segment.stop])
        if low < high:
            tails.append(segment.tail(int(needed[low]), int(needed[high - 1]) + 1))
    rows = np.concatenate([np.arange(tail.start, tail.stop) for tail in tails] or [np.zeros(0, dtype=np.int64)])
    visibility = PackedAttention(tuple(tails), uses_varlen=uses_varlen)
    return KeptRows(torch.from_numpy(rows), visibility), np.searchsorted(rows, scored_rows)


def pad_to_multiple(batch: ModelInputs, size: int) -> ModelInputs:
    """Pad a packed row to a multiple of `size`; the padding is a separate segment that no scored row attends to."""
    assert batch.segments is not None  # noqa: S101
    rows = batch.model_inputs["input_ids"].shape[1]
    extra = -rows % size
    if not extra:
        return batch
    # token 0, not the padding token, which some models treat specially
    inputs = {name: F.pad(tensor, (0, extra)) for name, tensor in batch.model_inputs.items()}
    inputs["position_ids"][:, rows:] = torch.arange(extra)
    return replace(
        batch,
        model_inputs=inputs,
        segments=(*batch.segments, Segment(rows, rows + extra)),
        num_padding_tokens=batch.num_padding_tokens + extra,
        row_weights=F.pad(batch.row_weights, (0, extra)),
    )
