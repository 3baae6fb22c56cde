"""Fingerprint of a reference model: its weights, its config and the scoring version.

Computed from the model's files, so that a run whose pairs are all cached never loads the reference. File and directory
names do not matter, nor does the distribution of tensors over files.
"""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from thresher.data.store.reader import sha256_of_file
from thresher.errors import UserError
from thresher.models.loading.adapters import AdapterFiles
from thresher.models.loading.weight_files import find_file, find_weight_files, open_safetensors
from thresher.reference.remembered_digests import remembered

# increase it when the same weights and tokens get different logps, so that older caches are not used
SCORING_VERSION = 1
# keys of config.json that cannot change a logp: the run sets the dtype and disables the KV cache, and the digest of the
# weights covers the file that transformers_weights names
_IGNORED_KEYS = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "transformers_weights"}


@dataclass(frozen=True)
class ReferenceFingerprint:
    """Everything but the tokens that determines a logp.

    weights and settings are digests of the model's files; weights are held in master_dtype, and the forward computes in
    dtype. scores_prompt: the tokens of the prompt have logps too. Layout, batch size, device and attention kernel are
    excluded: they change a logp by rounding only.
    """

    weights: str
    settings: str
    dtype: str
    master_dtype: str
    scores_prompt: bool = False

    @property
    def content(self) -> dict[str, str | bool]:
        """The fields as stored; the default of scores_prompt is absent, as in caches that are older than it."""
        return {name: value for name, value in asdict(self).items() if value is not False}

    @property
    def digest(self) -> str:
        content = {"scoring_version": SCORING_VERSION, **self.content}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def weights_digest(path: str) -> str:
    """Digest every tensor of a model (name, dtype, shape, bytes), or the bytes of a GGUF file."""
    digests: dict[str, str] = {}
    # hashing releases the GIL, so a few threads keep a fast disk busy
    with ThreadPoolExecutor(max_workers=4) as pool:
        for file in find_weight_files(path):
            digests |= remembered(file, partial(_digest_file, file, pool))
    lines = "\n".join(f"{name} {digests[name]}" for name in sorted(digests))
    return hashlib.sha256(lines.encode()).hexdigest()


def with_adapter(weights: str, adapter: AdapterFiles) -> str:
    """Digest weights together with the tensors and settings of a LoRA adapter."""
    with ThreadPoolExecutor(max_workers=4) as pool:
        tensors = _digest_tensors(adapter.weights, pool)
    content = {"weights": weights, "adapter": tensors, "settings": dict(adapter.settings)}
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


def _digest_file(file: Path, pool: ThreadPoolExecutor) -> dict[str, str]:
    if file.suffix == ".safetensors":
        return _digest_tensors(file, pool)
    return {file.suffix: sha256_of_file(file)}


def _digest_tensors(file: Path, pool: ThreadPoolExecutor) -> dict[str, str]:
    with open_safetensors(file) as tensors:
        names = list(tensors.keys())
        return dict(zip(names, pool.map(lambda name: _digest_tensor(tensors.get_tensor(name)), names), strict=True))


def _digest_tensor(tensor: Tensor) -> str:
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
