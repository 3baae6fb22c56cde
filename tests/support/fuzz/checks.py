"""Invariants of every reader: any input is read correctly or gives a documented error.

Each check takes one input and returns True if it was read, False after a documented error. Any other exception is a
defect.
"""

from __future__ import annotations

import json
import math
import tempfile
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from tests.support.noise_cache import find
from tests.support.small_tokenizer import CHAT_TEMPLATE, make_tokenizer
from tests.support.tiny_models import replace_side
from thresher import importers
from thresher.checkpoint.json_io import encode, load_json
from thresher.checkpoint.manifest import FileRecord, Manifest, read_manifest, write_manifest
from thresher.checkpoint.tensor_files import TensorShard, load_tensors, pack_headers, save_indexes, save_shards
from thresher.checkpoint.tensor_index import ShardFile
from thresher.config.load import load_config, parse_config
from thresher.data.example import Example
from thresher.data.prepare.blocks import BadRow, BlockTask, BlockWorker, UnpairedJoiner
from thresher.data.prepare.prepare import prepare
from thresher.data.prepare.report import report_of
from thresher.data.rows.formats import (
    FORMAT_BY_NAME,
    PreferenceRow,
    check_columns,
    detect_format,
    read_numbers,
    to_preference_row,
)
from thresher.data.rows.parsing import BadRowError, parse_row, read_tokenized
from thresher.data.settings import DataSettings
from thresher.data.sources.readers import Block
from thresher.data.store.arrow_schema import hash_example, pairs_to_record_batch
from thresher.data.store.reader import SCHEMA, ExampleStore, StoreShard
from thresher.data.tokenization.chat_template import load_template
from thresher.errors import CheckpointError, UserError
from thresher.reference.cache import ReferenceCache, list_references, verify_cache, write_shard
from thresher.reference.fingerprint import ReferenceFingerprint

importers.install()  # as the command line does: ROLL's keys are read


def check_row(content: Any) -> bool:
    """A line or value is a valid `PreferenceRow`, a bad row that can be written to the quarantine, or unrecognized."""
    block = Block("f.jsonl", "line", (1,), (content,), 1)
    try:
        row = parse_row(content)
        row_format = detect_format(row, {}, block.where(0))
        if row_format.is_labelled:
            joiner = UnpairedJoiner()
            opposite = {**row, "label": str(row["label"]).strip().lower() not in ("true", "1")}
            joiner.join(row, row_format)
            joined = joiner.join(opposite, row_format)
            if joined is None:
                raise AssertionError("opposite labels of one prompt were not joined")
            row, row_format = joined, FORMAT_BY_NAME["prompt"]
        if row_format.is_tokenized:
            check_columns(row, row_format, {})
            read_tokenized(row, 100, *read_numbers(row), has_token_weights=row_format.kind == "weighted_pairs")
            return True
        read = to_preference_row(row, row_format, {})
    except BadRowError as error:
        bad = BadRow.of(block, 0, error)
        json.loads(json.dumps(asdict(bad), ensure_ascii=False, default=str).encode("utf-8", "backslashreplace"))
        _check_message(bad.reason)
        return False
    except UserError as error:
        _check_message(str(error))
        return False
    if not (math.isfinite(np.float32(read.weight)) and read.weight >= 0 and math.isfinite(np.float32(read.margin))):
        raise AssertionError(f"weight {read.weight}, margin {read.margin}")
    for message in (*read.prompt, *chain(*read.responses)):
        message["role"].encode()
        message["content"].encode()
    return True


def _check_message(message: str) -> None:
    message.encode("utf-8")
    if len(message) > 6000:
        raise AssertionError(f"a message of {len(message)} characters")


class TemplateCheck:
    """Process a row with a `BlockWorker`: the row is counted once, and only the template writes control tokens."""

    def __init__(self) -> None:
        self._tokenizer: Any = make_tokenizer()
        self._tokenizer.chat_template = CHAT_TEMPLATE
        template = load_template(self._tokenizer, "auto", {})
        self._worker = BlockWorker(DataSettings("x", sequence_length=None), self._tokenizer, template)
        self._start, self._end, self._bos = self._tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>", "<s>"])

    def __call__(self, columns: dict[str, Any]) -> bool:
        result = self._worker(BlockTask(0, Block("f.jsonl", "line", (1,), (columns,), 1), "prompt", {}, 1))
        pairs = result.pairs.to_pylist()
        if len(pairs) + len(result.bad) + result.dropped.total() != 1:
            raise AssertionError(f"one row became {len(pairs)} pairs, {result.bad}, {result.dropped}")
        for pair in pairs:
            self._check_tokens(to_preference_row(parse_row(columns), FORMAT_BY_NAME["prompt"], {}), pair)
        return bool(pairs)

    def _check_tokens(self, row: PreferenceRow, pair: dict[str, Any]) -> None:
        for side, messages in zip(("chosen", "rejected"), row.responses, strict=True):
            ids = [*pair["prompt_ids"], *pair[f"{side}_ids"]]
            turns = len(row.prompt) + len(messages) + bool(row.tools)
            found = (ids.count(self._bos), ids.count(self._start), ids.count(self._end))
            if found != (1, turns, turns):
                raise AssertionError(
                    f"{turns} turns have {found} BOS, start and end tokens: {self._tokenizer.decode(ids)!r}"
                )
            conversation = row.prompt + messages
            text = self._tokenizer.apply_chat_template(conversation, tools=row.tools, tokenize=False)
            if self._tokenizer.decode(ids) != text[: text.rindex("<|im_end|>")] + "<|im_end|>":
                raise AssertionError(f"different text: {self._tokenizer.decode(ids)!r} for {text!r}")
            mask = pair[f"{side}_mask"]
            if (mask is None) != (len(messages) == 1) or (mask is not None and len(mask) != len(pair[f"{side}_ids"])):
                raise AssertionError("a mask of the wrong length")


def check_config(values: Any) -> bool:
    """Any values are a config whose properties can all be computed, or a `UserError`."""
    try:
        config = parse_config(values)
    except UserError as error:
        _check_utf8_or_escaped(str(error))
        return False
    for name in (
        "loss_weights",
        "given_parameters",
        "uses_ray",
        "pairs_per_step",
        "reference_path",
        "trusts_reference_code",
    ):
        getattr(config, name)
    return True


def _check_utf8_or_escaped(message: str) -> None:
    message.encode("utf-8", errors="backslashreplace")


class ComposeCheck:
    """Any bytes as YAML with any overrides are a config or a `UserError`."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "c.yaml"

    def __call__(self, yaml: bytes, overrides: list[str]) -> bool:
        self._path.write_bytes(yaml)
        try:
            load_config(self._path, overrides)
        except UserError:
            return False
        return True


class ExactJsonCheck:
    """Any bytes are a value or a `CheckpointError`."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "state.json"

    def __call__(self, content: bytes) -> bool:
        self._path.write_bytes(content)
        try:
            load_json(self._path)
        except CheckpointError:
            return False
        return True


class ManifestCheck:
    """Any bytes are the manifest that was written, or a `CheckpointError`: the digest rejects any other."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "step"
        self.directory.mkdir(exist_ok=True)
        files = {"model.safetensors": FileRecord(10, "ab" * 32), "state/é.json": FileRecord(0, "cd" * 32)}
        self.written = Manifest(7, files, {"eval/loss": 0.5, "nan": float("inf")})
        write_manifest(self.directory, self.written)
        self.content = (self.directory / "manifest.json").read_bytes()

    def __call__(self, content: bytes) -> bool:
        (self.directory / "manifest.json").write_bytes(content)
        try:
            read = read_manifest(self.directory)
        except CheckpointError:
            return False
        if read != self.written:
            raise AssertionError(f"a different manifest: {read}")
        return True

    def signed(self, body: dict[str, Any]) -> bool:
        """Check a manifest of any content with a correct digest, as an attacker would write it."""
        from thresher.checkpoint.manifest import _digest_of

        content = encode({**body, "sha256": _digest_of(body)})
        (self.directory / "manifest.json").write_bytes(content)
        try:
            read = read_manifest(self.directory)
        except CheckpointError:
            return False
        if not all(type(record.size) is int and type(record.sha256) is str for record in read.files.values()):
            raise AssertionError(f"a manifest with wrong types: {read}")
        return True


class TensorIndexCheck:
    """An index of any bytes gives tensors of its files, or a `CheckpointError`."""

    def __init__(self, directory: Path) -> None:
        shards = [TensorShard(torch.full((2, 4), float(at)), (4, 4), (2 * at, 0)) for at in range(2)]
        names = [save_shards(directory, "x", {"grid": each}, ShardFile(at, 2)) for at, each in enumerate(shards)]
        save_indexes(directory, [pack_headers(directory, [name]) for name in names])
        self._directory, self._path = directory, directory / "x.safetensors.index"
        self.content = self._path.read_bytes()

    def __call__(self, content: bytes) -> bool:
        self._path.write_bytes(content)
        try:
            tensors = load_tensors(self._directory, "x")
        except CheckpointError:
            return False
        if any(each.dtype != torch.float32 or each.shape != (4, 4) for each in tensors.values()):
            raise AssertionError(f"other tensors: {tensors}")
        return True


class StoreCheck:
    """A shard of any bytes gives pairs or a `UserError`; changed pairs are found by `verify`."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "shard.arrow"
        pair = Example.pair(np.arange(3, dtype=np.int32), np.arange(4, dtype=np.int32), np.arange(2, dtype=np.int32))
        pairs = [pair, replace_side(pair, 0, mask=np.array([True, False, True, True]))] * 3
        with pa.ipc.new_file(self._path, SCHEMA) as sink:
            sink.write_batch(pairs_to_record_batch(pairs, [hash_example(each) for each in pairs]))
        self.content = self._path.read_bytes()

    def __call__(self, content: bytes) -> bool:
        # a new file each time, because the old one is still memory-mapped
        self._path.unlink()
        self._path.write_bytes(content)
        try:
            shard = StoreShard(self._path)
            shard.hashes("hash")
            for row in range(6):
                shard.example(row)
        except UserError:
            return False
        return True


class StoreManifestCheck:
    """A manifest of any bytes gives a store that can be read completely, or a `UserError`."""

    def __init__(self, directory: Path) -> None:
        rows = directory / "rows.jsonl"
        rows.write_text("".join(f'{{"prompt": "{n}", "chosen": "yes", "rejected": "no"}}\n' for n in range(3)))
        self._path = directory / "store"
        prepare(DataSettings(str(rows), template="raw"), make_tokenizer(), self._path)
        self.content = (self._path / "manifest.json").read_bytes()

    def __call__(self, content: bytes) -> bool:
        (self._path / "manifest.json").write_bytes(content)
        try:
            store = ExampleStore.open(self._path)
            for name in ("digest", "fingerprint", "longest_example", "columns_in_use", "scored_lengths"):
                getattr(store, name)
            report_of(store)
            for number in range(len(store)):
                store[number]
            list(store.hashes())
            store.verify()
        except UserError:
            return False
        return True


class CacheCheck:
    """A shard of any bytes gives the logps that were written, or none; never different ones."""

    def __init__(self, directory: Path) -> None:
        self._root = directory / "cache"
        self._cache = ReferenceCache(self._root, ReferenceFingerprint("w", "s", "fp32", "fp32"), "test")
        self._cache.writer()
        draw = np.random.default_rng(0)
        self._keys = [draw.bytes(16) for _ in range(6)]
        self._logps = [[-draw.random(n + 1).astype(np.float32) for n in range(6)] for _ in range(2)]
        shard = write_shard(self._cache.directory, self._keys, list(zip(*self._logps, strict=True)))
        self._name, self.content = shard.path.name, shard.path.read_bytes()
        self._requested = np.frombuffer(b"".join(self._keys), dtype="V16")

    def __call__(self, content: bytes, *, signed: bool = False) -> bool:
        for path in self._cache.directory.glob("*arrow*"):
            path.unlink()
        name = self._name
        if signed:
            import hashlib

            name = f"{name.rsplit('-', 1)[0]}-{hashlib.sha256(content).hexdigest()}.arrow"
        (self._cache.directory / name).write_bytes(content)
        cache = ReferenceCache(self._root, ReferenceFingerprint("w", "s", "fp32", "fp32"), "test")
        list(verify_cache(self._root))
        list_references(self._root)
        found = find(cache, self._requested)
        missing = found.is_missing(0, len(self._requested))
        for position in np.flatnonzero(~missing).tolist():
            try:
                ((_, sides),) = found.read(np.array([position]))
            except UserError:
                return False
            for side, logps in enumerate(sides):
                if not signed and not np.array_equal(logps, self._logps[side][position]):
                    raise AssertionError(f"different logps at {position}: {logps}")
        return not missing.any()

    def identity(self, content: bytes) -> bool:
        """Check the description that `cache ls` prints."""
        (self._cache.directory / "identity.json").write_bytes(content)
        (described,) = list_references(self._root)
        return not described.model.startswith("unknown")


def new_directory() -> Path:
    return Path(tempfile.mkdtemp(prefix="fuzz-"))
