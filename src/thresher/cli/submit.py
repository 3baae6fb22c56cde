"""`thresher submit`: runs a config as a job on a Ray cluster."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from thresher.cli.arguments import ConfigFile, Overrides

if TYPE_CHECKING:
    from thresher.config import DPOConfig

logger = logging.getLogger(__name__)

INTERRUPTED = 130  # 128 + SIGINT, the convention of shells


def submit(
    path: ConfigFile,
    address: Annotated[
        str, typer.Option("--address", metavar="URL", help="Dashboard of the cluster, such as http://HEAD:8265.")
    ],
    overrides: Overrides = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Follow the log until the job ends.")] = True,
    working_dir: Annotated[
        Path | None,
        typer.Option("--working-dir", metavar="DIR", help="Upload this directory; the job runs in a copy of it."),
    ] = None,
) -> None:
    """Run a config as a job on a Ray cluster; the exit code is the job's."""
    from thresher.config.load import compose_yaml, parse_config

    values = compose_yaml(path, overrides or [])
    config = parse_config(values)
    check_job(config, address, working_dir)  # errors are reported before anything is sent

    from thresher.builders.preflight import check_submission

    for text in check_submission(config):
        logger.warning("%s", text)
    logger.info("checked the settings; the job checks files, models, devices and disk space on the cluster")

    from thresher.runtime.ray.environment import set_environment

    set_environment(address)
    from thresher.runtime.ray.jobs import JobClient

    server = JobClient(address)
    job = server.submit({**values, "ray_address": "auto"}, working_dir)  # auto: the cluster that runs the job
    logger.info("submitted job %s", job)
    if not wait:
        typer.echo(job)
        logger.info("follow it with: %s", server.command("logs --follow", job))
        logger.info("stop it with: %s", server.command("stop", job))
        return
    try:
        outcome = server.follow(job, lambda text: typer.echo(text, nl=False))
    except KeyboardInterrupt:
        logger.warning("job %s keeps running; stop it with: %s", job, server.command("stop", job))
        logger.info("or follow it again with: %s", server.command("logs --follow", job))
        raise typer.Exit(INTERRUPTED) from None
    if outcome.exit_code:
        status, message = outcome.status.lower(), outcome.message.strip()
        logger.error("job %s %s (exit code %d): %s", job, status, outcome.exit_code, message)
        logger.info("see its log with: %s", server.command("logs", job))
        raise typer.Exit(outcome.exit_code)
    logger.info("job %s succeeded", job)


def check_job(config: DPOConfig, address: str, working_dir: Path | None) -> None:
    """Reject settings that cannot work in a job, which runs in a temporary copy of the working directory."""
    from thresher.errors import UserError
    from thresher.redact import redact_text

    if not address.startswith(("http://", "https://")):
        raise UserError(
            f"--address {redact_text(address)} is not a URL; give the dashboard of the cluster, such as http://HEAD:8265"
        )
    if working_dir is not None and not working_dir.is_dir():
        raise UserError(f"--working-dir {working_dir} is not a directory; give the directory whose files the job needs")
    if config.runtime == "local":
        raise UserError(
            "runtime: local is a single process, but a job runs on the workers of the cluster; use runtime: ray"
        )
    written = {
        "output_dir": config.output_dir,
        "logging_dir": config.logging_dir,
        "cache_dir": config.cache_dir,
        "reference.cache_dir": config.reference.cache_dir,
    }
    for key, value in written.items():
        if value is not None and "://" not in value and not Path(value).is_absolute():
            raise UserError(
                f"{key} is {value}, but a job runs in a temporary directory; give an absolute path that all nodes share"
            )
