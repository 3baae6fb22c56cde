"""Export of a checkpoint as a plain Hugging Face model directory, with adapters merged, or of its adapter alone."""

from __future__ import annotations

import logging
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from pydantic import ValidationError
from transformers import AutoModelForImageTextToText, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from thresher import durable
from thresher.builders.checkpoints import build_checkpoint_manager
from thresher.builders.engines import quantization_of, trained_parts
from thresher.builders.model_card import CARD, is_to_keep, model_card, write_card
from thresher.checkpoint.json_io import load_json
from thresher.checkpoint.manager import latest
from thresher.checkpoint.manifest import verify
from thresher.checkpoint.state import load_weights, weight_names
from thresher.config import DPOConfig, ModelArgs
from thresher.config.roles import at_revision
from thresher.errors import CheckpointError, UserError
from thresher.models.loading.adapters import AdapterFiles, merge_adapter
from thresher.models.loading.load import (
    DTYPES,
    REWARD_HEAD,
    load_model_config,
    load_tokenizer,
    pad_apart_from_eos,
    set_pad_token,
    translate_load_errors,
)
from thresher.models.loading.location import locate_model
from thresher.models.loading.merged import load_plain
from thresher.models.loading.quantization import stored_quantization
from thresher.models.loading.weight_files import find_file, find_weight_files, open_safetensors
from thresher.models.pipeline_chunk import decoder_of, head_of
from thresher.reference.fingerprint import config_digest, model_digest
from thresher.training.trainer import POLICY_SETTINGS, POLICY_WEIGHTS

logger = logging.getLogger(__name__)

MAX_SHARD_SIZE = "50GB"  # the default of transformers
_SIZE = re.compile(r"[1-9]\d*([KMGT]B|[KMG]IB)", re.IGNORECASE)

# of a model or an adapter that save_pretrained wrote: an earlier one's would be read with the new one's
_REPLACED = (
    *("model*.safetensors", "model.safetensors.index.json", "config.json", "generation_config.json"),
    *("adapter_model.safetensors", "adapter_config.json"),
)
# settings of adapters that vLLM rejects, or reads as if they were absent
_NOT_IN_VLLM = ("use_dora", "modules_to_save", "rank_pattern", "alpha_pattern")
# of a multimodal model, beside its tokenizer
_PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def load_checkpoint(
    checkpoint: Path, *, dtype: str | None = None, trust_remote_code: bool = False, merge_into: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, str]:
    """Load the trained model, adapters merged, and its tokenizer; also return the path of the base model.

    merge_into: a different base model to merge the adapters into. trust_remote_code is not taken from the checkpoint,
    which may be untrusted.
    """
    verify(checkpoint)
    path, args = _trusted_model(checkpoint, trust_remote_code=trust_remote_code)
    if merge_into is None:
        _check_base(checkpoint, path, args)
    tokenizer = policy_tokenizer(path, args)
    if merge_into is not None:
        _check_has_adapter(checkpoint, args)
        logger.warning(
            "the adapter was trained on %s and is merged into %s%s: the result is not the model that was trained and "
            "evaluated; compare them before use",
            path,
            merge_into,
            f", after {', '.join(args.merge_adapters)}" if args.merge_adapters else "",
        )
        # the other model stays as precise as it is
        path, args = merge_into, args.model_copy(update={"quantization": None})
    plain = load_trained_model(path, args, checkpoint, dtype=dtype)
    is_reward_model = hasattr(plain, "score")
    if is_reward_model:
        pad_apart_from_eos(tokenizer)
    if is_reward_model or tokenizer.pad_token_id is not None:
        plain.config.pad_token_id = tokenizer.pad_token_id
    return plain, tokenizer, path


def _trusted_model(checkpoint: Path, *, trust_remote_code: bool) -> tuple[str, ModelArgs]:
    """Return the model that a run trained, if its code is trusted."""
    path, args = trained_model(checkpoint)
    if args.trust_remote_code and not trust_remote_code:
        raise UserError(
            f"the run of {checkpoint} executed Python code from the model {path}; pass --trust-remote-code if you "
            "trust that model"
        )
    return path, args


def policy_tokenizer(path: str, args: ModelArgs) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a run, whose policy starts from the model at a path."""
    tokenizer_path = args.tokenizer_name_or_path or path
    tokenizer = load_tokenizer(tokenizer_path, trust_remote_code=args.trust_remote_code)
    set_pad_token(tokenizer, args.pad_token, tokenizer_path)
    return tokenizer


def _check_has_adapter(checkpoint: Path, args: ModelArgs) -> None:
    if not args.has_adapter or args.starts_from_weights:
        why = f"lora_init {args.lora_init}, whose adapter belongs to what is left of its base"
        raise UserError(
            f"the run of {checkpoint} has {why if args.has_adapter else 'no adapter'}, so there is nothing to merge "
            "into another model; leave --merge-into out"
        )


def check_export(
    checkpoint: Path,
    output: Path | None,
    *,
    max_shard_size: str = MAX_SHARD_SIZE,
    trust_remote_code: bool = False,
    overwrite: bool = False,
    adapter: bool = False,
    merge_into: str | None = None,
) -> bool:
    """Reject what an export refuses before it reads weights; return whether the directory has files."""
    is_used = output is not None and _check_output(output, overwrite=overwrite)
    if not _SIZE.fullmatch(max_shard_size):
        raise UserError(f"the shard size {max_shard_size!r} is not a number with a unit; write it like 500MB or 5GB")
    path, args = _trusted_model(checkpoint, trust_remote_code=trust_remote_code)
    if adapter and (why := _why_not_adapter(checkpoint, args)) is not None:
        raise UserError(f"the run of {checkpoint} {why}, so its adapter cannot be exported; leave --adapter out")
    if merge_into is not None:
        _check_has_adapter(checkpoint, args)
    if output is not None and output.resolve() == Path(path).resolve():
        raise UserError(f"{output} is the model that the run started from; name a different directory")
    return is_used


def export_checkpoint(
    checkpoint: Path,
    output: Path,
    *,
    dtype: str | None = None,
    max_shard_size: str = MAX_SHARD_SIZE,
    trust_remote_code: bool = False,
    overwrite: bool = False,
    merge_into: str | None = None,
    name: str | None = None,
) -> list[str]:
    """Write the model of a checkpoint and its model card; return the paths of the files in the directory.

    overwrite: replace the files of a model in a directory that has other files. name: of the model in its card, the
    directory's when absent.
    """
    is_used = check_export(
        checkpoint,
        output,
        max_shard_size=max_shard_size,
        trust_remote_code=trust_remote_code,
        overwrite=overwrite,
        merge_into=merge_into,
    )
    model, tokenizer, path = load_checkpoint(
        checkpoint, dtype=dtype, trust_remote_code=trust_remote_code, merge_into=merge_into
    )
    model = with_untrained_towers(model, path, trust_remote_code=trust_remote_code)
    if names := never_loaded(model, path):
        logger.warning(
            "the export leaves out %d tensors of %s that transformers does not load, such as %s",
            len(names),
            path,
            names[0],
        )
    with _replacing(output, is_used=is_used) as staging:
        model.save_pretrained(staging, max_shard_size=max_shard_size)
        tokenizer.save_pretrained(staging)
        if model.config.get_text_config() is not model.config:
            for file in filter(None, (find_file(path, each) for each in _PROCESSORS)):
                shutil.copyfile(file, staging / file.name)
        base, is_reward_model = trained_model(checkpoint)[0], hasattr(model, "score")
        card = model_card(
            checkpoint, base, name or output.resolve().name, is_reward_model=is_reward_model, merge_into=merge_into
        )
        write_card(staging, card)
        return _files_of(staging)


def export_adapter(
    checkpoint: Path,
    output: Path,
    *,
    dtype: str | None = None,
    trust_remote_code: bool = False,
    overwrite: bool = False,
    name: str | None = None,
) -> list[str]:
    """Write the adapter as PEFT does, in fp32 by default, the tokenizer and the model card; return their paths."""
    is_used = check_export(checkpoint, output, trust_remote_code=trust_remote_code, overwrite=overwrite, adapter=True)
    verify(checkpoint)
    path, args = trained_model(checkpoint)
    kind = quantization_of(args) or stored_quantization(path)
    _check_base(checkpoint, path, args)
    with _replacing(output, is_used=is_used) as staging, TemporaryDirectory() as scratch:
        _, module, load = _untrained_model(path, args, checkpoint)
        settings = module.peft_config["default"]
        initial = Path(scratch) / "initial"
        if args.starts_from_weights:
            # PEFT subtracts what the base has lost to the adapter, which gets twice the rank
            settings.init_lora_weights = True
            module.save_pretrained(initial, save_embedding_layers=False)
            settings.init_lora_weights = args.lora_init
        load()
        settings.revision = args.revision
        if dtype is not None:
            for parameter in module.parameters():
                parameter.data = parameter.data.to(DTYPES[dtype]) if parameter.requires_grad else parameter.data
        try:
            with warnings.catch_warnings():  # that a converted adapter belongs to changed weights
                warnings.filterwarnings("ignore", "(PiSSA|OLoRA) changes the base weights", UserWarning)
                module.save_pretrained(
                    staging,
                    save_embedding_layers=False,
                    path_initial_model_for_weight_conversion=str(initial) if initial.exists() else None,
                )
        except ValueError as error:
            raise UserError(f"PEFT cannot convert the adapter: {error}; leave --adapter out") from error
        policy_tokenizer(path, args).save_pretrained(staging)
        (staging / CARD).unlink(missing_ok=True)  # PEFT's, which names the base's path
        shown, kind_name = name or output.resolve().name, None if kind is None else str(kind)
        card = model_card(checkpoint, path, shown, adapter_alone=True, quantization=kind_name)
        write_card(staging, card)
        files = _files_of(staging)
    if kind is not None:
        logger.warning(
            "the adapter belongs to %s in %s: load that base with the same BitsAndBytesConfig; above the original "
            "weights, the model is a different one. An export without --adapter has the trained one",
            path,
            kind,
        )
    if unread := [name for name in _NOT_IN_VLLM if getattr(settings, name)]:
        logger.warning("vLLM does not support %s of an adapter; serve the merged model there", ", ".join(unread))
    return files


def _files_of(directory: Path) -> list[str]:
    return [file.relative_to(directory).as_posix() for file in directory.rglob("*") if file.is_file()]


def _why_not_adapter(checkpoint: Path, args: ModelArgs) -> str | None:
    if not args.has_adapter:
        return "has no adapter"
    if args.merge_adapters:
        return f"merged {', '.join(args.merge_adapters)} into its base, and no directory has that model"
    if has_reward_head(checkpoint):
        return "trained the head of a reward model too"
    if args.modules_to_save and args.starts_from_weights:
        return f"has modules_to_save besides lora_init {args.lora_init}, which PEFT does not convert"
    return None


def has_reward_head(checkpoint: Path) -> bool:
    return any(name.endswith(REWARD_HEAD) for name in weight_names(checkpoint))


def _check_output(output: Path, *, overwrite: bool) -> bool:
    """Reject a directory that cannot be written; return whether it has files."""
    if output.resolve() in (Path.cwd(), Path(output.anchor).resolve()):
        raise UserError(f"an export cannot replace the directory {output}; name a new one below it")
    is_used = output.exists() and (not output.is_dir() or any(output.iterdir()))
    if is_used and (not overwrite or not output.is_dir()):
        hint = ", or replace the model in it with --overwrite" if output.is_dir() else ""
        raise UserError(f"{output} is not an empty directory; name a new one{hint}")
    return is_used


@contextmanager
def _replacing(output: Path, *, is_used: bool) -> Iterator[Path]:
    """Yield a directory to write, which becomes the output if the `with` block ends without an error."""
    # written under another name and renamed, so that an existing directory is complete
    staging = output.with_name(f".{output.name}.partial")
    durable.refuse_link(staging)
    shutil.rmtree(staging, ignore_errors=True)
    staging.parent.mkdir(parents=True, exist_ok=True)
    yield staging
    readable = next(staging.glob("*config.json")).stat().st_mode
    for file in staging.glob("*.safetensors"):
        file.chmod(readable)  # safetensors writes files that only their owner can read
    if not is_used:
        if output.exists():
            output.rmdir()
        staging.rename(output)
        return
    for stale in (file for pattern in _REPLACED for file in output.glob(pattern)):
        stale.unlink()
    for file in staging.iterdir():
        target = output / file.name
        if file.name == CARD and is_to_keep(target):
            file.unlink()
            continue
        if target.is_dir():
            shutil.rmtree(target)
        file.replace(target)
    staging.rmdir()


def never_loaded(model: PreTrainedModel, path: str) -> list[str]:
    """Return the names of the stored tensors that a class of transformers silently leaves out.

    The class may ignore the layer after the last one of a small model by its number, which a large model has too.
    """
    patterns = model._keys_to_ignore_on_load_unexpected or ()
    num_layers = getattr(model.config.get_text_config(), "num_hidden_layers", 0)
    files = [file for file in find_weight_files(path) if file.suffix == ".safetensors"] if patterns else []
    names = {name for file in files for name in open_safetensors(file).keys()}  # noqa: SIM118  # not a mapping
    ignored = sorted(name for name in names if any(re.search(pattern, name) for pattern in patterns))
    layers = (re.search(r"\blayers\.(\d+)\.", name) for name in ignored)
    return [name for name, layer in zip(ignored, layers, strict=True) if not layer or int(layer[1]) >= num_layers]


def with_untrained_towers(model: PreTrainedModel, path: str, *, trust_remote_code: bool) -> PreTrainedModel:
    """Put a language model back into the multimodal model that it was loaded from, whose other weights were not read.

    A class that loads all of the checkpoint, as that of Gemma 3 does, has the other weights already.
    """
    config_class = type(load_model_config(path, trust_remote_code=trust_remote_code))
    is_whole = config_class is type(model.config) or hasattr(model, "score")
    if is_whole or config_class not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return model
    directory, arguments = locate_model(path)
    with translate_load_errors("multimodal model", path):
        whole: PreTrainedModel = AutoModelForImageTextToText.from_pretrained(
            directory, dtype=model.dtype, use_safetensors=True, **arguments
        )
    for part in (decoder_of, head_of):
        part(whole).load_state_dict(part(model).state_dict())
    whole.config.get_text_config().pad_token_id = model.config.pad_token_id
    return whole


def export_run(config: DPOConfig) -> None:
    """Export the newest checkpoint of a finished run to `model` in its output_dir."""
    output, root = Path(config.output_dir) / "model", build_checkpoint_manager(config).root
    if (checkpoint := latest(root)) is None:
        logger.warning("%s has no checkpoint, so no model was exported", root)
        return
    trusts, name = config.actor_train.model_args.trust_remote_code, output.resolve().parent.name
    export_checkpoint(checkpoint, output, trust_remote_code=trusts, overwrite=True, name=name)
    logger.info("exported %s to %s", checkpoint, output)


def load_trained_model(path: str, args: ModelArgs, weights: Path, *, dtype: str | None = None) -> PreTrainedModel:
    """Load a run's model with the trained weights of a directory, adapters merged, in the precision of its forward."""
    model, module, load = _untrained_model(path, args, weights)
    load()
    plain = merge_adapter(module) if args.has_adapter else model
    torch.nn.Module.to(plain, DTYPES[dtype or args.dtype])
    plain.config.use_cache = True
    return plain


def _untrained_model(path: str, args: ModelArgs, weights: Path) -> tuple[PreTrainedModel, Any, Callable[[], None]]:
    """Load the model of a run, with its adapters around it, and return what loads its trained weights."""
    # of quantized matrices, the values that the run has computed with: no others fit the adapters
    model = load_plain(
        path,
        [AdapterFiles.find(each) for each in args.merge_adapters],
        dtype=DTYPES[args.master_dtype],
        quantization=quantization_of(args),
        trust_remote_code=args.trust_remote_code,
        is_reward_model=has_reward_head(weights),
    )
    module = trained_parts(args).apply(model)
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    hint = f"put the model that the run started from back at {path}"
    return model, module, partial(load_weights, weights, trained, hint=hint)


def _check_base(checkpoint: Path, path: str, args: ModelArgs) -> None:
    """Raise if the model at a path is not the run's: a checkpoint lacks its config.json and the frozen weights."""
    locate_model(path)
    progress = load_json(checkpoint / "trainer.json")
    recorded = progress.get("identity") if isinstance(progress, dict) else None
    digests = {POLICY_SETTINGS: partial(config_digest, path, trust_remote_code=args.trust_remote_code)}
    if args.freezes_weights:
        digests[POLICY_WEIGHTS] = partial(model_digest, path, map(AdapterFiles.find, args.merge_adapters))
    for name, digest in digests.items():
        if not isinstance(recorded, dict) or name not in recorded:  # up to 0.2
            logger.warning("%s does not record the %s; a change of it is not detected", checkpoint, name)
        elif recorded[name] != (current := digest()):
            raise CheckpointError(
                f"the model at {path} is not the one that the run of {checkpoint} started from: the digest of the "
                f"{name} was {recorded[name]}, is {current}; put the original model back at {path} and export again"
            )


def trained_model(checkpoint: Path) -> tuple[str, ModelArgs]:
    """Return the model that a run trained. Reads no other key, so that old checkpoints survive config changes."""
    config: dict[str, Any] = load_json(checkpoint / "config.json")
    try:
        args = ModelArgs.model_validate(config["actor_train"]["model_args"])
        path = at_revision(args.model_name_or_path or config["pretrain"] or None, args.revision)
    except (ValidationError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"the config in {checkpoint} does not describe a model ({error}); export a different checkpoint"
        ) from error
    if not path:
        raise CheckpointError(f"the config in {checkpoint} names no model; export a different checkpoint")
    return str(path), args
