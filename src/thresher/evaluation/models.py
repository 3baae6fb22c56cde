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

from thresher.builders.checkpoints import read_stored
from thresher.builders.export import export_checkpoint, load_checkpoint
from thresher.builders.reference_mode import frozen_weights_digest, initial_adapter, merged_adapters
from thresher.builders.samples import load_reference
from thresher.checkpoint.json_io import load_json
from thresher.checkpoint.manager import latest
from thresher.checkpoint.state import weight_names
from thresher.config import DPOConfig, parse_config
from thresher.config.data import DataArgs
from thresher.data.store.reader import sha256_of_file
from thresher.errors import UserError
from thresher.models.loading.load import REWARD_HEAD, load_model, load_tokenizer
from thresher.models.loading.location import locate_model, named_model
from thresher.models.loading.weight_files import find_file
from thresher.reference.fingerprint import model_digest

Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase]
# a weight file has a digest of its own
_SMALL_BYTES = 50_000_000


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
    is_run = (path / "checkpoints").is_dir()
    checkpoint = path if (path / "manifest.json").is_file() else latest(path / "checkpoints") if is_run else None
    if checkpoint is None and is_run:
        raise UserError(f"no valid checkpoint in {source}; give the output_dir of a run, a checkpoint or a model")
    if checkpoint is None:
        return [_plain(source, trust_remote_code=trust_remote_code)], None
    if any(name.endswith(REWARD_HEAD) for name in weight_names(checkpoint)):
        raise UserError(f"the run of {checkpoint} trained a reward model, which writes no text; name a different run")
    try:
        config = parse_config(read_stored(load_json(checkpoint / "config.json")))
    except UserError as error:
        raise UserError(
            f"the config in {checkpoint} cannot be read ({error}); run `thresher export` and name its directory"
        ) from error
    if config.trusts_reference_code and not trust_remote_code:
        raise UserError(
            f"the run of {checkpoint} executed Python code from the model {config.reference_path}; pass "
            "--trust-remote-code if you trust that model"
        )
    own = checkpoint.parent.parent / "logs"
    logs = own if own.is_dir() else config.log_dir
    policy = EvaluatedModel(
        "policy",
        sha256_of_file(checkpoint / "manifest.json"),  # it has the digests of the other files
        int(load_json(checkpoint / "trainer.json")["state"]["step"]),
        config.actor_train.data_args,
        config.actor_train.model_args.dtype,
        lambda: load_checkpoint(checkpoint, trust_remote_code=trust_remote_code)[:2],
        partial(export_checkpoint, checkpoint, trust_remote_code=trust_remote_code),
        checkpoint,
    )
    return [_reference_of(config), policy], logs if logs.is_dir() else None


def _reference_of(config: DPOConfig) -> EvaluatedModel:
    """The model that `samples` compares the policy with: the reference, or the initial policy of a loss without one."""
    path = named_model(config.reference_path)
    place = _directory_of(path)
    tokenizer_path = named_model(config.tokenizer_path)
    as_stored = place is not None and tokenizer_path == config.reference_path
    changed = [*merged_adapters(config, of_policy=False), *filter(None, [initial_adapter(config)])]
    changed += filter(None, [config.actor_train.model_args.quantization])

    def load() -> Loaded:
        tokenizer = load_tokenizer(tokenizer_path, trust_remote_code=config.trusts_reference_code)
        return load_reference(config), tokenizer

    identity = [frozen_weights_digest(config, "precompute"), *map(_small_files, (path, tokenizer_path))]
    return EvaluatedModel(
        "reference",
        _digest([*identity, str(config.actor_train.model_args.quantization)]),
        0,
        config.actor_train.data_args,
        config.actor_train.model_args.dtype,
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
    """Digest the config, tokenizer and templates of a model."""
    directory = _directory_of(path)
    files = sorted(each for each in directory.iterdir() if each.is_file()) if directory else []
    files = [each for each in files if each.stat().st_size < _SMALL_BYTES and each.suffix != ".safetensors"]
    return _digest([[each.name, sha256_of_file(each)] for each in files])


def _save(load: Callable[[], Loaded], output: Path) -> None:
    model, tokenizer = load()
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
