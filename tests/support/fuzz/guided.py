"""Coverage-guided cases by atheris, on five readers of what comes from elsewhere: `scripts/fuzz --guided TARGET RUNS`.

atheris mutates bytes and keeps those that reach new code of ours; where a reader takes values, the bytes are the
choices of `cases`. It is no requirement: `pip install thresher[fuzz]`, or a directory with it on PYTHONPATH. It ends
the process by itself, so the counts are printed with the last run.
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

# what is imported in this block is watched: our readers, not the libraries below them
with atheris.instrument_imports(include=["thresher"], enable_loader_override=False):
    from tests.support.fuzz.cases import CONFIG, SOUND_ROWS
    from tests.support.fuzz.checks import CacheCheck, ComposeCheck, ManifestCheck, check_row, new_directory
    from tests.support.fuzz.run import make_targets

Check = Callable[[bytes], bool]


class Chosen(random.Random):
    """A source of choices that are bytes of an input: what a guide changes there, changes a case."""

    def __init__(self, content: bytes):
        super().__init__(0)
        self._given = atheris.FuzzedDataProvider(content)

    def random(self) -> float:
        return float(self._given.ConsumeProbability())

    def getrandbits(self, count: int, /) -> int:
        return int(self._given.ConsumeUInt((count + 7) // 8)) & ((1 << count) - 1)

    def randrange(self, start: int, stop: int | None = None, step: int = 1) -> int:  # noqa: ARG002
        # Python draws again until a number fits, which an input that has ended would do for ever
        low, high = (0, start) if stop is None else (start, stop)
        return int(self._given.ConsumeIntInRange(low, high - 1))

    def choice(self, among):  # type: ignore[no-untyped-def]
        return among[self.randrange(len(among))]

    def randbytes(self, count: int) -> bytes:
        return bytes(self._given.ConsumeBytes(count))


def make_checks(directory: Path) -> dict[str, tuple[Check, list[bytes]]]:
    """Each reader with inputs to begin from; where the first byte is small, the rest is a file as it stands."""
    drawn, compose = make_targets(directory), ComposeCheck(directory)
    manifest, cache = ManifestCheck(directory), CacheCheck(directory)
    noise = [b"\xe0" + random.Random(seed).randbytes(512) for seed in range(20)]

    def either(whole: Check, target: str) -> Check:
        return lambda given: whole(given[1:]) if given[:1] < b"\x80" else drawn[target](Chosen(given[1:]))

    def config(given: bytes) -> bool:
        # one in sixteen as YAML: Hydra takes some 30 ms
        return compose(given[1:], []) if given[:1] >= b"\xf0" else drawn["config values"](Chosen(given[1:]))

    return {
        "rows": (either(check_row, "row values"), [b"\0" + json.dumps(each).encode() for each in SOUND_ROWS] + noise),
        "templates": (lambda given: drawn["templates"](Chosen(given)), noise),
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
        sys.exit(f"there is no target {target!r}; the targets are {', '.join(checks)}")
    check, seeds = checks[target]
    corpus = directory / "corpus"
    corpus.mkdir()
    for number, seed in enumerate(seeds):
        (corpus / str(number)).write_bytes(seed)
    found = {"cases": 0, "read": 0, "told": 0}
    begin = time.perf_counter()

    def one(content: bytes) -> None:
        found["cases"] += 1
        if found["cases"] > runs:
            print(
                f"| {target}, guided | {runs:,} | {time.perf_counter() - begin:.0f} | {found['read']:,} "
                f"| {found['told']:,} | 0 |",
                flush=True,
            )
            shutil.rmtree(directory)
            os._exit(0)
        found["read" if check(content) else "told"] += 1

    # what it finds new lies in the corpus, below the directory that goes; a crash is left in the current one
    atheris.Setup([sys.argv[0], "-max_len=4096", "-rss_limit_mb=0", "-verbosity=0", str(corpus)], one)
    atheris.Fuzz()


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: scripts/fuzz --guided TARGET RUNS")
    main(sys.argv[1], int(sys.argv[2]))
