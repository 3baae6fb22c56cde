"""Mask secrets and escape terminal control characters in anything that is printed or stored.

A value is masked by its key (`hf_token`, `api_key`, `password`) or because it is a credential in any context: a login
in a URL, a signed URL, a token with a well-known prefix. Keys that only look like secrets (`max_tokens`, `pad_token`)
are kept.
"""

from __future__ import annotations

import logging
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

MASK = "***"

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_SECRET_WORD = re.compile(r"secrets?|password|passwd|passphrase|pwd|credentials?|apikey|authorization")
_SECRET_PAIRS = {("api", "key"), ("access", "key"), ("private", "key"), ("account", "key"), ("signing", "key")}
_TOKENIZER_WORD = re.compile(
    r"pad|eos|bos|unk|sep|cls|mask|image|video|audio|special|stop|start|begin|end|prefix|suffix|per"
)
_WHOSE_TOKENS = re.compile(r"api|auth|access|hub|hf|refresh|bearer")
# Up to the last @ of the authority; this includes a password with an unescaped slash, but not a port.
# One slash: pathlib collapses two.
_AUTHORITY = re.compile(r"(:/{1,2})(?:[^/\s?#]*|[^/\s@:]*:(?!\d+(?:/|$))\S{0,500})@")
_QUERY = re.compile(r"(?<=[?&])([^=&#\s]+)=([^&#\s]+)")
# `api_key=...` on a command line, in a connection string (`...;AccountKey=...`) or in a library's message
_ASSIGNED = re.compile(r"(?<![\w?&.-])([\w.-]{1,200})=((?:(?!;[\w.-]+=)[^\s&'\"])+)")
# `"hf_token": "..."`, as in JSON
_QUOTED = re.compile(r"""(["'])([\w.-]{1,200})\1(\s*[:=]\s*)(["'])((?:(?!\4).)+)""")
# `Authorization: Basic ...`, and `password: ...` up to the end of a clause: what follows may be prose
_NAMED = re.compile(
    r"(?<![\w.-])([\w.-]{1,200})(:\s+)(?:((?:Basic|Bearer|Digest|Token)\s+)[^\s,;\"']+"
    r"|(?!\*\*\*)[^\s,;\"']+(?=\s*(?:[,;)}\]]|$)))",
    re.IGNORECASE | re.MULTILINE,
)
# `--api-key ...`
_OPTION = re.compile(r"(?<!\S)--([\w-]{1,200})(\s+)(?!-)(\S+)")
# with characters that reverse or break the line that a terminal shows
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
_KNOWN_TOKEN = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}"
    r"|glpat-[\w-]{16,}|wandb_v1_\w{16,}|A[KS]IA[0-9A-Z]{16}|AIza[\w-]{35,}|xox[a-z]-[A-Za-z0-9-]{10,}"
    r"|nvapi-[\w-]{16,}|gsk_[A-Za-z0-9]{16,}|npm_[A-Za-z0-9]{16,}|pypi-[\w-]{16,}"
    r"|eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]*)|(?<=Bearer )\S+"
)


def redact(config: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a configuration with every secret masked. Redacting twice changes nothing."""
    return {key: _mask_all(value) if _is_secret(str(key), value) else _clean(value) for key, value in config.items()}


def restore_secrets(redacted: Mapping[str, Any], own: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """Replace what `redact` has masked by the values of a config; `own`, which reads it, is called only if needed."""
    restored: dict[str, Any] = _restore(redacted, own()) if MASK in str(redacted) else dict(redacted)
    return restored


def _restore(redacted: Any, own: Any) -> Any:
    if isinstance(redacted, Mapping):
        known = own if isinstance(own, Mapping) else {}
        return {key: _restore(value, known.get(key)) for key, value in redacted.items()}
    if isinstance(redacted, list) and isinstance(own, list) and len(redacted) == len(own):
        return [_restore(*both) for both in zip(redacted, own, strict=True)]
    return own if isinstance(redacted, str) and MASK in redacted and own is not None else redacted


def _clean(value: Any) -> Any:
    if isinstance(value, Mapping):
        return redact(value)
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value]
    return redact_text(value) if isinstance(value, str) else value


def redact_text(text: str) -> str:
    """Mask logins, signatures and well-known tokens in a text."""
    text = _AUTHORITY.sub(rf"\1{MASK}@", text)
    text = _QUERY.sub(lambda m: f"{m[1]}={MASK}" if _is_secret_parameter(m[1]) else m[0], text)
    text = _ASSIGNED.sub(lambda m: f"{m[1]}={MASK}" if _is_secret(_last_part(m[1]), "") else m[0], text)
    text = _QUOTED.sub(lambda m: f"{m[1]}{m[2]}{m[1]}{m[3]}{m[4]}{MASK}" if _is_secret(m[2], "") else m[0], text)
    # a number stands for any value: prose such as `the token: ...` names no secret
    text = _NAMED.sub(lambda m: f"{m[1]}{m[2]}{m[3] or ''}{MASK}" if _is_secret(_last_part(m[1]), 0) else m[0], text)
    text = _OPTION.sub(lambda m: f"--{m[1]}{m[2]}{MASK}" if _is_secret(m[1], "") else m[0], text)
    return _KNOWN_TOKEN.sub(MASK, text)


def escape_control_chars(text: str) -> str:
    """Escape control characters, which a terminal would interpret; rows and file names may contain any."""
    return _CONTROL.sub(lambda m: f"\\x{ord(m[0]):02x}" if ord(m[0]) < 256 else f"\\u{ord(m[0]):04x}", text)


class RedactingFormatter(logging.Formatter):
    """Format a record and its traceback with secrets masked and control characters escaped."""

    def format(self, record: logging.LogRecord) -> str:
        return escape_control_chars(redact_text(super().format(record)))


class RedactingHandler(logging.Handler):
    """Pass each record with its masked text to a function that shows it."""

    def __init__(self, level: int, show: Callable[[logging.LogRecord, str], object]) -> None:
        super().__init__(level)
        self.setFormatter(RedactingFormatter())
        self._show = show

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._show(record, self.format(record))
        except Exception:
            # logging's default would print the arguments of the message unmasked
            with suppress(OSError):
                sys.stderr.write(escape_control_chars(redact_text(traceback.format_exc())))


def redact_overrides(text: str, overrides: Sequence[str]) -> str:
    """Mask the values of secret `key=value` overrides anywhere in a text: parsers quote parts of them."""
    for key, _, value in (override.partition("=") for override in overrides):
        if value and _is_secret(_last_part(key), ""):
            text = text.replace(value, MASK)
    return redact_text(text)


def _last_part(key: str) -> str:
    return key.rpartition(".")[2]


def _mask_all(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _mask_all(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mask_all(item) for item in value]
    # None and booleans only say whether a secret is set, which is useful and harmless
    return value if value is None or isinstance(value, bool) else MASK


def _is_secret(key: str, value: Any) -> bool:
    words = [word.lower() for word in _WORD.findall(key)]
    if any(map(_SECRET_WORD.fullmatch, words)) or _SECRET_PAIRS.intersection(pairwise(words)):
        return True
    if any(map(_TOKENIZER_WORD.fullmatch, words)) or isinstance(value, int | float):
        # token counts are numbers and vocabulary tokens are named for their role; credentials are neither
        return False
    return words[-1:] == ["token"] or (words[-1:] == ["tokens"] and any(map(_WHOSE_TOKENS.fullmatch, words)))


def _is_secret_parameter(name: str) -> bool:
    return _is_secret(name, "") or name.lower() in ("sig", "signature", "key") or "signature" in name.lower()
