"""The command line: one command per file. Nothing heavy is imported before a command runs."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from thresher import __version__
from thresher.cli.answers import answers
from thresher.cli.arguments import ConfigCommand
from thresher.cli.cache import cache_app
from thresher.cli.check import check
from thresher.cli.config import config_app
from thresher.cli.demo import demo
from thresher.cli.eval import evaluate
from thresher.cli.export import export
from thresher.cli.import_config import import_config
from thresher.cli.inspect import inspect
from thresher.cli.losses import losses
from thresher.cli.plan import plan
from thresher.cli.precompute_reference import precompute_reference
from thresher.cli.prepare import prepare
from thresher.cli.recipes import recipes_app
from thresher.cli.report import report
from thresher.cli.submit import submit
from thresher.cli.sweep import sweep
from thresher.cli.terminal import choose_level, log_to_terminal, use_plain_lines
from thresher.cli.train import train
from thresher.errors import PeerError, RunStopped, UserError, unusable_path
from thresher.redact import escape_control_chars, redact_text

# a path that cannot be used: no permission, a read-only disk, or a file instead of a directory
_PATH_ERRNOS = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST}


class CommandGroup(TyperGroup):
    """Accepts -q, -v and --plain after a command too."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        _hide_types_of_flags(self)

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        end = args.index("--") if "--" in args else len(args)
        flags = [arg for arg in args[:end] if arg in ("-q", "--quiet", "-v", "--verbose", "--plain")]
        others = [arg for arg in args[:end] if arg not in flags]
        return super().parse_args(ctx, [*flags, *others, *args[end:]])


def _hide_types_of_flags(command: Any) -> None:
    """A flag takes no value, so help must not show `<bool>` as one."""
    get_params = command.get_params

    def without_types(context: typer.Context) -> Any:
        params = get_params(context)
        for each in params:
            if getattr(each, "is_bool_flag", False) and each.metavar is None:
                each.metavar = ""
        return params

    command.get_params = without_types  # the only place with the option --help
    for each in getattr(command, "commands", {}).values():
        _hide_types_of_flags(each)


app = typer.Typer(
    name="thresher",
    cls=CommandGroup,
    help="Train language models on preference data with DPO and related losses.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command()(demo)
app.command(cls=ConfigCommand)(check)
app.command(cls=ConfigCommand)(plan)
app.command()(prepare)
app.command()(inspect)
app.command("precompute-reference", cls=ConfigCommand)(precompute_reference)
app.command(cls=ConfigCommand)(train)
app.command(cls=ConfigCommand)(sweep)
app.command(cls=ConfigCommand)(submit)
app.command()(report)
app.command()(export)
app.command("eval")(evaluate)
app.command()(answers)
app.command()(losses)
app.command("import")(import_config)
app.add_typer(recipes_app, name="recipes")
app.add_typer(cache_app, name="cache")
app.add_typer(config_app, name="config")


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"thresher {__version__}")
        raise typer.Exit


@app.callback()
def set_up(
    context: typer.Context,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show warnings and errors only.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show debug messages too.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Print plain lines instead of a live display.")] = False,
    version: Annotated[  # noqa: ARG001
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Show the messages of a command at the requested level."""
    from thresher import importers

    importers.install()
    use_plain_lines(plain)
    context.with_resource(log_to_terminal(choose_level(quiet=quiet, verbose=verbose)))


def main() -> None:
    """Run the command line; a user error prints one message and exits with code 2."""
    # progress bars of libraries, such as reading a GGUF file; the variable is read when tqdm is imported
    os.environ.setdefault("TQDM_DISABLE", "1")
    try:
        app(prog_name="thresher")  # also as `python -m thresher`, for usage lines and completion
    except PeerError as failed:  # another process has shown it
        sys.exit(failed.exit_code)
    except UserError as error:
        _exit_with(error)
    except RunStopped as stopped:
        sys.stderr.write(f"{stopped}\n")
        sys.exit(stopped.exit_code)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _PATH_ERRNOS and error.filename is not None:
            _exit_with(unusable_path(error.filename, error.strerror))
        # a bug: show the traceback with secrets masked, since libraries quote URLs in full
        sys.stderr.write(escape_control_chars(redact_text(traceback.format_exc())))
        sys.exit(1)


def _exit_with(error: UserError) -> NoReturn:
    console = Console(stderr=True, highlight=False)
    text = Text.assemble(("error:", "bold red"), f" {escape_control_chars(str(error))}")
    # a terminal would break long lines within words; a file gets them as they are
    console.print(text, soft_wrap=not console.is_terminal)
    sys.exit(2)
