"""`thresher submit`: runs a config as a job on a Ray cluster."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thresher.cli.arguments import ConfigFile, Overrides
from thresher.cli.terminal import log_warnings
from thresher.errors import UserError
from thresher.optional import require

if TYPE_CHECKING:
    from thresher.config import DPOConfig
    from thresher.runtime.ray.jobs import JobClient

logger = logging.getLogger(__name__)

INTERRUPTED = 130  # 128 + SIGINT, the convention of shells

# config keys of paths: written by the job, inputs that may be names instead, and other inputs
_WRITTEN = ("output_dir", "logging_dir", "cache_dir", "reference.cache_dir")
_NAMES_OR_PATHS = (
    "pretrain",
    "actor_train.model_args.model_name_or_path",
    "actor_train.model_args.tokenizer_name_or_path",
    "actor_train.model_args.adapter_name_or_path",
    "actor_train.model_args.merge_adapters",
    "reference.model_args.model_name_or_path",
    "pref_loss",
    "samples.judge",
)
_INPUTS = (
    "resume_from_checkpoint",
    "samples.prompts_file",
    *(
        f"{role}.data_args.{name}"
        for role in ("actor_train", "validation")
        for name in ("file_name", "dataset_dir", "store", "template")
    ),
)
# the error that ends a job for a path that the nodes do not have, within the last characters of its log
_PATH_ERROR = re.compile(r"does not exist|cannot use|no such file", re.IGNORECASE)
_CHARS_OF_ERROR = 2000


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
    require("thresher submit", "ray", extra="ray")
    from thresher.builders.preflight import check_submission
    from thresher.config import load_config

    config = load_config(path, overrides or [])
    check_job(config, address, working_dir)  # errors are reported before anything is sent
    values, resolved = resolve_paths(config, has_uploads=working_dir is not None)
    log_warnings(check_submission(config))
    logger.info("checked the settings; the job checks files, models, devices and disk space on the cluster")

    from thresher.runtime.ray.environment import set_environment

    set_environment(address)
    from thresher.runtime.ray.jobs import PRIVATE_FILES, JobClient

    server = JobClient(address)
    if resolved:
        logger.info("the nodes of the cluster must see these paths: %s", ", ".join(resolved))
    if working_dir is not None:
        logger.info(
            "uploading the files of %s, except those that .gitignore and .rayignore exclude, and %s",
            working_dir,
            ", ".join(PRIVATE_FILES),
        )
    job = server.submit({**values, "ray_address": "auto"}, working_dir)  # auto: the cluster that runs the job
    if wait:
        _follow(server, job)
        return
    logger.info("submitted job %s", job)
    typer.echo(job)
    logger.info("follow it with: %s", server.command("logs --follow", job))
    logger.info("stop it with: %s", server.command("stop", job))


def _follow(server: JobClient, job: str) -> None:
    """Show the log of a job until it ends, and exit with its exit code; an interrupt leaves the job running."""
    end_of_log = ""

    def show(text: str) -> None:
        nonlocal end_of_log
        end_of_log = (end_of_log + text)[-_CHARS_OF_ERROR:]
        typer.echo(text, nl=False)

    try:
        logger.info("submitted job %s", job)
        outcome = server.follow(job, show)
    except KeyboardInterrupt:
        logger.warning("job %s keeps running; stop it with: %s", job, server.command("stop", job))
        logger.info("or follow it again with: %s", server.command("logs --follow", job))
        raise typer.Exit(INTERRUPTED) from None
    if outcome.exit_code:
        status, message = outcome.status.lower(), outcome.message.strip()
        logger.error("job %s %s (exit code %d): %s", job, status, outcome.exit_code, message)
        if _PATH_ERROR.search(end_of_log):
            logger.error(
                "paths are looked up on the nodes: keep files on a file system that all nodes mount at the same "
                "path, or upload them with --working-dir DIR and give paths relative to it"
            )
        logger.info("see its log with: %s", server.command("logs", job))
        raise typer.Exit(outcome.exit_code)
    logger.info("job %s succeeded", job)


def check_job(config: DPOConfig, address: str, working_dir: Path | None) -> None:
    """Reject settings that cannot work in a job, which runs in a temporary copy of the working directory."""
    if not address.startswith(("http://", "https://")):
        raise UserError(
            f"--address {address} is not a URL; give the dashboard of the cluster, such as http://HEAD:8265"
        )
    if working_dir is not None and not working_dir.is_dir():
        raise UserError(f"--working-dir {working_dir} is not a directory; give the directory whose files the job needs")
    if config.runtime == "local":
        raise UserError(
            "runtime: local is a single process, but a job runs on the workers of the cluster; use runtime: ray"
        )
    if config.runtime == "torchrun":
        raise UserError("runtime: torchrun needs processes that torchrun starts, not a Ray job; use runtime: ray")


def resolve_paths(config: DPOConfig, *, has_uploads: bool) -> tuple[dict[str, Any], list[str]]:
    """Return the values to send, in which relative paths are absolute, and the paths that changed as key=value.

    A job runs in a temporary directory. Paths of inputs stay relative if files are uploaded to that directory.
    """
    from thresher.data.sources.resolve import find_in_directory
    from thresher.data.tokenization.chat_template import template_names

    names = {"auto", "raw", *template_names()}
    values = config.model_dump(mode="json", exclude_unset=True)
    values["output_dir"] = config.output_dir  # the default is relative too
    resolved: list[str] = []
    keys = [tuple(key.split(".")) for key in (_WRITTEN if has_uploads else (*_WRITTEN, *_NAMES_OR_PATHS, *_INPUTS))]
    # before the directory that they are looked for in becomes absolute
    keys = keys if has_uploads else [*_inputs_of_sets(config), *keys]
    for *sections, name in keys:
        key = ".".join([*sections, name])
        section: Any = values
        for each in sections:
            section = section.get(each) or {}
        old = section.get(name)
        given = [old] if isinstance(old, str) else old or []
        if name == "file_name":
            data_args: Any = (values.get(sections[0]) or {}).get("data_args") or {}
            given = [find_in_directory(path, data_args.get("dataset_dir")) for path in given]
        no_paths = {name for name in given if ".py:" not in name} if key == "pref_loss" else names
        paths = [path if path in no_paths else _absolute(path, must_exist=key in _NAMES_OR_PATHS) for path in given]
        new: Any = paths[0] if isinstance(old, str) else paths
        if isinstance(old, dict):  # losses and their weights
            new = dict(zip(paths, old.values(), strict=True))
        if paths and new != old:
            section[name] = new
            resolved.append(f"{key}={','.join(paths)}")
    return values, resolved


def _inputs_of_sets(config: DPOConfig) -> list[tuple[str, ...]]:
    """The keys of sources and validation sets that may have a path."""
    sets: list[tuple[str, ...]] = [
        ("actor_train", "data_args", "sources", name) for name in config.actor_train.data_args.sources
    ]
    if config.validation is not None:
        sets += [("validation", "sets", name) for name in config.validation.sets]
    return [(*each, name) for each in sets for name in ("file_name", "store", "template")]


def _absolute(path: str, *, must_exist: bool) -> str:
    # must_exist: a model that does not exist here may be a name on the Hub; of a function, its file is looked for
    file = path.rpartition(":")[0] if ".py:" in path else path
    if "://" in path or path.startswith(("~", "$")) or (must_exist and not Path(file).exists()):
        return path
    return os.path.abspath(path)  # noqa: PTH100  # normalizes `..`, and keeps symlinks
