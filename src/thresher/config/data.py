"""Settings of the training and validation pairs, and of the answers that are sampled at each evaluation."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, JsonValue, PositiveInt, model_validator

from thresher.config.section import Section, StringList, no_effect

Column = Literal["chosen", "rejected", "prompt", "completion", "label", "completions", "scores", "subset", "order"]
# metrics of a source are `train/NAME/loss`, those of a set `eval/NAME/loss`
_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]*"
TAKEN_NAMES = ("loss", "rewards", "logps", "lengths", "labels", "kl", "kto", "entropy", "sft_loss")


def _by_name(value: Any) -> Any:
    """Accept a list whose entries have a `name`, and names that YAML reads as numbers."""
    if isinstance(value, dict):
        return {str(name): each for name, each in value.items()}
    if not isinstance(value, list) or not all(isinstance(each, Mapping) for each in value):
        return value
    names = [each.get("name") for each in value]
    if None in names or len(set(map(str, names))) < len(names):
        raise ValueError("a list needs a different `name` in each entry; or write a mapping, NAME: {file_name: ...}")
    return {str(each["name"]): {key: of for key, of in each.items() if key != "name"} for each in value}


def _usable_names(value: dict[str, Any]) -> dict[str, Any]:
    for name in value:
        if not re.fullmatch(_NAME, name) or name in TAKEN_NAMES:
            raise ValueError(
                f"the name {name!r} is part of the names of metrics; use letters, digits, `_`, `-` and `.`, and none "
                f"of {', '.join(TAKEN_NAMES)}"
            )
    return value


class SetArgs(Section):
    """One of several data sets; what is not set here is as in `data_args`."""

    file_name: StringList = []
    """File, directory, glob or URL, or a list of them."""
    split: str | None = None
    """Split of a Hub dataset, or subdirectory of a saved one; `train` on the Hub when absent."""
    revision: str | None = None
    """Branch, tag or commit of Hub datasets."""
    store: str | None = None
    """Store written by `thresher prepare`; replaces file_name."""
    columns: dict[Column, str] = {}
    """Its columns by their usual name, such as `chosen: better_answer`, if their names are not recognized."""
    template: str | None = None
    """Its template."""
    system_prompt: Annotated[str, Field(min_length=1)] | None = None
    """System message of its rows that have none."""
    max_samples: PositiveInt | None = None
    """Rows to read from the start of each of its files."""

    @model_validator(mode="after")
    def _validate_source(self) -> SetArgs:
        if bool(self.store) == bool(self.file_name):
            raise ValueError("it needs either file_name or store")
        if self.revision is not None and not any(name.startswith("hf://") for name in self.file_name):
            raise ValueError("revision has no effect without a dataset of the Hub, hf://OWNER/NAME, in file_name")
        for_files = ("split", "revision", "columns", "template", "system_prompt", "max_samples")
        if self.store and (unused := self.non_default(*for_files)):
            raise ValueError(no_effect(unused, "on a store, which is already prepared; remove {it}"))
        return self


class SourceArgs(SetArgs):
    """One source of a mixture; what is not set here is as in `data_args`."""

    weight: Annotated[float, Field(gt=0)] | None = None
    """Share of its pairs that an epoch visits; above 1, pairs repeat. 1 when absent."""
    count: PositiveInt | None = None
    """Number of its pairs that an epoch visits, instead of weight."""

    @model_validator(mode="after")
    def _validate_share(self) -> SourceArgs:
        if self.weight is not None and self.count is not None:
            raise ValueError("weight and count are both set; keep one")
        return self


Sources = Annotated[dict[str, SourceArgs], BeforeValidator(_by_name), AfterValidator(_usable_names)]
Sets = Annotated[dict[str, SetArgs], BeforeValidator(_by_name), AfterValidator(_usable_names)]


_OF_EACH = ("file_name", "store", "revision", "max_samples")


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


class TrainingDataArgs(DataArgs):
    """The training pairs, which may be a mixture."""

    sources: Sources = {}
    """Several sources by name instead of file_name, of which an epoch visits shares: `NAME: {file_name: ..., weight:
    0.5}`. Training metrics of each are `train/NAME/...`."""
    order: Literal["proportional", "sequential", "length", "-length", "margin", "-margin", "column", "-column"] = (
        "proportional"
    )
    """Order of an epoch. proportional: shuffled, with each source's share in every step. sequential: one source after
    the other, each shuffled. length, margin or column: a curriculum, the least first, or with `-` the greatest first;
    of tokens, of margins, which losses read too, or of the column that each source names in columns.order."""

    @model_validator(mode="after")
    def _validate_sources(self) -> TrainingDataArgs:
        if self.order == "sequential" and len(self.sources) < 2:
            raise ValueError("order: sequential has no effect without several sources; remove it")
        if self.sources and (unused := self.non_default(*_OF_EACH)):
            raise ValueError(no_effect(unused, "with sources; set {it} in each source"))
        for_files = [name for name in DataArgs.model_fields if name not in _OF_EACH]
        if (
            self.sources
            and all(each.store for each in self.sources.values())
            and (unused := self.non_default(*for_files))
        ):
            raise ValueError(no_effect(unused, "on stores, which are already prepared; remove {it}"))
        is_by_column = self.order.endswith("column")
        if is_by_column and not self.sources:
            raise ValueError("order: column needs sources, which name their column: sources.NAME.columns.order")
        for name, each in self.sources.items():
            if not each.store and ("order" in each.columns) != is_by_column:
                problem = "is absent, and order is column" if is_by_column else "has no effect without order: column"
                raise ValueError(f"sources.{name}.columns.order {problem}; set both or none")
        return self


class ValidationConfig(Section):
    """`validation`: the validation pairs."""

    data_args: DataArgs = DataArgs()
    sets: Sets = {}
    """Several sets by name instead of data_args.file_name, each with its own metrics, `eval/NAME/loss`. `eval/loss` is
    the mean over the pairs of all sets."""
    split: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of the training pairs to hold out instead of data_args, chosen by prompt and seed: all pairs of a prompt
    are on one side."""

    @model_validator(mode="after")
    def _validate_split(self) -> ValidationConfig:
        if self.split is not None:
            names = [f"data_args.{name}" for name in self.data_args.non_default(*DataArgs.model_fields)]
            if names := [*names, *self.non_default("sets")]:
                raise ValueError(no_effect(names, "with split, which holds out training pairs; keep one"))
        if ordered := [name for name, each in self.sets.items() if "order" in each.columns]:
            raise ValueError(no_effect([f"sets.{ordered[0]}.columns.order"], "on an evaluation; remove {it}"))
        if self.sets and (names := self.data_args.non_default(*_OF_EACH)):
            raise ValueError(no_effect([f"data_args.{name}" for name in names], "with sets; set {it} in each set"))
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
