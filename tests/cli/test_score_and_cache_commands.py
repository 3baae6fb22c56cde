"""`thresher precompute-reference` and `thresher cache`: their output, and what they score and remove."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import pytest
import yaml

from thresher.cli.cache import _age
from thresher.reference.cache import CachedReference

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "the", "big", "red", "sun", "go", "down"]
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
NUM_PAIRS, NUM_VALIDATION = 20, 5


@pytest.fixture
def thresher(command_line):
    """Run the command line in this process; return its exit code and output."""

    def run(*arguments: object) -> tuple[int, str]:
        result = command_line(*arguments)
        return result.code, result.out + result.err

    return run


@pytest.fixture
def config(tmp_path, tiny_dir) -> Path:
    """20 training pairs of 4 to 23 words per side, and 5 validation pairs."""

    def row(number: int) -> dict[str, str]:
        words = [WORDS[(number + i) % len(WORDS)] for i in range(4 + number % 20)]
        return {"prompt": f"Tale {number}:\n", "chosen": " ".join(words), "rejected": " ".join(reversed(words)) + "!"}

    rows = [json.dumps(row(number)) + "\n" for number in range(NUM_PAIRS + NUM_VALIDATION)]
    (tmp_path / "train.jsonl").write_text("".join(rows[:NUM_PAIRS]))
    (tmp_path / "validation.jsonl").write_text("".join(rows[NUM_PAIRS:]))
    values = {
        "pretrain": str(tiny_dir),
        "output_dir": "out",
        "max_steps": 2,
        "track_with": [],
        "actor_train": {
            "model_args": {"dtype": "fp32"},
            "data_args": {"file_name": "train.jsonl", "template": "raw"},
            "training_args": {"per_device_train_batch_size": 4},
        },
        "reference": {"infer_batch_size": 1},
        "validation": {"data_args": {"file_name": "validation.jsonl", "template": "raw"}},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    (tmp_path / "say.jinja").write_text(TEMPLATE)
    return tmp_path / "run.yaml"


def counts(printed: str) -> tuple[int, int]:
    """Return the number of pairs from the cache, and of pairs that the reference scored."""
    (found,) = re.findall(r"reference: ([\d,]+) pairs from the cache, ([\d,]+) scored", printed)
    return int(found[0]), int(found[1])


def references_in(cache: Path) -> list[Path]:
    return sorted(path for path in cache.iterdir() if path.name not in ("stores", ".digests"))


def test_a_training_run_finds_precomputed_logps(thresher, config):
    assert counts(thresher("precompute-reference", config)[1]) == (0, 8 + NUM_VALIDATION)  # two steps of four pairs
    code, printed = thresher("train", config, "beta=0.3", "actor_train.training_args.learning_rate=1e-4")
    assert (code, counts(printed)) == (0, (8 + NUM_VALIDATION, 0))


def test_all_pairs_serve_runs_of_any_length_and_seed(thresher, config):
    assert counts(thresher("precompute-reference", config, "--all-pairs")[1]) == (0, NUM_PAIRS + NUM_VALIDATION)
    assert counts(thresher("train", config, "max_steps=5", "seed=1")[1]) == (NUM_PAIRS + NUM_VALIDATION, 0)


@pytest.mark.parametrize(
    ("changes", "num_scored"),
    [
        ([], 0),
        (["beta=0.7", "pref_loss=hinge", "layout=padded"], 0),
        (["actor_train.data_args.template=say.jinja"], NUM_PAIRS),
        (["validation.data_args.template=say.jinja"], NUM_VALIDATION),
        (["actor_train.model_args.dtype=bf16"], NUM_PAIRS + NUM_VALIDATION),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, list) else "",
)
def test_the_cache_key_has_the_template_and_precision_but_not_the_loss(thresher, config, changes, num_scored):
    thresher("precompute-reference", config, "--all-pairs")
    code, printed = thresher("precompute-reference", config, "--all-pairs", *changes)
    assert (code, counts(printed)) == (0, (NUM_PAIRS + NUM_VALIDATION - num_scored, num_scored))


@pytest.mark.parametrize("truncation", ["response_end", "prompt_start"])
def test_only_truncated_pairs_are_scored_again(thresher, config, truncation):
    thresher("precompute-reference", config, "--all-pairs")
    cut = [f"{role}.data_args.truncation={truncation}" for role in ("actor_train", "validation")]
    # a limit above all lengths truncates no pair, although the store differs
    assert counts(thresher("precompute-reference", config, "--all-pairs", "sequence_length=400", *cut)[1])[1] == 0
    code, printed = thresher("precompute-reference", config, "--all-pairs", "sequence_length=40", *cut)
    num_cut = sum(map(int, re.findall(r"truncated: \D*(\d+)", printed)))
    found, num_scored = counts(printed)
    assert code == 0
    assert 0 < num_cut < NUM_PAIRS
    assert num_scored == num_cut
    assert found > 0


def test_precomputing_for_a_mode_that_reads_no_cache_is_rejected(thresher, config):
    for change, mode in (
        ("actor_train.model_args.lora_rank=2", "adapter"),
        ("reference.mode=concurrent", "concurrent"),
    ):
        code, printed = thresher("precompute-reference", config, change)
        assert code == 2
        assert f"the reference mode of this run is {mode}, which reads no cache" in printed
        assert "set reference.mode=precompute" in printed


def test_ls_lists_the_cached_references(thresher, config, tiny_dir, reference_cache):
    code, printed = thresher("cache", "ls")
    assert (code, "is empty; " in printed) == (0, True)
    thresher("precompute-reference", config, "max_steps=5")
    thresher("precompute-reference", config, "max_steps=5", "actor_train.model_args.dtype=bf16")
    code, printed = thresher("cache", "ls")
    assert code == 0
    rows = [line.split("│") for line in printed.splitlines() if str(tiny_dir) in line]
    assert sorted(row[3].strip() for row in rows) == ["bf16", "fp32"]
    assert [(row[4].strip(), row[-2].strip()) for row in rows] == [("25", "just now")] * 2
    assert {row[1].strip() for row in rows} == {path.name[:12] for path in references_in(reference_cache)}


def test_verify_names_the_shards_that_are_damaged(thresher, config, reference_cache):
    thresher("precompute-reference", config, "max_steps=5")
    code, printed = thresher("cache", "verify")
    assert code == 0
    assert "2 valid shards with 25 pairs, 0 damaged" in printed
    victim = min(reference_cache.glob("*/*.arrow"))
    victim.write_bytes(victim.read_bytes()[:-9] + b"\0" * 9)
    code, printed = thresher("cache", "verify")
    assert code == 1
    assert f"damaged: {victim} does not match the digest in its name" in printed.replace("\n", "")
    assert "1 valid shards" in printed
    assert victim.exists()  # verify changes nothing
    _, printed = thresher("precompute-reference", config, "max_steps=5")
    assert counts(printed)[1] in (NUM_PAIRS, NUM_VALIDATION)
    assert thresher("cache", "verify")[0] == 0


def make_old(reference: Path) -> None:
    """Let a reference look as if no run had used it since 1970."""
    for path in (reference / "identity.json", *reference.glob("*.arrow")):
        os.utime(path, (0, 0))
    for shard in reference.glob("*.arrow"):
        shard.rename(shard.with_name("0000000000000" + shard.name[13:]))


def test_prune_lists_first_and_removes_with_yes(thresher, config, tiny_dir, reference_cache):
    thresher("precompute-reference", config)
    thresher("precompute-reference", config, "actor_train.model_args.dtype=bf16")
    old, new = references_in(reference_cache)
    make_old(old)

    code, printed = thresher("cache", "prune", "--older-than", "3")
    assert code == 0
    assert f"{old.name[:12]}: 13 pairs of {tiny_dir}" in printed
    assert "nothing was removed; pass --yes" in printed
    assert old.exists()
    assert thresher("cache", "prune", "--older-than", "3", "--yes")[1].endswith("removed\n")
    assert references_in(reference_cache) == [new]

    code, printed = thresher("cache", "prune", "--identity", "zzz")
    assert code == 2
    assert "has a fingerprint that starts with zzz; see `thresher cache ls`" in printed
    assert "nothing to remove" in thresher("cache", "prune", "--identity", new.name[:6], "--older-than", "3")[1]
    thresher("cache", "prune", "--identity", new.name[:6], "--yes")
    assert references_in(reference_cache) == []


def test_prune_removes_leftovers_of_killed_writers_and_damaged_shards(thresher, config, reference_cache):
    thresher("precompute-reference", config)
    (directory,) = references_in(reference_cache)
    abandoned, fresh, damaged = (directory / name for name in (".partial-0", ".partial-1", "x.arrow.damaged"))
    for path in (abandoned, fresh, damaged):
        path.write_bytes(b"half a shard")
    os.utime(abandoned, (0, 0))
    _, printed = thresher("cache", "prune", "--older-than", "1", "--yes")
    assert printed.count("leftover: ") == 2
    assert (abandoned.exists(), fresh.exists(), damaged.exists()) == (False, True, False)
    assert thresher("cache", "ls")[1].count(directory.name[:12]) == 1
    assert counts(thresher("precompute-reference", config)[1])[1] == 0


def test_cache_dir_sets_the_location_of_the_cache(thresher, config, tmp_path, reference_cache):
    thresher("precompute-reference", config, "reference.cache_dir=shared_cache")
    assert references_in(reference_cache) == []
    assert "13" in thresher("cache", "ls", "--cache-dir", "shared_cache")[1]


def stores_in(cache: Path) -> list[Path]:
    return sorted((cache / "stores").iterdir())


def test_ls_and_verify_cover_prepared_stores(thresher, config, reference_cache):
    thresher("precompute-reference", config)
    listed = thresher("cache", "ls")[1]
    (shown,) = (line for line in listed.splitlines() if "train.jsonl" in line)
    assert re.search(r"^│ [0-9a-f]{12} │ \S*train\.jsonl +│ +20 │ +\S+ kB │ +just now │$", shown)
    assert "2 valid stores, 0 damaged" in thresher("cache", "verify")[1]
    victim = stores_in(reference_cache)[0] / "lengths.bin"
    victim.write_bytes(b"\xff" * victim.stat().st_size)
    code, printed = thresher("cache", "verify")
    assert (code, "1 valid stores, 1 damaged" in printed) == (1, True)
    assert f"damaged: the store {victim.parent} is damaged: lengths.bin has a wrong digest" in printed


def test_prune_covers_prepared_stores_and_runs_prepare_them_again(thresher, config, reference_cache):
    thresher("precompute-reference", config)
    old, new = stores_in(reference_cache)
    (directory,) = references_in(reference_cache)
    os.utime(old, (0, 0))
    abandoned, damaged = reference_cache / "stores" / ".partial-0", reference_cache / "stores" / ".damaged-0"
    for path in (abandoned, damaged):
        path.mkdir()
    os.utime(abandoned, (0, 0))
    code, printed = thresher("cache", "prune", "--older-than", "3", "--yes")
    assert (code, printed.count("leftover: ")) == (0, 2)
    assert re.search(rf"^{old.name[:12]}: (20|5) pairs of \S+jsonl, \S+ kB, last used \d+ days ago$", printed, re.M)
    assert stores_in(reference_cache) == [new]
    assert references_in(reference_cache) == [directory]
    thresher("cache", "prune", "--identity", new.name[:8], "--yes")
    assert stores_in(reference_cache) == []

    code, printed = thresher("precompute-reference", config, "output_dir=other")
    assert (code, counts(printed)) == (0, (8 + NUM_VALIDATION, 0))
    assert printed.count("wrote ") == 2
    code, printed = thresher("precompute-reference", config, "output_dir=third")
    assert (code, printed.count("wrote "), printed.count("using prepared pairs from the cache")) == (0, 0, 2)


def test_prune_keeps_what_a_run_has_read_lately(thresher, config, reference_cache):
    thresher("precompute-reference", config)
    (reference,), stores = references_in(reference_cache), stores_in(reference_cache)
    make_old(reference)
    for store in stores:
        os.utime(store, (0, 0))
    assert counts(thresher("precompute-reference", config, "output_dir=other")[1]) == (8 + NUM_VALIDATION, 0)
    thresher("cache", "prune", "--older-than", "3", "--yes")
    assert (references_in(reference_cache), stores_in(reference_cache)) == ([reference], stores)


@pytest.mark.parametrize(
    ("seconds", "age"),
    [(5, "just now"), (61, "1 minute ago"), (125, "2 minutes ago"), (3700, "1 hour ago"), (86400 * 3, "3 days ago")],
)
def test_the_age_of_a_reference_is_in_plain_english(seconds, age):
    reference = CachedReference(Path("x"), "m", "fp32", 1, 1, 1, last_used=time.time() - seconds)
    assert _age(reference) == age
