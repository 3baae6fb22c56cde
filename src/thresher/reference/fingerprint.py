"""Fingerprint of a reference model: its weights, its config and the scoring version.

Computed from the model's files, so a run whose pairs are all cached never loads the reference. File and directory names
do not matter, nor does the distribution of tensors over files.

Digests of model files are remembered by path, size, times and inode, so a start does not read 140 GB to hash them: one
small file per model file, in the user's cache. It counts only if it belongs to the user, if no other user can write it,
and if it describes the model file as it is now. Anything else in its place is ignored and replaced. In the same way,
one file per directory of the reference cache remembers which of its files have been compared with their names.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from thresher import durable
from thresher.data.store.cache import chosen_cache_dir, user_cache_dir
from thresher.data.store.reader import sha256_of_file
from thresher.errors import UserError
from thresher.models.loading.adapters import AdapterFiles
from thresher.models.loading.weight_files import find_file, find_weight_files, open_safetensors
from thresher.observability.details import PHASE

logger = logging.getLogger(__name__)

DIRECTORY_NAME = ".digests"  # hidden: the other directories there are references
_VERSION = 1
# a file that was written so recently could change again without a new time stamp
_SECONDS_TO_SETTLE = 2.0
_DIGEST = re.compile("[0-9a-f]{64}")
_LARGE = 10**9  # bytes of a file that takes seconds to hash
DIGEST_MISMATCH = "does not match the digest in its name"

Digests = dict[str, str]


def remembered(file: Path, compute: Callable[[], Digests]) -> Digests:
    """Return the digests of a model file: those remembered of it, or computed ones, which are remembered."""
    file = file.resolve()
    before, path = _identity(file), _record_of(file)
    if (found := _read(path, file, before)) is not None:
        return found
    digests = compute()
    if _identity(file) == before and _is_settled(before):
        content = {"version": _VERSION, "path": str(file), "identity": before, "digests": digests}
        durable.write_own_record(path, content)
    return digests


class VerifiedFiles:
    """Files of a directory that have the SHA-256 of their names; each is read once, until it changes."""

    def __init__(self, directory: Path) -> None:
        directory = directory.resolve()
        self._path = _record_of(directory)
        self._header = {"version": _VERSION, "path": str(directory)}
        content = durable.read_own_record(self._path) or {}
        files = content.pop("files", None)
        self._remembered: dict[str, list[int]] = files if content == self._header and isinstance(files, dict) else {}
        self._known = dict(self._remembered)
        self._is_saved = True

    def add(self, path: Path) -> None:
        """Count a file as verified that this process has just written."""
        with contextlib.suppress(OSError):  # removed since
            self._known[path.name] = _identity(path)

    def find_problem(self, path: Path, sha256: str) -> str | None:
        """Read a file, unless that has been done; return what is wrong with it, or None."""
        try:
            before = _identity(path)
            if self._known.get(path.name) == before:
                return None
        except OSError as error:
            return _unreadable(error)
        if (problem := find_digest_problem(path, sha256)) is not None:
            return problem
        self._known[path.name] = before
        if _is_settled(before):
            self._remembered[path.name], self._is_saved = before, False
        return None

    def save(self, names: Collection[str]) -> None:
        """Remember those of the verified files that the directory still has."""
        if not self._is_saved:
            files = {name: self._remembered[name] for name in self._remembered.keys() & names}
            durable.write_own_record(self._path, {**self._header, "files": files})
            self._is_saved = True


def find_digest_problem(path: Path, sha256: str) -> str | None:
    """Compare a file with its digest; return what is wrong with it, or None."""
    try:
        return None if sha256_of_file(path) == sha256 else DIGEST_MISMATCH
    except OSError as error:
        return _unreadable(error)


def _unreadable(error: OSError) -> str:
    return f"cannot be read ({error.strerror or error})"


def _record_of(path: Path) -> Path:
    # $THRESHER_CACHE_DIR or the user's: a directory that a config names may belong to others
    root = chosen_cache_dir(None) or user_cache_dir()
    return root / DIRECTORY_NAME / f"{hashlib.sha256(os.fsencode(path)).hexdigest()}.json"


def _identity(file: Path) -> list[int]:
    """What changes with the content of a file, or more often; the change time cannot be set back."""
    found = file.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


def _is_settled(identity: list[int]) -> bool:
    return time.time() - identity[1] / 1e9 > _SECONDS_TO_SETTLE


def _read(path: Path, file: Path, identity: list[int]) -> Digests | None:
    content = durable.read_own_record(path)
    expected = {"version": _VERSION, "path": str(file), "identity": identity}
    if content is None or any(content.get(name) != value for name, value in expected.items()):
        return None
    digests = content.get("digests")
    if not isinstance(digests, dict) or not digests:
        return None
    is_valid = all(isinstance(each, str) and _DIGEST.fullmatch(each) for each in digests.values())
    return digests if is_valid else None


# increase it when the same weights and tokens get different logps, so that older caches are not used
SCORING_VERSION = 1
# keys of config.json that cannot change a logp: the run sets the dtype and disables the KV cache, and the digest of the
# weights covers the file that transformers_weights names
_IGNORED_KEYS = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "transformers_weights"}


@dataclass(frozen=True)
class ReferenceFingerprint:
    """Everything but the tokens that determines a logp.

    weights and settings are digests of the model's files; weights are held in master_dtype, the matrices of quantized
    models in fewer bits, and the forward computes in dtype. scores_prompt: the tokens of the prompt have logps too.
    Layout, batch size, device and attention kernel are excluded: they change a logp by rounding only.
    """

    weights: str
    settings: str
    dtype: str
    master_dtype: str
    scores_prompt: bool = False
    quantization: str | Literal[False] = False

    @property
    def content(self) -> dict[str, str | bool]:
        """The fields as stored; those with a default are absent at it, as in caches that are older than them."""
        return {name: value for name, value in asdict(self).items() if value is not False}

    @property
    def digest(self) -> str:
        content = {"scoring_version": SCORING_VERSION, **self.content}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def weights_digest(path: str) -> str:
    """Digest every tensor of a model (name, dtype, shape, bytes), or the bytes of a GGUF file."""
    digests: Digests = {}
    files = find_weight_files(path)

    def compute(number: int, file: Path) -> Digests:
        size = file.stat().st_size
        if size > _LARGE:  # a large model takes minutes, in which workers wait
            logger.info("hashing the model: file %d of %d, %.1f GB", number, len(files), size / 1e9, extra=PHASE)
        return _digest_file(file)

    for number, file in enumerate(files, start=1):
        digests |= remembered(file, partial(compute, number, file))
    lines = "\n".join(f"{name} {digests[name]}" for name in sorted(digests))
    return hashlib.sha256(lines.encode()).hexdigest()


def model_digest(path: str, merged: Iterable[AdapterFiles]) -> str:
    """Digest every tensor of a model, and of the adapters that are merged into it."""
    return reduce(partial(with_adapter, is_merged=True), merged, weights_digest(path))


def with_adapter(weights: str, adapter: AdapterFiles, *, is_merged: bool = False) -> str:
    """Digest weights together with the tensors and settings of a LoRA adapter."""
    content: dict[str, object] = {
        "weights": weights,
        "adapter": _digest_file(adapter.weights),
        "settings": dict(adapter.settings),
    }
    if is_merged:  # sums round differently
        content["merged"] = True
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def frozen_digest(weights: str | None, master_dtype: str) -> str:
    """Digest the frozen weights as they are held in memory; weights is None if all are trained."""
    return "none" if weights is None else hashlib.sha256(f"{weights} {master_dtype}".encode()).hexdigest()


def config_digest(path: str, *, trust_remote_code: bool) -> str:
    """Digest a model's config.json, and its Python files if they may be executed."""
    digest = hashlib.sha256()
    if not path.endswith(".gguf"):  # a GGUF file contains its config
        config = find_file(path, "config.json")
        if config is None:
            raise UserError(f"{path} has no config.json; give a Hugging Face model directory or a `.gguf` file")
        values = json.loads(config.read_text(encoding="utf-8"))
        relevant = {key: value for key, value in values.items() if key not in _IGNORED_KEYS}
        digest.update(json.dumps(relevant, sort_keys=True).encode())
        for file in sorted(config.parent.glob("*.py")) if trust_remote_code else ():
            digest.update(f"{file.name} {sha256_of_file(file)}".encode())
    return digest.hexdigest()


def _digest_file(file: Path) -> Digests:
    if file.suffix != ".safetensors":
        return {file.suffix: sha256_of_file(file)}
    # hashing releases the GIL, so a few threads keep a fast disk busy
    with open_safetensors(file) as tensors, ThreadPoolExecutor(max_workers=4) as pool:
        names = list(tensors.keys())
        return dict(zip(names, pool.map(lambda name: _digest_tensor(tensors.get_tensor(name)), names), strict=True))


def _digest_tensor(tensor: Tensor) -> str:
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
