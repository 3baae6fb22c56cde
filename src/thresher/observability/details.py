"""Details: INFO records for `run.log` and --verbose that the terminal does not show by default.

Pass DETAIL as `extra` of a logging call. Handlers of a library user get such records like any other.
"""

from __future__ import annotations

import logging

DETAIL = {"is_detail": True}
# a detail that names the work which starts now; a live display shows it until the next
PHASE = {"is_detail": True, "is_phase": True}


def is_detail(record: logging.LogRecord) -> bool:
    return getattr(record, "is_detail", False)


def is_phase(record: logging.LogRecord) -> bool:
    return getattr(record, "is_phase", False)
