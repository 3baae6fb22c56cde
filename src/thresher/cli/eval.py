"""`thresher eval`: benchmarks of a run's policy and its reference, by lm-eval in an environment of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from thresher.cli.terminal import following, make_table, print_lines, quiet_libraries, result_console
from thresher.errors import UserError


def evaluate(
    source: Annotated[
        str,
        typer.Argument(metavar="SOURCE", help="output_dir of a run (newest checkpoint), a checkpoint or a model."),
    ],
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Settings of lm-eval's config file, such as batch_size=auto."),
    ] = None,
    tasks: Annotated[str, typer.Option(metavar="NAMES", help="Tasks of lm-eval, separated by commas.")] = "",
    limit: Annotated[int | None, typer.Option(min=1, help="Questions per task; for tests, not for results.")] = None,
    include_path: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Directory with tasks of your own, as YAML files of lm-eval.")
    ] = None,
    environment: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Virtual environment of lm-eval; default: one in the user's cache."),
    ] = None,
    install: Annotated[
        bool, typer.Option("--install", help="Install lm-eval there if it is missing, with pip.")
    ] = False,
    timeout: Annotated[float | None, typer.Option(min=1, metavar="MINUTES", help="Limit for each model.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Evaluate again what was evaluated before.")] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Allow Python code from the model directory.")
    ] = False,
) -> None:
    """Evaluate a run's policy and its reference on benchmarks of lm-eval, side by side."""
    from thresher.evaluation import lm_eval
    from thresher.evaluation.models import find_models
    from thresher.observability.log_files import EVAL_EXTERNAL
    from thresher.report.tables import BENCHMARK_HEADINGS, benchmark_rows

    quiet_libraries()
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    if not names:
        raise UserError("no task is named; pass --tasks with names of lm-eval, such as --tasks ifeval,gsm8k")
    if include_path is not None and not include_path.is_dir():
        raise UserError(f"--include-path {include_path} is not a directory; give the one with your YAML files")
    benchmarks = lm_eval.Benchmarks(names, limit, include_path, _parse(settings or []), trust_remote_code)
    place = (environment or lm_eval.default_environment()).absolute()
    if install and not lm_eval.versions_in(place):
        with following("installing lm-eval") as show:
            lm_eval.install(place, show)
    lm_eval.require_lm_eval(place)  # before a model is loaded
    models, log_dir = find_models(source, trust_remote_code=trust_remote_code)
    rows = []
    for model in models:
        with following(f"evaluating the {model.name}") as show:
            seconds = None if timeout is None else 60.0 * timeout
            rows += lm_eval.evaluate(model, benchmarks, place, show, timeout=seconds, is_fresh=fresh)
    table = [[row.heading, *row.cells] for row in benchmark_rows(rows)]
    texts, numbers = BENCHMARK_HEADINGS[:1], BENCHMARK_HEADINGS[1:]
    result_console().print(make_table("", texts, numbers, table))
    if log_dir is not None:
        lm_eval.log_results(log_dir, rows)
        print_lines(f"written to {log_dir / EVAL_EXTERNAL}; `thresher report {log_dir}` shows them")


def _parse(settings: list[str]) -> dict[str, Any]:
    """Read KEY=VALUE settings as YAML; dots name nested keys."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    for each in settings:
        if not each.partition("=")[1]:
            raise UserError(f"{each!r} is not a setting; write it KEY=VALUE, such as batch_size=auto")
    try:
        return dict(OmegaConf.to_container(OmegaConf.from_dotlist(settings)))  # type: ignore[arg-type]
    except OmegaConfBaseException as error:
        raise UserError(f"the settings {' '.join(settings)} cannot be read ({error}); write them KEY=VALUE") from error
