"""Train ten steps with TRL's DPOTrainer and with ours, for every loss of TRL: the same model, pairs and settings.

python benchmarks/trl_losses.py                   # every loss, and sums of losses
python benchmarks/trl_losses.py sigmoid sft       # some of them

Prints the largest difference of loss, gradient norm and weights, and whether `thresher import` reports a difference.
Exits with 1 if a loss differs by more than 1e-5 and the report says nothing about it.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from datasets import Dataset, disable_progress_bars
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from transformers.utils import logging

QUICKSTART = Path(__file__).resolve().parents[1] / "examples" / "quickstart"
NUM_PAIRS = 12
TOLERANCE = 1e-5
SINGLE = (
    *("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired"),
    *("apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm"),
)
CASES: dict[str, dict[str, Any]] = {
    **{name: {"loss_type": [name]} for name in SINGLE},
    "exo_pair": {"loss_type": ["exo_pair"], "label_smoothing": 1e-3},  # TRL refuses it without
    "robust, smoothed": {"loss_type": ["robust"], "label_smoothing": 0.2},
    "aot, smoothed": {"loss_type": ["aot"], "label_smoothing": 0.2},
    "sigmoid + robust, smoothed": {"loss_type": ["sigmoid", "robust"], "label_smoothing": 0.2},
    "sigmoid + sft": {"loss_type": ["sigmoid", "sft"], "loss_weights": [0.8, 0.2]},
    "sigmoid + hinge, ld_alpha": {"loss_type": ["sigmoid", "hinge"], "loss_weights": [0.8, 0.2], "ld_alpha": 0.5},
    "ipo, wpo, js": {"loss_type": ["ipo"], "use_weighting": True, "f_divergence_type": "js_divergence"},
    "sigmoid, synced": {"loss_type": ["sigmoid"], "sync_ref_model": True, "ref_model_sync_steps": 3},
}
# one batch per step, so that both see the same pairs in every step
SETTINGS: dict[str, Any] = {
    "learning_rate": 5e-4,
    "per_device_train_batch_size": NUM_PAIRS,
    "num_train_epochs": 1,
    "max_steps": 10,
    "lr_scheduler_type": "linear",
    "warmup_steps": 2,
    "weight_decay": 0.1,
    "max_grad_norm": 0.5,
    "logging_steps": 1,
    "bf16": False,
    "gradient_checkpointing": False,
    "max_length": 512,
    "truncation_mode": "keep_start",
    "seed": 1,
    "save_strategy": "no",
}


class Recorder(TrainerCallback):
    """Keeps the log entries of training."""

    def __init__(self) -> None:
        self.entries: list[dict[str, float]] = []

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        if "loss" in logs:
            self.entries.append(logs)


Outcome = tuple[list[dict[str, float]], dict[str, torch.Tensor]]


def train_trl(model: str, rows: list[dict[str, str]], case: dict[str, Any], output: Path) -> Outcome:
    from trl import DPOConfig, DPOTrainer

    recorder = Recorder()
    args = DPOConfig(output_dir=str(output), report_to=[], use_cpu=True, disable_tqdm=True, **SETTINGS, **case)
    trainer = DPOTrainer(
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        args=args,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(model),
        callbacks=[recorder],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return recorder.entries, {name: tensor.detach() for name, tensor in trainer.model.named_parameters()}


def train_thresher(model: str, rows: list[dict[str, str]], case: dict[str, Any], output: Path) -> Outcome:
    from thresher import DPOConfig, DPOTrainer

    recorder = Recorder()
    settings = {"output_dir": output, "cache_dir": str(output / "cache"), "track_with": [], "template": "raw"}
    args = DPOConfig(**settings, **SETTINGS, **case)
    trainer = DPOTrainer(model, args=args, train_dataset=Dataset.from_list(rows), callbacks=[recorder])
    trainer.train()
    return recorder.entries, dict(trainer.model.named_parameters())


def reported(case: dict[str, Any]) -> str:
    """What `thresher import` says about the losses of a case."""
    from thresher.importers.convert import NAMES
    from thresher.importers.translation import translate

    entries = translate(NAMES["trl"], {"model_name_or_path": "m", **case}).entries
    return "; ".join(note for entry in entries if entry.outcome == "different meaning" for note in entry.notes)


def largest(ours: list[dict[str, float]], theirs: list[dict[str, float]], name: str) -> float:
    return max(abs(float(one[name]) - float(other[name])) for one, other in zip(ours, theirs, strict=True))


def main() -> int:
    sys.path.insert(0, str(QUICKSTART))
    from make_tiny_model import make_model, make_tokenizer

    torch.set_num_threads(1)
    disable_progress_bars()
    logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    rows = [json.loads(line) for line in (QUICKSTART / "train.jsonl").read_text().splitlines()[:NUM_PAIRS]]
    unexplained = []
    print("| loss of TRL | loss | gradient norm | weights | reported |\n|---|---:|---:|---:|---|")
    with TemporaryDirectory() as directory:
        tokenizer = make_tokenizer()
        tokenizer.chat_template = None  # TRL trains on rows of strings as raw text
        for each in (make_model(tokenizer), tokenizer):
            each.save_pretrained(f"{directory}/model")
        for number, name in enumerate(sys.argv[1:] or CASES):
            case = CASES[name]
            theirs, their_weights = train_trl(f"{directory}/model", rows, case, Path(directory, f"trl-{number}"))
            ours, our_weights = train_thresher(f"{directory}/model", rows, case, Path(directory, f"own-{number}"))
            losses, norms = largest(ours, theirs, "loss"), largest(ours, theirs, "grad_norm")
            weights = max(float((our_weights[key] - their_weights[key]).abs().max()) for key in our_weights)
            note = reported(case)
            print(f"| {name} | {losses:.1e} | {norms:.1e} | {weights:.1e} | {note} |", flush=True)
            scale = max(1.0, *(abs(float(entry["loss"])) for entry in theirs))
            if losses > TOLERANCE * scale and not note:
                unexplained.append(name)
    print(f"differs without a report: {', '.join(unexplained) or 'none'}")
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
