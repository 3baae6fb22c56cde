"""DPOTrainer: each kind of model and data gives the run of the same files, and mistakes are UserErrors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, DatasetDict
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, EarlyStoppingCallback

import thresher
from tests.support.small_runs import last_weights
from thresher import DPOConfig, DPOTrainer, UserError
from thresher.config import parse_config
from thresher.data.prepare.prepare import prepare
from thresher.data.settings import DataSettings
from thresher.pipeline import DPOPipeline

LORA = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def rows_of(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


@pytest.fixture(scope="session")
def by_file(small, tmp_path_factory) -> dict[str, torch.Tensor]:
    """The weights of the run from a config."""
    output = tmp_path_factory.mktemp("by-file")
    DPOPipeline(parse_config({**small, "output_dir": str(output)})).run()
    return last_weights(output)


def assert_same_weights(output: Path, expected: dict[str, torch.Tensor]) -> None:
    weights = last_weights(output)
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def make(kind: str, path: str, model: str, directory: Path) -> Any:
    if kind == "path":
        return Path(path)
    if kind == "paths":
        return [path]
    if kind == "rows":
        return rows_of(path)
    if kind == "dataset":
        return Dataset.from_list([{**row, "unused": number} for number, row in enumerate(rows_of(path))])
    prepare(DataSettings(path, sequence_length=64, template="raw"), AutoTokenizer.from_pretrained(model), directory)
    return directory


@pytest.mark.parametrize("kind", ["path", "paths", "rows", "dataset"])
def test_any_data_gives_the_weights_of_the_same_config_file(kind, by_file, config, files, tmp_path):
    train, validation = (make(kind, files[name], files["model"], tmp_path / name) for name in ("train", "eval"))
    trainer = DPOTrainer(files["model"], config, train_dataset=train, eval_dataset=validation)
    assert trainer.config.validation.data_args.template == "raw"
    result = trainer.train()
    assert_same_weights(tmp_path, by_file)
    assert result.metrics["loss"] > 0
    assert result.best_checkpoint == result.checkpoint == tmp_path / "checkpoints" / "step-00000002"
    assert result.run_dir == tmp_path


def test_a_prepared_store_is_used_as_it_is(by_file, files, small, tmp_path):
    stores = {name: make("store", files[name], files["model"], tmp_path / name) for name in ("train", "eval")}
    values = {name: value for name, value in small.items() if name not in ("pretrain", "validation")}
    values["actor_train"] = {**values["actor_train"], "data_args": {}}
    config = DPOConfig(**values, output_dir=tmp_path / "run")
    trainer = DPOTrainer(files["model"], config, train_dataset=stores["train"], eval_dataset=stores["eval"])
    trainer.train()
    assert_same_weights(tmp_path / "run", by_file)


def test_a_model_object_gives_the_weights_of_its_directory(by_file, config, files, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(files["model"], dtype="float32")
    arguments = {"train_dataset": files["train"], "eval_dataset": files["eval"]}
    tokenizer = AutoTokenizer.from_pretrained(files["model"])
    trainer = DPOTrainer(model, args=config, ref_model=model, processing_class=tokenizer, **arguments)
    assert trainer.config.pretrain == trainer.config.reference_path
    trainer.train()
    assert_same_weights(tmp_path, by_file)
    # the same objects give the same config, so that the run resumes
    again = DPOTrainer(model, args=config, ref_model=model, processing_class=tokenizer, **arguments)
    assert again.config == trainer.config


def test_a_model_object_that_was_never_loaded_is_saved_once(files, tmp_path):
    """Its config has no architecture and no dtype, which transformers adds when it saves a model."""
    config = AutoConfig.from_pretrained(files["model"])
    config.architectures = config.dtype = None
    model = AutoModelForCausalLM.from_config(config)
    before = model.config.to_dict()
    tokenizer = AutoTokenizer.from_pretrained(files["model"])
    arguments = {"train_dataset": files["train"], "processing_class": tokenizer}
    first, second = (DPOTrainer(model, DPOConfig(output_dir=tmp_path), **arguments) for _ in range(2))
    assert second.config == first.config
    assert model.config.to_dict() == before
    stored = AutoConfig.from_pretrained(first.config.pretrain)
    assert (stored.architectures, stored.dtype) == (["LlamaForCausalLM"], torch.float32)


def test_a_model_object_with_another_tokenizer_is_saved_in_another_directory(files, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(files["model"])
    tokenizer = AutoTokenizer.from_pretrained(files["model"])

    def saved() -> str:
        config = DPOConfig(output_dir=tmp_path)
        trainer = DPOTrainer(model, config, train_dataset=files["train"], processing_class=tokenizer)
        return trainer.config.pretrain

    first = saved()
    assert saved() == first
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    second = saved()
    assert second != first
    assert AutoTokenizer.from_pretrained(second).chat_template == tokenizer.chat_template


def test_evaluation_equals_that_of_the_run_and_takes_other_data(config, files):
    trainer = DPOTrainer(files["model"], config, train_dataset=files["train"], eval_dataset=files["eval"])
    result = trainer.train()
    evaluation = trainer.evaluate()
    assert evaluation["eval/loss"] == result.metrics["eval/loss"]
    assert trainer.evaluate(rows_of(files["eval"]))["eval/loss"] == evaluation["eval/loss"]
    assert trainer.evaluate(rows_of(files["eval"])[:1])["eval/loss"] != evaluation["eval/loss"]


def test_one_call_trains(by_file, config, files, tmp_path):
    settings = config.model_dump(exclude_unset=True)
    result = thresher.train(files["model"], rows_of(files["train"]), eval_dataset=files["eval"], **settings)
    assert_same_weights(tmp_path, by_file)
    assert result.metrics["eval/loss"] > 0


def test_a_lora_config_sets_the_adapters(config, files):
    def adapters(**fields: Any) -> Any:
        peft_config = LoraConfig(**fields)
        trainer = DPOTrainer(files["model"], config, train_dataset=files["train"], peft_config=peft_config)
        return trainer.config.actor_train.model_args

    config = config.model_copy(update={"eval_steps": 0})
    args = adapters(r=4, lora_alpha=16, lora_dropout=0.1, target_modules=["v_proj", "q_proj"])
    assert (args.lora_rank, args.lora_alpha, args.lora_dropout) == (4, 16, 0.1)
    assert args.lora_target == ["q_proj", "v_proj"]
    assert adapters(r=4).lora_alpha == 8  # PEFT's default, not twice the rank
    assert adapters().lora_target == ["q_proj", "v_proj"]  # PEFT's default for Llama, not all linear modules
    assert adapters(target_modules="all-linear").lora_target == ["all-linear"]
    args = adapters(r=4, lora_alpha=16, use_rslora=True, use_dora=True, modules_to_save=["lm_head"])
    assert (args.lora_alpha, args.use_rslora, args.use_dora, args.modules_to_save) == (16, True, True, ["lm_head"])
    args = adapters(rank_pattern={"q_proj": 2}, alpha_pattern={"v_proj": 3}, exclude_modules=["k_proj", "gate_proj"])
    assert (args.lora_rank_pattern, args.lora_alpha_pattern) == ({"q_proj": 2}, {"v_proj": 3})
    assert args.lora_exclude == ["gate_proj", "k_proj"]
    assert adapters(init_lora_weights="pissa_niter_4").lora_init == "pissa_niter_4"
    for fields, message in (
        ({"bias": "all"}, "peft_config.bias has no equivalent"),
        ({"init_lora_weights": "gaussian"}, "peft_config.init_lora_weights has no equivalent"),
        ({"target_modules": ".*proj"}, "give a list of names"),
        ({"exclude_modules": ".*proj"}, "give a list of names"),
        ({"task_type": "SEQ_CLS"}, "all models are causal language models"),
        ({"layers_to_transform": [0]}, "peft_config.layers_to_transform has no equivalent"),
    ):
        with pytest.raises(UserError, match=message):
            adapters(**fields)


def test_devices_are_workers(config, files):
    for devices, expected in ((3, (3, None)), ([1, 2], (None, [1, 2]))):
        trainer = DPOTrainer(
            files["model"], config, train_dataset=files["train"], eval_dataset=files["eval"], devices=devices
        )
        assert (trainer.config.actor_train.num_workers, trainer.config.actor_train.device_mapping) == expected
        assert trainer.config.uses_ray


def test_another_reference_is_scored_on_the_same_gpus(config, files, base):
    arguments = {"train_dataset": files["train"], "eval_dataset": files["eval"], "devices": [0, 1]}
    other = base["reference"]["model_args"]["model_name_or_path"]
    assert DPOTrainer(files["model"], config, ref_model=other, **arguments).config.reference.device_mapping == [0, 1]
    assert DPOTrainer(files["model"], config, ref_model=files["model"], **arguments).config.reference.mode == "auto"


def test_a_callback_ends_the_run_with_a_result(config, files):
    class Stop:
        def on_log(self, _args: Any, _state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = True

    config = config.model_copy(update={"max_steps": 3})
    arguments = {"train_dataset": files["train"], "eval_dataset": files["eval"]}
    result = DPOTrainer(files["model"], config, callbacks=[Stop(), EarlyStoppingCallback()], **arguments).train()
    assert result.checkpoint.name == "step-00000002"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"train_dataset": []}, "train_dataset is empty"),
        ({"train_dataset": 3}, "train_dataset is of type int"),
        ({"train_dataset": DatasetDict()}, "give one of its splits"),
        ({"train_dataset": Dataset.from_list([{"a": "b"}]).to_iterable_dataset()}, "IterableDataset"),
        ({"train_dataset": [{"prompt": "a", "chosen": b"b", "rejected": "c"}]}, "row 0 of train_dataset is not JSON"),
        ({"eval_dataset": {"a": [], "b": []}}, "eval_dataset['a'] is empty"),
        ({"eval_dataset": {}}, "eval_dataset is empty"),
        ({"train_dataset": {"a": [], "b": []}}, "train_dataset has several datasets (a, b); join them"),
        ({"devices": 0}, "devices is 0"),
        ({"data_collator": object()}, "DPOTrainer has no argument data_collator"),
        ({"config": DPOConfig(), "args": DPOConfig()}, "config and args are both set"),
        ({"config": {"beta": 0.1}}, "config is a builtins.dict"),
        ({"model": None}, "no model is given"),
        ({"model": torch.nn.Linear(1, 1)}, "model is a Linear, not a model of transformers"),
        ({"peft_config": object()}, "peft_config is a object"),
        ({"config": DPOConfig(file_name="other.jsonl"), "train_dataset": "train.jsonl"}, "file_name is set twice"),
        ({"config": DPOConfig(eval_steps=5)}, "eval_steps has no effect without validation"),
    ],
)
def test_a_mistake_is_a_user_error(arguments, message, files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as error:
        DPOTrainer(**{"model": files["model"], **arguments})
    assert message in str(error.value)


def test_a_data_set_with_a_transform_is_refused(files, tmp_path):
    data = Dataset.from_list(rows_of(files["train"]))
    data.set_transform(lambda batch: batch)
    with pytest.raises(UserError, match="train_dataset has a transform"):
        DPOTrainer(files["model"], DPOConfig(output_dir=tmp_path), train_dataset=data)


def test_a_model_that_its_files_would_not_describe_is_refused(files, tmp_path):
    def give(model: Any, **arguments: Any) -> str:
        with pytest.raises(UserError) as error:
            DPOTrainer(model, DPOConfig(output_dir=tmp_path), train_dataset=files["train"], **arguments)
        return str(error.value)

    load = AutoModelForCausalLM.from_pretrained
    assert "give its base model, and a LoraConfig" in give(get_peft_model(load(files["model"]), LORA))
    inside = load(files["model"])
    get_peft_model(inside, LORA)
    assert "its weights do not match its config" in give(inside)
    assert "its weights are float64" in give(load(files["model"]).double())
    assert "a different class" in give(load(files["model"]).model)
    nameless = type(load(files["model"]))(load(files["model"]).config)
    nameless.config._name_or_path = ""
    assert "its tokenizer is unknown; set processing_class" in give(nameless)


def test_another_tokenizer_than_the_model_s_is_saved_and_named(files, tmp_path):
    def named(tokenizer: Any) -> str | None:
        config = DPOConfig(output_dir=tmp_path)
        trainer = DPOTrainer(files["model"], config, train_dataset=files["train"], processing_class=tokenizer)
        return trainer.config.actor_train.model_args.tokenizer_name_or_path

    tokenizer = AutoTokenizer.from_pretrained(files["model"])
    assert named(tokenizer) is None
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    path = named(tokenizer)
    assert AutoTokenizer.from_pretrained(path).chat_template == tokenizer.chat_template
    assert named(tokenizer) == path


def test_a_model_is_saved_after_training_only(config, files, tmp_path):
    trainer = DPOTrainer(files["model"], config, train_dataset=files["train"], eval_dataset=files["eval"])
    with pytest.raises(UserError, match=r"no checkpoint to save; call train\(\) first"):
        trainer.save_model(tmp_path / "saved")
    with pytest.raises(UserError, match="there is no validation data"):
        DPOTrainer(files["model"], DPOConfig(output_dir=tmp_path), train_dataset=files["train"]).evaluate()


def test_trl_s_config_is_refused(files):
    trl = pytest.importorskip("trl")
    with pytest.raises(UserError, match=r"config is a trl\..*DPOConfig; give a DPOConfig of thresher"):
        DPOTrainer(files["model"], trl.DPOConfig(output_dir="unused", report_to="none", bf16=False))
