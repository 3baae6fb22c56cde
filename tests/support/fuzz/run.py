"""Run many random cases on every reader: `scripts/fuzz [CASES] [--seed N] [--target NAME]`.

Prints a table: target, cases, seconds, cases read, documented errors, and crashes. A crash is printed with its seed;
`scripts/fuzz 1 --target NAME --seed SEED` reproduces it. Exits with code 1 after a crash.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import random
import shutil
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from tests.support.fuzz import cases
from tests.support.fuzz.checks import (
    CacheCheck,
    ComposeCheck,
    ExactJsonCheck,
    ManifestCheck,
    StoreCheck,
    StoreManifestCheck,
    TemplateCheck,
    check_config,
    check_row,
    new_directory,
)
from thresher.checkpoint.json_io import decode

Target = Callable[[random.Random], bool]
# relative number of cases; those that use files or Hydra are slow
WEIGHTS = {
    "row values": 18,
    "row lines": 26,
    "exact JSON": 10,
    "config values": 14,
    "manifests": 8,
    "signed manifests": 4,
    "templates": 7,
    "cache shards": 4,
    "signed cache shards": 2,
    "cache identity": 1,
    "store shards": 4,
    "store manifests": 1.7,
    "YAML and overrides": 0.3,
}
MAX_CRASHES_SHOWN = 5


def make_targets(directory: Path) -> dict[str, Target]:
    template, exact, manifest = TemplateCheck(), ExactJsonCheck(directory), ManifestCheck(directory)
    cache, compose, store = CacheCheck(directory), ComposeCheck(directory), StoreCheck(directory)
    store_manifest = StoreManifestCheck(directory)
    valid_manifest = json.loads(store_manifest.content)
    lines = [json.dumps(row).encode() for row in cases.VALID_ROWS]
    yaml = json.dumps(cases.CONFIG, indent=1).encode()
    body = {key: value for key, value in decode(manifest.content).items() if key != "sha256"}
    description = (cache._cache.directory / "identity.json").read_bytes()

    def signed(draw: random.Random) -> bool:
        changed = cases.mutate_value(draw, copy.deepcopy(body), lambda: cases.value(draw, 2))
        try:
            return manifest.signed(changed)
        except (TypeError, ValueError, RecursionError) as error:
            if "_digest_of" in (frame.name for frame in traceback.extract_tb(error.__traceback__)[:3]):
                return False  # a value that cannot be encoded cannot be signed
            raise

    def changed_store_manifest(draw: random.Random) -> bool:
        if draw.random() < 0.3:
            return store_manifest(any_bytes(draw, store_manifest.content, cases.JSON_WORDS))
        changed = cases.mutate_value(draw, copy.deepcopy(valid_manifest), lambda: cases.value(draw, 2))
        return store_manifest(json.dumps(changed).encode())

    def overridden(draw: random.Random) -> bool:
        content = cases.mutate_bytes(draw, yaml, cases.YAML_WORDS) if draw.random() < 0.7 else yaml
        return compose(content, [cases.override(draw) for _ in range(draw.randrange(3))])

    def any_bytes(draw: random.Random, content: bytes, words: tuple[bytes, ...]) -> bytes:
        return draw.randbytes(draw.randrange(40)) if draw.random() < 0.02 else cases.mutate_bytes(draw, content, words)

    return {
        "row values": lambda draw: check_row(cases.row(draw)),
        "row lines": lambda draw: check_row(any_bytes(draw, draw.choice(lines), cases.JSON_WORDS)),
        "exact JSON": lambda draw: exact(any_bytes(draw, manifest.content, cases.JSON_WORDS)),
        "config values": lambda draw: check_config(cases.config(draw)),
        "manifests": lambda draw: manifest(any_bytes(draw, manifest.content, cases.JSON_WORDS)),
        "signed manifests": signed,
        "templates": lambda draw: template(cases.chat_row(draw)),
        "cache shards": lambda draw: cache(cases.mutate_bytes(draw, cache.content)),
        "signed cache shards": lambda draw: cache(cases.mutate_bytes(draw, cache.content), signed=True),
        "cache identity": lambda draw: cache.identity(any_bytes(draw, description, cases.JSON_WORDS)),
        "store shards": lambda draw: store(cases.mutate_bytes(draw, store.content)),
        "store manifests": changed_store_manifest,
        "YAML and overrides": overridden,
    }


def run(name: str, target: Target, count: int, first_seed: int) -> int:
    read = rejected = crashes = 0
    begin = time.perf_counter()
    for number in range(count):
        try:
            if target(random.Random(first_seed + number)):
                read += 1
            else:
                rejected += 1
        except Exception:
            crashes += 1
            if crashes <= MAX_CRASHES_SHOWN:
                print(f"{name}, seed {first_seed + number}:", file=sys.stderr)
                traceback.print_exc(limit=-4)
    seconds = time.perf_counter() - begin
    print(f"| {name} | {count:,} | {seconds:.0f} | {read:,} | {rejected:,} | {crashes} |", flush=True)
    return crashes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", type=int, nargs="?", default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", choices=WEIGHTS)
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    directory = new_directory()
    try:
        targets = make_targets(directory)
        names = [given.target] if given.target else list(WEIGHTS)
        total = sum(WEIGHTS[name] for name in names)
        print("| target | cases | seconds | read | documented errors | crashes |\n|---|---|---|---|---|---|")
        crashes = [run(name, targets[name], round(given.cases * WEIGHTS[name] / total), given.seed) for name in names]
    finally:
        shutil.rmtree(directory)
    return int(any(crashes))


if __name__ == "__main__":
    sys.exit(main())
