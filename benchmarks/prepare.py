"""Measure preparation by size and workers: pairs per second, and peak memory of the driver and its workers.

    python benchmarks/prepare.py [--pairs 100000 1000000] [--runners local:1 local:2 ray:1 ray:2] [--files 8]

Pairs of short synthetic sentences are written as JSON Lines and tokenized as plain text by a BPE with a vocabulary of
2,000 that is trained on them. Each case runs in a separate process. Memory is the peak resident size (VmHWM) of the
process that writes, and the sum over its workers; pages of Ray's object store count once per process that touched
them. The time covers all of `prepare`: digests of the files, start of workers or Ray, tokenization, findings, digests
of the store.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from resident import kilobytes

WORDS_PER_SENTENCE = (4, 16)
SECONDS_BETWEEN_SAMPLES = 0.2


def make_words(count: int, rng: random.Random) -> list[str]:
    syllables = [consonant + vowel for consonant in "bdfgklmnprst" for vowel in "aeiou"]
    return ["".join(rng.choices(syllables, k=rng.randint(1, 4))) for _ in range(count)]


def write_pairs(directory: Path, num_pairs: int, num_files: int) -> list[Path]:
    rng = random.Random(0)
    words = make_words(5000, rng)

    def sentence() -> str:
        return " ".join(rng.choices(words, k=rng.randint(*WORDS_PER_SENTENCE)))

    paths = [directory / f"{number:03d}.jsonl" for number in range(num_files)]
    for number, path in enumerate(paths):
        with path.open("w", encoding="utf-8") as stream:
            for _ in range(number, num_pairs, num_files):
                row = {"prompt": f"{sentence()}? ", "chosen": sentence(), "rejected": sentence()}
                stream.write(json.dumps(row) + "\n")
    return paths


def train_tokenizer(directory: Path, text: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=2000,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    with text.open(encoding="utf-8") as stream:
        backend.train_from_iterator([line for _, line in zip(range(5000), stream, strict=False)], trainer)
    path = directory / "tokenizer"
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>").save_pretrained(path)
    return path


class WorkerMemory:
    """Sample the peak memory of all descendants of this process."""

    def __init__(self) -> None:
        self._peaks: dict[int, tuple[bool, int]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def close(self) -> tuple[int, int]:
        """Return the sum over tokenizing workers, and over all other Ray processes, in KiB."""
        self._stop.set()
        self._thread.join()
        workers = sum(peak for is_worker, peak in self._peaks.values() if is_worker)
        return workers, sum(peak for is_worker, peak in self._peaks.values() if not is_worker)

    def _watch(self) -> None:
        while not self._stop.wait(SECONDS_BETWEEN_SAMPLES):
            for pid in descendants(os.getpid()):
                try:
                    command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
                    is_worker = b"spawn_main" in command or b"MapWorker" in command
                    self._peaks[pid] = (is_worker, kilobytes("VmHWM", pid))
                except (OSError, StopIteration):
                    continue


def descendants(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found = list(children.get(root, ()))
    for pid in found:
        found.extend(children.get(pid, ()))
    return found


def run_case(runner: str, tokenizer_path: str, output: str, files: list[str]) -> None:
    from transformers import AutoTokenizer

    from thresher.data.prepare.executor import local_executor
    from thresher.data.prepare.prepare import DataSettings, prepare
    from thresher.runtime.ray.ray_data import run_on_ray

    kind, _, number = runner.partition(":")
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_path)
    memory = WorkerMemory()
    started = time.perf_counter()
    run = local_executor(int(number)) if kind == "local" else run_on_ray(int(number))
    report = prepare(DataSettings(files, "raw"), tokenizer, output, executor=run)
    seconds = time.perf_counter() - started
    workers, others = memory.close()
    digest = json.loads((Path(output) / "manifest.json").read_text())["content_digest"]
    figures = {
        "pairs": report.pairs_kept,
        "seconds": seconds,
        "driver": kilobytes("VmHWM", os.getpid()),
        "workers": workers,
        "others": others,
        "digest": digest,
    }
    print(json.dumps(figures))


def measure(runner: str, tokenizer: Path, output: Path, files: list[Path]) -> dict[str, float]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, __file__, "--case", runner, str(tokenizer), str(output), *map(str, files)]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--runners", nargs="+", default=["local:1", "local:2", "ray:1", "ray:2"], help="KIND:WORKERS")
    parser.add_argument("--files", type=int, default=8)
    arguments = parser.parse_args()
    print("| pairs | executor | pairs/s | seconds | driver MiB | workers MiB | other Ray processes MiB |")
    print("|---:|---|---:|---:|---:|---:|---:|")
    for num_pairs in arguments.pairs:
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            files = write_pairs(directory, num_pairs, arguments.files)
            tokenizer = train_tokenizer(directory, files[0])
            digests = set()
            for runner in arguments.runners:
                figures = measure(runner, tokenizer, directory / "store", files)
                digests.add(figures["digest"])
                memory = [f"{figures[who] / 1024:,.0f}" for who in ("driver", "workers", "others")]
                speed = figures["pairs"] / figures["seconds"]
                row = [f"{figures['pairs']:,}", runner, f"{speed:,.0f}", f"{figures['seconds']:.1f}", *memory]
                print(f"| {' | '.join(row)} |", flush=True)
                shutil.rmtree(directory / "store")
            assert len(digests) == 1, "executors wrote different stores"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--case"]:
        run_case(sys.argv[2], sys.argv[3], sys.argv[4], sys.argv[5:])
    else:
        main()
