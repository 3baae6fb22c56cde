"""What a store was made from, as digests: a run reuses a store exactly when its identity is the same."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thresher.data.settings import DataSettings
from thresher.data.sources.resolve import SourceFile, resolve_sources, source_digest
from thresher.data.store.reader import FORMAT_VERSION
from thresher.data.tokenization.chat_template import Template, load_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# stores and their fingerprints keep the values under which they were first written
_STORED_SPECIAL_TOKENS_IN_TEXT = {"keep_as_text": "text", "reject": "refuse"}


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Digest how text becomes ids: vocabulary, merges, normalisers, BOS and EOS; not the chat template, not padding."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        state: dict[str, Any] = json.loads(backend.to_str())
        # calls leave their padding and truncation behind in the tokenizer
        content = {key: value for key, value in state.items() if key not in ("padding", "truncation")}
        parts = [json.dumps(content, sort_keys=True).encode()]
    else:
        with tempfile.TemporaryDirectory() as directory:
            tokenizer.save_vocabulary(directory)
            parts = [file.read_bytes() for file in sorted(Path(directory).iterdir())]
    special = [tokenizer.bos_token, tokenizer.eos_token]
    return _digest([json.dumps(special).encode(), *parts])


def fingerprinted_settings(settings: DataSettings) -> dict[str, Any]:
    """Return the settings that can change which pairs a store holds."""
    return {
        "sequence_length": settings.sequence_length,
        "truncation": settings.truncation,
        "on_bad_row": settings.on_bad_row,
        "special_tokens_in_text": _STORED_SPECIAL_TOKENS_IN_TEXT[settings.special_tokens_in_text],
        "column_names": dict(settings.column_names),
    }


def make_identity(
    settings: DataSettings, tokenizer: PreTrainedTokenizerBase, template: Template, source_digests: Sequence[str]
) -> str:
    """Combine everything that decides the pairs of a store."""
    content = {
        "format_version": FORMAT_VERSION,
        "sources": list(source_digests),
        "tokenizer": tokenizer_digest(tokenizer),
        "template": template.digest,
        "settings": fingerprinted_settings(settings),
    }
    return _digest([json.dumps(content, sort_keys=True).encode()])


def store_identity(settings: DataSettings, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the identity that a store prepared from these settings would have; reads the sources once."""
    template = load_template(tokenizer, settings.template, settings.template_arguments)
    return make_identity(settings, tokenizer, template, digest_sources(resolve_sources(settings.file_names)))


def digest_sources(sources: Sequence[SourceFile]) -> list[str]:
    """Digest each source's format and content, in order."""
    return [f"{source.format}:{source_digest(source)}" for source in sources]


def _digest(parts: Sequence[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()
