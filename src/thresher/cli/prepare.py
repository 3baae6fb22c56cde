"""`thresher prepare`: files to a store of token pairs, with an account of every row."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedTokenizerBase

    from thresher.data.prepare.prepare import PrepareProgress
    from thresher.data.prepare.report import PrepareReport
    from thresher.data.settings import DataSettings, OnBadRow, SpecialTokensInText, Truncation

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_LINES = 10.0
# where a config holds what these options say; {role} is actor_train or validation
CONFIG_KEYS = {
    "template": "{role}.data_args.template",
    "sequence_length": "sequence_length",
    "truncation": "{role}.data_args.truncation",
    "on_bad_row": "{role}.data_args.on_bad_row",
    "special_tokens_in_text": "{role}.data_args.special_tokens_in_text",
    "chosen_key": "chosen_key",
    "rejected_key": "rejected_key",
    "prompt_key": "prompt_key",
    "runtime": "runtime",
    "ray_address": "ray_address",
}


@dataclass(frozen=True)
class RayCluster:
    """Workers of Ray tokenise: at an address, or on this machine for the length of the work."""

    address: str | None


def prepare(
    context: typer.Context,
    files: Annotated[
        list[str] | None, typer.Argument(help="Files, globs, URLs; with --config, key=value ... of the config.")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", "-m", help="Directory whose tokenizer is used.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Directory of the store to write.")] = None,
    config: Annotated[Path | None, typer.Option(help="Take files, model and settings from a config.")] = None,
    validation: Annotated[bool, typer.Option(help="With --config: the validation files instead.")] = False,
    template: Annotated[str, typer.Option(help="auto, raw, or the path of a Jinja file.")] = "auto",
    sequence_length: Annotated[int, typer.Option(help="Most tokens of prompt plus longer response.")] = 1024,
    truncation: Annotated[str, typer.Option(help="drop, prompt_start or response_end.")] = "drop",
    on_bad_row: Annotated[str, typer.Option(help="fail, skip or quarantine.")] = "fail",
    special_tokens_in_text: Annotated[
        str, typer.Option(help="Rows whose text contains a special token: keep_as_text or reject.")
    ] = "keep_as_text",
    chosen_key: Annotated[str | None, typer.Option(help="Column of the chosen response.")] = None,
    rejected_key: Annotated[str | None, typer.Option(help="Column of the rejected response.")] = None,
    prompt_key: Annotated[str | None, typer.Option(help="Column of the prompt.")] = None,
    num_processes: Annotated[int | None, typer.Option("--num-processes", "-n", help="Processes that tokenise.")] = None,
    runtime: Annotated[
        str, typer.Option(help="local: processes of this machine; ray: workers of a cluster.")
    ] = "local",
    ray_address: Annotated[str | None, typer.Option(help="A running Ray cluster, HOST:PORT.")] = None,
    against: Annotated[Path | None, typer.Option(help="A store that must share nothing with this one.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an old store at the output.")] = False,
) -> None:
    """Turn preference data into a store of token pairs, and tell what became of every row."""
    from thresher.data.settings import DataSettings
    from thresher.errors import UserError

    trust_remote_code = False
    if config is not None:
        _refuse_options_of_the_config(context, validation=validation)
        read = _from_config(config, files or [], validation=validation)
        settings, config_model, trusts_config_model, ray = read
        model = model or config_model
        # trust was given to the config's model, not to whatever --model names
        trust_remote_code = trusts_config_model and model == config_model
    elif validation:
        raise UserError("--validation has no effect without --config; pass --config FILE, or name the files instead")
    else:
        settings = DataSettings(
            file_name=files or [],
            template=template,
            sequence_length=sequence_length,
            truncation=_as_truncation(truncation),
            on_bad_row=_as_on_bad_row(on_bad_row),
            special_tokens_in_text=_as_special_tokens_in_text(special_tokens_in_text),
            chosen_key=chosen_key,
            rejected_key=rejected_key,
            prompt_key=prompt_key,
        )
        ray = _read_runtime(runtime, ray_address)
    if model is None:
        raise UserError("no tokenizer is named; pass --model DIR")
    if output is None:
        raise UserError("no store is named; pass --output DIR")
    run_prepare(
        settings,
        model,
        output,
        num_processes,
        against=against,
        overwrite=overwrite,
        trust_remote_code=trust_remote_code,
        ray=ray,
    )


def _read_runtime(runtime: str, ray_address: str | None) -> RayCluster | None:
    from thresher.errors import UserError

    if runtime not in ("local", "ray"):
        raise UserError(f"--runtime is {runtime!r}; use local or ray")
    if runtime == "local" and ray_address is not None:
        raise UserError("--ray-address has no effect with --runtime local; pass --runtime ray")
    return RayCluster(ray_address) if runtime == "ray" else None


def _refuse_options_of_the_config(context: typer.Context, *, validation: bool) -> None:
    """Refuse an option that the config would silently overrule, and name the key to set instead."""
    from thresher.errors import UserError

    for name, key in CONFIG_KEYS.items():
        source = context.get_parameter_source(name)
        if source is not None and source.name != "DEFAULT":
            option, key = f"--{name.replace('_', '-')}", key.format(role="validation" if validation else "actor_train")
            raise UserError(
                f"{option} has no effect with --config; leave it out and pass {key}={context.params[name]} instead"
            )


def _from_config(
    path: Path, overrides: list[str], *, validation: bool
) -> tuple[DataSettings, str | None, bool, RayCluster | None]:
    """Return the settings, the policy's path, whether code that comes with it may run, and the cluster to work on."""
    from thresher.builders.data import data_settings
    from thresher.config import load_config
    from thresher.errors import UserError

    config = load_config(path, overrides)
    if validation and config.validation is None:
        raise UserError(f"{path} has no section `validation`; leave --validation out")
    args = config.validation.data_args if validation and config.validation else config.actor_train.data_args
    # how many workers train says nothing about who should tokenise
    ray = RayCluster(config.ray_address) if config.runtime == "ray" or config.ray_address else None
    return data_settings(config, args), config.policy_path, config.actor_train.model_args.trust_remote_code, ray


def _as_truncation(value: str) -> Truncation:
    return value  # type: ignore[return-value]  # DataSettings refuses other words, with their mend


def _as_on_bad_row(value: str) -> OnBadRow:
    return value  # type: ignore[return-value]  # as above


def _as_special_tokens_in_text(value: str) -> SpecialTokensInText:
    from thresher.config.aliases import ALIASES

    _, value = ALIASES["DataArgs"].current("special_tokens_in_text", value)
    return value  # type: ignore[return-value]  # as above


def run_prepare(
    settings: DataSettings,
    model: str,
    output: Path,
    num_processes: int | None = None,
    *,
    against: Path | None = None,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    ray: RayCluster | None = None,
) -> PrepareReport:
    """Prepare a store with progress and a closing table; one that fits already is kept and its table shown."""
    from thresher.data.prepare.findings import find_leaks
    from thresher.data.prepare.fingerprint import store_fingerprint
    from thresher.data.prepare.report import report_of
    from thresher.data.store.reader import PairStore
    from thresher.models.loading.load import load_tokenizer

    if num_processes is not None:
        settings = replace(settings, num_processes=num_processes)
    tokenizer = load_tokenizer(model, trust_remote_code=trust_remote_code)
    if (output / "manifest.json").is_file() and not overwrite:
        store = PairStore.open(output, expected_fingerprint=store_fingerprint(settings, tokenizer))
        logger.info("%s holds these pairs already", output)
        report = report_of(store)
    else:
        report = build_with_progress(settings, tokenizer, output, overwrite=overwrite, ray=ray)
    log_report(report)
    if against is not None:
        for leak in find_leaks(PairStore.open(output), PairStore.open(against)):
            logger.log(
                logging.WARNING if leak.count else logging.INFO,
                "%s: %s of %s also in %s %s",
                leak.name,
                f"{leak.count:,}",
                f"{report.pairs_kept:,}",
                against,
                _examples(leak.examples),
            )
    return report


def build_with_progress(
    settings: DataSettings,
    tokenizer: PreTrainedTokenizerBase,
    output: Path,
    *,
    overwrite: bool = False,
    ray: RayCluster | None = None,
) -> PrepareReport:
    """Build a store while a person watches; where no pair is left, the table tells why before the error does."""
    from thresher.data.prepare.prepare import NoPairsError
    from thresher.data.prepare.prepare import prepare as build

    runner = None
    if ray is not None:
        from thresher.runtime.ray.ray_data import run_on_ray

        runner = run_on_ray(settings.num_processes, ray.address)
    try:
        with show_progress() as show:
            report = build(settings, tokenizer, output, show, overwrite=overwrite, executor=runner)
    except NoPairsError as error:
        log_report(error.report)
        raise
    logger.info("wrote %s pairs to %s", f"{report.pairs_kept:,}", output)
    return report


@contextmanager
def show_progress() -> Iterator[Callable[[PrepareProgress], None]]:
    """Show a bar on a terminal, and a line now and then elsewhere."""
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    from thresher.cli.terminal import progress_console

    console = progress_console()
    if not console.is_terminal:
        yield _progress_lines()
        return
    columns = (TextColumn("preparing"), BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"))
    with Bar(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task("", total=None)

        def show(progress: PrepareProgress) -> None:
            described = f"{progress.rows_read:,} rows, {progress.pairs_kept:,} pairs"
            total = progress.bytes_total or None
            bar.update(task, completed=progress.bytes_read, total=total, description=described)

        yield show


def _progress_lines() -> Callable[[PrepareProgress], None]:
    last = time.monotonic()

    def show(progress: PrepareProgress) -> None:
        nonlocal last
        if time.monotonic() - last >= SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            done = f" ({progress.bytes_read / progress.bytes_total:.0%})" if progress.bytes_total else ""
            rows, pairs = f"{progress.rows_read:,}", f"{progress.pairs_kept:,}"
            logger.info("preparing: %s rows read%s, %s pairs kept", rows, done, pairs)

    return show


def print_report(report: PrepareReport) -> None:
    """Print what became of every row, how long the pairs are, and what to look at, as the result of a command."""
    from thresher.cli.terminal import console, print_line

    _print_tables(report, console)
    for _, line in _note_lines(report):
        print_line(line)


def log_report(report: PrepareReport) -> None:
    """Show the same on the way to something else: tables where messages are shown, and lines by their level."""
    from thresher.cli.terminal import progress_console

    _print_tables(report, progress_console())
    for level, line in _note_lines(report):
        logger.log(level, "%s", line)


def _print_tables(report: PrepareReport, console: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    from thresher.data.prepare.report import PERCENTILES
    from thresher.redact import escape_control_chars

    table = Table("", "count", title="prepared", title_justify="left")
    table.columns[1].justify = "right"
    for name, count in _count_rows(report):
        table.add_row(
            Text(escape_control_chars(name)), f"{count:,}"
        )  # a store may come from anybody, and its report with it
    console.print(table)
    if report.percentiles:
        names = ["shortest" if p == 0 else "longest" if p == 100 else f"{p} %" for p in PERCENTILES]
        lengths = Table("tokens", *names, title="lengths", title_justify="left")
        for name, values in report.percentiles.items():
            lengths.add_row(Text(escape_control_chars(name)), *(f"{value:,}" for value in values))
        console.print(lengths)


def _count_rows(report: PrepareReport) -> Iterator[tuple[str, int]]:
    yield "rows read", report.rows_read
    yield "pairs kept", report.pairs_kept
    if report.rows_joined:
        yield "rows joined to another's pair", report.rows_joined
    for cause, count in report.dropped.items():
        yield f"dropped: {cause.replace('_', ' ')}", count
    if report.bad_rows:
        yield "bad rows", report.bad_rows
    for kind, count in report.truncated.items():
        yield f"truncated: {kind.replace('_', ' ')}", count
    if report.splits_moved:
        yield "splits moved back over a merged token", report.splits_moved
    if report.headers_shortened:
        yield "answers that do not begin with the whole generation prompt", report.headers_shortened


def _note_lines(report: PrepareReport) -> Iterator[tuple[int, str]]:
    for file in report.files:
        unused = f"; not read: {', '.join(file.unused_columns)}" if file.unused_columns else ""
        yield logging.INFO, f"{file.name}: {file.rows:,} rows of shape {file.shape}{unused}"
    for reason, count in report.bad_reasons.items():
        yield logging.WARNING, f"bad rows: {count:,} x {reason}"
    for finding in report.findings:
        line = f"{finding.name.replace('_', ' ')}: {finding.count:,} pairs {_examples(finding.examples)}"
        yield logging.WARNING if finding.count else logging.INFO, line
    if report.length_bias is not None:
        bias = report.length_bias
        yield (
            logging.INFO,
            f"length: chosen is longer in {bias.share_chosen_longer:.0%} of pairs, equal in {bias.share_equal:.0%}; "
            f"means {bias.mean_chosen:.1f} and {bias.mean_rejected:.1f} tokens",
        )


def _examples(numbers: tuple[int, ...]) -> str:
    return f"(such as pair {', '.join(map(str, numbers))})" if numbers else ""
