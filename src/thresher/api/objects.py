"""Python objects as files and settings that a config can name: rows, datasets, models, tokenizers, a LoraConfig.

A file name contains a digest of the content, so the same object gives the same config and a run can resume.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from thresher import durable
from thresher.config.section import Section
from thresher.data.prepare.prepare import tokenizer_digest
from thresher.data.sources.readers import strip_extension_types
from thresher.data.store.reader import sha256_of_file
from thresher.errors import UserError
from thresher.importers.names import nest_flat_names
from thresher.models.loading.adapters import default_lora_target
from thresher.models.loading.load import load_model_config, load_tokenizer

_ROWS_PER_GROUP = 4096
_HINTS = {
    "DatasetDict": "give one of its splits, such as dataset['train']",
    "IterableDataset": "write its rows to a file, or give a list of them",
    "IterableDatasetDict": "write the rows of one split to a file, or give a list of them",
    "DataFrame": "give datasets.Dataset.from_pandas(frame)",
}


def data_source(dataset: Any, directory: Path, argument: str) -> dict[str, Any]:
    """Return the keys of `data_args` that name a dataset: a Dataset, rows, paths or a prepared store."""
    if isinstance(dataset, (str, PathLike)):
        path = fspath(dataset)
        is_store = (Path(path) / "manifest.json").is_file()
        return {"store": path} if is_store else {"file_name": [path]}
    if isinstance(dataset, (list, tuple)) and dataset:
        if all(isinstance(each, (str, PathLike)) for each in dataset):
            return {"file_name": [fspath(each) for each in dataset]}
        if all(isinstance(each, Mapping) for each in dataset):
            return {"file_name": [str(_write_rows(dataset, directory, argument))]}
    kind = type(dataset).__name__
    if kind == "Dataset" and hasattr(dataset, "with_format"):
        return {"file_name": [str(_write_dataset(dataset, directory, argument))]}
    if isinstance(dataset, (list, tuple)) and not dataset:
        raise UserError(f"{argument} is empty; give rows with a prompt, a chosen and a rejected response")
    if isinstance(dataset, Mapping) and kind not in _HINTS:
        names = ", ".join(map(str, dataset))
        raise UserError(f"{argument} has several datasets ({names}); join them with datasets.concatenate_datasets")
    hint = _HINTS.get(kind, "give a datasets.Dataset, a list of dicts, a path, a list of paths or a prepared store")
    raise UserError(f"{argument} is of type {kind}, which cannot be read; {hint}")


def joined_sources(datasets: Mapping[str, Any], directory: Path, argument: str) -> dict[str, Any]:
    """Return the keys of `data_args` that name several datasets, which must be files."""
    if not datasets:
        raise UserError(f"{argument} is empty; give rows with a prompt, a chosen and a rejected response")
    sources = {name: data_source(each, directory, f"{argument}[{name!r}]") for name, each in datasets.items()}
    if stores := [name for name, source in sources.items() if "store" in source]:
        raise UserError(
            f"{argument}[{stores[0]!r}] is a prepared store, which cannot be joined; give its rows or files"
        )
    return {"file_name": [file for source in sources.values() for file in source["file_name"]]}


def _write_rows(rows: Sequence[Mapping[str, Any]], directory: Path, argument: str) -> Path:
    lines = []
    for number, row in enumerate(rows):
        try:
            lines.append(json.dumps(dict(row), ensure_ascii=False, allow_nan=False).encode())
        except (TypeError, ValueError) as error:
            raise UserError(
                f"row {number} of {argument} is not JSON: {error}; use text, numbers, lists and dicts"
            ) from None
    content = b"".join(line + b"\n" for line in lines)
    path = directory / f"rows-{hashlib.sha256(content).hexdigest()[:16]}.jsonl"
    if not path.exists():
        directory.mkdir(parents=True, exist_ok=True)
        durable.replace(path, content)
    return path


def _write_dataset(dataset: Any, directory: Path, argument: str) -> Path:
    if dataset.format["type"] == "custom":
        raise UserError(f"{argument} has a transform, which is applied on access; apply it with dataset.map instead")
    if not len(dataset):
        raise UserError(f"{argument} is empty; give rows with a prompt, a chosen and a rejected response")
    tables = dataset.with_format("arrow", columns=dataset.format["columns"]).iter(_ROWS_PER_GROUP)
    directory.mkdir(parents=True, exist_ok=True)
    writer = None
    with _staged(directory / "dataset.parquet") as staging:
        try:
            for table in tables:
                # without metadata, which contains a random fingerprint
                plain = strip_extension_types(table).replace_schema_metadata(None).combine_chunks()
                writer = writer or pq.ParquetWriter(staging, plain.schema)
                writer.write_table(plain)
        except (pa.ArrowException, OSError) as error:
            raise UserError(f"{argument} cannot be written as Parquet: {error}; save it as JSON lines") from error
        finally:
            if writer is not None:
                writer.close()
        path = directory / f"dataset-{sha256_of_file(staging)[:16]}.parquet"
        staging.replace(path)
    return path


def model_path(model: Any, directory: Path, tokenizer: PreTrainedTokenizerBase | None, argument: str) -> str:
    """Return where a model is: a path or Hub name as it is, a model object after saving it with its tokenizer."""
    if isinstance(model, (str, PathLike)):
        return fspath(model)
    if not isinstance(model, PreTrainedModel):
        has_adapter = hasattr(model, "peft_config")
        hint = "give its base model, and a LoraConfig as peft_config" if has_adapter else "give a path"
        raise UserError(f"{argument} is a {type(model).__name__}, not a model of transformers; {hint}")
    _check_model(model, argument)
    origin = model.config._name_or_path
    if tokenizer is None and not origin:
        raise UserError(
            f"{argument} was not loaded from a path or name, so its tokenizer is unknown; set processing_class"
        )
    tokenizer = tokenizer or load_tokenizer(origin)
    path = directory / f"model-{_model_digest(model, tokenizer)[:16]}"

    def write(staging: Path) -> None:
        config = model.config
        # save_pretrained writes into the config, and the digest of the object must stay the same
        model.config = copy.deepcopy(config)
        try:
            model.save_pretrained(staging)
            tokenizer.save_pretrained(staging)
        except (ValueError, NotImplementedError) as error:  # such as an invalid generation config
            raise UserError(f"{argument} cannot be saved: {error}; save it yourself and give its path") from error
        finally:
            model.config = config

    _write_directory(path, write)
    return str(path)


def _check_model(model: PreTrainedModel, argument: str) -> None:
    """Reject a model object that its files would not describe exactly."""
    reason = None
    loaded_as = AutoModelForCausalLM._model_mapping.get(type(model.config), ())
    if type(model) not in (loaded_as if isinstance(loaded_as, tuple) else (loaded_as,)):
        reason = f"transformers would load it as a different class from {type(model).__name__}"
    elif getattr(model, "is_quantized", False) or getattr(model, "hf_quantizer", None) is not None:
        reason = "it is quantized"
    elif any(tensor.is_meta for tensor in model.state_dict().values()):
        reason = "some of its weights are on the meta device"
    else:
        with torch.device("meta"):
            plain = type(model)(model.config).state_dict()
        own = model.state_dict()
        changed = sorted(plain.keys() ^ own.keys()) or [name for name in own if own[name].shape != plain[name].shape]
        wide = [name for name, tensor in own.items() if tensor.dtype == torch.float64]
        if changed:
            reason = f"its weights do not match its config ({changed[0]}), as with adapters in it"
        elif wide:
            reason = f"its weights are float64 ({wide[0]})"
    if reason is not None:
        raise UserError(f"{argument} cannot be saved exactly: {reason}; save it yourself and give its path")


def _model_digest(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> str:
    digest = hashlib.sha256(model.config.to_json_string(use_diff=False).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    digest.update(_tokenizer_content(tokenizer))
    return digest.hexdigest()


def tokenizer_setting(
    tokenizer: PreTrainedTokenizerBase, model: str, directory: Path, *, trust_remote_code: bool
) -> dict[str, Any]:
    """Return the keys of `model_args` that name a tokenizer, after saving it; none for the model's own."""
    content = _tokenizer_content(tokenizer)
    if content == _tokenizer_content(load_tokenizer(model, trust_remote_code=trust_remote_code)):
        return {}
    path = directory / f"tokenizer-{hashlib.sha256(content).hexdigest()[:16]}"
    _write_directory(path, tokenizer.save_pretrained)
    return {"tokenizer_name_or_path": str(path)}


def _tokenizer_content(tokenizer: PreTrainedTokenizerBase) -> bytes:
    """What a tokenizer does with text: the vocabulary and rules, special tokens and the chat template."""
    settings = [tokenizer_digest(tokenizer), tokenizer.special_tokens_map, tokenizer.chat_template]
    return json.dumps(settings, sort_keys=True, default=str).encode()


def _write_directory(path: Path, write: Callable[[Path], object]) -> None:
    """Write a directory under another name and rename it, so that an existing directory is complete."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with _staged(path) as staging:
        write(staging)
        staging.rename(path)


@contextmanager
def _staged(path: Path) -> Iterator[Path]:
    staging = path.with_name(f".{path.name}.partial")
    durable.refuse_link(staging)
    durable.remove(staging, is_shared=True)
    try:
        yield staging
    finally:
        durable.remove(staging, is_shared=True)


# fields of a LoraConfig that have a setting here, with their names in TRL
_FIELDS = {
    "r": "lora_r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "target_modules": "lora_target_modules",
    "use_rslora": "use_rslora",
    "use_dora": "use_dora",
    "modules_to_save": "lora_modules_to_save",
    "target_parameters": "lora_target_parameters",
}
# fields that describe the config or the model, not the adapters
_DESCRIPTIONS = {"task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "inference_mode"}
# fields that TRL has no names for
_OUR_NAMES = {
    "exclude_modules": "lora_exclude",
    "rank_pattern": "lora_rank_pattern",
    "alpha_pattern": "lora_alpha_pattern",
}


def adapter_settings(peft_config: Any, model: str, root: type[Section], *, trust_remote_code: bool) -> dict[str, Any]:
    """Return the settings of adapters; a field that is set and has no setting here is an error."""
    kind = type(peft_config).__name__
    if kind != "LoraConfig":
        raise UserError(f"peft_config is a {kind}; adapters are LoRA, so give a peft.LoraConfig")
    if getattr(peft_config.task_type, "value", peft_config.task_type) not in (None, "CAUSAL_LM"):
        raise UserError(f"peft_config.task_type is {peft_config.task_type}; all models are causal language models")
    default = type(peft_config)()
    init = peft_config.init_lora_weights
    is_known = isinstance(init, str) and init.startswith(("pissa", "olora"))
    known = _FIELDS.keys() | _OUR_NAMES.keys() | _DESCRIPTIONS | ({"init_lora_weights"} if is_known else set())
    others = [name for name, value in vars(peft_config).items() if name not in known and value != vars(default)[name]]
    if others:
        raise UserError(f"peft_config.{others[0]} has no equivalent; leave it at its default")
    values = {name: value for name, value in vars(peft_config).items() if name in _FIELDS}
    target = values["target_modules"]
    if target is None:
        # PEFT's choice by architecture, where ours would be all linear modules
        target = default_lora_target(load_model_config(model, trust_remote_code=trust_remote_code).model_type)
    if isinstance(target, str) and target != "all-linear":
        raise UserError(f"peft_config.target_modules is the pattern {target!r}; give a list of names, or all-linear")
    values["target_modules"] = [target] if isinstance(target, str) else sorted(target)
    given = {_FIELDS[name]: value for name, value in values.items() if value is not None and value is not False}
    if is_known:
        given["lora_init"] = init
    if isinstance(excluded := peft_config.exclude_modules, str):
        raise UserError(f"peft_config.exclude_modules is the pattern {excluded!r}; give a list of names")
    for name, ours in _OUR_NAMES.items():
        if value := getattr(peft_config, name):
            given[ours] = dict(value) if isinstance(value, dict) else sorted(value)
    return nest_flat_names(root, {"use_peft": True, **given})
