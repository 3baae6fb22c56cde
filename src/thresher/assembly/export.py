"""Write a plain Hugging Face directory from a checkpoint: adapters merged, no trace of the trainer."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from thresher.checkpoint.exact_json import load_json
from thresher.checkpoint.manifest import verify
from thresher.checkpoint.tensors import load_tensors
from thresher.config import DPOConfig, parse_config
from thresher.errors import CheckpointError, UserError
from thresher.models.load import DTYPES, load_model, load_tokenizer, set_pad_token
from thresher.models.lora import attach_lora, merged


def export_checkpoint(checkpoint: Path, output: Path, *, dtype: str | None = None) -> DPOConfig:
    """Load the run's model, put the checkpoint's weights in, merge, save; return the run's config."""
    if output.exists() and any(output.iterdir()):
        raise UserError(f"{output} is not empty; name a new directory")
    verify(checkpoint)
    config = parse_config(load_json(checkpoint / "config.json"))
    if config.policy_path is None:
        raise UserError(f"{checkpoint} does not say which model it started from")
    args = config.actor_train.model_args
    model = load_model(config.policy_path, dtype=DTYPES[args.master_dtype], trust_remote_code=args.trust_remote_code)
    module: torch.nn.Module = model
    if args.lora_rank is not None:
        module = attach_lora(
            model, rank=args.lora_rank, alpha=args.lora_alpha, dropout=args.lora_dropout, target=args.lora_target
        )
    _put_in(module, load_tensors(checkpoint, "weights"), checkpoint)
    plain = merged(module) if args.lora_rank is not None else model
    torch.nn.Module.to(plain, DTYPES[dtype or args.dtype])
    plain.config.use_cache = True
    tokenizer = load_tokenizer(config.policy_path, trust_remote_code=args.trust_remote_code)
    plain.config.pad_token_id = set_pad_token(tokenizer, args.pad_token, config.policy_path)
    # written aside and renamed: a directory that is there is whole
    staging = output.with_name(f".{output.name}.partial")
    shutil.rmtree(staging, ignore_errors=True)
    staging.parent.mkdir(parents=True, exist_ok=True)
    plain.save_pretrained(staging)
    tokenizer.save_pretrained(staging)
    if output.exists():
        output.rmdir()
    staging.rename(output)
    return config


@torch.no_grad()
def _put_in(module: torch.nn.Module, weights: dict[str, torch.Tensor], checkpoint: Path) -> None:
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if set(parameters) != set(weights):
        odd = sorted(set(parameters) ^ set(weights))
        raise CheckpointError(f"{checkpoint} does not fit the model it names: {odd[0]} is in one of them only")
    for name, parameter in parameters.items():
        parameter.copy_(weights[name])
