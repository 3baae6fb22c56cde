"""The commands `thresher prepare` and `thresher inspect`: output and errors."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.support.small_tokenizer import CHAT_TEMPLATE, make_tokenizer
from thresher.cli import app
from thresher.cli.inspect import render_side
from thresher.data.example import Example
from thresher.data.store.reader import ExampleStore
from thresher.errors import UserError


@pytest.fixture
def model_dir(tmp_path: Path) -> str:
    return save_model(tmp_path / "model", "<|im_end|>")


def save_model(path: Path, eos_token: str) -> str:
    """Save a tokenizer, and the `config.json` that loading it requires."""
    tokenizer = make_tokenizer(eos_token=eos_token)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(path)
    (path / "config.json").write_text('{"model_type": "llama"}')
    return str(path)


def run(*arguments: str | Path) -> str:
    """Run a command and return its output; raise the `UserError` that `main` would print."""
    result = CliRunner().invoke(app, [str(each) for each in arguments])
    if isinstance(result.exception, UserError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def terminal_output(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a stream with the messages printed to the terminal."""
    import io

    from rich.console import Console

    from thresher.cli import terminal

    stream = io.StringIO()
    monkeypatch.setattr(terminal, "console", Console(file=stream, width=200, highlight=False))
    return stream


ROWS = [
    {"prompt": "Why?", "chosen": "yes", "rejected": "no", "score": 1},
    {"prompt": "Why?", "chosen": "yes", "rejected": "yes"},
]


def test_prepare_prints_a_report_of_every_row(
    tmp_path: Path, model_dir: str, write_rows: Any, terminal_output: Any
) -> None:
    run("prepare", write_rows(*ROWS), "--model", model_dir, "--output", tmp_path / "s")
    printed = " ".join(terminal_output.getvalue().split())
    for fact in (
        "wrote 1 pairs",
        "│ rows read │ 2 │",
        "│ pairs kept │ 1 │",
        "│ dropped: identical sides │ 1 │",
        "2 rows of format prompt; ignored columns: score",
        "length: chosen is longer in",
    ):
        assert fact in printed, printed


def test_prepare_warns_of_many_dropped_pairs_and_names_what_to_set(
    tmp_path: Path, model_dir: str, write_rows: Any, terminal_output: Any
) -> None:
    name = write_rows(ROWS[0], {"prompt": "Why?", "chosen": "yes " * 50, "rejected": "no"})
    config = tmp_path / "config.yaml"
    config.write_text(f"pretrain: {model_dir}\nactor_train:\n  data_args:\n    file_name: {name}\n")
    run("prepare", name, "--model", model_dir, "--sequence-length", "40", "--output", tmp_path / "s")
    run("prepare", "--config", config, "sequence_length=40", "--output", tmp_path / "t")
    options, keys = (line for line in terminal_output.getvalue().splitlines() if line.startswith("warning: "))
    assert re.fullmatch(
        r"warning: 1 of 2 pairs \(50%\) are too long and were dropped; --sequence-length \d+ keeps 95 %, and "
        r"--truncation prompt_start or --truncation response_end truncates pairs instead",
        options,
    )
    assert keys == options.replace("--sequence-length ", "sequence_length=").replace(
        "--truncation ", "actor_train.data_args.truncation="
    )


def test_prepare_keeps_a_store_with_the_same_fingerprint_and_refuses_another(
    tmp_path: Path, model_dir: str, write_rows: Any, terminal_output: Any
) -> None:
    arguments = ["prepare", write_rows(*ROWS), "--model", model_dir, "--output", tmp_path / "s"]
    run(*arguments)
    before = (tmp_path / "s" / "manifest.json").stat().st_mtime_ns
    run(*arguments)
    assert "already contains these pairs" in terminal_output.getvalue()
    assert (tmp_path / "s" / "manifest.json").stat().st_mtime_ns == before
    with pytest.raises(UserError, match="prepare it again, or choose a different output directory"):
        run(*arguments, "--sequence-length", "64")
    run(*arguments, "--sequence-length", "64", "--overwrite")


def test_prepare_reports_leaks_from_another_store(
    tmp_path: Path, model_dir: str, write_rows: Any, terminal_output: Any
) -> None:
    name = write_rows(*ROWS)
    run("prepare", name, "--model", model_dir, "--output", tmp_path / "train")
    run("prepare", name, "--model", model_dir, "--output", tmp_path / "eval", "--against", tmp_path / "train")
    assert "leaked pairs: 1 of 1 also in" in terminal_output.getvalue()


def test_prepare_prints_the_report_even_if_no_pair_is_left(
    tmp_path: Path, model_dir: str, write_rows: Any, terminal_output: Any
) -> None:
    with pytest.raises(UserError, match="none of 1 rows became a pair"):
        run("prepare", write_rows(ROWS[1]), "--model", model_dir, "--output", tmp_path / "s")
    assert "dropped: identical sides" in terminal_output.getvalue()


def test_prepare_names_missing_arguments(tmp_path: Path, write_rows: Any) -> None:
    with pytest.raises(UserError, match="no file is named; pass FILE"):
        run("prepare", "--model", "m", "--output", tmp_path)
    with pytest.raises(UserError, match="pass --model DIR"):
        run("prepare", write_rows(*ROWS), "--output", tmp_path)
    with pytest.raises(UserError, match="pass --output DIR"):
        run("prepare", write_rows(*ROWS), "--model", "m")


def test_prepare_reads_its_settings_from_a_config(
    tmp_path: Path, model_dir: str, write_rows: Any, terminal_output: Any
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        f"pretrain: {model_dir}\nactor_train:\n  data_args:\n    file_name: {write_rows(*ROWS)}\n    template: auto\n"
    )
    run("prepare", "--config", config, "--output", tmp_path / "s", "actor_train.data_args.template=raw")
    assert ExampleStore.open(tmp_path / "s").manifest["template"] == "raw"
    with pytest.raises(UserError, match="has no section `validation`"):
        run("prepare", "--config", config, "--output", tmp_path / "v", "--validation")


@pytest.mark.parametrize(
    ("option", "value", "instead"),
    [
        ("--template", "raw", "actor_train.data_args.template=raw"),
        ("--sequence-length", "1024", "sequence_length=1024"),  # the default value, passed explicitly
        ("--truncation", "prompt_start", "actor_train.data_args.truncation=prompt_start"),
        ("--on-bad-row", "skip", "actor_train.data_args.on_bad_row=skip"),
        ("--special-tokens-in-text", "reject", "actor_train.data_args.special_tokens_in_text=reject"),
        ("--chosen-key", "good", "chosen_key=good"),
        ("--rejected-key", "bad", "rejected_key=bad"),
        ("--prompt-key", "question", "prompt_key=question"),
        ("--completion-key", "reply", "completion_key=reply"),
        ("--label-key", "good", "label_key=good"),
        ("--completions-key", "replies", "completions_key=replies"),
        ("--scores-key", "stars", "scores_key=stars"),
        ("--runtime", "ray", "runtime=ray"),
        ("--ray-address", "head:6379", "ray_address=head:6379"),
    ],
)
def test_prepare_refuses_an_option_that_the_config_would_override(
    tmp_path: Path, option: str, value: str, instead: str
) -> None:
    arguments = ["prepare", "--config", tmp_path / "c.yaml", "--output", tmp_path / "s", option, value]
    for role, extra in (("actor_train", []), ("validation", ["--validation"])):
        with pytest.raises(UserError) as caught:
            run(*arguments, *extra)
        assert str(caught.value) == (
            f"{option} has no effect with --config; leave it out and pass "
            f"{instead.replace('actor_train', role)} instead"
        )


LONG = {"prompt": "Why?", "chosen": "yes and no " * 20, "rejected": "no"}
NO_CHOSEN = {"prompt": "a", "chosn": "b", "rejected": "c"}


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        (ROWS[0], ("--truncation", "middle"), "--truncation is 'middle'; use one of drop, prompt_start, response_end"),
        (ROWS[0], ("--on-bad-row", "ignore"), "--on-bad-row is 'ignore'; use one of fail, skip, quarantine"),
        (ROWS[0], ("--sequence-length", "1"), "--sequence-length must be at least 2, got 1"),
        (ROWS[0], ("--num-processes", "0"), "--num-processes must be at least 1, got 0"),
        (
            ROWS[0],
            ("--template", "no.jinja"),
            "--template 'no.jinja': no such file; use auto, raw, one of chatml, gemma,",
        ),
        (
            ROWS[0],
            ("--chosen-key", "chosn"),
            "--chosen-key 'chosn' names no column; the columns are prompt, chosen, rejected, score; did you mean "
            "'chosen'?",
        ),
        (NO_CHOSEN, (), "Name your columns with --chosen-key chosn, or use one of these formats:"),
        (
            {"prompt": 5},
            ("--prompt-key", "prompt"),
            "Name your columns with --chosen-key COLUMN --rejected-key COLUMN, or",
        ),
        (LONG, ("--sequence-length", "16"), "1 too_long (raise --sequence-length or set --truncation)"),
        (
            {**LONG, "prompt": LONG["chosen"]},
            ("--sequence-length", "16", "--truncation", "response_end"),
            "1 too_long (raise --sequence-length or set --truncation prompt_start)",
        ),
        (
            {**ROWS[0], "chosen": "<|im_end|>"},
            ("--special-tokens-in-text", "reject"),
            "set --special-tokens-in-text keep_as_text to tokenize it as text. Fix it, or set --on-bad-row skip, which "
            "drops such rows, or --on-bad-row quarantine, which collects them in a file",
        ),
        ({}, (), "rows.jsonl' is empty; write it again, or do not name it"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_an_error_of_prepare_names_its_options(
    tmp_path: Path, model_dir: str, write_rows: Any, terminal_output: Any, row: Any, options: Any, message: str
) -> None:
    name = write_rows(*([row] if row else []))
    with pytest.raises(UserError) as caught:
        run("prepare", name, "--model", model_dir, "--output", tmp_path / "s", *options)
    assert message in str(caught.value)
    assert "data_args" not in str(caught.value)


def test_an_error_of_prepare_with_a_config_names_its_keys(tmp_path: Path, model_dir: str, write_rows: Any) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(f"pretrain: {model_dir}\nactor_train:\n  data_args:\n    file_name: {write_rows(NO_CHOSEN)}\n")
    with pytest.raises(UserError, match="Name your columns with chosen_key=chosn, or"):
        run("prepare", "--config", config, "--output", tmp_path / "s")


def test_an_error_of_the_validation_data_names_the_keys_of_its_section(
    tmp_path: Path, model_dir: str, write_rows: Any, terminal_output: Any
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        f"pretrain: {model_dir}\nactor_train:\n  data_args:\n    file_name: none.jsonl\n"
        f"validation:\n  data_args:\n    file_name: {write_rows(ROWS[0], {'prompt': 'Why?'})}\n"
    )
    arguments = ["prepare", "--config", config, "--validation", "--output", tmp_path / "s"]
    with pytest.raises(UserError, match=r"first: .*, line 2: .* set validation.data_args.on_bad_row=skip, which"):
        run(*arguments)
    run(*arguments, "validation.data_args.on_bad_row=quarantine")
    printed = terminal_output.getvalue().replace("\n", " ")
    assert "1 bad row: no value for chosen, rejected; its columns are prompt (" in printed
    assert f"the bad rows are in {tmp_path / 's.quarantine.jsonl'}" in printed
    assert (tmp_path / "s.quarantine.jsonl").is_file()


def test_prepare_refuses_an_unknown_runtime(tmp_path: Path, write_rows: Any) -> None:
    arguments = ["prepare", write_rows(*ROWS), "--model", "m", "--output", tmp_path / "s"]
    with pytest.raises(UserError, match="--runtime is 'spark'; use local or ray"):
        run(*arguments, "--runtime", "spark")
    with pytest.raises(UserError, match="--ray-address has no effect with --runtime local; pass --runtime ray"):
        run(*arguments, "--ray-address", "head:6379")


def test_prepare_refuses_validation_without_a_config(tmp_path: Path, write_rows: Any) -> None:
    with pytest.raises(UserError, match="--validation has no effect without --config; pass --config FILE"):
        run("prepare", write_rows(*ROWS), "--model", "m", "--output", tmp_path / "s", "--validation")


def test_prepare_trusts_only_the_code_of_the_model_that_the_config_trusts(
    tmp_path: Path, model_dir: str, write_rows: Any, terminal_output: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from thresher.models.loading import load

    trusted: list[bool] = []
    original = load.load_tokenizer

    def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> Any:
        trusted.append(trust_remote_code)
        return original(path)

    monkeypatch.setattr(load, "load_tokenizer", load_tokenizer)
    config = tmp_path / "config.yaml"
    config.write_text(f"pretrain: {model_dir}\nactor_train:\n  data_args:\n    file_name: {write_rows(*ROWS)}\n")
    arguments = ["prepare", "--config", config, "--output", tmp_path / "s"]
    trust = "actor_train.model_args.trust_remote_code=true"
    run(*arguments)
    run(*arguments, trust)
    other = save_model(tmp_path / "other", "<|im_end|>")
    run(*arguments, trust, "--model", other, "--overwrite")  # the config does not trust this model
    assert trusted == [False, True, False]


def test_inspect_shows_a_store_and_its_pairs(
    tmp_path: Path, model_dir: str, write_rows: Any, terminal_output: Any
) -> None:
    run("prepare", write_rows(*ROWS), "--model", model_dir, "--output", tmp_path / "s")
    assert "1 pairs in 1 shards" in run("inspect", tmp_path / "s", "--verify")
    shown = run("inspect", tmp_path / "s", "--model", model_dir, "--pair", "0")
    assert "chosen: 14 prompt tokens, 3 response tokens, 3 scored" in shown
    assert "scored tokens are between [[ and ]]" in shown  # there are no colors in a pipe
    chosen, rejected = shown.partition("rejected: 14 prompt tokens")[::2]
    assert "<|im_start|>assistant\n[[yes<|im_end|>]]" in chosen
    assert "<|im_start|>assistant\n[[no<|im_end|>]]" in rejected
    with_ids = run("inspect", tmp_path / "s", "--model", model_dir, "--pair", "0", "--ids")
    assert "[[<|im_end|>:3]]" in with_ids
    with pytest.raises(UserError, match="there is no pair 7; the store has pairs 0 to 0"):
        run("inspect", tmp_path / "s", "--pair", "7")
    with pytest.raises(UserError, match="pass --model DIR"):
        run("inspect", tmp_path / "s", "--pair", "0")


def test_inspect_refuses_another_tokenizer(
    tmp_path: Path, model_dir: str, write_rows: Any, terminal_output: Any
) -> None:
    run("prepare", write_rows(*ROWS), "--model", model_dir, "--output", tmp_path / "s")
    save_model(tmp_path / "other", "</s>")
    with pytest.raises(UserError, match="was not prepared with the tokenizer of"):
        run("inspect", tmp_path / "s", "--model", tmp_path / "other", "--pair", "0")


def test_inspect_colours_scored_tokens() -> None:
    tokenizer = make_tokenizer()
    ids = [np.asarray(tokenizer(text, add_special_tokens=False).input_ids, np.int32) for text in ("Q", "abc", "z")]
    pair = Example.pair(*ids, chosen_mask=np.asarray([True, False, True]))
    text = render_side(pair, 0, tokenizer, "green", ids=False)
    spans = [(text.plain[span.start : span.end], span.style) for span in text.spans]
    assert spans == [("Q", "dim"), ("a", "green"), ("b", "bright_black"), ("c", "green")]
    assert render_side(pair, 1, tokenizer, "red", ids=False).spans[-1].style == "red"


def test_the_commands_import_nothing_heavy() -> None:
    heavy = "{'torch', 'transformers', 'pyarrow', 'numpy'}"
    code = f"import sys, thresher.cli.prepare, thresher.cli.inspect; print({heavy} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_inspect_shows_each_response_with_its_label_or_score(
    tmp_path: Path, model_dir: str, write_rows: Any, terminal_output: Any
) -> None:
    labels = [{"prompt": "q", "completion": text, "label": text == "yes"} for text in ("yes", "no")]
    lists = {"prompt": "q", "responses": ["a", "b", "c"], "scores": [1, 2.5, 2.5]}
    run("prepare", write_rows(*labels), "--model", model_dir, "--output", tmp_path / "labels")
    run("prepare", write_rows(lists), "--model", model_dir, "--output", tmp_path / "lists")
    run("prepare", write_rows(*labels), "--model", model_dir, "--output", tmp_path / "pairs", "--join-labelled")
    assert "2 labelled responses in 1 shards" in run("inspect", tmp_path / "labels")
    assert "1 lists in 1 shards" in run("inspect", tmp_path / "lists")
    assert "1 pairs in 1 shards" in run("inspect", tmp_path / "pairs")
    for number, name in enumerate(("desirable: ", "undesirable: ")):
        shown = run("inspect", tmp_path / "labels", "--model", model_dir, "--pair", f"{number}")
        assert f"labelled response {number}: weight 1" in shown
        assert any(line.startswith(name) for line in shown.splitlines()), shown
    with pytest.raises(UserError, match="there is no labelled response 9; the store has labelled responses 0 to"):
        run("inspect", tmp_path / "labels", "--pair", "9")
    shown = run("inspect", tmp_path / "lists", "--model", model_dir, "--pair", "0")
    assert [line[: len("response 1, score 2.5")] for line in shown.splitlines() if line.startswith("response")] == [
        "response 1, score 2.5",
        "response 2, score 2.5",
        "response 3, score 1: ",
    ]
    assert "[[c<|im_end|>]]" in shown
