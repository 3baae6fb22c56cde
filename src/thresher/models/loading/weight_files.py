"""Find the files of a model's weights, for one process, sharded loading and the digest of the weights.

In the order of transformers: `transformers_weights` of config.json, model.safetensors, then the safetensors index.
Files that transformers would not read by tensor name from safetensors are rejected.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers import PreTrainedConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME
from transformers.utils.hub import cached_file

from thresher.durable import is_safe_relative_path
from thresher.errors import UserError
from thresher.models.loading.location import hub_arguments, read_index

# parts of the names that PEFT gives to the parameters of an adapter, and of modules that are trained whole
_OF_ADAPTERS = (".lora_", ".modules_to_save.")
# transformers prefers such files to all others
_DISTRIBUTED_CHECKPOINT = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")


def is_of_adapter(name: str) -> bool:
    """Whether a parameter of a model belongs to its adapter; modules that are trained whole do."""
    return any(part in f".{name}" for part in _OF_ADAPTERS)


def name_in_files(name: str) -> str:
    """Return the name without adapters of a parameter that does not belong to one."""
    # base_layer is there twice around stacked experts
    return name.replace(".base_layer", "").replace(".original_module", "")


def find_weight_files(path: str) -> tuple[Path, ...]:
    """Return the GGUF file or the safetensors files of a model; a tensor in several files is read from the last."""
    if path.endswith(".gguf"):
        return (Path(path),)
    if find_file(path, "adapter_config.json") is not None:
        raise UserError(
            f"{path} contains a PEFT adapter (adapter_config.json); merge it into its base model with PEFT's "
            "merge_and_unload and save that model"
        )
    if shards := [file for file in Path(path).glob("shard-*") if _DISTRIBUTED_CHECKPOINT.fullmatch(file.name)]:
        raise UserError(
            f"{path} contains a distributed checkpoint ({min(shards).name}); load it with transformers and save it "
            "with save_pretrained"
        )
    file = _named_file(path) or find_file(path, SAFE_WEIGHTS_NAME) or find_file(path, SAFE_WEIGHTS_INDEX_NAME)
    if file is None and (pickled := find_file(path, WEIGHTS_NAME) or find_file(path, WEIGHTS_INDEX_NAME)):
        raise UserError(
            f"{path} has no safetensors weights, only pickles ({pickled.name}), which can run code when they are "
            "loaded; if you trust them, load the model with transformers, save it with save_pretrained and use that "
            "directory"
        )
    if file is None:
        raise UserError(
            f"{path} has no safetensors weights ({SAFE_WEIGHTS_NAME} or {SAFE_WEIGHTS_INDEX_NAME}); load it with "
            "transformers and save it with save_pretrained, or download it again"
        )
    files = (file,) if file.suffix == ".safetensors" else _indexed_files(path, file)
    for each in files:
        open_safetensors(each)  # reads the header
    return files


def check_shardable(path: str) -> None:
    """Reject a model whose tensors cannot be read in slices; downloads no weights of a Hub name."""
    reason = None
    if path.endswith(".gguf"):
        reason = "it is a GGUF file; convert it to safetensors"
    elif is_quantized_elsewhere(path):
        reason = "its weights are quantized, and not by bitsandbytes; use a model that is not quantized"
    if reason is not None:
        raise UserError(
            f"{path} cannot be sharded: {reason}, or set strategy_args.strategy_config.dp_replicate to the number of "
            "workers for a full copy per worker"
        )
    if Path(path).is_dir():
        find_weight_files(path)


def has_plain_tensors(path: str) -> bool:
    """Whether a model is in safetensors files that are read as they are: transformers must convert any other."""
    return not path.endswith(".gguf") and not is_quantized_elsewhere(path)


def is_quantized_elsewhere(path: str) -> bool:
    """Whether a model's config.json says that its weights are quantized, by another package than bitsandbytes."""
    stored = config_of(path).get("quantization_config")
    return stored is not None and stored.get("quant_method") != "bitsandbytes"


def find_file(path: str, name: str) -> Path | None:
    """Find a file in a model directory, or in the Hugging Face cache, downloading it if needed."""
    location, revision = hub_arguments(path)
    try:
        found = cached_file(location, name, **revision, _raise_exceptions_for_missing_entries=False)
    except OSError as error:
        raise UserError(f"{name} of {path} can neither be found nor downloaded: {error}") from error
    return None if found is None else Path(found)


def open_safetensors(file: Path) -> Any:
    """Open a safetensors file; its tensors are read on access."""
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} is not a readable safetensors file ({error}); copy the model again") from error


def missing_tensor(path: str, name: str) -> UserError:
    return UserError(
        f"the weight files of {path} have no tensor {name}; download the model again, with the config.json that "
        "belongs to it"
    )


def wrong_shape(path: str, name: str, stored: Sequence[int], expected: Sequence[int]) -> UserError:
    return UserError(
        f"{name} has shape {list(stored)} in {path} and {list(expected)} in the model; use the config.json that "
        "belongs to the weight files"
    )


def differently_tied(path: str, name: str, other: str) -> UserError:
    return UserError(
        f"the config.json of {path} ties {name} to {other}, but the weight files have different values for them; set "
        "tie_word_embeddings to false in config.json, or remove one of them from the files"
    )


def _named_file(path: str) -> Path | None:
    """Find the file or index that config.json names as `transformers_weights`; None if it names none."""
    config = config_of(path)
    name, nested = config.get("transformers_weights"), config.get("text_config")
    if nested and "transformers_weights" in {*config, *nested}:
        raise UserError(
            f"the config.json of {path} has both text_config and transformers_weights, which transformers may ignore; "
            f"rename the weights to {SAFE_WEIGHTS_NAME} and remove transformers_weights"
        )
    if name is None:
        return None
    is_safetensors = str(name).endswith((".safetensors", ".safetensors.index.json"))
    if not (is_safetensors and is_safe_relative_path(name)):
        raise UserError(
            f"the config.json of {path} names {name!r} as transformers_weights; name a .safetensors file or a "
            ".safetensors.index.json file in the model directory"
        )
    return _existing(path, name, "its config.json names as transformers_weights")


def _indexed_files(path: str, index: Path) -> tuple[Path, ...]:
    names = sorted(read_index(index, in_use=True))
    if others := [name for name in names if not name.endswith(".safetensors")]:
        raise UserError(
            f"{index} names {others[0]!r}, which is not a safetensors file; load the model with transformers and save "
            "it with save_pretrained"
        )
    return tuple(_existing(path, name, "its index names") for name in names)


def _existing(path: str, name: str, named_by: str) -> Path:
    if (file := find_file(path, name)) is None:
        raise UserError(f"{path} has no {name}, which {named_by}; copy or download the model again")
    return file


def config_of(path: str) -> dict[str, Any]:
    location, revision = hub_arguments(path)
    try:
        values: dict[str, Any] = PreTrainedConfig.get_config_dict(location, **revision)[0]
    except (OSError, ValueError) as error:
        raise UserError(f"the config.json of {path} cannot be read: {error}") from error
    return values
