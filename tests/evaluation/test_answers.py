"""Files of answers for AlpacaEval and Arena-Hard: formats, and the text of policy and reference."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from thresher.builders.export import export_checkpoint
from thresher.checkpoint.manager import list_checkpoints

PROMPTS = ["w5 w6 ", "w9 ", "w9 w7 w11"]  # the template is plain text: with and without a space at the end
ALPACA_EVAL = [
    {"instruction": PROMPTS[0], "output": "an answer", "generator": "text_davinci_003", "dataset": "helpful_base"},
    {"instruction": PROMPTS[1], "dataset": "koala"},
    {"instruction": PROMPTS[1]},  # the same question again
    {"instruction": PROMPTS[2], "dataset": "koala"},
]
ARENA_HARD = [
    {"uid": f"{number:x}", "category": "hard_prompt", "subcategory": "coding", "prompt": prompt}
    for number, prompt in enumerate(PROMPTS)
]


@pytest.fixture(scope="module")
def greedy(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], str]:
    """The oracle: transformers' greedy answer of the exported policy, or of the reference's directory."""
    exported = tmp_path_factory.mktemp("exported") / "policy"
    export_checkpoint(list_checkpoints(finished / "checkpoints")[-1], exported)
    models = {
        side: AutoModelForCausalLM.from_pretrained(path)
        for side, path in (("policy", exported), ("reference", finished.parent / "reference"))
    }
    tokenizer = AutoTokenizer.from_pretrained(exported)

    def answer(side: str, prompt: str) -> str:
        ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            output = models[side].generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
        return str(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True))

    return answer


def test_alpaca_evals_questions_are_answered_in_its_format(
    command_line: Callable[..., Any], finished: Path, greedy: Callable[[str, str], str], tmp_path: Path
) -> None:
    (tmp_path / "alpaca_eval.json").write_text(json.dumps(ALPACA_EVAL))
    options = ("-o", "answers", "--max-new-tokens", 6, "--name", "mine", "--batch-size", 3)
    result = command_line("answers", finished, "alpaca_eval.json", *options)
    assert result.code == 0, result.err
    assert result.out.splitlines() == ["answers/mine-reference.json", "answers/mine.json"]
    for side, name in (("policy", "mine"), ("reference", "mine-reference")):
        assert json.loads((tmp_path / "answers" / f"{name}.json").read_text()) == [
            {"instruction": row["instruction"], "output": greedy(side, row["instruction"]), "generator": name}
            | {key: value for key, value in row.items() if key == "dataset"}
            for row in ALPACA_EVAL
        ]
    repeated = command_line("answers", finished, "alpaca_eval.json", *options)
    assert repeated.code == 2
    assert "answers/mine-reference.json exists; remove it" in repeated.err


def test_arena_hards_questions_are_answered_in_its_format(
    command_line: Callable[..., Any], finished: Path, greedy: Callable[[str, str], str], tmp_path: Path
) -> None:
    (tmp_path / "question.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ARENA_HARD))
    checkpoint = list_checkpoints(finished / "checkpoints")[-1]
    result = command_line(
        "answers", checkpoint, "question.jsonl", "-o", "model_answer", "--max-new-tokens", 6, "--limit", 2
    )
    assert result.code == 0, result.err
    for side, name in (("policy", checkpoint.name), ("reference", f"{checkpoint.name}-reference")):
        lines = [json.loads(line) for line in (tmp_path / "model_answer" / f"{name}.jsonl").read_text().splitlines()]
        assert [line["uid"] for line in lines] == ["0", "1"]
        assert len({line["ans_id"] for line in lines}) == 2
        for line, question in zip(lines, ARENA_HARD, strict=False):
            assert set(line) == {"uid", "ans_id", "model", "messages", "tstamp", "metadata"}
            assert line["model"] == name  # Arena-Hard takes the name of the file
            assert line["messages"] == [
                {"role": "user", "content": question["prompt"]},
                {"role": "assistant", "content": {"answer": greedy(side, question["prompt"])}},
            ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "q.json has no questions"),
        ('[{"prompt": "p"}]', "question 1 of q.json has no text instruction; give AlpacaEval's"),
        ('{"uid": "1", "prompt": "p"}\n{"prompt": "p"}\n', "question 2 of q.json has no text prompt and uid"),
        ("{", "the questions q.json cannot be read: "),
    ],
)
def test_questions_of_another_format_are_a_user_error(
    command_line: Callable[..., Any], tmp_path: Path, content: str, message: str
) -> None:
    (tmp_path / "q.json").write_text(content)
    result = command_line("answers", "no-run", "q.json", "-o", "answers")
    assert result.code == 2
    assert message in result.err


def test_a_name_that_is_a_path_is_a_user_error(command_line: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "q.json").write_text(json.dumps(ALPACA_EVAL))
    result = command_line("answers", "no-run", "q.json", "-o", "answers", "--name", "../mine")
    assert result.code == 2
    assert "--name ../mine cannot name a file" in result.err
