"""What becomes of a config of each trainer that `thresher import` reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.imported import FILES, MODEL, TRAINING, entry, imported, lost, value


def test_trl_defaults_are_written_out(tmp_path: Path) -> None:
    done = imported(tmp_path, "model_name_or_path: org/model\ndataset_name: org/pairs\n")
    assert done.dialect.name == "trl"
    assert value(done, "pretrain") == "org/model"
    assert value(done, FILES) == "hf://org/pairs:train"
    assert value(done, f"{TRAINING}learning_rate") == 1e-6
    assert value(done, f"{TRAINING}lr_scheduler_type") == "linear"
    assert value(done, f"{TRAINING}gradient_checkpointing") is True
    assert value(done, "num_train_epochs") == 3.0
    assert value(done, "actor_train.data_args.truncation") == "response_end"
    assert "learning_rate: 1.0e-06  # default of TRL" in done.text
    assert not lost(done)


def test_trl_lora_and_evaluation(tmp_path: Path) -> None:
    done = imported(
        tmp_path,
        """
model_name_or_path: org/model
dataset_name: org/pairs
dataset_config: small
dataset_test_split: held_out
eval_strategy: steps
eval_steps: 20
use_peft: true
lora_r: 16
lora_alpha: 8
use_rslora: true
lora_target_modules: [q_proj]
loss_type: [sigmoid, sft]
loss_weights: [0.8, 0.2]
warmup_steps: 0.1
dtype: bfloat16
""",
    )
    assert value(done, f"{MODEL}lora_rank") == 16
    assert value(done, f"{MODEL}lora_alpha") == 32.0, "rsLoRA divides by sqrt(16), LoRA by 16"
    assert value(done, f"{MODEL}lora_target") == ["q_proj"]
    assert value(done, "validation.data_args.file_name") == "hf://org/pairs:held_out:small"
    assert value(done, "eval_steps") == 20
    assert value(done, "pref_loss") == {"sigmoid": 0.8, "sft": 0.2}
    assert value(done, f"{TRAINING}warmup_ratio") == 0.1
    assert not lost(done)


def test_trl_ignores_label_smoothing_of_sigmoid_and_we_do_not(tmp_path: Path) -> None:
    text = "model_name_or_path: m\ndataset_name: d\nlabel_smoothing: 0.1\n"
    assert value(imported(tmp_path, text), "label_smoothing") is None
    assert value(imported(tmp_path, f"{text}loss_type: robust\n"), "label_smoothing") == 0.1


def test_bf16_weights_are_bf16_master_weights_only_where_all_weights_are_trained(tmp_path: Path) -> None:
    text = "model_name_or_path: m\ndataset_name: d\ndtype: bfloat16\n"
    assert value(imported(tmp_path, text), f"{MODEL}master_dtype") == "bf16"
    assert value(imported(tmp_path, f"{text}use_peft: true\n"), f"{MODEL}master_dtype") is None
    assert value(imported(tmp_path, f"{text}deepspeed: zero3.json\n"), f"{MODEL}master_dtype") is None


def test_alignment_handbook_mixtures(tmp_path: Path) -> None:
    done = imported(
        tmp_path,
        """
model_name_or_path: org/sft
dataset_mixture:
  datasets:
    - {id: org/a, config: main, split: train_prefs, weight: 1.0}
    - {id: org/b, split: train, weight: 0.5}
max_prompt_length: 512
""",
    )
    assert value(done, FILES) == ["hf://org/a:train_prefs:main", "hf://org/b:train"]
    assert lost(done) == {"dataset_mixture", "max_prompt_length"}
    done = imported(
        tmp_path,
        "model_name_or_path: m\ndataset_mixer: {org/a: 1.0}\ndataset_splits: [train_prefs, test_prefs]\n"
        "eval_strategy: steps\neval_steps: 5\n",
    )
    assert value(done, "validation.data_args.file_name") == "hf://org/a:test_prefs"


def test_llama_factory(tmp_path: Path) -> None:
    done = imported(
        tmp_path,
        """
stage: dpo
model_name_or_path: org/model
finetuning_type: lora
lora_target: q_proj,v_proj
pref_loss: simpo
pref_beta: 2.0
simpo_gamma: 0.7
pref_ftx: 0.2
dataset: my_pairs
cutoff_len: 1024
learning_rate: 1e-5
""",
    )
    assert done.dialect.name == "llama-factory"
    assert value(done, "pref_loss") == "simpo"
    assert (value(done, "beta"), value(done, "gamma"), value(done, "rpo_alpha")) == (2.0, 0.7, 0.2)
    assert value(done, f"{MODEL}lora_rank") == 8
    assert value(done, f"{MODEL}lora_target") == ["q_proj", "v_proj"]
    assert value(done, f"{TRAINING}gradient_checkpointing") is True
    assert value(done, FILES) == "data/my_pairs.json"
    assert entry(done, "cutoff_len").outcome == "different meaning"
    assert not lost(done)


def test_llama_factory_reads_dataset_info(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    info = {"mine": {"file_name": "pairs.jsonl", "ranking": True, "columns": {"prompt": "ask", "chosen": "good"}}}
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(info))
    done = imported(tmp_path, "stage: dpo\nmodel_name_or_path: m\ndataset: mine\n")
    assert value(done, FILES) == "data/pairs.jsonl"
    assert (value(done, "prompt_key"), value(done, "chosen_key")) == ("ask", "good")


def test_axolotl(tmp_path: Path) -> None:
    done = imported(
        tmp_path,
        """
base_model: org/model
rl: ipo
rl_beta: 0.05
adapter: lora
lora_r: 4
lora_alpha: 8
lora_target_linear: true
datasets:
  - {path: org/pairs, split: prefs, type: chat_template.default, field_messages: talk, field_chosen: best}
sequence_len: 2048
micro_batch_size: 2
num_epochs: 2
learning_rate: 0.0001
lr_scheduler: cosine
cosine_min_lr_ratio: 0.2
optimizer: adamw_8bit
wandb_project: mine
special_tokens: {pad_token: <pad>}
""",
    )
    assert done.dialect.name == "axolotl"
    assert value(done, "pref_loss") == "ipo"
    assert value(done, "beta") == 0.05
    assert value(done, FILES) == "hf://org/pairs:prefs"
    assert (value(done, "prompt_key"), value(done, "chosen_key")) == ("talk", "best")
    assert value(done, f"{TRAINING}lr_scheduler_type") == "cosine_with_min_lr"
    assert value(done, f"{TRAINING}min_lr_ratio") == 0.2
    assert value(done, f"{MODEL}pad_token") == "<pad>"
    assert value(done, "track_with") == ["console", "wandb"]
    assert entry(done, "optimizer").outcome == "different meaning"
    assert not lost(done)


def test_ms_swift_script(tmp_path: Path) -> None:
    done = imported(
        tmp_path,
        """#!/bin/bash
# a comment with --not_an_option 1
export NPROC_PER_NODE=2
MODEL="org/model"
swift rlhf --rlhf_type dpo --model $MODEL \\
    --tuner_type full `# all weights` \\
    --dataset rows.jsonl 'other/rows' \\
    --torch_dtype bfloat16 --per_device_train_batch_size 2 \\
    --max_length=512 --rpo_alpha 0.5 --split_dataset_ratio 0 > log.txt 2>&1
""",
        "train.sh",
    )
    assert done.dialect.name == "ms-swift"
    assert value(done, "pretrain") == "org/model"
    assert value(done, FILES) == ["rows.jsonl", "hf://other/rows"]
    assert value(done, "sequence_length") == 512
    assert value(done, "rpo_alpha") == 0.5
    assert value(done, f"{TRAINING}learning_rate") == 1e-5
    assert value(done, f"{TRAINING}gradient_accumulation_steps") == 4, "16 pairs per step on 2 processes"
    assert value(done, "actor_train.device_mapping") == "list(range(0,2))"
    assert not lost(done)


def test_ms_swift_arguments_file(tmp_path: Path) -> None:
    arguments = {
        "rlhf_type": "simpo",
        "model": "m",
        "tuner_type": "lora",
        "dataset": ["a.jsonl"],
        "max_length": None,
        "reft_args": None,
    }
    done = imported(tmp_path, json.dumps(arguments), "args.json")
    assert value(done, "pref_loss") == "simpo"
    assert (value(done, "beta"), value(done, "gamma")) == (2.0, 1.0)
    assert value(done, f"{MODEL}lora_alpha") == 32
    assert not lost(done)


def test_megatron_swift(tmp_path: Path) -> None:
    done = imported(
        tmp_path,
        "NPROC_PER_NODE=4 megatron rlhf --rlhf_type dpo --model m --dataset a.jsonl --lr 1e-5 --min_lr 1e-6 "
        "--tensor_model_parallel_size 2 --global_batch_size 32 --micro_batch_size 4\n",
        "train.sh",
    )
    assert value(done, f"{TRAINING}global_batch_size") == 32
    assert value(done, f"{TRAINING}lr_scheduler_type") == "cosine_with_min_lr"
    assert value(done, f"{TRAINING}min_lr_ratio") == 0.1
    assert value(done, "actor_train.strategy_args.strategy_config.tp_size") == 2


def test_open_instruct(tmp_path: Path) -> None:
    done = imported(
        tmp_path,
        """
model_name_or_path: /model
dataset_mixer: {org/a: 1.0, org/b: 1.0}
max_seq_length: 1024
loss_type: simpo
beta: 10
gamma_beta_ratio: 0.3
num_epochs: 2
with_tracking: true
""",
    )
    assert done.dialect.name == "open-instruct"
    assert value(done, "gamma") == pytest.approx(3.0)
    assert value(done, f"{TRAINING}max_grad_norm") == 0.0, "open-instruct does not clip by default"
    assert value(done, "track_with") == ["console", "wandb"]
    assert value(done, "num_train_epochs") == 2
    assert not lost(done)


def test_open_instruct_length_normalized_loss_is_the_default(tmp_path: Path) -> None:
    done = imported(tmp_path, "model_name_or_path: m\ndataset_name: org/a\nmax_seq_length: 64\n")
    assert (value(done, "pref_loss"), value(done, "beta")) == ("sigmoid_norm", 5.0)


def test_settings_of_a_tracker_that_is_off_are_left_out(tmp_path: Path) -> None:
    done = imported(tmp_path, "model_name_or_path: m\ndataset_name: d\nmax_seq_length: 64\nwandb_project: mine\n")
    assert value(done, "tracker_kwargs.wandb_project") is None
    assert entry(done, "wandb_project").outcome == "no effect"


def test_nemo_rl_with_a_parent_file(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(
        """
dpo: {max_num_steps: 9, reference_policy_kl_penalty: 0.05, preference_average_log_probs: true}
policy:
  model_name: org/model
  tokenizer: {name: "${policy.model_name}"}
  train_global_batch_size: 16
  train_micro_batch_size: 2
  dynamic_batching: {enabled: false, train_mb_tokens: "${mul:2, 3}"}
  optimizer: {name: torch.optim.AdamW, kwargs: {lr: 1e-6, betas: [0.8, 0.9]}}
  scheduler:
    - {name: torch.optim.lr_scheduler.LinearLR, kwargs: {start_factor: 1e-8, total_iters: 3}}
    - {name: torch.optim.lr_scheduler.CosineAnnealingLR, kwargs: {T_max: 6, eta_min: 1e-7}}
    - milestones: [3]
data:
  train: {dataset_name: BinaryPreferenceDataset, data_path: rows.jsonl, prompt_key: ask}
cluster: {gpus_per_node: 4, num_nodes: 2}
"""
    )
    done = imported(tmp_path, "defaults: base.yaml\npolicy: {train_micro_batch_size: 1}\n")
    assert done.dialect.name == "nemo-rl"
    assert (value(done, "pref_loss"), value(done, "beta")) == ("sigmoid_norm", 0.05)
    assert value(done, f"{TRAINING}per_device_train_batch_size") == 1
    assert value(done, f"{TRAINING}adam_beta1") == 0.8
    assert value(done, f"{TRAINING}lr_scheduler_type") == "cosine_with_min_lr"
    assert value(done, f"{TRAINING}min_lr_ratio") == 0.1
    assert value(done, f"{TRAINING}warmup_steps") == 3
    assert value(done, "prompt_key") == "ask"
    assert value(done, "actor_train.device_mapping") == "list(range(0,8))"
    assert not lost(done)


def test_roll(tmp_path: Path) -> None:
    done = imported(
        tmp_path,
        """
exp_name: mine
output_dir: ./output/${exp_name}
pretrain: m
ipo: true
max_grad_norm: 0.5
reference: {strategy_args: {strategy_name: megatron_infer, strategy_config: {tensor_model_parallel_size: 2}}}
actor_train:
  model_args: {disable_gradient_checkpointing: true, lora_target: all}
  training_args: {num_train_epochs: 2, lr_scheduler_type: constant, warmup_steps: 5}
  data_args: {file_name: [a.json], on_bad_row: skip}
  strategy_args: {strategy_name: megatron_train, strategy_config: {pipeline_model_parallel_size: 2}}
  device_mapping: list(range(0,4))
""",
    )
    assert done.dialect.name == "roll"
    assert value(done, "pref_loss") == "ipo_sum", "ROLL's IPO sums over the tokens"
    assert value(done, "output_dir") == "./output/mine"
    assert value(done, f"{TRAINING}max_grad_norm") == 0.5
    assert value(done, f"{TRAINING}gradient_checkpointing") is False
    assert value(done, f"{TRAINING}warmup_steps") is None
    assert value(done, f"{MODEL}lora_rank") == 8
    assert value(done, "num_train_epochs") == 2
    assert value(done, "max_steps") == 500
    assert value(done, "actor_train.strategy_args.strategy_name") == "fsdp2_train"
    assert value(done, "reference.strategy_args.strategy_name") == "fsdp2_infer"
    assert value(done, "actor_train.data_args.on_bad_row") == "skip", "a key of ours in a config of ROLL is kept"
    assert not lost(done)


def test_colossalchat_script(tmp_path: Path) -> None:
    done = imported(
        tmp_path,
        """
declare -a dataset=(
    /data/part-0
    /data/part-1
)
NAME="run-$(date +%s)"
colossalai run --nproc_per_node 2 --hostfile hosts train_dpo.py \\
    --pretrain $UNKNOWN --dataset ${dataset[@]} --save_dir "out/${NAME}" \\
    --plugin zero2 --lr 1e-6 --mixed_precision bf16 --max_epochs 1 --grad_checkpoint --gamma 0.3
""",
        "train.sh",
    )
    assert done.dialect.name == "colossalchat"
    assert value(done, FILES) == ["/data/part-0", "/data/part-1"]
    assert value(done, "output_dir") == "out/run"
    assert value(done, f"{TRAINING}adam_beta2") == 0.95
    assert value(done, f"{TRAINING}lr_scheduler_type") == "cosine_with_min_lr"
    assert value(done, f"{TRAINING}gradient_checkpointing") is True
    assert "set `pretrain`" in entry(done, "pretrain").notes[0]
    assert value(done, "gamma") == 0.3
    assert lost(done) == {"dataset"}


@pytest.mark.parametrize(
    ("options", "loss"),
    [
        ("--length_normalization", "sigmoid_norm"),
        ("--disable_reference_model", "sigmoid"),
        ("--disable_reference_model --length_normalization", "simpo"),
        ("--loss_type simpo_loss", "simpo"),
    ],
)
def test_colossalchat_losses(tmp_path: Path, options: str, loss: str) -> None:
    done = imported(tmp_path, f"torchrun train_dpo.py --pretrain m --mixed_precision bf16 {options}\n", "train.sh")
    assert value(done, "pref_loss") == loss
    assert value(done, "gamma") == (1.4 if "simpo_loss" in options else 0.0 if loss == "simpo" else None)
