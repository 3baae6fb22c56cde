"""DPOTrainer: a run from Python objects. It completes the config, and the pipeline does the rest."""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from transformers import trainer_pt_utils

from thresher.api.absent import absent_argument, absent_attribute, refuse_overrides
from thresher.api.objects import adapter_settings, data_source, joined_sources, model_path, tokenizer_setting
from thresher.api.process import Accelerator, open_console, quiet_libraries
from thresher.api.results import Metrics, TrainResult, mean_loss, read_records, trainer_state
from thresher.builders.checkpoints import build_checkpoint_manager
from thresher.builders.engines import quantization_of
from thresher.builders.export import export_checkpoint, load_checkpoint
from thresher.builders.model_card import model_card, write_card
from thresher.builders.objective import trains_rewards
from thresher.builders.reference_mode import merged_adapters
from thresher.builders.upload import open_repository, upload
from thresher.checkpoint.manager import latest
from thresher.config import DPOConfig, parse_config
from thresher.config.section import merge_settings
from thresher.errors import RunStopped, UserError
from thresher.importers.names import TRAINER_OPTIONS, trl_arguments
from thresher.models.loading.load import DTYPES, load_tokenizer
from thresher.models.loading.location import named_model
from thresher.models.loading.merged import load_plain
from thresher.observability.trackers.callbacks import name_in_trl
from thresher.pipeline import DPOPipeline
from thresher.runtime.launch import find_launch

if TYPE_CHECKING:
    from datasets import Dataset
    from huggingface_hub import CommitInfo
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerState

    # a dataset, its rows, a path, several paths, or a prepared store
    PairSource: TypeAlias = Dataset | Sequence[Mapping[str, Any]] | str | PathLike[str] | Sequence[str | PathLike[str]]


class DPOTrainer:
    """Train a policy from Python objects.

    Objects are written to `inputs` in output_dir, under names that contain a digest of their content. The methods of
    TRL's trainer that a program calls after `train` are here; a subclass with one that is never called is an error.

    Args:
        model: the policy's path or Hub name, or a model of transformers, which is copied and not trained in place.
        config: the settings; none may contradict another argument.
        args: another name of `config`, as in TRL.
        train_dataset: a datasets.Dataset, a list of dicts, a path, a list of paths, or a prepared store.
        eval_dataset: the same for validation pairs, or several of them by name.
        peft_config: a LoraConfig of PEFT; full fine-tuning when absent.
        processing_class: the tokenizer; the model's own when absent.
        callbacks: objects with methods of transformers' TrainerCallback.
        ref_model: the reference, as `model`; the initial policy when absent.
        devices: the number of workers on Ray, on GPUs if there are any, or the ids of GPUs; one process when absent.
        others: arguments of other trainers, which are rejected with the name to use here.
    """

    def __init__(
        self,
        model: str | PathLike[str] | PreTrainedModel | None = None,
        config: DPOConfig | None = None,
        *,
        args: DPOConfig | None = None,
        train_dataset: PairSource | None = None,
        eval_dataset: PairSource | Mapping[str, PairSource] | None = None,
        peft_config: Any = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        callbacks: Sequence[object] | None = None,
        ref_model: str | PathLike[str] | PreTrainedModel | None = None,
        devices: int | Sequence[int] | None = None,
        **others: Any,
    ) -> None:
        for name in (name for name, value in others.items() if value not in (None, (None, None))):
            raise UserError(absent_argument(name))
        if config is not None and args is not None:
            raise UserError("config and args are both set; they are the same argument, keep one")
        start = config or args or DPOConfig()
        if not isinstance(start, DPOConfig):
            kind = f"{type(start).__module__}.{type(start).__name__}"
            raise UserError(f"config is a {kind}; give a DPOConfig of thresher (from thresher import DPOConfig)")
        self.callbacks = list(callbacks or ())
        self._options = TRAINER_OPTIONS | start.trainer_options
        self.hub_model_id: str | None = self._options["hub_model_id"]
        if self._options["push_to_hub"]:
            warnings.warn("push_to_hub: nothing is uploaded during training; call trainer.push_to_hub()", stacklevel=2)
        self._tokenizer = processing_class
        self._loaded: tuple[Path | None, PreTrainedModel] | None = None
        self._eval_sets: Mapping[str, Any] = eval_dataset if isinstance(eval_dataset, Mapping) else {}
        self._directory = Path(start.output_dir).resolve() / "inputs"
        with quiet_libraries():
            models, workers = self._models(start, model, ref_model, processing_class, peft_config), _devices(devices)
        # another reference would be one CPU worker
        is_scored_apart = "reference" in models and "device_mapping" in workers
        added = [models, {"actor_train": workers, **({"reference": workers} if is_scored_apart else {})}]
        if train_dataset is not None:
            source = data_source(train_dataset, self._directory, "train_dataset")
            added.append({"actor_train": {"data_args": source}})
        if eval_dataset is not None:
            added.append(self._validation(start, eval_dataset))
        self.config = self._complete(start, *added)

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        refuse_overrides(cls, DPOTrainer)

    if not TYPE_CHECKING:  # else mypy would accept any name

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(absent_attribute(name))

    def train(self, resume_from_checkpoint: bool | str | None = None) -> TrainResult:
        """Train, or resume the run of output_dir; after an interrupt, call it again to continue.

        Args:
            resume_from_checkpoint: as in the config.
        """
        added = {} if resume_from_checkpoint is None else {"resume_from_checkpoint": resume_from_checkpoint}
        config = self._complete(self.config, added)
        evaluation: dict[str, float] = {}
        started = time.monotonic()
        with open_console() as console, quiet_libraries():
            try:
                evaluation = DPOPipeline(config, console=console, callbacks=self.callbacks).run()
            except RunStopped as stopped:
                message = str(stopped).replace("rerun the same command", "call train() again")
                console.print(message)
                if stopped.exit_code == 128 + signal.SIGINT:
                    raise KeyboardInterrupt(message) from None
                if stopped.exit_code:
                    raise SystemExit(stopped.exit_code) from None
        records = read_records(config)
        trained: dict[str, Any] = next((record for record in reversed(records) if "loss" in record), {})
        loss = mean_loss(records)
        timing = {"train_loss": loss, "train_runtime": time.monotonic() - started}
        checkpoints = build_checkpoint_manager(config)
        return TrainResult(
            metrics=Metrics({**trained, **evaluation, **timing}),
            run_dir=Path(config.output_dir),
            checkpoint=latest(checkpoints.root),
            best_checkpoint=checkpoints.best(),
            global_step=int(trained.get("step", 0)),
            training_loss=loss,
        )

    def evaluate(
        self,
        eval_dataset: PairSource | Mapping[str, PairSource] | None = None,
        ignore_keys: Sequence[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Metrics:
        """Evaluate the newest checkpoint, or the initial model before training.

        Args:
            eval_dataset: pairs other than the trainer's; several by name are evaluated one by one, and their metrics
                are called eval_NAME/... .
            ignore_keys: metrics to leave out.
            metric_key_prefix: the first part of each metric's name.
        """
        named: Mapping[str, Any] = (
            self._eval_sets if eval_dataset is None else eval_dataset if isinstance(eval_dataset, Mapping) else {}
        )
        if named:
            found = [self.evaluate(each, ignore_keys, f"{metric_key_prefix}_{name}") for name, each in named.items()]
            return Metrics({key: value for metrics in found for key, value in metrics.items()})
        config = self.config
        if eval_dataset is not None and config.validation is not None and config.validation.split is not None:
            raise UserError("validation.split holds out training pairs; call evaluate() without another dataset")
        if eval_dataset is not None:
            # another dataset is not a reason to refuse the checkpoint
            # nor are the sets that the best checkpoint is chosen by
            changes = {"resume_from_checkpoint": "auto", "validation": None, "metric_for_best_model": "eval/loss"}
            config = config.model_copy(update=changes)
            config = self._complete(config, self._validation(config, eval_dataset))
        if config.validation is None:
            raise UserError("there is no validation data; call evaluate(eval_dataset=...) or give DPOTrainer one")
        with open_console() as console, quiet_libraries():
            metrics = DPOPipeline(config, console=console).evaluate()
        hidden = {name_in_trl(key).replace("/", "_") for key in ignore_keys or ()}
        shown = [name for name in metrics if name_in_trl(name).replace("/", "_") not in hidden]
        return Metrics({name.replace("eval/", f"{metric_key_prefix}/", 1): metrics[name] for name in shown})

    @property
    def args(self) -> SimpleNamespace:
        """The settings under the names of transformers' TrainingArguments and TRL's DPOConfig."""
        return SimpleNamespace(**{**trl_arguments(self.config), **self._options})

    @property
    def state(self) -> TrainerState:
        """transformers' TrainerState, from the logs of the run: log_history, global_step, best_metric and others."""
        return trainer_state(self.config, self.args)

    @property
    def processing_class(self) -> PreTrainedTokenizerBase:
        """The tokenizer."""
        if self._tokenizer is None:
            trusts = self.config.actor_train.model_args.trust_remote_code
            self._tokenizer = load_tokenizer(named_model(self.config.tokenizer_path), trust_remote_code=trusts)
        return self._tokenizer

    @property
    def model(self) -> PreTrainedModel:
        """A copy of the trained model, adapters merged, loaded on first use; the initial model before training."""
        checkpoint = self._checkpoint()
        if self._loaded is None or self._loaded[0] != checkpoint:
            args = self.config.actor_train.model_args
            with quiet_libraries():
                if checkpoint is None:
                    path, dtype = named_model(self.config.policy_path), DTYPES[args.master_dtype]
                    model = load_plain(
                        path,
                        merged_adapters(self.config),
                        dtype=dtype,
                        quantization=quantization_of(args),
                        trust_remote_code=args.trust_remote_code,
                        is_reward_model=trains_rewards(self.config),
                    )
                else:
                    model, *_ = load_checkpoint(checkpoint, trust_remote_code=args.trust_remote_code)
            self._loaded = checkpoint, model
        return self._loaded[1]

    @property
    def accelerator(self) -> Accelerator:
        """What programs use of accelerate's Accelerator outside of training."""
        launch = find_launch(os.environ)
        return Accelerator() if launch is None else Accelerator(launch.rank, launch.size, launch.local_rank)

    def is_world_process_zero(self) -> bool:
        """Whether this process leads the run: always, except under torchrun and srun."""
        return self.accelerator.is_main_process

    def add_callback(self, callback: object) -> None:
        """Add a callback, an instance or a class."""
        self.callbacks.append(callback)

    def remove_callback(self, callback: object) -> None:
        """Remove a callback: the instance, or the first one of a class."""
        self.pop_callback(callback)

    def pop_callback(self, callback: object) -> object | None:
        """Remove a callback and return it; None if there is no such callback."""
        for position, each in enumerate(self.callbacks):
            if each is callback or (isinstance(callback, type) and isinstance(each, callback)):
                return self.callbacks.pop(position)
        return None

    def save_model(self, output_dir: str | PathLike[str] | None = None) -> Path:
        """Write the newest checkpoint as a plain Hugging Face directory, adapters merged; return its path.

        With load_best_model_at_end, the best checkpoint.

        Args:
            output_dir: where to write, `model` in the run's output_dir when absent; the files of a model that is there
                are replaced, other files stay.
        """
        output = Path(output_dir) if output_dir is not None else Path(self.config.output_dir) / "model"
        if self.is_world_process_zero():
            self._export(output)
        return output

    def _export(self, output: Path) -> list[str]:
        trusts = self.config.actor_train.model_args.trust_remote_code
        with quiet_libraries():
            return export_checkpoint(
                self._saved_checkpoint(), output, trust_remote_code=trusts, overwrite=True, name=self._hub_name
            )

    @property
    def _hub_name(self) -> str:
        return self.hub_model_id or Path(self.config.output_dir).resolve().name

    def save_state(self) -> None:
        """Write `trainer_state.json` to output_dir, as transformers does."""
        trainer_pt_utils.save_state(self)

    def log_metrics(self, split: str, metrics: Mapping[str, Any]) -> None:
        """Print metrics as transformers does.

        Args:
            split: `train`, `eval` or another name.
            metrics: what `train` or `evaluate` returned.
        """
        trainer_pt_utils.log_metrics(self, split, _named_as_in_trl(metrics))

    def save_metrics(self, split: str, metrics: Mapping[str, Any], combined: bool = True) -> None:
        """Write metrics to `SPLIT_results.json`, and to `all_results.json` if combined, as transformers does."""
        trainer_pt_utils.save_metrics(self, split, _named_as_in_trl(metrics), combined)

    def create_model_card(
        self,
        model_name: str | None = None,
        dataset_name: str | list[str] | None = None,
        tags: str | list[str] | None = None,
        language: str | None = None,
        license: str | None = None,  # noqa: A002
    ) -> None:
        """Write the model card, README.md, to `model` in output_dir; one that was edited is kept, with a warning.

        Args:
            model_name: the title, and the name to load the model by; hub_model_id or output_dir's name when absent.
            dataset_name: names of datasets on the Hub; those of the config when absent.
            tags: added to the card's own.
            language: a code such as `en`.
            license: an identifier of the Hub; the one of the base model's card when absent.
        """
        if not self.is_world_process_zero():
            return
        directory = Path(self.config.output_dir) / "model"
        directory.mkdir(parents=True, exist_ok=True)
        card = model_card(
            self._saved_checkpoint(),
            named_model(self.config.policy_path),
            model_name or self._hub_name,
            is_reward_model=trains_rewards(self.config),
            datasets=dataset_name,
            tags=[tags] if isinstance(tags, str) else tags,
            language=language,
            license=license,
        )
        write_card(directory, card)

    def push_to_hub(
        self,
        commit_message: str = "End of training",
        blocking: bool = True,  # noqa: ARG002
        token: str | None = None,
        revision: str | None = None,
        **card: Any,
    ) -> CommitInfo | None:
        """Save the model and upload it to the Hugging Face Hub, as hub_model_id or by the name of output_dir.

        Args:
            commit_message: the message of the commit on the Hub.
            blocking: for TRL's programs; the upload is complete when this returns in any case.
            token: an access token; hub_token or the stored one when absent.
            revision: the branch to upload to; hub_revision or the default branch when absent.
            card: arguments of create_model_card.
        """
        if not self.is_world_process_zero():
            return None
        self._saved_checkpoint()  # before a repository is created
        token, revision = token or self._options["hub_token"], revision or self._options["hub_revision"]
        private = self._options["hub_private_repo"]
        self.hub_model_id = open_repository(self._hub_name, token=token, private=private, revision=revision)
        directory = Path(self.config.output_dir) / "model"
        files = self._export(directory)
        if card:  # else the export's is the same
            self.create_model_card(**card)
        return upload(directory, self._hub_name, files, message=commit_message, token=token, revision=revision)

    def end(self) -> None:
        """Do nothing: a run closes its trackers and processes itself. For TRL's programs."""

    def _checkpoint(self) -> Path | None:
        """The newest checkpoint, or with load_best_model_at_end the best one if there was an evaluation."""
        manager = build_checkpoint_manager(self.config)
        best = manager.best() if self._options["load_best_model_at_end"] else None
        return best or latest(manager.root)

    def _saved_checkpoint(self) -> Path:
        if (checkpoint := self._checkpoint()) is None:
            raise UserError(f"{self.config.output_dir} has no checkpoint to save; call train() first")
        return checkpoint

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

    def _validation(self, config: DPOConfig, dataset: Any) -> dict[str, Any]:
        """Settings of validation data, read with the settings of the training data unless the config sets them."""
        read = joined_sources if isinstance(dataset, Mapping) else data_source
        source = read(dataset, self._directory, "eval_dataset")
        train = config.actor_train.data_args.model_dump(exclude_unset=True)
        of_files = ("file_name", "store", "dataset_dir", "sources", "order")
        shared = {name: value for name, value in train.items() if name not in of_files}
        own = {} if config.validation is None else config.validation.data_args.model_dump(exclude_unset=True)
        settings = own if "store" in source else {**shared, **own}
        return {"validation": {"data_args": merge_settings(settings, source, DPOConfig)}}

    @staticmethod
    def _complete(config: DPOConfig, *added: dict[str, Any]) -> DPOConfig:
        """Add settings to a config, none of which it may set to a different value."""
        values = config.model_dump(exclude_unset=True)
        for each in added:
            values = merge_settings(values, each, DPOConfig)
        return parse_config(values)


def train(
    model: str | PathLike[str] | PreTrainedModel | None = None,
    train_dataset: PairSource | None = None,
    *,
    eval_dataset: PairSource | Mapping[str, PairSource] | None = None,
    peft_config: Any = None,
    **settings: Any,
) -> TrainResult:
    """Train in one call.

    Args:
        model: as in `DPOTrainer`.
        train_dataset: as in `DPOTrainer`.
        eval_dataset: as in `DPOTrainer`.
        peft_config: as in `DPOTrainer`.
        settings: fields of `DPOConfig`, or `processing_class`, `callbacks`, `ref_model` and `devices` of `DPOTrainer`.
    """
    names = ("processing_class", "callbacks", "ref_model", "devices")
    arguments = {name: settings.pop(name) for name in names if name in settings}
    arguments |= {"train_dataset": train_dataset, "eval_dataset": eval_dataset, "peft_config": peft_config}
    return DPOTrainer(model, DPOConfig(**settings), **arguments).train()


def _devices(devices: int | Sequence[int] | None) -> dict[str, Any]:
    """Settings of the workers: a number means GPUs if there are any, otherwise CPU workers."""
    if devices is None:
        return {}
    if not isinstance(devices, int):
        return {"device_mapping": list(devices)}
    if devices < 1:
        raise UserError(f"devices is {devices}; give a number of workers, or the ids of GPUs")
    return {"device_mapping": list(range(devices))} if torch.cuda.is_available() else {"num_workers": devices}


def _named_as_in_trl(metrics: Mapping[str, Any]) -> dict[str, Any]:
    return {name_in_trl(name): value for name, value in metrics.items()}
