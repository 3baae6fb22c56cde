"""Where the pairs of a store are in the cache: equal to a search by keys, read and verified by one process only."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import random
import resource
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from benchmarks.growth_cache import ORDERS, SyntheticPairs, write_shards
from tests.support.noise_cache import (
    FINGERPRINT,
    Keys,
    NoisePairs,
    all_bytes,
    find,
    found_by_rank,
    lookup,
    open_cache,
    synthetic_logps,
)
from thresher.data.batching.plan import PairSet
from thresher.data.store.arrow_schema import hash_example
from thresher.distributed.groups import DataParallelGroup
from thresher.errors import UserError
from thresher.reference import cache as cache_files
from thresher.reference import extents, fingerprint
from thresher.reference.cache import CacheShard, FoundLogps, Origin, ReferenceCache, list_shards, write_shard
from thresher.reference.extents import extents_files, merge_extents

AN_HOUR = 3600


def age(directory: Path) -> None:
    """Files that were just written are not remembered as verified."""
    for path in directory.iterdir():
        os.utime(path, (time.time() - AN_HOUR,) * 2)


@pytest.fixture
def on_disk(monkeypatch):
    """Small numbers are joined and kept as large ones are."""
    for name, value in (("MAX_KEYS", 0), ("MAX_EXTENTS", 0), ("_KEYS_PER_PARTITION", 50), ("_ROWS_PER_WINDOW", 32)):
        monkeypatch.setattr(extents, name, value)


@pytest.fixture
def hashed(monkeypatch) -> list[str]:
    """The names of the files of the cache that are hashed."""
    names, original = list[str](), fingerprint.sha256_of_file

    def counted(path: Path) -> str:
        names.append(path.name)
        return original(path)

    monkeypatch.setattr(fingerprint, "sha256_of_file", counted)
    return names


def scored(root: Path, pairs: NoisePairs, num_ranks: int = 1) -> ReferenceCache:
    for rank in range(num_ranks):
        list(lookup(root, pairs).iter_score_missing(synthetic_logps, dp_group=DataParallelGroup(rank, num_ranks)))
        time.sleep(0.002)  # names have milliseconds
    return open_cache(root)


class WithoutKeys(NoisePairs):
    """Pairs whose keys cannot be read."""

    def __init__(self, pairs: NoisePairs) -> None:
        self.pairs, self._digest = pairs.pairs, pairs.digest

    @property
    def digest(self) -> str:
        return self._digest

    def hashes(self) -> Iterator[np.ndarray]:
        raise AssertionError("the keys of all pairs were read")


def test_merged_extents_are_those_of_the_least_location_of_each_row():
    draw = random.Random(0)
    for _ in range(300):
        start = draw.randrange(20)
        stop = start + draw.randrange(1, 60)
        firsts = np.array(sorted(draw.randrange(start, stop) for _ in range(draw.randrange(12))), dtype=np.int64)
        stops = np.array([draw.randint(first + 1, stop) for first in firsts.tolist()], dtype=np.int64)
        locations = np.array([draw.randrange(3) * 100 + draw.randrange(30) for _ in firsts], dtype=np.int64)
        expected = np.full(stop - start, -1)
        for first, end, location in zip(firsts, stops, locations, strict=True):
            for row in range(first, end):
                found = location + row - first
                expected[row - start] = min(found, expected[row - start]) if expected[row - start] >= 0 else found
        merged = extents.Extents(stop, merge_extents(start, stop, firsts, stops, locations))
        assert merged.between(start, stop).tolist() == expected.tolist()
        assert merged.locate(np.arange(start, stop)).tolist() == expected.tolist()
        some = sorted(draw.randrange(start, stop + 1) for _ in range(2))
        assert merged.between(*some).tolist() == expected[some[0] - start : some[1] - start].tolist()
        counts = [(count, location) for chunk in merged.chunks() for count, location in zip(*chunk, strict=True)]
        assert sum(count for count, location in counts if location < 0) == (expected < 0).sum()
        assert all(first[1] >= 0 or second[1] >= 0 for first, second in itertools.pairwise(counts))


@pytest.mark.usefixtures("on_disk")
def test_many_keys_are_found_as_a_dictionary_finds_them(tmp_path):
    """Also keys that share a half, and copies; some rows are listed, in shards that are older and newer."""
    draw = np.random.default_rng(1)
    keys = [halves.tobytes() for halves in draw.integers(0, 40, (300, 2)).astype("<u8")]
    wanted = [keys[at] for at in draw.integers(0, 200, 500)]
    rows = Keys(np.frombuffer(b"".join(wanted), dtype="V16"))
    cache = open_cache(tmp_path)
    cache.writer()
    expected: dict[int, tuple[bytes, float]] = {}
    for number in range(6):
        time.sleep(0.002)
        if number % 2:
            at = sorted(draw.choice(500, 60, replace=False).tolist())
            shard, origins = [wanted[row] for row in at], [Origin(rows.digest, row) for row in at]
        else:
            at, shard, origins = [], [keys[row] for row in draw.integers(0, 300, 60)], []
        values = [np.array([number + index / 100], np.float32) for index in range(60)]
        write_shard(cache.directory, shard, [(each, each) for each in values], origins)
        of_key = dict(zip(reversed(shard), reversed(values), strict=True))
        for row in at or range(500):
            if wanted[row] in of_key:
                value = values[at.index(row)] if at else of_key[wanted[row]]
                expected.setdefault(row, (wanted[row], float(value[0])))
        found = cache.find([rows], PairSet(500))  # extends what the one before has kept
        assert found.is_missing(0, 500).tolist() == [row not in expected for row in range(500)]
        read = found.read(np.array(sorted(expected)))
        assert [(key, float(sides[0][0])) for key, sides in read] == [expected[row] for row in sorted(expected)]
        assert (found.num_found, found.num_missing) == (len(expected), 500 - len(expected))
    assert 100 < len(expected) < 500
    assert len(extents_files(cache.directory)) == 6
    assert not list(cache.directory.glob(".partial-*"))


def test_a_store_that_was_scored_is_found_without_its_keys(tmp_path):
    pairs = NoisePairs(100)
    scored(tmp_path, pairs)
    found = lookup(tmp_path, WithoutKeys(pairs))
    assert (found.num_found, found.num_missing) == (100, 0)
    assert all_bytes(found, pairs) == all_bytes(lookup(tmp_path, pairs), pairs)


def test_another_store_with_the_same_pairs_has_the_same_logps(tmp_path):
    pairs = NoisePairs(100)
    bits = all_bytes(lookup(tmp_path, pairs), pairs) if scored(tmp_path, pairs) else b""
    other = NoisePairs(0)
    order = np.random.default_rng(3).permutation(100)
    other.pairs = [pairs.pairs[row] for row in order.tolist()]
    found = lookup(tmp_path, other)
    assert found.num_missing == 0
    back = found.logps(other.read(np.argsort(order)))
    assert back.chosen.values.numpy().tobytes() + back.rejected.values.numpy().tobytes() == bits


@pytest.mark.parametrize("is_listed", [False, True], ids=["the older shard is of another store", "and the newer one"])
def test_what_a_run_has_found_is_found_again_whatever_is_scored_later(tmp_path, is_listed):
    """A resumed run would read other bits, if a shard that lists rows replaced one in which they were found by keys."""
    pairs = NoisePairs(3)
    keys = [hash_example(pair).pair for pair in pairs.pairs]
    cache = open_cache(tmp_path)
    cache.writer()
    for number, lists_rows in enumerate((is_listed, not is_listed)):
        logps = [(np.array([number], np.float32),) * 2] * 3
        origins = [Origin(pairs.digest, row) for row in range(3)] if lists_rows else []
        write_shard(cache.directory, keys, logps, origins)
        time.sleep(0.002)
        found = lookup(tmp_path, pairs).found.read(np.arange(3))
        assert [sides[0].tolist() for _, sides in found] == [[0.0]] * 3


def test_what_a_run_has_found_is_found_again_without_an_unrelated_shard(tmp_path):
    """The unrelated one is named in the file with what was found by keys."""
    pairs, unrelated = NoisePairs(3), NoisePairs(3, seed=1)
    cache = open_cache(tmp_path)
    cache.writer()
    written = []
    for number, (source, lists_rows) in enumerate(((pairs, False), (unrelated, False), (pairs, True))):
        keys, logps = [hash_example(pair).pair for pair in source.pairs], [(np.array([number], np.float32),) * 2] * 3
        origins = [Origin(pairs.digest, row) for row in range(3)] if lists_rows else []
        written.append(write_shard(cache.directory, keys, logps, origins))
        time.sleep(0.002)
        if number == 1:
            assert lookup(tmp_path, pairs).num_missing == 0
    for removed, expected in ((1, 0.0), (0, 2.0)):
        written[removed].path.unlink()
        found = lookup(tmp_path, pairs).found.read(np.arange(3))
        assert [sides[0].tolist() for _, sides in found] == [[expected]] * 3


def test_a_search_of_many_keys_that_finds_nothing_is_not_repeated(tmp_path, monkeypatch):
    """As in a run that visits part of its store, and has a validation set."""
    monkeypatch.setattr(extents, "MAX_KEYS", 0)
    pairs, some = NoisePairs(100), np.arange(48)
    list(lookup(tmp_path, pairs, some).iter_score_missing(synthetic_logps))
    scored(tmp_path, NoisePairs(100, seed=1))
    for source in (pairs, WithoutKeys(pairs)):
        assert lookup(tmp_path, source, some).num_found == 48


@pytest.mark.usefixtures("on_disk")
def test_a_disk_that_is_full_costs_the_file_and_not_the_run(tmp_path, caplog):
    pairs, other = NoisePairs(300), NoisePairs(300)
    other.pairs = other.pairs[::-1]
    cache = scored(tmp_path, pairs)
    expected = all_bytes(lookup(tmp_path, other), other)
    for path in extents_files(cache.directory):
        path.unlink()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, limits[1]))  # of the 4,800 bytes of extents
    try:
        found = lookup(tmp_path, other)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "cannot write a file with the rows of the shards" in caplog.text
    assert all_bytes(found, other) == expected
    assert not [*extents_files(cache.directory), *cache.directory.glob(".partial-*")]


@pytest.mark.usefixtures("on_disk")
def test_the_file_of_a_longer_plan_does_not_replace_that_of_a_shorter_one(tmp_path):
    keys = np.random.default_rng(0).integers(0, 2**60, (100, 2)).astype("<u8").view("V16")[:, 0]
    cache = open_cache(tmp_path)
    cache.writer()
    write_shard(cache.directory, [key.tobytes() for key in keys], [(np.zeros(1, np.float32),) * 2] * 100)
    longer, shorter = Keys(keys), Keys(keys[:60])
    shorter.digest = longer.digest
    for rows in (shorter, longer):
        assert cache.find([rows], PairSet(len(rows))).num_missing == 0
    for path in (files := extents_files(cache.directory)):
        os.utime(path, (time.time() - 48 * AN_HOUR,) * 2)
    assert (len(files), cache_files.stale_files(tmp_path, tmp_path / "stores")) == (2, [])


def test_a_worker_of_which_others_read_the_logps_does_not_look_up(tmp_path):
    pairs = NoisePairs(20)
    worker = lookup(tmp_path, pairs, found=lookup(tmp_path, pairs).found)
    list(worker.iter_score_missing(synthetic_logps))
    assert (worker.num_scored, worker.num_missing) == (20, 20)
    worker.begin(0.0)
    assert worker.num_missing == 0


def test_a_store_that_is_listed_is_not_searched_in_the_shards_of_others(tmp_path):
    """As the pairs of training and of validation, whose shards are in one directory."""
    pairs, other = NoisePairs(100), NoisePairs(100, seed=1)
    scored(tmp_path, pairs)
    scored(tmp_path, other)
    for each in (pairs, other):
        assert lookup(tmp_path, WithoutKeys(each)).num_found == 100


def test_neighbouring_blocks_are_scored_by_the_same_rank(tmp_path):
    """Else each block would be a range of its own: what a lookup has in memory would grow with the pairs."""
    pairs, sizes = NoisePairs(1024), []
    for rank in range(2):
        reference = lookup(tmp_path, pairs, pairs_per_block=1)
        list(reference.iter_score_missing(synthetic_logps, dp_group=DataParallelGroup(rank, 2)))
        sizes.append(reference.num_scored)
    shards = [CacheShard(shard.path) for shard in list_shards(open_cache(tmp_path).directory)]
    assert sizes == [512, 512]
    assert sum(len(shard.rows_by_store()[pairs.digest].counts) for shard in shards) < 150  # of 1,024 blocks


def test_one_rank_hashes_each_shard_and_the_others_none(tmp_path, pool_of):
    pairs = NoisePairs(200)
    cache = scored(tmp_path, pairs, num_ranks=3)
    sizes = sum(shard.path.stat().st_size for shard in list_shards(cache.directory))
    for num_ranks in (1, 2, 4):
        for shard in list_shards(cache.directory):
            os.utime(shard.path)  # changed, as far as the record knows
        hashed, bits = zip(*pool_of(num_ranks).run(found_by_rank, tmp_path, 200), strict=True)
        assert hashed == (sizes, *[0] * (num_ranks - 1))
        assert set(bits) == {all_bytes(lookup(tmp_path, pairs), pairs)}


def test_a_shard_is_hashed_once_and_again_after_a_change(tmp_path, hashed, caplog):
    pairs = NoisePairs(50)
    cache = scored(tmp_path, pairs, num_ranks=3)
    age(cache.directory)
    names = [shard.path.name for shard in list_shards(cache.directory)]
    hashed.clear()
    lookup(tmp_path, pairs)
    assert sorted(hashed) == names
    lookup(tmp_path, pairs)
    assert sorted(hashed) == names  # remembered

    path = cache.directory / names[1]
    before, content = path.stat(), path.read_bytes()
    with path.open("r+b") as stream:  # the same inode, size and time
        stream.write(content[:-200] + bytes([content[-200] ^ 1]) + content[-199:])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    again = lookup(tmp_path, pairs)
    assert hashed[3:] == [names[1]]
    assert "does not match the digest" in caplog.text
    assert again.num_missing > 0


@pytest.mark.parametrize("content", [{"files": "x"}, {"version": 0}, {"path": "/another"}, {"files": {}}])
def test_a_damaged_record_of_verified_shards_is_ignored(tmp_path, hashed, reference_cache, content):
    cache = scored(tmp_path, NoisePairs(50))
    age(cache.directory)
    lookup(tmp_path, NoisePairs(50))
    (record,) = (reference_cache / fingerprint.DIRECTORY_NAME).iterdir()
    record.write_text(json.dumps(json.loads(record.read_text()) | content))
    hashed.clear()
    assert lookup(tmp_path, NoisePairs(50)).num_missing == 0
    assert len(hashed) == 1


def test_the_shards_that_a_run_does_not_need_are_not_hashed(tmp_path, hashed):
    pairs = NoisePairs(400)
    scored(tmp_path, pairs, num_ranks=4)
    hashed.clear()
    assert lookup(tmp_path, pairs, np.array([0, 399])).num_found == 2
    assert 1 <= len(hashed) <= 2


@pytest.mark.usefixtures("on_disk")
def test_what_was_found_is_sent_as_the_name_of_a_file(tmp_path):
    pairs = NoisePairs(300)
    cache = scored(tmp_path, pairs)
    found = lookup(tmp_path, pairs).found
    sent = pickle.dumps(found)
    assert len(sent) < 1000
    received: FoundLogps = pickle.loads(sent)  # noqa: S301
    assert all_bytes(lookup(tmp_path, pairs, found=received), pairs) == all_bytes(lookup(tmp_path, pairs), pairs)
    for path in extents_files(cache.directory):
        path.unlink()
    with pytest.raises(UserError, match=r"was removed from the reference cache .*; set reference.cache_dir"):
        pickle.loads(sent)  # noqa: S301


@pytest.mark.usefixtures("on_disk")
@pytest.mark.parametrize("damage", [lambda c: c[:-3], lambda c: c[:8] + b"\1" + c[9:], lambda c: b"", lambda c: c[:99]])
def test_a_damaged_file_of_extents_is_written_again(tmp_path, damage: Callable[[bytes], bytes]):
    pairs = NoisePairs(300)
    cache = scored(tmp_path, pairs)
    lookup(tmp_path, pairs)
    (path,) = extents_files(cache.directory)
    content = path.read_bytes()
    path.unlink()  # a map of the old file must not change
    path.write_bytes(damage(content))
    assert lookup(tmp_path, pairs).num_missing == 0
    assert path.read_bytes() == content


@pytest.mark.usefixtures("on_disk")
def test_a_read_only_cache_is_looked_up_in_without_files_there(tmp_path, monkeypatch):
    pairs, other = NoisePairs(300), NoisePairs(300)
    other.pairs = other.pairs[::-1]
    cache = scored(tmp_path, pairs)
    bits = all_bytes(lookup(tmp_path, pairs), pairs)
    for path in extents_files(cache.directory):
        path.unlink()
    before = sorted(cache.directory.iterdir())
    # root may write everywhere
    monkeypatch.setattr(extents, "PARTIAL", "no such directory/")
    for each in (pairs, other):
        found = lookup(tmp_path, each)
        sent = lookup(tmp_path, each, found=pickle.loads(pickle.dumps(found.found)))  # noqa: S301
        assert all_bytes(sent, each) == all_bytes(found, each)
    assert all_bytes(lookup(tmp_path, pairs), pairs) == bits
    assert sorted(cache.directory.iterdir()) == before


def test_logps_of_other_tokens_are_never_used(tmp_path):
    """A store's digest is what its manifest says: it may be damaged, or from somebody else."""
    pairs, other = NoisePairs(20), NoisePairs(20, seed=1)
    scored(tmp_path, pairs)
    forged = WithoutKeys(pairs)
    forged.pairs = other.pairs
    found = lookup(tmp_path, forged)
    assert found.num_missing == 0
    with pytest.raises(UserError, match=r"the tokens of pair 3 are not those that the reference has scored; check"):
        found.logps(forged.read(np.array([3])))


@pytest.mark.parametrize(
    "origins",
    [
        b"[]",
        b"x",
        b'{"d": [[0, 0, 5]]}',
        b'{"d": [[-1, 0, 1]]}',
        b'{"d": [[0, 0, 0]]}',
        b'{"d": [[0, -2, 1]]}',
        b'{"d": [[0, 1]]}',
        b'{"d": [[0, 99999999999999999999, 1]]}',
        b'{"d": 5}',
        b"[" * 100_000,
    ],
)
def test_a_shard_with_invalid_origins_is_not_used(tmp_path, monkeypatch, caplog, origins):
    cache, one = open_cache(tmp_path), np.frombuffer(b"0123456789abcdef", dtype="V16")
    cache.writer()
    monkeypatch.setattr(cache_files, "_describe_origins", lambda _: origins)
    write_shard(cache.directory, [one.tobytes()], [(np.zeros(1, np.float32),) * 2])
    assert find(cache, one).num_missing == 1
    assert "is not a shard that this version can read" in caplog.text


def peak_bytes(work: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("order", ORDERS)
def test_the_memory_of_a_lookup_does_not_grow_with_the_pairs(tmp_path, monkeypatch, order):
    for name, value in (("MAX_KEYS", 0), ("_KEYS_PER_PARTITION", 1 << 12), ("_ROWS_PER_WINDOW", 1 << 14)):
        monkeypatch.setattr(extents, name, value)
    peaks = []
    for num_pairs in (100_000, 800_000):
        root = tmp_path / str(num_pairs)
        write_shards(ReferenceCache(root, FINGERPRINT, "").directory, num_pairs)

        def look_up(root: Path = root, num_pairs: int = num_pairs) -> None:
            monkeypatch.setattr("benchmarks.growth_cache.PAIRS_PER_HASH_BLOCK", 16_384)
            found = ReferenceCache(root, FINGERPRINT, "").find([SyntheticPairs(num_pairs, order)], PairSet(num_pairs))
            assert found.num_missing == 0
            assert len(found.read(np.arange(0, num_pairs, num_pairs // 50))) == 50

        peaks.append(peak_bytes(look_up))
    assert peaks[1] < peaks[0] + 2_000_000  # less than 3 bytes per pair; the buffers of partitions are among them
