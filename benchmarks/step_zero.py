"""Measure how far policy and reference, the same model, differ in step 1: docs/internals/step-0-noise.md.

python -m benchmarks.step_zero                         # on CPUs, 4 workers at most
python -m benchmarks.step_zero --models DIR            # also with a model on disk, such as stories260K
The distance is the mean over all response tokens of |policy - reference|, in nats, the largest of all models.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")

from transformers import AutoConfig

from tests.support.engines.parity import save_model
from tests.support.engines.rank_pool import RankPool
from tests.support.engines.step_zero import (
    Distance,
    StepZero,
    long_pairs,
    measure,
    save_wide_model,
    with_trained_vectors,
)

AXES: list[tuple[str, int, dict[str, int]]] = [
    ("one process", 1, {}),
    ("dp_shard 2", 2, {}),
    ("dp_replicate 2", 2, {"dp_replicate": 2}),
    ("pp 2", 2, {"pp_size": 2}),
    ("cp 2", 2, {"cp_size": 2}),
    ("tp 2", 2, {"tp_size": 2}),
    ("dp_shard 4", 4, {}),
    ("dp_replicate 4", 4, {"dp_replicate": 4}),
    ("pp 4", 4, {"pp_size": 4}),
    ("cp 4", 4, {"cp_size": 4}),
    ("tp 4", 4, {"tp_size": 4}),
    ("cp 2 x tp 2", 4, {"cp_size": 2, "tp_size": 2}),
    ("pp 2 x tp 2", 4, {"pp_size": 2, "tp_size": 2}),
]
# the base of an adapter and a concurrent reference see the policy's micro-batches, a cache has blocks of its own
REFERENCES: list[tuple[str, int | None]] = [
    ("adapter", None),
    ("concurrent", None),
    ("precomputed", 4096),
    ("precomputed", None),
    ("one process", None),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", type=Path, default=[], help="further model directories")
    parser.add_argument("--dtypes", nargs="+", default=["bf16", "fp32"])
    parser.add_argument("--axes", nargs="+", default=[text for text, *_ in AXES], help="rows of the table")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        models = [
            with_trained_vectors(save_model(directory / "narrow", "llama", seed=0)),
            save_wide_model(directory / "wide"),
            *given.models,
        ]
        for dtype in given.dtypes:
            print(f"\n{dtype}\n| axes of the policy | " + " | ".join(_title(*each) for each in REFERENCES) + " |")
            print("|---" * (len(REFERENCES) + 1) + "|")
            pools: dict[int, RankPool] = {}
            for text, size, axes in AXES:
                if text not in given.axes:
                    continue
                if size > 1 and size not in pools:
                    pools[size] = RankPool(size)
                cells = [_cell(pools.get(size), each, axes, dtype, models, directory) for each in REFERENCES]
                print(f"| {text} | " + " | ".join(cells) + " |", flush=True)
            for pool in pools.values():
                pool.close()


def _title(reference: str, tokens: int | None) -> str:
    return reference if tokens is None else f"{reference}, {tokens} tokens per batch"


def _cell(
    pool: RankPool | None,
    of: tuple[str, int | None],
    axes: dict[str, int],
    dtype: str,
    models: list[Path],
    directory: Path,
) -> str:
    """The largest mean distance of all models, and in brackets the largest margin per token."""
    run: Callable[..., list[Distance | None]] = pool.run if pool else lambda function, *rest: [function(*rest)]
    reference, tokens = of
    step = StepZero(reference, axes, {"lora_rank": 4} if reference == "adapter" else {}, dtype=dtype, tokens=tokens)
    count = 30 if tokens is None else 100
    found = []
    for model in models:
        pairs = long_pairs(AutoConfig.from_pretrained(model).vocab_size, count)
        with tempfile.TemporaryDirectory(dir=directory) as cache:
            found += [each for each in run(measure, step, model, Path(cache), pairs) if each is not None]
    mean, margin = max(each.mean for each in found), max(each.margin for each in found)
    return "0" if not mean else f"{mean:.1e} ({margin:.1e})"


if __name__ == "__main__":
    main()
