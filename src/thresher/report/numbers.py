"""Numbers and times as people read them."""

from __future__ import annotations

import math

MISSING = "–"  # noqa: RUF001  # a dash in a table


def format_number(value: object) -> str:
    """Format a value with four significant digits; texts stay as they are, and None is a dash."""
    if value is None:
        return MISSING
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or (value.is_integer() and abs(value) < 1e15):
        return f"{int(value):,}"
    if not math.isfinite(value) or not 1e-4 <= abs(value) < 1e9:
        return f"{value:.3g}"
    digits = max(0, 3 - math.floor(math.log10(abs(value))))
    return f"{value:,.{digits}f}"


def format_percent(share: float | None) -> str:
    return MISSING if share is None else f"{share:.1%}".replace("%", " %")


def format_seconds(seconds: float) -> str:
    """Format a duration with its two largest units."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes} min"


def format_size(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:.1f} MB"
