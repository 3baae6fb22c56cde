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
    "alignment-handbook/mistral-7b-sft-constitutional-ai": "Mistral-7B",
    "alignment-handbook/zephyr-7b-sft-full": "Mistral-7B",
    "allenai/Llama-3.1-Tulu-3-70B-SFT": "Llama-3-70B",
    "allenai/Llama-3.1-Tulu-3-8B-SFT": "Llama-3-8B",
    "allenai/OLMo-2-1124-13B-SFT": "OLMo-2-13B",
    "allenai/OLMo-2-1124-7B-SFT": "OLMo-2-7B",
    "allenai/OLMo-3.2-Hybrid-7B-Instruct-SFT": "Olmo-Hybrid-7B",
    "allenai/Olmo-3-7B-Instruct-SFT": "Olmo-3-7B",
    "allenai/Olmo-3-7B-Think-SFT": "Olmo-3-7B",
    "google/gemma-2-9b-it": "Gemma-2-9B",
    "HuggingFaceH4/starchat2-15b-sft-v0.1": "StarCoder2-15B",
    "HuggingFaceH4/zephyr-7b-gemma-sft-v0.1": "Gemma-7B",
    "HuggingFaceTB/SmolLM3-3B-checkpoints": "SmolLM3-3B",
    "loubnabnl/smollm2-1.7B-sft": "SmolLM2-1.7B",
    "meta-llama/Meta-Llama-3-8B-Instruct": "Llama-3-8B",
    "mistral-community/Mixtral-8x22B-v0.1": "Mixtral-8x22B",
    "mistralai/Mistral-7B-Instruct-v0.2": "Mistral-7B",
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-Base-BF16": "Nemotron-3-Nano-30B-A3B",
    "OpenRLHF/Llama-3-8b-sft-mixture": "Llama-3-8B",
    "princeton-nlp/Llama-3-Base-8B-SFT": "Llama-3-8B",
    "Qwen/Qwen2-0.5B-Instruct": "Qwen2.5-0.5B",
    "Qwen/Qwen2.5-7B-Instruct": "Qwen2.5-7B",
    "Qwen/Qwen3-30B-A3B-Instruct-2507": "Qwen3-30B-A3B",
}


class Split(NamedTuple):
    """A split of a dataset on the Hub, or a file that a recipe says how to make."""

    rows: int | None  # large numbers as the Hub rounds them; None if all recipes state a count
    columns: str  # what its rows look like: a key of ROWS


# `train` where no split is named
SPLITS = {
    "allenai/Dolci-Instruct-DPO-fixed": Split(None, "conversations"),
    "allenai/dpo-yolo1-200k-gpt4.1-2w2s-maxdelta_reje-426124-rm-gemma3-kwd-ftd-ch-ftd-topic-ftd-dedup5-lbc100": Split(
        None, "sides alone"
    ),
    "allenai/llama-3.1-tulu-3-70b-preference-mixture": Split(337_000, "conversations"),
    "allenai/llama-3.1-tulu-3-8b-preference-mixture": Split(273_000, "conversations"),
    "allenai/olmo-2-1124-13b-preference-mix": Split(378_000, "conversations"),
    "allenai/olmo-2-1124-7b-preference-mix": Split(367_000, "conversations"),
    "allenai/olmo-3-pref-mix-deltas-complement2-DECON-tpc-kwd-ch-dedup5-lbc100-grafmix-unbal": Split(
        None, "sides alone"
    ),
    **{
        f"allenai/{kind}_{judge}_pairs_filtered_lbc100": Split(None, "sides alone")
        for kind in ("paraphrase", "related-query", "repeat", "self-talk")
        for judge in ("gpt", "qwen")
    },
    "argilla/distilabel-capybara-dpo-7k-binarized": Split(7_563, "turns"),
    "argilla/dpo-mix-7k:test": Split(750, "sides alone"),
    "argilla/dpo-mix-7k:train": Split(6_750, "sides alone"),
    "argilla/ultrafeedback-binarized-preferences-cleaned-kto": Split(None, "labelled texts"),
    "data/helpsteer3-train.jsonl": Split(38_000, "turns and texts"),
    "data/helpsteer3-validation.jsonl": Split(2_000, "turns and texts"),
    "HuggingFaceH4/cai-conversation-harmless:test_prefs": Split(1_156, "conversations"),
    "HuggingFaceH4/cai-conversation-harmless:train_prefs": Split(21_268, "conversations"),
    "HuggingFaceH4/orca_dpo_pairs:test_prefs": Split(500, "conversations with system"),
    "HuggingFaceH4/orca_dpo_pairs:train_prefs": Split(12_359, "conversations with system"),
    "HuggingFaceH4/ultrafeedback_binarized:test_prefs": Split(2_000, "scored conversations"),
    "HuggingFaceH4/ultrafeedback_binarized:train_prefs": Split(61_135, "scored conversations"),
    "HuggingFaceTB/smoltalk2:llama_3.1_tulu_3_8b_preference_mixture_no_think:Preference": Split(
        230_501, "conversations without thinking"
    ),
    "HuggingFaceTB/smoltalk2:tulu_3_8b_pref_mix_Qwen3_32B_Qwen3_0.6B_think:Preference": Split(
        216_385, "conversations with thinking"
    ),
    "mlabonne/orpo-dpo-mix-40k": Split(44_245, "conversations"),
    "OpenRLHF/preference_dataset_mixture2_and_safe_pku": Split(555_000, "sides alone"),
    "princeton-nlp/gemma2-ultrafeedback-armorm:test": Split(1_940, "conversations of several"),
    "princeton-nlp/gemma2-ultrafeedback-armorm:train": Split(59_600, "conversations of several"),
    "princeton-nlp/llama3-ultrafeedback-armorm:test": Split(1_960, "conversations of several"),
    "princeton-nlp/llama3-ultrafeedback-armorm:train": Split(59_900, "conversations of several"),
    "princeton-nlp/llama3-ultrafeedback:test": Split(1_960, "conversations of several"),
    "princeton-nlp/llama3-ultrafeedback:train": Split(59_900, "conversations of several"),
    "princeton-nlp/mistral-instruct-ultrafeedback:test": Split(2_990, "conversations of several"),
    "princeton-nlp/mistral-instruct-ultrafeedback:train": Split(59_700, "conversations of several"),
    "scottgeng00/olmo-3-preference-mix-deltas_reasoning-yolo_scottmix-DECON": Split(None, "sides alone"),
    "shareAI/DPO-zh-en-emoji": Split(2_449, "questions"),
    "trl-lib/kto-mix-14k": Split(13_500, "labelled messages"),
}


def _turn(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def _sides(prompt: str, good: str, bad: str, *before: dict[str, str]) -> dict[str, Any]:
    """Two whole conversations, with turns before the prompt."""
    sides = {"chosen": good, "rejected": bad}
    return {name: [*before, _turn("user", prompt), _turn("assistant", text)] for name, text in sides.items()}


def _conversations(prompt: str, good: str, bad: str) -> dict[str, Any]:
    """Two whole conversations, and the prompt as text."""
    return {"prompt": prompt, **_sides(prompt, good, bad)}


# a row from a prompt, a good and a bad answer, with the columns of the published dataset
ROWS: dict[str, Callable[[str, str, str], dict[str, Any]]] = {
    "sides alone": _sides,
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
    "conversations with system": lambda prompt, good, bad: {
        "prompt": prompt,
        **_sides(prompt, good, bad, _turn("system", "You are a helpful assistant.")),
    },
    "conversations without thinking": lambda *texts: {
        **_conversations(*texts),
        "chat_template_kwargs": {"enable_thinking": False},
        "source": "made",
    },
    "conversations with thinking": lambda prompt, good, bad: {
        **_conversations(prompt, f"<think>yes</think>{good}", f"<think>no</think>{bad}"),
        "chat_template_kwargs": {"enable_thinking": True},
        "source": "made",
    },
    "turns": lambda *texts: {**_sides(*texts), "prompt": [_turn("user", texts[0])], "source": "made"},
    "turns and texts": lambda prompt, good, bad: {"prompt": [_turn("user", prompt)], "chosen": good, "rejected": bad},
    "questions": lambda prompt, good, bad: {"question": prompt, "answer_zh": good, "answer_en": bad},
    "labelled texts": lambda prompt, good, bad: {
        "prompt": prompt,
        "completion": good if len(prompt) % 2 else bad,
        "label": bool(len(prompt) % 2),
        "model": "made",
    },
    "labelled messages": lambda prompt, good, bad: {
        "prompt": [_turn("user", prompt)],
        "completion": [_turn("assistant", good if len(prompt) % 2 else bad)],
        "label": bool(len(prompt) % 2),
    },
}


def model_name(recipe: Recipe) -> str:
    """The name of the model without its revision."""
    return recipe.model.partition("@")[0]


def without_hub(recipe: Recipe, directory: Path) -> list[str]:
    """Overrides that replace model and tokenizer: by the same config without weights, and a small tokenizer."""
    name = model_name(recipe)
    model = save_config(directory / name.replace("/", "--"), ARCHITECTURES[name])
    has_tokenizer = "tokenizer_name_or_path" in recipe.values["actor_train"].get("model_args", {})
    return [f"pretrain={model}", *([f"actor_train.model_args.tokenizer_name_or_path={model}"] if has_tokenizer else [])]


def num_examples(config: DPOConfig) -> int:
    """Examples that an epoch visits; rows that a run would drop count too."""
    data = config.actor_train.data_args
    kept = 1.0 - ((config.validation and config.validation.split) or 0.0)
    if not data.sources:
        return round(sum(_rows(name) for name in data.file_name) * kept)
    return sum(
        source.count or round(sum(_rows(name) for name in source.file_name) * kept * (source.weight or 1.0))
        for source in data.sources.values()
    )


def split_of(name: str) -> Split:
    """Look up a file name of a config."""
    return SPLITS[name.removeprefix("hf://")]


def _rows(name: str) -> int:
    rows = split_of(name).rows
    assert rows is not None, f"{name} has no number of rows; add it to SPLITS"
    return rows


def estimate_recipe(recipe: Recipe, directory: Path) -> Estimate:
    """Plan a recipe on its GPUs, with as many examples as its dataset has, each as long as it may be."""
    config = load_config(DIRECTORY / f"{recipe.name}.yaml", without_hub(recipe, directory))
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
    memory = f"{estimate.peak / GIGA:.0f} GB per GPU"
    return f"{memory}, {shown} hours with full-length examples by `thresher plan`; not run on a GPU"


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        for recipe in all_recipes():
            expected = expected_of(estimate_recipe(recipe, Path(directory)))
            text = re.sub(r"^# expected: .*\n", "", recipe.text, flags=re.MULTILINE)
            text = re.sub(r"^(# hardware: .*\n)", rf"\1# expected: {expected}\n", text, flags=re.MULTILINE)
            (DIRECTORY / f"{recipe.name}.yaml").write_text(text, encoding="utf-8")
            print(f"{recipe.name}: {expected}")


if __name__ == "__main__":
    main()
