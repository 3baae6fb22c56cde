"""Measure what sharing prompts saves in models with state: rows and seconds of a step, `shared` against `padded`.

python -m benchmarks.hybrid_layouts                       # all families, about 10 minutes on one idle core
python -m benchmarks.hybrid_layouts --families lfm2 --steps 3

Both layouts take turns on the same pairs, with one thread: forward and backward of every logp, no optimizer. Seconds
are processor time, which other processes on the machine affect little. The pairs have ragged lengths, so `padded` has
padding besides the second copy of each prompt.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.utils.logging import set_verbosity_error

from tests.support.stateful_models import STATEFUL
from tests.support.tiny_models import batch_of, pair_of
from thresher.data.example import ExampleBatch
from thresher.models.layouts import Layout, PackedLayout, PaddedLayout
from thresher.models.loading.load import disable_dropout
from thresher.models.logps import PairModel

# prompts about twice as long as responses
PROMPTS, RESPONSES = (192, 320), (64, 160)
# the shapes of the tests, with heads as wide as in published models
_DELTA = {
    "head_dim": 64,
    "linear_num_value_heads": 8,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
_MAMBA = {"mamba_n_heads": 16, "mamba_d_head": 32, "mamba_d_state": 64, "mamba_chunk_size": 64}
_WIDER: dict[str, dict[str, object]] = {
    **dict.fromkeys(("qwen3_5_text", "qwen3_next", "olmo_hybrid"), _DELTA),
    "nemotron_h": {"mamba_num_heads": 16, "mamba_head_dim": 32, "ssm_state_size": 64, "chunk_size": 64},
    "granitemoehybrid": _MAMBA,
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 512},
    "lfm2": {},
}


def config_of(family: str) -> PreTrainedConfig:
    values = STATEFUL[family].to_dict() | {
        "hidden_size": 256,
        "intermediate_size": 768,
        "max_position_embeddings": 1024,
    }
    return AutoConfig.for_model(**values | _WIDER[family])


def made_up_pairs(count: int) -> ExampleBatch:
    rng = np.random.default_rng(0)
    return batch_of(
        *(
            pair_of(*(int(rng.integers(*bounds)) for bounds in (PROMPTS, RESPONSES, RESPONSES)), seed=seed)
            for seed in range(count)
        )
    )


def seconds_of_step(model: torch.nn.Module, layout: Layout, batch: ExampleBatch) -> float:
    # attention of both layouts is set here, outside of the time
    model.set_attn_implementation("sdpa")
    pair_model = PairModel.for_layout(model, torch.float32, layout)
    model.zero_grad()
    start = time.process_time()
    scored = pair_model.score(layout.collate(batch))
    sum(side.values.sum() for side in scored.sides).backward()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=list(_WIDER), choices=list(_WIDER))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=4)
    args = parser.parse_args()
    set_verbosity_error()
    torch.set_num_threads(1)
    batch = made_up_pairs(args.pairs)
    layouts = (PackedLayout(shares_prompt=True), PaddedLayout(pad_id=0))
    shared_rows, padded_rows = (layout.collate(batch).model_inputs["input_ids"].numel() for layout in layouts)
    rows = padded_rows / shared_rows
    print(f"rows: {shared_rows:,} shared, {padded_rows:,} padded, ratio {rows:.2f}")
    print("| family | seconds, shared | seconds, padded | ratio of times | of the ratio of rows |")
    print("|---|---:|---:|---:|---:|")
    for family in args.families:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config_of(family)).train()
        disable_dropout(model)
        times: dict[str, list[float]] = {layout.name: [] for layout in layouts}
        for step in range(args.steps + 1):
            for layout in layouts if step % 2 else reversed(layouts):
                seconds = seconds_of_step(model, layout, batch)
                if step:  # the first one warms up
                    times[layout.name].append(seconds)
        shared, padded = (statistics.median(times[layout.name]) for layout in layouts)
        ratio = statistics.median(b / a for a, b in zip(times["shared"], times["padded"], strict=True))
        print(f"| {family} | {shared:.2f} | {padded:.2f} | {ratio:.2f} | {ratio / rows:.2f} |", flush=True)


if __name__ == "__main__":
    main()
