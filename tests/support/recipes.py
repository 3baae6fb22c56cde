"""What plans of recipes need and a clone does not have: which architecture a model has, and the rows of a dataset.

`scripts/update-recipes` runs this file, which writes the line `expected` of every recipe.
"""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.support.published_models import save_config
from thresher.builders.hardware import GIGA, find_gpu
from thresher.config import DPOConfig, load_config
from thresher.plan.estimate import Estimate, KnownRun
from thresher.plan.step import Cluster
from thresher.recipes.catalog import DIRECTORY, Recipe, all_recipes

# by the model's name on the Hub, without a revision; vocabularies may differ by a few added tokens
ARCHITECTURES = {
    "alignment-handbook/zephyr-7b-sft-full": "Mistral-7B",
    "allenai/Llama-3.1-Tulu-3-8B-SFT": "Llama-3-8B",
    "Qwen/Qwen2-0.5B-Instruct": "Qwen2.5-0.5B",
    "meta-llama/Meta-Llama-3-8B-Instruct": "Llama-3-8B",
}


class Split(NamedTuple):
    """A split of a dataset on the Hub."""

    rows: int
    columns: str  # what its rows look like: a key of ROWS


# `train` where no split is named
SPLITS = {
    "HuggingFaceH4/ultrafeedback_binarized:train_prefs": Split(61_135, "scored conversations"),
    "HuggingFaceH4/ultrafeedback_binarized:test_prefs": Split(2_000, "scored conversations"),
    "allenai/llama-3.1-tulu-3-8b-preference-mixture": Split(272_898, "conversations"),
    "trl-lib/kto-mix-14k": Split(13_500, "labelled messages"),
    "princeton-nlp/llama3-ultrafeedback-armorm:train": Split(59_876, "conversations of several"),
    "princeton-nlp/llama3-ultrafeedback-armorm:test": Split(1_961, "conversations of several"),
}


def _turn(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def _conversations(prompt: str, good: str, bad: str) -> dict[str, Any]:
    """Two whole conversations, and the prompt as text."""
    sides = {"chosen": good, "rejected": bad}
    return {"prompt": prompt, **{k: [_turn("user", prompt), _turn("assistant", v)] for k, v in sides.items()}}


# a row from a prompt, a good and a bad answer, with the columns of the published dataset
ROWS: dict[str, Callable[[str, str, str], dict[str, Any]]] = {
    "conversations": lambda *texts: {"id": "a", "source": "made", **_conversations(*texts)},
    "scored conversations": lambda *texts: {
        **_conversations(*texts),
        "prompt_id": "a",
        "messages": _conversations(*texts)["chosen"],
        "score_chosen": 8.0,
        "score_rejected": 4.5,
    },
    "conversations of several": lambda *texts: {
        **_conversations(*texts),
        "prompt_id": "a",
        "all_generated_responses": [*texts[1:], texts[2]],
        "all_rm_scores": [0.2, 0.1, 0.1],
    },
    "labelled messages": lambda prompt, good, bad: {
        "prompt": [_turn("user", prompt)],
        "completion": [_turn("assistant", good if len(prompt) % 2 else bad)],
        "label": bool(len(prompt) % 2),
    },
}


def load_without_hub(recipe: Recipe, directory: Path) -> DPOConfig:
    """Load a recipe whose model is replaced by one in the directory with the same config, and without weights."""
    name = recipe.model.partition("@")[0]
    model = save_config(directory / name.replace("/", "--"), ARCHITECTURES[name])
    return load_config(DIRECTORY / f"{recipe.name}.yaml", [f"pretrain={model}"])


def num_examples(config: DPOConfig) -> int:
    """Examples that an epoch visits; rows that a run would drop count too."""
    data = config.actor_train.data_args
    if not data.sources:
        count = sum(_rows(name, data.max_samples) for name in data.file_name)
    else:
        count = 0
        for source in data.sources.values():
            names = [f"{name}:{source.split}" if source.split else name for name in source.file_name]
            rows = sum(_rows(name, source.max_samples or data.max_samples) for name in names)
            count += source.count or round(rows * (1.0 if source.weight is None else source.weight))
    held_out = 0.0 if config.validation is None else config.validation.split or 0.0
    return round(count * (1 - held_out))


def split_of(name: str) -> Split:
    """Look up a file name of a config, without its revision."""
    return SPLITS[re.sub(r"@[^:]*", "", name.removeprefix("hf://"))]


def _rows(name: str, most: int | None) -> int:
    rows = split_of(name).rows
    return min(rows, most or rows)


def estimate_recipe(recipe: Recipe, directory: Path) -> Estimate:
    """Plan a recipe on its GPUs, with as many examples as its dataset has, each as long as it may be."""
    config = load_without_hub(recipe, directory)
    known = KnownRun(config)
    assumed = known.pairs(config.pairs_per_step)
    lengths = np.resize(assumed.lengths, (num_examples(config), assumed.lengths.shape[1]))
    cluster = Cluster(find_gpu(recipe.gpu), recipe.gpus_per_node, recipe.num_gpus)
    return Estimate(config, cluster, KnownRun(config, replace(assumed, lengths=lengths))).with_chosen_budget()


def expected_of(estimate: Estimate) -> str:
    """The line `expected` of a recipe, with two digits or whole hours, rounded up."""
    hours = estimate.hours
    step = 1 if hours >= 10 else 0.1
    shown = f"{math.ceil(hours / step) * step:,.{0 if step == 1 else 1}f}"
    return f"{estimate.peak / GIGA:.0f} GB per GPU, at most {shown} hours by `thresher plan`; not run on a GPU"


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        for recipe in all_recipes():
            expected = expected_of(estimate_recipe(recipe, Path(directory)))
            text = re.sub(r"^# expected: .*$", f"# expected: {expected}", recipe.text, flags=re.MULTILINE)
            (DIRECTORY / f"{recipe.name}.yaml").write_text(text, encoding="utf-8")
            print(f"{recipe.name}: {expected}")


if __name__ == "__main__":
    main()
