"""The samples of a run: which models answer which prompts, and what judges the answers."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from thresher.builders.engines import quantization_of
from thresher.builders.export import load_trained_model
from thresher.builders.inputs import RunInputs
from thresher.builders.reference import reference_digest
from thresher.builders.reference_mode import initial_adapter, merged_adapters
from thresher.checkpoint.state import load_weights
from thresher.config import DPOConfig
from thresher.config.data import SamplesConfig
from thresher.data.tokenization.chat_template import load_template
from thresher.engines.engine import TrainEngine
from thresher.errors import UserError
from thresher.models.loading.adapters import AdapterFiles, merge_adapter
from thresher.models.loading.load import DTYPES, load_tokenizer
from thresher.models.loading.location import named_model
from thresher.models.loading.merged import load_plain
from thresher.models.loading.trained import TrainedParts
from thresher.reference.scorers import STEM as SYNCED
from thresher.reference.scorers import SyncedReference
from thresher.sampling.generation import GenerationSettings
from thresher.sampling.judges import INSTRUCTIONS, EndpointJudge, Judge, load_judge
from thresher.sampling.reward_judge import RewardModelJudge
from thresher.sampling.sampler import AnswerSampler, Prompt, file_prompts, store_prompts


def build_sampler(inputs: RunInputs, policy: TrainEngine, synced: SyncedReference | None) -> AnswerSampler | None:
    """The sampler of a rank; None without `samples`."""
    config = inputs.config
    if (samples := config.samples) is None:
        return None
    # a loss without a reference is compared with the model that the config names as one, the initial policy if none
    digest = reference_digest(config, inputs.mode, inputs.frozen_weights)
    key = f"{digest} {config.reference_path} {initial_adapter(config)} {config.reference_dtype}"
    return AnswerSampler(
        policy,
        partial(load_trained_model, named_model(config.policy_path), config.actor_train.model_args),
        partial(load_reference, config) if synced is not None else lambda _: load_reference(config),
        None if synced is not None else key,
        inputs.layout,
        GenerationSettings(samples.max_new_tokens, samples.temperature, config.seed),
        Path(config.output_dir) / "samples",
        partial(load_prompts, inputs),
        dict if synced is None else synced.tensors,
    )


def load_prompts(inputs: RunInputs) -> tuple[PreTrainedTokenizerBase, list[Prompt]]:
    """Load the tokenizer, and read the prompts."""
    config, samples = inputs.config, inputs.config.samples
    trusts = config.actor_train.model_args.trust_remote_code
    tokenizer = load_tokenizer(named_model(config.tokenizer_path), trust_remote_code=trusts)
    if samples is not None and samples.prompts_file is not None:
        return tokenizer, read_prompts_file(config, samples, tokenizer)
    if samples is None or inputs.validation is None:
        raise UserError("samples has no prompts; set validation or samples.prompts_file")
    return tokenizer, store_prompts(inputs.validation, tokenizer, samples.num_prompts)


def read_prompts_file(config: DPOConfig, samples: SamplesConfig, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    """Read the prompts of samples.prompts_file, with the template and system prompt of the training data."""
    args = config.actor_train.data_args
    template = load_template(tokenizer, args.template, args.template_arguments)
    return file_prompts(Path(str(samples.prompts_file)), tokenizer, template, args.system_prompt, samples.num_prompts)


def build_judge(config: DPOConfig) -> Judge | None:
    """Import the judge, find the reward model, or describe the endpoint; None without a judge."""
    samples = config.samples
    if samples is not None and samples.judge is not None and Path(samples.judge).is_dir():
        trusts = config.actor_train.model_args.trust_remote_code
        tokenizer = load_tokenizer(named_model(config.tokenizer_path), trust_remote_code=trusts)
        return RewardModelJudge.of(samples.judge, tokenizer)
    if samples is not None and samples.judge is not None:
        return load_judge(samples.judge)
    if samples is None or samples.judge_url is None:
        return None
    variable = samples.judge_key_variable
    key = None if variable is None else os.environ.get(variable)
    if variable is not None and not key:
        raise UserError(
            f"the environment variable {variable} of samples.judge_key_variable is not set; set it to the API key, or "
            "remove judge_key_variable"
        )
    return EndpointJudge(
        samples.judge_url,
        str(samples.judge_model),
        key,
        samples.judge_instructions or INSTRUCTIONS,
        samples.judge_max_tokens,
        samples.judge_timeout,
        samples.judge_attempts,
        samples.judge_concurrency,
    )


def load_reference(config: DPOConfig, synced: Path | None = None) -> PreTrainedModel:
    """Load the model that answers are compared with; synced: a directory with the weights of a synced reference."""
    path = named_model(config.reference_path)
    dtype = DTYPES[config.reference_master_dtype]
    model = load_plain(
        path,
        merged_adapters(config, of_policy=False),
        dtype=dtype,
        quantization=quantization_of(config.actor_train.model_args),
        trust_remote_code=config.trusts_reference_code,
    )
    if synced is not None:
        load_weights(synced, dict(model.named_parameters()), stem=SYNCED, hint="keep the reference's model in place")
    if (adapter := initial_adapter(config)) is not None:
        files = AdapterFiles.find(adapter)
        module = TrainedParts(adapter=files).apply(model)
        files.load(model)  # the adapter is inside of it, and its tensors have the names there
        model = merge_adapter(module)
    torch.nn.Module.to(model, DTYPES[config.reference_dtype])
    model.config.use_cache = True
    return model
