"""A run as a job on a cluster that is there: sent through the job server of Ray's dashboard, then followed.

The config travels as a file in the job's package, never on its command line, which a dashboard shows to everybody.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
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
from thresher.runtime.ray.session import knock, refusal

CONFIG_NAME = "thresher_job.yaml"
_SEND_LESS = (
    "; files that a job needs are sent along, so leave large ones out of --working-dir or name them in its .rayignore, "
    "and give their paths on a file system that all nodes share"
)
SECONDS_BETWEEN_QUESTIONS = 0.5


@dataclass(frozen=True)
class Outcome:
    """How a job ended: what Ray calls it, what Ray says of it, and its exit code; 0 only for success."""

    status: str
    message: str
    exit_code: int


class JobClient:
    """The job server of one cluster."""

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        with self._told():
            parts = urlsplit(self.url)
            knock(parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80))
            # Ray lets RAY_ADDRESS overrule the argument; this variable overrules both, and then they agree
            os.environ["RAY_API_SERVER_ADDRESS"] = self.url
            self._client = JobSubmissionClient(self.url)

    def submit(self, config: Mapping[str, Any], working_dir: Path | None) -> str:
        """Send a config and the files of `working_dir` to be trained on; return the job's id."""
        with tempfile.TemporaryDirectory(prefix="thresher-job-") as name, self._told():
            package = _package(Path(name), config, working_dir)
            job: str = self._client.submit_job(
                entrypoint=f"python -m thresher train {CONFIG_NAME}", runtime_env={"working_dir": str(package)}
            )
            return job

    def follow(self, job: str, write: Callable[[str], None]) -> Outcome:
        """Write the log of a job as it grows, and return how it ended."""

        async def tail() -> None:
            async for text in self._client.tail_job_logs(job):
                write(text)

        try:
            asyncio.run(tail())
            while not (info := self._client.get_job_info(job)).status.is_terminal():
                time.sleep(SECONDS_BETWEEN_QUESTIONS)
        except (OSError, RuntimeError, ClientError) as error:
            raise UserError(
                f"lost sight of job {job}: {redact_text(str(error).strip())}; "
                f"it may still run, see: {self.command('status', job)}"
            ) from None
        status = str(info.status.value)
        code = 0 if status == "SUCCEEDED" else info.driver_exit_code or 1
        return Outcome(status, str(info.message or ""), code)

    def command(self, verb: str, job: str) -> str:
        """Spell the command that shows, follows or stops a job."""
        mode = "RAY_AUTH_MODE=token " if os.environ.get("RAY_AUTH_MODE") == "token" else ""
        return f"{mode}ray job {verb} {job} --address {redact_text(self.url)}"

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Turn what the network, the token or the server refuses into a message with its mend."""
        url = redact_text(self.url)
        try:
            yield
        except AuthenticationError as error:
            raise refusal(url, error) from None
        except OSError as error:
            raise UserError(
                f"no Ray job server answers at {url}: {redact_text(str(error).strip())}; give the URL of the head's "
                "dashboard (port 8265 unless it was started with another), or forward that port to this machine"
            ) from None
        except (RuntimeError, ValueError, KeyError) as error:
            reason = redact_text(str(error).strip().rstrip("."))
            too_large = f"status code {HTTPStatus.REQUEST_ENTITY_TOO_LARGE}" in reason
            raise UserError(
                f"the server at {url} did not take the job: {reason}{_SEND_LESS if too_large else ''}"
            ) from None


def _package(directory: Path, config: Mapping[str, Any], working_dir: Path | None) -> Path:
    """Lay the config beside links to the files that the job takes along; Ray follows them as it packs."""
    if working_dir is not None:
        for each in working_dir.resolve().iterdir():
            (directory / each.name).symlink_to(each)
    (directory / CONFIG_NAME).unlink(missing_ok=True)
    (directory / CONFIG_NAME).write_text(yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True))
    return directory
