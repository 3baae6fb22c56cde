"""A small model learns to answer with a positive sentiment, from pairs of its own answers.

python benchmarks/sentiment.py MODEL PROMPTS DIR    # PROMPTS: JSON rows with an `instruction`
thresher train DIR/sentiment.yaml

The reward is the compound sentiment of VADER, from -1 to 1 (pip install vaderSentiment). The model answers 96 prompts
four times, and every two answers with different rewards are a pair. At the end of the run policy and reference answer
96 other prompts: `samples/reward`, `samples/win_rate` and `samples/kl` are what the run has gained and what it cost.
"""

from __future__ import annotations

import argparse
import json
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import yaml

from thresher.models.loading.load import load_model, load_tokenizer
from thresher.sampling.generation import GenerationSettings, generate

PROMPTS, ANSWERS, ANSWER_TOKENS = 96, 4, 20


@cache
def sentiment() -> Any:
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    return SentimentIntensityAnalyzer()


def score(_prompt: str, answer: str) -> float:
    """The judge of the run."""
    return float(sentiment().polarity_scores(answer)["compound"])


def make_pairs(model_path: str, prompts: list[str]) -> list[dict[str, str]]:
    model, tokenizer = load_model(model_path), load_tokenizer(model_path)
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        for prompt in prompts
    ]
    prompt_ids, end = [tuple(ids) for ids in texts], [tokenizer.eos_token_id]
    by_seed = [
        generate(model, prompt_ids, GenerationSettings(ANSWER_TOKENS, 1.0, seed), end) for seed in range(ANSWERS)
    ]
    rows = []
    for prompt, *answers in zip(prompts, *by_seed, strict=True):
        decoded = tokenizer.batch_decode(answers, skip_special_tokens=True)
        scored = sorted({text: score(prompt, text) for text in decoded}.items(), key=lambda item: -item[1])
        for (chosen, high), (rejected, low) in combinations(scored, 2):
            if high > low:
                rows.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("directory", type=Path)
    given = parser.parse_args()
    instructions = dict.fromkeys(row["instruction"] for row in json.loads(given.prompts.read_text()))
    prompts, directory = list(instructions)[: 2 * PROMPTS], given.directory.resolve()
    rows = make_pairs(given.model, prompts[:PROMPTS])
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    held_out = [json.dumps({"prompt": prompt}) + "\n" for prompt in prompts[PROMPTS:]]
    (directory / "held_out.jsonl").write_text("".join(held_out))
    config = {
        "pretrain": str(Path(given.model).resolve()),
        "output_dir": str(directory / "run"),
        "max_steps": 40,
        "eval_steps": 40,
        "save_steps": 40,
        "sequence_length": 256,
        "beta": 0.1,
        "actor_train": {
            "model_args": {"dtype": "fp32"},
            "data_args": {"file_name": str(directory / "pairs.jsonl")},
            "training_args": {"learning_rate": 5e-5, "lr_scheduler_type": "constant", "global_batch_size": 8},
        },
        "validation": {"split": 0.05},
        "samples": {
            "prompts_file": str(directory / "held_out.jsonl"),
            "num_prompts": PROMPTS,
            "max_new_tokens": ANSWER_TOKENS,
            "judge": f"{Path(__file__).resolve()}:score",
        },
    }
    (directory / "sentiment.yaml").write_text(yaml.safe_dump(config))
    print(f"{len(rows)} pairs of {PROMPTS} prompts in {directory}")


if __name__ == "__main__":
    main()
