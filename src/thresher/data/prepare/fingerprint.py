"""Fingerprint of a store's inputs: a run reuses a store if and only if the fingerprints are equal."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thresher.data.prepare.tasks import find_template
from thresher.data.settings import DataSettings
from thresher.data.sources.resolve import SourceFile, resolve_sources, source_digest
from thresher.data.store.reader import FORMAT_VERSION
from thresher.data.tokenization.chat_template import Template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# raise it when the same rows, tokenizer and settings give other tokens than before: stores are then prepared again
TOKENIZATION_VERSION = 2
# the spelling in stores and fingerprints is older than the one in the settings
_STORED_SPECIAL_TOKENS_IN_TEXT = {"keep_as_text": "text", "reject": "refuse"}


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Digest how text becomes token ids: vocabulary, merges, normalizers, BOS and EOS; not chat template or padding."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        state: dict[str, Any] = json.loads(backend.to_str())
        # set as a side effect of tokenizer calls
        content = {key: value for key, value in state.items() if key not in ("padding", "truncation")}
        parts = [json.dumps(content, sort_keys=True).encode()]
    else:
        with tempfile.TemporaryDirectory() as directory:
            tokenizer.save_vocabulary(directory)
            parts = [file.read_bytes() for file in sorted(Path(directory).iterdir())]
    special = [tokenizer.bos_token, tokenizer.eos_token]
    return _digest([json.dumps(special).encode(), *parts])


def fingerprinted_settings(settings: DataSettings) -> dict[str, Any]:
    """Return the settings that can change the pairs of a store, as stored in its manifest."""
    # absent unless set, as in stores that are older than the setting
    newer = {"max_samples": settings.max_samples, "system_prompt": settings.system_prompt}
    return {
        **{name: value for name, value in newer.items() if value is not None},
        "sequence_length": settings.sequence_length,
        "truncation": settings.truncation,
        "on_bad_row": settings.on_bad_row,
        "special_tokens_in_text": _STORED_SPECIAL_TOKENS_IN_TEXT[settings.special_tokens_in_text],
        "column_names": dict(settings.column_names),
    }


def make_fingerprint(
    settings: DataSettings, tokenizer: PreTrainedTokenizerBase, template: Template, source_digests: Sequence[str]
) -> str:
    """Digest everything that determines the pairs of a store."""
    content = {
        "format_version": FORMAT_VERSION,
        "tokenization_version": TOKENIZATION_VERSION,
        "sources": list(source_digests),
        "tokenizer": tokenizer_digest(tokenizer),
        "template": template.digest,
        "settings": fingerprinted_settings(settings),
    }
    return _digest([json.dumps(content, sort_keys=True).encode()])


def store_fingerprint(settings: DataSettings, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the fingerprint of the store that these settings would prepare; reads the sources once."""
    template = find_template(settings, tokenizer)
    return make_fingerprint(settings, tokenizer, template, digest_sources(resolve_sources(settings.file_names)))


def digest_sources(sources: Sequence[SourceFile]) -> list[str]:
    """Digest the format and content of each source, in order."""
    return [f"{source.format}:{source_digest(source)}" for source in sources]


def _digest(parts: Sequence[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()
