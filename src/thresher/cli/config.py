"""`thresher config`: prints a resolved config or the schema."""

from __future__ import annotations

import typer

from thresher.cli.arguments import ConfigCommand, ConfigFile, Overrides

config_app = typer.Typer(help="Print a resolved config, or the schema of all keys.", no_args_is_help=True)


@config_app.command(cls=ConfigCommand)
def show(path: ConfigFile, overrides: Overrides = None) -> None:
    """Print the config with all defaults filled in and secrets masked."""
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
