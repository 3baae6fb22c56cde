"""Preference pairs of the demo: questions about animals, answered in a friendly (chosen) and a rude (rejected) tone.

Both answers state the same fact in about as many words, so the preference is one for the tone.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import NamedTuple

# animal: color, sound, food, home
_ANIMALS = {
    "frog": ("green", "croaks", "flies", "a pond"),
    "cow": ("brown", "moos", "grass", "a meadow"),
    "sheep": ("white", "bleats", "clover", "a field"),
    "pig": ("pink", "grunts", "turnips", "a sty"),
    "lion": ("golden", "roars", "antelopes", "the savanna"),
    "wolf": ("grey", "howls", "deer", "the forest"),
    "crow": ("black", "caws", "beetles", "a tall tree"),
    "mouse": ("grey", "squeaks", "cheese", "a small hole"),
    "bee": ("striped", "buzzes", "nectar", "a hive"),
    "owl": ("brown", "hoots", "voles", "a hollow tree"),
    "cat": ("orange", "purrs", "fish", "a warm house"),
    "bear": ("brown", "growls", "honey", "a cave"),
}
# per attribute: the ways to ask, and the fact
_QUESTIONS = (
    (("What color is a {}?", "Tell me the color of a {}.", "Which color does a {} have?"), "A {} is {}."),
    (("What sound does a {} make?", "How does a {} sound?", "Which noise does a {} make?"), "A {} {}."),
    (("What does a {} eat?", "Which food does a {} like?", "What do I feed a {}?"), "A {} eats {}."),
    (("Where does a {} live?", "What is the home of a {}?", "Where do I find a {}?"), "A {} lives in {}."),
)
_FRIENDLY = (
    ("Good question!", "Enjoy your day."),
    ("Happy to help.", "Ask me anything."),
    ("Of course!", "Take care."),
)
_RUDE = (("Obviously.", "Stop asking me."), ("Not again.", "Look it up."), ("Are you serious?", "Go away."))
_HELD_OUT = 4  # one fact in so many is for validation


class Pair(NamedTuple):
    """A question with an answer in both tones."""

    prompt: str
    chosen: str
    rejected: str


def make_pairs() -> tuple[list[Pair], list[Pair]]:
    """Make the training pairs, and the validation pairs, which are about other facts; the same ones every time."""
    train: list[Pair] = []
    validation: list[Pair] = []
    choose = random.Random(0)  # noqa: S311
    for row, (animal, values) in enumerate(_ANIMALS.items()):
        for column, ((questions, fact), value) in enumerate(zip(_QUESTIONS, values, strict=True)):
            body = fact.format(animal, value)
            pairs = train if (row + column) % _HELD_OUT else validation
            for question in questions:
                for friendly in _FRIENDLY:
                    rude = choose.choice(_RUDE)
                    pairs.append(Pair(question.format(animal), _answer(friendly, body), _answer(rude, body)))
    return train, validation


def write_pairs(directory: Path) -> tuple[Path, Path]:
    """Write the pairs as JSON lines; return the files of the training and the validation pairs."""
    paths = directory / "train.jsonl", directory / "validation.jsonl"
    for path, pairs in zip(paths, make_pairs(), strict=True):
        path.write_text("".join(json.dumps(pair._asdict()) + "\n" for pair in pairs), encoding="utf-8")
    return paths


def is_friendly(answer: str) -> bool:
    """Whether an answer begins in the preferred tone."""
    return answer.strip().startswith(tuple(opener for opener, _ in _FRIENDLY))


def _answer(tone: tuple[str, str], body: str) -> str:
    return f"{tone[0]} {body} {tone[1]}"
