"""DPO on one page: plain torch and transformers, padded, no trainer. The tutorial, and the oracle of the tests.

    python examples/minimal_dpo.py MODEL_DIR PAIRS.jsonl        # rows: prompt, chosen, rejected (strings)

Direct Preference Optimization, arXiv 2305.18290, equation 7: with z = (log pi(y_w|x) - log ref(y_w|x)) -
(log pi(y_l|x) - log ref(y_l|x)), the loss of a pair is -log sigmoid(beta * z), averaged over the pairs of a step.
"""

import copy
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Pair = tuple[Sequence[int], Sequence[int], Sequence[int]]  # token ids of prompt, chosen, rejected


def response_logps(model: nn.Module, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> Tensor:
    """Sum the log-probabilities of each response given its prompt: [num_responses]."""
    width = max(len(p) + len(r) for p, r in zip(prompts, responses, strict=True))
    input_ids = torch.zeros(len(prompts), width, dtype=torch.long)
    attention_mask = torch.zeros_like(input_ids)
    is_response = torch.zeros_like(input_ids, dtype=torch.bool)
    for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        end = len(prompt) + len(response)
        input_ids[i, :end] = torch.tensor([*prompt, *response])
        attention_mask[i, :end] = 1
        is_response[i, len(prompt) : end] = True
    logits = model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits
    # the logits at position t predict the token at t + 1
    logps = logits[:, :-1].float().log_softmax(-1).gather(-1, input_ids[:, 1:, None]).squeeze(-1)
    return (logps * is_response[:, 1:]).sum(-1)


def both_sides(model: nn.Module, pairs: Sequence[Pair]) -> tuple[Tensor, Tensor]:
    """Score chosen and rejected in one forward, so that both have the same padding."""
    prompts = [prompt for prompt, _, _ in pairs]
    logps = response_logps(model, prompts * 2, [c for _, c, _ in pairs] + [r for _, _, r in pairs])
    chosen, rejected = logps.chunk(2)
    return chosen, rejected


def dpo_losses(policy: tuple[Tensor, Tensor], reference: tuple[Tensor, Tensor], beta: float) -> Tensor:
    """Compute -log sigmoid(beta * margin) of each pair: [num_pairs]."""
    margin = (policy[0] - reference[0]) - (policy[1] - reference[1])
    return -F.logsigmoid(beta * margin)


def train_step(
    policy: nn.Module,
    reference: nn.Module,
    optimizer: torch.optim.Optimizer,
    pairs: Sequence[Pair],
    *,
    beta: float = 0.1,
    max_grad_norm: float = 1.0,
    losses: Callable[[tuple[Tensor, Tensor], tuple[Tensor, Tensor], float], Tensor] = dpo_losses,
) -> dict[str, float]:
    """Make one optimizer step over a batch of pairs."""
    with torch.no_grad():
        reference_logps = both_sides(reference, pairs)
    policy_logps = both_sides(policy, pairs)
    loss = losses(policy_logps, reference_logps, beta).mean()
    loss.backward()
    grad_norm = nn.utils.clip_grad_norm_(policy.parameters(), max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()
    rewards = [beta * (p - r).detach() for p, r in zip(policy_logps, reference_logps, strict=True)]
    return {
        "loss": loss.item(),
        "grad_norm": grad_norm.item(),
        "rewards/margins": (rewards[0] - rewards[1]).mean().item(),
        "rewards/accuracies": (rewards[0] > rewards[1]).float().mean().item(),
    }


def main(model_dir: str, pairs_file: str, pairs_per_step: int = 16, learning_rate: float = 1e-4) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    policy = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()  # eval: no dropout
    reference = copy.deepcopy(policy).requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=learning_rate, weight_decay=0.0)
    rows = [json.loads(line) for line in Path(pairs_file).read_text().splitlines()]
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    eos = [tokenizer.eos_token_id]
    pairs = [(bos + ids(r["prompt"]), ids(r["chosen"]) + eos, ids(r["rejected"]) + eos) for r in rows]
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(0)).tolist()
    for step, start in enumerate(range(0, len(pairs), pairs_per_step)):
        batch = [pairs[i] for i in order[start : start + pairs_per_step]]
        metrics = train_step(policy, reference, optimizer, batch)
        print(f"step {step}: " + ", ".join(f"{name} {value:.4f}" for name, value in metrics.items()))


if __name__ == "__main__":
    main(*sys.argv[1:3])
