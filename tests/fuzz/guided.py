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
    import cases
    from checks import CacheCheck, ComposeCheck, ManifestCheck, TemplateCheck, check_config, check_row, new_directory

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
    """Each reader with inputs to begin from."""
    template, compose = TemplateCheck(), ComposeCheck(directory)
    manifest, cache = ManifestCheck(directory), CacheCheck(directory)
    noise = [random.Random(seed).randbytes(512) for seed in range(20)]

    def row(content: bytes) -> bool:
        # the first byte decides between a line as it stands and a value made by choices
        return check_row(content[1:]) if content[:1] < b"\x80" else check_row(cases.row(Chosen(content[1:])))

    def config(content: bytes) -> bool:
        # one in sixteen as YAML: Hydra takes some 30 ms
        if content[:1] >= b"\xf0":
            return compose(content[1:], [])
        return check_config(cases.config(Chosen(content[1:])))

    return {
        "rows": (row, [b"\x00" + json.dumps(each).encode() for each in cases.SOUND_ROWS] + noise),
        "templates": (lambda content: template(cases.chat_row(Chosen(content))), noise),
        "configs": (config, [b"\xff" + json.dumps(cases.CONFIG).encode(), *noise]),
        "manifests": (manifest, [manifest.content]),
        "cache": (lambda content: cache(content[1:], signed=content[:1] < b"\x80"), [b"\x00" + cache.content]),
    }


TARGETS = ("rows", "templates", "configs", "manifests", "cache")


def main(target: str, runs: int) -> None:
    logging.disable(logging.CRITICAL)
    directory = new_directory()
    check, seeds = make_checks(directory)[target]
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
    main(sys.argv[1], int(sys.argv[2]))
