"""The models of an evaluation: the policy of a checkpoint and its reference, or a model directory alone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from thresher.builders.checkpoints import checkpoint_at, find_logs, has_checkpoint, read_stored
from thresher.builders.export import export_checkpoint, load_checkpoint, policy_tokenizer
from thresher.builders.reference_mode import initial_adapter, merged_adapters, reference_weights_digest
from thresher.builders.samples import load_reference
from thresher.checkpoint.json_io import load_json
from thresher.checkpoint.manifest import MANIFEST_NAME, read_manifest
from thresher.checkpoint.state import weight_names
from thresher.config import DPOConfig, parse_config
from thresher.config.data import DataArgs
from thresher.data.store.reader import sha256_of_file
from thresher.errors import UserError
from thresher.models.loading.load import REWARD_HEAD, load_model, load_tokenizer
from thresher.models.loading.location import TOKENIZER_FILES, locate_model, named_model
from thresher.models.loading.weight_files import find_file
from thresher.reference.fingerprint import model_digest

Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase]
# what decides a result besides the weights; not README.md, which an export downloads for its card
_SMALL_FILES = (
    *("config.json", "generation_config.json", "added_tokens.json", "special_tokens_map.json", "merges.txt", "*.py"),
    *("tokenizer*", "vocab*", "*.model", "*.tiktoken", "chat_template*", "additional_chat_templates/*.jinja"),
)


@dataclass(frozen=True)
class EvaluatedModel:
    """A model to evaluate, loaded or written to a directory when it is needed."""

    name: str  # policy or reference; model, if there is no run
    identity: str  # digest of its weights, settings and tokenizer
    step: int
    data_args: DataArgs  # the template of its prompts
    dtype: str | None  # fp32, bf16 or fp16; None: that of its files
    load: Callable[[], Loaded]
    write: Callable[[Path], object] | None  # None: `place` has it
    place: Path

    @contextmanager
    def directory(self) -> Iterator[Path]:
        """Yield a Hugging Face model directory with the model, which may be gone afterwards."""
        if self.write is None:
            yield self.place
            return
        with TemporaryDirectory(prefix="thresher-", ignore_cleanup_errors=True) as scratch:
            self.write(Path(scratch) / self.name)
            yield Path(scratch) / self.name


def find_models(source: str, *, trust_remote_code: bool) -> tuple[list[EvaluatedModel], Path | None]:
    """Return reference and policy of a run or checkpoint, and the directory of the run's logs; or a model alone."""
    path = Path(source)
    if not has_checkpoint(path):
        return [_plain(source, trust_remote_code=trust_remote_code)], None
    checkpoint = checkpoint_at(path)
    if any(name.endswith(REWARD_HEAD) for name in weight_names(checkpoint)):
        raise UserError(f"the run of {checkpoint} trained a reward model, which writes no text; name a different run")
    try:
        stored = read_stored(load_json(checkpoint / "config.json"))
        config = parse_config(stored)
    except UserError as error:
        raise UserError(
            f"the config in {checkpoint} cannot be read ({error}); run `thresher export` and name its directory"
        ) from error
    args = config.actor_train.model_args
    for trusts, model in (
        (config.trusts_reference_code, config.reference_path),
        (args.trust_remote_code, config.policy_path),
    ):
        if trusts and not trust_remote_code:
            raise UserError(
                f"the run of {checkpoint} executed Python code from the model {model}; pass --trust-remote-code if "
                "you trust that model"
            )
    base = named_model(config.policy_path)
    policy_tokenizer(base, args)  # puts the files of a Hub name where digests and lm-eval look for them
    # the manifest has the digests of the other files
    identity = [
        sha256_of_file(checkpoint / MANIFEST_NAME),
        *map(_small_files, (base, named_model(config.tokenizer_path))),
    ]
    policy = EvaluatedModel(
        "policy",
        _digest(identity),
        read_manifest(checkpoint).step,
        config.actor_train.data_args,
        args.dtype,
        lambda: load_checkpoint(checkpoint, trust_remote_code=trust_remote_code)[:2],
        partial(export_checkpoint, checkpoint, trust_remote_code=trust_remote_code),
        checkpoint,
    )
    return [_reference_of(config), policy], find_logs(checkpoint, stored)


def _reference_of(config: DPOConfig) -> EvaluatedModel:
    """The model that `samples` compares the policy with: the reference, or the initial policy of a loss without one."""
    path = named_model(config.reference_path)
    place = _directory_of(path)
    tokenizer_path = named_model(config.tokenizer_path)
    as_stored = place is not None and tokenizer_path == config.reference_path
    changed = [*merged_adapters(config, of_policy=False), *filter(None, [initial_adapter(config)])]
    args = config.actor_train.model_args
    changed += filter(None, [args.quantization, args.pad_token])

    def load() -> Loaded:
        return load_reference(config), policy_tokenizer(named_model(config.policy_path), args)

    identity = [reference_weights_digest(config), *map(_small_files, (path, tokenizer_path))]
    return EvaluatedModel(
        "reference",
        _digest([*identity, str(args.quantization), args.pad_token]),
        0,
        config.actor_train.data_args,
        args.dtype,
        load,
        None if as_stored and not changed else partial(_save, load),
        place or Path(path),
    )


def _plain(path: str, *, trust_remote_code: bool) -> EvaluatedModel:
    location, _ = locate_model(path)
    load_tokenizer(path, trust_remote_code=trust_remote_code)  # puts the files of a Hub name where `place` is
    place = _directory_of(path)

    def load() -> Loaded:
        tokenizer = load_tokenizer(path, trust_remote_code=trust_remote_code)
        return load_model(path, trust_remote_code=trust_remote_code), tokenizer

    identity = _digest([model_digest(path, ()), _small_files(path)])
    write = partial(_save, load) if place is None else None
    return EvaluatedModel("model", identity, 0, DataArgs(), None, load, write, place or Path(location))


def _directory_of(path: str) -> Path | None:
    """Return the directory with a model's files, on this machine or in the Hub's cache; None for a GGUF file."""
    config = None if path.endswith(".gguf") else find_file(path, "config.json")
    return None if config is None else config.parent


def _small_files(path: str) -> str:
    """Digest the config, tokenizer, templates and code of a model, or of a tokenizer."""
    if path.endswith(".gguf"):
        return model_digest(path, ())  # the file has all of them
    names = ("config.json", "generation_config.json", *TOKENIZER_FILES)  # of a Hub name, downloaded if needed
    found = [file for file in (find_file(path, name) for name in names) if file is not None]
    directory = found[0].parent if found else Path(path)
    files = {each for pattern in _SMALL_FILES for each in directory.glob(pattern) if each.is_file()}
    return _digest([[str(each.relative_to(directory)), sha256_of_file(each)] for each in sorted(files)])


def _save(load: Callable[[], Loaded], output: Path) -> None:
    model, tokenizer = load()
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
