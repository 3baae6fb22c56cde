"""The contestants of a measurement: TRL in four settings, a bare loop over thresher's layout, and thresher's trainer.

Each call makes one optimizer step over the same pairs, from the same weights, and returns the loss.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from thresher.builders.inputs import DEFAULT_TOKENS_PER_MICRO_BATCH
from thresher.checkpoint.manager import CheckpointManager
from thresher.config import DPOConfig
from thresher.config.roles import TrainingArgs
from thresher.data.batching.batches import Blocks, CostModel, MicroBatching, ScoringBatching
from thresher.data.batching.mismatched import Examples
from thresher.data.batching.plan import Plan
from thresher.data.example import Example, ExampleBatch, Kind
from thresher.data.store.arrow_schema import hash_example, pairs_to_record_batch
from thresher.data.store.reader import ExampleStore
from thresher.data.store.writer import StoreWriter
from thresher.engines.native.build import infer_engine, train_engine
from thresher.losses import Objective, make_loss
from thresher.losses.pairs import ExampleLogps, ObjectiveInputs
from thresher.models.layouts import Layout, PackedLayout, PaddedLayout
from thresher.models.logps import PairModel
from thresher.models.optimizations.compile import Compilation
from thresher.reference.cache import ReferenceCache
from thresher.reference.fingerprint import ReferenceFingerprint
from thresher.reference.scorers import Precomputed, Reference, precomputed
from thresher.training.lr_schedule import LRSchedule
from thresher.training.trainer import RankTrainer

LEARNING_RATE = 1e-6
Step = Callable[[int], float]  # index of a batch in, loss out


@dataclass(frozen=True)
class Column:
    """Size and precision of a model. bf16 is autocast over fp32 weights for all contestants."""

    name: str
    hidden: int
    layers: int
    vocab: int
    dtype: torch.dtype

    @property
    def intermediate(self) -> int:
        """8/3 of the hidden size, rounded up to a multiple of 64, as in real models."""
        return -(-self.hidden * 8 // (3 * 64)) * 64

    @property
    def weights_per_layer(self) -> int:
        return 4 * self.hidden**2 + 3 * self.hidden * self.intermediate

    def reference(self) -> LlamaForCausalLM:
        """Build a reference whose weights differ from the policy's; with equal weights, every loss would be ln 2."""
        return self.model(seed=1)

    def model(self, seed: int = 0) -> LlamaForCausalLM:
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.hidden // 64,
            num_key_value_heads=self.hidden // 64,
            max_position_embeddings=4096,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
        config._attn_implementation = "sdpa"
        return LlamaForCausalLM(config)


COLUMNS = {
    "h384-L6-V8k-fp32": Column("h384 L6 V8k fp32", 384, 6, 8_000, torch.float32),
    "h512-L8-V8k-bf16": Column("h512 L8 V8k bf16", 512, 8, 8_000, torch.bfloat16),
    "h512-L8-V32k-bf16": Column("h512 L8 V32k bf16", 512, 8, 32_000, torch.bfloat16),
}


def write_store(pairs: Sequence[Example], directory: Path, kind: Kind = "pairs") -> ExampleStore:
    with StoreWriter(directory, shard_rows=65_536, kind=kind) as writer:
        writer.append(pairs_to_record_batch(pairs, [hash_example(pair) for pair in pairs], kind))
        writer.finish({"identity": "benchmark"})
    return ExampleStore.open(directory)


def score_reference(column: Column, store: Examples, plan: Plan) -> Precomputed:
    """Score every pair with the reference; all contestants that precompute use these logps."""
    scorer = infer_engine(column.reference(), PackedLayout(shares_prompt=True), column.dtype)
    cache = ReferenceCache(Path(tempfile.mkdtemp()), ReferenceFingerprint("", "", "", ""), "random weights")
    reference = precomputed(
        cache,
        store,
        plan.visited_pairs,
        blocks_of=lambda lengths: Blocks.by_pairs(len(lengths), plan.pairs_per_step),
        device=torch.device("cpu"),
        num_visits=plan.num_visits,
    )
    list(reference.iter_score_missing(scorer.score))
    return reference


def thresher_trainer(
    column: Column,
    store: Examples,
    plan: Plan,
    layout: Layout,
    reference: Precomputed,
    *,
    loss: str = "sigmoid",
    max_tokens: int | None = DEFAULT_TOKENS_PER_MICRO_BATCH,
    checkpointing: bool = False,
    compiled: bool = False,
) -> RankTrainer:
    """Build the complete trainer: store, plan, micro-batches, precomputed reference, engine."""
    directory = Path(tempfile.mkdtemp())
    model = column.model()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    costs = CostModel(attention_per_key=1 / (6 * column.hidden), shares_prompt=layout.shares_prompt)
    packed = layout.needs_pair_attention
    training, compilation = TrainingArgs(learning_rate=LEARNING_RATE), Compilation("layers") if compiled else None
    policy = train_engine(model, layout, column.dtype, training, compilation=compilation)
    micro_batching = MicroBatching(
        store.lengths, costs, max_tokens if packed else None, None if packed else plan.pairs_per_step
    )
    return RankTrainer(
        DPOConfig(output_dir=str(directory)),
        policy,
        Objective(terms=((make_loss(loss, {}), 1.0),)),
        plan,
        train=store,
        validation=None,
        reference=Reference(reference),
        micro_batching=micro_batching,
        eval_batching=ScoringBatching(max_tokens=4096, max_pairs=8),
        schedule=LRSchedule("constant", LEARNING_RATE, 0, plan.num_steps),
        checkpoints=CheckpointManager(directory / "checkpoints", 1, "eval/loss", False),
        identity={},
    )


def reference_seconds(column: Column, pairs: Sequence[Example], plan: Plan) -> float:
    """Return the seconds to score one step with the reference, at the batch size of a step: median of five."""
    scorer = infer_engine(column.reference(), PackedLayout(shares_prompt=True), column.dtype)
    seconds = []
    for number in range(min(6, plan.num_steps)):
        ids = plan.pair_ids(number)
        started = time.perf_counter()
        scorer.score(ExampleBatch(ids, tuple(pairs[i] for i in ids)))
        seconds.append(time.perf_counter() - started)
    return float(np.median(seconds[1:]))


def thresher_step(trainer: RankTrainer) -> Step:
    def step(number: int) -> float:
        trainer.state.step = number
        return trainer.training_step()["loss"].mean

    return step


def bare_step(column: Column, pairs: Sequence[Example], plan: Plan, reference: Precomputed, layout: Layout) -> Step:
    """Make a step with the layout functions alone: collate, score, loss, backward, clip, AdamW."""
    model = column.model()
    pair_model = PairModel.for_layout(model, column.dtype, layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    objective = Objective(terms=((make_loss("sigmoid", {}), 1.0),))

    def step(number: int) -> float:
        ids = plan.pair_ids(number)
        batch = ExampleBatch(ids, tuple(pairs[i] for i in ids))
        output = objective(ObjectiveInputs(pair_model.score(layout.collate(batch)), reference.logps(batch)))
        loss = output.per_pair.mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def trl_step(
    column: Column,
    tokenizer: PreTrainedTokenizerFast,
    pairs: Sequence[Example],
    plan: Plan,
    *,
    checkpointing: bool,
    reference: Precomputed | None,
    force_compact_head: bool,
) -> Step:
    """Make a step with TRL's DPOTrainer: its training_step, clipping and optimizer, without the rest of its loop.

    force_compact_head uses TRL's GPU path, which scores response positions only; TRL does not use it on a CPU.
    """
    import trl.trainer.utils
    from datasets import Dataset
    from trl import DPOConfig
    from trl import DPOTrainer as TRLTrainer

    own_choice = trl.trainer.utils._use_triton
    trainer: Any = TRLTrainer(
        model=column.model(),
        ref_model=column.reference(),
        args=DPOConfig(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=plan.pairs_per_step,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            bf16=column.dtype == torch.bfloat16,
            gradient_checkpointing=checkpointing,
            max_length=None,
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}]),
        processing_class=tokenizer,
    )
    trainer.precompute_ref_logps = reference is not None
    if reference is not None:
        trainer.ref_model = None  # as after precomputing in TRL
    train = optimizer_step(trainer, plan.num_steps, checkpointing=checkpointing)

    def step(number: int) -> float:
        trl.trainer.utils._use_triton = (lambda device: True) if force_compact_head else own_choice
        ids = plan.pair_ids(number)
        examples = [_as_example(pairs[i]) for i in ids]
        if reference is not None:
            sides = reference.logps(ExampleBatch(ids, tuple(pairs[i] for i in ids)))
            _add_reference(examples, sides)
        return train(examples)

    return step


def optimizer_step(trainer: Any, num_steps: int, *, checkpointing: bool) -> Callable[[list[dict[str, Any]]], float]:
    """A step of a TRL trainer on given examples, as in `Trainer.train()`, without the rest of its loop."""
    # as Trainer.train() does before its first step
    trainer.current_gradient_accumulation_steps = 1
    if checkpointing:
        trainer.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert trainer.model.is_gradient_checkpointing == checkpointing
    trainer.create_optimizer_and_scheduler(num_training_steps=num_steps)
    model, optimizer = trainer.accelerator.prepare(trainer.model, trainer.optimizer)
    trainer.model_wrapped = model

    def step(examples: list[dict[str, Any]]) -> float:
        loss = trainer.training_step(model, trainer.data_collator(examples))
        trainer.accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        model.zero_grad(set_to_none=True)
        return float(loss)

    return step


def _as_example(pair: Example) -> dict[str, Any]:
    return {
        "prompt_ids": pair.prompt_ids.tolist(),
        "chosen_ids": pair.chosen.ids.tolist(),
        "rejected_ids": pair.rejected.ids.tolist(),
    }


def _add_reference(examples: list[dict[str, Any]], sides: ExampleLogps) -> None:
    for example, chosen, rejected in zip(examples, sides.chosen.sums(), sides.rejected.sums(), strict=True):
        example["ref_chosen_logps"] = float(chosen)
        example["ref_rejected_logps"] = float(rejected)


def layouts() -> dict[str, Layout]:
    return {
        "padded": PaddedLayout(pad_id=0),
        "packed": PackedLayout(shares_prompt=False),
        "shared": PackedLayout(shares_prompt=True),
    }


def check_losses(first: dict[str, float], tolerance: float) -> None:
    """Require that the losses of all contestants agree on the first batch."""
    values = np.array(list(first.values()))
    if np.abs(values - np.median(values)).max() > tolerance:
        raise SystemExit(f"losses differ from their median by more than {tolerance}: {first}")
