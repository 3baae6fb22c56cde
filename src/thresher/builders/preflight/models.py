"""Checks of models, tokenizers, templates and stores; weights are not read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from thresher.builders.data import check_pairs, data_settings, open_given_store
from thresher.builders.engines import check_engine, check_model
from thresher.builders.preflight.files import data_sections
from thresher.builders.preflight.findings import Finding, problems_of, warning
from thresher.builders.preflight.parts import RunParts
from thresher.builders.samples import build_judge, prompt_file
from thresher.data.prepare.blocks import find_template
from thresher.data.tokenization.chat_template import eos_token
from thresher.models.layouts import PaddedLayout, vocab_size_of
from thresher.models.loading.load import load_tokenizer, max_positions
from thresher.models.loading.location import TOKENIZER_FILES
from thresher.models.loading.weight_files import find_file, find_weight_files


def check_weight_files(parts: RunParts) -> Iterator[Finding]:
    for path in parts.model_configs:
        if Path(path).exists():  # the weights of a Hub model may not be downloaded yet
            yield from problems_of(find_weight_files, path)


def check_architecture(parts: RunParts) -> Iterator[Finding]:
    """Also finds adapters on modules that the policy does not have, and frozen modules."""
    yield from problems_of(lambda: parts.policy)


def check_engines(parts: RunParts) -> Iterator[Finding]:
    yield from problems_of(check_engine, parts.config, "actor_train")
    yield from problems_of(check_engine, parts.config, "reference")
    if parts.config.runtime == "torchrun" and (path := parts.reference_path) is not None:
        # another model than the policy, on the policy's axes
        yield from problems_of(check_model, parts.config, "reference", parts.config.actor_train, path)


def check_tokenizer(parts: RunParts) -> Iterator[Finding]:
    tokenizer = parts.tokenizer
    yield from problems_of(eos_token, tokenizer)
    for args in data_sections(parts.config).values():
        if not args.store:
            yield from problems_of(find_template, data_settings(parts.config, args), tokenizer)
    used = dict.fromkeys(tokenizer("a")["input_ids"], "a token")
    if tokenizer.eos_token_id is not None:
        used[tokenizer.eos_token_id] = f"the EOS token {tokenizer.eos_token!r}"
    if isinstance(parts.layout, PaddedLayout):
        used.setdefault(parts.layout.pad_id, f"the pad token {tokenizer.pad_token or tokenizer.eos_token!r}")
    for path, model_config in parts.model_configs.items():
        size = vocab_size_of(model_config)
        for token_id, name in used.items():
            if size is not None and token_id >= size:
                yield Finding(
                    f"the tokenizer of {parts.config.tokenizer_path} has {name} with id {token_id}, but the vocabulary "
                    f"of the model {path} has {size} tokens; use the tokenizer that belongs to the model"
                )


def check_reference_tokenizer(parts: RunParts) -> Iterator[Finding]:
    """The reference scores the policy's token ids, so each id must mean the same token for both."""
    if (path := parts.reference_path) is None or not _has_tokenizer(path):
        return
    other = load_tokenizer(path, trust_remote_code=parts.config.trusts_reference_code)
    theirs = _tokens_by_id(other)
    separate = parts.config.actor_train.model_args.tokenizer_name_or_path
    policy = f"the policy {parts.policy_path}" if separate is None else separate
    for token_id, token in _tokens_by_id(parts.tokenizer).items():
        if theirs.get(token_id, token) != token:
            yield Finding(
                f"the reference {path} has another tokenizer than {policy}: id {token_id} is "
                f"{theirs[token_id]!r} for it and {token!r} for the policy; use a reference with the policy's tokenizer"
            )
            return


def check_context(parts: RunParts) -> Iterator[Finding]:
    """Pairs from files may be as long as sequence_length; the lengths of a store are known."""
    config, length = parts.config, parts.config.sequence_length
    if all(args.store for args in data_sections(config).values()):
        return
    for path, model_config in parts.model_configs.items():
        limit = max_positions(model_config)
        if limit is None or length <= limit:
            continue
        if "sequence_length" in config.model_fields_set:
            yield Finding(
                f"sequence_length is {length}, but the context of {path} is {limit}; set sequence_length={limit}"
            )
        else:
            yield warning(
                f"sequence_length is {length} by default, but the context of {path} is {limit}: a longer pair stops "
                f"the run after preparation; set sequence_length={limit}"
            )


def check_stores(parts: RunParts) -> Iterator[Finding]:
    for args in data_sections(parts.config).values():
        if args.store:
            store = open_given_store(parts.config, args.store, parts.tokenizer)
            for model_config in parts.model_configs.values():
                yield from problems_of(check_pairs, parts.config, parts.objective, model_config, [store])


def check_samples(parts: RunParts) -> Iterator[Finding]:
    """Find a judge that cannot be imported, an API key that is not set, and prompts that cannot be read."""
    config, samples = parts.config, parts.config.samples
    yield from problems_of(build_judge, config)
    if samples is not None and samples.prompts_file is not None:
        prompts = prompt_file(config, samples, parts.tokenizer)
        yield from problems_of(prompts.read, parts.tokenizer, samples.num_prompts)


MODELS = (
    check_weight_files,
    check_architecture,
    check_engines,
    check_tokenizer,
    check_reference_tokenizer,
    check_context,
    check_stores,
    check_samples,
)


def _has_tokenizer(path: str) -> bool:
    return path.endswith(".gguf") or any(find_file(path, name) is not None for name in TOKENIZER_FILES)


def _tokens_by_id(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    return {token_id: token for token, token_id in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])}
