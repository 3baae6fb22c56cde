"""The known word nearest to a misspelled one."""

import difflib
from collections.abc import Iterable

# lower, and one acronym suggests another: ipo for dpo (0.67), orpo for grpo (0.75)
_LEAST_SIMILARITY = 0.8


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that was probably meant, whatever its case; None if all are too different."""
    words = {each.lower(): each for each in known}
    close = difflib.get_close_matches(word.lower(), words, n=1, cutoff=_LEAST_SIMILARITY)
    return words[close[0]] if close else None
