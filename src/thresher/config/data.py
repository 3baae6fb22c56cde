"""Settings of the training and validation pairs."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue, PositiveInt, model_validator

from thresher.config.section import Section, StringList, no_effect


class DataArgs(Section):
    """Source files and tokenization of the pairs."""

    file_name: StringList = []
    """File, directory, glob or URL, or a list of them."""
    dataset_dir: str | None = None
    """Directory of relative file names that do not exist as given."""
    revision: str | None = None
    """Branch, tag or commit of datasets on the Hugging Face Hub; `hf://OWNER/NAME@REVISION` sets it for one."""
    store: str | None = None
    """Store written by `thresher prepare`; replaces file_name."""
    template: str = "auto"
    """`auto`: chat template of the tokenizer; `raw`: plain text; a family: chatml, gemma, llama3, mistral, phi4,
    qwen2_5, qwen3; otherwise the path of a Jinja file."""
    template_arguments: dict[str, JsonValue] = {}
    """Variables of the chat template, such as `enable_thinking: false`."""
    system_prompt: Annotated[str, Field(min_length=1)] | None = None
    """System message of rows that have none."""
    truncation: Literal["drop", "prompt_start", "response_end"] = "drop"
    """Handling of pairs longer than sequence_length: drop the pair, or cut the start of the prompt or the end of the
    responses."""
    on_bad_row: Literal["fail", "skip", "quarantine"] = "fail"
    """Handling of unreadable rows: stop, skip them, or write them to a separate file."""
    special_tokens_in_text: Literal["keep_as_text", "reject"] = "keep_as_text"
    """Handling of rows whose text contains a special token such as `<|im_end|>`: tokenize it as plain text, or treat
    the row as bad (see on_bad_row)."""
    max_samples: PositiveInt | None = None
    """Number of rows to read of each file, from its start; all when absent."""
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
    """Share of the training pairs to hold out for validation instead of data_args. It is chosen by prompt and seed: all
    pairs of a prompt are on one side, whatever the order of files."""

    @model_validator(mode="after")
    def _validate_split(self) -> ValidationConfig:
        if self.split is not None and (unused := self.data_args.non_default(*DataArgs.model_fields)):
            names = [f"data_args.{name}" for name in unused]
            raise ValueError(no_effect(names, "with split, which holds out training pairs; keep one"))
        return self
