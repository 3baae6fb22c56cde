"""Tokenize text in which placeholders are control tokens, and the same tokens spelled out are plain text.

A placeholder repeats one private-use character as often as the token has characters, so that offsets stay the same. A
copy of the tokenizer has the placeholders in place of the control tokens, with the same ids and rules, and makes no
control token from any other text. A full text is tokenized in one call, as by the original tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from thresher.data.rows.parsing import BadRowError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Unicode planes 15 and 16 are private use and do not occur in known vocabularies
_FIRST_CHARACTER = 0xF0000


class PlaceholderTokenizer:
    """Placeholders of a tokenizer's control tokens, and a copy of the tokenizer, made at first use, that reads them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str]) -> None:
        self._tokenizer: Any = tokenizer
        self.by_token: Mapping[str, str] = {
            token: chr(_FIRST_CHARACTER + number) * len(token) for number, token in enumerate(sorted(tokens))
        }

    def check(self, text: str) -> None:
        """Raise `BadRowError` for text that contains a placeholder, and for a slow tokenizer."""
        if not self._tokenizer.is_fast:
            raise BadRowError("the text spells a control token, which only a fast tokenizer can keep as text")
        if max(text, default="") >= chr(_FIRST_CHARACTER) and any(name in text for name in self.by_token.values()):
            raise BadRowError("the text spells a control token and contains private-use characters reserved for them")

    def encode(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """Tokenize texts; return for each its ids and the start and end offset of each token."""
        copy, original_ids = self._copy
        return [
            ([original_ids.get(id_, id_) for id_ in encoding.ids], list(encoding.offsets))
            for encoding in copy.encode_batch(list(texts), add_special_tokens=False)
        ]

    @cached_property
    def _copy(self) -> tuple[Any, dict[int, int]]:
        from tokenizers import Tokenizer

        state: dict[str, Any] = json.loads(self._tokenizer.backend_tokenizer.to_str())
        state["padding"] = state["truncation"] = None
        ids = {}
        for token in state["added_tokens"]:
            name = self.by_token.get(token["content"])
            if name is not None:
                # a normalizer must not change placeholders
                token.update(content=name, normalized=False)
            ids[token["content"]] = token["id"]
        _rename(state["model"], self.by_token, ids)
        copy: Any = Tokenizer.from_str(json.dumps(state))
        return copy, {copy.token_to_id(name): number for name, number in ids.items()}


def _rename(model: dict[str, Any], names: Mapping[str, str], ids: Mapping[str, int]) -> None:
    """Rename control tokens to placeholders in a model's vocabulary, so that it makes none from other text."""
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        kept = {content: number for content, number in vocabulary.items() if content not in names}
        model["vocab"] = {**kept, **ids}
    else:
        model["vocab"] = [[names.get(content, content), score] for content, score in vocabulary]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        pairs = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"]]
        model["merges"] = [pair for pair in pairs if not names.keys() & {*pair, "".join(pair)}]
