"""Checks of the loss, the models, the stores and this machine; they need torch, but read no weights."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch
from rich import filesize
from transformers import PreTrainedTokenizerBase

from thresher.builders.data import check_examples, open_given_store
from thresher.builders.data_parts import data_parts, data_settings
from thresher.builders.engines import check_engine, check_model, check_strategy
from thresher.builders.inputs import RunInputs
from thresher.builders.objective import as_read, build_objective, for_data
from thresher.builders.preflight.files import Messages, data_sections, existing_parent, problems_of
from thresher.builders.reference_mode import (
    reference_has_workers,
    reference_mode,
    same_initial_weights,
    unused_settings,
)
from thresher.builders.run import build_tracking
from thresher.builders.samples import build_judge, read_prompts_file
from thresher.checkpoint.manager import list_checkpoints
from thresher.config import DPOConfig
from thresher.data.prepare.blocks import find_template
from thresher.data.store.joined import join
from thresher.data.tokenization.chat_template import eos_token
from thresher.engines.native.optimizers.registry import state_bytes
from thresher.errors import UserError
from thresher.models.layouts import VARLEN, PaddedLayout, vocab_size_of
from thresher.models.loading.load import DTYPES, load_tokenizer, max_positions
from thresher.models.loading.location import TOKENIZER_FILES
from thresher.models.loading.weight_files import find_file, find_weight_files


def check_reference_mode(config: DPOConfig) -> Messages:
    """Also finds an unknown loss, and parameters and modifiers that it does not have."""
    mode = reference_mode(config, build_objective(config))
    for text in unused_settings(config, mode):
        yield UserWarning(text)
    has_own_model = mode in ("precompute", "concurrent")
    policy_dtype, reference_dtype = config.actor_train.model_args.dtype, config.reference_dtype
    is_coarser = torch.finfo(DTYPES[reference_dtype]).eps > torch.finfo(DTYPES[policy_dtype]).eps
    if has_own_model and same_initial_weights(config) and is_coarser:
        yield UserError(
            f"reference.model_args.dtype is {reference_dtype} and actor_train.model_args.dtype is {policy_dtype}, but "
            "both start from the same weights, so margins would not start at 0; remove reference.model_args.dtype"
        )
    has_workers = mode == "concurrent" and config.uses_ray and reference_has_workers(config, mode)
    if has_workers and not config.reference.is_replicated:
        yield UserError(
            "a concurrent reference cannot be sharded; set reference.strategy_args.strategy_name to hf_infer, or "
            "reference.mode to precompute"
        )


def check_strategies(config: DPOConfig) -> Messages:
    yield from problems_of(check_strategy, config.actor_train, "actor_train")
    yield from problems_of(check_strategy, config.reference, "reference")


SETTINGS = (check_reference_mode, check_strategies)


def check_weight_files(inputs: RunInputs) -> Messages:
    for path in inputs.model_configs:
        if Path(path).exists():  # the weights of a Hub model may not be downloaded yet
            yield from problems_of(find_weight_files, path)


def check_architecture(inputs: RunInputs) -> Messages:
    """Also finds adapters on modules that the policy does not have, and frozen modules."""
    yield from problems_of(lambda: inputs.policy)


def check_engines(inputs: RunInputs) -> Messages:
    yield from problems_of(check_engine, inputs.config, "actor_train")
    yield from problems_of(check_engine, inputs.config, "reference")
    if inputs.config.runtime == "torchrun" and inputs.reference_path is not None:
        # a different model on the policy's mesh
        yield from problems_of(check_model, inputs.config, "reference", inputs.config.actor_train)


def check_tokenizer(inputs: RunInputs) -> Messages:
    tokenizer = inputs.tokenizer
    yield from problems_of(eos_token, tokenizer)
    for part in data_sections(inputs.config):
        if not part.args.store:
            yield from problems_of(find_template, data_settings(inputs.config, part), tokenizer)
    used = dict.fromkeys(tokenizer("a")["input_ids"], "a token")
    if tokenizer.eos_token_id is not None:
        used[tokenizer.eos_token_id] = f"the EOS token {tokenizer.eos_token!r}"
    if isinstance(inputs.layout, PaddedLayout):
        used.setdefault(inputs.layout.pad_id, f"the pad token {tokenizer.pad_token or tokenizer.eos_token!r}")
    for path, model_config in inputs.model_configs.items():
        size = vocab_size_of(model_config)
        for token_id, name in used.items():
            if size is not None and token_id >= size:
                yield UserError(
                    f"the tokenizer of {inputs.config.tokenizer_path} has {name} with id {token_id}, but the "
                    f"vocabulary of the model {path} has {size} tokens; use the tokenizer that belongs to the model"
                )


def check_reference_tokenizer(inputs: RunInputs) -> Messages:
    """The reference scores the policy's token ids, so each id must mean the same token for both."""
    if (path := inputs.reference_path) is None:
        return
    if not path.endswith(".gguf") and all(find_file(path, name) is None for name in TOKENIZER_FILES):
        return
    other = load_tokenizer(path, trust_remote_code=inputs.config.trusts_reference_code)
    theirs = _tokens_by_id(other)
    separate = inputs.config.actor_train.model_args.tokenizer_name_or_path
    policy = f"the policy {inputs.policy_path}" if separate is None else separate
    for token_id, token in _tokens_by_id(inputs.tokenizer).items():
        if theirs.get(token_id, token) != token:
            yield UserError(
                f"the reference {path} has a different tokenizer than {policy}: id {token_id} is "
                f"{theirs[token_id]!r} for it and {token!r} for the policy; use a reference with the policy's tokenizer"
            )
            return


def check_context(inputs: RunInputs) -> Messages:
    """Pairs from files may be as long as sequence_length; the lengths of a store are known."""
    config, length = inputs.config, inputs.config.sequence_length
    if all(part.args.store for part in data_sections(config)):
        return
    for path, model_config in inputs.model_configs.items():
        limit = max_positions(model_config)
        if limit is None or length <= limit:
            continue
        if "sequence_length" in config.model_fields_set:
            yield UserError(
                f"sequence_length is {length}, but the context of {path} is {limit}; set sequence_length={limit}"
            )
        else:
            yield UserWarning(
                f"sequence_length is {length} by default, but the context of {path} is {limit}: a longer pair stops "
                f"the run after preparation; set sequence_length={limit}"
            )


def check_stores(inputs: RunInputs) -> Messages:
    config, objective = inputs.config, inputs.objective
    train, validation = (
        {
            name: open_given_store(config, part.args.store, inputs.tokenizer)
            for name, part in data_parts(config, validation=is_validation).items()
            if part.args.store
        }
        for is_validation in (False, True)
    )
    if len(train) == len(data_parts(config)):
        yield from problems_of(for_data, objective, join(train), join(validation) if validation else None)
    else:  # whether the settings fit all training data is seen when that is prepared
        for store in (*train.values(), *validation.values()):
            yield from problems_of(as_read, objective, store)
    for model_config in inputs.model_configs.values():
        stores = [*train.values(), *validation.values()]
        yield from problems_of(check_examples, config, objective, model_config, stores)


def check_samples(inputs: RunInputs) -> Messages:
    """Find a judge that cannot be imported, an API key that is not set, and prompts that cannot be read."""
    config, samples = inputs.config, inputs.config.samples
    yield from problems_of(build_judge, config)
    if samples is not None and samples.prompts_file is not None:
        yield from problems_of(read_prompts_file, config, samples, inputs.tokenizer)


def _tokens_by_id(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    return {token_id: token for token, token_id in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])}


def check_devices(inputs: RunInputs) -> Messages:
    """Compare the roles with this machine's GPUs; a cluster's GPUs are checked when the run connects to it."""
    config, count = inputs.config, torch.cuda.device_count()
    if config.ray_address is not None:
        return
    for section, role in (("actor_train", config.actor_train), ("reference", config.reference)):
        is_policy = section == "actor_train"
        # a strategy of the other role is a different problem
        is_used = (role.strategy.build_train is not None) == is_policy and (is_policy or inputs.loads_reference)
        if is_used and role.strategy.needs_gpu and not (count or role.device_mapping):
            other = "fsdp2_train" if is_policy else "hf_infer"
            yield UserError(
                f"{section}.strategy_args.strategy_name is {role.strategy_name}, which needs a GPU per worker, but "
                f"this machine has no CUDA device; use one with GPUs, or set it to {other}, which also runs on CPUs"
            )
        if config.runtime == "torchrun" and count:  # each rank finds its device on its own node
            continue
        if role.device_mapping and max(role.device_mapping) >= count:
            here = f"only devices 0 to {count - 1}" if count else "no CUDA device"
            yield UserError(
                f"{section}.device_mapping requests device {max(role.device_mapping)}, but this machine has {here}; "
                "use available devices, or remove device_mapping and set num_workers to run on CPUs"
            )


def check_compiler(inputs: RunInputs) -> Messages:
    """Warn if Triton, which compiles FlexAttention and compiled layers for a GPU, lacks the C compiler it calls."""
    config, policy = inputs.config, inputs.config.actor_train
    uses_gpu = torch.cuda.device_count() and (policy.device_mapping or not config.uses_ray)
    is_packed = inputs.layout.needs_pair_attention and policy.model_args.attn_implementation != VARLEN
    if not uses_gpu or not (is_packed or policy.training_args.torch_compile):
        return
    if not any(map(shutil.which, (os.environ.get("CC", ""), "gcc", "clang"))):
        yield UserWarning(
            "this machine has no C compiler, which Triton needs to compile GPU kernels; install gcc on every node, or "
            "set the environment variable CC to a compiler"
        )


def check_tracker_packages(inputs: RunInputs) -> Messages:
    yield from problems_of(build_tracking, inputs.config, None)


def check_disk_space(inputs: RunInputs) -> Messages:
    config, size = inputs.config, checkpoint_size(inputs)
    root = Path(config.output_dir) / "checkpoints"
    usage, num_existing = shutil.disk_usage(existing_parent(root)), len(list_checkpoints(root))
    if usage.total == 0:  # such as /proc
        yield UserError(
            f"{config.output_dir} is on a file system that cannot store files; set output_dir to a different one"
        )
        return
    free = usage.free
    # the best one is kept as well, and a new one is complete before an old one is deleted
    num_kept = config.save_total_limit + (config.validation is not None) + 1
    if config.save_strategy == "no":
        num_kept = 1
    elif config.max_steps is not None and config.save_strategy == "steps":
        num_kept = min(num_kept, -(-config.max_steps // (config.save_steps or config.max_steps)))
    num_new = max(1, num_kept - num_existing)
    needs = f"{config.output_dir} is on a disk with {filesize.decimal(free)} free"
    if size > free and not num_existing:
        yield UserError(
            f"{needs}, but a checkpoint takes about {filesize.decimal(size)}; free space, or set output_dir to a "
            "different disk"
        )
    elif size * num_new > free:
        yield UserWarning(
            f"{needs}, but the checkpoints to keep take about {filesize.decimal(size * num_new)} "
            f"({filesize.decimal(size)} each); lower save_total_limit, or set output_dir to a different disk"
        )


def checkpoint_size(inputs: RunInputs) -> int:
    """Estimate the bytes of a checkpoint: trained weights and optimizer state, and a reference that moves."""
    total, trained = inputs.num_parameters
    policy = inputs.config.actor_train
    stored = DTYPES[policy.model_args.master_dtype].itemsize
    synced = total if inputs.config.reference.sync_steps is not None else 0
    return int((stored + state_bytes(policy.training_args, stored)) * trained + stored * synced)


INPUTS = (
    check_weight_files,
    check_architecture,
    check_engines,
    check_tokenizer,
    check_reference_tokenizer,
    check_context,
    check_stores,
    check_samples,
    check_devices,
    check_compiler,
)
TRAINING = (check_tracker_packages, check_disk_space)
