"""Submit a run to an existing Ray cluster through the job server of its dashboard, and follow its log.

The config is sent as a file in the job's package, because the dashboard shows the command line to every user.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml
from aiohttp import ClientError
from ray.exceptions import AuthenticationError
from ray.job_submission import JobSubmissionClient

from thresher.errors import UserError
from thresher.redact import redact_text
from thresher.runtime.ray.session import auth_error, check_reachable

CONFIG_NAME = "thresher_job.yaml"
# files with secrets, at any depth; the patterns are those of .gitignore
PRIVATE_FILES = (".env", ".netrc", ".ssh", ".aws", ".git-credentials")
_UPLOAD_HINT = (
    "; all files of --working-dir are uploaded, so exclude large ones in its .rayignore and keep them on a file system "
    "that all nodes share"
)
_SECONDS_BETWEEN_POLLS = 0.5
_SECONDS_FOR_AGENTS = 30.0


@dataclass(frozen=True)
class Outcome:
    """How a job ended: Ray's status and message, and the exit code, which is 0 only for success."""

    status: str
    message: str
    exit_code: int


class JobClient:
    """Client of the job server of one cluster."""

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        with self._translate_errors():
            parts = urlsplit(self.url)
            check_reachable(parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80))
            # RAY_ADDRESS takes precedence over the argument, and this variable over both
            os.environ["RAY_API_SERVER_ADDRESS"] = self.url
            self._client = JobSubmissionClient(self.url)

    def submit(self, config: Mapping[str, Any], working_dir: Path | None) -> str:
        """Submit a training job with a config and the files of `working_dir`; return its id."""
        with tempfile.TemporaryDirectory(prefix="thresher-job-") as name, self._translate_errors():
            package = _package(Path(name), config, working_dir)
            environment = {"working_dir": str(package), "excludes": list(PRIVATE_FILES)}
            started = time.monotonic()
            while True:
                try:
                    job: str = self._client.submit_job(
                        entrypoint=f"python -m thresher train {CONFIG_NAME}", runtime_env=environment
                    )
                    return job
                except RuntimeError as error:  # just after `ray start`, no node has its agent yet
                    if "No available agent" not in str(error) or time.monotonic() - started > _SECONDS_FOR_AGENTS:
                        raise
                time.sleep(_SECONDS_BETWEEN_POLLS)

    def follow(self, job: str, write: Callable[[str], None]) -> Outcome:
        """Stream the log of a job to `write`, and return how the job ended."""

        async def tail() -> None:
            async for text in self._client.tail_job_logs(job):
                write(text)

        try:
            with _interrupts_raised():
                asyncio.run(tail())
            while not (info := self._client.get_job_info(job)).status.is_terminal():
                time.sleep(_SECONDS_BETWEEN_POLLS)
        except (OSError, RuntimeError, ClientError) as error:
            raise UserError(
                f"lost connection while following job {job}: {redact_text(str(error).strip())}; "
                f"it may still be running, see: {self.command('status', job)}"
            ) from None
        status = str(info.status.value)
        code = 0 if status == "SUCCEEDED" else info.driver_exit_code or 1
        return Outcome(status, str(info.message or ""), code)

    def command(self, subcommand: str, job: str) -> str:
        """Return the `ray job` command that shows, follows or stops a job."""
        mode = "RAY_AUTH_MODE=token " if os.environ.get("RAY_AUTH_MODE") == "token" else ""
        return f"{mode}ray job {subcommand} {job} --address {redact_text(self.url)}"

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Raise errors of the network, the authentication and the server as `UserError` with a hint."""
        url = redact_text(self.url)
        try:
            yield
        except AuthenticationError as error:
            raise auth_error(url, error) from None
        except OSError as error:
            raise UserError(
                f"no Ray job server answers at {url}: {redact_text(str(error).strip())}; give the URL of the head's "
                "dashboard (port 8265 by default), or forward that port to this machine"
            ) from None
        except (RuntimeError, ValueError, KeyError) as error:
            reason = redact_text(str(error).strip().rstrip("."))
            too_large = f"status code {HTTPStatus.REQUEST_ENTITY_TOO_LARGE}" in reason
            raise UserError(
                f"the server at {url} rejected the job: {reason}{_UPLOAD_HINT if too_large else ''}"
            ) from None


@contextmanager
def _interrupts_raised() -> Iterator[None]:
    """Raise KeyboardInterrupt where SIGINT arrives: asyncio would cancel the task, and a library can swallow that."""

    def interrupt(_signal: int, _frame: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _package(directory: Path, config: Mapping[str, Any], working_dir: Path | None) -> Path:
    """Write the config next to symlinks to the job's files, which Ray follows when it packs the directory."""
    if working_dir is not None:
        for each in working_dir.resolve().iterdir():
            (directory / each.name).symlink_to(each)
    (directory / CONFIG_NAME).unlink(missing_ok=True)
    (directory / CONFIG_NAME).write_text(yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True))
    return directory
