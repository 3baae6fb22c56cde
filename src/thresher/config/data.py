"""Settings of the training and validation pairs, and of the answers that are sampled at each evaluation."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue, PositiveInt, model_validator

from thresher.config.section import Section, StringList, no_effect


class DataArgs(Section):
    """Source files and tokenization of the pairs."""

    file_name: StringList = []
    """File, directory, glob or URL, or a list of them."""
    dataset_dir: str | None = None
    """Where to look for relative file names that do not exist as given."""
    revision: str | None = None
    """Branch, tag or commit of Hub datasets; `hf://OWNER/NAME@REVISION` sets it for one."""
    store: str | None = None
    """Store written by `thresher prepare`; replaces file_name."""
    template: str = "auto"
    """`auto`: the tokenizer's chat template; `raw`: plain text; a family (chatml, gemma, llama3, mistral, phi4,
    qwen2_5, qwen3); or the path of a Jinja file."""
    template_arguments: dict[str, JsonValue] = {}
    """Variables of the chat template, such as `enable_thinking: false`."""
    system_prompt: Annotated[str, Field(min_length=1)] | None = None
    """System message of rows that have none."""
    truncation: Literal["drop", "prompt_start", "response_end"] = "drop"
    """Pairs over sequence_length: drop, or cut the prompt's start or the responses' end where that suffices."""
    on_bad_row: Literal["fail", "skip", "quarantine"] = "fail"
    """Unreadable rows: stop, skip them, or write them to a separate file."""
    special_tokens_in_text: Literal["keep_as_text", "reject"] = "keep_as_text"
    """Rows whose text has a special token such as `<|im_end|>`: tokenize it as plain text, or treat the row as bad."""
    join_labelled: bool = False
    """Join rows of one answer and a label to pairs, where a prompt has both labels; for losses on pairs."""
    margin_from_scores: bool = False
    """Use the difference of a pair's scores (score_chosen and score_rejected, or the like) as its margin."""
    max_samples: PositiveInt | None = None
    """Rows to read from the start of each file; all when absent."""
    preprocessing_num_workers: PositiveInt = 1
    """Number of tokenizing processes; does not change the result."""

    @model_validator(mode="after")
    def _validate_source(self) -> DataArgs:
        if self.store and self.file_name:
            raise ValueError("file_name and store are both set; keep one")
        if self.revision is not None and not any(name.startswith("hf://") for name in self.file_name):
            raise ValueError("revision has no effect without a dataset of the Hub, hf://OWNER/NAME, in file_name")
        for_files = [name for name in DataArgs.model_fields if name != "store"]
        if self.store and (unused := self.non_default(*for_files)):
            raise ValueError(no_effect(unused, "on a store, which is already prepared; remove {it}"))
        return self


class ValidationConfig(Section):
    """`validation`: the validation pairs."""

    data_args: DataArgs = DataArgs()
    split: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of the training pairs to hold out instead of data_args, chosen by prompt and seed: all pairs of a prompt
    are on one side."""

    @model_validator(mode="after")
    def _validate_split(self) -> ValidationConfig:
        if self.split is not None and (unused := self.data_args.non_default(*DataArgs.model_fields)):
            names = [f"data_args.{name}" for name in unused]
            raise ValueError(no_effect(names, "with split, which holds out training pairs; keep one"))
        return self


class SamplesConfig(Section):
    """`samples`: answers of policy and reference to fixed prompts at each evaluation. Without it, none are generated.

    Off by default: generation takes time, and memory for a second model on the device of rank 0.
    """

    num_prompts: PositiveInt = 16
    """Number of prompts: the first distinct ones of the validation pairs or of prompts_file."""
    prompts_file: str | None = None
    """Prompts instead of the validation pairs': a text file with one per line, or JSON lines with a `prompt`, text or
    messages. They get the template and system prompt of actor_train.data_args."""
    max_new_tokens: PositiveInt = 256
    """Maximum tokens per answer."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Sampling temperature; 0 takes the most likely token. Only at 1 does the mean log ratio to the reference estimate
    the KL, `samples/kl`."""
    judge: str | None = None
    """Python function that judges answers, as package.module:function or path/to/file.py:function: score(prompt,
    answer), or compare(prompt, first, second), the probability that the first is better. Or the directory of a reward
    model."""
    judge_url: str | None = None
    """OpenAI-compatible server whose model judges answers, such as http://localhost:8000/v1."""
    judge_model: str | None = None
    """Model on that server."""
    judge_key_variable: str | None = None
    """Environment variable with that server's API key."""
    judge_instructions: str | None = None
    """That model's instructions; by default, to prefer helpful, correct and pleasant answers."""
    judge_max_tokens: PositiveInt = 16
    """Maximum tokens of a reply; a model that reasons first needs more."""
    judge_timeout: Annotated[float, Field(gt=0)] = 60.0
    """Seconds to wait for a complete reply."""
    judge_attempts: PositiveInt = 4
    """Maximum attempts per request; if all fail, the evaluation has no win rate."""
    judge_concurrency: PositiveInt = 8
    """Concurrent requests."""

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
