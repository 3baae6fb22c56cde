"""Runs on a mixture of sources and several validation sets: what they train on, measure, cache and refuse."""

from __future__ import annotations

import copy
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.compared_runs import merge, metric_log
from tests.support.small_runs import assert_same_weights, open_small_inputs, save_small_model, write_rows
from thresher import DPOConfig, DPOTrainer
from thresher.cli.submit import resolve_paths
from thresher.config import parse_config
from thresher.data.store.joined import JoinedStores
from thresher.errors import CheckpointError, UserError
from thresher.pipeline import DPOPipeline

# what follows eval/ in the metrics of a run with the sets all, odd and even
EVALUATED = {"all", "odd", "even", "loss", "rewards", "logps", "lengths", "kl", "sft_loss"}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("mixture")
    save_small_model(directory / "policy", 0)
    save_small_model(directory / "reference", 1)
    for seed, (name, count) in enumerate({"a": 20, "b": 12, "v1": 7, "v2": 4}.items()):
        write_rows(directory / f"{name}.jsonl", count, seed)
    rows = [json.loads(line) for line in (directory / "v1.jsonl").read_text().splitlines()]
    for number, row in enumerate(rows):
        row["kind"] = "odd" if number % 2 else "even"
        row["level"] = (number * 3) % 7
    (directory / "v1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def config_of(files: Path, output: Path, **changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "pretrain": str(files / "policy"),
        "output_dir": str(output),
        "cache_dir": str(output.parent / "cache"),
        "num_train_epochs": 2,
        "sequence_length": 64,
        "track_with": [],
        "health": "off",
        "actor_train": {
            "model_args": {"dtype": "fp32"},
            "data_args": {
                "template": "raw",
                "sources": {
                    "first": {"file_name": str(files / "a.jsonl"), "weight": 0.5},
                    "second": {"file_name": str(files / "b.jsonl"), "count": 18},
                },
            },
            "training_args": {"learning_rate": 0.01, "global_batch_size": 7, "adam_epsilon": 1e-3},
        },
        "reference": {"model_args": {"model_name_or_path": str(files / "reference")}},
    }
    return merge(base, changes)


def trained(values: dict[str, Any]) -> list[dict[str, Any]]:
    DPOPipeline(parse_config(values)).run()
    return metric_log(Path(values["output_dir"]))


def test_metrics_of_each_source_add_up_to_those_of_the_step(files, tmp_path):
    values = config_of(files, tmp_path / "run")
    log = trained(values)
    _, inputs = open_small_inputs(values)
    assert len(log) == inputs.plan.num_steps == 8
    assert isinstance(inputs.train, JoinedStores)
    for step, record in enumerate(log):
        of_each = Counter(inputs.train.part_of(inputs.plan.pair_ids(step)).tolist())
        for name in ("loss", "rewards/accuracies", "rewards/margins", "rewards/chosen", "rewards/rejected"):
            total = sum(record[f"train/{source}/{name}"] * of_each[at] for at, source in enumerate(("first", "second")))
            assert total / sum(of_each.values()) == pytest.approx(record[name], abs=1e-9)


def test_another_weight_prepares_nothing_again_and_misses_no_cached_reference(files, tmp_path, caplog):
    trained(config_of(files, tmp_path / "one"))
    again = config_of(files, tmp_path / "two")
    again["actor_train"]["data_args"]["sources"]["first"]["weight"] = 1.5
    again["actor_train"]["data_args"]["sources"]["second"] = {"file_name": str(files / "b.jsonl"), "weight": 0.25}
    with caplog.at_level("INFO"):
        trained(again)
    assert "reference: 20 pairs from the cache" not in caplog.text  # 20 of the first, 3 or 6 of the second
    found = next(message for message in caplog.messages if message.startswith("reference: "))
    num_cached, num_scored = (int(word) for word in found.split() if word.isdigit())
    assert num_cached + num_scored == 26
    assert num_cached >= 6 + 20 - 1
    assert num_scored <= 1
    stores = sorted(path.name for path in (tmp_path / "one" / "data").iterdir())
    assert stores == sorted(path.name for path in (tmp_path / "two" / "data").iterdir())


def test_a_changed_weight_is_an_error_that_names_both(files, tmp_path):
    values = config_of(files, tmp_path / "run", max_steps=4, save_steps=2)
    trained(values)
    changed = copy.deepcopy(values)
    changed["max_steps"] = 6
    changed["actor_train"]["data_args"]["sources"]["first"]["weight"] = 0.75
    with pytest.raises((UserError, CheckpointError), match=r"weight.*0\.5.*0\.75|weight.*0\.75.*0\.5"):
        trained(changed)
    changed["resume_from_checkpoint"] = "auto"
    with pytest.raises(
        CheckpointError, match=r"mixture is first 10 of 20, second 18 of 12.* is first 15 of 20, second"
    ):
        trained(changed)


def test_a_stopped_run_resumes_bitwise(files, tmp_path):
    constant = {"actor_train": {"training_args": {"lr_scheduler_type": "constant"}}}
    whole = config_of(files, tmp_path / "whole", save_steps=3, **constant)
    trained(whole)
    parts = config_of(files, tmp_path / "parts", save_steps=3, max_steps=3, **constant)
    trained(parts)
    parts.pop("max_steps")
    trained(merge(parts, {"resume_from_checkpoint": "auto"}))
    assert_same_weights(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.parametrize("loss", ["sigmoid", "aot", "kto"])
def test_metrics_of_sets_are_those_of_separate_runs(files, tmp_path, loss):
    changes: dict[str, Any] = {"pref_loss": loss, "num_train_epochs": 1}
    if loss == "kto":
        for name in ("a", "b", "v1", "v2"):
            rows = [json.loads(line) for line in (files / f"{name}.jsonl").read_text().splitlines()]
            labelled = [
                {"prompt": row["prompt"], "completion": row["chosen"], "label": number % 3 != 0}
                for number, row in enumerate(rows)
            ]
            (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in labelled))
        directory = tmp_path
        for source, name in (("first", "a"), ("second", "b")):
            changes = merge(
                changes,
                {"actor_train": {"data_args": {"sources": {source: {"file_name": f"{tmp_path}/{name}.jsonl"}}}}},
            )
    else:
        directory = files
    both = {
        "sets": {"one": {"file_name": f"{directory}/v1.jsonl"}, "two": {"file_name": f"{directory}/v2.jsonl"}},
        "data_args": {"template": "raw"},
    }
    log = trained(config_of(files, tmp_path / "both", **changes, validation=both))
    together = next(record for record in log if "eval/loss" in record)
    sizes = {"one": 7, "two": 4}
    for number, name in ((1, "one"), (2, "two")):
        alone = {"data_args": {"file_name": f"{directory}/v{number}.jsonl", "template": "raw"}}
        of_one = trained(config_of(files, tmp_path / name, **changes, validation=alone))
        record = next(each for each in of_one if "eval/loss" in each)
        measured = {key.removeprefix("eval/") for key in record if key.startswith("eval/")}
        assert measured == {key.removeprefix(f"eval/{name}/") for key in together if key.startswith(f"eval/{name}/")}
        for key in measured:
            assert together[f"eval/{name}/{key}"] == record[f"eval/{key}"], key
    mean = sum(together[f"eval/{name}/loss"] * size for name, size in sizes.items()) / 11
    assert together["eval/loss"] == pytest.approx(mean, abs=1e-9)


def test_metrics_of_subsets_are_those_of_sets_with_their_rows(files, tmp_path):
    rows = [json.loads(line) for line in (files / "v1.jsonl").read_text().splitlines()]
    for kind in ("odd", "even"):
        text = "".join(json.dumps(row) + "\n" for row in rows if row["kind"] == kind)
        (tmp_path / f"{kind}.jsonl").write_text(text)
    sets = {
        "all": {"file_name": str(files / "v1.jsonl"), "columns": {"subset": "kind"}},
        "odd": {"file_name": str(tmp_path / "odd.jsonl")},
        "even": {"file_name": str(tmp_path / "even.jsonl")},
    }
    values = config_of(
        files,
        tmp_path / "run",
        validation={"sets": sets, "data_args": {"template": "raw"}},
        metric_for_best_model="eval/all/odd/rewards/accuracies",
    )
    record = next(each for each in trained(values) if "eval/loss" in each)
    for kind in ("odd", "even"):
        for key in ("loss", "rewards/accuracies", "rewards/margins", "rewards/chosen", "rewards/rejected"):
            assert record[f"eval/all/{kind}/{key}"] == pytest.approx(record[f"eval/{kind}/{key}"], abs=1e-6)
    assert [key for key in record if key.startswith("eval/") and key.split("/")[1] not in EVALUATED] == []
    pairs = [json.loads(line) for line in (tmp_path / "run" / "logs" / "eval_pairs.jsonl").read_text().splitlines()]
    assert Counter(pairs[-1]["sets"]) == {"all": 7, "odd": 3, "even": 4}
    assert pairs[-1]["pairs"] == [*range(7), *range(3), *range(4)]


def test_the_best_checkpoint_by_the_metric_of_one_set(files, tmp_path):
    from thresher.builders.checkpoints import build_checkpoint_manager
    from thresher.checkpoint.manager import best

    sets = {"one": {"file_name": str(files / "v1.jsonl")}, "two": {"file_name": str(files / "v2.jsonl")}}
    values = config_of(
        files,
        tmp_path / "run",
        validation={"sets": sets, "data_args": {"template": "raw"}},
        metric_for_best_model="eval/two/rewards/margins",
        eval_steps=2,
        save_steps=2,
        save_total_limit=1,
    )
    config = parse_config(values)
    assert config.greater_is_better
    log = trained(values)
    margins = {record["step"]: record["eval/two/rewards/margins"] for record in log if "eval/loss" in record}
    root = build_checkpoint_manager(config).root
    kept = best(root, "eval/two/rewards/margins", higher_is_better=True)
    assert kept is not None
    assert int(kept.name.rpartition("-")[2]) == max(margins, key=margins.__getitem__)
    with pytest.raises(UserError, match=r"metric_for_best_model is eval/three/loss, of an unknown set; .*eval/two/"):
        parse_config(merge(values, {"metric_for_best_model": "eval/three/loss"}))
    with pytest.raises(
        UserError, match=r"metric_for_best_model is eval/two/four/loss, which is not measured .*eval/two/"
    ):
        open_small_inputs(merge(values, {"metric_for_best_model": "eval/two/four/loss"}))


def test_a_subset_of_a_loss_that_compares_all_pairs_has_no_loss_to_choose_by(files, tmp_path):
    sets = {"all": {"file_name": str(files / "v1.jsonl"), "columns": {"subset": "kind"}}}
    values = config_of(files, tmp_path / "run", validation={"sets": sets, "data_args": {"template": "raw"}})
    values |= {"pref_loss": "aot", "metric_for_best_model": "eval/all/odd/rewards/accuracies"}
    open_small_inputs(values)
    with pytest.raises(UserError, match="metric_for_best_model is eval/all/odd/loss, which is not measured with aot"):
        open_small_inputs(values | {"metric_for_best_model": "eval/all/odd/loss"})


def test_another_order_on_resume_is_an_error_that_names_both(files, tmp_path):
    values = config_of(files, tmp_path / "run", num_train_epochs=None, max_steps=2, save_steps=2)
    values["actor_train"]["data_args"] = {"template": "raw", "file_name": str(files / "a.jsonl"), "order": "length"}
    trained(values)
    del values["actor_train"]["data_args"]["order"]
    with pytest.raises(CheckpointError, match="its mixture is in order of length, this run's is none"):
        trained(values | {"max_steps": 4, "resume_from_checkpoint": "auto"})


def test_names_of_subsets_are_those_that_trackers_accept(files, tmp_path):
    rows = [json.loads(line) for line in (files / "v1.jsonl").read_text().splitlines()]
    names = ["a,b: 50%", 3, "chat (easy)/x", "plain", "plain", "plain", "plain"]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row | {"kind": name}) + "\n" for row, name in zip(rows, names, strict=True)))
    sets = {"s": {"file_name": str(path), "columns": {"subset": "kind"}}}
    _, inputs = open_small_inputs(
        config_of(files, tmp_path / "run", validation={"sets": sets, "data_args": {"template": "raw"}})
    )
    assert inputs.validation.parts["s"].subsets == ["3", "a_b: 50_", "chat _easy__x", "plain"]


@pytest.mark.parametrize("order", ["length", "-length", "column", "-column", "margin"])
def test_a_curriculum_sorts_each_epoch(files, tmp_path, order):
    rows = [json.loads(line) for line in (files / "v1.jsonl").read_text().splitlines()]
    for row in rows:
        row["margin"] = float(row["level"])
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = {"order": "level"} if "column" in order else {}
    sources = {"only": {"file_name": str(path), "weight": 2, "columns": columns}}
    values = config_of(files, tmp_path / "run", max_steps=4, num_train_epochs=None)
    values["actor_train"]["data_args"] = {"template": "raw", "sources": sources, "order": order}
    _config, inputs = open_small_inputs(values)
    first, second = (
        np.concatenate([inputs.plan.pair_ids(step) for step in range(2 * epoch, 2 * epoch + 2)]) for epoch in range(2)
    )
    for ids in (first, second):
        keys = [
            len(example.prompt_ids) + sum(len(each.ids) for each in example.responses)
            if "length" in order
            else rows[at]["level"]
            for at, example in zip(ids.tolist(), inputs.train.read(ids).pairs, strict=True)
        ]
        assert keys == sorted(keys, reverse=order.startswith("-"))
        assert Counter(ids.tolist()) == dict.fromkeys(range(7), 2)


def test_held_out_pairs_of_each_source_are_a_set_of_its_name(files, tmp_path):
    values = config_of(files, tmp_path / "run", validation={"split": 0.2}, num_train_epochs=1)
    record = next(each for each in trained(values) if "eval/loss" in each)
    _, inputs = open_small_inputs(values)
    assert {len(inputs.train.parts[name]) + len(inputs.validation.parts[name]) for name in ("first",)} == {20}
    assert {"eval/first/loss", "eval/second/loss"} <= record.keys()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sources": {"a b": {"file_name": "x"}}}, "the name 'a b' is part of the names of metrics"),
        ({"sources": {"rewards": {"file_name": "x"}}}, "the name 'rewards' is part of the names of metrics"),
        ({"sources": {"a": {"weight": 1}}}, "it needs either file_name or store"),
        ({"sources": {"a": {"file_name": "x", "weight": 1, "count": 2}}}, "weight and count are both set; keep one"),
        ({"sources": {"a": {"file_name": "x", "weigth": 1}}}, "sources.a.weigth: unknown key; did you mean `weight`?"),
        ({"sources": {"a": {"file_name": "x"}}, "file_name": "y"}, "file_name has no effect with sources"),
        ({"order": "sequential", "file_name": "y"}, "order: sequential has no effect without several sources"),
        ({"sources": [{"file_name": "x"}]}, "a list needs a different `name` in each entry"),
        ({"sources": {"a": {"store": "x"}}, "template": "raw"}, "template has no effect on stores"),
        ({"file_name": "y", "order": "column"}, "order: column needs sources"),
        ({"sources": {"a": {"file_name": "x"}}, "order": "column"}, "a.columns.order is absent, and order is column"),
        ({"sources": {"a": {"file_name": "x", "columns": {"order": "n"}}}}, "has no effect without order: column"),
        ({"sources": {"a": {"file_name": "x", "columns": {"subset": "n"}}}}, "without validation.split"),
    ],
)
def test_what_a_mixture_cannot_be_is_rejected(changes, message):
    with pytest.raises(UserError) as error:
        parse_config({"actor_train": {"data_args": changes}})
    assert message in str(error.value)


def test_sources_may_be_a_list_with_names():
    listed = parse_config({"actor_train": {"data_args": {"sources": [{"name": "a", "file_name": "x", "weight": 2}]}}})
    named = parse_config({"actor_train": {"data_args": {"sources": {"a": {"file_name": "x", "weight": 2}}}}})
    assert listed == named
    numbered = parse_config({"actor_train": {"data_args": {"sources": {1: {"file_name": "x"}}}}})
    assert list(numbered.actor_train.data_args.sources) == ["1"]


def test_a_split_of_a_plain_file_is_an_error(files, tmp_path):
    values = config_of(files, tmp_path / "run")
    values["actor_train"]["data_args"]["sources"]["first"]["split"] = "train"
    with pytest.raises(UserError, match=r"a\.jsonl is a file or names a split itself, so split=train has no effect"):
        open_small_inputs(values)


def test_paths_of_sources_and_sets_are_absolute_in_a_job(files, tmp_path, monkeypatch):
    monkeypatch.chdir(files)
    values = config_of(files, tmp_path / "run", validation={"sets": {"v": {"file_name": "v1.jsonl"}}})
    values["actor_train"]["data_args"]["sources"]["first"]["file_name"] = "a.jsonl"
    sent, resolved = resolve_paths(parse_config(values), has_uploads=False)
    assert sent["actor_train"]["data_args"]["sources"]["first"]["file_name"] == [str(files / "a.jsonl")]
    assert sent["validation"]["sets"]["v"]["file_name"] == [str(files / "v1.jsonl")]
    assert f"validation.sets.v.file_name={files / 'v1.jsonl'}" in resolved


def test_another_dataset_is_evaluated_by_a_trainer_with_sources(files, tmp_path):
    values = config_of(files, tmp_path / "run", num_train_epochs=1)
    config = DPOConfig(**values)
    rows = [json.loads(line) for line in (files / "v1.jsonl").read_text().splitlines()]
    metrics = DPOTrainer(args=config).evaluate(rows)
    assert metrics["eval_loss"] > 0
