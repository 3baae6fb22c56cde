"""What a program of TRL uses of a trainer after `train`, and what it is told about the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, DatasetDict
from transformers import AutoModelForCausalLM, TrainerState

from tests.api.test_trainer import rows_of
from tests.support.hub_server import hub_server
from tests.support.small_runs import last_weights
from thresher import DPOConfig, DPOTrainer, UserError
from thresher.api.results import mean_loss


@pytest.fixture(scope="module")
def trained(base, tmp_path_factory) -> tuple[DPOTrainer, Any]:
    """A run of two steps whose first checkpoint is the best one: the second step is large."""
    output = tmp_path_factory.mktemp("trained")
    values = {name: value for name, value in base.items() if name not in ("max_steps", "save_steps", "eval_steps")}
    values["actor_train"] = {**values["actor_train"]}
    values["actor_train"]["training_args"] = {
        **values["actor_train"]["training_args"],
        "learning_rate": 5.0,
        "lr_scheduler_type": "constant",
    }
    settings = {"max_steps": 2, "save_steps": 1, "eval_steps": 1, "load_best_model_at_end": True}
    trainer = DPOTrainer(config=DPOConfig(**values, **settings, output_dir=output))
    return trainer, trainer.train()


def test_metrics_have_the_names_of_both_worlds(trained):
    trainer, result = trained
    metrics = trainer.evaluate()
    assert metrics["eval_loss"] == metrics["eval/loss"] == metrics.get("eval_loss")
    assert metrics["eval_rewards/accuracies"] == metrics["eval/rewards/accuracies"]
    assert "eval_loss" in metrics
    assert "eval_other" not in metrics
    assert metrics.get("eval_other", 7) == 7
    assert result.metrics["learning_rate"] == result.metrics["lr"] == 5.0
    assert "eval/loss" not in trainer.evaluate(ignore_keys=["eval_loss"])
    assert trainer.evaluate(metric_key_prefix="test")["test_loss"] == metrics["eval_loss"]


def test_the_state_is_that_of_the_run(trained):
    trainer, result = trained
    state = trainer.state
    assert isinstance(state, TrainerState)
    assert (state.global_step, state.max_steps, result.global_step) == (2, 2, 2)
    losses = [entry["loss"] for entry in state.log_history if "loss" in entry]
    assert result.training_loss == pytest.approx(sum(losses) / 2)
    evaluations = [entry["eval_loss"] for entry in state.log_history if "eval_loss" in entry]
    assert state.best_metric == min(evaluations)
    assert trainer.args.per_device_train_batch_size == state.train_batch_size


def test_the_training_loss_is_a_mean_over_steps_not_over_records():
    """The first ten steps have a mean of 1, and the last two of 4: (10 * 1 + 2 * 4) / 12."""
    records = [{"step": 10, "loss": 1.0}, {"step": 10, "eval/loss": 9.0}, {"step": 12, "loss": 4.0}]
    assert mean_loss(records) == 1.5


def test_the_best_model_is_loaded_and_saved_if_it_is_asked_for(trained, tmp_path):
    trainer, result = trained
    assert result.best_checkpoint.name == "step-00000001"
    assert result.checkpoint.name == "step-00000002"
    newest = last_weights(Path(trainer.config.output_dir))
    saved = AutoModelForCausalLM.from_pretrained(trainer.save_model(tmp_path / "best"), dtype="float32").state_dict()
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(trainer.model.state_dict()[name], saved[name])
    assert not torch.equal(saved[name], next(value for key, value in newest.items() if key.endswith(name)))


def test_a_model_is_saved_again_over_the_earlier_one(trained, tmp_path):
    trainer, _ = trained
    output = tmp_path / "again"
    trainer.save_model(output)
    (output / "model-00001-of-00002.safetensors").write_bytes(b"a shard of an earlier model")
    (output / "notes.txt").write_text("mine")
    trainer.save_model(output)
    assert sorted(path.name for path in output.glob("*.safetensors")) == ["model.safetensors"]
    assert (output / "notes.txt").read_text() == "mine"
    AutoModelForCausalLM.from_pretrained(output)


def test_the_model_that_a_run_started_from_is_not_overwritten(trained):
    trainer, _ = trained
    with pytest.raises(UserError, match="is the model that the run started from"):
        trainer.save_model(trainer.config.pretrain)


def test_before_training_the_model_is_the_initial_one(files, config):
    trainer = DPOTrainer(files["model"], config, train_dataset=files["train"], eval_dataset=files["eval"])
    initial = AutoModelForCausalLM.from_pretrained(files["model"], dtype="float32").state_dict()
    assert all(torch.equal(tensor, initial[name]) for name, tensor in trainer.model.state_dict().items())
    assert trainer.processing_class.vocab_size == len(trainer.processing_class)
    assert trainer.state.log_history == []


def test_callbacks_are_added_and_removed(files, config):
    class Mine:
        pass

    trainer = DPOTrainer(files["model"], config, train_dataset=files["train"], eval_dataset=files["eval"])
    mine = Mine()
    trainer.add_callback(mine)
    assert trainer.pop_callback(Mine) is mine
    assert trainer.pop_callback(Mine) is None
    assert trainer.callbacks == []


def test_several_evaluation_sets_are_joined_in_training_and_apart_afterwards(files, config):
    rows = rows_of(files["eval"])
    sets = DatasetDict(first=Dataset.from_list(rows[:2]), second=Dataset.from_list(rows[2:]))
    trainer = DPOTrainer(files["model"], config, train_dataset=files["train"], eval_dataset=sets)
    assert len(trainer.config.validation.data_args.file_name) == 2
    metrics = trainer.evaluate()
    alone = trainer.evaluate(sets["first"])
    assert metrics["eval_first_loss"] == alone["eval_loss"]
    assert metrics["eval_second/rewards/accuracies"] >= 0
    assert "eval_loss" not in metrics


def test_libraries_show_no_progress_bars_and_their_setting_is_kept(files, config, capfd):
    from transformers.utils import logging

    logging.enable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(files["model"])
    capfd.readouterr()
    trainer = DPOTrainer(model, config, train_dataset=files["train"], eval_dataset=files["eval"])
    trainer.train()
    trainer.save_model()
    shown = capfd.readouterr()
    assert "it/s" not in shown.err + shown.out
    assert "FutureWarning" not in shown.err
    assert logging.is_progress_bar_enabled()


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("compute_loss", "set pref_loss=path/to/file.py:function"),
        ("training_step", "use callbacks"),
        ("log", "use a callback with on_log"),
        ("get_train_dataloader", "pairs are read by the plan of the run"),
        ("_save_checkpoint", "use a callback with on_save"),
        ("autocast_smart_context_manager", "see docs/train/python.md"),
    ],
)
def test_a_subclass_whose_method_would_never_be_called_is_refused(name, instead):
    with pytest.raises(UserError, match=f"Mine.{name} would never be called") as error:
        type("Mine", (DPOTrainer,), {name: lambda *_: None})
    assert instead in str(error.value)


def test_a_subclass_with_other_methods_is_a_trainer(files, config):
    class Mine(DPOTrainer):
        def evaluate(self, *arguments: Any, **named: Any) -> Any:
            return super().evaluate(*arguments, **named)

        def summary(self) -> str:
            return "mine"

    trainer = Mine(files["model"], config, train_dataset=files["train"], eval_dataset=files["eval"])
    assert trainer.summary() == "mine"


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("fit", "call train()"),
        ("predict", "call evaluate(dataset)"),
        ("optimizer", "trainer.state.log_history"),
        ("compute_loss", "pref_loss=path/to/file.py:function"),
        ("dpo_loss", "pref_loss=path/to/file.py:function"),
        ("ref_model", "trainer.config.reference_path"),
        ("compute_reference_log_probs", "`thresher precompute-reference`"),
        ("nonsense", "see docs/train/python.md"),
    ],
)
def test_an_attribute_that_is_absent_says_what_to_use(name, instead, files, config):
    trainer = DPOTrainer(files["model"], config, train_dataset=files["train"], eval_dataset=files["eval"])
    assert not hasattr(trainer, name)
    with pytest.raises(AttributeError) as error:
        getattr(trainer, name)
    assert instead in str(error.value)


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("train_config", "it is called config, or args"),
        ("optimizer", "set optim, learning_rate"),
        ("lr_scheduler", "set lr_scheduler_type"),
        ("actor", "it is called model"),
        ("booster", "set actor_train.strategy_args"),
        ("plugin", "set actor_train.strategy_args"),
        ("coordinator", "start the program with torchrun"),
        ("actor_optim", "set optim, learning_rate"),
        ("max_epochs", "DPOConfig(num_train_epochs=...)"),
        ("accumulation_steps", "DPOConfig(gradient_accumulation_steps=...)"),
        ("save_interval", "DPOConfig(save_steps=...)"),
        ("save_dir", "DPOConfig(output_dir=...)"),
        ("start_epoch", "a run resumes from its newest checkpoint"),
        ("beta", "DPOConfig(beta=...)"),
        ("max_length", "DPOConfig(max_length=...)"),
        ("nonsense", "see docs/train/python.md"),
    ],
)
def test_an_argument_of_another_trainer_says_what_to_write(name, instead):
    with pytest.raises(UserError) as error:
        DPOTrainer("model", **{name: 1})
    assert f"DPOTrainer has no argument {name}; " in str(error.value)
    assert instead in str(error.value)


def test_a_run_uploads_nothing_by_itself(files, tmp_path):
    with pytest.warns(UserWarning, match=r"call trainer.push_to_hub\(\)"):
        DPOTrainer(files["model"], DPOConfig(output_dir=tmp_path, push_to_hub=True), train_dataset=files["train"])


def test_an_upload_without_a_hub_is_a_user_error_before_the_export(trained, monkeypatch):
    import huggingface_hub.constants

    directory = Path(trained[0].config.output_dir) / "model"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"nothing can be uploaded to \S+ while HF_HUB_OFFLINE is set; unset it"):
        trained[0].push_to_hub()
    assert not directory.exists()
    trained[0].create_model_card()
    card = (directory / "README.md").read_text()
    assert "eval/loss" in card
    assert json.dumps(trained[0].config.output_dir) not in card


def test_an_edited_card_is_uploaded_with_one_warning(trained, monkeypatch, caplog):
    import huggingface_hub.constants

    directory = Path(trained[0].config.output_dir) / "model"
    directory.mkdir(exist_ok=True)
    (directory / "README.md").write_text("---\nlicense: mit\n---\nmine\n")
    with hub_server() as hub:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.address)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        trained[0].push_to_hub(token="hf_not_a_real_token")
    (files,) = hub.repos.values()
    assert files["README.md"].endswith(b"mine\n")
    assert caplog.text.count("README.md was kept") == 1
