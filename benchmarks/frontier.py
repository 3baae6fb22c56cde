"""Reward against KL over beta and seeds: pairs that a small model makes itself, a sweep over them, and the picture.

python benchmarks/frontier.py pairs MODEL DIR         # answers of the model, scored by VADER; writes DIR/frontier.yaml
thresher sweep DIR/frontier.yaml beta=3,1,0.2,0.05 seed=0,1,2
python benchmarks/frontier.py measure MODEL DIR       # reward, win rate and KL of every trial on held-out prompts
python benchmarks/frontier.py picture DIR FILE.svg    # with vl-convert

The reward is the compound sentiment of VADER (pip install vaderSentiment). Prompts are the first words of stories that
the model tells; those of the pairs and of the measurement are different.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from thresher.checkpoint.manager import latest
from thresher.checkpoint.tensor_files import ShardedReader
from thresher.report.charts import Series, path_chart
from thresher.sweep.results import mean_and_interval

PROMPTS, HELD_OUT, ANSWERS, PROMPT_TOKENS, ANSWER_TOKENS = 512, 256, 4, 24, 48


@cache
def sentiment() -> Any:
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    return SentimentIntensityAnalyzer()


def reward(text: str) -> float:
    """The sentiment of a text, from 0 to 1."""
    return (float(sentiment().polarity_scores(text)["compound"]) + 1) / 2


@torch.no_grad()
def continue_texts(model: PreTrainedModel, ids: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Sample continuations at temperature 1 of prompts that all have the same length."""
    mask = torch.ones_like(ids)
    options: dict[str, Any] = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0}
    made = model.generate(ids, attention_mask=mask, max_new_tokens=num_tokens, pad_token_id=0, **options)
    return made[:, ids.shape[1] :]


def make_prompts(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, count: int, seed: int) -> torch.Tensor:
    """The first tokens of stories, each one once."""
    torch.manual_seed(seed)
    found: dict[tuple[int, ...], None] = {}
    start = torch.full((256, 1), tokenizer.bos_token_id)
    while len(found) < count:
        made = continue_texts(model, start, PROMPT_TOKENS - 1)
        found |= dict.fromkeys(tuple(each) for each in torch.cat([start, made], dim=1).tolist() if 2 not in each)
    return torch.tensor(list(found)[:count])


@torch.no_grad()
def logps(model: PreTrainedModel, ids: torch.Tensor, answers: torch.Tensor, ended: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of answers, summed up to their end."""
    logits = model(torch.cat([ids, answers], dim=1)).logits[:, ids.shape[1] - 1 : -1].float()
    each = logits.log_softmax(-1).gather(-1, answers[..., None])[..., 0]
    return (each * ~ended).sum(1)


def after_end(answers: torch.Tensor, eos: int) -> torch.Tensor:
    """The positions after the first end-of-text token of each answer."""
    is_eos = (answers == eos).int()
    return (is_eos.cumsum(1) - is_eos) > 0


def make_pairs(model_dir: str, directory: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(model_dir), AutoTokenizer.from_pretrained(model_dir)
    prompts = make_prompts(model, tokenizer, PROMPTS, seed=0)
    answers = [continue_texts(model, prompts, ANSWER_TOKENS) for _ in range(ANSWERS)]
    rows = []
    for index, prompt in enumerate(tokenizer.batch_decode(prompts, skip_special_tokens=True)):
        texts = tokenizer.batch_decode([each[index] for each in answers], skip_special_tokens=True)
        scored = sorted({text: reward(prompt + text) for text in texts}.items(), key=lambda item: -item[1])
        for (chosen, high), (rejected, low) in combinations(scored, 2):
            if high > low:
                rows.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "pretrain": str(Path(model_dir).resolve()),
        "output_dir": str(directory.resolve() / "runs"),
        "max_steps": 100,
        "eval_steps": 100,
        "save_steps": 100,
        "sequence_length": 128,
        "actor_train": {
            "model_args": {"dtype": "fp32"},
            "data_args": {"file_name": str(directory.resolve() / "pairs.jsonl"), "template": "raw"},
            "training_args": {"learning_rate": 1e-4, "global_batch_size": 32, "weight_decay": 0.0},
        },
        "validation": {"split": 0.05},
    }
    (directory / "frontier.yaml").write_text(yaml.safe_dump(config))
    print(f"{len(rows)} pairs of {PROMPTS} prompts in {directory}")


def measure(model_dir: str, directory: Path) -> None:
    """Write the reward, the win rate and the KL of each trial; both models answer the same held-out prompts."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    reference, policy = (AutoModelForCausalLM.from_pretrained(model_dir) for _ in range(2))
    prompts = make_prompts(reference, tokenizer, HELD_OUT, seed=1)
    heads = tokenizer.batch_decode(prompts, skip_special_tokens=True)

    def rewards(answers: torch.Tensor) -> list[float]:
        texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
        return [reward(head + text) for head, text in zip(heads, texts, strict=True)]

    base = rewards(continue_texts(reference, prompts, ANSWER_TOKENS))
    trials = json.loads((directory / "runs" / "sweep.json").read_text())["trials"]
    measured = []
    for trial in trials:
        checkpoint = latest(directory / "runs" / trial["name"] / "checkpoints")
        if checkpoint is None:
            print(f"{trial['name']} has not been trained")
            continue
        with ShardedReader(checkpoint, "weights") as tensors:
            policy.load_state_dict({name: tensors.read(name) for name in tensors}, strict=False)
        torch.manual_seed(int(trial["values"]["seed"]))
        answers = continue_texts(policy, prompts, ANSWER_TOKENS)
        ended, ours = after_end(answers, tokenizer.eos_token_id), rewards(answers)
        ratio = logps(policy, prompts, answers, ended) - logps(reference, prompts, answers, ended)
        wins = [(mine > other) + 0.5 * (mine == other) for mine, other in zip(ours, base, strict=True)]
        figures = {"reward": sum(ours) / len(ours), "win_rate": sum(wins) / len(wins), "kl": ratio.mean().item()}
        measured.append(trial["values"] | figures)
        print(trial["name"], {name: round(value, 3) for name, value in figures.items()})
    result = {"reference_reward": sum(base) / len(base), "trials": measured}
    (directory / "measured.json").write_text(json.dumps(result, indent=1))
    for beta, rows in by_beta(measured).items():
        cells = (mean_and_interval([row[name] for row in rows]) for name in ("reward", "win_rate", "kl"))
        print(f"beta {beta}: " + ", ".join(f"{mean:.3f} ± {width:.3f}" for mean, width in cells))
    print(f"reward of the reference: {result['reference_reward']:.3f}")


def by_beta(measured: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    grouped: dict[str, list[dict[str, Any]]] = {}
    for row in measured:
        grouped.setdefault(row["beta"], []).append(row)
    return grouped


def draw(directory: Path, output: Path) -> None:
    """Draw reward against KL with the chart of `thresher report`: a point per trial, the mean with its intervals."""
    import vl_convert

    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
    from figure import follow_theme

    measured = json.loads((directory / "measured.json").read_text())["trials"]
    series, crosses = [], []
    for beta, rows in by_beta(measured).items():
        (kl, kl_width), (gain, gain_width) = (
            mean_and_interval([row[name] for row in rows]) for name in ("kl", "reward")
        )
        columns: dict[str, list[float | None]] = {"x": [kl], "y": [gain], "step": [0.0], "is_end": [1.0]}
        series.append(Series({"run": f"beta {beta}"}, columns))
        crosses.append({"x": kl, "y": gain, "x1": kl - kl_width, "x2": kl + kl_width})
        crosses[-1] |= {"y1": gain - gain_width, "y2": gain + gain_width}
    spec = path_chart(series, x="KL to the reference (nats)", y="reward", color="run", is_percent=False)
    bar = {"data": {"values": crosses}, "mark": {"type": "rule", "opacity": 0.6}}
    for low, high, fixed in (("x1", "x2", "y"), ("y1", "y2", "x")):
        axis = low[0]
        encoding = {
            axis: {"field": low, "type": "quantitative"},
            f"{axis}2": {"field": high},
            fixed: {"field": fixed, "type": "quantitative"},
        }
        spec["layer"].append({**bar, "encoding": encoding})
    data = {"values": [row for each in series for row in each.rows()]}
    output.write_text(follow_theme(vl_convert.vegalite_to_svg({**spec, "width": 480, "data": data})))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("pairs", "measure"):
        command = commands.add_parser(name)
        command.add_argument("model")
        command.add_argument("directory", type=Path)
    picture = commands.add_parser("picture")
    picture.add_argument("directory", type=Path)
    picture.add_argument("output", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.command == "pairs":
        make_pairs(given.model, given.directory)
    elif given.command == "measure":
        measure(given.model, given.directory)
    else:
        draw(given.directory, given.output)


if __name__ == "__main__":
    main()
