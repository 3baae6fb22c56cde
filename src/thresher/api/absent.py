"""What other trainers' DPOTrainer has and this one has not: what to write instead, argument by argument."""

from __future__ import annotations

from typing import Any

from thresher.config import DPOConfig
from thresher.errors import UserError
from thresher.importers.names import names_in_python, names_of_other_trainers

_OPTIMIZER = "set optim, learning_rate, weight_decay and param_groups in DPOConfig"
_SCHEDULE = "set lr_scheduler_type and warmup_steps in DPOConfig"
_LOSS = "write it as a function of the pairs, and set pref_loss=path/to/file.py:function; see docs/concepts/losses.md"
_ENGINE = "set actor_train.strategy_args in DPOConfig, and the number of workers as devices; see docs/scale/engines.md"
_LAUNCHER = "give the number of workers as devices, or start the program with torchrun"
_STEPS = "use callbacks, or DPOPipeline.open() to train step by step"
_DATA = "pairs are read by the plan of the run, from train_dataset and eval_dataset"
_METRICS = "the metrics of DPO are always computed; add others in a callback"
_LOGS = "use a callback with on_log, or track_with in DPOConfig"
_IN_THE_RUN = "it is in the processes of the run; trainer.state.log_history has its metrics"

_ARGUMENTS = {
    "tokenizer": "it is called processing_class",
    "train_config": "it is called config, or args",
    "actor": "it is called model",
    "data_collator": "pairs are packed without padding; see layout",
    "compute_metrics": _METRICS,
    "preprocess_logits_for_metrics": _METRICS,
    **dict.fromkeys(("optimizers", "optimizer", "actor_optim", "optimizer_cls_and_kwargs"), _OPTIMIZER),
    **dict.fromkeys(("lr_scheduler", "actor_lr_scheduler"), _SCHEDULE),
    **dict.fromkeys(("booster", "plugin"), _ENGINE),
    "coordinator": _LAUNCHER,
    "quantization_config": "set actor_train.model_args.quantization in DPOConfig; see docs/train/lora.md",
    "model_init": "give a path, a Hub name or a model object as model",
    "start_epoch": "a run resumes from its newest checkpoint by itself; see resume_from_checkpoint in DPOConfig",
    "disable_reference": "set reference={'mode': 'none'} in DPOConfig",
    "compute_loss_func": _LOSS,
}
_ATTRIBUTES = {
    "fit": "call train(): its data is DPOTrainer's train_dataset and eval_dataset, its logs logging_dir and "
    "track_with of DPOConfig",
    "predict": "call evaluate(dataset) for metrics, or generate with trainer.model",
    "tokenizer": "it is called processing_class",
    "ref_model": "the reference is scored in the run; trainer.config.reference_path names it",
    "compute_reference_log_probs": "the run does it once per pair, or `thresher precompute-reference` before it",
    **dict.fromkeys(("optimizer", "lr_scheduler", "create_optimizer", "create_scheduler"), _IN_THE_RUN),
    "hyperparameter_search": "use `thresher sweep`",
    "train_dataset": "trainer.config.actor_train.data_args names its files",
    "eval_dataset": "trainer.config.validation.data_args names its files",
    "callback_handler": "trainer.callbacks is the list of callbacks",
}
# methods that transformers or TRL call, and that a subclass overrides
_METHODS_BY_REASON = {
    _LOSS: "compute_loss _compute_loss dpo_loss odds_ratio_loss get_batch_loss_metrics concatenated_forward "
    "concatenated_inputs compute_ref_log_probs",
    _STEPS: "training_step train_step _inner_training_loop floating_point_ops",
    _LOGS: "log store_metrics _maybe_log_save_evaluate",
    _DATA: "get_train_dataloader get_eval_dataloader get_test_dataloader get_batch_samples _get_train_sampler "
    "_get_eval_sampler _prepare_dataset tokenize_row process_row",
    _OPTIMIZER: "create_optimizer_and_scheduler create_optimizer get_optimizer_cls_and_kwargs",
    _SCHEDULE: "create_scheduler",
    _METRICS: "prediction_step evaluation_loop",
    "use a callback with on_save, or save_steps in DPOConfig": "_save_checkpoint _save",
}
_METHODS = {name: reason for reason, names in _METHODS_BY_REASON.items() for name in names.split()}


def absent_argument(name: str) -> str:
    """Say what to write instead of an argument that DPOTrainer does not have."""
    reason = _ARGUMENTS.get(name)
    if reason is None:
        known = names_in_python(DPOConfig)
        setting = name if name in known else names_of_other_trainers().get(name, "").rpartition(".")[2]
        reason = f"it is a setting: DPOConfig({setting}=...)" if setting in known else "see docs/train/python.md"
    return f"DPOTrainer has no argument {name}; {reason}"


def absent_attribute(name: str) -> str:
    """Say what to use instead of an attribute that DPOTrainer does not have."""
    reason = {**_METHODS, **_ATTRIBUTES}.get(name, "see docs/train/python.md for its methods")
    return f"DPOTrainer has no attribute {name}; {reason}"


def refuse_overrides(subclass: type[Any], trainer: type[Any]) -> None:
    """Refuse a subclass with a method of transformers' or TRL's trainer that would never be called."""
    own = [name for name, value in vars(subclass).items() if callable(value) and not hasattr(trainer, name)]
    if not own:
        return
    from transformers import Trainer  # slow to import, and subclasses are rare

    for name in own:
        if name in _METHODS or hasattr(Trainer, name):
            reason = _METHODS.get(name, "see docs/train/python.md for what to use instead")
            raise UserError(f"{subclass.__name__}.{name} would never be called: a run does not use it; {reason}")
