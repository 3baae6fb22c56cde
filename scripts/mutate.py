"""Measure how many mutants of the source the tests kill: `scripts/mutate record`, then `scripts/mutate run 200`.

`record` runs the tests once and records which lines each test executes, also on the ranks of `tests.support`'s pools.
`run` samples mutants (scripts/mutants.py), runs for each the recorded tests of its line, fastest first, until one
fails, and prints the killed by package. Mutants in scripts/equivalent_mutants.toml are left out and replaced.
Killed mutants are not run again, so that `run` after an interruption or with new tests continues.

Needs `pip install cosmic-ray==8.7.0 coverage==7.17.2`, in an environment of their own that sees the packages of this
one, because neither is pinned here. Only a copy of the checkout is changed, in --directory. Tests are forked from one
process that has imported torch, one at a time.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PRELOADED = (
    "torch.distributed.pipelining",
    "transformers.models.llama.modeling_llama",
    "peft",
    "datasets",
    "pydantic",
    "rich.progress",
    "hypothesis",
    "pytest",
    "coverage",
)
# runtime starts workers of Ray, whose lines are not recorded; the others test no code of these packages
NOT_RECORDED = ("docs", "repository", "runtime", "support")
SECONDS_TO_START = 60
NO_TESTS_COLLECTED = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path("/tmp/thresher-mutants"), help="copy and results")  # noqa: S108
    commands = parser.add_subparsers(dest="command", required=True)
    record = commands.add_parser("record", help="record the lines of every test, or of the test files named")
    record.add_argument("tests", nargs="*")
    record.add_argument("-k", default="", help="record only tests of these names, as in pytest")
    run = commands.add_parser("run", help="sample mutants and run their tests")
    run.add_argument("number", type=int, nargs="?", default=200)
    run.add_argument("--seed", type=int, default=0)
    run.add_argument("--package", help="run only the sampled mutants of this package")
    run.add_argument("--budget", type=float, default=60, help="recorded seconds of tests to run for a mutant")
    args = parser.parse_args()
    directory = args.directory.resolve()
    copy_checkout(directory / "checkout")
    os.chdir(directory / "checkout")
    sys.path[:0] = [str(directory / "checkout"), str(directory / "checkout/src")]
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])
    for name in PRELOADED:
        importlib.import_module(name)
    if args.command == "record":
        record_all(directory, args.tests, args.k)
    else:
        run_sample(directory, args.number, args.seed, args.package, args.budget)


def copy_checkout(target: Path) -> None:
    """Copy what git tracks or would track, with the times of the files: their compiled code stays valid."""
    target.mkdir(parents=True, exist_ok=True)
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],  # noqa: S607
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    for package in ("src", "tests"):
        for old in (target / package).rglob("*.py"):
            if not (ROOT / old.relative_to(target)).exists():
                old.unlink()
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    for link in (target / ".venv", target.parent / "shared"):
        real = (ROOT / link.name if link.name == ".venv" else ROOT.parent / link.name).resolve()
        if real.exists() and not link.exists():
            link.symlink_to(real)


def in_fork(function: Callable[[], int], output: Path, seconds: float) -> int | None:
    """Exit code of a function in a forked process; None after `seconds`. Processes that it started are ended too."""
    pid = os.fork()
    if pid == 0:
        os.setsid()
        stream = os.open(output, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        os.dup2(stream, 1)
        os.dup2(stream, 2)
        code = 3
        try:
            code = function()
        finally:
            sys.stdout.flush()
            os._exit(code)
    status, ends = None, time.monotonic() + seconds
    while status is None and time.monotonic() < ends:
        time.sleep(0.05)
        ended, found = os.waitpid(pid, os.WNOHANG)
        status = found if ended else None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if status is None:
        os.waitpid(pid, 0)
        return None
    return os.waitstatus_to_exitcode(status)


def run_pytest(arguments: Sequence[str], plugin: object) -> int:
    import pytest

    always = ("-q", "--no-header", "--tb=short", "-p", "no:cacheprovider", "--hypothesis-seed=0")
    return int(pytest.main([*always, *arguments], plugins=[plugin]))


def record_all(directory: Path, tests: Sequence[str], names: str) -> None:
    files = [Path(name) for name in tests] or [
        file for file in sorted(Path("tests").rglob("test_*.py")) if file.parts[1] not in NOT_RECORDED
    ]
    (directory / "recorded").mkdir(exist_ok=True)
    for file in files:
        started = time.monotonic()
        parts = [*file.with_suffix("").parts, *([digest(names)[:8]] if names else [])]
        target = directory / "recorded" / f"{'-'.join(parts)}.json"
        code = in_fork(partial(record_file, file, names, target), target.with_suffix(".log"), seconds=3600)
        print(f"{file}: exit code {code} after {time.monotonic() - started:.0f} s", flush=True)


def record_file(file: Path, names: str, target: Path) -> int:
    import coverage

    from tests.support.engines.rank_pool import RankPool

    options = {"data_file": str(target.with_suffix(".coverage")), "source": ["src/thresher"], "config_file": False}
    measured = coverage.Coverage(**options)
    recorder = Recorder(measured)
    run = RankPool.run
    RankPool.run = lambda pool, function, *args: run(pool, traced, options, recorder.test, function, *args)
    measured.start()
    code = run_pytest([str(file), "-k", names, "-m", "not hand"], recorder)
    measured.stop()
    measured.save()
    measured.combine()
    data = measured.get_data()
    numbers = {test: number for number, test in enumerate(recorder.seconds)}
    lines: dict[str, dict[int, list[int]]] = {}
    for source in data.measured_files():
        contexts = data.contexts_by_lineno(source).items()
        lines[str(Path(source).relative_to(Path.cwd()))] = {
            line: [numbers[test] for test in tests if test in numbers] for line, tests in contexts
        }
    digests = {source: digest(Path(source).read_text()) for source in lines}
    passed = [[test, seconds, test not in recorder.failed] for test, seconds in recorder.seconds.items()]
    target.write_text(json.dumps({"tests": passed, "lines": lines, "sources": digests}))
    return code


class Recorder:
    """Names the running test to coverage, and times it."""

    def __init__(self, measured: Any):
        self._measured = measured
        self.test = ""
        self.seconds: Counter[str] = Counter()
        self.failed: set[str] = set()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.test = nodeid
        self._measured.switch_context(nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] += report.duration
        if not report.passed:
            self.failed.add(report.nodeid)


def traced(options: dict[str, Any], test: str, function: Callable[..., Any], *args: Any) -> Any:
    """Run a function on a rank of a pool, and record its lines for a test."""
    import coverage

    measured = coverage.Coverage(**options, data_suffix=True, context=test)
    measured.start()
    try:
        return function(*args)
    finally:
        measured.stop()
        measured.save()


def run_sample(directory: Path, number: int, seed: int, package: str | None, budget: float) -> None:
    from mutants import read_equivalent, sample

    equivalent = read_equivalent(ROOT / "scripts/equivalent_mutants.toml")
    source = Path("src/thresher")
    mutants = [each for each in sample(source, number, seed, list(equivalent)) if package in (None, each.package)]
    recorded = Recorded(directory / "recorded")
    file = directory / "results.json"
    results: dict[str, dict[str, Any]] = json.loads(file.read_text()) if file.exists() else {}
    for count, mutant in enumerate(mutants, start=1):
        path = source / mutant.path
        code = path.read_text()
        mutated = mutant.mutate(code)
        known = results.get(mutant.key, {})
        if known.get("digest") == digest(mutated) and known["outcome"].startswith("killed"):
            continue
        started = time.monotonic()
        outcome = run_mutant(path, mutated, recorded.tests_of(mutant, path, code, budget), directory / "last.log")
        results[mutant.key] = {"outcome": outcome, "digest": digest(mutated)}
        print(f"{count} {time.monotonic() - started:.0f} s {outcome}: {mutant.key}", flush=True)
        file.write_text(json.dumps(results, indent=1))
    killed = Counter(mutant.package for mutant in mutants if results[mutant.key]["outcome"].startswith("killed"))
    total = Counter(mutant.package for mutant in mutants)
    print("\n| package | mutants | killed |\n|---|---|---|")
    for name in total:
        print(f"| {name} | {total[name]} | {killed[name]} ({killed[name] / total[name]:.0%}) |")
    print(f"| all | {total.total()} | {killed.total()} ({killed.total() / total.total():.1%}) |\n")
    for mutant in mutants:
        if not results[mutant.key]["outcome"].startswith("killed"):
            print(f"{results[mutant.key]['outcome']} at {mutant.position[0]}: {mutant.key}")


def run_mutant(path: Path, mutated: str, tests: Sequence[tuple[str, float]], output: Path) -> str:
    """Write a mutant in place of a file, and run tests on it until one fails."""
    if not tests:
        return "survived: no test executes it"
    original, times = path.read_bytes(), path.stat()
    order = {test: number for number, (test, _) in enumerate(tests)}
    files = list(dict.fromkeys(test.partition("::")[0] for test in order))
    try:
        path.write_text(mutated)
        seconds = sum(seconds for _, seconds in tests)
        run = partial(run_pytest, ["-x", *files], Selected(order))
        code = in_fork(run, output, SECONDS_TO_START + 5 * seconds)
    finally:
        path.write_bytes(original)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    if code in (0, NO_TESTS_COLLECTED):
        return f"survived {len(tests)} tests"
    lines = output.read_text(errors="replace").splitlines()
    failed = next((line for line in lines if line.startswith(("FAILED ", "ERROR "))), f"exit code {code}")
    return "killed: no end" if code is None else f"killed: {failed}"


class Selected:
    """Keeps the tests of a mutant, in their order."""

    def __init__(self, order: dict[str, int]):
        self._order = order

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = sorted((item for item in items if item.nodeid in self._order), key=lambda i: self._order[i.nodeid])


class Recorded:
    """Which tests execute which lines, and how long they take."""

    def __init__(self, directory: Path):
        self._tests: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        self._seconds: dict[str, float] = {}
        for file in sorted(directory.glob("*.json")):
            found = json.loads(file.read_text())
            for source, known in found["sources"].items():
                if digest(Path(source).read_text()) != known:
                    sys.exit(f"{source} changed since {file.stem} was recorded; run scripts/mutate record again")
            self._seconds |= {test: seconds for test, seconds, passed in found["tests"] if passed}
            for source, lines in found["lines"].items():
                for line, numbers in lines.items():
                    self._tests[source][int(line)] |= {found["tests"][number][0] for number in numbers}

    def tests_of(self, mutant: Any, path: Path, code: str, budget: float) -> list[tuple[str, float]]:
        """Tests that execute a mutant, the fastest first, for `budget` seconds; other packages' tests are put off."""
        from mutants import lines_of

        of_file = self._tests[str(path)]
        tests: set[str] = set().union(*(of_file[line] for line in lines_of(code, mutant.position)))
        passing = [test for test in tests if test in self._seconds]
        own = f"tests/{mutant.package}/"
        passing.sort(key=lambda test: (self._seconds[test] * (1 if test.startswith(own) else 4), test))
        chosen, total = [], 0.0
        for test in passing:
            total += self._seconds[test]
            if chosen and total > budget:
                break
            chosen.append((test, self._seconds[test]))
        return chosen


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


if __name__ == "__main__":
    main()
