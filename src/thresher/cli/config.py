"""`thresher config`: show a resolved config, print the schema."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

config_app = typer.Typer(help="Show a resolved config, or the schema of all keys.", no_args_is_help=True)


@config_app.command()
def show(
    path: Annotated[Path, typer.Argument(help="YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value ...")] = None,
) -> None:
    """Print the config as it would run, every default filled in."""
    import yaml

    from thresher.config import load_config
    from thresher.redact import redact

    values = redact(load_config(path, overrides or []).model_dump(mode="json"))
    typer.echo(yaml.safe_dump(values, sort_keys=False, allow_unicode=True), nl=False)


@config_app.command()
def schema() -> None:
    """Print the JSON schema of the config."""
    import json

    from thresher.config import DPOConfig

    typer.echo(json.dumps(DPOConfig.model_json_schema(), indent=2))
