"""Generate answers with transformers: continuous batching where the model supports it, otherwise prompt by prompt.

All requests are queued before the first forward, so the batches, and with them the random numbers of each answer, do
not depend on the speed of the machine; `generate_batch` starts while it still adds requests. The memory of its cache
is set to what the prompts need: by default it would take most of the free memory.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, DynamicCache, GenerationConfig, PreTrainedModel

from thresher.errors import UserError
from thresher.models.loading.load import max_positions

logger = logging.getLogger(__name__)

TokenSequence = tuple[int, ...]
Request = tuple[TokenSequence, int]  # a prompt, and the limit of its answer in tokens
_PAGE_TOKENS = 32
_MAX_BATCH_TOKENS = 1024
_POLL_SECONDS = 1.0


@dataclass(frozen=True)
class GenerationSettings:
    """How answers are drawn."""

    max_new_tokens: int
    temperature: float  # 0: the most likely token each time
    seed: int

    @property
    def draws_from_model(self) -> bool:
        """Whether answers have the model's distribution."""
        return self.temperature == 1.0


def generate(
    model: PreTrainedModel, prompts: Sequence[TokenSequence], settings: GenerationSettings, end_ids: Sequence[int]
) -> list[TokenSequence]:
    """Return the tokens of one answer per prompt, with the token that ends it; answers stop at the model's context.

    Sets the seed of torch's generators.
    """
    context = max_positions(model.config)
    room = [settings.max_new_tokens if context is None else context - len(each) for each in prompts]
    limits = [min(settings.max_new_tokens, each) for each in room]
    if min(limits) < 1:
        longest = max(map(len, prompts))
        raise UserError(
            f"a prompt of samples has {longest} tokens, which leaves no room for an answer in the model's context of "
            f"{context}; use shorter prompts"
        )
    sampling: dict[str, Any] = {"do_sample": False}
    if settings.temperature:
        sampling = {"do_sample": True, "temperature": settings.temperature, "top_k": 0, "top_p": 1.0}
    config = GenerationConfig(
        max_new_tokens=settings.max_new_tokens, eos_token_id=list(end_ids), pad_token_id=end_ids[0], **sampling
    )
    model.eval()
    generate_all = _generate_together if supports_continuous_batching(model) else _generate_each
    return generate_all(model, list(zip(prompts, limits, strict=True)), config, settings.seed)


def supports_continuous_batching(model: PreTrainedModel) -> bool:
    """Whether transformers has a paged cache for all of a model's layers, and an attention that reads it.

    transformers 5.22 takes any `sliding_window` of a config without `layer_types` for the window of all layers. Llama
    ignores that key, so its answers would come from a different model: such configs are generated one by one.
    """
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    has_pages = kinds <= {"full_attention", "sliding_attention"} and not _has_doubtful_window(model)
    # heads of different sizes, as in Gemma 4, MiMo and DeepSeek-V3, do not fit into pages of one size
    has_pages = has_pages and "head_dim" not in (getattr(config, "per_layer_attributes", None) or ())
    if (value_size := getattr(config, "v_head_dim", None)) is not None:
        key_size = getattr(config, "qk_head_dim", None) or getattr(config, "head_dim", None)
        has_pages = has_pages and value_size == key_size
    return has_pages and config._attn_implementation in ("sdpa", "eager", "flash_attention_2", "flash_attention_3")


def _has_doubtful_window(model: PreTrainedModel) -> bool:
    """Whether a config names a window, but not the layers that have it."""
    config = model.config.get_text_config()
    return getattr(config, "layer_types", None) is None and getattr(config, "sliding_window", None) is not None


@torch.no_grad()
def _generate_together(
    model: PreTrainedModel, requests: Sequence[Request], config: GenerationConfig, seed: int
) -> list[TokenSequence]:
    pages = [-(-(len(prompt) + limit) // _PAGE_TOKENS) + 1 for prompt, limit in requests]
    batched: Any = model
    manager = batched.init_continuous_batching(
        generation_config=config,
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=_PAGE_TOKENS,
            num_blocks=sum(pages),
            max_batch_tokens=max(_MAX_BATCH_TOKENS, len(requests)),
            allow_block_sharing=False,
            use_async_batching=False,
            auto_switch_to_flash=False,  # it would download a kernel
            disable_nccl_graph_mixing=False,  # it would set an environment variable of the training process
            seed=seed,
        ),
    )
    for number, (prompt, limit) in enumerate(requests):
        manager.add_request(
            list(prompt), request_id=str(number), max_new_tokens=limit, eos_token_id=list(config.eos_token_id)
        )
    answers: dict[int, TokenSequence] = {}
    manager.start()
    try:
        while len(answers) < len(requests):
            result = manager.get_result(timeout=_POLL_SECONDS)
            if result is None and not manager.is_running():
                raise RuntimeError(f"generation stopped: {manager.background_thread_status.fatal_error}")
            if result is not None and result.is_finished():
                if result.error is not None:
                    raise RuntimeError(f"generation of answer {result.request_id} failed: {result.error}")
                answers[int(result.request_id)] = tuple(result.generated_tokens)
    finally:
        manager.stop(block=True)
        manager.destroy()
    return [answers[number] for number in range(len(requests))]


@torch.no_grad()
def _generate_each(
    model: PreTrainedModel, requests: Sequence[Request], config: GenerationConfig, seed: int
) -> list[TokenSequence]:
    answers: list[TokenSequence] = []
    single: Any = model
    # what `config` leaves open, such as a repetition penalty, generate() would take from generation_config.json
    own, model.generation_config = model.generation_config, GenerationConfig()
    try:
        for number, (prompt, limit) in enumerate(requests):
            torch.manual_seed(seed + number)
            ids = torch.tensor([prompt], device=model.device)
            config.max_new_tokens = limit
            # a cache of all tokens is right with and without a window; the default one would forget those outside of it
            cache = {"past_key_values": DynamicCache()} if _has_doubtful_window(model) else {}
            output = single.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config, **cache)
            answers.append(tuple(output[0, len(prompt) :].tolist()))
    finally:
        model.generation_config = own
    return answers
