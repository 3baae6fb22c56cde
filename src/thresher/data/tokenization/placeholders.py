"""Text in which some spellings of a control token are the token and others are text: stand-ins mark the former.

A stand-in is a run of one private-use character, as long as the token's text, so that places in a text stay where they
are. A copy of the tokenizer knows the stand-ins in place of the tokens, with the same ids and rules, and makes no
control token of any other text: whole texts are tokenised at once, as by the tokenizer itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from thresher.data.rows.parsing import BadRowError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# planes 15 and 16 of Unicode are private use; no tokenizer we know has a word for them
_FIRST_CHARACTER = 0xF0000


class PlaceholderTokenizer:
    """The stand-ins of a tokenizer's control tokens; the copy of the tokenizer is made when it is first needed."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str]) -> None:
        self._tokenizer: Any = tokenizer
        self.of_token: Mapping[str, str] = {
            token: chr(_FIRST_CHARACTER + number) * len(token) for number, token in enumerate(sorted(tokens))
        }

    def check(self, text: str) -> None:
        """Refuse text that could be taken for a stand-in, or a tokenizer that has no copy."""
        if not self._tokenizer.is_fast:
            raise BadRowError("only a fast tokenizer can keep the text of a control token as text")
        if max(text, default="") >= chr(_FIRST_CHARACTER) and any(name in text for name in self.of_token.values()):
            raise BadRowError("the text spells a control token and holds private-use characters that mark them here")

    def encode(self, texts: Sequence[str]) -> list[tuple[list[int], list[int]]]:
        """Tokenise texts; return the ids of each, and where each token starts."""
        copy, ids_of = self._copy
        return [
            ([ids_of.get(each, each) for each in encoding.ids], [start for start, _ in encoding.offsets])
            for encoding in copy.encode_batch(list(texts), add_special_tokens=False)
        ]

    @cached_property
    def _copy(self) -> tuple[Any, dict[int, int]]:
        from tokenizers import Tokenizer

        state: dict[str, Any] = json.loads(self._tokenizer.backend_tokenizer.to_str())
        state["padding"] = state["truncation"] = None
        true_ids = {}
        for token in state["added_tokens"]:
            name = self.of_token.get(token["content"])
            if name is not None:
                # stand-ins are no text, so no normaliser may touch them
                token.update(content=name, normalized=False)
            true_ids[token["content"]] = token["id"]
        _rename(state["model"], self.of_token, true_ids)
        copy: Any = Tokenizer.from_str(json.dumps(state))
        return copy, {copy.token_to_id(name): number for name, number in true_ids.items()}


def _rename(model: dict[str, Any], names: Mapping[str, str], ids: Mapping[str, int]) -> None:
    """Let the model know control tokens by their stand-ins alone, so that it can make none of them from other text."""
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        kept = {content: number for content, number in vocabulary.items() if content not in names}
        model["vocab"] = {**kept, **ids}
    else:
        model["vocab"] = [[names.get(content, content), score] for content, score in vocabulary]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        pairs = [each.split(" ", 1) if isinstance(each, str) else each for each in model["merges"]]
        model["merges"] = [pair for pair in pairs if not names.keys() & {*pair, "".join(pair)}]
