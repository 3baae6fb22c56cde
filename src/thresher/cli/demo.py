"""`thresher demo`: the quickstart from nothing to a report, with a tiny model that it makes."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import time
from pathlib import Path
from typing import Annotated

import typer

from thresher.observability.details import PHASE

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
    from thresher.cli.check import check
    from thresher.cli.export import export
    from thresher.cli.prepare import prepare_from_config
    from thresher.cli.report import report
    from thresher.cli.terminal import print_line
    from thresher.cli.train import train

    started = time.monotonic()
    _create(output)
    has_report = all(importlib.util.find_spec(name) for name in ("jinja2", "vl_convert"))
    if not has_report:
        logger.warning("the report needs other packages; run `pip install 'thresher[report]'` before the next demo")
    config = _make_inputs(output, model, data or [])
    run, exported, page = output / "run", output / "exported", output / "report.html"

    _announce("check", str(config))
    check(config)
    _announce("prepare", "--config", str(config), "--output", str(output / "store"))
    prepare_from_config(config, output / "store")
    _announce("plan", str(config))
    _plan(config)
    _announce("train", str(config))
    train(config)
    _announce("export", str(run), "--output", str(exported))
    export(run, exported)
    _show_gain(run)
    if has_report:
        _announce("report", str(run), "--output", str(page))
        report([run], page)
    logger.info("")
    logger.info("the demo took %.0f s; what to do next:", time.monotonic() - started)
    if has_report:
        print_line(f"  open {page.resolve().as_uri()} in a browser")
    print_line(f"  thresher train {config} beta=0.5 output_dir={output / 'run2'}       # another run")
    if has_report:
        print_line(f"  thresher report {run} {output / 'run2'} -o compare.html    # both runs in one report")
    print_line("  thresher demo --model DIR --data FILE -o DIR               # your model and your pairs")


def _create(directory: Path) -> None:
    from thresher.errors import UserError

    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        hint = f"or continue its run with: thresher train {directory / 'dpo_config.yaml'}"
        is_demo = (directory / "dpo_config.yaml").is_file()
        raise UserError(
            f"{directory} exists; choose a different --output, or remove it{', ' + hint if is_demo else ''}"
        )
    directory.mkdir(parents=True, exist_ok=True)


def _make_inputs(directory: Path, model: str | None, data: list[str]) -> Path:
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
    return write_config(directory, model=model, data=data)


def _show_gain(run: Path) -> None:
    """Print the validation accuracy of the first and the last evaluation."""
    from thresher.cli.terminal import print_line
    from thresher.observability.log_files import METRICS
    from thresher.observability.trackers.jsonl import read_metrics

    name = "eval/rewards/accuracies"
    seen = [record[name] for record in read_metrics(run / "logs" / METRICS) if name in record]
    print_line(f"validation pairs that the model ranks as the data does: {seen[0]:.0%} before, {seen[-1]:.0%} after")


def _announce(command: str, *arguments: str) -> None:
    """Show the command that does the next part."""
    from thresher.cli.terminal import progress_console

    line = " ".join(["thresher", command, *arguments])
    progress_console().print(f"\n$ {line}", markup=False, style="bold", soft_wrap=True)


def _plan(config: Path) -> None:
    """Run `thresher plan`, whose exit code says whether the run fits on GPUs that the demo does not need."""
    from thresher.cli.plan import plan

    with contextlib.suppress(typer.Exit):
        plan(config)
