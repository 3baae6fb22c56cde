"""Export of a checkpoint as a plain Hugging Face model directory, with adapters merged."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from transformers import PreTrainedModel

from thresher import durable
from thresher.builders.engines import trained_parts
from thresher.checkpoint.json_io import load_json
from thresher.checkpoint.manifest import verify
from thresher.checkpoint.weights import load_weights
from thresher.config import ModelArgs
from thresher.config.roles import at_revision
from thresher.errors import CheckpointError, UserError
from thresher.models.loading.load import DTYPES, load_model, load_tokenizer, set_pad_token
from thresher.models.loading.lora import merge_adapter


def export_checkpoint(
    checkpoint: Path, output: Path, *, dtype: str | None = None, trust_remote_code: bool = False
) -> None:
    """Load the run's model, load the checkpoint's weights into it, merge adapters and save.

    trust_remote_code is not taken from the checkpoint, which may be untrusted.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"{output} is not an empty directory; name a new one")
    verify(checkpoint)
    path, args = _trained_model(checkpoint)
    if args.trust_remote_code and not trust_remote_code:
        raise UserError(
            f"the run of {checkpoint} executed Python code from the model {path}; pass --trust-remote-code if you "
            "trust that model"
        )
    plain = load_trained_model(path, args, checkpoint, dtype=dtype)
    tokenizer_path = args.tokenizer_name_or_path or path
    tokenizer = load_tokenizer(tokenizer_path, trust_remote_code=args.trust_remote_code)
    set_pad_token(tokenizer, args.pad_token, tokenizer_path)
    if tokenizer.pad_token_id is not None:
        plain.config.pad_token_id = tokenizer.pad_token_id
    # written under another name and renamed, so that an existing directory is complete
    staging = output.with_name(f".{output.name}.partial")
    durable.refuse_link(staging)
    shutil.rmtree(staging, ignore_errors=True)
    staging.parent.mkdir(parents=True, exist_ok=True)
    plain.save_pretrained(staging)
    tokenizer.save_pretrained(staging)
    readable = (staging / "config.json").stat().st_mode
    for file in staging.glob("*.safetensors"):
        file.chmod(readable)  # safetensors writes files that only their owner can read
    if output.exists():
        output.rmdir()
    staging.rename(output)


def load_trained_model(path: str, args: ModelArgs, weights: Path, *, dtype: str | None = None) -> PreTrainedModel:
    """Load a run's model with the trained weights of a directory, adapters merged, in the precision of its forward."""
    model = load_model(path, dtype=DTYPES[args.master_dtype], trust_remote_code=args.trust_remote_code)
    module = trained_parts(args).apply(model)
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    load_weights(weights, trained, hint=f"put the model that the run started from back at {path}")
    plain = merge_adapter(module) if args.has_adapter else model
    torch.nn.Module.to(plain, DTYPES[dtype or args.dtype])
    plain.config.use_cache = True
    return plain


def _trained_model(checkpoint: Path) -> tuple[str, ModelArgs]:
    """Return the model that a run trained. Reads no other key, so that old checkpoints survive config changes."""
    config: dict[str, Any] = load_json(checkpoint / "config.json")
    try:
        args = ModelArgs.model_validate(config["actor_train"]["model_args"])
        path = at_revision(args.model_name_or_path or config["pretrain"] or None, args.revision)
    except (ValidationError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"the config in {checkpoint} does not describe a model ({error}); export another checkpoint"
        ) from error
    if not path:
        raise CheckpointError(f"the config in {checkpoint} names no model; export another checkpoint")
    return str(path), args
