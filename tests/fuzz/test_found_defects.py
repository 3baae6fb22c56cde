"""Regression tests: inputs found by fuzzing that raised a traceback are now read or give a documented error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.fuzz.cases import CONFIG
from tests.support.fuzz.checks import (
    CacheCheck,
    ComposeCheck,
    ExactJsonCheck,
    ManifestCheck,
    StoreCheck,
    StoreManifestCheck,
)
from thresher.checkpoint.json_io import decode, load_json
from thresher.config.load import parse_config
from thresher.errors import CheckpointError, UserError


@pytest.mark.parametrize(
    "content",
    [b'{"$float": []}', b'[{"$float": null}]', b'{"$float": 1%s}' % (b"0" * 400), b"[" * 100_000],
    ids=["a list as number", "null as number", "a number beyond float64", "unclosed nesting"],
)
def test_invalid_encoded_numbers_are_damaged_files(tmp_path: Path, content: bytes) -> None:
    assert not ExactJsonCheck(tmp_path)(content)


def test_a_directory_instead_of_json_is_a_damaged_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_json(tmp_path)


def test_a_manifest_with_a_float_key_among_others_is_damaged(tmp_path: Path) -> None:
    check = ManifestCheck(tmp_path)
    assert not check(check.content.replace(b'"metrics": {', b'"metrics": {"$float": "1", '))


@pytest.mark.parametrize(
    ("key", "value"),
    [("files", None), ("files", {"a": "b"}), ("files", {"a": {"size": [], "sha256": "x"}}), ("step", "7")],
)
def test_a_signed_manifest_with_invalid_fields_is_rejected(tmp_path: Path, key: str, value: Any) -> None:
    check = ManifestCheck(tmp_path)
    body = {name: field for name, field in decode(check.content).items() if name != "sha256"}
    assert check.signed(body)
    assert not check.signed({**body, key: value})
    del body[key]
    assert not check.signed(body)


@pytest.mark.parametrize(
    "values",
    [
        {"seed": 16**5000},
        {"actor_train": {"device_mapping": "[0]" + "+[0]" * 1000}},
        {"actor_train": {"device_mapping": "[0]" + "+[0]" * 20_000}},
    ],
    ids=["an integer too long to print", "a sum of 1,000 lists", "a sum of 20,000 lists"],
)
def test_an_oversized_config_value_is_a_user_error(values: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="invalid configuration"):
        parse_config({**CONFIG, **values})


@pytest.mark.parametrize(
    "yaml",
    [
        *(
            b"6",
            b"5.5",
            b"2026-01-01",
            b"- 1",
            b"seed",
            b"[" * 5000,
            b"defaults: 5",
            b"defaults: [[1]]",
            b"hydra: 3",
            b"1: 2",
        ),
        *(b"defaults: [{a: {b: c}}]", b"hydra: {searchpath: 5}", b"hydra: {searchpath: [5]}", b"defaults: [5, null]"),
    ],
)
def test_yaml_that_is_not_a_config_is_a_user_error(tmp_path: Path, yaml: bytes) -> None:
    assert not ComposeCheck(tmp_path)(yaml, [])


def test_a_cache_description_that_is_not_a_mapping_is_reported_as_unknown(tmp_path: Path) -> None:
    check = CacheCheck(tmp_path)
    assert not check.identity(b"[1, 2]")
    assert check.identity(b'{"model": 5}')


@pytest.mark.parametrize("mask", [0x78, 0x80, 0xFF])
def test_no_changed_byte_of_a_shard_crashes_the_process(tmp_path: Path, mask: int) -> None:
    """Lengths beyond the end of the file used to cause segmentation faults."""
    for check in (CacheCheck(tmp_path), StoreCheck(tmp_path)):
        num_read = 0
        for at in range(len(check.content)):
            content = bytearray(check.content)
            content[at] ^= mask
            num_read += check(bytes(content))
        if isinstance(check, CacheCheck):
            assert num_read == 0  # the digest covers every byte


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("shards", value) for value in (None, [], [{"name": "lengths.bin"}])),
        *(("indexes", [5]), ("report", {}), ("longest_pair", "7"), ("columns_in_use", [[]]), ("content_digest", 5)),
    ],
)
def test_a_store_manifest_with_invalid_fields_is_rejected(tmp_path: Path, key: str, value: Any) -> None:
    check = StoreManifestCheck(tmp_path)
    assert check(check.content)
    manifest = json.loads(check.content)
    assert not check(json.dumps({**manifest, key: value}).encode())
    del manifest[key]
    assert not check(json.dumps(manifest).encode())


def test_a_shard_with_fewer_pairs_than_the_manifest_states_is_rejected(tmp_path: Path) -> None:
    check = StoreManifestCheck(tmp_path)
    manifest = json.loads(check.content)
    manifest["shards"][0]["num_pairs"] += 1
    for index in manifest["indexes"]:
        index["size"] += 12
        with (tmp_path / "store" / index["name"]).open("ab") as file:
            file.write(bytes(12))
    assert not check(json.dumps(manifest).encode())
