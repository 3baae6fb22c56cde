"""How `thresher import` handles mixtures and several evaluation sets of each trainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.imported import FILES, entry, imported, lost, value
from thresher.builders.data_parts import data_parts, data_settings
from thresher.config import parse_config
from thresher.importers.convert import Conversion

SOURCES = "actor_train.data_args.sources"
SETS = "validation.sets"
EVAL_FILES = "validation.data_args.file_name"


def outcome(done: Conversion, key: str) -> tuple[str, str]:
    found = entry(done, key)
    return found.outcome, "; ".join(found.notes)


def test_a_mixer_of_the_handbook_has_shares_of_the_training_splits_only(tmp_path: Path) -> None:
    done = imported(
        tmp_path,
        "model_name_or_path: m\neval_strategy: epoch\n"
        "dataset_mixer: {org/a.v1: 1.0, org/b: 0.5, org/c: 2.0, org/d: 0.0}\ndataset_splits: [train_x, test_x]\n",
    )
    assert value(done, SOURCES) == {
        "a-v1": {"file_name": "hf://org/a.v1:train_x"},
        "b": {"file_name": "hf://org/b:train_x", "weight": 0.5},
        "c": {"file_name": "hf://org/c:train_x", "weight": 2.0},
    }
    assert value(done, EVAL_FILES) == [f"hf://org/{name}:test_x" for name in ("a.v1", "b", "c", "d")]
    given, note = outcome(done, "dataset_mixer")
    assert given == "different meaning"
    assert "takes the first rows of a dataset in every epoch" in note
    assert "hf://org/d:train_x is left out" in note
    assert not lost(done)


def test_two_splits_of_a_dataset_are_two_sources(tmp_path: Path) -> None:
    done = imported(
        tmp_path,
        """
model_name_or_path: m
eval_strategy: epoch
dataset_mixture:
  datasets:
    - {id: org/prefs, config: Preference, split: no_think, weight: 0.5}
    - {id: org/prefs, config: Preference, split: think, weight: 0.25}
    - {id: org/prefs, config: Preference, split: think, weight: 1}
    - {id: org/loss, weight: 1}
  test_split_size: 0.01
""",
    )
    assert value(done, SOURCES) == {
        "prefs": {"file_name": "hf://org/prefs:no_think:Preference", "weight": 0.5},
        "prefs-think": {"file_name": "hf://org/prefs:think:Preference", "weight": 0.25},
        "prefs-2": {"file_name": "hf://org/prefs:think:Preference"},
        "loss-2": {"file_name": "hf://org/loss"},  # train/loss is the metric of all sources
    }
    assert value(done, "validation.split") == 0.01
    assert "takes the same rows of a dataset in every epoch" in outcome(done, "dataset_mixture")[1]
    assert not lost(done)


def test_whole_and_repeated_datasets_mean_the_same(tmp_path: Path) -> None:
    done = imported(tmp_path, "model_name_or_path: m\nmax_seq_length: 64\nmixer_list: [org/a, '2.0', org/b, '1.0']\n")
    assert value(done, SOURCES) == {
        "a": {"file_name": "hf://org/a", "weight": 2.0},
        "b": {"file_name": "hf://org/b"},
    }
    assert outcome(done, "mixer_list") == ("translated", "")


def test_fractions_of_trl_depend_on_numbers_of_rows(tmp_path: Path) -> None:
    datasets = "datasets: [{path: org/a, fraction: 0.7}, {path: json, data_files: b.jsonl, fraction: 0.3}]"
    done = imported(tmp_path, f"model_name_or_path: m\n{datasets}\n")
    assert value(done, SOURCES) == {"a": {"file_name": "hf://org/a"}, "b": {"file_name": "b.jsonl"}}
    assert lost(done) == {"datasets"}
    assert "set `weight`" in outcome(done, "datasets")[1]
    done = imported(tmp_path, "model_name_or_path: m\ndatasets: [{path: org/a, fraction: 0.7}]\n")
    assert value(done, FILES) == "hf://org/a", "a fraction of one dataset is all of the mixture"
    assert not lost(done)


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ("path: json, data_files: {train: a.jsonl, test: b.jsonl}", "a.jsonl"),
        ("path: json, data_files: [a.jsonl, b.jsonl]", ["a.jsonl", "b.jsonl"]),
        ("path: org/a, data_files: x/a.parquet", "hf://datasets/org/a/x/a.parquet"),
    ],
)
def test_files_of_a_dataset_are_named(tmp_path: Path, part: str, expected: object) -> None:
    assert value(imported(tmp_path, f"model_name_or_path: m\ndatasets: [{{{part}}}]\n"), FILES) == expected


def test_a_list_of_open_instruct_has_counts_shares_and_splits(tmp_path: Path) -> None:
    script = (
        "accelerate launch open_instruct/dpo_tune_cache.py --model_name_or_path m --max_train_samples 900 "
        "--mixer_list org/a-7.5 125000 org/b 0.5 rows.jsonl 300 --mixer_list_splits train prefs train\n"
    )
    done = imported(tmp_path, script, "train.sh")
    assert value(done, SOURCES) == {
        "a-7-5": {"file_name": "hf://org/a-7.5", "count": 900},
        "b": {"file_name": "hf://org/b:prefs", "weight": 0.5, "max_samples": 900},
        "rows": {"file_name": "rows.jsonl", "count": 300},
    }
    assert outcome(done, "max_train_samples")[0] == "different meaning"
    assert not lost(done)
    done = imported(
        tmp_path,
        "model_name_or_path: m\nmax_seq_length: 64\ndataset_mixer_list: [org/a, '1.0']\n"
        "dataset_mixer_eval_list: [org/a, '50', org/b, '1.0']\ndataset_mixer_eval_list_splits: [test]\n",
    )
    assert value(done, FILES) == "hf://org/a"
    assert value(done, SETS) == {
        "a": {"file_name": "hf://org/a:test", "max_samples": 50},
        "b": {"file_name": "hf://org/b:test"},
    }
    assert outcome(done, "dataset_mixer_eval_list") == ("different meaning", "here the first rows are read")


SWIFT = "swift rlhf --rlhf_type dpo --model m --tuner_type full --use_hf true --dataset "


def test_a_number_of_rows_of_ms_swift_is_a_count(tmp_path: Path) -> None:
    done = imported(tmp_path, f"{SWIFT} org/a:en/zh#500 rows.jsonl HF::org/b#20\n", "train.sh")
    assert value(done, SOURCES) == {
        "a": {"file_name": ["hf://org/a:train:en", "hf://org/a:train:zh"], "count": 500},
        "rows": {"file_name": "rows.jsonl"},
        "b": {"file_name": "hf://org/b", "count": 20},
    }
    assert not lost(done)
    alone = imported(tmp_path, f"{SWIFT} org/a#500 --beta 0.3 # one's own --beta 9\n", "train.sh")
    assert value(alone, "beta") == 0.3, "a # inside a word starts no comment"
    assert (value(alone, FILES), value(alone, "actor_train.data_args.max_samples")) == ("hf://org/a", 500)


@pytest.mark.parametrize(("strategy", "counts"), [("first_exhausted", [75, 25]), ("all_exhausted", [900, 300])])
def test_datasets_of_known_size_are_interleaved_by_count(tmp_path: Path, strategy: str, counts: list[int]) -> None:
    options = f"--interleave_prob 0.75 0.25 --stopping_strategy {strategy}"
    done = imported(tmp_path, f"{SWIFT} a.jsonl#75 b.jsonl#300 {options}\n", "train.sh")
    sources: Any = value(done, SOURCES)
    assert [each["count"] for each in sources.values()] == counts
    assert outcome(done, "interleave_prob")[0] == "different meaning"
    assert not lost(done)
    unknown = imported(tmp_path, f"{SWIFT} a.jsonl b.jsonl#300 {options}\n", "train.sh")
    assert lost(unknown) == {"interleave_prob"}
    alone = imported(tmp_path, f"{SWIFT} a.jsonl --interleave_prob 1.0\n", "train.sh")
    assert outcome(alone, "interleave_prob") == ("no effect", "there is one dataset")


FACTORY = "stage: dpo\nmodel_name_or_path: m\nfinetuning_type: full\n"


def factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: str, **known: dict[str, Any]) -> Conversion:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(known))
    return imported(tmp_path, FACTORY + settings)


def test_datasets_of_llama_factory_with_different_columns_are_sources(tmp_path: Path, monkeypatch) -> None:
    done = factory(
        tmp_path,
        monkeypatch,
        "dataset: first, my set\neval_dataset: held\nmax_samples: 100\neval_strategy: epoch\n",
        first={"file_name": "a.jsonl", "columns": {"prompt": "ask", "chosen": "chosen"}, "num_samples": 500},
        **{"my set": {"hf_hub_url": "org/b", "split": "prefs"}, "held": {"file_name": "c.jsonl"}},
    )
    assert value(done, SOURCES) == {
        "first": {"file_name": "data/a.jsonl", "columns": {"prompt": "ask"}, "count": 100},
        "my-set": {"file_name": "hf://org/b:prefs", "max_samples": 100},
    }
    assert value(done, SETS) == {"held": {"file_name": "data/c.jsonl"}}
    assert entry(done, "max_samples").targets == [SOURCES]
    assert not lost(done)
    config = parse_config(done.translation.values)
    keys = {name: data_settings(config, part).prompt_key for name, part in data_parts(config).items()}
    assert keys == {"first": "ask", "my-set": None}
    (held,) = data_parts(config, validation=True).values()
    assert data_settings(config, held).prompt_key is None, "the training data's column is not the validation data's"


def test_a_column_that_cannot_be_named_is_lost(tmp_path: Path, monkeypatch) -> None:
    done = factory(tmp_path, monkeypatch, "dataset: a\n", a={"file_name": "a.json", "columns": {"query": "context"}})
    assert lost(done) == {"dataset"}
    assert "a: rename the column context to input" in outcome(done, "dataset")[1]


def test_llama_factory_measures_each_dataset(tmp_path: Path) -> None:
    text = f"{FACTORY}dataset: t\neval_dataset: a,b\neval_strategy: epoch\nmetric_for_best_model: eval_b_loss\n"
    done = imported(tmp_path, f"{text}eval_on_each_dataset: true\n")
    assert value(done, SETS) == {"a": {"file_name": "data/a.json"}, "b": {"file_name": "data/b.json"}}
    assert value(done, "metric_for_best_model") == "eval/b/loss"
    assert value(done, "eval_strategy") == "epoch"
    together = imported(tmp_path, text)
    assert value(together, EVAL_FILES) == ["data/a.json", "data/b.json"]
    assert value(together, "metric_for_best_model") is None


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ("mix_strategy: concat\ninterleave_probs: [0.5, 0.5]\n", "no effect"),
        ("mix_strategy: interleave_once\n", "no effect"),
        ("mix_strategy: interleave_under\n", "different meaning"),
        ("mix_strategy: interleave_over\ninterleave_probs: [0.2, 0.8]\n", "different meaning"),
    ],
)
def test_llama_factory_interleaves(tmp_path: Path, monkeypatch, settings: str, expected: str) -> None:
    known = {"a": {"file_name": "a.json", "num_samples": 40}, "b": {"file_name": "b.json", "num_samples": 80}}
    done = factory(tmp_path, monkeypatch, f"dataset: a,b\n{settings}", **known)
    counts = {"interleave_under": [40, 40], "interleave_over": [40, 160]}.get(settings.split()[1], [40, 80])
    sources: Any = value(done, SOURCES)
    assert [each["count"] for each in sources.values()] == counts
    assert outcome(done, "mix_strategy")[0] == expected
    assert not lost(done)


def test_interleaved_datasets_of_unknown_size_are_lost(tmp_path: Path) -> None:
    done = imported(tmp_path, f"{FACTORY}dataset: a,b\nmix_strategy: interleave_under\ninterleave_probs: 0.5,0.5\n")
    assert lost(done) == {"mix_strategy", "interleave_probs"}
    assert value(done, SOURCES) == {"a": {"file_name": "data/a.json"}, "b": {"file_name": "data/b.json"}}


def test_datasets_of_axolotl_with_different_types_are_sources(tmp_path: Path) -> None:
    done = imported(
        tmp_path,
        """
base_model: m
rl: dpo
datasets:
  - {path: org/a, split: prefs, type: chatml.intel, revision: v2}
  - {path: json, data_files: [b.jsonl, c.jsonl], type: llama3.argilla}
  - {path: d.jsonl, ds_type: json, type: chat_template.default, field_messages: talk}
test_datasets:
  - {path: e.jsonl, type: chatml.intel}
""",
    )
    answers = {"chosen": "chosen_response", "rejected": "rejected_response"}
    assert value(done, SOURCES) == {
        "a": {"file_name": "hf://org/a@v2:prefs", "columns": {"prompt": "question"}, "template": "chatml"},
        "b": {
            "file_name": ["b.jsonl", "c.jsonl"],
            "columns": {"prompt": "instruction", **answers},
            "template": "llama3",
        },
        "d": {"file_name": "d.jsonl", "columns": {"prompt": "talk"}},
    }
    assert value(done, SETS) == {"e": {"file_name": "e.jsonl", "columns": {"prompt": "question"}, "template": "chatml"}}
    assert value(done, "eval_strategy") == "epoch"
    assert not lost(done)


def test_datasets_of_axolotl_of_one_type_are_files(tmp_path: Path) -> None:
    text = (
        "base_model: m\nrl: dpo\ndatasets: [{path: org/a, TYPE}, {path: org/b, TYPE}]\ntest_datasets: [{path: c, TYPE}]"
    )
    done = imported(tmp_path, text.replace("TYPE", "split: train, type: chatml.intel"))
    assert value(done, FILES) == ["hf://org/a:train", "hf://org/b:train"]
    assert value(done, EVAL_FILES) == "hf://c:train"
    assert (value(done, "prompt_key"), value(done, "actor_train.data_args.template")) == ("question", "chatml")
    assert value(done, "validation.data_args.template") == "chatml"


def test_a_shard_of_a_reward_dataset_is_a_share(tmp_path: Path) -> None:
    done = imported(tmp_path, "base_model: m\nreward_model: true\ndatasets: [{path: org/a, shards: 4}]\n")
    assert value(done, SOURCES) == {"a": {"file_name": "hf://org/a", "weight": 0.25}}
    assert outcome(done, "datasets")[0] == "different meaning"


NEMO = """
dpo: {val_period: 5}
policy: {model_name: m}
data:
  train: {dataset_name: BinaryPreferenceDataset, data_path: rows.jsonl, prompt_key: ask}
"""


def test_validation_paths_of_nemo_rl_are_sets(tmp_path: Path) -> None:
    text = f"{NEMO}  val_data_paths: {{uf.1: a.jsonl, safety: b.jsonl}}\n  validation: {{data_path: unused.jsonl}}\n"
    done = imported(tmp_path, f"{text}checkpointing: {{metric_name: 'val:validation-safety_loss'}}\n")
    assert value(done, SETS) == {"uf-1": {"file_name": "a.jsonl"}, "safety": {"file_name": "b.jsonl"}}
    assert value(done, SOURCES) == {"rows": {"file_name": "rows.jsonl", "columns": {"prompt": "ask"}}}
    assert value(done, "metric_for_best_model") == "eval/safety/loss"
    assert value(done, "eval_steps") == 5
    assert outcome(done, "data.validation") == ("no effect", "data.val_data_paths takes precedence")
    assert not lost(done)


def test_one_validation_path_of_nemo_rl_is_a_file(tmp_path: Path) -> None:
    done = imported(tmp_path, NEMO.replace(", prompt_key: ask", "") + "  val_data_paths: {mine: a.jsonl}\n")
    assert (value(done, FILES), value(done, EVAL_FILES)) == ("rows.jsonl", "a.jsonl")


def test_probabilities_of_roll_belong_to_another_pipeline(tmp_path: Path) -> None:
    data = "data_args: {file_name: [a.json], domain_interleave_probs: {math: 0.5}}"
    done = imported(tmp_path, f"pretrain: m\nactor_train: {{{data}}}\n")
    assert outcome(done, "actor_train.data_args.domain_interleave_probs")[0] == "no equivalent"
    assert not lost(done)


def test_names_that_yaml_reads_otherwise_are_quoted(tmp_path: Path) -> None:
    done = imported(
        tmp_path, "dataset_splits: [train]\ndataset_mixer: {org/2024: 0.5, org/on: 0.5, './*.jsonl': 0.5}\n"
    )
    sources: Any = value(done, SOURCES)
    assert list(sources) == ["2024", "on", "data"]
    done = imported(
        tmp_path, "pretrain: m\nactor_train: {data_args: {sources: {a.b: {file_name: c}}}}\n", dialect="roll"
    )
    assert "    sources:\n      a.b:\n        file_name: c\n" in done.text
