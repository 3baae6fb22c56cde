"""A share of the pairs is held out by prompt and seed, whatever the order of files."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.test_pair_store import assert_equal, write_store
from tests.support.compared_runs import merge
from tests.support.small_runs import make_base, open_small_inputs
from thresher.config import parse_config
from thresher.data.example import Example
from thresher.data.prepare.findings import find_leaks
from thresher.data.prepare.prepare import prepare
from thresher.data.store.reader import ExampleStore
from thresher.data.store.split import Side, Split, SplitRows, _mix
from thresher.errors import UserError


def pairs_of_prompts(num_prompts: int, pairs_per_prompt: int = 3) -> list[Example]:
    """Pairs of one-token prompts; the length of the chosen side differs with the prompt."""
    return [
        Example.pair(
            np.array([prompt], np.int32),
            np.full(1 + prompt % 7, number, np.int32),
            np.array([99, 98], np.int32),
            np.arange(1 + prompt % 7) % 2 == 0 if prompt % 5 == 0 else None,
        )
        for prompt in range(num_prompts)
        for number in range(pairs_per_prompt)
    ]


def prompts_of(store: ExampleStore) -> list[int]:
    return [int(store[number].prompt_ids[0]) for number in range(len(store))]


def test_all_pairs_of_a_prompt_are_on_one_side_whatever_their_order(tmp_path: Path) -> None:
    pairs = pairs_of_prompts(60)
    shuffled = [pairs[number] for number in np.random.default_rng(0).permutation(len(pairs))]
    sides = []
    for name, rows, shard_rows in (("a", pairs, 7), ("b", shuffled, 50)):
        train, held_out = write_store(tmp_path / name, rows, shard_rows).split(0.2, seed=3)
        assert len(train) + len(held_out) == len(pairs)
        assert not set(prompts_of(train)) & set(prompts_of(held_out))
        assert find_leaks(train, held_out)[1].count == 0
        sides.append((sorted(prompts_of(train)), sorted(prompts_of(held_out))))
    assert sides[0] == sides[1]


def test_a_prompt_stays_on_its_side_when_pairs_are_added(tmp_path: Path) -> None:
    _, few = write_store(tmp_path / "few", pairs_of_prompts(200, 1)).split(0.1, seed=1)
    _, many = write_store(tmp_path / "many", pairs_of_prompts(500, 1)).split(0.1, seed=1)
    assert set(prompts_of(few)) == {prompt for prompt in prompts_of(many) if prompt < 200}


def test_the_share_is_that_of_the_setting_and_the_seed_chooses_the_prompts(tmp_path: Path) -> None:
    store = write_store(tmp_path / "s", pairs_of_prompts(2000, 1), shard_rows=600, rows_per_batch=500)
    for seed in range(5):
        assert len(store.split(0.1, seed)[1]) == pytest.approx(200, abs=4 * (2000 * 0.1 * 0.9) ** 0.5)
    chosen = [frozenset(prompts_of(store.split(0.1, seed)[1])) for seed in range(5)]
    assert len(set(chosen)) == 5
    # independent draws share a tenth of their prompts
    assert len(chosen[0] & chosen[1]) < 60


@pytest.mark.parametrize("held_out", [False, True])
def test_a_split_reads_as_a_store_of_its_pairs_alone(tmp_path: Path, held_out: bool) -> None:
    pairs = pairs_of_prompts(40)
    split = write_store(tmp_path / "whole", pairs, shard_rows=16).split(0.3, seed=0)[held_out]
    numbers = [split.number_in_files(number) for number in range(len(split))]
    alone = write_store(tmp_path / "alone", [pairs[number] for number in numbers])
    copy = pickle.loads(pickle.dumps(split))  # noqa: S301
    for store in (split, copy):
        assert len(store) == len(alone)
        for number in range(len(alone)):
            assert_equal(store[number], alone[number])
        np.testing.assert_array_equal(store.lengths, alone.lengths)
        np.testing.assert_array_equal(store.scored_lengths, alone.scored_lengths)
        for column in ("hash", "prompt_hash"):
            joined = [np.concatenate(list(each.hashes(column))) for each in (store, alone)]
            np.testing.assert_array_equal(*joined)
        assert store.longest_example == alone.longest_example
        assert store.digest == split.digest


def rows_in_memory(hashes: np.ndarray, share: float, seed: int) -> np.ndarray:
    """The held-out rows, computed from the hashes of all pairs at once."""
    keys = _mix(hashes.view("<u8")[::2], seed)
    limit = np.uint64(min(int(share * 2.0**64), 2**64 - 1))
    return np.flatnonzero(keys <= max(limit, keys.min()))


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=6),
    st.sampled_from([1e-9, 0.01, 0.3, 0.5, 0.9, 1 - 1e-9]),
    st.integers(0, 2**32),
)
def test_rows_read_shard_by_shard_are_those_of_all_hashes_at_once(sizes: list[int], share: float, seed: int) -> None:
    draw, count = np.random.default_rng(seed), sum(sizes)
    prompts = np.frombuffer(draw.bytes(16 * 30), "V16")
    hashes, ends = prompts[draw.integers(0, 30, count)], np.cumsum(sizes)
    lengths = draw.integers(1, 500, (count, 3)).astype(np.uint32)
    expected = rows_in_memory(hashes, share, seed)

    shards = np.split(hashes, ends[:-1])
    rows = SplitRows.of(Split(share, seed, held_out=True).held_out_rows(shards), lengths)
    for is_held_out in (False, True):
        of_side = expected if is_held_out else np.delete(np.arange(count), expected)
        side = Side(rows, is_held_out)
        assert len(side) == len(of_side)
        ids = draw.permutation(len(of_side))
        np.testing.assert_array_equal(side.rows_of(ids), of_side[ids])
        selected = [side.select(each, int(end) - len(each)) for each, end in zip(shards, ends, strict=True)]
        np.testing.assert_array_equal(np.concatenate(selected), hashes[of_side])
        longest = (lengths[of_side, 0] + lengths[of_side, 1:].max(axis=1)).max(initial=0)
        assert side.longest_example == longest


def test_a_process_maps_the_rows_that_the_first_one_has_written(tmp_path: Path) -> None:
    """Without a hash of a prompt: the shards are gone."""
    store = write_store(tmp_path / "store", pairs_of_prompts(60), shard_rows=16)
    sides = store.split(0.2, 3, tmp_path / "run" / "data")
    (file,) = (tmp_path / "run" / "data").iterdir()
    assert file.stat().st_size == 72 + 4 * len(sides[1])
    expected = [np.array(side.lengths) for side in sides]
    shutil.rmtree(tmp_path / "store" / "shards")
    for side, lengths in zip(pickle.loads(pickle.dumps(sides)), expected, strict=True):  # noqa: S301
        np.testing.assert_array_equal(side.lengths, lengths)


@pytest.mark.parametrize(
    "damage",
    [
        lambda _: b"",
        lambda _: b"short",
        lambda _: bytes(128),
        lambda whole: whole[:-4],
        lambda whole: whole + bytes(4),
        lambda whole: whole[:-4] + bytes([whole[-4] ^ 1]) + whole[-3:],
        lambda whole: whole[:8] + bytes(8) + whole[16:],  # of a different store
        lambda whole: whole[:24] + bytes(8) + whole[32:],  # its longest example
    ],
)
def test_rows_of_a_different_store_or_a_damaged_file_are_computed_again(
    tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    store = write_store(tmp_path / "store", pairs_of_prompts(60), shard_rows=16)
    expected = [np.array(side.lengths) for side in store.split(0.2, 3, tmp_path)]
    (file,) = tmp_path.glob("held-out-*.rows")
    whole = file.read_bytes()
    file.unlink()  # a map of the old file must not change
    file.write_bytes(damage(whole))
    for side, lengths in zip(store.split(0.2, 3, tmp_path), expected, strict=True):
        np.testing.assert_array_equal(side.lengths, lengths)
    assert file.read_bytes() == whole


def test_a_directory_that_cannot_be_written_does_no_harm(tmp_path: Path) -> None:
    store = write_store(tmp_path / "store", pairs_of_prompts(20))
    (tmp_path / "file").touch()
    split = store.split(0.2, 3, tmp_path / "file" / "data")
    assert [len(side) for side in split] == [len(side) for side in store.split(0.2, 3)]


def test_the_digest_names_the_pairs_of_a_side(tmp_path: Path) -> None:
    store = write_store(tmp_path / "s", pairs_of_prompts(40))
    sides = [*store.split(0.3, 0), *store.split(0.3, 1), *store.split(0.2, 0), store]
    assert len({side.digest for side in sides}) == len(sides)


def test_at_least_one_prompt_is_held_out_and_one_is_left(tmp_path: Path) -> None:
    train, held_out = write_store(tmp_path / "two", pairs_of_prompts(2)).split(1e-6, seed=0)
    assert (len(train), len(held_out)) == (3, 3)
    with pytest.raises(UserError, match=r"all 3 pairs of .* have one prompt, so none can be held out"):
        write_store(tmp_path / "one", pairs_of_prompts(1)).split(0.5, seed=0)


@pytest.fixture
def base(tmp_path: Path) -> dict[str, Any]:
    values = make_base(tmp_path) | {"output_dir": str(tmp_path / "out"), "cache_dir": str(tmp_path / "cache")}
    return values | {"validation": {"split": 0.25}}


def test_a_run_holds_out_the_same_pairs_of_its_files_and_of_a_store(base: dict[str, Any], tmp_path: Path) -> None:
    from thresher.builders.data_parts import data_parts, data_settings
    from thresher.models.loading.load import load_tokenizer

    config, from_files = open_small_inputs(base)
    prepare(data_settings(config, data_parts(config)[""]), load_tokenizer(base["pretrain"]), tmp_path / "store")
    on_store = merge(base, {"actor_train": {"data_args": {"store": str(tmp_path / "store")}}})
    for name in ("file_name", "template"):
        del on_store["actor_train"]["data_args"][name]
    _, from_store = open_small_inputs(on_store)
    assert from_files.validation is not None
    assert len(from_files.train) + len(from_files.validation) == 21
    assert from_files.plan.num_pairs == len(from_files.train)
    assert (from_files.train.digest, from_files.validation.digest) == (
        from_store.train.digest,
        from_store.validation.digest,
    )


def test_the_number_of_held_out_pairs_is_reported(base: dict[str, Any]) -> None:
    from thresher.builders.run import run_facts

    _, inputs = open_small_inputs(base)
    facts = run_facts(inputs, "cpu")
    count = len(inputs.validation)
    assert facts["data"] == f"{21 - count} pairs, {count} held out for validation"


def test_a_run_with_a_split_evaluates_on_it_and_resumes_bitwise(base: dict[str, Any], tmp_path: Path) -> None:
    from tests.support.compared_runs import metric_log
    from tests.support.small_runs import last_weights
    from thresher.pipeline import DPOPipeline

    for name, steps in (("whole", [4]), ("resumed", [2, 4])):
        for max_steps in steps:
            changes = {"output_dir": str(tmp_path / name), "max_steps": max_steps, "resume_from_checkpoint": "auto"}
            schedule = {"actor_train": {"training_args": {"lr_scheduler_type": "constant"}}}
            DPOPipeline(parse_config(merge(base, changes | schedule))).run()
    whole, resumed = last_weights(tmp_path / "whole"), last_weights(tmp_path / "resumed")
    assert all((whole[name] == resumed[name]).all() for name in whole)
    evaluations = [
        [record["eval/loss"] for record in metric_log(tmp_path / name) if "eval/loss" in record]
        for name in ("whole", "resumed")
    ]
    assert evaluations[0] == evaluations[1]
    assert len(evaluations[0]) == 2


def test_another_split_is_another_run(base: dict[str, Any], tmp_path: Path) -> None:
    from thresher.pipeline import DPOPipeline

    DPOPipeline(parse_config(merge(base, {"max_steps": 2}))).run()
    changed = merge(base, {"validation": {"split": 0.5}, "resume_from_checkpoint": "auto"})
    with pytest.raises(UserError, match="belongs to another run: its data is"):
        DPOPipeline(parse_config(changed)).run()
