"""`thresher demo`: the quickstart from nothing to a report, with a tiny model that it makes."""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from thresher.cli.terminal import print_lines, progress_console
from thresher.errors import UserError
from thresher.observability.details import PHASE
from thresher.optional import require

logger = logging.getLogger(__name__)


def demo(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Directory to create.")] = Path(
        "thresher-demo"
    ),
    model: Annotated[
        str | None, typer.Option("--model", metavar="DIR", help="Train this model instead of a tiny one made here.")
    ] = None,
    data: Annotated[
        list[str] | None, typer.Option("--data", metavar="FILE", help="Use these preference pairs; may be repeated.")
    ] = None,
) -> None:
    """Run the quickstart: make a tiny model, check, prepare, plan, train, export and report, in about a minute."""
    started = time.monotonic()
    config = output / "dpo_config.yaml"
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        hint = f", or continue its run with: thresher train {config}" if config.is_file() else ""
        raise UserError(f"{output} exists; choose a different --output, or remove it{hint}")
    output.mkdir(parents=True, exist_ok=True)
    has_report = True
    try:
        require("the report", "jinja2", "vl_convert", extra="report")
    except UserError as error:
        has_report = False
        logger.warning("%s before the next demo", error)
    _make_inputs(output, model, data or [])
    run, page = output / "run", output / "report.html"
    _run("check", config)
    _run("prepare", "--config", config, "--output", output / "store")
    print_lines("\nan estimate for one H100, which the demo does not need:")
    with suppress(typer.Exit):  # the exit code says whether the run fits on GPUs that the demo does not need
        _run("plan", config)
    _run("train", config)
    _run("export", run, "--output", output / "exported")
    _show_gain(run)
    if has_report:
        _run("report", run, "--output", page)
    logger.info("")
    logger.info("the demo took %.0f s; what to do next:", time.monotonic() - started)
    if has_report:
        print_lines(f"  open {page.resolve().as_uri()} in a browser")
    print_lines(f"  run again:    thresher train {config} beta=0.5 output_dir={output / 'run2'}")
    if has_report:
        print_lines(f"  compare both: thresher report {run} {output / 'run2'} -o compare.html")
    print_lines("  your own:     thresher demo --model DIR --data FILE -o DIR")


def _make_inputs(directory: Path, model: str | None, data: list[str]) -> None:
    """Make the model and the pairs that are not given, and the run's config."""
    from thresher.cli.run_display import run_display, silence_loud_loggers

    with run_display(directory):
        logger.info("importing torch and transformers", extra=PHASE)

        from thresher.demo import copy_pairs, make_model, make_tokenizer, write_config

        silence_loud_loggers()
        if not data:
            logger.info("wrote pairs of helpful (chosen) and other (rejected) answers to %s", copy_pairs(directory))
        if model is None:
            tokenizer = make_tokenizer()
            made = make_model(tokenizer)
            tokenizer.save_pretrained(directory / "model")
            made.save_pretrained(directory / "model")
            logger.info("made a model of %s random weights: %s", f"{made.num_parameters():,}", directory / "model")
    write_config(directory, model=model, data=data)


def _show_gain(run: Path) -> None:
    """Print the validation accuracy of the first and the last evaluation."""
    from thresher.observability.log_files import METRICS
    from thresher.observability.trackers.jsonl import read_metrics

    name = "eval/rewards/accuracies"
    seen = [record[name] for record in read_metrics(run / "logs" / METRICS) if name in record]
    print_lines(f"validation pairs that the model ranks as the data does: {seen[0]:.0%} before, {seen[-1]:.0%} after")


def _run(name: str, *arguments: str | Path) -> None:
    """Show a command, and run it."""
    from thresher.cli import app

    words = [name, *map(str, arguments)]
    progress_console().print(f"\n$ thresher {' '.join(words)}", markup=False, style="bold", soft_wrap=True)
    group: Any = typer.main.get_command(app)
    command = group.commands[name]
    # not main(), which would turn an interrupt into an exit code
    with command.make_context(name, words[1:]) as context:
        command.invoke(context)
