"""What a loss reads of the data, and data that it cannot read."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny_chat_model import quickstart_rows, save_tiny_chat_model
from thresher.builders.inputs import RunInputs
from thresher.builders.objective import refused_settings
from thresher.builders.preflight.checks import check_stores
from thresher.builders.run import build_history
from thresher.config import parse_config
from thresher.data.batching.batches import CostModel, MicroBatching
from thresher.errors import UserError

MODIFIERS = ("rpo_alpha", "ld_alpha", "length_penalty", "length_normalization")
ROWS = quickstart_rows(12)
DATA: dict[str, list[dict[str, Any]]] = {
    "pairs": ROWS,
    "margins": [{**row, "margin": 1.5} for row in ROWS],
    "weights": [{**row, "weight": 0.5} for row in ROWS],
    "leaking": [*ROWS[:3], *({**ROWS[3], "rejected": f"Answer {number}."} for number in range(2))],
    "labels": [{"prompt": row["prompt"], "completion": row["chosen"], "label": at % 2} for at, row in enumerate(ROWS)],
    "answers": [
        {"prompt": row["prompt"], "completion": row["chosen"], "is_good": at % 2} for at, row in enumerate(ROWS)
    ],
    "desirable": [{"prompt": row["prompt"], "completion": row["chosen"], "label": True} for row in ROWS],
    "undesirable": [{"prompt": row["prompt"], "completion": row["rejected"], "label": False} for row in ROWS],
    "lists": [
        {"prompt": row["prompt"], "completions": [row["chosen"], row["rejected"]], "scores": [2.0, 1.0]} for row in ROWS
    ],
}
DATA["list margins"] = [{**row, "margin": 1.5} for row in DATA["lists"]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data")
    save_tiny_chat_model(path / "model")
    for name, rows in DATA.items():
        (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def inputs_of(directory: Path, train: str, validation: str | None = None, **changes: Any) -> RunInputs:
    """The inputs of a run on these files, or on the stores prepared from them where the name ends in `.store`."""

    def data(name: str) -> dict[str, Any]:
        if name.endswith(".store"):
            prepared = inputs_of(directory, name.removesuffix(".store"), pref_loss="sft")
            prepared.open()
            return {"data_args": {"store": str(prepared.train.path)}}
        return {"data_args": {"file_name": str(directory / f"{name}.jsonl"), "template": "raw"}}

    values = {
        "output_dir": str(directory / "out"),
        "cache_dir": str(directory / "cache"),
        "pretrain": str(directory / "model"),
        "sequence_length": 512,
        "max_steps": 1,
        "actor_train": {**data(train), "training_args": {"global_batch_size": 4}},
        **({} if validation is None else {"validation": data(validation)}),
    }
    return RunInputs(parse_config(values | changes))


@pytest.mark.parametrize(
    ("train", "validation", "changes", "message"),
    [
        ("labels", "pairs", {"pref_loss": "kto"}, "has labelled responses, but the validation data in .* has pairs"),
        ("labels", "lists", {"pref_loss": "kto"}, "has labelled responses, but the validation data in .* has lists"),
        ("pairs", "labels", {"pref_loss": "sft"}, "has pairs, but the validation data in .* has labelled responses"),
        ("pairs", "lists", {"pref_loss": "aot"}, "aot compares all pairs of a step, which lists do not have"),
        ("margins", "pairs", {"pref_loss": "rpo_sq"}, "rpo_sq fits the differences of scores, and .* has none"),
        ("list margins", None, {"pref_loss": "rpo_bwd_kl"}, "rpo_bwd_kl fits the differences .* a column `margin` too"),
        *(
            (
                *data,
                {"pref_loss": loss},
                r"needs a label per response, and .*answers.jsonl was read in format answered_completions, which has "
                r"none \(it ignores is_good\); write true or false to a column `label`",
            )
            for data, loss in (
                (("answers", None), "kto"),
                (("answers", None), {"bco": 1.0, "sft": 0.1}),
                (("labels", "answers"), "apo_zero_unpaired"),
            )
        ),
        ("pairs", None, {"comparisons": "adjacent"}, "comparisons=adjacent has no effect on pairs"),
        ("labels", None, {"pref_loss": "kto", "comparisons": "adjacent"}, "comparisons=adjacent has no effect on kto"),
        (
            "lists",
            None,
            {"pref_loss": "plackett_luce", "comparisons": "adjacent"},
            "comparisons=adjacent has no effect on plackett_luce",
        ),
        (
            "labels",
            "labels",
            {"pref_loss": "kto", "metric_for_best_model": "eval/rewards/accuracies"},
            "is eval/rewards/accuracies, which is not measured with kto; use eval/loss, eval/rewards/margins",
        ),
        (
            "pairs",
            "pairs",
            {"pref_loss": "bradley_terry", "metric_for_best_model": "eval/sft_loss"},
            "is eval/sft_loss, which is not measured with bradley_terry; use eval/loss, eval/rewards/accuracies",
        ),
    ],
)
def test_a_loss_that_cannot_read_the_data_is_refused(directory, train, validation, changes, message):
    with pytest.raises(UserError, match=message):
        inputs_of(directory, train, validation, **changes).open()


@pytest.mark.parametrize(
    ("train", "validation", "changes"),
    [
        ("pairs", "lists", {}),
        ("lists", "pairs", {"comparisons": "adjacent"}),
        ("lists", "lists", {"pref_loss": {"plackett_luce": 1.0, "sft": 0.1}, "comparisons": "best_worst"}),
        ("list margins", None, {}),
        ("answers", None, {"pref_loss": "sft"}),
        ("labels", "labels", {"pref_loss": "kto", "metric_for_best_model": "eval/rewards/margins"}),
    ],
)
def test_a_loss_on_pairs_reads_lists_too(directory, train, validation, changes):
    inputs_of(directory, train, validation, **changes).open()


@pytest.mark.parametrize("loss", ["kto", "sft"])
@pytest.mark.parametrize("label", ["desirable", "undesirable"])
def test_labels_of_one_kind_are_a_warning_for_a_loss_on_labels(directory, caplog, loss, label):
    inputs_of(directory, label, pref_loss=loss).open()
    assert (f"every response is labelled {label}" in caplog.text) == (loss == "kto")


def checked_stores(directory: Path, train: str, validation: str, **changes: Any) -> list[str]:
    """The problems that the check before a run finds."""
    return [str(each) for each in check_stores(inputs_of(directory, train, validation, **changes))]


def test_the_check_before_a_run_finds_a_store_that_the_loss_cannot_read(directory):
    (problem,) = checked_stores(directory, "pairs.store", "labels", pref_loss="kto")
    assert "kto reads single responses with a label" in problem
    (problem,) = checked_stores(directory, "labels", "pairs.store", pref_loss="kto")
    assert "kto reads single responses with a label" in problem
    (problem,) = checked_stores(directory, "pairs.store", "labels.store", pref_loss="sft")
    assert "but the validation data in" in problem


@pytest.mark.parametrize("train", ["lists", "lists.store"])
def test_the_check_before_a_run_accepts_lists_validated_on_pairs(directory, train):
    assert checked_stores(directory, train, "pairs.store", comparisons="adjacent") == []


@pytest.mark.parametrize(
    ("data", "loss", "refused"),
    [
        ("pairs", "sigmoid", {"desirable_weight"}),
        ("pairs", "apo_zero", {"desirable_weight", "label_smoothing", "length_normalization", "length_penalty"}),
        ("labels", "kto", {*MODIFIERS, "pref_loss", "label_smoothing"}),
        ("labels", "bco", {*MODIFIERS, "pref_loss", "label_smoothing", "desirable_weight"}),
        ("lists", "sigmoid", {"desirable_weight"}),
        ("lists", "plackett_luce", {*MODIFIERS, "label_smoothing", "desirable_weight"}),
        (
            "pairs",
            "bradley_terry",
            {*MODIFIERS, "pref_loss", "label_smoothing", "desirable_weight", "beta"},
        ),
    ],
)
def test_the_settings_that_health_rules_must_not_advise(directory: Path, data, loss, refused) -> None:
    inputs = inputs_of(directory, data, pref_loss=loss)
    inputs.open()
    advised = {"beta", "label_smoothing", "desirable_weight", "pref_loss", *MODIFIERS}
    assert refused_settings(inputs.config, inputs.train) & advised == refused
    for name in ("rpo_alpha", "ld_alpha", "length_penalty"):
        with pytest.raises(UserError) if name in refused else nullcontext():
            inputs_of(directory, data, pref_loss=loss, **{name: 0.5}).open()


@pytest.mark.parametrize("value", [True, False])
def test_a_reward_model_has_no_log_probabilities_to_normalize(directory: Path, value) -> None:
    with pytest.raises(UserError, match="length_normalization has no effect on bradley_terry"):
        inputs_of(directory, "pairs", pref_loss="bradley_terry", length_normalization=value).open()


def test_training_pairs_that_the_validation_set_has_too_are_counted(directory: Path, caplog) -> None:
    inputs_of(directory, "pairs", "leaking").open()
    assert "of 12 training pairs, 3 are also in the validation set and 4 share a prompt with it" in caplog.text


@pytest.mark.parametrize(
    ("data", "changes", "loss"),
    [
        ("pairs", {}, math.log(2)),
        ("weights", {}, None),
        ("margins", {}, None),
        ("labels", {"pref_loss": "kto"}, 0.5),
        ("pairs", {"pref_loss": "simpo"}, None),
    ],
)
def test_the_loss_of_the_first_step_is_expected_only_where_the_data_cannot_change_it(directory, data, changes, loss):
    inputs = inputs_of(directory, data, **changes)
    inputs.open()
    assert build_history(inputs).initial_loss == (None if loss is None else pytest.approx(loss))


@pytest.mark.parametrize(("max_tokens", "max_pairs"), [(64, 2), (None, 2), (64, None)])
def test_steps_of_kto_are_split_under_any_limit(directory: Path, max_tokens, max_pairs) -> None:
    inputs = inputs_of(directory, "labels", pref_loss="kto")
    inputs.open()
    costs = CostModel(0.0, shares_prompt=False)
    batching = MicroBatching(inputs.train_examples.lengths, costs, max_tokens=max_tokens, max_pairs=max_pairs)
    visits = inputs.plan.pair_ids(0)
    found = batching.split_ranks(visits, range(2), 2)
    assert sorted(int(each) for batches in found for batch in batches for each in batch) == sorted(visits.tolist())
