"""The command line: one verb per file. Nothing heavy is imported before a verb runs."""

from __future__ import annotations

import sys

import typer

from thresher.cli.cache import cache_app
from thresher.cli.config import config_app
from thresher.cli.export import export
from thresher.cli.inspect import inspect
from thresher.cli.losses import losses
from thresher.cli.prepare import prepare
from thresher.cli.score import score
from thresher.cli.submit import submit
from thresher.cli.train import train
from thresher.errors import StoppedError, UserError

app = typer.Typer(
    name="thresher",
    help="Align language models with preference data: DPO and its family.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(prepare)
app.command()(inspect)
app.command()(score)
app.command()(train)
app.command()(submit)
app.command()(export)
app.command()(losses)
app.add_typer(cache_app, name="cache")
app.add_typer(config_app, name="config")


def main() -> None:
    """Run the command line; a mistake that a person can mend is one message and exit code 2."""
    try:
        app()
    except UserError as error:
        from rich.console import Console

        Console(stderr=True, soft_wrap=True, highlight=False).print(f"[bold red]error:[/] {_escaped(str(error))}")
        sys.exit(2)
    except StoppedError as stopped:
        sys.stderr.write(f"{stopped}\n")
        sys.exit(stopped.exit_code)
    except Exception:
        # a defect of ours, shown whole but for secrets: the libraries below quote URLs as they are
        import traceback

        from thresher.redact import printable, redact_text

        sys.stderr.write(printable(redact_text(traceback.format_exc())))
        sys.exit(1)


def _escaped(text: str) -> str:
    from rich.markup import escape

    from thresher.redact import printable

    return escape(printable(text))
