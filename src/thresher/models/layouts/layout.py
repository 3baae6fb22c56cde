"""Interface between pairs and a model's forward: a layout builds the model inputs and lists the scored rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from thresher.data.pair import PairBatch
from thresher.errors import UserError
from thresher.models.attention.segments import KeptRows, Segment


@dataclass(frozen=True)
class ModelInputs:
    """Model inputs of one micro-batch, and the rows that predict its response tokens.

    model_inputs: keyword arguments of the backbone's forward.
    scored_rows: [num_scored] flat row of the hidden states that predicts each scored token, all chosen sides first,
        then all rejected sides, pair after pair.
    targets: [num_scored] the tokens to be predicted.
    chosen_lengths, rejected_lengths: [num_pairs] scored tokens of each side.
    num_useful_tokens: tokens of both sequences of every pair, the same in every layout.
    segments: attention segments, for layouts that pack several sequences into one row; None: plain causal attention.
    uses_varlen: whether flash kernels attend over the segments on a GPU, and not FlexAttention.
    row_weights: [rows] how many tokens that predict another one each flat row stands for: 2 in a shared prompt, 0 in
        padding and at the end of a sequence. All layouts have the same sum.
    kept, scored_in_kept: the rows that the last layer computes if it skips others, and the scored rows among them.
    """

    model_inputs: dict[str, Tensor]
    scored_rows: Tensor
    targets: Tensor
    chosen_lengths: Tensor
    rejected_lengths: Tensor
    num_useful_tokens: int
    num_padding_tokens: int
    row_weights: Tensor
    num_shared_tokens: int = 0
    segments: tuple[Segment, ...] | None = None
    uses_varlen: bool = False
    kept: KeptRows | None = None
    scored_in_kept: Tensor | None = None


class Layout(Protocol):
    """Build model inputs from pairs, on the host; the engine moves them to a device."""

    @property
    def name(self) -> str: ...

    @property
    def shares_prompt(self) -> bool: ...

    @property
    def scores_prompt(self) -> bool:
        """Whether all tokens but the first are scored, and not only those of the responses."""
        ...

    @property
    def needs_pair_attention(self) -> bool:
        """Whether several sequences share a row, which plain causal attention would mix."""
        ...

    def collate(self, batch: PairBatch) -> ModelInputs: ...


def check_token_ids(batch: PairBatch, vocab_size: int | None) -> None:
    """Reject ids that the models have no embedding for, before one indexes out of range; None: not known."""
    if vocab_size is None:
        return
    for pair_id, pair in zip(batch.pair_ids, batch.pairs, strict=True):
        for ids in (pair.prompt_ids, pair.chosen_ids, pair.rejected_ids):
            if len(ids) and not (ids.min() >= 0 and ids.max() < vocab_size):
                outside = next(int(each) for each in ids if not 0 <= each < vocab_size)
                raise UserError(
                    f"pair {pair_id} contains the token id {outside}, but the model's vocabulary has {vocab_size} "
                    "tokens; use the tokenizer that belongs to the model, and prepare the pairs again"
                )
