"""Tokenized examples and micro-batches of them, unpadded; layouts collate them into model inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]
TokenWeights = npt.NDArray[np.float32]
#: of a dataset: a chosen and a rejected response; one response with a label; or several with scores
Kind = Literal["pairs", "labels", "lists"]
#: of a store: pairs whose tokens have weights are kept in other columns
StoredKind = Kind | Literal["weighted_pairs"]
#: what messages call the examples of a kind
UNITS: Mapping[Kind, str] = {"pairs": "pairs", "labels": "labelled responses", "lists": "lists"}
#: most bytes of the name of a subset
SUBSET_BYTES = 64
#: what a model scores: the tokens that the mask names, all tokens but the first, or the sequence as a whole at its end
Scored = Literal["response", "all", "end"]


class Response(NamedTuple):
    """One response to a prompt."""

    ids: TokenIds
    #: one bool per token, False where it is not scored; None scores all tokens
    mask: Mask | None = None
    #: a label (1 desirable, 0 not) or a score; None in pairs, whose order says which response is preferred
    value: float | None = None
    #: one per token, which the token's logp is multiplied by; None weighs all tokens equally
    weights: TokenWeights | None = None

    def first_tokens(self, count: int) -> Response:
        ids, mask, value, weights = self
        return Response(
            ids[:count], None if mask is None else mask[:count], value, None if weights is None else weights[:count]
        )


@dataclass(frozen=True)
class Example:
    """Token ids of one prompt and its responses; an example with a chosen and a rejected response is a pair."""

    prompt_ids: TokenIds
    #: the best first, where the data ranks them
    responses: tuple[Response, ...]
    weight: float = 1.0
    margin: float = 0.0
    #: of a data set that has them, while it is prepared: what an evaluation measures separately, and a curriculum's key
    subset: str = ""
    order: float = 0.0

    @classmethod
    def pair(
        cls,
        prompt_ids: TokenIds,
        chosen_ids: TokenIds,
        rejected_ids: TokenIds,
        chosen_mask: Mask | None = None,
        rejected_mask: Mask | None = None,
        weight: float = 1.0,
        margin: float = 0.0,
    ) -> Example:
        return cls(
            prompt_ids, (Response(chosen_ids, chosen_mask), Response(rejected_ids, rejected_mask)), weight, margin
        )

    @property
    def chosen(self) -> Response:
        return self.responses[0]

    @property
    def rejected(self) -> Response:
        return self.responses[1]


def kind_of(stored: StoredKind) -> Kind:
    return "pairs" if stored == "weighted_pairs" else stored


def scored_positions(prompt: TokenIds, response: Response, scored: Scored = "response") -> npt.NDArray[np.int64]:
    """Return the positions of the scored tokens in prompt + response, from 0; `end` is the one after the last token.

    What scores a position is the hidden state before it. Only `response` reads the mask.
    """
    ids, mask = response.ids, response.mask
    length = len(prompt) + len(ids)
    if scored == "all":
        return np.arange(1, length)
    if scored == "end":
        return np.array([length])
    return len(prompt) + (np.arange(len(ids)) if mask is None else np.flatnonzero(mask))


@dataclass(frozen=True)
class ExampleBatch:
    """The examples of one micro-batch and their row numbers in the store."""

    pair_ids: npt.NDArray[np.int64]
    pairs: tuple[Example, ...]

    def __len__(self) -> int:
        return len(self.pairs)

    @property
    def num_sides(self) -> int:
        """Responses of the example that has most."""
        return max(len(example.responses) for example in self.pairs)

    @property
    def values(self) -> npt.NDArray[np.float32] | None:
        """Labels or scores, [examples, sides], 0 where an example has no such response; None for pairs."""
        if not self.pairs or self.pairs[0].chosen.value is None:
            return None
        values = np.zeros((len(self), self.num_sides), dtype=np.float32)
        for row, example in zip(values, self.pairs, strict=True):
            row[: len(example.responses)] = [response.value for response in example.responses]
        return values

    def token_weights(self, side: int) -> TokenWeights | None:
        """Weights of the scored tokens of one response of each example, example after example; None without any."""
        found = [each.responses[side] for each in self.pairs if len(each.responses) > side]
        if all(each.weights is None for each in found):
            return None
        weights = [np.ones(len(each.ids), np.float32) if each.weights is None else each.weights for each in found]
        return np.concatenate(
            [each if of.mask is None else each[of.mask] for each, of in zip(weights, found, strict=True)]
        )

    def only_side(self, side: int) -> ExampleBatch:
        """Return the examples that have so many responses, with this one alone."""
        has_side = np.array([len(each.responses) > side for each in self.pairs], dtype=bool)
        found = [replace(each, responses=each.responses[side : side + 1]) for each in self.pairs]
        return ExampleBatch(self.pair_ids[has_side], tuple(each for each in found if each.responses))

    def sequences(self) -> Iterator[tuple[TokenIds, Response]]:
        """Yield the prompt and the response of each sequence: the first response of every example, then the second."""
        for side in range(self.num_sides):
            for example in self.pairs:
                if side < len(example.responses):
                    yield example.prompt_ids, example.responses[side]
