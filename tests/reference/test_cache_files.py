"""The cache on disk: logps round-trip bit for bit, damage is detected, and concurrent writers are safe."""

from __future__ import annotations

import os
import subprocess
import time
from collections import deque
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.forks import python
from tests.support.noise_cache import NoisePairs, all_bytes, find, lookup, open_cache, synthetic_logps
from tests.support.tiny_run import PairsInMemory, noise_labels
from thresher.data.batching.batches import Blocks
from thresher.data.batching.mismatched import MismatchedAnswers, VisitPlan
from thresher.distributed.groups import DataParallelGroup
from thresher.errors import UserError
from thresher.losses.pairs import ExampleLogps
from thresher.reference import cache as cache_files
from thresher.reference.cache import (
    CacheShard,
    ShardFile,
    ShardWriter,
    cache_root,
    list_shards,
    read_keys,
    stale_files,
    verify_shard,
    write_shard,
)
from thresher.reference.scorers import MismatchedReference, precomputed

PAIRS = 50
SMALL = 1200  # bytes: about six blocks of four pairs


@pytest.fixture
def small_shards(monkeypatch):
    monkeypatch.setattr(cache_files, "SHARD_BYTES", SMALL)


def shards_in(root: Path) -> list[ShardFile]:
    return [shard for directory in root.iterdir() for shard in list_shards(directory)]


def test_logps_round_trip_bit_for_bit(tmp_path):
    draw = np.random.default_rng(0)
    keys = [draw.bytes(16) for _ in range(20)]
    sides = [[draw.normal(size=n).astype(np.float32) for n in draw.integers(0, 9, 20)] for _ in range(2)]
    sides[0][3] = np.array([-np.inf, -0.0, np.nan, np.float32(1e-42)], dtype=np.float32)
    file = write_shard(tmp_path, keys, list(zip(*sides, strict=True)))
    assert ([file], file.num_pairs, verify_shard(file)) == (list_shards(tmp_path), 20, None)
    shard = CacheShard(file.path)
    assert [key.tobytes() for key in read_keys(file.path)] == keys
    for row in range(20):
        for actual, expected in zip(shard.logps(row), (sides[0][row], sides[1][row]), strict=True):
            assert actual.tobytes() == expected.tobytes()


@pytest.mark.parametrize("repeats", [1, 4])
def test_lookup_equals_a_dictionary(tmp_path, repeats):
    """Also if keys share a half or contain zero bytes, and if a run or the shards contain a pair several times."""
    draw = np.random.default_rng(1)
    keys = [halves.tobytes() for halves in draw.integers(0, 40, (300, 2)).astype("<u8")]
    run = [key for key in keys[:200] for _ in range(repeats)]
    draw.shuffle(run)
    cache = open_cache(tmp_path)
    cache.writer()
    first = {}
    for shard_keys in (keys[100:200], keys[150:]):
        values = [np.array([number], np.float32) for number in range(len(first), len(first) + len(shard_keys))]
        time.sleep(0.002)  # names have milliseconds, and the oldest shard wins
        write_shard(cache.directory, shard_keys, [(each, each) for each in values])
        first = dict(zip(reversed(shard_keys), reversed(values), strict=True)) | first
    found = find(cache, np.frombuffer(b"".join(run), dtype="V16"))
    assert found.is_missing(0, len(run)).tolist() == [key not in first for key in run]
    known = [position for position, key in enumerate(run) if key in first]
    assert len(known) > 50 * repeats
    for position in known:
        assert found.read(np.array([position])) == [(run[position], [first[run[position]]] * 2)]


def test_an_empty_lookup_or_an_empty_cache_finds_nothing(tmp_path):
    cache = open_cache(tmp_path)
    assert find(cache, np.zeros(0, dtype="V16")).num_missing == 0
    cache.writer()
    one = np.frombuffer(b"0123456789abcdef", dtype="V16")
    assert find(cache, one).is_missing(0, 1).tolist() == [True]
    write_shard(cache.directory, [one.tobytes()], [(np.zeros(1, np.float32),) * 2])
    assert find(cache, np.zeros(0, dtype="V16")).num_found == 0
    assert find(cache, one).is_missing(0, 1).tolist() == [False]


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


DAMAGES = {
    "a flipped bit": flip_a_bit,
    "a lost tail": lambda path: path.write_bytes(path.read_bytes()[:-40]),
    "a lost half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "an empty file": lambda path: path.write_bytes(b""),
    "other bytes": lambda path: path.write_bytes(b"x" * 5000),
}


@pytest.mark.usefixtures("small_shards")
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_shard_is_reported_once_and_its_pairs_are_scored_again(tmp_path, caplog, damage):
    pairs = NoisePairs(PAIRS)
    list(lookup(tmp_path, pairs).iter_score_missing(synthetic_logps))
    expected = all_bytes(lookup(tmp_path, pairs), pairs)
    victim = shards_in(tmp_path)[1]
    damage(victim.path)
    again = lookup(tmp_path, pairs)
    (warning,) = caplog.records
    assert warning.levelname == "WARNING"
    assert (
        f"{victim.path} does not match the digest in its name; the pairs needed from it are scored again"
        in warning.getMessage()
    )
    assert again.num_missing == victim.num_pairs
    list(again.iter_score_missing(synthetic_logps))
    assert again.num_missing == 0
    assert all_bytes(again, pairs) == expected
    lookup(tmp_path, pairs)
    assert len(caplog.records) == 1


def test_only_shards_that_a_run_needs_are_read_in_full(tmp_path, caplog):
    """Reading a large cache to verify it takes long, so a shard is verified once, and only for its pairs."""
    cache, logps = open_cache(tmp_path), np.full(1, -3.0, np.float32)
    cache.writer()
    needed, other = (write_shard(cache.directory, [key * 16], [(logps, logps)]) for key in (b"n", b"o"))
    for shard in (needed, other):  # damaged in a way that does not show in the columns and keys
        shard.path.write_bytes(shard.path.read_bytes().replace(logps.tobytes(), np.float32(-4.0).tobytes()))
    cache.mark_verified([needed])  # as after writing it
    assert find(cache, np.frombuffer(b"n" * 16, dtype="V16")).num_found == 1
    assert not caplog.records


def test_a_shard_that_is_removed_during_a_run_is_reported_with_a_hint(tmp_path):
    pairs = NoisePairs(PAIRS)
    reference = lookup(tmp_path, pairs)
    list(reference.iter_score_missing(synthetic_logps))
    for shard in shards_in(tmp_path):
        shard.path.unlink()
    with pytest.raises(
        UserError, match=r"was removed from the reference cache or damaged .*; rerun with resume_from_checkpoint=auto"
    ):
        reference.logps(pairs.read(np.arange(3)))


def test_a_cache_that_cannot_be_created_is_reported_with_a_hint(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        UserError, match=r"could not create the reference cache in .*; set reference.cache_dir to a writable"
    ):
        list(lookup(tmp_path / "file", NoisePairs(4)).iter_score_missing(synthetic_logps))


def test_a_failed_write_names_the_cache_directory(tmp_path):
    with pytest.raises(UserError, match=r"could not write to the reference cache in .*: No such file"):
        write_shard(tmp_path / "gone", [b"k" * 16], [(np.zeros(1, np.float32),) * 2])


def test_a_shard_is_written_when_it_is_full_or_old(tmp_path, monkeypatch):
    one = np.zeros(10, dtype=np.float32)
    monkeypatch.setattr(cache_files, "SHARD_BYTES", 6 * 96)
    with ShardWriter(tmp_path) as writer:
        for number in range(13):
            writer.add(bytes([number]) * 16, (one, one))  # 96 bytes
            writer.end_block()
    assert [shard.num_pairs for shard in writer.written] == [6, 6, 1]
    monkeypatch.undo()
    monkeypatch.setattr(cache_files, "SHARD_SECONDS", 0.0)
    with ShardWriter(tmp_path) as writer:
        for number in range(3):
            writer.add(bytes([number]) * 16, (one, one))
            writer.end_block()
    assert [shard.num_pairs for shard in writer.written] == [1, 1, 1]


def test_a_shard_is_named_by_the_time_at_which_it_was_written(tmp_path):
    before = time.time()
    file = write_shard(tmp_path, [b"0" * 16], [(np.zeros(1, np.float32),) * 2])
    assert before - 0.001 <= file.created <= time.time()


def test_scoring_is_reported_in_seconds_per_pair_that_the_run_visits(tmp_path):
    pairs = NoisePairs(4)
    reference = lookup(tmp_path, pairs)
    started = time.perf_counter()
    list(reference.iter_score_missing(synthetic_logps))
    elapsed = time.perf_counter() - started
    assert 0.5 * elapsed / 4 < reference.seconds_per_pair <= elapsed / 4


def test_both_sides_are_read_as_they_were_scored(tmp_path):
    pairs = NoisePairs(4)
    reference = lookup(tmp_path, pairs)
    list(reference.iter_score_missing(synthetic_logps))
    batch = pairs.read(np.arange(4))
    found, expected = reference.logps(batch), synthetic_logps(batch)
    for side, scored in ((found.chosen, expected.chosen), (found.rejected, expected.rejected)):
        assert (side.values.tolist(), side.lengths.tolist()) == (scored.values.tolist(), scored.lengths.tolist())


def test_an_interrupt_keeps_the_blocks_that_were_scored(tmp_path):
    pairs, num_forwards = NoisePairs(PAIRS), 0

    def score(batch):
        nonlocal num_forwards
        num_forwards += 1
        if num_forwards == 8:
            raise KeyboardInterrupt
        return synthetic_logps(batch)

    with pytest.raises(KeyboardInterrupt):
        list(lookup(tmp_path, pairs).iter_score_missing(score))
    assert lookup(tmp_path, pairs).num_missing == PAIRS - 7 * 4


def test_the_oldest_of_two_copies_of_a_pair_is_used(tmp_path):
    """A resumed run must read the same bits as before, whatever other processes have written since."""
    pairs = NoisePairs(12)
    first = lookup(tmp_path, pairs, pairs_per_block=3)
    late = lookup(tmp_path, pairs, pairs_per_block=4)  # looks up in an empty cache, as a concurrent writer would
    list(first.iter_score_missing(synthetic_logps))
    bits = all_bytes(first, pairs)
    time.sleep(0.002)
    list(late.iter_score_missing(synthetic_logps))
    assert len(shards_in(tmp_path)) == 2
    assert all_bytes(lookup(tmp_path, pairs), pairs) == bits
    assert all_bytes(late, pairs) == bits
    (separate := tmp_path / "separate").mkdir()
    other = lookup(separate, pairs, pairs_per_block=4)
    list(other.iter_score_missing(synthetic_logps))
    assert all_bytes(other, pairs) != bits


def test_a_pair_that_occurs_twice_has_the_bits_of_its_blocks_and_in_another_store_those_of_the_first(tmp_path):
    pairs = NoisePairs(12)
    pairs.pairs[10] = pairs.pairs[1]
    pairs.pairs.pop()  # the last block has three pairs, so that its bits differ
    list(lookup(tmp_path, pairs).iter_score_missing(synthetic_logps))
    of_blocks = [
        side_of(synthetic_logps(pairs.read(np.arange(*block))), row) for *block, row in ((0, 4, 1), (8, 11, 2))
    ]
    assert of_blocks[0] != of_blocks[1]
    assert [side_of(lookup(tmp_path, pairs).logps(pairs.read(np.arange(11))), row) for row in (1, 10)] == of_blocks
    other = NoisePairs(0)
    other.pairs = pairs.pairs[::-1]
    assert [side_of(lookup(tmp_path, other).logps(other.read(np.arange(11))), row) for row in (0, 9)] == [
        of_blocks[0]
    ] * 2


def side_of(logps: ExampleLogps, row: int) -> bytes:
    """The chosen side of a pair, as bytes."""
    return logps.chosen.values.split(logps.chosen.lengths.tolist())[row].numpy().tobytes()


def test_bits_do_not_depend_on_which_pairs_a_run_visits(tmp_path):
    pairs = NoisePairs(PAIRS)
    some = lookup(tmp_path / "some", pairs, np.array([3, 17, 18, 49]))
    assert (some.num_found, some.num_missing) == (0, 4)
    list(some.iter_score_missing(synthetic_logps))
    assert some.num_scored == 4 + 4 + 2  # three blocks, of which the last has two pairs
    every = lookup(tmp_path / "every", pairs)
    list(every.iter_score_missing(synthetic_logps))
    for pair_id in (3, 17, 18, 49):
        batch = pairs.read(np.array([pair_id]))
        assert some.logps(batch).chosen.values.tolist() == every.logps(batch).chosen.values.tolist()
    longer = lookup(tmp_path / "some", pairs)
    assert longer.num_missing == PAIRS - 10
    list(longer.iter_score_missing(synthetic_logps))
    assert all_bytes(longer, pairs) == all_bytes(every, pairs)


def test_a_pair_that_was_not_looked_up_is_an_error(tmp_path):
    pairs = NoisePairs(PAIRS)
    reference = lookup(tmp_path, pairs, np.array([9, 20]))
    list(reference.iter_score_missing(synthetic_logps))
    for unknown in (0, 12, 49):
        with pytest.raises(IndexError, match=f"pair {unknown} was not looked up"):
            reference.logps(pairs.read(np.array([9, unknown])))


@pytest.mark.usefixtures("small_shards")
@pytest.mark.parametrize("num_ranks", [2, 3, 7, 20])
def test_ranks_divide_the_blocks_and_no_block_is_scored_twice(tmp_path, num_ranks):
    """Also if one of them looks up after others have written: all must assign blocks alike."""
    pairs = NoisePairs(PAIRS)
    reader, scored = lookup(tmp_path, pairs), 0
    for rank in range(num_ranks):
        reference = lookup(tmp_path, pairs)
        scoring = reference.iter_score_missing(synthetic_logps, dp_group=DataParallelGroup(rank, num_ranks))
        deque(scoring, maxlen=0)
        scored += reference.num_scored
    assert scored == PAIRS
    assert reader.num_missing == PAIRS
    reader.lookup()
    assert reader.num_missing == 0


@pytest.mark.usefixtures("small_shards")
def test_concurrent_writers_produce_valid_shards_and_the_same_bits(tmp_path):
    """Eight writers: half of them score everything, half a quarter each, so that some pairs are written twice."""
    pairs = NoisePairs(400)
    children = []
    for number in range(8):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                rank, num_ranks = (0, 1) if number % 2 else (number // 2, 4)
                scoring = lookup(tmp_path, pairs).iter_score_missing(
                    synthetic_logps, dp_group=DataParallelGroup(rank, num_ranks)
                )
                deque(scoring, maxlen=0)
                code = 0
            finally:
                os._exit(code)
        children.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 8
    shards = shards_in(tmp_path)
    assert sum(shard.num_pairs for shard in shards) > 400
    assert [verify_shard(shard) for shard in shards] == [None] * len(shards)
    reference = lookup(tmp_path, pairs)
    assert reference.num_missing == 0
    single = lookup(tmp_path / "single", pairs)
    list(single.iter_score_missing(synthetic_logps))
    assert all_bytes(reference, pairs) == all_bytes(single, pairs)


@pytest.mark.slow
def test_a_kill_repeats_less_than_one_shard_and_changes_no_bit(tmp_path):
    """SIGKILL during a forward, five times, before, during and after shards."""
    num_pairs, kills = 400, [1, 5, 9, 20, 31]
    done = subprocess.run(
        [*python(), "-m", "tests.support.score_and_kill", tmp_path / "killed", tmp_path / "log"]
        + [str(number) for number in (num_pairs, SMALL, *kills)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    shards = shards_in(tmp_path / "killed")
    blocks_per_shard = max(shard.num_pairs for shard in shards) // 4
    assert blocks_per_shard >= 3
    assert sum(shard.num_pairs for shard in shards) == num_pairs  # no pair was written twice

    forwards = [int(line) // 4 for line in (tmp_path / "log").read_text().split()]
    assert set(forwards) == set(range(num_pairs // 4))
    repeated = len(forwards) - num_pairs // 4
    # per killed process: the forward that was interrupted, and fewer finished ones than a shard has
    assert 0 < repeated <= len(kills) * blocks_per_shard
    start = 0
    for kill in kills:
        lost = sum(block in forwards[start + kill :] for block in forwards[start : start + kill])
        assert 1 <= lost <= blocks_per_shard
        start += kill

    pairs = NoisePairs(num_pairs)
    uninterrupted = lookup(tmp_path / "uninterrupted", pairs)
    list(uninterrupted.iter_score_missing(synthetic_logps))
    assert all_bytes(lookup(tmp_path / "killed", pairs), pairs) == all_bytes(uninterrupted, pairs)


@pytest.mark.parametrize(
    ("cache_dir", "environment", "expected"),
    [
        ("~/chosen", {"THRESHER_CACHE_DIR": "/shared", "XDG_CACHE_HOME": "/xdg"}, "/home/me/chosen"),
        (None, {"THRESHER_CACHE_DIR": "/shared", "XDG_CACHE_HOME": "/xdg"}, "/shared"),
        (None, {"XDG_CACHE_HOME": "/xdg"}, "/xdg/thresher/reference"),
        (None, {}, "/home/me/.cache/thresher/reference"),
    ],
)
def test_the_cache_directory_is_from_the_config_the_environment_or_the_default(
    monkeypatch, cache_dir, environment, expected
):
    for name in ("THRESHER_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"HOME": "/home/me"} | environment).items():
        monkeypatch.setenv(name, value)
    assert cache_root(cache_dir) == Path(expected)


def test_a_partial_file_is_stale_after_a_day(tmp_path):
    (tmp_path / "reference").mkdir()
    for hours in (23, 25):
        (path := tmp_path / "reference" / f".partial-{hours}").touch()
        os.utime(path, (time.time() - hours * 3600,) * 2)
    assert [path.name for path in stale_files(tmp_path, tmp_path / "stores")] == [".partial-25"]


def test_a_cache_of_another_reference_is_not_read(tmp_path):
    pairs = NoisePairs(8)
    list(lookup(tmp_path, pairs).iter_score_missing(synthetic_logps))
    cache = open_cache(tmp_path)
    other = cache.directory.rename(tmp_path / ("0" * 32))
    assert lookup(tmp_path, pairs).num_missing == 8
    other.rename(cache.directory)
    assert lookup(tmp_path, pairs).num_missing == 0


def test_kto_scores_each_answer_once_and_mismatched_ones_once_per_seed_and_epoch(tmp_path):
    labels = noise_labels(10)

    def look_up(seed: int, num_steps: int) -> tuple[MismatchedAnswers, MismatchedReference]:
        visits = MismatchedAnswers(labels, plan := VisitPlan(10, seed, pairs_per_step=4, num_steps=num_steps))
        reference = precomputed(
            open_cache(tmp_path),
            visits,
            plan.visited_pairs,
            blocks_of=lambda lengths: Blocks.by_pairs(len(lengths), 1),
            device=torch.device("cpu"),
            num_visits=plan.num_visits,
        )
        assert isinstance(reference, MismatchedReference)
        return visits, reference

    _, reference = look_up(seed=0, num_steps=6)  # two epochs
    list(reference.iter_score_missing(synthetic_logps))
    assert (reference.own.num_scored, reference.mismatched.num_scored) == (10, 20)
    _, reference = look_up(seed=0, num_steps=6)
    assert reference.num_missing == 0
    visits, reference = look_up(seed=1, num_steps=6)
    assert reference.own.num_missing == 0
    assert 0 < reference.mismatched.num_missing <= 20
    list(reference.iter_score_missing(synthetic_logps))
    batch = visits.read(np.arange(20))
    expected = synthetic_logps(batch)
    for found, side in zip(reference.logps(batch).sides, expected.sides, strict=True):
        assert found.lengths.tolist() == side.lengths.tolist()
        torch.testing.assert_close(found.values, side.values, atol=1e-4, rtol=0)


def test_an_example_without_a_mismatched_answer_has_the_logps_of_its_own_alone(tmp_path):
    labels = noise_labels(2).pairs
    one_prompt = PairsInMemory([replace(each, prompt_ids=labels[0].prompt_ids) for each in labels])
    visits = MismatchedAnswers.of_sets(one_prompt)
    reference = precomputed(
        open_cache(tmp_path),
        visits,
        None,
        blocks_of=lambda lengths: Blocks.by_pairs(len(lengths), 2),
        device=torch.device("cpu"),
        num_visits=2,
    )
    list(reference.iter_score_missing(synthetic_logps))
    (found,) = reference.logps(visits.read(np.arange(2))).sides
    assert found.lengths.tolist() == one_prompt.lengths[:, 1].tolist()
