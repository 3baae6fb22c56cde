"""Answers that a policy on any mesh gives after some steps."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from tests.support.engines import parity
from tests.support.engines.saved_runs import Run, build_policy, build_trainer
from thresher.checkpoint.state import load_weights
from thresher.sampling.answers import SampledAnswers
from thresher.sampling.generation import GenerationSettings
from thresher.sampling.sampler import AnswerSampler, Prompt

PROMPTS = [Prompt(str(number), tuple(range(5 + number, 9 + 2 * number))) for number in range(4)]


def sample_after_steps(run: Run) -> tuple[SampledAnswers | None, bool]:
    """Run on every rank: train, then sample; return the answers, and whether the random state is unchanged."""
    policy = build_policy(run)
    trainer = build_trainer(policy, run)
    while trainer.state.step < run.until:
        trainer.training_step()

    def load_policy(weights: Path) -> PreTrainedModel:
        model = load_reference(weights)
        load_weights(weights, dict(model.named_parameters()), hint="")
        return model

    def load_reference(_: Path) -> PreTrainedModel:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(run.model, dtype=torch.float32)
        return model

    sampler = AnswerSampler(
        policy,
        load_policy,
        load_reference,
        "made up",
        parity.LAYOUTS["shared"],
        GenerationSettings(max_new_tokens=12, temperature=0.0, seed=0),
        run.root,
        lambda: (AutoTokenizer.from_pretrained(run.root.parent / "tokenizer"), PROMPTS),
    )
    before = torch.get_rng_state()
    answers = sampler.sample()
    return answers, torch.equal(before, torch.get_rng_state())
