"""How `thresher import` handles the configs of each trainer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.imported import FILES, MODEL, TRAINING, entry, imported, lost, value
from thresher.importers.convert import NAMES
from thresher.importers.translation import translate

_LORA = {"finetuning_type": "lora"}
_NEW = {**_LORA, "create_new_adapter": True}


def test_trl_defaults_are_written_out(tmp_path: Path) -> None:
    done = imported(tmp_path, "model_name_or_path: org/model\ndataset_name: org/pairs\n")
    assert done.translation.dialect.name == "trl"
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
    assert (value(done, f"{MODEL}lora_alpha"), value(done, f"{MODEL}use_rslora")) == (8, True)
    assert value(done, f"{MODEL}lora_target") == ["q_proj"]
    assert value(done, "validation.data_args.file_name") == "hf://org/pairs:held_out:small"
    assert value(done, "eval_steps") == 20
    assert value(done, "pref_loss") == {"sigmoid": 0.8, "sft": 0.2}
    assert value(done, f"{TRAINING}warmup_ratio") == 0.1
    assert not lost(done)


def test_trl_evaluates_and_saves_per_epoch(tmp_path: Path) -> None:
    text = "model_name_or_path: m\ndataset_name: d\neval_strategy: epoch\nsave_strategy: epoch\n"
    done = imported(tmp_path, text)
    assert (value(done, "eval_strategy"), value(done, "save_strategy")) == ("epoch", "epoch")
    assert value(done, "save_steps") is None
    assert value(imported(tmp_path, text.replace("epoch", "no")), "save_strategy") == "no"


def test_a_reference_that_trl_syncs_follows_at_the_same_rate(tmp_path: Path) -> None:
    """Both mix alpha of the policy into the reference every so many steps."""
    text = "model_name_or_path: m\ndataset_name: d\nref_model_mixup_alpha: 0.9\nref_model_sync_steps: 64\n"
    done = imported(tmp_path, f"{text}sync_ref_model: true\n")
    assert (value(done, "reference.sync_alpha"), value(done, "reference.sync_steps")) == (0.9, 64)
    assert not lost(done)
    frozen = imported(tmp_path, f"{text}sync_ref_model: false\n")
    assert (value(frozen, "reference.sync_alpha"), value(frozen, "reference.sync_steps")) == (None, None)
    default = imported(tmp_path, "model_name_or_path: m\ndataset_name: d\nsync_ref_model: true\n")
    assert (value(default, "reference.sync_alpha"), value(default, "reference.sync_steps")) == (0.6, 512)


def test_a_share_to_hold_out_is_a_split_and_zero_is_not(tmp_path: Path) -> None:
    text = "stage: dpo\nmodel_name_or_path: m\ndataset: my_pairs\nval_size: "
    done = imported(tmp_path, f"{text}0.1\neval_strategy: steps\neval_steps: 5\n")
    assert (value(done, "validation.split"), value(done, "eval_steps")) == (0.1, 5)
    assert value(imported(tmp_path, f"{text}0.0\n"), "validation.split") is None
    assert lost(imported(tmp_path, f"{text}200\n")) == {"val_size"}


def test_trl_ignores_label_smoothing_of_sigmoid_and_we_do_not(tmp_path: Path) -> None:
    text = "model_name_or_path: m\ndataset_name: d\nlabel_smoothing: 0.1\n"
    assert value(imported(tmp_path, text), "label_smoothing") is None
    assert value(imported(tmp_path, f"{text}loss_type: robust\n"), "label_smoothing") == 0.1


TRL = "model_name_or_path: m\ndataset_name: d\n"


@pytest.mark.parametrize(
    ("trainer", "given"),
    [
        ("trl", {"num_train_epochs": 1.0}),
        ("trl", {}),
        ("llama-factory", {"num_train_epochs": 1.0}),
        ("ms-swift", {}),
        ("axolotl", {"num_epochs": 2}),
        ("open-instruct", {"num_train_epochs": 2}),
    ],
)
def test_a_number_of_steps_takes_precedence_over_epochs(trainer: str, given: dict[str, object]) -> None:
    """In transformers the data repeats until max_steps; here the run would end after the epochs."""
    key = "max_train_steps" if trainer == "open-instruct" else "max_steps"
    run = translate(NAMES[trainer], {**given, key: 1000})
    assert (run.value("max_steps"), run.value("num_train_epochs")) == (1000, None)
    epochs = [each for each in run.entries if each.key in ("num_train_epochs", "num_epochs")]
    assert [(each.outcome, "takes precedence" in each.notes[0]) for each in epochs] == [("no effect", True)] * len(
        given
    )


@pytest.mark.parametrize(
    ("text", "loss", "smoothing"),
    [
        ("loss_type: robust", "robust", 0.0),  # TRL's default, ours is 0.1
        ("loss_type: robust\nlabel_smoothing: 0.0", "robust", 0.0),
        ("loss_type: robust\nlabel_smoothing: 0.2", "robust", 0.2),
        ("loss_type: exo_pair\nlabel_smoothing: 0.01", "exo_pair", 0.01),
        ("loss_type: aot\nlabel_smoothing: 0.2", "aot", 0.2),
        ("loss_type: [sigmoid, hinge]\nlabel_smoothing: 0.2", {"sigmoid": 1.0, "hinge": 1.0}, None),
        (
            "loss_type: [sigmoid, robust]\nlabel_smoothing: 0.2",
            {"sigmoid": {"weight": 1.0, "label_smoothing": 0.0}, "robust": 1.0},
            0.2,
        ),
        (
            "loss_type: [aot, sigmoid]\nloss_weights: [0.3, 0.7]\nlabel_smoothing: 0.2",
            {"aot": 0.3, "sigmoid": {"weight": 0.7, "label_smoothing": 0.0}},
            0.2,
        ),
    ],
)
def test_each_loss_of_trl_gets_its_label_smoothing(tmp_path: Path, text: str, loss: object, smoothing: object) -> None:
    done = imported(tmp_path, f"{TRL}{text}\n")
    assert (value(done, "pref_loss"), value(done, "label_smoothing")) == (loss, smoothing)


@pytest.mark.parametrize(
    ("text", "key", "note"),
    [
        ("loss_type: [sigmoid, sft]", "loss_type", "sft: TRL averages over all tokens of a micro-batch"),
        ("loss_type: bco_pair", "loss_type", "bco_pair: TRL classifies the rewards as they are"),
        ("loss_type: aot", "loss_type", "aot: TRL sorts a micro-batch's pairs"),
        ("loss_type: exo_pair", "loss_type", "TRL refuses exo_pair without label_smoothing"),
        ("disable_dropout: false", "disable_dropout", "dropout is always off"),
        ("beta: 0.1", "dataset_name", "rows of plain strings as raw text"),
    ],
)
def test_numbers_that_differ_from_trl_are_reported(tmp_path: Path, text: str, key: str, note: str) -> None:
    done = imported(tmp_path, f"{TRL}{text}\n")
    assert entry(done, key).outcome == "different meaning"
    assert note in "; ".join(entry(done, key).notes)
    assert note in done.text


def test_the_settings_of_trl_for_alphapo_and_simpo(tmp_path: Path) -> None:
    done = imported(tmp_path, f"{TRL}loss_type: alphapo\nalpha: 0.25\nbeta: 2.5\nsimpo_gamma: 0.1\ncpo_alpha: 1.0\n")
    assert [value(done, key) for key in ("pref_loss", "alphapo_alpha", "beta", "gamma")] == ["alphapo", 0.25, 2.5, 0.1]
    assert value(done, "rpo_alpha") is None, "TRL sets cpo_alpha to 0 for alphapo"
    assert not lost(done)
    done = imported(tmp_path, f"{TRL}loss_type: alphapo\n")
    assert [value(done, key) for key in ("alphapo_alpha", "beta", "gamma")] == [0.0, 0.1, 0.5], "TRL's defaults"
    done = imported(tmp_path, f"{TRL}loss_type: simpo\nalpha: 0.25\n")
    assert [value(done, key) for key in ("pref_loss", "gamma", "rpo_alpha")] == ["simpo", 0.5, 1.0]
    assert lost(done) == {"alpha"}
    done = imported(tmp_path, f"{TRL}alpha: 0.0\ncpo_alpha: 1.0\nsimpo_gamma: 0.5\n")
    assert [entry(done, key).outcome for key in ("alpha", "cpo_alpha", "simpo_gamma")] == ["no effect"] * 3


def test_one_weight_per_loss(tmp_path: Path) -> None:
    done = imported(tmp_path, f"{TRL}loss_type: [sigmoid, sft]\nloss_weights: [0.8]\n")
    assert lost(done) == {"loss_type"}
    assert "1 weights for 2 losses" in entry(done, "loss_type").notes[0]


def test_trl_evaluates_with_the_logs_unless_it_says_when(tmp_path: Path) -> None:
    text = f"{TRL}eval_strategy: steps\n"
    assert value(imported(tmp_path, text), "eval_steps") == 10, "TRL's default of logging_steps"
    assert value(imported(tmp_path, f"{text}logging_steps: 25\n"), "eval_steps") == 25
    assert value(imported(tmp_path, f"{text}eval_steps: 7\n"), "eval_steps") == 7


def test_answers_at_evaluations_are_samples(tmp_path: Path) -> None:
    text = f"{TRL}generate_during_eval: true\neval_strategy: epoch\n"
    assert value(imported(tmp_path, text), "samples.num_prompts") == 16
    assert value(imported(tmp_path, f"{TRL}generate_during_eval: true\n"), "samples.num_prompts") is None
    run = translate(NAMES["axolotl"], {"base_model": "m", "dpo_generate_during_eval": True, "val_set_size": 0.1})
    assert run.value("samples.num_prompts") == 16


def test_arguments_of_from_pretrained_are_settings_of_the_model(tmp_path: Path) -> None:
    given = "{dtype: bfloat16, attn_implementation: sdpa, revision: v1, use_cache: false, device_map: null}"
    done = imported(tmp_path, f"{TRL}model_init_kwargs: {given}\n")
    assert value(done, f"{MODEL}master_dtype") == "bf16"
    assert (value(done, f"{MODEL}attn_implementation"), value(done, f"{MODEL}revision")) == ("sdpa", "v1")
    assert not lost(done)
    assert lost(imported(tmp_path, f"{TRL}model_init_kwargs: {{rope_theta: 1}}\n")) == {"model_init_kwargs"}
    plain = imported(tmp_path, f"{TRL}model_init_kwargs: {{revision: main, dtype: auto}}\n")
    assert entry(plain, "model_init_kwargs").outcome == "no effect"


@pytest.mark.parametrize(
    ("name", "template", "arguments"),
    [("qwen3_nothink", "chatml", None), ("other_nothink", None, {"enable_thinking": False})],
)
def test_templates_without_thinking(tmp_path: Path, name: str, template: object, arguments: object) -> None:
    done = imported(tmp_path, f"stage: dpo\nmodel_name_or_path: m\ndataset: d\ntemplate: {name}\n")
    assert value(done, "actor_train.data_args.template") == template
    assert value(done, "actor_train.data_args.template_arguments") == arguments
    assert not lost(done)


def test_the_lora_file_of_colossalchat_is_read(tmp_path: Path) -> None:
    path = tmp_path / "lora.json"
    given = {"r": 8, "lora_alpha": 16, "linear_lora_dropout": 0.2, "lora_initialization_method": "PiSSA"}
    path.write_text(json.dumps({**given, "target_modules": ["q_proj"]}))
    script = f"torchrun train_dpo.py --pretrain m --mixed_precision bf16 --lora_config {path}\n"
    done = imported(tmp_path, script, "train.sh")
    assert (value(done, f"{MODEL}lora_rank"), value(done, f"{MODEL}lora_target")) == (8, ["q_proj"])
    # its linear layers take neither value of the file: coati/models/lora.py, _lora_linear_wrapper
    assert (value(done, f"{MODEL}lora_alpha"), value(done, f"{MODEL}lora_dropout")) == (32, 0.0)
    assert value(done, f"{MODEL}lora_init") == "pissa_niter_4"
    assert not lost(done)
    path.write_text(json.dumps({**given, "lora_train_bias": "all"}))
    assert lost(imported(tmp_path, script, "train.sh")) == {"lora_config"}
    path.write_text(json.dumps(given))
    assert entry(imported(tmp_path, script, "train.sh"), "lora_config").outcome == "different meaning"
    path.unlink()
    assert lost(imported(tmp_path, script, "train.sh")) == {"lora_config"}


def test_a_note_is_about_its_key() -> None:
    run = translate(NAMES["trl"], {"overwrite_output_dir": True, "load_best_model_at_end": True})
    notes = {each.key: each.notes[0] for each in run.entries if each.notes}
    assert "set a different one to start again" in notes["overwrite_output_dir"]
    assert "thresher export --best" in notes["load_best_model_at_end"]


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
    - {id: org/b, split: train, weight: 1.0}
max_prompt_length: 512
""",
    )
    assert value(done, FILES) == ["hf://org/a:train_prefs:main", "hf://org/b:train"]
    assert lost(done) == {"max_prompt_length"}
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
    assert done.translation.dialect.name == "llama-factory"
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


def test_a_hub_dataset_of_llama_factory_keeps_its_split_and_subset(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    info = {"mine": {"hf_hub_url": "org/pairs", "split": "prefs", "subset": "en"}}
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(info))
    done = imported(tmp_path, "stage: dpo\nmodel_name_or_path: m\ndataset: mine\n")
    assert value(done, FILES) == "hf://org/pairs:prefs:en"


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
    assert done.translation.dialect.name == "axolotl"
    assert value(done, "pref_loss") == "ipo"
    assert value(done, "beta") == 0.05
    assert value(done, FILES) == "hf://org/pairs:prefs"
    assert (value(done, "prompt_key"), value(done, "chosen_key")) == ("talk", "best")
    assert value(done, f"{TRAINING}lr_scheduler_type") == "cosine_with_min_lr"
    assert value(done, f"{TRAINING}min_lr_ratio") == 0.2
    assert value(done, f"{MODEL}pad_token") == "<pad>"
    assert value(done, "track_with") == ["console", "wandb"]
    assert entry(done, "optimizer").outcome == "different meaning"
    assert value(done, f"{TRAINING}optim") == "adamw_8bit"
    assert not lost(done)


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("adamw_torch_fused", None),
        ("adamw_bnb_8bit", "adamw_8bit"),
        ("adamw_torch_8bit", "adamw_8bit"),
        ("paged_adamw_8bit", "paged_adamw_8bit"),
        ("paged_adamw_32bit", "paged_adamw_32bit"),
        ("rmsprop", "rmsprop"),
        ("schedule_free_adamw", "schedule_free_adamw"),
    ],
)
def test_optimizers_of_transformers(tmp_path: Path, name: str, ours: str | None) -> None:
    done = imported(tmp_path, f"{TRL}optim: {name}\nwarmup_steps: 3\n")
    assert value(done, f"{TRAINING}optim") == ours
    schedule = "constant_with_warmup" if name == "schedule_free_adamw" else "linear"
    assert value(done, f"{TRAINING}lr_scheduler_type") == schedule
    assert not lost(done)


def test_8_bit_optimizers_are_adamw_with_deepspeed(tmp_path: Path) -> None:
    zero = "{zero_optimization: {stage: 2}}"
    done = imported(tmp_path, f"{TRL}optim: paged_adamw_8bit\ndeepspeed: '{zero}'\n")
    assert value(done, f"{TRAINING}optim") is None
    assert entry(done, "optim").outcome == "different meaning"


@pytest.mark.parametrize(
    "text",
    [
        "stage: dpo\nmodel_name_or_path: m\nfinetuning_type: lora\ndataset: d\nlora_rank: 4\nloraplus_lr_ratio: 16\n",
        "base_model: m\nrl: dpo\nadapter: lora\nlora_r: 4\nloraplus_lr_ratio: 16\n",
        "rlhf_type: dpo\nmodel: m\ndataset: d\nlora_rank: 4\noptimizer: lorap\nlorap_lr_ratio: 16\n",
    ],
)
def test_lora_plus(tmp_path: Path, text: str) -> None:
    done = imported(tmp_path, text)
    assert value(done, f"{MODEL}lora_plus_ratio") == 16
    assert not lost(done)


def test_learning_rates_of_axolotl(tmp_path: Path) -> None:
    text = "base_model: m\nrl: dpo\nembedding_lr: 1.0e-7\nlr_groups:\n  - {name: q, modules: [q_proj], lr: 1.0e-6}\n"
    assert value(imported(tmp_path, text), f"{TRAINING}param_groups") == [
        {"match": ["*q_proj*"], "lr": 1e-6},
        {"match": ["embed_tokens", "lm_head"], "lr": 1e-7},
    ]


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
    assert done.translation.dialect.name == "ms-swift"
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
    assert value(done, "actor_train.strategy_args.strategy_name") == "megatron_train"
    assert value(done, "actor_train.strategy_args.strategy_config.tensor_model_parallel_size") == 2


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
    assert done.translation.dialect.name == "open-instruct"
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
    assert done.translation.dialect.name == "nemo-rl"
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
    assert done.translation.dialect.name == "roll"
    assert value(done, "pref_loss") == "ipo_sum", "ROLL's IPO sums over the tokens"
    assert value(done, "output_dir") == "./output/mine"
    assert value(done, f"{TRAINING}max_grad_norm") == 0.5
    assert value(done, f"{TRAINING}gradient_checkpointing") is False
    assert (value(done, f"{TRAINING}lr_scheduler_type"), value(done, f"{TRAINING}warmup_steps")) == (
        "constant_with_warmup",
        5,
    ), "Megatron's constant schedule warms up"
    assert value(done, f"{MODEL}lora_rank") == 8
    assert value(done, "num_train_epochs") == 2
    assert value(done, "max_steps") == 500
    assert value(done, "actor_train.strategy_args.strategy_name") == "megatron_train"
    assert value(done, "reference.strategy_args.strategy_name") == "megatron_infer"
    assert value(done, "reference.strategy_args.strategy_config") == {"tensor_model_parallel_size": 2}
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
    assert done.translation.dialect.name == "colossalchat"
    assert value(done, FILES) == ["/data/part-0", "/data/part-1"]
    assert value(done, "output_dir") == "out/run"
    assert value(done, f"{TRAINING}adam_beta2") == 0.95
    assert value(done, f"{TRAINING}lr_scheduler_type") == "cosine_with_min_lr"
    assert value(done, f"{TRAINING}gradient_checkpointing") is True
    assert "set `pretrain`" in entry(done, "pretrain").notes[0]
    assert value(done, "gamma") == 0.3
    assert value(done, "actor_train.data_args.template") == "raw", "token ids are not rendered"
    assert not lost(done)


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


def test_a_system_message_and_a_number_of_rows_are_settings_of_the_data(tmp_path: Path) -> None:
    text = "stage: dpo\nmodel_name_or_path: m\ndataset: my_pairs\ndefault_system: Be brief.\nmax_samples: 100\n"
    done = imported(tmp_path, text)
    assert value(done, "actor_train.data_args.system_prompt") == "Be brief."
    assert value(done, "actor_train.data_args.max_samples") == 100
    assert not lost(done)
    done = imported(tmp_path, f"{text}eval_dataset: held_out\neval_strategy: steps\neval_steps: 5\n")
    assert value(done, "validation.data_args.system_prompt") == "Be brief.", "validation prompts are trained prompts"


@pytest.mark.parametrize(
    ("trainer", "given", "target", "expected"),
    [
        ("colossalchat", {"pretrain": "m", "tokenizer_dir": "t"}, "tokenizer_name_or_path", "t"),
        ("colossalchat", {"pretrain": "m", "tokenizer_dir": "m"}, "tokenizer_name_or_path", None),
        ("open-instruct", {"model_name_or_path": "m", "tokenizer_name": "t"}, "tokenizer_name_or_path", "t"),
        ("axolotl", {"base_model": "m", "tokenizer_config": "t"}, "tokenizer_name_or_path", "t"),
        ("trl", {"router_aux_loss_coef": 0.01}, "moe_aux_loss_coef", 0.01),
        ("llama-factory", {"moe_aux_loss_coef": 0.0}, "moe_aux_loss_coef", None),
        ("open-instruct", {"load_balancing_loss": True}, "moe_aux_loss_coef", 0.5),
        ("open-instruct", {"load_balancing_loss": True, "load_balancing_weight": 0.1}, "moe_aux_loss_coef", 0.1),
        ("ms-swift", {"tuner_type": "full", "freeze_parameters": ["lm_head"]}, "freeze_module_prefix", ["lm_head"]),
        ("llama-factory", {"adapter_name_or_path": "a", "finetuning_type": "lora"}, "adapter_name_or_path", "a"),
        ("llama-factory", {"adapter_name_or_path": "a", "finetuning_type": "lora"}, "lora_rank", None),
        ("llama-factory", {"adapter_name_or_path": "a,b", **_LORA}, "adapter_name_or_path", "b"),
        ("llama-factory", {"adapter_name_or_path": "a,b", **_LORA}, "merge_adapters", ["a"]),
        ("llama-factory", {"adapter_name_or_path": "a,b", **_NEW}, "merge_adapters", ["a", "b"]),
        ("llama-factory", {"adapter_name_or_path": "a,b", **_NEW}, "adapter_name_or_path", None),
        ("llama-factory", {"adapter_name_or_path": "a,b", **_NEW}, "lora_rank", 8),
        (
            "llama-factory",
            {"additional_target": "embed_tokens,norm", **_LORA},
            "modules_to_save",
            ["embed_tokens", "norm"],
        ),
        ("llama-factory", {"use_dora": True, **_LORA}, "use_dora", True),
        ("llama-factory", {"use_dora": True, "finetuning_type": "full"}, "use_dora", None),
        ("llama-factory", {"use_rslora": True, "adapter_name_or_path": "a", **_LORA}, "use_rslora", None),
        ("trl", {"use_peft": True, "use_dora": True}, "use_dora", True),
        ("trl", {"use_peft": True, "lora_modules_to_save": ["lm_head"]}, "modules_to_save", ["lm_head"]),
        ("axolotl", {"adapter": "lora", "lora_r": 8, "peft_use_dora": True}, "use_dora", True),
        ("axolotl", {"adapter": "lora", "lora_r": 8, "peft_use_rslora": True}, "use_rslora", True),
        (
            "axolotl",
            {"adapter": "lora", "lora_r": 8, "lora_rank_pattern": {"q_proj": 4}},
            "lora_rank_pattern",
            {"q_proj": 4},
        ),
        (
            "axolotl",
            {"adapter": "lora", "lora_r": 8, "lora_alpha_pattern": {"q_proj": 4}},
            "lora_alpha_pattern",
            {"q_proj": 4},
        ),
        ("axolotl", {"adapter": "lora", "lora_r": 8, "lora_modules_to_save": ["norm"]}, "modules_to_save", ["norm"]),
        ("axolotl", {"adapter": "lora", "lora_r": 8, "peft_init_lora_weights": "olora"}, "lora_init", "olora"),
        ("ms-swift", {"tuner_type": "lora", "use_dora": True, "use_rslora": True}, "use_rslora", True),
        ("ms-swift", {"tuner_type": "lora", "modules_to_save": ["lm_head"]}, "modules_to_save", ["lm_head"]),
        ("ms-swift", {"adapters": ["a", "b"]}, "adapter_name_or_path", None),
        ("ms-swift", {"adapters": ["a"]}, "adapter_name_or_path", "a"),
        ("llama-factory", {"finetuning_type": "lora", "pissa_init": True}, "lora_init", "pissa_niter_16"),
        ("llama-factory", {"finetuning_type": "lora", "pissa_init": True, "pissa_iter": -1}, "lora_init", "pissa"),
        ("trl", {"model_revision": "v1"}, "revision", "v1"),
        ("trl", {"model_revision": "main"}, "revision", None),
    ],
)
def test_settings_of_the_model_reach_ours(
    trainer: str, given: dict[str, object], target: str, expected: object
) -> None:
    assert translate(NAMES[trainer], given).value(f"{MODEL}{target}") == expected


AXOLOTL = "base_model: m\nrl: dpo\ndatasets: [{path: d, type: chatml.intel}]\nbf16: false\n"
FACTORY = "model_name_or_path: m\nstage: dpo\nfinetuning_type: full\ndataset: d\ntemplate: default\n"
COLOSSAL = "colossalai run train_dpo.py --pretrain m --dataset d --plugin zero2"
FP16 = {
    "TRL": "model_name_or_path: m\ndataset_name: d\nfp16: true\nbf16: false\nloss_type: [sigmoid]\n",
    "axolotl, mixed": f"{AXOLOTL}fp16: true\n",
    "axolotl, pure": f"{AXOLOTL}float16: true\n",
    "LLaMA-Factory": f"{FACTORY}fp16: true\n",
    "ms-swift": "swift rlhf --rlhf_type dpo --model m --dataset a.jsonl --torch_dtype float16",
    "NeMo-RL": "policy: {model_name: m, precision: float16}\ndpo: {max_num_steps: 5}\n",
    "ROLL": "exp_name: e\npretrain: m\nactor_train: {model_args: {dtype: fp16, disable_gradient_checkpointing: true}}",
    "ColossalChat": f"{COLOSSAL} --mixed_precision fp16",
    "ColossalChat's default": COLOSSAL,
}


@pytest.mark.parametrize("text", FP16.values(), ids=FP16)
def test_fp16_is_the_precision_and_master_weights_stay_fp32(tmp_path: Path, text: str) -> None:
    done = imported(tmp_path, text, "train.sh" if "--" in text else "theirs.yaml")
    assert value(done, f"{MODEL}dtype") == "fp16"
    assert value(done, f"{MODEL}master_dtype") in (None, "fp32")
    assert not lost(done) & {"fp16", "float16", "torch_dtype", "precision", "policy.precision", "mixed_precision"}


def test_fp16_weights_of_trl_are_computed_in_bf16(tmp_path: Path) -> None:
    done = imported(tmp_path, "model_name_or_path: m\ndataset_name: d\ndtype: float16\nloss_type: [sigmoid]\n")
    assert value(done, f"{MODEL}dtype") == "bf16"
    assert entry(done, "dtype").outcome == "different meaning"


def test_the_loss_scale_of_deepspeed_in_roll_is_kept(tmp_path: Path) -> None:
    done = imported(
        tmp_path,
        """
exp_name: e
pretrain: m
actor_train:
  model_args: {dtype: fp16, disable_gradient_checkpointing: true}
  strategy_args:
    strategy_name: deepspeed_train
    strategy_config: {fp16: {enabled: true, initial_scale_power: 12, loss_scale_window: 500}}
""",
    )
    assert value(done, f"{TRAINING}initial_scale_power") == 12
    assert value(done, f"{TRAINING}loss_scale_window") == 500
    assert not lost(done)


@pytest.mark.parametrize(
    ("trainer", "text"),
    [
        (
            "llama-factory",
            "model_name_or_path: org/model\nstage: kto\ndataset: labelled\npref_beta: 0.3\nkto_chosen_weight: 1.5\n"
            "kto_rejected_weight: 0.5\nfinetuning_type: full\n",
        ),
        (
            "axolotl",
            "base_model: org/model\nrl: kto\nrl_beta: 0.3\nkto_desirable_weight: 1.5\nkto_undesirable_weight: 0.5\n"
            "datasets:\n  - path: org/labelled\n",
        ),
        (
            "ms-swift",
            "model: org/model\nrlhf_type: kto\nbeta: 0.3\ndesirable_weight: 1.5\nundesirable_weight: 0.5\n"
            "dataset: org/labelled\ntuner_type: full\n",
        ),
    ],
)
def test_kto_keeps_its_beta_and_weights(tmp_path: Path, trainer: str, text: str) -> None:
    done = imported(tmp_path, text)
    assert done.translation.dialect.name == trainer
    found = [value(done, name) for name in ("pref_loss", "beta", "desirable_weight", "undesirable_weight")]
    assert found == ["kto", 0.3, 1.5, 0.5]
    assert not lost(done)


_NF4 = {"bits": 4, "type": "nf4", "double": True}


@pytest.mark.parametrize(
    ("trainer", "given", "expected"),
    [
        ("trl", {"use_peft": True, "load_in_4bit": True}, _NF4 | {"double": False}),
        (
            "trl",
            {"use_peft": True, "load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "use_bnb_nested_quant": True},
            _NF4 | {"type": "fp4"},
        ),
        ("trl", {"use_peft": True, "load_in_8bit": True}, {"bits": 8}),
        ("trl", {"load_in_4bit": True}, {}),  # it trains all weights
        ("llama-factory", {"finetuning_type": "lora", "quantization_bit": 4}, _NF4),
        (
            "llama-factory",
            {"finetuning_type": "lora", "quantization_bit": 4, "double_quantization": False},
            _NF4 | {"double": False},
        ),
        ("llama-factory", {"finetuning_type": "lora", "quantization_bit": 3}, {}),
        ("ms-swift", {"tuner_type": "lora", "quant_method": "bnb", "quant_bits": 8}, {"bits": 8}),
        ("ms-swift", {"tuner_type": "lora", "quant_bits": 4, "bnb_4bit_quant_type": "fp4"}, _NF4 | {"type": "fp4"}),
        ("axolotl", {"adapter": "qlora", "load_in_4bit": True}, _NF4),
        ("axolotl", {"adapter": "lora", "load_in_8bit": True}, {"bits": 8}),
        (
            "axolotl",
            {"adapter": "qlora", "load_in_4bit": True, "bnb_config_kwargs": {"bnb_4bit_use_double_quant": False}},
            _NF4 | {"double": False},
        ),
        ("open-instruct", {"use_lora": True, "use_qlora": True}, _NF4),
    ],
)
def test_a_quantized_base_has_the_trainers_defaults(trainer, given, expected):
    run = translate(NAMES[trainer], given)
    assert run.values.get("actor_train", {}).get("model_args", {}).get("quantization", {}) == expected
    assert {entry.key for entry in run.lost} == (set() if expected else {next(reversed(given))})
