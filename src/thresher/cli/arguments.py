"""Command-line arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperCommand

from thresher.errors import UserError

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="Config file (YAML).")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings that override the file, such as beta=0.2.")
]


class ConfigCommand(TyperCommand):
    """A command that takes KEY=VALUE settings; a setting written as an option is an error with the right spelling."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        options = {name for param in self.params for name in param.opts}
        for position, arg in enumerate(args):
            name, _, value = arg.partition("=")
            if arg.startswith("--") and name not in options:
                _reject_setting(name, value or next(iter(args[position + 1 :]), "VALUE"))
        return super().parse_args(ctx, args)


def _reject_setting(option: str, value: str) -> None:
    from thresher.config import DPOConfig
    from thresher.config.section import known_keys

    wanted = option.removeprefix("--").replace("-", "_")
    for key, _ in known_keys(DPOConfig):
        if wanted in (key, key.rpartition(".")[2]):
            raise UserError(f"no such option: {option}; settings are written KEY=VALUE, here {key}={value}")
