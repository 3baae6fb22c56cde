"""Spans cover every row once; statistics in bounded memory equal those computed from all rows at once."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thresher.data.prepare import findings
from thresher.data.prepare.blocks import BadRow, BlockResult, TaskReader
from thresher.data.prepare.findings import NUM_EXAMPLES, SpilledKeys
from thresher.data.prepare.prepare import MAX_REASONS, OTHER_REASONS, LengthHistogram, PrepareStats
from thresher.data.prepare.report import PERCENTILES
from thresher.data.settings import DataSettings
from thresher.data.sources import readers
from thresher.data.sources.readers import read_blocks, read_span, split_source
from thresher.data.sources.resolve import resolve_sources
from thresher.data.store.arrow_schema import pairs_to_record_batch

line = st.sampled_from([b'{"a": 1}', b"", b"  ", b'{"longer": "' + b"x" * 40 + b'"}', b"\xff", b"{}\r"])


@settings(max_examples=60, deadline=None)
@given(st.lists(line, min_size=1, max_size=30), st.integers(1, 100), st.integers(1, 5), st.booleans())
def test_every_line_is_in_one_span_and_keeps_its_number(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], num_bytes: int, rows_per_block: int, ends: bool
) -> None:
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    path.write_bytes(b"\n".join([b'{"first": 0}', *lines]) + (b"\n" if ends else b""))
    expected = [(n, each) for n, each in enumerate(path.read_bytes().splitlines(keepends=False), 1) if each.strip()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "BYTES_PER_SPAN", num_bytes)
        patch.setattr(readers, "ROWS_PER_BLOCK", rows_per_block)
        (source,) = resolve_sources([str(path)])
        blocks = list(read_blocks(source))
        assert len(split_source(source)) == -(-source.size // num_bytes)
    found = [pair for block in blocks for pair in zip(block.numbers, block.contents, strict=True)]
    assert [(number, content.strip()) for number, content in found] == [(n, each.strip()) for n, each in expected]
    assert all(len(block) <= rows_per_block for block in blocks)


def test_small_row_groups_are_joined_to_one_span(tmp_path: Path) -> None:
    pq.write_table(pa.table({"n": range(10_000)}), tmp_path / "a.parquet", row_group_size=1500)
    (source,) = resolve_sources([str(tmp_path / "a.parquet")])
    spans = split_source(source)
    assert [(span.start, span.stop) for span in spans] == [(0, 3), (3, 6), (6, 7)]
    rows = [row["n"] for span in spans for block in read_span(span) for row in block.contents]
    assert rows == list(range(10_000))
    assert [block.numbers[0] for span in spans for block in read_span(span)][:2] == [1, 513]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=60),
    st.integers(1, 8),
    st.integers(1, 20),
)
def test_duplicates_and_contradictions_match_a_naive_search(
    tmp_path_factory: pytest.TempPathFactory, keys: list[tuple[int, int]], keys_per_partition: int, piece: int
) -> None:
    pairs, swapped = (np.array(side, np.uint64) for side in zip(*keys, strict=True))
    seen: set[int] = set()
    repeated = [number for number, (key, _) in enumerate(keys) if key in seen or seen.add(key)]
    contradicted = [number for number, (_, other) in enumerate(keys) if other in {key for key, _ in keys}]
    directory = tmp_path_factory.mktemp("keys")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(findings, "KEYS_PER_PARTITION", keys_per_partition)
        spilled = SpilledKeys(directory)
        for start in range(0, len(keys), piece):
            spilled.append(pairs[start : start + piece], swapped[start : start + piece])
        found = spilled.find_repeats()
        spilled.close()
    for finding, numbers in zip(found, (repeated, contradicted), strict=True):
        assert (finding.count, finding.examples) == (len(numbers), tuple(numbers[:NUM_EXAMPLES]))
    assert sorted(path.name for path in directory.iterdir()) == ["keys.bin", "swapped_keys.bin"]


def test_keys_after_the_last_checkpoint_are_truncated(tmp_path: Path) -> None:
    first = SpilledKeys(tmp_path)
    first.append(np.array([1, 2, 3], np.uint64), np.array([7, 8, 9], np.uint64))
    first.close()
    second = SpilledKeys(tmp_path, num_pairs=2)
    second.append(np.array([1], np.uint64), np.array([2], np.uint64))
    duplicates, contradictions = second.find_repeats()
    second.close()
    assert (duplicates.count, duplicates.examples) == (1, (2,))
    assert (contradictions.count, contradictions.examples) == (1, (2,))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(*[st.integers(1, 30)] * 3), min_size=1, max_size=300), st.integers(1, 100))
def test_percentiles_and_bias_match_those_of_all_lengths(lengths: list[tuple[int, int, int]], piece: int) -> None:
    every = np.array(lengths, np.uint32)
    histogram = LengthHistogram()
    for start in range(0, len(every), piece):
        histogram = LengthHistogram(json.loads(json.dumps(histogram.state())))  # as after a crash
        histogram.add(every[start : start + piece])
    totals = every[:, 0] + every[:, 1:].max(axis=1)
    for name, column in zip(("prompt", "chosen", "rejected", "total"), (*every.T, totals), strict=True):
        assert histogram.percentiles()[name] == tuple(np.percentile(column, PERCENTILES, method="lower").tolist())
    bias = histogram.bias()
    assert bias.share_chosen_longer == np.mean(every[:, 1] > every[:, 2])
    assert bias.mean_chosen == pytest.approx(every[:, 1].mean(dtype=np.float64), rel=1e-15)


def results(num_blocks: int, rows: int = 512) -> Iterator[BlockResult]:
    rng = np.random.default_rng(0)
    offsets = pa.array(np.arange(rows + 1), pa.int32())
    empty = pairs_to_record_batch([], [])
    ids = pa.ListArray.from_arrays(offsets, pa.array(np.zeros(rows, np.int32)))
    columns = [
        ids.cast(field.type) if number < 3 else pa.nulls(rows, field.type) for number, field in enumerate(empty.schema)
    ]
    pairs = pa.RecordBatch.from_arrays(columns, schema=empty.schema)
    for _ in range(num_blocks):
        keys, swapped = rng.integers(0, 2**63, (2, rows), dtype=np.uint64)
        bad = [BadRow("a", "line", n, f"reason {rng.integers(1 << 62)}", "") for n in range(8)]
        findings = {"control_tokens_in_text": list(range(rows))}
        yield BlockResult(0, rows, 0, rows + 8, 0, pairs, keys, swapped, bad, findings=findings)


def peak_memory_of_stats(directory: Path, num_blocks: int) -> int:
    directory.mkdir()
    (directory / "a.jsonl").write_text('{"prompt": "p", "chosen": "c", "rejected": "r"}\n')
    reader = TaskReader(DataSettings("x"), resolve_sources([str(directory / "a.jsonl")]))
    stats = PrepareStats(reader, directory)
    tracemalloc.start()
    for result in results(num_blocks):
        stats.add(result)
    report = stats.report(["digest"])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    stats.close()
    assert report.pairs_kept == 512 * num_blocks
    assert report.bad_rows == 8 * num_blocks
    assert len(report.bad_reasons) == 20
    assert {each.name: each.count for each in report.findings} == {"control_tokens_in_text": 512 * num_blocks}
    return peak


@pytest.mark.slow
def test_statistics_of_five_times_the_pairs_take_no_more_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """266 thousand pairs and 1.3 million, both with enough bad rows to fill the table of reasons."""
    monkeypatch.setattr(findings, "KEYS_PER_PARTITION", 1 << 15)
    small = peak_memory_of_stats(tmp_path / "small", 520)
    large = peak_memory_of_stats(tmp_path / "large", 2600)
    print(f"{small / 2**20:.1f} MiB, {large / 2**20:.1f} MiB")
    assert large < 1.3 * small


def test_reasons_beyond_the_limit_are_counted_together(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "p", "chosen": "c", "rejected": "r"}\n')
    reader = TaskReader(DataSettings("x"), resolve_sources([str(tmp_path / "a.jsonl")]))
    stats = PrepareStats(reader, tmp_path)
    num_rows = MAX_REASONS + 100
    bad = [BadRow("a", "line", n, f"reason {n}", "") for n in range(num_rows)]
    stats.add(BlockResult(0, num_rows, 0, num_rows, pairs=pairs_to_record_batch([], []), bad=bad))
    report = stats.report(["digest"])
    stats.close()
    assert report.bad_rows == num_rows
    assert report.bad_reasons[OTHER_REASONS] == 100
