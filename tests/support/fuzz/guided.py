"""Coverage-guided fuzzing with atheris of five readers of untrusted input: `scripts/fuzz --guided TARGET RUNS`.

atheris mutates bytes and keeps those that reach new code in thresher; for readers of values, the bytes are the random
choices of `cases`. It is optional: `pip install thresher[fuzz]`, or a directory with it on PYTHONPATH. It exits the
process itself, so the counts are printed in the last run.
"""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import atheris

# instruments thresher only, not the libraries that it uses
with atheris.instrument_imports(include=["thresher"], enable_loader_override=False):
    from tests.support.fuzz.cases import CONFIG, VALID_ROWS
    from tests.support.fuzz.checks import CacheCheck, ComposeCheck, ManifestCheck, check_row, new_directory
    from tests.support.fuzz.run import make_targets

Check = Callable[[bytes], bool]


class InputRandom(random.Random):
    """Random numbers taken from the bytes of an input, so that mutating the bytes mutates the case."""

    def __init__(self, content: bytes):
        super().__init__(0)
        self._provider = atheris.FuzzedDataProvider(content)

    def random(self) -> float:
        return float(self._provider.ConsumeProbability())

    def getrandbits(self, count: int, /) -> int:
        return int(self._provider.ConsumeUInt((count + 7) // 8)) & ((1 << count) - 1)

    def randrange(self, start: int, stop: int | None = None, step: int = 1) -> int:  # noqa: ARG002
        # Python draws until a number is in range, which never ends once the input is used up
        low, high = (0, start) if stop is None else (start, stop)
        return int(self._provider.ConsumeIntInRange(low, high - 1))

    def choice(self, among):  # type: ignore[no-untyped-def]
        return among[self.randrange(len(among))]

    def randbytes(self, count: int) -> bytes:
        return bytes(self._provider.ConsumeBytes(count))


def make_checks(directory: Path) -> dict[str, tuple[Check, list[bytes]]]:
    """Return each reader with its seed inputs; after a first byte below 0x80, the rest is the content of a file."""
    targets, compose = make_targets(directory), ComposeCheck(directory)
    manifest, cache = ManifestCheck(directory), CacheCheck(directory)
    noise = [b"\xe0" + random.Random(seed).randbytes(512) for seed in range(20)]

    def either(check_file: Check, target: str) -> Check:
        return lambda given: check_file(given[1:]) if given[:1] < b"\x80" else targets[target](InputRandom(given[1:]))

    def config(given: bytes) -> bool:
        # one in sixteen as YAML, because Hydra takes about 30 ms
        return compose(given[1:], []) if given[:1] >= b"\xf0" else targets["config values"](InputRandom(given[1:]))

    return {
        "rows": (either(check_row, "row values"), [b"\0" + json.dumps(each).encode() for each in VALID_ROWS] + noise),
        "templates": (lambda given: targets["templates"](InputRandom(given)), noise),
        "configs": (config, [b"\xff" + json.dumps(CONFIG).encode(), *noise]),
        "manifests": (either(manifest, "signed manifests"), [b"\0" + manifest.content, *noise]),
        "cache": (lambda given: cache(given[1:], signed=given[:1] < b"\x80"), [b"\0" + cache.content]),
    }


def main(target: str, runs: int) -> None:
    logging.disable(logging.CRITICAL)
    directory = new_directory()
    checks = make_checks(directory)
    if target not in checks:
        shutil.rmtree(directory)
        sys.exit(f"unknown target {target!r}; use one of {', '.join(checks)}")
    check, seeds = checks[target]
    corpus = directory / "corpus"
    corpus.mkdir()
    for number, seed in enumerate(seeds):
        (corpus / str(number)).write_bytes(seed)
    counts = {"cases": 0, "read": 0, "rejected": 0}
    begin = time.perf_counter()

    def one(content: bytes) -> None:
        counts["cases"] += 1
        if counts["cases"] > runs:
            print(
                f"| {target}, guided | {runs:,} | {time.perf_counter() - begin:.0f} | {counts['read']:,} "
                f"| {counts['rejected']:,} | 0 |",
                flush=True,
            )
            shutil.rmtree(directory)
            os._exit(0)
        counts["read" if check(content) else "rejected"] += 1

    # new inputs are written to the corpus, which is deleted; a crash file is left in the current directory
    atheris.Setup([sys.argv[0], "-max_len=4096", "-rss_limit_mb=0", "-verbosity=0", str(corpus)], one)
    atheris.Fuzz()


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: scripts/fuzz --guided TARGET RUNS")
    main(sys.argv[1], int(sys.argv[2]))
