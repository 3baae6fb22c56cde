"""Layouts: how the examples of a micro-batch are arranged in a model's input. All layouts give the same logps.

`packed` puts all examples into one row, one sequence per response, without padding. `shared` computes the prompt once:
[prompt | response 1 | response 2 ...], where no response attends to another and the positions of each continue after
the prompt. `padded` has one row per response, right-padded to the longest; tests compare the others with it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from thresher.data.example import Example, ExampleBatch, Response, Scored, TokenIds, scored_positions
from thresher.errors import UserError
from thresher.models.attention.segments import KeptRows, PackedAttention, Segment
from thresher.models.branching_state import branching_layers
from thresher.models.loading.load import soft_caps_scores

VARLEN = "varlen"  # `attn_implementation` of packed rows; all others are transformers'
LayoutName = Literal["auto", "shared", "packed", "padded"]
_NO_TARGET = np.zeros(1, dtype=np.int32)  # of a score at the end of a sequence
_KNOWN_LAYERS = {"full_attention", "sliding_attention", "mlp", "moe"}
Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ModelInputs:
    """Model inputs of one micro-batch, and the rows that predict its response tokens."""

    model_inputs: dict[str, Tensor]  # keyword arguments of the backbone's forward
    # [num_scored] flat row of the hidden states that predicts each scored token: all first responses, then all second
    scored_rows: Tensor
    targets: Tensor  # [num_scored] the tokens to be predicted
    side_lengths: tuple[Tensor, ...]  # [num_pairs] scored tokens of each example's first response, of its second, ...
    num_useful_tokens: int  # of all sequences, each a prompt with one response; the same in every layout
    num_padding_tokens: int
    # [rows] how many tokens each flat row stands for: one per response in a shared prompt, 0 in padding
    row_weights: Tensor
    num_shared_tokens: int = 0
    segments: tuple[Segment, ...] | None = None  # of packed rows; None: plain causal attention
    uses_varlen: bool = False  # on a GPU, flash kernels attend over the segments, and not FlexAttention
    kept: KeptRows | None = None  # the rows that the last layer computes if it skips others
    scored_in_kept: Tensor | None = None


def _check_tokens(batch: ExampleBatch, vocab_size: int | None) -> None:
    """Reject an empty prompt, and ids that the models have no embedding for, before one indexes out of range."""
    for pair_id, pair in zip(batch.pair_ids, batch.pairs, strict=True):
        if len(pair.prompt_ids) == 0:
            raise UserError(f"pair {pair_id} has an empty prompt, so nothing predicts its first token")
        for ids in (pair.prompt_ids, *(response.ids for response in pair.responses)):
            if vocab_size is not None and len(ids) and not (ids.min() >= 0 and ids.max() < vocab_size):
                outside = next(int(each) for each in ids if not 0 <= each < vocab_size)
                raise UserError(
                    f"pair {pair_id} contains the token id {outside}, but the model's vocabulary has {vocab_size} "
                    "tokens; use the tokenizer that belongs to the model, and prepare the pairs again"
                )


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
    """One row per micro-batch: the layouts `shared` and `packed`."""

    shares_prompt: bool
    vocab_size: int | None = None  # of the smallest vocabulary; None: not known
    scored: Scored = "response"
    uses_varlen: bool = False  # `attn_implementation: varlen`
    computes_ends: bool = False  # the last token of each response is a row too, which predicts nothing
    # several sequences share a row, which plain causal attention would mix
    needs_pair_attention: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return "shared" if self.shares_prompt else "packed"

    def collate(self, batch: ExampleBatch) -> ModelInputs:
        """Concatenate the pairs; the last token of a response is omitted if it predicts nothing."""
        _check_tokens(batch, self.vocab_size)
        row = _PackedRow([], [], [], [])
        scored = _ScoredTokens(batch)
        for index, pair in enumerate(batch.pairs):
            packed = self._pack_shared(row, pair) if self.shares_prompt else self._pack_separate(row, pair)
            for side, (rows, response) in enumerate(zip(packed, pair.responses, strict=True)):
                positions = scored_positions(pair.prompt_ids, response, self.scored)
                # the row of a token predicts the next token of its sequence
                targets = np.concatenate([pair.prompt_ids, response.ids, _NO_TARGET])[positions]
                scored.by_side[side][index] = rows[positions - 1], targets
        scored_rows = scored.rows
        kept, scored_in_kept = _rows_to_keep(row.segments, scored_rows, self.uses_varlen)
        num_useful = sum(len(p.prompt_ids) + len(response.ids) for p in batch.pairs for response in p.responses)
        return ModelInputs(
            model_inputs={
                "input_ids": torch.from_numpy(np.concatenate(row.tokens).astype(np.int64))[None],
                "position_ids": torch.from_numpy(np.concatenate(row.positions))[None],
            },
            scored_rows=torch.from_numpy(scored_rows),
            targets=torch.from_numpy(scored.targets),
            side_lengths=scored.lengths,
            num_useful_tokens=num_useful,
            num_padding_tokens=0,
            row_weights=torch.from_numpy(np.concatenate(row.weights)),
            num_shared_tokens=num_useful - row.length,
            segments=tuple(row.segments),
            uses_varlen=self.uses_varlen,
            kept=kept,
            scored_in_kept=torch.from_numpy(scored_in_kept),
        )

    def _pack_shared(self, row: _PackedRow, pair: Example) -> list[Rows]:
        """Append the prompt and the responses; return the rows of each response's sequence."""
        prompt_length = len(pair.prompt_ids)
        start = row.add(pair.prompt_ids, 0, weight=len(pair.responses))
        prompt = np.arange(start, start + prompt_length)  # the rows that all responses share
        sequences = []
        for number, response in enumerate(pair.responses):
            first = row.add(self._computed(response), prompt_length)
            sequences.append(np.concatenate([prompt, np.arange(first, row.length)]))
            if number == 0:
                row.segments.append(Segment(start, row.length))
            elif row.length > first:
                row.segments.append(Segment(first, row.length, start, start + prompt_length))
        return sequences

    def _pack_separate(self, row: _PackedRow, pair: Example) -> list[Rows]:
        sequences = []
        for response in pair.responses:
            start = row.add(pair.prompt_ids, 0)
            row.add(self._computed(response), len(pair.prompt_ids))
            row.segments.append(Segment(start, row.length))
            sequences.append(np.arange(start, row.length))
        return sequences

    def _computed(self, response: Response) -> TokenIds:
        return response.ids if self.scored == "end" or self.computes_ends else response.ids[:-1]


class _ScoredTokens:
    """Rows and targets of a micro-batch's scored tokens by side: the first responses of all examples come first."""

    def __init__(self, batch: ExampleBatch) -> None:
        absent = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int32)
        self.by_side: list[list[tuple[Rows, TokenIds]]] = [[absent] * len(batch) for _ in range(batch.num_sides)]

    @property
    def rows(self) -> Rows:
        return np.concatenate([rows for side in self.by_side for rows, _ in side]).astype(np.int64)

    @property
    def targets(self) -> Rows:
        return np.concatenate([targets for side in self.by_side for _, targets in side]).astype(np.int64)

    @property
    def lengths(self) -> tuple[Tensor, ...]:
        return tuple(torch.tensor([len(rows) for rows, _ in side], dtype=torch.int64) for side in self.by_side)


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


@dataclass(frozen=True)
class PaddedLayout:
    """A row per response: the first responses of all examples, then the second responses, and so on."""

    pad_id: int
    vocab_size: int | None = None  # of the smallest vocabulary
    scored: Scored = "response"
    name: ClassVar[str] = "padded"
    shares_prompt: ClassVar[bool] = False
    needs_pair_attention: ClassVar[bool] = False

    def collate(self, batch: ExampleBatch) -> ModelInputs:
        """Pad and stack both sides; list the positions that predict scored tokens."""
        _check_tokens(batch, self.vocab_size)
        responses = [
            (side, index, pair.prompt_ids, pair.responses[side])
            for side in range(batch.num_sides)
            for index, pair in enumerate(batch.pairs)
            if side < len(pair.responses)
        ]
        width = max(len(prompt) + len(response.ids) for _, _, prompt, response in responses)
        input_ids = np.full((len(responses), width), self.pad_id, dtype=np.int64)
        attention_mask = np.zeros((len(responses), width), dtype=np.int64)
        scored = _ScoredTokens(batch)
        for row, (side, index, prompt, response) in enumerate(responses):
            end = len(prompt) + len(response.ids)
            input_ids[row, : len(prompt)] = prompt
            input_ids[row, len(prompt) : end] = response.ids
            attention_mask[row, :end] = 1
            positions = scored_positions(prompt, response, self.scored)
            # the hidden state at t predicts the token at t + 1
            targets = np.append(input_ids[row], _NO_TARGET)[positions].astype(np.int32)
            scored.by_side[side][index] = row * width + positions - 1, targets
        num_useful = int(attention_mask.sum())
        return ModelInputs(
            model_inputs={
                "input_ids": torch.from_numpy(input_ids),
                "attention_mask": torch.from_numpy(attention_mask),
                "position_ids": torch.arange(width).expand(len(responses), width),
            },
            scored_rows=torch.from_numpy(scored.rows),
            targets=torch.from_numpy(scored.targets),
            side_lengths=scored.lengths,
            num_useful_tokens=num_useful,
            num_padding_tokens=input_ids.size - num_useful,
            row_weights=torch.from_numpy(attention_mask.reshape(-1)),
        )


# builds model inputs on the host; the engine moves them to a device
Layout: TypeAlias = PackedLayout | PaddedLayout


def with_ends(layout: Layout) -> Layout:
    """Let every token of a sequence be a row."""
    return replace(layout, computes_ends=True) if isinstance(layout, PackedLayout) else layout


def choose_layout(
    requested: LayoutName,
    configs: Sequence[PreTrainedConfig],  # of every model that scores with the layout
    attn_implementation: str | None,
    pad_id: int | None,  # only for padded rows
    *,
    scored: Scored = "response",
    probe: Callable[[PreTrainedConfig], str | None] | None = None,
) -> tuple[Layout, str | None]:
    """Return the fastest layout that all models support and, if packing is not possible, a line that says why.

    `probe` finds out what packed rows of a family lack (`models/probe.py`); None believes the config.
    """
    requested_kernel = transformers_attention(attn_implementation)
    ask = (lambda _config: None) if probe is None or requested == "padded" else probe
    reasons = (_why_not_packable(config, requested_kernel) or ask(config) for config in configs)
    reason = next(filter(None, reasons), None)
    vocab_size = min(filter(None, (vocab_size_of(config) for config in configs)), default=None)
    if attn_implementation == VARLEN:
        _check_varlen(requested, configs, reason)
    if requested == "padded" or (requested == "auto" and reason is not None):
        if pad_id is None:
            raise UserError(
                "layout padded needs a pad token, and the tokenizer has neither a pad token nor EOS; name an existing "
                "token with actor_train.model_args.pad_token"
            )
        note = None if reason is None else f"using layout padded: {reason}"
        return PaddedLayout(pad_id, vocab_size, scored), note
    if reason is not None:
        raise UserError(f"layout {requested} is not possible: {reason}; use layout=auto or layout=padded")
    return PackedLayout(requested != "packed", vocab_size, scored, attn_implementation == VARLEN), None


def transformers_attention(attn_implementation: str | None) -> str | None:
    """Return what transformers loads a model with; the attention of packed rows replaces it later."""
    return None if attn_implementation == VARLEN else attn_implementation


def vocab_size_of(config: PreTrainedConfig) -> int | None:
    """Return the number of tokens that a model has embeddings for; None if its config does not say."""
    size = getattr(config.get_text_config(), "vocab_size", None)
    return size if isinstance(size, int) else None


def _check_varlen(requested: LayoutName, configs: Sequence[PreTrainedConfig], reason: str | None) -> None:
    """Reject `varlen` where rows are not packed or its kernels cannot compute the attention."""
    if requested == "padded":
        reason = "the layout is padded"
    for text in (config.get_text_config() for config in configs):
        if getattr(text, "sliding_window", None) is not None:
            reason = f"the model family {text.model_type} has a sliding window"
        elif soft_caps_scores(text):
            reason = f"the model family {text.model_type} caps its attention scores"
    if reason is not None:
        raise UserError(
            f"attn_implementation is set to {VARLEN}, but {reason}; remove attn_implementation: packed rows need none"
        )


def _why_not_packable(config: PreTrainedConfig, attn_implementation: str | None) -> str | None:
    """Return why a model cannot have several sequences in one row; None if it can.

    Packing requires that only attention, called through transformers' interface, and state that branches mix tokens.
    """
    name = config.model_type
    if attn_implementation is not None:
        return f"attn_implementation is set to {attn_implementation}, and packed rows need thresher's attention"
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return f"transformers has no causal LM for the model family {name}"
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    text = config.get_text_config()  # multimodal models nest the config of their language model
    branching = branching_layers(model_class)
    unknown = set(getattr(text, "layer_types", None) or ()) - _KNOWN_LAYERS - branching
    if unknown == {"chunked_attention"}:
        return f"the model family {name} attends within chunks of a sequence"
    has_state = getattr(model_class, "_is_stateful", False)
    if unknown or (has_state and "linear_attention" not in branching):
        kinds = ", ".join(sorted(unknown)) or "recurrent"
        return f"the model family {name} has {kinds} layers, which carry state from token to token"
    # transformers sets the flag for few families that have state
    has_interface = has_state and hasattr(sys.modules[model_class.__module__], "ALL_ATTENTION_FUNCTIONS")
    if not has_interface and not getattr(model_class, "_supports_attention_backend", False):
        return f"the model family {name} does not use transformers' attention interface"
    return None
