"""Write a plain Hugging Face directory from a checkpoint: adapters merged, no trace of the trainer."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from thresher import durable
from thresher.builders.engines import attach_adapters
from thresher.checkpoint.json_io import load_json
from thresher.checkpoint.manifest import verify
from thresher.checkpoint.weights import load_weights
from thresher.config import ModelArgs
from thresher.errors import CheckpointError, UserError
from thresher.models.loading.load import DTYPES, load_model, load_tokenizer, set_pad_token
from thresher.models.loading.lora import merge_adapter


def export_checkpoint(
    checkpoint: Path, output: Path, *, dtype: str | None = None, trust_remote_code: bool = False
) -> None:
    """Load the run's model, put the checkpoint's weights in, merge and save.

    trust_remote_code: a checkpoint may come from anybody, so it is no word in it that lets a model's code run.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"{output} is not an empty directory; name a new one")
    verify(checkpoint)
    path, args = model_of(checkpoint)
    if args.trust_remote_code and not trust_remote_code:
        raise UserError(
            f"the run of {checkpoint} ran Python code that comes with the model {path}; pass --trust-remote-code if "
            "you trust that model"
        )
    model = load_model(path, dtype=DTYPES[args.master_dtype], trust_remote_code=args.trust_remote_code)
    module = attach_adapters(model, args)
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    load_weights(checkpoint, trained, hint=f"put the model that the run started from back at {path}")
    plain = merge_adapter(module) if args.lora_rank is not None else model
    torch.nn.Module.to(plain, DTYPES[dtype or args.dtype])
    plain.config.use_cache = True
    tokenizer = load_tokenizer(path, trust_remote_code=args.trust_remote_code)
    plain.config.pad_token_id = set_pad_token(tokenizer, args.pad_token, path)
    # written aside and renamed: a directory that is there is whole
    staging = output.with_name(f".{output.name}.partial")
    durable.refuse_link(staging)
    shutil.rmtree(staging, ignore_errors=True)
    staging.parent.mkdir(parents=True, exist_ok=True)
    plain.save_pretrained(staging)
    tokenizer.save_pretrained(staging)
    readable = (staging / "config.json").stat().st_mode
    for file in staging.glob("*.safetensors"):
        file.chmod(readable)  # safetensors writes files that only their owner may read
    if output.exists():
        output.rmdir()
    staging.rename(output)


def model_of(checkpoint: Path) -> tuple[str, ModelArgs]:
    """Say which model a run trained; no other key is read, so that checkpoints outlive changes of the config."""
    config: dict[str, Any] = load_json(checkpoint / "config.json")
    try:
        args = ModelArgs.model_validate(config["actor_train"]["model_args"])
        path = args.model_name_or_path or config["pretrain"]
    except (ValidationError, KeyError, TypeError) as error:
        raise CheckpointError(f"the config in {checkpoint} does not describe a model: {error}") from error
    if not path:
        raise CheckpointError(f"the config in {checkpoint} names no model")
    return str(path), args
