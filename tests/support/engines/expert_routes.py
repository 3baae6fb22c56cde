"""Train with routers that choose the same experts for every row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from tests.support.engines.parity import Case, Outcome, train_parallel, train_single_process


def with_fixed_routes(case: Case, chosen: str, policy: Path, reference: Path, alone: bool = False) -> Outcome:
    """chosen: `one expert` twice per row, or `none of some process`: the first two of four experts."""
    original = Qwen3MoeTopKRouter.forward

    def forward(router: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits, scores, indices = original(router, hidden_states)
        fixed = torch.zeros_like(indices)
        if chosen != "one expert":
            fixed[:, 1] = 1
        return logits, scores, fixed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Qwen3MoeTopKRouter, "forward", forward)
        return (train_single_process if alone else train_parallel)(case, policy, reference)
