"""The mistakes that people make with a config: each is one message, with the value and what to do, and exit code 2.

A mistake is what stands on the command line after a working config. `text` is the message, or its telling part.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import BertConfig, T5Config

from tests.support.small_runs import save_small_model, write_rows

COMMAND = "train"


class Mistake(NamedTuple):
    """Overrides of the config, the telling part of the message, and files that the mistake needs."""

    overrides: tuple[str, ...]
    text: str
    make: Callable[[Path, Path], object] = lambda model, directory: None


def save_encoder(config: BertConfig | T5Config) -> Callable[[Path, Path], object]:
    def make(model: Path, directory: Path) -> None:
        copy_model(model, directory)
        config.save_pretrained(directory / "model")

    return make


def copy_model(model: Path, directory: Path) -> Path:
    """Copy the config and the tokenizer of a model, without its weights."""
    (directory / "model").mkdir()
    for file in model.iterdir():
        if file.suffix != ".safetensors":
            (directory / "model" / file.name).write_bytes(file.read_bytes())
    return directory / "model"


def save_pickles(model: Path, directory: Path) -> None:
    torch.save(load_file(model / "model.safetensors"), copy_model(model, directory) / "pytorch_model.bin")


def save_adapter(model: Path, directory: Path) -> None:
    (copy_model(model, directory) / "adapter_config.json").write_text("{}")


def write_file(name: str, text: str = "") -> Callable[[Path, Path], object]:
    return lambda _, directory: (directory / name).write_text(text)


FILE = "actor_train.data_args.file_name"
TRAINING, MODEL = "actor_train.training_args", "actor_train.model_args"
STRATEGY = "actor_train.strategy_args.strategy_config"
MISTAKES = {
    # spelling
    "a misspelled key": Mistake(("bta=0.2",), "invalid configuration:\n  - bta: unknown key; did you mean `beta`?"),
    "a key in the wrong section": Mistake(
        ("learning_rate=1e-6",), "learning_rate: unknown key; it belongs at `actor_train.training_args.learning_rate`"
    ),
    "a misspelled section": Mistake(
        ("actor_trian.num_workers=2",), "actor_trian: unknown key; did you mean `actor_train`?"
    ),
    "a key of another trainer": Mistake(
        ("max_length=512",), "max_length: unknown key; did you mean `sequence_length`?"
    ),
    "a misspelled loss": Mistake(
        ("pref_loss=sigmod",), "unknown loss 'sigmod', did you mean 'sigmoid'?; the losses are"
    ),
    "a loss on labels": Mistake(("pref_loss=kto",), "kto reads single responses with a label, and out/data/train-"),
    "an online method": Mistake(
        ("pref_loss=grpo",),
        "pref_loss grpo is not a loss of thresher: it needs responses that are sampled during training; use sigmoid",
    ),
    "a misspelled tracker": Mistake(
        ("track_with=[tensorbord]",), "unknown tracker 'tensorbord'; did you mean tensorboard?"
    ),
    "a misspelled adapter target": Mistake(
        (f"{MODEL}.lora_rank=4", f"{MODEL}.lora_target=[q_prj]"),
        "lora_target ['q_prj'] matches nothing in this model; its linear modules are",
    ),
    "an axis of another trainer": Mistake(
        (f"{STRATEGY}.tensor_parallel_size=2",),
        "actor_train.strategy_args: strategy_config has no key tensor_parallel_size; known: tp_size, pp_size",
    ),
    "an override without a value": Mistake(("beta",), "override 'beta' is not of the form key=value"),
    "an unbalanced bracket": Mistake((f"{FILE}=[a.jsonl",), "balance its brackets and quotes"),
    "a sweep": Mistake(
        ("beta=0.1,0.2",), "override 'beta=0.1,0.2' has several values; write a list as [a,b], text with a"
    ),
    "broken YAML": Mistake((), "config run.yaml cannot be read: ", write_file("run.yaml", "beta: [1")),
    # types and ranges
    "text for a number": Mistake(("beta=many",), "beta: Input should be a valid number"),
    "a number out of range": Mistake(("beta=-0.1",), "beta: Input should be greater than 0 (got -0.1)"),
    "no steps": Mistake(("max_steps=0",), "max_steps: Input should be greater than 0 (got 0)"),
    "a value for a section": Mistake(
        ("actor_train=7",), "actor_train: a section with keys below it, not a value; ~actor_train leaves it out (got 7)"
    ),
    "an unsupported precision": Mistake(
        (f"{MODEL}.dtype=fp8",), "dtype: Input should be 'fp32', 'bf16' or 'fp16' (got 'fp8')"
    ),
    "a device list in words": Mistake(
        ("actor_train.device_mapping=eight",),
        "actor_train.device_mapping: not a device list; write it like `list(range(0,8))` or `[0, 1, 2, 3]` (got",
    ),
    "devices that are not there": Mistake(
        ("actor_train.device_mapping=[0]",),
        "actor_train.device_mapping requests device 0, but this machine has no CUDA device",
    ),
    "a value that the loss rejects": Mistake(
        ("label_smoothing=0.7",), "sigmoid: label_smoothing must be at least 0 and at most 0.5, got 0.7; try 0"
    ),
    # contradictions and settings without effect
    "a parameter of another loss": Mistake(
        ("cpo_alpha=0.5",), "sigmoid has no parameter cpo_alpha, only beta, label_smoothing; cpo_alpha is a parameter"
    ),
    "two losses": Mistake(("ipo=true", "pref_loss=sigmoid"), "ipo: true contradicts pref_loss: sigmoid; keep one"),
    "a modifier that the loss ignores": Mistake(
        ("pref_loss=aot", "use_wpo=true"), "wpo has no effect on aot; turn it off"
    ),
    "no reference": Mistake(
        ("reference.mode=none", "pref_loss=bco_pair"),
        "reference.mode=none (reference-free) has no effect on bco_pair; turn it off, or use a loss that supports it",
    ),
    "a reference for nothing": Mistake(
        ("pref_loss=simpo", "reference.mode=precompute"),
        "this loss needs no reference, so the reference settings would",
    ),
    "an adapter that does not exist": Mistake(
        ("reference.mode=adapter",),
        "so it needs actor_train.model_args.lora_rank and no other reference model; use auto",
    ),
    "adapter settings without an adapter": Mistake(
        (f"{MODEL}.lora_alpha=16",), "lora_alpha has no effect without lora_rank; set lora_rank"
    ),
    "a setting of Ray in one process": Mistake(
        ("elastic=true",), "elastic has no effect in one process; set runtime: ray or remove it"
    ),
    "offloading in one process": Mistake(
        (f"{STRATEGY}.cpu_offload=true",), "cpu_offload has no effect: no two workers shard the model; use more workers"
    ),
    "a setting of a tracker that is off": Mistake(
        ("tracker_kwargs.wandb_project=p",), "has no effect without wandb in track_with; add wandb there or remove it"
    ),
    "evaluation of nothing": Mistake(
        ("eval_steps=5",), "eval_steps has no effect without validation.data_args or validation.split"
    ),
    "two warm-ups": Mistake(
        (f"{TRAINING}.warmup_steps=3", f"{TRAINING}.warmup_ratio=0.1"),
        "warmup_steps and warmup_ratio are both set; keep",
    ),
    "a store and files": Mistake(
        ("actor_train.data_args.store=pairs",), "actor_train.data_args: file_name and store are both set; keep one"
    ),
    "a batch larger than the data": Mistake(
        (f"{TRAINING}.per_device_train_batch_size=16",),
        "the training set has 8 pairs, fewer than one global batch of 16; lower actor_train.training_args.global_batch",
    ),
    # processes and devices
    "two workers in one process": Mistake(
        ("actor_train.num_workers=2", "runtime=local"),
        "runtime: local is one process, but actor_train.num_workers needs 2; use runtime: ray",
    ),
    "an axis that does not divide the workers": Mistake(
        ("actor_train.num_workers=4", f"{STRATEGY}.tp_size=3"),
        "actor_train has 4 workers, which is not a multiple of tp_size 3; use 3 or 6 workers (device_mapping, or num_",
    ),
    "an axis that does not divide the heads": Mistake(
        ("actor_train.num_workers=4", f"{STRATEGY}.tp_size=4"),
        "actor_train: tp_size is 4, but the model has 2 attention heads and 2 key/value heads; valid sizes are 1, 2",
    ),
    "a cluster that is not there": Mistake(("ray_address=127.0.0.1:1",), "127.0.0.1:1"),
    "an engine that does not exist": Mistake(
        ("actor_train.strategy_args.strategy_name=fsdp_train",),
        "there is no strategy fsdp_train; did you mean fsdp2_train?",
    ),
    "an inference server": Mistake(
        ("reference.strategy_args.strategy_name=vllm",),
        "there is no strategy vllm; it serves text, and a reference is scored by hf_infer",
    ),
    # files
    "a file that does not exist": Mistake(
        (f"{FILE}=pears.jsonl",), "'pears.jsonl' does not exist; did you mean ./pairs.jsonl?"
    ),
    "an empty file": Mistake(
        (f"{FILE}=empty.jsonl",), "'empty.jsonl' is empty; write it again, or", write_file("empty.jsonl")
    ),
    "a file of an unknown kind": Mistake(
        (f"{FILE}=pairs.txt",), "'pairs.txt': unknown suffix .txt; use one of", write_file("pairs.txt", "a")
    ),
    "a missing column": Mistake(
        (f"{FILE}=odd.jsonl",),
        "odd.jsonl, line 1: unrecognized row format with columns prompt, chosen, rejectd: no rejected column. Name "
        "your columns with rejected_key=rejectd, or use one of these formats:",
        write_file("odd.jsonl", json.dumps({"prompt": "a", "chosen": "b", "rejectd": "c"})),
    ),
    "a column that the data lack": Mistake(
        ("chosen_key=chosn",), "chosen_key='chosn' names no column; the columns are prompt, chosen, rejected; did you"
    ),
    "no pair is short enough": Mistake(
        ("sequence_length=2",),
        "none of 8 rows became a pair: 8 too_long (raise sequence_length or set actor_train.data_args.truncation)",
    ),
    "a template that does not exist": Mistake(
        ("actor_train.data_args.template=my.jinja",),
        "actor_train.data_args.template='my.jinja': no such file; use auto, raw, one of chatml, gemma,",
    ),
    "a store that does not exist": Mistake(
        (f"{FILE}=[]", "actor_train.data_args.template=auto", "actor_train.data_args.store=nowhere"),
        "nowhere is not a pair store: it has no manifest.json; create one with `thresher prepare`",
    ),
    "a checkpoint that does not exist": Mistake(
        ("resume_from_checkpoint=./nowhere",),
        "there is no checkpoint at nowhere; check the path, or resume with `auto`",
    ),
    "an output_dir that is a file": Mistake(
        ("output_dir=pairs.jsonl",), "Not a directory; check the path and its permissions"
    ),
    # models
    "a model that does not exist": Mistake(
        ("pretrain=./nowhere",), "model directory ./nowhere does not exist; give the path of a model directory or of a"
    ),
    "a directory without a model": Mistake(
        ("pretrain=.",), "model directory . has no config.json; give a Hugging Face"
    ),
    "no model": Mistake(("~pretrain",), "no model is named; set pretrain to a model directory or a .gguf file"),
    "an encoder": Mistake(
        ("pretrain=./model",),
        "./model is an encoder (bert), but only causal language models can be trained; use a decoder, such as a Llama",
        save_encoder(BertConfig()),
    ),
    "an encoder-decoder model": Mistake(
        ("pretrain=./model",), "./model is an encoder-decoder model (t5), but only causal", save_encoder(T5Config())
    ),
    "pickled weights": Mistake(
        ("pretrain=./model",),
        "./model has no safetensors weights, only pickles (pytorch_model.bin), which can run code when they are "
        "loaded; if you trust them, load the model with transformers, save it with save_pretrained and use",
        save_pickles,
    ),
    "an adapter instead of a model": Mistake(
        ("pretrain=./model",),
        "./model contains a PEFT adapter (adapter_config.json); merge it into its base",
        save_adapter,
    ),
    "a model without a chat template": Mistake(
        ("actor_train.data_args.template=auto",),
        "the tokenizer has no chat template; use actor_train.data_args.template=raw for plain text, actor_train.data_",
    ),
    "a pad token that does not exist": Mistake(
        (f"{MODEL}.pad_token=<none>",), "pad_token '<none>' is not in the vocabulary of"
    ),
    "an attention that does not exist": Mistake(
        (f"{MODEL}.attn_implementation=flash_9",), 'Specified `attn_implementation="flash_9"` is not supported.'
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_small_model(tmp_path_factory.mktemp("model") / "tiny", 0)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_message_that_says_what_to_do(command_line, model, tmp_path, name):
    mistake = MISTAKES[name]
    write_rows(tmp_path / "pairs.jsonl", 8, 0)
    config = {
        "pretrain": str(model),
        "output_dir": "out",
        "max_steps": 1,
        "track_with": [],
        "actor_train": {
            "model_args": {"dtype": "fp32"},
            "data_args": {"file_name": "pairs.jsonl", "template": "raw"},
            "training_args": {"per_device_train_batch_size": 4},
        },
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    mistake.make(model, tmp_path)
    result = command_line(COMMAND, "run.yaml", *mistake.overrides)
    assert result.code == 2
    assert result.err.count("error: ") == 1
    message = result.err.partition("error: ")[2]
    assert mistake.text in message


def test_the_table_has_at_least_forty_mistakes():
    assert len(MISTAKES) >= 40
