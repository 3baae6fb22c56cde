"""`thresher demo`: a first run from nothing to a report, with a model and pairs that it makes itself."""

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

_NUM_PROMPTS, _NUM_SHOWN = 48, 3


def demo(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Directory to create.")] = Path(
        "thresher-demo"
    ),
    model: Annotated[
        str | None, typer.Option("--model", metavar="DIR", help="Train this model instead of a small one made here.")
    ] = None,
    data: Annotated[
        list[str] | None, typer.Option("--data", metavar="FILE", help="Use these preference pairs; may be repeated.")
    ] = None,
) -> None:
    """Make a small model and preference pairs, check, prepare, plan, train and report; two minutes on a laptop."""
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
    config = _make_inputs(output, model, data)
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
    if model is None and data is None:
        _compare_answers(output / "model", exported)
    if has_report:
        _announce("report", str(run), "--output", str(page))
        report([run], page)
    logger.info("")
    logger.info("the demo took %.0f s; what to do next:", time.monotonic() - started)
    if has_report:
        print_line(f"  open {page.resolve().as_uri()} in a browser")
    print_line(f"  thresher train {config} beta=0.1 output_dir={output / 'run2'}       # another run")
    if has_report:
        print_line(f"  thresher report {run} {output / 'run2'} -o compare.html    # both runs in one report")
    print_line("  thresher demo --model DIR --data FILE -o DIR               # your model and your pairs")


def _create(directory: Path) -> None:
    from thresher.errors import UserError

    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        hint = f"or continue its run with: thresher train {directory / 'dpo_config.yaml'}"
        is_demo = (directory / "dpo_config.yaml").is_file()
        raise UserError(f"{directory} exists; choose another --output, or remove it{', ' + hint if is_demo else ''}")
    directory.mkdir(parents=True, exist_ok=True)


def _make_inputs(directory: Path, model: str | None, data: list[str] | None) -> Path:
    """Make the model and the pairs that are not given, and the config of the run."""
    from thresher.cli.run_display import run_display, silence_loud_loggers

    with run_display(directory) as display:
        logger.info("importing torch and transformers", extra=PHASE)

        from thresher.demo import make_model, write_config, write_pairs

        silence_loud_loggers()
        files, validation = data or [], None
        if not files:
            train, validation = write_pairs(directory)
            files = [str(train)]
            logger.info("wrote pairs of friendly (chosen) and rude (rejected) answers to %s", train)
        path = model
        if path is None:
            path = str(directory / "model")
            made = make_model(Path(path), display.show_progress)
            count = f"{made.num_parameters():,}"
            logger.info("pretrained a model of %s parameters, which answers in either tone: %s", count, path)
    return write_config(directory, model=path, data=files, validation=validation, is_pretrained=model is not None)


def _compare_answers(before: Path, after: Path) -> None:
    """Print answers of the model before and after the run, and how many of them have the preferred tone."""
    from thresher.cli.terminal import print_line
    from thresher.demo import is_friendly, make_pairs, sample_answers

    prompts = list(dict.fromkeys(pair.prompt for pair in make_pairs()[1]))[:_NUM_PROMPTS]
    old, new = sample_answers(before, prompts), sample_answers(after, prompts)
    print_line("answers to questions about facts that are not in the training pairs:")
    for number in range(0, len(prompts), len(prompts) // _NUM_SHOWN):
        print_line(f"  {prompts[number]}")
        print_line(f"    before  {old[number].strip()}")
        print_line(f"    after   {new[number].strip()}")
    shares = [sum(is_friendly(answer) for answer in answers) / len(prompts) for answers in (old, new)]
    print_line(f"friendly answers: {shares[0]:.0%} before the run, {shares[1]:.0%} after it")


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
