"""The pair store: round trips, damage is detected, and opening does not read the pairs."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.paths import ROOT
from thresher.data.example import Example
from thresher.data.prepare.findings import NUM_EXAMPLES, find_leaks
from thresher.data.settings import DataSettings
from thresher.data.store.arrow_schema import find_sorted, hash_example, pairs_to_record_batch
from thresher.data.store.reader import (
    FORMAT_VERSION,
    MAX_OPEN_SHARDS,
    ROWS_PER_RECORD_BATCH,
    SCHEMA,
    ExampleStore,
    StoreShard,
)
from thresher.data.store.writer import StoreWriter
from thresher.errors import UserError

FIELDS = {"identity": "expected"}


def write_store(
    path: Path, pairs: list[Example], shard_rows: int = 4, rows_per_batch: int = 1, **options: Any
) -> ExampleStore:
    with StoreWriter(path, shard_rows) as writer:
        for start in range(0, len(pairs), rows_per_batch):
            piece = pairs[start : start + rows_per_batch]
            writer.append(pairs_to_record_batch(piece, [hash_example(pair) for pair in piece]))
        writer.finish(FIELDS, **options)
    return ExampleStore.open(path)


def make_pair(seed: int, *, masked: bool = False) -> Example:
    rng = np.random.default_rng(seed)
    prompt, chosen, rejected = (rng.integers(0, 50_000, rng.integers(1, 30)).astype(np.int32) for _ in range(3))
    mask = rng.random(len(chosen)) < 0.5 if masked else None
    return Example.pair(prompt, chosen, rejected, chosen_mask=mask, weight=1.5, margin=seed)


def assert_equal(left: Example, right: Example) -> None:
    assert len(left.responses) == len(right.responses)
    sides = [(left.prompt_ids, right.prompt_ids)]
    for one, other in zip(left.responses, right.responses, strict=True):
        sides += [(one.ids, other.ids), (one.mask, other.mask)]
        assert one.value == other.value
    for actual, expected in sides:
        assert (actual is None) == (expected is None)
        if actual is not None:
            assert actual.dtype == expected.dtype
            np.testing.assert_array_equal(actual, expected)
    assert (left.weight, left.margin) == (right.weight, right.margin)


ids = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=8).map(lambda each: np.asarray(each, np.int32))
finite = st.floats(0, 100, width=32)


@st.composite
def any_pair(draw: st.DrawFn) -> Example:
    prompt, chosen, rejected = draw(ids), draw(ids), draw(ids)
    masks = [
        np.asarray(draw(st.lists(st.booleans(), min_size=len(side), max_size=len(side))))
        if draw(st.booleans())
        else None
        for side in (chosen, rejected)
    ]
    return Example.pair(prompt, chosen, rejected, *masks, weight=draw(finite), margin=draw(finite))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(any_pair(), min_size=1, max_size=12), st.integers(1, 5), st.integers(1, 5))
def test_pairs_are_read_back_unchanged(
    tmp_path_factory: pytest.TempPathFactory, pairs: list[Example], shard_rows: int, rows_per_batch: int
) -> None:
    store = write_store(tmp_path_factory.mktemp("store") / "s", pairs, shard_rows, rows_per_batch)
    store.verify()
    assert len(store) == len(pairs)
    for number, pair in enumerate(pairs):
        assert_equal(store[number], pair)
        sizes = [len(pair.prompt_ids), len(pair.chosen.ids), len(pair.rejected.ids)]
        assert store.lengths[number].tolist() == sizes
        scored = [
            size if mask is None else int(mask.sum())
            for size, mask in zip(sizes[1:], (pair.chosen.mask, pair.rejected.mask), strict=True)
        ]
        assert store.scored_lengths[number].tolist() == scored


def test_bytes_do_not_depend_on_the_appended_batch_sizes(tmp_path: Path) -> None:
    pairs = [make_pair(seed, masked=seed % 3 == 0) for seed in range(23)]
    write_store(tmp_path / "a", pairs, shard_rows=10, rows_per_batch=23)
    write_store(tmp_path / "b", pairs, shard_rows=10, rows_per_batch=3)
    files = sorted(path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*") if path.is_file())
    assert [str(file) for file in files if file.suffix == ".arrow"] == [f"shards/0000{n}.arrow" for n in range(3)]
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_pairs_past_the_first_record_batch_of_a_shard_are_found(tmp_path: Path) -> None:
    pairs = [make_pair(seed) for seed in range(2100)]
    store = write_store(tmp_path / "s", pairs, shard_rows=2050, rows_per_batch=512)
    for number in (0, 1023, 1024, 2047, 2048, 2049, 2050, 2099):
        assert_equal(store[number], pairs[number])


def test_read_keeps_the_requested_order(tmp_path: Path) -> None:
    pairs = [make_pair(seed) for seed in range(9)]
    batch = write_store(tmp_path / "s", pairs).read(np.array([8, 0, 5, 5]))
    assert batch.pair_ids.tolist() == [8, 0, 5, 5]
    assert [pair.margin for pair in batch.pairs] == [8, 0, 5, 5]


def test_the_content_digest_depends_on_the_pairs_and_not_on_the_shards(tmp_path: Path) -> None:
    pairs = [make_pair(seed) for seed in range(9)]
    digests = [write_store(tmp_path / str(rows), pairs, shard_rows=rows).digest for rows in (2, 4, 100)]
    assert len(set(digests)) == 1
    assert write_store(tmp_path / "other", pairs[::-1]).digest != digests[0]


def test_a_pair_outlives_its_store_and_is_writable(tmp_path: Path) -> None:
    pair = write_store(tmp_path / "s", [make_pair(1)])[0]
    pair.chosen.ids[0] = 7
    assert pair.chosen.ids[0] == 7


def test_a_pickled_store_reopens_its_path(tmp_path: Path) -> None:
    store = write_store(tmp_path / "s", [make_pair(1)])
    assert_equal(pickle.loads(pickle.dumps(store))[0], store[0])  # noqa: S301


def test_a_pair_number_outside_the_store_is_an_error(tmp_path: Path) -> None:
    store = write_store(tmp_path / "s", [make_pair(1)])
    for number in (-1, 1):
        with pytest.raises(IndexError, match=f"pair {number} is outside the store of 1 pairs"):
            store[number]


def test_a_flipped_byte_in_a_shard_is_found_by_verify(tmp_path: Path) -> None:
    store = write_store(tmp_path / "s", [make_pair(seed) for seed in range(9)])
    store.verify()
    shard = tmp_path / "s" / "shards" / "00001.arrow"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    with pytest.raises(UserError, match=r"shards/00001.arrow has a wrong digest; prepare it again"):
        ExampleStore.open(tmp_path / "s").verify()


@pytest.mark.parametrize("name", ["shards/00000.arrow", "lengths.bin"])
def test_opening_detects_a_truncated_or_missing_file(tmp_path: Path, name: str) -> None:
    write_store(tmp_path / "s", [make_pair(1)])
    file = tmp_path / "s" / name
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(UserError, match=f"{name} has .* bytes instead of"):
        ExampleStore.open(tmp_path / "s")
    file.unlink()
    with pytest.raises(UserError, match=f"{name} is missing"):
        ExampleStore.open(tmp_path / "s")


def test_a_store_with_another_fingerprint_is_refused(tmp_path: Path) -> None:
    write_store(tmp_path / "s", [make_pair(1)])
    ExampleStore.open(tmp_path / "s", expected_fingerprint="expected")
    with pytest.raises(UserError, match="prepared from different rows, tokenizer, template or settings"):
        ExampleStore.open(tmp_path / "s", expected_fingerprint="other")


def test_opening_a_directory_that_is_not_a_store_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is not a pair store: it has no manifest.json"):
        ExampleStore.open(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(UserError, match=r"manifest.json is damaged"):
        ExampleStore.open(tmp_path)
    (tmp_path / "manifest.json").write_text('{"format_version": 0}')
    with pytest.raises(UserError, match=f"has store format 0, but this version reads {FORMAT_VERSION}"):
        ExampleStore.open(tmp_path)


def test_a_failed_writer_leaves_no_files(tmp_path: Path) -> None:
    def fail() -> None:
        with StoreWriter(tmp_path / "s", 4) as writer:
            pair = make_pair(1)
            writer.append(pairs_to_record_batch([pair], [hash_example(pair)]))
            raise RuntimeError("torn")

    with pytest.raises(RuntimeError, match="torn"):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_only_a_store_is_overwritten(tmp_path: Path) -> None:
    write_store(tmp_path / "s", [make_pair(1)])
    with pytest.raises(UserError, match="already exists; choose a different directory, or pass --overwrite"):
        write_store(tmp_path / "s", [make_pair(2)])
    assert_equal(write_store(tmp_path / "s", [make_pair(2)], overwrite=True)[0], make_pair(2))
    assert [path.name for path in tmp_path.iterdir()] == ["s"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(UserError, match="is not a pair store and will not be overwritten"):
        write_store(tmp_path / "mine", [make_pair(2)], overwrite=True)


def test_hashes_depend_on_tokens_and_masks_but_not_on_weights() -> None:
    pair = make_pair(1)
    heavier = Example.pair(pair.prompt_ids, pair.chosen.ids, pair.rejected.ids, weight=9.0)
    masked = Example.pair(pair.prompt_ids, pair.chosen.ids, pair.rejected.ids, np.zeros(len(pair.chosen.ids), bool))
    all_scored = Example.pair(pair.prompt_ids, pair.chosen.ids, pair.rejected.ids, np.ones(len(pair.chosen.ids), bool))
    swapped = Example.pair(pair.prompt_ids, pair.rejected.ids, pair.chosen.ids)
    assert hash_example(pair) == hash_example(heavier) == hash_example(all_scored)
    assert hash_example(masked).pair != hash_example(pair).pair
    assert hash_example(swapped).pair == hash_example(pair).swapped


def test_leaks_between_stores_are_found_by_pair_and_by_prompt(tmp_path: Path) -> None:
    train = [make_pair(seed) for seed in range(9)]
    other_answer = Example.pair(train[3].prompt_ids, make_pair(70).chosen.ids, train[3].rejected.ids)
    validation = [make_pair(50), train[7], other_answer]
    pairs, prompts = find_leaks(write_store(tmp_path / "e", validation), write_store(tmp_path / "t", train))
    assert (pairs.count, pairs.examples) == (1, (1,))
    assert (prompts.count, prompts.examples) == (2, (1, 2))


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=30), st.lists(st.integers(0, 12), min_size=1, max_size=30))
def test_leaks_match_a_naive_search(
    tmp_path_factory: pytest.TempPathFactory, seeds: list[int], other_seeds: list[int]
) -> None:
    """Few distinct pairs, so that repeats occur within and across shards, before and after every known key."""
    path = tmp_path_factory.mktemp("stores")
    store, other = (
        write_store(path / name, [make_pair(seed) for seed in each])
        for name, each in (("a", seeds), ("b", other_seeds))
    )
    leaked = [number for number, seed in enumerate(seeds) if seed in set(other_seeds)]
    for finding in find_leaks(store, other):
        assert (finding.count, finding.examples) == (len(leaked), tuple(leaked[:NUM_EXAMPLES]))


def test_find_sorted_returns_the_index_of_known_keys() -> None:
    rng = np.random.default_rng(0)
    for num_known, highest in ((0, 10), (1, 10), (500, 300), (500, 2**64 - 1)):
        known = np.sort(rng.integers(0, highest, num_known, dtype=np.uint64, endpoint=True))
        random_keys = rng.integers(0, highest, 400, dtype=np.uint64, endpoint=True)
        keys = rng.permutation(np.concatenate([random_keys, known[::3], np.array([0, 2**64 - 1], np.uint64)]))
        indices = find_sorted(keys, known)
        np.testing.assert_array_equal(indices >= 0, np.isin(keys, known))
        np.testing.assert_array_equal(known[indices[indices >= 0]], keys[indices >= 0])


def test_looking_up_a_shard_among_a_million_known_keys_does_not_sort_them_again() -> None:
    rng = np.random.default_rng(0)
    known = np.sort(rng.integers(0, 2**64 - 1, 1_000_000, dtype=np.uint64))
    keys = rng.integers(0, 2**64 - 1, 65_536, dtype=np.uint64)
    times = []
    for _ in range(3):
        started = time.perf_counter()
        find_sorted(keys, known)
        times.append(time.perf_counter() - started)
    print(f"{min(times) * 1e3:.1f} ms per shard")
    assert min(times) < 0.1, times  # 6 ms measured; np.isin takes 640


def test_a_store_of_100_million_pairs_opens_without_reading_its_pairs(tmp_path: Path) -> None:
    num_pairs, rows = 100_000_000, 65_536
    write_store(tmp_path / "real", [make_pair(seed) for seed in range(3)])
    path = tmp_path / "huge"
    (path / "shards").mkdir(parents=True)
    shards = []
    for number in range(-(-num_pairs // rows)):
        name = f"shards/{number:05d}.arrow"
        (path / name).touch()
        count = min(rows, num_pairs - number * rows)
        shards.append({"name": name, "size": 0, "sha256": "", "num_pairs": count})
    with (path / "lengths.bin").open("wb") as stream:
        stream.truncate(12 * num_pairs)  # sparse: uses no disk space
    index = {"name": "lengths.bin", "size": 12 * num_pairs, "sha256": "", "num_pairs": 0}
    manifest = json.loads((tmp_path / "real" / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, "shards": shards, "indexes": [index]}))
    start = time.perf_counter()
    store = ExampleStore.open(path)
    assert len(store) == num_pairs
    assert store.lengths.shape == (num_pairs, 3)
    assert store.lengths[99_999_999].tolist() == [0, 0, 0]
    assert time.perf_counter() - start < 2.0
    assert store._shard.cache_info().currsize == 0
    for number in (0, 65_535, 65_536, 31_415_926, 99_999_999):
        with pytest.raises(UserError, match=f"{number // rows:05d}.arrow of the store is damaged"):
            store[number]


def test_a_shard_keeps_views_of_few_record_batches(tmp_path: Path) -> None:
    """Each takes 7 kB, and a long run visits all of them."""
    pairs = [make_pair(seed) for seed in range(2 * ROWS_PER_RECORD_BATCH + 1)]
    path = tmp_path / "shard.arrow"
    with pa.ipc.new_file(str(path), SCHEMA) as sink:
        sink.write_table(
            pa.Table.from_batches([pairs_to_record_batch(pairs, [hash_example(each) for each in pairs])]),
            max_chunksize=ROWS_PER_RECORD_BATCH,
        )
    shard = StoreShard(path, max_views=2)
    for row in (0, ROWS_PER_RECORD_BATCH, 2 * ROWS_PER_RECORD_BATCH, 5, ROWS_PER_RECORD_BATCH - 1):
        assert_equal(shard.example(row), pairs[row])
        assert len(shard._batches) <= 2


def test_open_shards_stay_below_the_usual_file_limit(tmp_path: Path) -> None:
    pairs = [make_pair(seed) for seed in range(MAX_OPEN_SHARDS + 10)]
    store = write_store(tmp_path / "s", pairs, shard_rows=1)
    for number, pair in enumerate(pairs):
        assert_equal(store[number], pair)
    assert store._shard.cache_info().currsize == MAX_OPEN_SHARDS
    assert_equal(store[0], pairs[0])


def test_the_default_size_of_a_shard_is_the_documented_one():
    """Another size changes the bytes of every store."""
    documented = (ROOT / "docs" / "internals" / "store.md").read_text()
    assert f"A shard has at most {DataSettings('a.jsonl').shard_rows:,} pairs" in documented


def test_a_worker_reads_pairs_and_caches_logps_without_pandas(tmp_path: Path) -> None:
    """pyarrow imports pandas to convert columns, which takes each worker of a run a third of a second."""
    write_store(tmp_path / "s", [make_pair(0)])
    code = (
        "import sys; from pathlib import Path\n"
        "from thresher.data.store.reader import ExampleStore\n"
        "from thresher.reference.cache import CacheShard, write_shard\n"
        "ids = ExampleStore.open('s')[0].chosen.ids\n"
        "shard = write_shard(Path(), [bytes(16)], [[ids.astype('f4')] * 2])\n"
        "assert CacheShard(shard.path).logps(0)[0].tolist() == ids.tolist()\n"
        "print('pandas' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert done.stdout == "False\n"
