"""Join rows of one answer and a label (KTO style): same prompt and opposite labels become one pair.

The n-th good answer of a prompt is paired with its n-th bad one in file order, for any number of processes.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict, deque
from typing import Any

from thresher.data.rows.formats import RowFormat
from thresher.data.rows.messages import to_messages
from thresher.data.rows.parsing import BadRowError, Row, quoted

_LABELS = {"true": True, "1": True, "false": False, "0": False}


class UnpairedJoiner:
    """Answers without a partner so far, by prompt and label."""

    def __init__(self) -> None:
        self._waiting: dict[bytes, dict[bool, deque[Row]]] = defaultdict(lambda: {True: deque(), False: deque()})
        self.num_waiting = 0

    def join(self, row: Row, row_format: RowFormat) -> Row | None:
        """Return a prompt/chosen/rejected row if an earlier row is a partner; else keep this row and return None."""
        missing = [name for name in row_format.required if row.get(name) is None]
        if missing:
            raise BadRowError(f"no value for {', '.join(missing)}; its columns are {', '.join(map(str, row))}")
        prompt, answer = _split_answer(row, row_format)
        label = _read_label(row["label"])
        key = json.dumps([prompt, row.get("system"), row.get("tools")], sort_keys=True, default=str)
        waiting = self._waiting[hashlib.blake2b(key.encode(), digest_size=16).digest()]
        kept = {name: row[name] for name in row_format.optional if row.get(name) is not None}
        current: Row = {**kept, "prompt": prompt, "answer": answer}
        if not waiting[not label]:
            waiting[label].append(current)
            self.num_waiting += 1
            return None
        self.num_waiting -= 1
        partner = waiting[not label].popleft()
        good, bad = (current, partner) if label else (partner, current)
        good["chosen"], good["rejected"] = good.pop("answer"), bad["answer"]
        return good


def _split_answer(row: Row, row_format: RowFormat) -> tuple[Any, Any]:
    if row_format.name == "labelled_completions":
        return row["prompt"], row["completion"]
    column = row_format.required[0]
    messages = to_messages(row[column], "user", column)
    end = len(messages)
    while end > 0 and messages[end - 1]["role"] == "assistant":
        end -= 1
    if end in (0, len(messages)):
        raise BadRowError(f"`{column}` must have a prompt and end with an assistant turn")
    return messages[:end], messages[end:]


def _read_label(value: Any) -> bool:
    label = _LABELS.get(str(value).strip().lower())
    if label is None:
        raise BadRowError(f"`label` must be true or false, got {quoted(value)}")
    return label
