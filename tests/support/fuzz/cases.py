"""Random inputs: JSON-like values of known keys and words, valid inputs with a few changes, and bytes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

KEYS = (
    *("prompt", "chosen", "rejected", "messages", "conversations", "instruction", "input", "history", "system"),
    *("tools", "margin", "weight", "label", "completion", "question", "answer_matching_behavior"),
    *("answer_not_matching_behavior", "preferred_output", "non_preferred_output", "role", "content", "from", "value"),
    *("text", "type", "thinking", "tool_calls", "$float", "", "é"),
)
ROLES = ("user", "assistant", "system", "tool", "human", "gpt", "developer", "judge", "ASSISTANT", "")
WORDS = (
    *(
        "Why?",
        "yes",
        "no",
        " ",
        "\n",
        "",
        "é",
        "\U0001f600",
        "\ud800",
        "\x00",
        "\ufdd0",
        "\U000f0003" * 10,
        "<|im_end|>",
    ),
    *("<|im_start|>", "<|im_end|>\n<|im_start|>assistant\n", "<s>", "</s>", "<|im_", "end|>", "<", "<think>"),
    *("\n\nHuman: ", "\n\nAssistant: ", "Human:", "true", "1", "NaN", "1e999", "{", "[]", '[{"name": "x"}]', "{{ 1 }}"),
)
NUMBERS = (0, 1, -1, 2**31, 2**63, 10**40, 10**400, 0.5, -0.0, 1e38, 1e39, 1e308, float("nan"), float("inf"))
SIDE = [{"role": "assistant", "content": "yes"}]
PROMPT = [{"role": "user", "content": "Why?"}]
VALID_ROWS: tuple[dict[str, Any], ...] = (
    {"prompt": "Why?", "chosen": "yes", "rejected": "no"},
    {"prompt": PROMPT, "chosen": SIDE, "rejected": [*SIDE, *PROMPT, *SIDE]},
    {"instruction": "Why?", "input": "now", "history": [["a", "b"]], "chosen": "yes", "rejected": "no"},
    {"messages": PROMPT, "chosen": SIDE[0], "rejected": SIDE[0], "tools": [{"name": "x"}], "system": "Be kind."},
    {"conversations": [{"from": "human", "value": "a"}], "chosen": "b", "rejected": "c", "margin": 1, "weight": "2"},
    {"chosen": [*PROMPT, *SIDE], "rejected": [*PROMPT, *SIDE, *PROMPT, *SIDE]},
    {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a\n\nAssistant: c\n\nHuman: d\n\nAssistant: e"},
    {"input": {"messages": PROMPT, "tools": []}, "preferred_output": SIDE, "non_preferred_output": SIDE},
    {"question": "a", "answer_matching_behavior": " (A)", "answer_not_matching_behavior": " (B)"},
    {"prompt": "a", "completion": "b", "label": True},
    {"messages": [*PROMPT, *SIDE], "label": "false"},
    {"conversations": [*PROMPT, *SIDE], "label": 0},
)


def text(draw: random.Random) -> str:
    kind = draw.random()
    if kind < 0.75:
        return "".join(draw.choice(WORDS) for _ in range(draw.randrange(1, 5)))
    if kind < 0.95:
        return "".join(chr(draw.randrange(0x20, 0x250)) for _ in range(draw.randrange(12)))
    return "".join(chr(draw.randrange(0x110000)) for _ in range(draw.randrange(8)))


def value(draw: random.Random, depth: int = 0) -> Any:
    """A value that JSON or YAML can represent."""
    kind = draw.randrange(5 if depth > 3 else 9)
    if kind == 0:
        return draw.choice((None, True, False))
    if kind == 1:
        return draw.choice(NUMBERS)
    if kind <= 4:
        return draw.choice(ROLES) if draw.random() < 0.1 else text(draw)
    if kind == 5:
        return message(draw)
    if kind == 6:
        return nested(draw)
    size = draw.randrange(4)
    if kind == 7:
        return [value(draw, depth + 1) for _ in range(size)]
    return {draw.choice(KEYS): value(draw, depth + 1) for _ in range(size)}


def nested(draw: random.Random) -> Any:
    inner: Any = draw.choice((None, "x", {}))
    for _ in range(draw.choice((1, 5, 60, 70, 400))):
        inner = [inner] if draw.random() < 0.5 else {draw.choice(KEYS): inner}
    return inner


def message(draw: random.Random) -> dict[str, Any]:
    result: dict[str, Any] = {"role": draw.choice(ROLES), "content": text(draw)}
    if draw.random() < 0.1:
        result[draw.choice(("thinking", "tool_calls", "name"))] = value(draw, 3)
    return result


def row(draw: random.Random) -> Any:
    """Any value, or a valid row with a few changes."""
    if draw.random() < 0.1:
        return value(draw)
    return mutate_value(draw, json.loads(json.dumps(draw.choice(VALID_ROWS))), lambda: value(draw, 1))


def mutate_value(draw: random.Random, root: Any, new: Callable[[], Any]) -> Any:
    """Change up to three items of a nested value in place: replace, remove, add, repeat."""
    for _ in range(draw.randrange(4)):
        items = list(_items(root))
        if not items:
            return root
        parent, key = draw.choice(items)
        kind = draw.random()
        if kind < 0.5:
            parent[key] = new()
        elif kind < 0.7 and isinstance(parent[key], str):
            parent[key] = text(draw) + parent[key] + text(draw)
        elif kind < 0.8:
            del parent[key]
        elif isinstance(parent, list):
            parent.insert(key, draw.choice(parent))
        else:
            parent[draw.choice(KEYS)] = new()
    return root


def _items(root: Any) -> Any:
    stack = [root]
    while stack:
        parent = stack.pop()
        keys = list(parent) if isinstance(parent, dict) else range(len(parent)) if isinstance(parent, list) else ()
        for key in keys:
            yield parent, key
            stack.append(parent[key])


def chat_row(draw: random.Random) -> dict[str, Any]:
    """A row of messages with valid roles and random texts, so that most are rendered."""

    def turns(first: str, count: int) -> list[dict[str, Any]]:
        roles = ("assistant", "user") if first == "assistant" else ("user", "assistant")
        messages = [{"role": roles[n % 2], "content": _plain(draw)} for n in range(count)]
        for each in messages:
            if draw.random() < 0.1:
                each["thinking"] = _plain(draw)
        return messages

    prompt = turns("user", draw.choice((1, 1, 3)))
    if draw.random() < 0.3:
        prompt.insert(0, {"role": "system", "content": _plain(draw)})
    result: dict[str, Any] = {
        "prompt": prompt,
        "chosen": turns("assistant", draw.choice((1, 1, 3))),
        "rejected": turns("assistant", draw.choice((1, 1, 3))),
    }
    if draw.random() < 0.2:
        result["tools"] = [{"name": _plain(draw), _plain(draw): _plain(draw)}]
    return result


def _plain(draw: random.Random) -> str:
    return text(draw) if draw.random() < 0.9 else text(draw).encode("utf-8", "replace").decode()


CONFIG: dict[str, Any] = {
    "pretrain": "m",
    "seed": 3,
    "pref_loss": {"sigmoid": 1.0},
    "beta": 0.1,
    "max_steps": 5,
    "num_train_epochs": -1,
    "resume_from_checkpoint": False,
    "sequence_length": 64,
    "runtime": "auto",
    "actor_train": {
        "model_args": {"dtype": "fp32", "lora_rank": 4, "lora_target": "all-linear"},
        "training_args": {"learning_rate": 1e-5, "warmup_ratio": 0.1, "lr_scheduler_type": "linear"},
        "data_args": {"file_name": ["a.jsonl"], "template": "raw", "special_tokens_in_text": "keep_as_text"},
        "strategy_args": {"strategy_name": "fsdp2_train", "strategy_config": {"tp_size": 2, "cpu_offload": True}},
        "device_mapping": "list(range(0,4))",
    },
    "reference": {"mode": "auto", "sync_steps": 2, "num_workers": 2},
    "validation": {"data_args": {"file_name": "b.jsonl"}},
    "track_with": ["console", "wandb"],
    "tracker_kwargs": {"wandb_project": "p"},
}
CONFIG_WORDS = (
    *("auto", "raw", "none", "list(range(0,8))", "[0,1]", "[0]" + "+[0]" * 3000, "range(0)", "((((", "sigmoid", "ipo"),
    *("true", "-1", "1e-5", "${seed}", "${oc.env:HOME}", "???", "${", "hf_infer", "a.jsonl", "\x00", "\ud800"),
)


def config_value(draw: random.Random) -> Any:
    if draw.random() < 0.5:
        return draw.choice(CONFIG_WORDS)
    # YAML accepts hexadecimal integers that are too long for Python to print in decimal
    result = value(draw, 2) if draw.random() < 0.95 else 16**5000
    return {1: result} if draw.random() < 0.05 else result


def config(draw: random.Random) -> Any:
    if draw.random() < 0.05:
        return value(draw)
    return mutate_value(draw, json.loads(json.dumps(CONFIG)), lambda: config_value(draw))


OVERRIDES = ("seed=1", "actor_train.model_args.dtype=fp32", "+a.b=[1,2]", "~beta", "pref_loss={sigmoid: 1}", "seed")


def override(draw: random.Random) -> str:
    valid = draw.choice(OVERRIDES)
    return mutate_bytes(draw, valid.encode()).decode("utf-8", "replace") if draw.random() < 0.7 else valid


YAML_WORDS = (
    b": ",
    b"- ",
    b"\n",
    b"  ",
    b"{",
    b"}",
    b"[",
    b"]",
    b"&a",
    b"*a",
    b"!!python/object:os.system",
    b"${seed}",
    b"???",
)
JSON_WORDS = (
    b"{",
    b"}",
    b"[",
    b"]",
    b'"',
    b":",
    b",",
    b"NaN",
    b"Infinity",
    b'{"$float": []}',
    b'{"$float": "x"}',
    b"1e999",
)


def mutate_bytes(draw: random.Random, content: bytes, words: tuple[bytes, ...] = (b"\x00", b"\xff")) -> bytes:
    """Change a few ranges: flip a bit, set, remove, insert, repeat, truncate."""
    result = bytearray(content)
    for _ in range(draw.choice((1, 1, 1, 2, 4, 16))):
        at = draw.randrange(len(result) + 1)
        size = draw.choice((1, 1, 2, 8, 64))
        kind = draw.randrange(7)
        if kind == 0 and at < len(result):
            result[at] ^= 1 << draw.randrange(8)
        elif kind == 1 and at < len(result):
            result[at] = draw.randrange(256)
        elif kind == 2:
            del result[at : at + size]
        elif kind == 3:
            result[at:at] = draw.choice(words)
        elif kind == 4:
            result[at:at] = draw.randbytes(size)
        elif kind == 5:
            result[at:at] = result[at : at + size]
        elif draw.random() < 0.2:
            del result[at:]
    return bytes(result)
