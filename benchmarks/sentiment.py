"""A small model learns to answer with a positive sentiment, from pairs of its own answers.

python benchmarks/sentiment.py make MODEL PROMPTS DIR    # PROMPTS: JSON rows with an `instruction`
thresher train DIR/sentiment.yaml
python benchmarks/sentiment.py figures DIR

The reward is the compound sentiment of VADER, from -1 to 1 (pip install vaderSentiment). The model answers 96 prompts
four times, and every two answers with clearly different rewards are a pair. At the end of the run policy and reference
answer these prompts and 96 others: reward, win rate and KL are what the run has gained and what it cost.
"""

from __future__ import annotations

import argparse
import json
from functools import cache
from itertools import combinations
from pathlib import Path
from statistics import mean
from typing import Any

import yaml

from thresher.models.loading.load import load_model, load_tokenizer
from thresher.observability.log_files import SAMPLES
from thresher.sampling.generation import GenerationSettings, generate
from thresher.sampling.judges import wilson_interval

PROMPTS, ANSWERS, ANSWER_TOKENS = 96, 4, 20
LEAST_DIFFERENCE = 0.3  # of the rewards of a pair: smaller ones are mostly noise


@cache
def sentiment() -> Any:
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    return SentimentIntensityAnalyzer()


def score(_prompt: str, answer: str) -> float:
    """The judge of the run."""
    return float(sentiment().polarity_scores(answer)["compound"])


def make_pairs(model_path: str, prompts: list[str]) -> list[dict[str, Any]]:
    """Answer each prompt several times and pair answers of clearly different rewards.

    Pairs are tokens: text would get an EOS where an answer was only cut.
    """
    model, tokenizer = load_model(model_path), load_tokenizer(model_path)
    prompt_ids = [
        tuple(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=True
            )["input_ids"]
        )
        for prompt in prompts
    ]
    end = [tokenizer.eos_token_id]
    by_seed = [
        generate(model, prompt_ids, GenerationSettings(ANSWER_TOKENS, 1.0, seed), end) for seed in range(ANSWERS)
    ]
    rows = []
    for prompt, *answers in zip(prompt_ids, *by_seed, strict=True):
        rewards = {ids: score("", tokenizer.decode(ids, skip_special_tokens=True)) for ids in answers}
        for one, other in combinations(rewards, 2):
            if abs(rewards[one] - rewards[other]) > LEAST_DIFFERENCE:
                chosen, rejected = sorted((one, other), key=rewards.__getitem__, reverse=True)
                rows.append(_row(prompt, "chosen", chosen) | _row(prompt, "rejected", rejected))
    return rows


def _row(prompt: tuple[int, ...], side: str, answer: tuple[int, ...]) -> dict[str, list[int]]:
    return {f"{side}_input_ids": [*prompt, *answer], f"{side}_loss_mask": [0] * len(prompt) + [1] * len(answer)}


def make(model: str, prompts_file: Path, directory: Path) -> None:
    instructions = dict.fromkeys(row["instruction"] for row in json.loads(prompts_file.read_text()))
    prompts = list(instructions)[: 2 * PROMPTS]
    rows = make_pairs(model, prompts[:PROMPTS])
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    config = {
        "pretrain": str(Path(model).resolve()),
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
            "prompts_file": str(directory / "prompts.jsonl"),
            "num_prompts": 2 * PROMPTS,
            "max_new_tokens": ANSWER_TOKENS,
            "judge": f"{Path(__file__).resolve()}:score",
        },
    }
    (directory / "sentiment.yaml").write_text(yaml.safe_dump(config))
    print(f"{len(rows)} pairs of {PROMPTS} prompts in {directory}")


def print_figures(directory: Path) -> None:
    """Print the figures of the last evaluation, of the prompts of the pairs and of the others."""
    rows = [json.loads(line) for line in (directory / "run" / "logs" / SAMPLES).read_text().splitlines()]
    last = [row for row in rows if row["step"] == rows[-1]["step"]]
    for name, part in (("prompts of the pairs", last[:PROMPTS]), ("other prompts", last[PROMPTS:])):
        wins = [row["win"] for row in part]
        low, high = wilson_interval(wins)
        means = {key: mean(row[key] for row in part) for key in ("reference_reward", "policy_reward", "log_ratio")}
        print(
            f"{name}: reward {means['reference_reward']:.3f} -> {means['policy_reward']:.3f}, win rate "
            f"{mean(wins):.3f} ({low:.3f} to {high:.3f}), KL {means['log_ratio']:.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, arguments in (("make", ["model", "prompts", "directory"]), ("figures", ["directory"])):
        command = commands.add_parser(name)
        for argument in arguments:
            command.add_argument(argument)
    given = parser.parse_args()
    directory = Path(given.directory).resolve()
    if given.command == "make":
        make(given.model, Path(given.prompts), directory)
    else:
        print_figures(directory)


if __name__ == "__main__":
    main()
