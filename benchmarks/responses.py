"""Measure labels and lists: rows, seconds and peak memory of a step, against the same pairs here and against TRL.

python benchmarks/responses.py                   # lists of 2, 4 and 7 responses, then KTO; about 20 minutes
python benchmarks/responses.py --only kto --batches 6

A list is compared with all of its comparisons as separate pairs. Contestants take turns on every batch, with one
thread, and each runs in a process of its own for the peak memory over the floor (weights, gradients, optimizer).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# large buffers return to the system when freed: the peak must not include what an allocator kept
os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "1048576")

import numpy as np
import torch
from contestants import (
    COLUMNS,
    LEARNING_RATE,
    Step,
    check_losses,
    layouts,
    optimizer_step,
    score_reference,
    thresher_step,
    thresher_trainer,
    trl_step,
    write_store,
)
from datasets import Dataset, disable_progress_bars
from pairs import DATA, in_plan_order, token_pairs, train_bpe
from resident import kilobytes
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging
from vs_trl import measure

from thresher.data.batching.mismatched import MismatchedAnswers, VisitPlan
from thresher.data.batching.plan import Plan
from thresher.data.example import Example, Response

COLUMN = COLUMNS["h384-L6-V8k-fp32"]
LISTS, PAIRS, TRL = "thresher, lists", "thresher, the same comparisons as pairs", "TRL, the same comparisons as pairs"
TRL_DEFAULT, TRL_FASTEST, KTO = (
    "TRL default (checkpointing)",
    "TRL, no checkpointing, reference precomputed, GPU head forced",
    "thresher",
)
CONTESTANTS = {"lists": (LISTS, PAIRS, TRL), "kto": (KTO, TRL_DEFAULT, TRL_FASTEST)}


class Field:
    """Prompts of the data, each with responses of the same length as real ones, and the contestants."""

    def __init__(self, num_responses: int, num_batches: int, prompts_per_step: int, max_length: int, data: str):
        texts = DATA[data]()
        bpe = train_bpe(texts, COLUMN.vocab)
        self.tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=bpe, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
        )
        pairs = token_pairs(texts, bpe, max_length=max_length)
        count = (num_batches + 1) * prompts_per_step
        answers = [response.ids for pair in pairs for response in pair.responses]
        prompts = [pair.prompt_ids for pair in pairs[:: len(pairs) // count]][:count]
        room = max_length - max(map(len, prompts))
        # consecutive answers of the data, which are of other prompts: only their lengths matter
        self.answers = [
            [answers[(at * num_responses + number) % len(answers)][:room] for number in range(num_responses)]
            for at in range(count)
        ]
        self.prompts, self.prompts_per_step, self.num_steps = prompts, prompts_per_step, num_batches + 1

    def examples(self) -> list[Example]:
        """Ranked lists."""
        return [
            Example(prompt, tuple(Response(ids, None, -float(rank)) for rank, ids in enumerate(answers)))
            for prompt, answers in zip(self.prompts, self.answers, strict=True)
        ]

    def comparisons(self) -> list[Example]:
        """All comparisons of the lists as pairs."""
        return [
            Example.pair(prompt, better, worse)
            for prompt, answers in zip(self.prompts, self.answers, strict=True)
            for better, worse in combinations(answers, 2)
        ]

    def labelled(self) -> list[Example]:
        return [
            Example(prompt, (Response(answers[0], None, float(at % 2)),))
            for at, (prompt, answers) in enumerate(zip(self.prompts, self.answers, strict=True))
        ]

    def step_of(self, contestant: str) -> Step:
        """Build a contestant."""
        if contestant == KTO:
            return self._kto()
        if contestant in (TRL_DEFAULT, TRL_FASTEST):
            return self._trl_kto(is_default=contestant == TRL_DEFAULT)
        examples = self.examples() if contestant == LISTS else self.comparisons()
        plan = Plan(len(examples), 0, len(examples) // self.num_steps, self.num_steps)
        examples = in_plan_order(examples, plan)
        store = write_store(examples, Path(mkdtemp()) / "store", "lists" if contestant == LISTS else "pairs")
        reference = score_reference(COLUMN, store, plan)
        if contestant == TRL:
            settings = {"checkpointing": False, "reference": reference, "force_compact_head": True}
            return trl_step(COLUMN, self.tokenizer, examples, plan, **settings)
        return thresher_step(thresher_trainer(COLUMN, store, plan, layouts()["shared"], reference))

    def _labels(self) -> tuple[MismatchedAnswers, VisitPlan]:
        plan = VisitPlan(len(self.prompts), 0, self.prompts_per_step, self.num_steps)
        store = write_store(in_plan_order(self.labelled(), plan), Path(mkdtemp()) / "store", "labels")
        return MismatchedAnswers(store, plan), plan

    def _kto(self) -> Step:
        visits, plan = self._labels()
        reference = score_reference(COLUMN, visits, plan)
        return thresher_step(thresher_trainer(COLUMN, visits, plan, layouts()["shared"], reference, loss="kto"))

    def _trl_kto(self, *, is_default: bool) -> Step:
        import trl.trainer.utils
        from trl import KTOConfig, KTOTrainer

        visits, plan = self._labels()
        trainer: Any = KTOTrainer(
            COLUMN.model(),
            COLUMN.reference(),
            KTOConfig(
                mkdtemp(),
                per_device_train_batch_size=self.prompts_per_step,
                learning_rate=LEARNING_RATE,
                lr_scheduler_type="constant",
                bf16=False,
                gradient_checkpointing=is_default,
                max_length=None,
                use_cpu=True,
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_list([{"prompt": "a", "completion": "b", "label": bool(at)} for at in range(2)]),
            processing_class=self.tokenizer,
        )
        reference = None if is_default else score_reference(COLUMN, visits, plan)
        trainer.precompute_ref_logps = not is_default
        if not is_default:
            trainer.ref_model = None  # as after precomputing in TRL
        train = optimizer_step(trainer, plan.num_steps, checkpointing=is_default)

        own_choice = trl.trainer.utils._use_triton

        def step(number: int) -> float:
            # TRL's GPU path, which scores response positions only; TRL does not use it on a CPU
            trl.trainer.utils._use_triton = own_choice if is_default else lambda device: True
            batch = visits.read(plan.pair_ids(number))
            rows = [_trl_row(each) for each in batch.pairs]
            if reference is not None:
                logps = reference.logps(batch)
                for row, own, other in zip(rows, logps.side(0).sums(), logps.side(1).sums(), strict=True):
                    row |= {"ref_logps": float(own), "ref_KL_logps": float(other)}
            return train(rows)

        return step

    def rows(self, contestant: str, number: int) -> int:
        """Rows that the linear layers of the policy compute in a step, forwards without gradient included."""
        start = number * self.prompts_per_step
        chosen = range(start, start + self.prompts_per_step)
        lengths = [(len(self.prompts[at]), [len(ids) for ids in self.answers[at]]) for at in chosen]
        if contestant == LISTS:
            return sum(prompt + sum(answers) - len(answers) for prompt, answers in lengths)
        pairs = [(prompt, pair) for prompt, answers in lengths for pair in combinations(answers, 2)]
        if contestant == PAIRS:
            return sum(prompt + sum(pair) - 2 for prompt, pair in pairs)
        if contestant == TRL:
            return 2 * len(pairs) * max(prompt + max(pair) for prompt, pair in pairs)
        own = [(prompt, answers[0]) for prompt, answers in lengths]
        mismatched = [(prompt, own[at - 1][1]) for at, (prompt, _) in enumerate(own)]
        if contestant == KTO:
            return sum(prompt + answer - 1 for prompt, answer in (*own, *mismatched))
        widths = [max(prompt + answer for prompt, answer in each) for each in (own, mismatched)]
        return len(own) * sum(widths) * (2 if contestant == TRL_DEFAULT else 1)


def _trl_row(example: Example) -> dict[str, Any]:
    own, mismatched = example.responses
    return {
        "prompt_ids": example.prompt_ids.tolist(),
        "completion_ids": own.ids.tolist(),
        "KL_completion_ids": mismatched.ids.tolist(),
        "label": own.value == 1.0,
    }


def peak(contestant: str, settings: Sequence[int], data: str) -> float:
    """Megabytes over the floor; runs in a process of its own."""
    field = Field(*settings, data)
    step = field.step_of(contestant)
    floor = kilobytes("VmRSS") * 1024 + 3 * 4 * sum(p.numel() for p in COLUMN.model().parameters())
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    for number in range(field.num_steps):
        step(number)
    return (kilobytes("VmHWM") * 1024 - floor) / 1e6


def report(kind: str, field: Field, num_batches: int, peaks: dict[str, float]) -> None:
    names = CONTESTANTS[kind]
    steps = {name: field.step_of(name) for name in names}
    first = {name: step(0) for name, step in steps.items()}
    if kind == "lists":
        check_losses(first, 2e-5)
    else:
        print(f"losses of the first step: {first}")
    seconds = measure(steps, num_batches)
    own = seconds[names[0]]
    print("| mode | rows per prompt | ms per prompt | time over the first: median (quartiles) | peak, MB |")
    print("|---|---:|---:|---|---:|")
    for name in names:
        rows = np.median([field.rows(name, number + 1) for number in range(num_batches)]) / field.prompts_per_step
        low, middle, high = np.percentile(seconds[name] / own, [25, 50, 75])
        time_per_prompt = 1e3 * np.median(seconds[name]) / field.prompts_per_step
        print(
            f"| {name} | {rows:.0f} | {time_per_prompt:.0f} | {middle:.2f} ({low:.2f}-{high:.2f}) | {peaks[name]:.0f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=CONTESTANTS, nargs="+", default=list(CONTESTANTS))
    parser.add_argument("--responses", type=int, nargs="+", default=[2, 4, 7])
    parser.add_argument("--batches", type=int, default=6)
    parser.add_argument("--max-length", type=int, default=384)
    parser.add_argument("--data", default="hh", choices=DATA)
    parser.add_argument("--peak-of", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    disable_progress_bars()
    if args.peak_of is not None:
        contestant, settings = json.loads(args.peak_of)
        print(json.dumps(peak(contestant, settings, args.data)))
        return
    for kind in args.only:
        for count in args.responses if kind == "lists" else [1]:
            prompts_per_step = 4 if kind == "lists" else 16
            settings = [count, args.batches, prompts_per_step, args.max_length]
            print(f"\n{kind}, {count} responses, {prompts_per_step} prompts per step, {COLUMN.name}, {args.data}\n")
            peaks = {}
            for name in CONTESTANTS[kind]:
                order = json.dumps([name, [count, 2, prompts_per_step, args.max_length]])
                child = [sys.executable, __file__, "--data", args.data, "--peak-of", order]
                done = subprocess.run(child, capture_output=True, text=True, check=True)
                peaks[name] = json.loads(done.stdout.splitlines()[-1])
            report(kind, Field(*settings, args.data), args.batches, peaks)


if __name__ == "__main__":
    main()
