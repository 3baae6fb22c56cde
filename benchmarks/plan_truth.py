"""Compare `thresher plan` with real steps on gloo ranks of this machine: the tables of docs/guides/plan.md.

python -m benchmarks.plan_truth steps [--shapes grouped wide smollm2] [--ranks 1 2 4] [--json FILE]
python -m benchmarks.plan_truth time [--shapes grouped smollm2] [--ranks 1 2]

steps: bytes of every collective, peak of all tensors and peak resident memory of a step. Weights are random, since they
change none of these. time: `plan --calibrate`, then a run with other numbers of pairs per step.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
# for the ranks, which start after this: glibc returns freed tensors to the system; otherwise it keeps up to 32 MB each
os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"

import numpy as np
import torch
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.resident import kilobytes
from tests.support.small_runs import save_small_model, write_rows
from tests.support.strategies.communication import CommunicationCounter
from tests.support.strategies.config_runs import world_of_pool
from tests.support.strategies.live_memory import LiveBytes
from tests.support.strategies.parity import objective_of
from tests.support.strategies.rank_pool import RankPool
from tests.support.tiny_run import PairsInMemory
from thresher.builders.engines import build_policy
from thresher.checkpoint.manager import CheckpointManager
from thresher.cli.timed_steps import time_steps
from thresher.config import DPOConfig
from thresher.data.batching.batches import CostModel, MicroBatching, ScoringBatching
from thresher.data.batching.plan import Plan
from thresher.data.pair import Pair, PairBatch
from thresher.losses.pairs import ChosenRejectedLogps, ResponseLogps
from thresher.plan.calibrate import calibrate
from thresher.plan.compute import Cluster
from thresher.plan.estimate import Estimate
from thresher.plan.hardware import GPUS
from thresher.plan.memory import peak_memory
from thresher.plan.pairs import PairLengths
from thresher.plan.traffic import step_messages
from thresher.plan.workload import Rows, dummy_rows, step_of_rank
from thresher.training.lr_schedule import LRSchedule
from thresher.training.trainer import RankTrainer, ScoredDataset, TrainerSettings

TINY: dict[str, int] = {  # heads that 2, 3 and 4 ranks can split
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 12,
}
SHAPES: dict[str, dict[str, Any]] = {
    "grouped": {
        "vocab_size": 2048,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
    "wide": {
        "vocab_size": 8000,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    # SmolLM2-135M: 9 heads and 3 of keys and values, so that tp and cp have 3 ranks, not 2
    "smollm2": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
        "rope_theta": 100000.0,
    },
}
NUM_PAIRS, PAIRS_PER_STEP_AND_RANK, TOKENS_PER_MICRO_BATCH, PAIRS_PER_MICRO_BATCH = 96, 8, 1100, 4
SHORTER = {"smollm2": 4}  # pairs and budgets of a large shape, so that a case takes minutes
SECONDS_FOR_A_CASE = 1800
LORA: dict[str, Any] = {"lora_rank": 8, "lora_target": ["all-linear"]}


@dataclass(frozen=True)
class Case:
    shape: str
    layout: str
    lora: bool
    num_ranks: int
    axes: dict[str, int]

    @property
    def mesh(self) -> str:
        sizes = [f"{name.removesuffix('_size')} {size}" for name, size in self.axes.items()]
        rest = self.num_ranks // int(np.prod(list(self.axes.values()), dtype=int))
        if rest > 1:
            sizes.append(f"dp_shard {rest}")
        return " x ".join(sizes) or "1 process"


@dataclass(frozen=True)
class Counted:
    """Of one rank. resident: before the model is built, and at the peak of a step."""

    sent: dict[str, int]
    peak: int
    baseline: int
    resident: int


def cases(shapes: list[str], ranks: list[int], layouts: list[str]) -> Iterator[Case]:
    for shape in shapes:
        heads = SHAPES[shape]["num_key_value_heads"]
        for size in ranks:
            # tp and cp split heads
            split = next((n for n in (size, 2, 3) if n > 1 and heads % n == 0), 1)
            meshes: list[tuple[int, dict[str, int]]] = [(size, {})]
            if size > 1:
                meshes += [(size, {"pp_size": size}), (max(size, split), {"tp_size": split})]
                meshes += [(max(size, split), {"cp_size": split})]
            if size == 4 and split == 2:
                meshes += [(4, {"tp_size": 2, "pp_size": 2})]
            for num_ranks, axes in meshes:
                if num_ranks % int(np.prod(list(axes.values()), dtype=int)):
                    num_ranks = int(np.prod(list(axes.values()), dtype=int))
                for layout in layouts:
                    if layout == "padded" and "cp_size" in axes:
                        continue  # cp needs packed rows
                    yield from (Case(shape, layout, lora, num_ranks, axes) for lora in (False, True))


def config_of(model: Path, case: Case) -> DPOConfig:
    return DPOConfig(
        pretrain=str(model),
        layout=case.layout,
        actor_train={
            "model_args": {"dtype": "fp32", **(LORA if case.lora else {})},
            "training_args": {
                "per_device_train_batch_size": PAIRS_PER_MICRO_BATCH,
                "global_batch_size": PAIRS_PER_STEP_AND_RANK,
                "max_tokens_per_micro_batch": None
                if case.layout == "padded"
                else TOKENS_PER_MICRO_BATCH // SHORTER.get(case.shape, 1),
            },
            "num_workers": case.num_ranks,
            "strategy_args": {"strategy_config": case.axes},
        },
    )


def estimate_of(model: Path, case: Case) -> Estimate:
    cluster = Cluster(GPUS["h100"], gpus_per_node=8, num_gpus=case.num_ranks)
    estimate = Estimate(config_of(model, case), cluster, pairs=PairLengths(pairs(case).lengths, "given"))
    training = estimate.config.actor_train.training_args.model_copy(
        update={"global_batch_size": PAIRS_PER_STEP_AND_RANK * estimate.dims.num_data_ranks}
    )
    role = estimate.config.actor_train.model_copy(update={"training_args": training})
    return Estimate(estimate.config.model_copy(update={"actor_train": role}), cluster, estimate)


def pairs(case: Case) -> PairsInMemory:
    draw, factor = np.random.default_rng(0), SHORTER.get(case.shape, 1)

    def ids(low: int, high: int) -> Any:
        return draw.integers(3, 60, draw.integers(low, high) // factor).astype(np.int32)

    return PairsInMemory([Pair(ids(60, 120), ids(40, 110), ids(40, 110)) for _ in range(NUM_PAIRS)])


def batching_of(estimate: Estimate) -> tuple[MicroBatching, Plan]:
    layout, training = estimate.parts.layout, estimate.config.actor_train.training_args
    costs = CostModel(1 / (6 * estimate.shape.hidden), shares_prompt=layout.shares_prompt)
    max_pairs = None if layout.needs_pair_attention else training.per_device_train_batch_size
    batching = MicroBatching(estimate.pairs.lengths, costs, training.max_tokens_per_micro_batch, max_pairs)
    return batching, Plan(NUM_PAIRS, seed=3, pairs_per_step=estimate.pairs_per_step, num_steps=6)


class CachedZeros:
    seconds_per_pair = 0.0

    def logps(self, batch: PairBatch) -> ChosenRejectedLogps:
        sides = [[getattr(pair, name) for pair in batch.pairs] for name in ("chosen_ids", "rejected_ids")]
        lengths = [torch.tensor([len(ids) for ids in side], dtype=torch.int64) for side in sides]
        chosen, rejected = (ResponseLogps(torch.zeros(int(each.sum())), each) for each in lengths)
        return ChosenRejectedLogps(chosen, rejected)


class BaseOfAdapter:
    seconds_per_pair = 0.0

    def __init__(self, score: Any):
        self.logps = score


def trainer_of(model: Path, case: Case) -> tuple[Any, RankTrainer]:
    """A policy on this rank, and the trainer of its steps."""
    estimate = estimate_of(model, case)
    batching, plan = batching_of(estimate)
    layout, device = estimate.parts.layout, torch.device("cpu")
    policy: Any = build_policy(estimate.config, layout, device=device, world=world_of_pool())
    trainer = RankTrainer(
        strategy=policy,
        objective=objective_of("sigmoid"),
        plan=plan,
        micro_batching=batching,
        schedule=LRSchedule("constant", 1e-4, 0, 6),
        train=ScoredDataset(pairs(case), BaseOfAdapter(policy.score_base) if case.lora else CachedZeros()),  # type: ignore[arg-type]
        validation=None,
        settings=TrainerSettings(evaluation=ScoringBatching(max_tokens=4096, max_pairs=8)),
        checkpoints=CheckpointManager(Path(tempfile.gettempdir()) / "unused", 1, "eval/loss", False),
        identity={},
        config={},
    )
    return policy, trainer


def count(models: Path, case: Case) -> Counted:
    """Make four steps on this rank: the first allocates, the others are measured one by one.

    Resident memory without the model is that of the process after a step of a tiny model, which loads all code.
    """
    trainer_of(models / "tiny", case)[1].training_step()
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    baseline = 1024 * kilobytes("VmRSS")
    policy, trainer = trainer_of(models / case.shape, case)
    trainer.training_step()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    trainer.training_step()
    resident = 1024 * kilobytes("VmHWM")
    live = LiveBytes()
    live.add(policy.model.parameters())
    live.add(tree_leaves(policy._optimizer.state_dict()["state"]))
    with live:
        trainer.training_step()
    with CommunicationCounter() as sent:
        trainer.training_step()
    return Counted(dict(sent.bytes), live.peak, baseline, resident)


def predict(model: Path, case: Case, rank: int) -> tuple[dict[str, int], int]:
    """Bytes of the fourth step by kind, and the peak of the third."""
    estimate = estimate_of(model, case)
    batching, plan = batching_of(estimate)
    dims, layout = estimate.dims, estimate.parts.layout
    data_rank = rank // (dims.cp * dims.tp) % dims.num_data_ranks
    stage = estimate.stage(rank * dims.pp // case.num_ranks)

    def rows_of(step: int) -> list[Rows]:
        ids = plan.pair_ids(step)
        steps = [
            step_of_rank(batching, ids, layout, each, dims.num_data_ranks).micro_batches
            for each in range(dims.num_data_ranks)
        ]
        missing = max(map(len, steps)) - len(steps[data_rank]) if dims.fsdp_size > 1 else 0
        return [*steps[data_rank], *[dummy_rows(layout)] * missing]

    traffic = replace(estimate.traffic_settings, scores_reference=case.lora)
    sent: Counter[str] = Counter()
    for message in step_messages(stage, rows_of(3), dummy_rows(layout), traffic):
        sent[message.kind] += message.payload_bytes
    scheduled = rows_of(2)
    settings = replace(estimate.memory_settings, micro_batches=len(scheduled), on_gpu=False)
    # a stage of 1F1B holds the activations of consecutive micro-batches, which differ in size
    in_flight = min(dims.pp - stage.index, len(scheduled))
    windows = [scheduled[start : start + in_flight] for start in range(len(scheduled) - in_flight + 1)]
    # before the first backward there is no gradient
    first = replace(settings, micro_batches=in_flight)
    peak = max(
        peak_memory(stage, _mean_of(window), settings if index else first).total for index, window in enumerate(windows)
    )
    return dict(sent), peak


def _mean_of(rows: list[Rows]) -> Rows:
    """Rows of the mean micro-batch."""
    return Rows(*(round(np.mean([getattr(each, field.name) for each in rows])) for field in fields(Rows)))


def compare(models: Path, case: Case) -> list[dict[str, Any]]:
    """One row per rank."""
    model = models / case.shape
    pool = RankPool(case.num_ranks, seconds=SECONDS_FOR_A_CASE)
    try:
        counted: list[Counted] = pool.run(count, models, case)
    finally:
        pool.close()
    rows = []
    for rank, each in enumerate(counted):
        sent, peak = predict(model, case, rank)
        rows.append(
            asdict(case)
            | {
                "mesh": case.mesh,
                "rank": rank,
                "bytes_are_equal": each.sent == sent,
                "sent": sum(each.sent.values()),
                "peak": each.peak,
                "peak_error": peak / each.peak - 1,
                "baseline": each.baseline,
                "resident": each.resident,
                "resident_error": (each.baseline + peak) / each.resident - 1,
            }
        )
    return rows


def save_models(directory: Path, shapes: list[str]) -> None:
    for shape in ("tiny", *shapes):
        save_small_model(directory / shape, 0)
        torch.manual_seed(0)
        config = LlamaConfig(**({"tiny": TINY} | SHAPES)[shape], max_position_embeddings=1024)
        LlamaForCausalLM(config).save_pretrained(directory / shape)


def print_steps(rows: list[dict[str, Any]]) -> None:
    """One line per shape and mesh: the range over layouts, full and LoRA, and ranks."""
    print("| shape | mesh | cases | bytes sent | peak of tensors | peak resident memory |")
    print("|---|---|---:|---|---|---|")
    for shape, mesh in dict.fromkeys((row["shape"], row["mesh"]) for row in rows):
        group = [row for row in rows if (row["shape"], row["mesh"]) == (shape, mesh)]
        number = len({(row["layout"], row["lora"]) for row in group})
        equal = sum(row["bytes_are_equal"] for row in group)
        sent = "equal" if equal == len(group) else f"equal on {equal} of {len(group)} ranks"
        print(f"| {shape} | {mesh} | {number} | {sent} | {_range(group, 'peak')} | {_range(group, 'resident')} |")


def _range(rows: list[dict[str, Any]], name: str) -> str:
    errors = [100 * row[f"{name}_error"] for row in rows]
    return f"{min(errors):+.1f} % to {max(errors):+.1f} %"


def time_config(models: Path, shape: str, num_ranks: int, directory: Path, pairs_per_step: int) -> DPOConfig:
    return DPOConfig(
        pretrain=str(models / shape),
        output_dir=str(directory / "out"),
        cache_dir=str(directory / "cache"),
        max_steps=6,
        sequence_length=512,
        track_with=[],
        actor_train={
            "model_args": {"dtype": "fp32"},
            "data_args": {"file_name": str(directory / "pairs.jsonl"), "template": "raw"},
            "training_args": {"global_batch_size": pairs_per_step, "max_tokens_per_micro_batch": 700},
            "num_workers": num_ranks,
        },
    )


def compare_time(models: Path, shape: str, num_ranks: int) -> None:
    """Predict from steps of 1 and 3 pairs per rank; measure steps of 10 pairs per rank in several micro-batches."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_rows(directory / "pairs.jsonl", 400, seed=0, longest=(60, 90))
        config = time_config(models, shape, num_ranks, directory, 10 * num_ranks)
        estimate = Estimate(config, Cluster(GPUS["h100"], 8, num_ranks))
        predicted = calibrate(estimate, time_steps)
        (seconds,) = time_steps([config], 6)
        measured = float(np.mean(seconds[1:]))
        print(
            f"| {shape} | {num_ranks} | {predicted.step_seconds:.3g} | {measured:.3g} | "
            f"{100 * (predicted.step_seconds / measured - 1):+.0f} % |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["steps", "time"])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--layouts", nargs="+", default=["shared", "packed", "padded"])
    parser.add_argument("--json", type=Path, help="write all rows, one per rank; cases that it has are not run again")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        models = Path(name)
        save_models(models, args.shapes)
        if args.what == "time":
            print("| shape | ranks | predicted s | measured s | error |\n|---|---:|---:|---:|---:|")
            for shape in args.shapes:
                for size in args.ranks:
                    compare_time(models, shape, size)
            return
        rows: list[dict[str, Any]] = []
        if args.json is not None and args.json.exists():
            rows = [json.loads(line) for line in args.json.read_text().splitlines()]
        done = {json.dumps([row[key] for key in Case.__dataclass_fields__]) for row in rows}
        for case in dict.fromkeys(json.dumps(asdict(case)) for case in cases(args.shapes, args.ranks, args.layouts)):
            values = json.loads(case)
            if json.dumps(list(values.values())) in done:
                continue
            found = compare(models, Case(**values))
            rows += found
            if args.json is not None:
                with args.json.open("a") as file:
                    file.writelines(json.dumps(row) + "\n" for row in found)
        print_steps(rows)


if __name__ == "__main__":
    main()
