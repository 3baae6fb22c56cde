"""DPO on one page: plain torch and transformers, padded, no trainer. The tutorial, and the oracle of the tests.

    python examples/minimal_dpo.py MODEL_DIR PAIRS.jsonl        # rows: prompt, chosen, rejected (strings)

Direct Preference Optimization, arXiv 2305.18290, equation 7: with z = (log pi(y_w|x) - log ref(y_w|x)) -
(log pi(y_l|x) - log ref(y_l|x)), the loss of a pair is -log sigmoid(beta * z), averaged over the pairs of a step.
For labelled responses, ranked lists and reward models, pass another loss to `train_step`.
"""

import copy
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Example = Sequence[Sequence[int]]  # token ids of a prompt and its responses; of a pair, the chosen one comes first
Sides = Sequence[Tensor]  # a number per example for its first response, for its second, ...; 0 where it has none


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


def rewards(model: nn.Module, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> Tensor:
    """Return the numbers that a reward model (sequence classification with one label) gives: [num_responses]."""
    sequences = [torch.tensor([[*prompt, *response]]) for prompt, response in zip(prompts, responses, strict=True)]
    return torch.cat([model(input_ids=ids, use_cache=False).logits[0] for ids in sequences])


def score(model: nn.Module, examples: Sequence[Example], by: Callable[..., Tensor] = response_logps) -> Sides:
    """Score all responses in one forward, so that all have the same padding."""
    num_sides = max(map(len, examples)) - 1
    places = [(side, i) for side in range(num_sides) for i, each in enumerate(examples) if len(each) > side + 1]
    values = by(model, [examples[i][0] for _, i in places], [examples[i][side + 1] for side, i in places])
    empty = values.new_zeros(num_sides, len(examples))
    return list(empty.index_put(tuple(torch.tensor(places).T), values))


def dpo_losses(policy: Sides, reference: Sides, beta: float) -> Tensor:
    """Compute -log sigmoid(beta * margin) of each pair: [num_pairs]."""
    margin = (policy[0] - reference[0]) - (policy[1] - reference[1])
    return -F.logsigmoid(beta * margin)


def kto_losses(policy: Sides, reference: Sides, beta: float, good: Tensor, weights: Sequence[float]) -> Tensor:
    """KTO, arXiv 2402.01306, equation 8; the second response of each example answers a different prompt."""
    z0 = (policy[1] - reference[1]).mean().clamp(min=0).detach()
    advantage = beta * (policy[0] - reference[0] - z0)
    return torch.where(good, weights[0] * torch.sigmoid(-advantage), weights[1] * torch.sigmoid(advantage))


def list_losses(policy: Sides, reference: Sides, beta: float, counts: Sequence[int]) -> Tensor:
    """DPO of ranked lists, the best first: arXiv 2305.18290, equation 20."""
    ranked = beta * (torch.stack(list(policy), 1) - torch.stack(list(reference), 1))
    lists = [row[:count] for row, count in zip(ranked, counts, strict=True)]
    return torch.stack(
        [torch.stack([each[k:].logsumexp(0) - each[k] for k in range(len(each))]).sum() for each in lists]
    )


def train_step(
    policy: nn.Module,
    reference: nn.Module,
    optimizer: torch.optim.Optimizer,
    examples: Sequence[Example],
    *,
    beta: float = 0.1,
    max_grad_norm: float = 1.0,
    losses: Callable[[Sides, Sides, float], Tensor] = dpo_losses,
    by: Callable[..., Tensor] = response_logps,
) -> dict[str, float]:
    """Make one optimizer step over a batch of examples."""
    with torch.no_grad():
        reference_logps = score(reference, examples, by)
    policy_logps = score(policy, examples, by)
    loss = losses(policy_logps, reference_logps, beta).mean()
    loss.backward()
    grad_norm = nn.utils.clip_grad_norm_(policy.parameters(), max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()
    chosen, rejected, *_ = (beta * (p - r).detach() for p, r in zip(policy_logps, reference_logps, strict=True))
    return {
        "loss": loss.item(),
        "grad_norm": grad_norm.item(),
        "rewards/margins": (chosen - rejected).mean().item(),
        "rewards/accuracies": (chosen > rejected).float().mean().item(),
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
