"""DPOTrainer: a run from Python objects. It completes the config, and the pipeline does the rest."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from thresher.api.adapters import adapter_settings
from thresher.api.objects import data_source, model_path, tokenizer_setting
from thresher.builders.checkpoints import build_checkpoint_manager
from thresher.builders.export import export_checkpoint
from thresher.builders.run import logging_dir
from thresher.checkpoint.retention import latest
from thresher.config import DPOConfig, parse_config
from thresher.config.flat import merge_settings
from thresher.errors import RunStopped, UserError
from thresher.observability.log_files import METRICS
from thresher.observability.trackers import jsonl
from thresher.observability.trackers.console import ConsoleTracker
from thresher.pipeline import DPOPipeline
from thresher.redact import RedactingFormatter

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_ABSENT_ARGUMENTS = {
    "tokenizer": "it is called processing_class",
    "data_collator": "pairs are packed without padding; see layout",
    "compute_metrics": "the metrics of DPO are always computed; add others in a callback",
    "optimizers": "AdamW is the only optimizer; see learning_rate and lr_scheduler_type",
    "quantization_config": "quantized base weights are not supported",
}


@dataclass(frozen=True)
class TrainResult:
    """The end of a run: the last metrics of training and evaluation, its directory, and its checkpoints."""

    metrics: dict[str, float]
    run_dir: Path
    checkpoint: Path | None
    best_checkpoint: Path | None


class DPOTrainer:
    """Train a policy from Python objects.

    model, ref_model: a path, a Hub name or a model of transformers; a model object is copied, not trained in place.
    config, or args: settings; what the other arguments say must not be set in it. train_dataset, eval_dataset: a
    datasets.Dataset, a list of dicts, a path, a list of paths, or a prepared store. peft_config: a LoraConfig.
    processing_class: the tokenizer. callbacks: objects with methods of transformers' TrainerCallback. devices: the
    number of workers on Ray, on GPUs if there are any, or the ids of GPUs; one process when absent.

    Objects are written to `inputs` in output_dir, under names that contain a digest of their content.
    """

    def __init__(
        self,
        model: Any = None,
        config: DPOConfig | None = None,
        *,
        args: DPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        peft_config: Any = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        callbacks: Sequence[object] | None = None,
        ref_model: Any = None,
        devices: int | Sequence[int] | None = None,
        **others: Any,
    ) -> None:
        for name in (name for name, value in others.items() if value not in (None, (None, None))):
            raise UserError(
                f"DPOTrainer has no argument {name}; {_ABSENT_ARGUMENTS.get(name, 'see its documentation')}"
            )
        if config is not None and args is not None:
            raise UserError("config and args are both set; they are the same argument, keep one")
        start = config or args or DPOConfig()
        if not isinstance(start, DPOConfig):
            kind = f"{type(start).__module__}.{type(start).__name__}"
            raise UserError(f"config is a {kind}; give a DPOConfig of thresher (from thresher import DPOConfig)")
        self.callbacks = list(callbacks or ())
        self._directory = Path(start.output_dir).resolve() / "inputs"
        models, workers = self._models(start, model, ref_model, processing_class, peft_config), _devices(devices)
        # another reference would be one CPU worker
        is_scored_apart = "reference" in models and "device_mapping" in workers
        self.config = self._complete(
            start,
            models,
            {"actor_train": workers, **({"reference": workers} if is_scored_apart else {})},
            {} if train_dataset is None else {"actor_train": {"data_args": self._data(train_dataset, "train_dataset")}},
            {} if eval_dataset is None else self._validation(start, eval_dataset),
        )

    def train(self, resume_from_checkpoint: bool | str | None = None) -> TrainResult:
        """Train, or resume the run of output_dir; after an interrupt, call it again to continue.

        resume_from_checkpoint: as in the config.
        """
        added = {} if resume_from_checkpoint is None else {"resume_from_checkpoint": resume_from_checkpoint}
        config = self._complete(self.config, added)
        evaluation: dict[str, float] = {}
        with _console() as console:
            try:
                evaluation = DPOPipeline(config, console=console, callbacks=self.callbacks).run()
            except RunStopped as stopped:
                message = str(stopped).replace("rerun the same command", "call train() again")
                console.print(message)
                if stopped.exit_code == 128 + signal.SIGINT:
                    raise KeyboardInterrupt(message) from None
                if stopped.exit_code:
                    raise SystemExit(stopped.exit_code) from None
        records = jsonl.read_metrics(logging_dir(config) / METRICS)
        trained: dict[str, float] = next((record for record in reversed(records) if "loss" in record), {})
        checkpoints = build_checkpoint_manager(config)
        return TrainResult(
            {**trained, **evaluation}, Path(config.output_dir), latest(checkpoints.root), checkpoints.best()
        )

    def evaluate(self, eval_dataset: Any = None) -> dict[str, float]:
        """Evaluate the newest checkpoint, or the initial model before training, on eval_dataset or another data set."""
        config = self.config
        if eval_dataset is not None and config.validation is not None and config.validation.split is not None:
            raise UserError("validation.split holds out training pairs; call evaluate() without another data set")
        if eval_dataset is not None:
            # another data set is not a reason to refuse the checkpoint
            kept = {"resume_from_checkpoint": "auto", "validation": None}
            config = config.model_copy(update=kept)
            config = self._complete(config, self._validation(config, eval_dataset))
        if config.validation is None:
            raise UserError("there is no validation data; call evaluate(eval_dataset=...) or give DPOTrainer one")
        with _console() as console:
            return DPOPipeline(config, console=console).evaluate()

    def save_model(self, output_dir: str | PathLike[str] | None = None) -> Path:
        """Write the newest checkpoint as a plain Hugging Face directory, adapters merged; return its path.

        output_dir: a new directory; `model` in the run's output_dir when absent.
        """
        output = Path(output_dir) if output_dir is not None else Path(self.config.output_dir) / "model"
        checkpoint = latest(build_checkpoint_manager(self.config).root)
        if checkpoint is None:
            raise UserError(f"{self.config.output_dir} has no checkpoint to save; call train() first")
        trusts = self.config.actor_train.model_args.trust_remote_code
        export_checkpoint(checkpoint, output, trust_remote_code=trusts)
        return output

    def _models(
        self, config: DPOConfig, model: Any, ref_model: Any, tokenizer: PreTrainedTokenizerBase | None, peft_config: Any
    ) -> dict[str, Any]:
        """Settings of the models, the tokenizer and the adapters."""
        args: dict[str, Any] = {}
        values: dict[str, Any] = {"actor_train": {"model_args": args}}
        is_object = not isinstance(model, (str, PathLike, type(None)))
        if model is not None:
            values["pretrain"] = model_path(model, self._directory, tokenizer, "model")
        path = values.get("pretrain") or config.policy_path
        trusts = config.actor_train.model_args.trust_remote_code
        if path is None:
            raise UserError("no model is given; pass its path, its Hub name or a model object")
        if tokenizer is not None and not is_object:
            args |= tokenizer_setting(tokenizer, path, self._directory, trust_remote_code=trusts)
        if ref_model is not None:
            reference = model_path(ref_model, self._directory, tokenizer, "ref_model")
            if reference != path:
                values["reference"] = {"model_args": {"model_name_or_path": reference}}
        if peft_config is not None:
            adapters = adapter_settings(peft_config, path, DPOConfig, trust_remote_code=trusts)
            values = merge_settings(values, adapters, DPOConfig)
        return values

    def _data(self, dataset: Any, argument: str) -> dict[str, Any]:
        return data_source(dataset, self._directory, argument)

    def _validation(self, config: DPOConfig, dataset: Any) -> dict[str, Any]:
        """Settings of validation data, read with the settings of the training data unless the config sets them."""
        source = self._data(dataset, "eval_dataset")
        train = config.actor_train.data_args.model_dump(exclude_unset=True)
        shared = {name: value for name, value in train.items() if name not in ("file_name", "store", "dataset_dir")}
        own = {} if config.validation is None else config.validation.data_args.model_dump(exclude_unset=True)
        settings = own if "store" in source else {**shared, **own}
        return {"validation": {"data_args": merge_settings(settings, source, DPOConfig)}}

    @staticmethod
    def _complete(config: DPOConfig, *added: dict[str, Any]) -> DPOConfig:
        """Add settings to a config, none of which it may set to another value."""
        values = config.model_dump(exclude_unset=True)
        for each in added:
            values = merge_settings(values, each, DPOConfig)
        return parse_config(values)


def train(
    model: Any = None, train_dataset: Any = None, *, eval_dataset: Any = None, peft_config: Any = None, **settings: Any
) -> TrainResult:
    """Train in one call: settings are those of `DPOConfig`, and `devices` and `callbacks` those of `DPOTrainer`."""
    names = ("processing_class", "callbacks", "ref_model", "devices")
    arguments = {name: settings.pop(name) for name in names if name in settings}
    trainer = DPOTrainer(
        model,
        DPOConfig(**settings),
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        peft_config=peft_config,
        **arguments,
    )
    return trainer.train()


def _devices(devices: int | Sequence[int] | None) -> dict[str, Any]:
    """Settings of the workers: a number means GPUs if there are any, otherwise CPU workers."""
    if devices is None:
        return {}
    if not isinstance(devices, int):
        return {"device_mapping": list(devices)}
    if devices < 1:
        raise UserError(f"devices is {devices}; give a number of workers, or the ids of GPUs")
    return {"device_mapping": list(range(devices))} if torch.cuda.is_available() else {"num_workers": devices}


@contextmanager
def _console() -> Iterator[ConsoleTracker]:
    """Make the console of a run; it also shows warnings, unless the application has configured logging."""
    console, package = ConsoleTracker(), logging.getLogger("thresher")
    is_configured = logging.getLogger().handlers or any(
        not isinstance(handler, logging.NullHandler) for handler in package.handlers
    )
    handler = _Warnings(console)
    if not is_configured:
        package.addHandler(handler)
    try:
        yield console
    finally:
        package.removeHandler(handler)


class _Warnings(logging.Handler):
    def __init__(self, console: ConsoleTracker) -> None:
        super().__init__(logging.WARNING)
        self.setFormatter(RedactingFormatter())
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.print(f"{record.levelname.lower()}: {self.format(record)}")
