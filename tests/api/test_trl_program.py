"""A program of TRL's shape, from its arguments to its last line, with only its import changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.hub_server import hub_server
from tests.support.small_runs import last_weights, write_rows

# main of trl/scripts/dpo.py of TRL 1.16, and what the scripts of alignment-handbook do after training
PROGRAM = """
from datasets import Dataset, DatasetDict
from peft import LoraConfig
from transformers import EarlyStoppingCallback, TrainerCallback

from trl import DPOConfig, DPOTrainer


class Count(TrainerCallback):
    calls = 0

    def on_log(self, args, state, control, logs=None, **kwargs):
        Count.calls += 1
        assert args.learning_rate == training_args.learning_rate


model_init_kwargs = dict(revision="main", trust_remote_code=False, attn_implementation=None, dtype="float32")
training_args = DPOConfig(
    output_dir=OUTPUT,
    learning_rate=1e-2,
    num_train_epochs=1,
    max_steps=6,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    eval_strategy="steps",
    eval_steps=2,
    save_steps=2,
    logging_steps=1,
    load_best_model_at_end=True,
    metric_for_best_model="eval_loss",
    model_init_kwargs=model_init_kwargs,
    report_to="none",
    max_length=64,
    bf16=False,
    push_to_hub=True,
    hub_model_id="someone/tiny-dpo",
    hub_token="hf_not_a_real_token",
    remove_unused_columns=False,
    template="raw",
)
dataset = DatasetDict(train=Dataset.from_list(ROWS[8:]), test=Dataset.from_list(ROWS[:8]))

trainer = DPOTrainer(
    model=MODEL,
    args=training_args,
    train_dataset=dataset["train"],
    eval_dataset=dataset["test"] if training_args.eval_strategy != "no" else None,
    quantization_config=None,
    peft_config=LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    callbacks=[EarlyStoppingCallback(early_stopping_patience=10)],
)
trainer.add_callback(Count)

train_result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
trainer.accelerator.print("Training completed.")
metrics = train_result.metrics
metrics["train_samples"] = len(dataset["train"])
trainer.log_metrics("train", metrics)
trainer.save_metrics("train", metrics)
trainer.save_state()

trainer.save_model(training_args.output_dir)
trainer.accelerator.print(f"Model saved to {training_args.output_dir}.")
if trainer.accelerator.is_main_process:
    trainer.create_model_card(dataset_name="some/pairs", tags=["test"])
    trainer.model.config.use_cache = True
    trainer.model.config.save_pretrained(training_args.output_dir)

metrics = trainer.evaluate()
metrics["eval_samples"] = len(dataset["test"])
trainer.log_metrics("eval", metrics)
trainer.save_metrics("eval", metrics)

if training_args.push_to_hub:
    trainer.push_to_hub(dataset_name="some/pairs")
    trainer.accelerator.print(f"Model pushed to the Hub in {trainer.hub_model_id}.")
trainer.end()
LAST_LINE = True
"""


@pytest.mark.filterwarnings("ignore::UserWarning")  # push_to_hub and num_train_epochs, which tests below expect
def test_a_program_of_trl_runs_to_its_last_line_with_only_its_import_changed(base, tmp_path, monkeypatch, capsys):
    import huggingface_hub.constants

    rows = [json.loads(line) for line in write_rows(tmp_path / "rows.jsonl", 24, 0).read_text().splitlines()]
    output = tmp_path / "out"
    names: dict[str, Any] = {"OUTPUT": str(output), "ROWS": rows, "MODEL": base["pretrain"]}
    with hub_server() as hub:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.address)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        program = PROGRAM.replace("from trl import", "from thresher import")
        exec(compile(program, "dpo.py", "exec"), names)  # noqa: S102
    assert names["LAST_LINE"]
    trainer, result = names["trainer"], names["train_result"]

    # max_steps takes precedence over the epoch of four steps, and every step was logged
    assert (result.global_step, trainer.state.global_step, trainer.state.max_steps) == (6, 6, 6)
    assert names["Count"].calls >= 6 + 3
    assert result.training_loss == result.metrics["train_loss"] > 0
    assert "Training completed." in capsys.readouterr().out

    # the best checkpoint is saved in output_dir, beside the run's own files, and uploaded
    best = trainer.state.best_model_checkpoint
    assert Path(best).parent == output / "checkpoints"
    saved = AutoModelForCausalLM.from_pretrained(output)
    assert all(torch.equal(tensor, trainer.model.state_dict()[name]) for name, tensor in saved.state_dict().items())
    assert AutoTokenizer.from_pretrained(output).vocab_size == trainer.processing_class.vocab_size
    assert last_weights(output)
    uploaded = hub.repos["someone/tiny-dpo"]
    assert uploaded["model.safetensors"] == (output / "model" / "model.safetensors").read_bytes()
    assert b"base_model" not in uploaded["README.md"]  # a path on this machine
    assert b"some/pairs" in uploaded["README.md"]
    assert hub.messages == ["End of training"]
    assert hub.tokens == {"Bearer hf_not_a_real_token"}

    # the files that transformers writes
    state = json.loads((output / "trainer_state.json").read_text())
    assert state["log_history"] == trainer.state.log_history
    results = json.loads((output / "all_results.json").read_text())
    assert results["eval_loss"] == pytest.approx(names["metrics"]["eval/loss"])
    assert results["train_samples"] == 16
