"""Rows that hold one answer and a label: those with the same prompt and opposite labels become one pair.

The n-th good answer of a prompt meets its n-th bad one, in the order of the files, whatever the number of processes.
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
_KEPT_COLUMNS = ("system", "tools", "margin", "weight")


class UnpairedJoiner:
    """Answers that still wait for one with the opposite label."""

    def __init__(self) -> None:
        self._waiting: dict[bytes, dict[bool, deque[Row]]] = defaultdict(lambda: {True: deque(), False: deque()})
        self.num_waiting = 0

    def join(self, row: Row, shape: RowFormat) -> Row | None:
        """Return a prompt/chosen/rejected row if this row has a partner, else let it wait."""
        missing = [name for name in shape.required if row.get(name) is None]
        if missing:
            raise BadRowError(f"no value for {', '.join(missing)}; its columns are {', '.join(map(str, row))}")
        prompt, answer = _split_answer(row, shape)
        label = _read_label(row["label"])
        key = json.dumps([prompt, row.get("system"), row.get("tools")], sort_keys=True, default=str)
        waiting = self._waiting[hashlib.blake2b(key.encode(), digest_size=16).digest()]
        kept = {name: row[name] for name in _KEPT_COLUMNS if row.get(name) is not None}
        mine: Row = {**kept, "prompt": prompt, "answer": answer}
        if not waiting[not label]:
            waiting[label].append(mine)
            self.num_waiting += 1
            return None
        self.num_waiting -= 1
        other = waiting[not label].popleft()
        good, bad = (mine, other) if label else (other, mine)
        rest = {name: value for name, value in good.items() if name != "answer"}
        return {**rest, "chosen": good["answer"], "rejected": bad["answer"]}


def _split_answer(row: Row, shape: RowFormat) -> tuple[Any, Any]:
    if shape.name == "labelled_completions":
        return row["prompt"], row["completion"]
    column = shape.required[0]
    messages = to_messages(row[column], "user", column)
    end = len(messages)
    while end > 0 and messages[end - 1]["role"] == "assistant":
        end -= 1
    if end in (0, len(messages)):
        raise BadRowError(f"`{column}` must hold a prompt and end with an assistant's turn")
    return messages[:end], messages[end:]


def _read_label(value: Any) -> bool:
    label = _LABELS.get(str(value).strip().lower())
    if label is None:
        raise BadRowError(f"`label` must be true or false, got {quoted(value)}")
    return label
