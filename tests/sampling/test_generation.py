"""Generated answers are those of one prompt at a time, and a seed repeats them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.tiny_models import FAMILIES, VOCAB, tiny_model
from thresher.errors import UserError
from thresher.models.loading.load import with_soft_caps
from thresher.sampling.generation import GenerationSettings, generate, supports_continuous_batching

END = 2
_DRAW = np.random.default_rng(0)
PROMPTS = [tuple(_DRAW.integers(3, VOCAB, length).tolist()) for length in (3, 17, 1, 9)]


def loud(family: str) -> torch.nn.Module:
    """A model whose most likely tokens are far apart, so that rounding does not choose between them."""
    model = with_soft_caps(tiny_model(family), None).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6)
    return model


def one_by_one(model: torch.nn.Module, prompt: tuple[int, ...], max_new_tokens: int) -> tuple[int, ...]:
    """The oracle: a forward over the whole text per token, without a cache."""
    ids = list(prompt)
    while len(ids) - len(prompt) < max_new_tokens and (len(ids) == len(prompt) or ids[-1] != END):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return tuple(ids[len(prompt) :])


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_answers_are_those_of_the_plain_forward(family: str) -> None:
    model = loud(family)
    answers = generate(model, PROMPTS, GenerationSettings(10, 0.0, seed=0), [END])
    assert answers == [one_by_one(model, prompt, 10) for prompt in PROMPTS]


def test_a_window_that_the_model_ignores_is_not_applied() -> None:
    model = loud("llama_stray_window")
    assert not supports_continuous_batching(model)
    assert supports_continuous_batching(loud("llama"))
    answers = generate(model, PROMPTS, GenerationSettings(10, 0.0, seed=0), [END])
    assert answers == [one_by_one(model, prompt, 10) for prompt in PROMPTS]


@pytest.mark.parametrize("family", ["llama", "llama_stray_window"])
def test_answers_do_not_depend_on_the_generation_config_of_the_model(family: str) -> None:
    model = loud(family)
    model.generation_config.repetition_penalty, model.generation_config.no_repeat_ngram_size = 5.0, 1
    answers = generate(model, PROMPTS, GenerationSettings(10, 0.0, seed=0), [END])
    assert answers == [one_by_one(model, prompt, 10) for prompt in PROMPTS]
    assert model.generation_config.repetition_penalty == 5.0  # the model keeps it


@pytest.mark.parametrize("family", ["llama", "llama_stray_window"])
def test_a_seed_repeats_the_answers_and_another_one_does_not(family: str) -> None:
    model = tiny_model(family).eval()
    first, again, other = (generate(model, PROMPTS, GenerationSettings(10, 1.0, seed), [END]) for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize("family", ["llama", "llama_stray_window"])
def test_equal_prompts_get_different_answers(family: str) -> None:
    one, two = generate(tiny_model(family).eval(), [PROMPTS[0]] * 2, GenerationSettings(10, 1.0, seed=1), [END])
    assert one != two


def test_answers_end_at_the_context_of_the_model() -> None:
    model = tiny_model("llama").eval()
    context = model.config.max_position_embeddings
    long = tuple([5] * (context - 3))
    answers = generate(model, [long, (7,)], GenerationSettings(8, 1.0, seed=0), [-5 % VOCAB])
    assert len(answers[0]) <= 3
    with pytest.raises(UserError, match="leaves no room for an answer in the model's context of 128"):
        generate(model, [(5,) * context], GenerationSettings(8, 1.0, seed=0), [END])


def test_generation_leaves_the_attention_of_the_model_as_it_was() -> None:
    model = tiny_model("llama").eval()
    before = model.config._attn_implementation
    generate(model, PROMPTS, GenerationSettings(4, 0.0, seed=0), [END])
    assert model.config._attn_implementation == before
