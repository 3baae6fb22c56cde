"""The token budget of micro-batches: as set, as recorded in a checkpoint, or chosen by formula for a GPU."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from transformers.initialization import no_init_weights

from thresher.builders.hardware import COMPUTE_RATES, Hardware
from thresher.builders.inputs import DEFAULT_TOKENS_PER_MICRO_BATCH, RunInputs
from thresher.builders.memory import RESERVED, ModelSize, Process, peak_memory
from thresher.builders.reference_mode import reference_has_workers
from thresher.checkpoint.json_io import load_json
from thresher.config import DPOConfig
from thresher.data.batching.batches import CostModel, num_sequences
from thresher.data.store.split import Lengths, in_blocks, longest_sequences
from thresher.engines.native.build import axis_sizes
from thresher.errors import UserError
from thresher.models.layouts import Layout
from thresher.models.loading.load import DTYPES
from thresher.observability.details import DETAIL

logger = logging.getLogger(__name__)

GPUS_PER_NODE = 8
# of the memory that is not reserved: peaks by formula are at most 10 % below counted ones (tests/plan)
_SHARE_OF_MEMORY = 0.9
_STEP, _LARGEST = 256, 1 << 20
_DOUBLINGS = 3


TokenBudget = tuple[int | None, str]  # None for the default of the layout; and the reason


@dataclass(frozen=True)
class BudgetChoice:
    """Finds the token budgets that fit into the memory of a run's processes."""

    processes: Sequence[Process]  # of the first and the last pipeline stage
    longest_example: int  # tokens, with padding
    tokens_per_step: float  # of a data-parallel rank

    @classmethod
    def of(cls, processes: Sequence[Process], lengths: Lengths, layout: Layout, pairs_per_step: int) -> BudgetChoice:
        costs = CostModel(attention_per_key=0, shares_prompt=layout.shares_prompt)
        longest = total = 0
        for block in in_blocks(lengths):
            if layout.needs_pair_attention:
                tokens = costs.tokens(block)
            else:
                tokens = num_sequences(block) * longest_sequences(block)
            longest, total = max(longest, int(tokens.max())), total + int(tokens.sum())
        pairs_per_rank = pairs_per_step / processes[0].dims.num_data_ranks
        return cls(processes, longest, pairs_per_rank * (total / len(lengths)))

    def choose(self, gpu: Hardware, gpus_per_node: int) -> TokenBudget:
        """The budget that a run without one gets, at least as large as the longest pair."""
        process, longest = self.processes[0], self.longest_example
        if not process.packs_rows and self.fits(process.training.per_device_train_batch_size * longest, gpu):
            return None, f"per_device_train_batch_size pairs fit into {gpu.name}"
        tokens = largest = self.largest(gpu)
        if largest is None:
            reason = f"although it does not fit into {gpu.name} by formula"
        elif process.packs_rows and largest >= DEFAULT_TOKENS_PER_MICRO_BATCH:
            sizes = [DEFAULT_TOKENS_PER_MICRO_BATCH * 2**i for i in range(_DOUBLINGS + 1)]
            fitting = [size for size in sizes if size <= largest]
            wanted = _tokens_that_hide_fsdp(process, gpu, gpus_per_node)
            tokens = next((size for size in fitting if size >= wanted), fitting[-1])
            reason = f"by formula: up to about {largest:,} fit into {gpu.name}"
        else:
            reason = f"by formula the largest that fits into {gpu.name}"
        # a longer pair gets a micro-batch to itself, so a smaller budget would only make others smaller
        return (tokens, reason) if longest <= (tokens or 0) else (longest, f"the longest pair; {reason}")

    def largest(self, gpu: Hardware) -> int | None:
        """The largest token budget that fits; None: not even one of 256."""
        low, high = 0, _LARGEST // _STEP
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.fits(middle * _STEP, gpu) else (low, middle - 1)
        return low * _STEP or None

    def fits(self, tokens: int, gpu: Hardware) -> bool:
        """Whether micro-batches of these tokens fit, with every row scored and some memory to spare."""
        micro_batches = max(2, round(self.tokens_per_step / tokens))
        usable = _SHARE_OF_MEMORY * (1 - RESERVED) * gpu.memory
        return all(peak_memory(process, tokens, tokens, micro_batches).total <= usable for process in self.processes)


def with_token_budget(inputs: RunInputs, checkpoint: Path | None, find_gpu: Callable[[], Hardware | None]) -> RunInputs:
    """Choose the token budget of a run once, for all ranks; a resumed run keeps its checkpoint's."""
    if inputs.max_tokens is not None:
        return inputs
    if checkpoint is not None:
        values = load_json(checkpoint / "trainer.json")
        saved = values.get("max_tokens_per_micro_batch") if isinstance(values, dict) else None
        budget, reason = saved if isinstance(saved, int) else None, f"as in {checkpoint}"
    elif (gpu := find_gpu()) is None:
        budget, reason = None, "the default on CPUs"
    else:
        budget, reason = choose_budget(inputs, gpu)
    packed = DEFAULT_TOKENS_PER_MICRO_BATCH if inputs.layout.needs_pair_attention else None
    tokens, extra = budget or packed, DETAIL if budget in (None, packed) else {}
    shown = "no limit" if tokens is None else f"{tokens:,}"
    logger.info("max_tokens_per_micro_batch: auto -> %s, %s", shown, reason, extra=extra)
    return inputs.replace(max_tokens=budget)


def choose_budget(inputs: RunInputs, gpu: Hardware) -> TokenBudget:
    """Choose for the workers of a run, each with such a GPU."""
    config = inputs.config
    try:
        first = policy_process(config, inputs, model_size(inputs), config.actor_train.num_processes)
        choice = BudgetChoice.of(
            [replace(first, stage=stage) for stage in {0, first.dims.pp - 1}],
            inputs.train_examples.lengths,
            inputs.layout,
            config.actor_train.training_args.pairs_per_step(first.dims.num_data_ranks),
        )
        return choice.choose(gpu, config.num_gpus_per_node or GPUS_PER_NODE)
    except UserError as error:
        return None, f"the default, because {error}"


def model_size(parts: RunInputs) -> ModelSize:
    """Read the sizes of the policy; UserError for strategies whose memory has no closed form."""
    if (name := parts.config.actor_train.strategy_name) != "fsdp2_train":
        raise UserError(f"memory and time are known for fsdp2_train, and actor_train uses {name}")
    with no_init_weights():  # tensors on the meta device have no values to initialize
        return ModelSize.of(parts.policy)


def policy_process(config: DPOConfig, parts: RunInputs, size: ModelSize, num_gpus: int) -> Process:
    """A process of the first pipeline stage of the policy."""
    role = config.actor_train
    is_copied = parts.mode == "concurrent" and not reference_has_workers(config, parts.mode)
    return Process(
        size,
        axis_sizes(role.strategy_args.settings, num_gpus),
        role.strategy_args.settings,
        role.training_args,
        DTYPES[role.model_args.master_dtype].itemsize,
        DTYPES[role.model_args.dtype].itemsize,
        parts.layout.needs_pair_attention,
        "adapter" if parts.mode == "adapter" else "copy" if is_copied else None,
    )


def _tokens_that_hide_fsdp(process: Process, gpu: Hardware, gpus_per_node: int) -> float:
    """Tokens of a micro-batch whose products take as long as its messages of FSDP2.

    Without such messages 0, and in a pipeline too: larger micro-batches leave too few of them.
    """
    dims, trained = process.dims, process.size.active.trained / process.size.active.total
    if not dims.uses_fsdp or process.settings.zero_stage == 1 or dims.pp > 1:
        return 0.0
    gathers = 2 if process.settings.zero_stage == 3 else 1
    elements = process.matrices
    bytes_per_element = gathers * process.held_bytes(elements, process.compute) / elements.total
    bytes_per_element += process.stored * trained
    products_per_token = 4 + 2 * trained + (2 if process.recompute == "full" else 0)
    gathered = process.matrices.total * dims.tp / process.size.active.total
    seconds_per_element = bytes_per_element * gathered / gpu.link(dims.fsdp_size * dims.tp, gpus_per_node)
    return seconds_per_element * COMPUTE_RATES["layers"] * gpu.peak_flops / products_per_token
