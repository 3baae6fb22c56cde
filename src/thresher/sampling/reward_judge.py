"""A reward model as a judge: the answer with the higher reward wins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from thresher.errors import UserError
from thresher.models.loading.load import REWARD_HEAD, load_model, load_tokenizer
from thresher.models.loading.load_sharded import SafetensorsReader
from thresher.models.pipeline_chunk import decoder_of, head_of
from thresher.sampling.answers import Answer, SampledPrompt
from thresher.sampling.judges import Verdict, from_scores


@dataclass(frozen=True)
class RewardModelJudge:
    """Scores prompt and answer with the reward model of a directory, which is loaded for each evaluation."""

    path: str
    trust_remote_code: bool = False

    @classmethod
    def of(cls, path: str, tokenizer: PreTrainedTokenizerBase, *, trust_remote_code: bool = False) -> RewardModelJudge:
        """Check that a directory has a reward model that reads the policy's token ids."""
        if not SafetensorsReader(path, compares_tied=False).has(REWARD_HEAD):
            raise UserError(
                f"samples.judge: {path} is not a reward model: its weight files have no {REWARD_HEAD}; export one that "
                "was trained with pref_loss: bradley_terry, or name a Python function"
            )
        if load_tokenizer(path, trust_remote_code=trust_remote_code).get_vocab() != tokenizer.get_vocab():
            raise UserError(
                f"samples.judge: the reward model {path} has a different tokenizer from the policy's; use one that was "
                "trained from the same family, or write a function score(prompt, answer)"
            )
        return cls(path, trust_remote_code)

    @torch.no_grad()
    def verdicts(self, samples: Sequence[SampledPrompt]) -> list[Verdict]:
        """Score both answers to each prompt."""
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = load_model(self.path, trust_remote_code=self.trust_remote_code, is_reward_model=True)
        torch.nn.Module.to(model, device)
        return [from_scores(*(reward(model, each.prompt_ids, side) for side in each.answers)) for each in samples]


def reward(model: PreTrainedModel, prompt_ids: Sequence[int], answer: Answer) -> float:
    """The reward at the last token of an answer, whatever the model's pad token is."""
    ids = torch.tensor([[*prompt_ids, *answer.token_ids]], device=model.device)
    hidden: Tensor = decoder_of(model)(input_ids=ids, use_cache=False).last_hidden_state
    return float(head_of(model)(hidden[0, -1]))
