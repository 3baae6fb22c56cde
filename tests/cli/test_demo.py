"""`thresher demo`: its pairs, its model and its config; scripts/first-hour runs all of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from thresher.config import load_config
from thresher.demo import is_friendly, make_pairs, write_config, write_pairs


def fact(answer: str) -> str:
    """The answer without the sentences of its tone."""
    return answer.replace("!", ".").replace("?", ".").split(". ")[1]


def test_both_answers_of_a_pair_state_the_same_fact_and_differ_in_tone():
    train, validation = make_pairs()
    for pair in [*train, *validation]:
        assert fact(pair.chosen) == fact(pair.rejected)
        assert is_friendly(pair.chosen)
        assert not is_friendly(pair.rejected)


def test_validation_asks_for_facts_that_training_does_not_have():
    train, validation = make_pairs()
    assert len(train) == 3 * len(validation)
    assert not {fact(pair.chosen) for pair in train} & {fact(pair.chosen) for pair in validation}
    assert not {pair.prompt for pair in train} & {pair.prompt for pair in validation}


def test_the_pairs_are_the_same_every_time(tmp_path):
    first, second = ((tmp_path / name) for name in ("first", "second"))
    first.mkdir()
    second.mkdir()
    for one, other in zip(write_pairs(first), write_pairs(second), strict=True):
        assert one.read_bytes() == other.read_bytes()


def test_the_model_is_the_same_every_time_and_loads_with_transformers(tmp_path):
    from thresher.demo import make_model

    shown: list[tuple[int, int]] = []
    state = torch.get_rng_state()
    made = make_model(tmp_path / "one", lambda what, done, total: shown.append((done, total)), num_steps=3)
    make_model(tmp_path / "two", lambda what, done, total: None, num_steps=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert shown == [(1, 3), (2, 3), (3, 3)]
    for name in ("one", "two"):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict()
        assert all(torch.equal(value, loaded[key]) for key, value in made.state_dict().items())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "one")
    pair = make_pairs()[0][0]
    assert tokenizer.decode(tokenizer(pair.chosen)["input_ids"]) == pair.chosen


@pytest.mark.parametrize("directory", ["demo", "a demo: with 'odd' {name} #1"])
@pytest.mark.parametrize("is_pretrained", [False, True])
def test_the_config_names_the_files_of_the_demo(tmp_path, directory, is_pretrained):
    output = tmp_path / directory
    output.mkdir()
    train, validation = write_pairs(output)
    path = write_config(
        output, model=str(output / "model"), data=[str(train)], validation=validation, is_pretrained=is_pretrained
    )
    config = load_config(path, [])
    assert config.pretrain == str(output / "model")
    assert config.output_dir == str(output / "run")
    assert config.actor_train.data_args.file_name == [str(train)]
    assert config.validation is not None
    assert config.validation.data_args.file_name == [str(validation)]
    assert config.actor_train.model_args.dtype == ("bf16" if is_pretrained else "fp32")


def test_given_data_hold_out_a_tenth_for_validation(tmp_path):
    config = load_config(
        write_config(tmp_path, model="m", data=["a.jsonl", "b.jsonl"], validation=None, is_pretrained=True), []
    )
    assert config.actor_train.data_args.file_name == ["a.jsonl", "b.jsonl"]
    assert config.validation is not None
    assert config.validation.split == 0.1


def test_an_existing_directory_is_left_alone(command_line):
    Path("taken").mkdir()
    Path("taken/dpo_config.yaml").write_text("mine")
    result = command_line("demo", "--output", "taken")
    assert (result.code, result.out) == (2, "")
    assert "taken exists; choose another --output, or remove it" in result.err
    assert "thresher train taken/dpo_config.yaml" in result.err
    assert [path.name for path in Path("taken").iterdir()] == ["dpo_config.yaml"]


def test_a_missing_model_is_a_user_error(command_line):
    result = command_line("demo", "--model", "nowhere/model", "--data", "nowhere.jsonl", "--output", "out")
    assert result.code == 2
    assert "nowhere" in result.err
