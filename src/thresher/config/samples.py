"""`samples`: prompts that policy and reference answer at each evaluation, and the judge of their answers."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PositiveInt, model_validator

from thresher.config.section import Section, no_effect


class SamplesConfig(Section):
    """`samples`: answers of policy and reference to fixed prompts at each evaluation. Without it, none are generated.

    Off by default: generation takes time, and memory for a second model on the device of rank 0.
    """

    num_prompts: PositiveInt = 16
    """Number of prompts: the first different ones of the validation pairs or of prompts_file."""
    prompts_file: str | None = None
    """Prompts in place of the validation pairs' ones: a text file with one per line, or JSON lines with a `prompt`, a
    text or messages. They get the template and the system prompt of actor_train.data_args."""
    max_new_tokens: PositiveInt = 256
    """Maximum tokens of an answer."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Temperature of sampling; 0 takes the most likely token. Only at 1 are answers drawn from the policy, so that
    their mean log ratio to the reference is an estimate of the KL, `samples/kl`."""
    judge: str | None = None
    """Python function that judges answers, as package.module:function or path/to/file.py:function:
    score(prompt, answer), or compare(prompt, first, second), the probability that the first answer is better."""
    judge_url: str | None = None
    """Address of an OpenAI-compatible server whose model judges answers, such as http://localhost:8000/v1."""
    judge_model: str | None = None
    """Name of the model on that server."""
    judge_key_variable: str | None = None
    """Environment variable with the API key of that server."""
    judge_instructions: str | None = None
    """What that model should prefer, in place of helpful, correct and pleasant answers."""
    judge_max_tokens: PositiveInt = 16
    """Maximum tokens of a reply of that model; one that reasons first needs more."""
    judge_timeout: Annotated[float, Field(gt=0)] = 60.0
    """Seconds to wait for a complete reply."""
    judge_attempts: PositiveInt = 4
    """Attempts per request; if one fails as often, the evaluation has no win rate."""
    judge_concurrency: PositiveInt = 8
    """Requests at the same time."""

    @model_validator(mode="after")
    def _validate_judge(self) -> SamplesConfig:
        if self.judge and self.judge_url:
            raise ValueError("judge and judge_url are both set; keep one")
        of_endpoint = [name for name in SamplesConfig.model_fields if name.startswith("judge_")]
        if self.judge_url is None and (unused := self.non_default(*of_endpoint)):
            raise ValueError(no_effect(unused, "without judge_url; set judge_url or remove {it}"))
        if self.judge_url is not None:
            if not self.judge_url.startswith(("http://", "https://")):
                raise ValueError(
                    f"judge_url is {self.judge_url!r}; write an address that starts with http:// or https://"
                )
            if self.judge_model is None:
                raise ValueError("judge_url needs judge_model, the name of a model on that server")
        return self
