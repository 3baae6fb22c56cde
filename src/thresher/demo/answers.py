"""Answers of a model to questions of the demo, to compare the policy with the model that it started from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def sample_answers(model: Path, prompts: Sequence[str], seed: int = 0) -> list[str]:
    """Sample one answer per prompt from a model directory, with transformers alone."""
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    policy = AutoModelForCausalLM.from_pretrained(model).eval()
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": each}], tokenize=False, add_generation_prompt=True)
        for each in prompts
    ]
    inputs = tokenizer(texts, padding=True, add_special_tokens=False, return_tensors="pt", return_token_type_ids=False)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        outputs = policy.generate(**inputs, do_sample=True, top_k=0, max_new_tokens=40)
    return list(tokenizer.batch_decode(outputs[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
