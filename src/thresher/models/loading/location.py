"""Find where a model is: a directory, a GGUF file, or a name on the Hugging Face Hub. Imports no model library.

A Hub name may end in `@revision`: a branch, a tag or a commit.
"""

from __future__ import annotations

import json
import os
import re
from functools import cache
from pathlib import Path
from typing import Any

from thresher.durable import is_safe_relative_path
from thresher.errors import UserError
from thresher.optional import require

_HUB_NAME = re.compile(r"(?P<name>\w[\w.-]*(/\w[\w.-]*)?)(@(?P<revision>\w[\w./-]*))?")
_SECONDS_TO_REACH_HUB = 10
# a directory or repository with one of them has a tokenizer
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def named_model(path: str | None) -> str:
    """Return a model's path or name, or raise if the config has none."""
    if path is None:
        raise UserError("no model is named; set pretrain to a model directory or a .gguf file")
    return path


def hub_name(path: str) -> str | None:
    """Return a model's name on the Hub without its revision; None for a path."""
    found = _HUB_NAME.fullmatch(path)
    # not Path.exists, which raises if a name is too long for a file
    return None if found is None or os.path.exists(path) else found["name"]  # noqa: PTH110


def hub_arguments(path: str) -> tuple[str, dict[str, Any]]:
    """Return a path unchanged, or a Hub name without its revision, and the `revision` argument of transformers."""
    name = hub_name(path)
    return (path, {}) if name is None or name == path else (name, {"revision": path.removeprefix(f"{name}@")})


def find_model(path: str) -> tuple[str, dict[str, Any]]:
    """Return the directory or Hub name to load from, and the arguments `gguf_file` or `revision` of transformers."""
    location = Path(path)
    name, at, revision = path.rpartition("@")
    if at and not location.exists() and Path(name).exists():
        raise UserError(
            f"revision {revision} has no effect on {name}, which is on this machine; remove it, or give a name on the "
            "Hugging Face Hub"
        )
    if location.suffix == ".gguf":
        if not location.is_file():
            raise UserError(
                f"model file {path} does not exist; give the path of a `.gguf` file or of a model directory"
            )
        require(f"reading {path}", "gguf", extra="gguf")
        return str(location.parent), {"gguf_file": location.name}
    if location.is_dir():
        if not (location / "config.json").is_file():
            raise UserError(
                f"model directory {path} has no config.json; give a Hugging Face model directory, or the path of a "
                "`.gguf` file"
            )
        for index in location.glob("*.index.json"):
            read_index(index, in_use=False)  # rejects an index that points outside of the directory
        return str(location), {}
    if not _HUB_NAME.fullmatch(path):
        raise UserError(
            f"model directory {path} does not exist; give the path of a model directory or of a `.gguf` file"
        )
    return hub_arguments(path)


def find_tokenizer(path: str) -> tuple[str, dict[str, Any]]:
    """Find a tokenizer like `find_model`; its directory needs no model."""
    directory = Path(path)
    if directory.is_dir() and not (directory / "config.json").is_file():
        if any((directory / name).is_file() for name in TOKENIZER_FILES):
            return path, {}
        raise UserError(
            f"tokenizer directory {path} has neither {', '.join(TOKENIZER_FILES)} nor config.json; give the directory "
            "of a model or of a tokenizer that was saved with save_pretrained"
        )
    return find_model(path)


def locate_model(path: str) -> tuple[str, dict[str, Any]]:
    """Find a model like `find_model`; a Hub name that cannot be loaded is rejected within seconds."""
    return _reachable(*find_model(path), ("config.json",))


def locate_tokenizer(path: str) -> tuple[str, dict[str, Any]]:
    """Find a tokenizer like `find_tokenizer`; a Hub name that cannot be loaded is rejected within seconds."""
    return _reachable(*find_tokenizer(path), ("config.json", *TOKENIZER_FILES))


def _reachable(location: str, arguments: dict[str, Any], files: tuple[str, ...]) -> tuple[str, dict[str, Any]]:
    if not Path(location).is_dir():
        _check_hub_name(location, arguments.get("revision"), files)
    return location, arguments


@cache
def _check_hub_name(name: str, revision: str | None, files: tuple[str, ...]) -> None:
    """Ask the Hub once: without a network, transformers would retry for a minute per file."""
    from huggingface_hub import HfApi, is_offline_mode, try_to_load_from_cache
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    shown, option = (name, "") if revision is None else (f"{name}@{revision}", f" --revision {revision}")

    if is_offline_mode():
        if not any(isinstance(try_to_load_from_cache(name, file, revision=revision), str) for file in files):
            raise UserError(
                f"{shown} is neither a model directory nor in the Hugging Face cache, and HF_HUB_OFFLINE is set; give "
                f"the path of a model directory, or run `hf download {name}{option}` with a network"
            )
        return
    try:
        HfApi().model_info(name, revision=revision, timeout=_SECONDS_TO_REACH_HUB)
    except RevisionNotFoundError as error:
        raise UserError(
            f"the model {name} on the Hugging Face Hub has no revision {revision}; name a branch, a tag or a commit"
        ) from error
    except RepositoryNotFoundError as error:
        raise UserError(
            f"{name} is neither a model directory nor a model on the Hugging Face Hub; check the name, or log in with "
            "`hf auth login` if the model is private"
        ) from error
    except Exception as error:  # the exceptions of its HTTP library
        raise UserError(
            f"{name} is not a model directory, and the Hugging Face Hub cannot be reached ({error}); give the path of "
            "a model directory, or set HF_HUB_OFFLINE=1 if the model is in the cache"
        ) from error


def read_index(index: Path, *, in_use: bool) -> set[str]:
    """Read the file names of a weight index; reject names outside of its directory, even if it is not in use."""
    try:
        values = json.loads(index.read_text(encoding="utf-8"))
        names = set(values["weight_map"].values())
        _ = values["metadata"] if in_use else None  # transformers requires it
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{index} is not a weight index ({error}); copy or download the model again") from error
    if outside := [name for name in names if not is_safe_relative_path(name)]:
        raise UserError(f"{index} names {outside[0]!r}, which is outside of the model directory; do not use this model")
    return names
