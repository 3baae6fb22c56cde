"""`thresher prepare`: tokenizes preference data into a store of pairs and reports what happened to every row."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from thresher.cli.prepare_report import log_report, show_progress
from thresher.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from thresher.data.prepare.executor import Executor
    from thresher.data.prepare.report import PrepareReport
    from thresher.data.settings import DataSettings, OnBadRow, SpecialTokensInText, Truncation

logger = logging.getLogger(__name__)


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _for_rows(text: str) -> Any:
    return typer.Option(help=text, rich_help_panel="Rows and tokens")


# {role} is actor_train or validation
CONFIG_KEYS = {
    "template": "{role}.data_args.template",
    "sequence_length": "sequence_length",
    "truncation": "{role}.data_args.truncation",
    "on_bad_row": "{role}.data_args.on_bad_row",
    "special_tokens_in_text": "{role}.data_args.special_tokens_in_text",
    "join_labelled": "{role}.data_args.join_labelled",
    "chosen_key": "chosen_key",
    "rejected_key": "rejected_key",
    "prompt_key": "prompt_key",
    "completion_key": "completion_key",
    "label_key": "label_key",
    "completions_key": "completions_key",
    "scores_key": "scores_key",
    "runtime": "runtime",
    "ray_address": "ray_address",
}
_TRUST = "actor_train.model_args.trust_remote_code=true"
# as errors of preparation write the settings
_IN_ERRORS = {
    **{key.format(role="actor_train"): _option(name) for name, key in CONFIG_KEYS.items() if name != "runtime"},
    "num_processes": "--num-processes",
    "actor_train.data_args.file_name": "the files",
    _TRUST: f"{_TRUST} in a config file and pass it with --config",
}
WORKERS = "Workers"


def prepare(
    context: typer.Context,
    files: Annotated[
        list[str] | None,
        typer.Argument(metavar="FILE", help="Paths, globs or URLs; with --config, KEY=VALUE settings instead."),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", metavar="DIR", help="Directory of the model or of its tokenizer.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="DIR", help="Directory of the store to write.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Take the files, model and settings from a config file.")
    ] = None,
    validation: Annotated[bool, typer.Option(help="With --config: prepare the validation files.")] = False,
    source: Annotated[
        str | None, typer.Option(metavar="NAME", help="With --config: prepare this source, or set of validation.")
    ] = None,
    against: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Report pairs and prompts that also occur in this store.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing store.")] = False,
    template: Annotated[
        str,
        _for_rows("auto (the tokenizer's chat template), raw (plain text), a family such as chatml, or a Jinja file."),
    ] = "auto",
    sequence_length: Annotated[int, _for_rows("Maximum tokens of the prompt plus the longer response.")] = 1024,
    truncation: Annotated[str, _for_rows("Pairs that are too long: drop, prompt_start or response_end.")] = "drop",
    on_bad_row: Annotated[str, _for_rows("Rows that cannot be read: fail, skip or quarantine.")] = "fail",
    special_tokens_in_text: Annotated[
        str, _for_rows("Text that contains a special token: keep_as_text or reject.")
    ] = "keep_as_text",
    join_labelled: Annotated[
        bool,
        typer.Option("--join-labelled", help="Join labelled answers to pairs.", rich_help_panel="Rows and tokens"),
    ] = False,
    chosen_key: Annotated[str | None, _for_rows("Column of the chosen response.")] = None,
    rejected_key: Annotated[str | None, _for_rows("Column of the rejected response.")] = None,
    prompt_key: Annotated[str | None, _for_rows("Column of the prompt.")] = None,
    completion_key: Annotated[str | None, _for_rows("Column of the one answer of a row.")] = None,
    label_key: Annotated[str | None, _for_rows("Column of an answer's label.")] = None,
    completions_key: Annotated[str | None, _for_rows("Column of the list of responses.")] = None,
    scores_key: Annotated[str | None, _for_rows("Column of the list of their scores.")] = None,
    num_processes: Annotated[
        int | None, typer.Option("--num-processes", "-n", help="Tokenizer processes.", rich_help_panel=WORKERS)
    ] = None,
    runtime: Annotated[
        str, typer.Option(help="local (this machine) or ray (a Ray cluster).", rich_help_panel=WORKERS)
    ] = "local",
    ray_address: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Running Ray cluster to connect to.", rich_help_panel=WORKERS),
    ] = None,
) -> None:
    """Tokenize preference data into a store of pairs, and report what happened to every row."""
    from thresher.data.settings import DataSettings

    trust_remote_code = False
    with name_options_in_errors() if config is None else nullcontext():
        if config is not None:
            _reject_options(context, config, validation=validation)
            loaded = _from_config(config, files or [], validation=validation, source=source or "")
            settings, config_model, trusts_config_model, runtime, ray_address = loaded
            model = model or config_model
            # the config trusts its own model, not one that --model names
            trust_remote_code = trusts_config_model and model == config_model
        elif validation:
            raise UserError(
                "--validation has no effect without --config; pass --config FILE, or name the files instead"
            )
        elif source is not None:
            raise UserError("--source has no effect without --config; pass --config FILE, or name the files instead")
        elif not files:
            raise UserError("no file is named; pass FILE: paths, globs or URLs")
        else:
            settings = DataSettings(
                file_name=files,
                template=template,
                sequence_length=sequence_length,
                truncation=cast("Truncation", truncation),  # DataSettings rejects other values
                on_bad_row=cast("OnBadRow", on_bad_row),
                special_tokens_in_text=cast("SpecialTokensInText", special_tokens_in_text),
                join_labelled=join_labelled,
                chosen_key=chosen_key,
                rejected_key=rejected_key,
                prompt_key=prompt_key,
                completion_key=completion_key,
                label_key=label_key,
                completions_key=completions_key,
                scores_key=scores_key,
            )
            if runtime not in ("local", "ray"):
                raise UserError(f"--runtime is {runtime!r}; use local or ray")
            if runtime == "local" and ray_address is not None:
                raise UserError("--ray-address has no effect with --runtime local; pass --runtime ray")
        if model is None:
            raise UserError("no tokenizer is named; pass --model DIR")
        if output is None:
            raise UserError("no store is named; pass --output DIR")
        if num_processes is not None:
            settings = replace(settings, num_processes=num_processes)
        executor = None
        if runtime == "ray":
            from thresher.runtime.ray.ray_data import run_on_ray

            executor = run_on_ray(settings.num_processes, ray_address)
        report = _prepare_store(settings, model, output, executor, trusts=trust_remote_code, overwrite=overwrite)
    to_change = [_spell_setting(name, config, validation=validation) for name in ("sequence_length", "truncation")]
    if warning := report.truncation_warning(settings.truncation, *to_change):
        logger.warning("%s", warning)
    if against is not None:
        _log_leaks(output, against, report.pairs_kept)


def _reject_options(context: typer.Context, config: Path, *, validation: bool) -> None:
    """Reject options that the config would silently override, and name the key to set instead."""
    for name in CONFIG_KEYS:
        source = context.get_parameter_source(name)
        if source is not None and source.name != "DEFAULT":
            setting = f"{_spell_setting(name, config, validation=validation)}{context.params[name]}"
            raise UserError(f"{_option(name)} has no effect with --config; leave it out and pass {setting} instead")


def _spell_setting(name: str, config: Path | None, *, validation: bool) -> str:
    """Return how to set an option, up to its value: `--name `, or `key=` with a config."""
    role = "validation" if validation else "actor_train"
    return f"{_option(name)} " if config is None else f"{CONFIG_KEYS[name].format(role=role)}="


@contextmanager
def name_options_in_errors() -> Iterator[None]:
    """Replace config keys by options in the message of a `UserError`; `key=value` becomes `--key value`."""
    key = re.compile(rf"(?<![\w.-])({'|'.join(map(re.escape, _IN_ERRORS))})\b(=?)")
    try:
        yield
    except UserError as error:
        named = key.sub(lambda found: _IN_ERRORS[found[1]] + (" " if found[2] else ""), str(error))
        raise UserError(named) from error


def _from_config(
    path: Path, overrides: list[str], *, validation: bool, source: str
) -> tuple[DataSettings, str | None, bool, str, str | None]:
    """Return the settings, the path of the tokenizer, whether its code is trusted, the runtime and Ray's address."""
    from thresher.builders.data_parts import data_parts, data_settings
    from thresher.config import load_config

    config = load_config(path, overrides)
    if validation and config.validation is None:
        raise UserError(f"{path} has no section `validation`; leave --validation out")
    if validation and config.validation and config.validation.split is not None:
        raise UserError(f"{path} holds out training pairs for validation (validation.split); leave --validation out")
    parts = data_parts(config, validation=validation)
    if source not in parts:
        if "" in parts:
            raise UserError(f"--source {source} has no effect: {path} names no sources; leave it out")
        raise UserError(f"{path} names {', '.join(parts)}; pass --source with one of them")
    # not config.uses_ray: the number of training workers does not decide where to tokenize
    runtime = "ray" if config.runtime == "ray" or config.ray_address else "local"
    trusts = config.actor_train.model_args.trust_remote_code
    return data_settings(config, parts[source]), config.tokenizer_path, trusts, runtime, config.ray_address


def _prepare_store(
    settings: DataSettings, model: str, output: Path, executor: Executor | None, *, trusts: bool, overwrite: bool
) -> PrepareReport:
    """Prepare a store and show its report; an existing store of the same data and settings is kept."""
    from thresher.data.prepare.prepare import store_fingerprint
    from thresher.data.prepare.report import report_of
    from thresher.data.store.reader import ExampleStore
    from thresher.models.loading.load import load_tokenizer

    tokenizer = load_tokenizer(model, trust_remote_code=trusts)
    if overwrite or not (output / "manifest.json").is_file():
        return build_and_report(settings, tokenizer, output, overwrite=overwrite, executor=executor, in_full=True)
    store = ExampleStore.open(output, expected_fingerprint=store_fingerprint(settings, tokenizer))
    logger.info("%s already contains these pairs", output)
    report = report_of(store)
    log_report(report, settings, output, in_full=True)
    return report


def build_and_report(
    settings: DataSettings,
    tokenizer: PreTrainedTokenizerBase,
    output: Path,
    *,
    overwrite: bool = False,
    executor: Executor | None = None,
    in_full: bool = False,
    show_work: Callable[[str], bool] = lambda what: False,
) -> PrepareReport:
    """Build a store with a progress display, then show its report, even if no pair is left."""
    from thresher.data.prepare.prepare import NoPairsError
    from thresher.data.prepare.prepare import prepare as build

    try:
        with show_progress(show_work) as show:
            report = build(settings, tokenizer, output, show, overwrite=overwrite, executor=executor)
    except NoPairsError as error:
        log_report(error.report, settings, output, in_full=in_full)
        raise
    _, _, *changes = report.count_rows()
    changed = "; " + ", ".join(f"{name} {count:,}" for name, count in changes) if changes else ""
    logger.info("wrote %s %s to %s%s", f"{report.pairs_kept:,}", report.unit, output, changed)
    log_report(report, settings, output, in_full=in_full)
    return report


def _log_leaks(store: Path, other: Path, num_pairs: int) -> None:
    from thresher.data.prepare.findings import find_leaks
    from thresher.data.prepare.report import format_examples
    from thresher.data.store.reader import ExampleStore

    for leak in find_leaks(ExampleStore.open(store), ExampleStore.open(other)):
        level = logging.WARNING if leak.count else logging.INFO
        name, examples = leak.name.replace("_", " "), format_examples(leak.examples)
        logger.log(level, "%s: %s of %s also in %s%s", name, f"{leak.count:,}", f"{num_pairs:,}", other, examples)
