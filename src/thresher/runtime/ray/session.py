"""The Ray session of a run: an existing cluster, or a local one that is started for the run.

A local cluster listens on loopback only, requires a token and sends no usage statistics; `environment` configures this.
Its files in the temporary directory are removed at the end, except after a failure, whose cause may be in Ray's logs.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import ray
from ray._raylet import GcsClient  # type: ignore[attr-defined]  # its stub lacks it
from ray.exceptions import AuthenticationError, RayError

from thresher.errors import RescaleRequested, ResourceError, RunStopped, UserError

SECONDS_TO_CONNECT = 10


@dataclass
class SessionFiles:
    """The files of a session. are_kept: also if it ends without an error, because something in it has failed."""

    are_kept: bool = False


@contextlib.contextmanager
def ray_session(address: str | None) -> Iterator[SessionFiles]:
    """Connect to the cluster at `address`, or start a local one; an existing session of this process is reused."""
    files = SessionFiles()
    if ray.is_initialized():
        yield files
        return
    session: Path | None = None  # the directory of a cluster that is started here
    try:
        if address is None:
            protect_token()
            context = ray.init(
                address="local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR
            )
            session = Path(context.address_info["session_dir"])
        else:
            _check_cluster(address)
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except AuthenticationError as error:
        raise auth_error(str(address), error) from None
    except (OSError, ValueError, RuntimeError, RayError) as error:
        where = f"the Ray cluster at {address}" if address else "Ray on this machine"
        raise ResourceError(
            f"cannot connect to {where}: {str(error).strip()}; check ray_address, and that RAY_AUTH_TOKEN_PATH is the "
            "file with the cluster's token"
        ) from None
    succeeded = False
    try:
        yield files
        succeeded = not files.are_kept
    except (RunStopped, RescaleRequested):
        succeeded = True
        raise
    finally:
        ray.shutdown()
        if session is not None and succeeded:
            _remove_session(session)


def protect_token() -> None:
    """Create Ray's default token for this user alone, because Ray makes it readable for all; restrict an existing one.

    The file is shared by all clusters of a user. Ray ignores it if the environment names another token.
    """
    names_another = {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys()
    if os.environ.get("RAY_AUTH_MODE", "token").lower() != "token" or names_another:
        return
    path = Path.home() / ".ray" / "auth_token"
    with contextlib.suppress(OSError):  # Ray reports a home directory that it cannot use
        path.parent.mkdir(exist_ok=True)
        if not path.exists():
            with tempfile.NamedTemporaryFile("w", dir=path.parent) as file:  # its mode is 0600
                file.write(secrets.token_hex(32))
                file.flush()
                with contextlib.suppress(FileExistsError):  # another process has just created it
                    os.link(file.name, path)
        if path.stat().st_uid == os.getuid() and path.stat().st_mode & 0o077:
            path.chmod(0o600)


def _remove_session(directory: Path) -> None:
    """Remove the directory of a cluster that has ended, and Ray's link to the latest one if that is it."""
    latest = directory.with_name("session_latest")
    with contextlib.suppress(OSError):
        if latest.is_symlink() and latest.readlink().name == directory.name:
            latest.unlink()
    shutil.rmtree(directory, ignore_errors=True)


def auth_error(cluster: str, error: AuthenticationError) -> UserError:
    """Return the error for a cluster that rejects the token."""
    reason = error.message.splitlines()[0].strip()
    return UserError(
        f"authentication with the Ray cluster at {cluster} failed: {reason}; set RAY_AUTH_TOKEN_PATH to a file with "
        "the cluster's token"
    )


def _check_cluster(address: str) -> None:
    """Fail fast if the cluster is unreachable or rejects the token; Ray retries for minutes and for 20 s."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit():
        check_reachable(host, int(port))
        GcsClient(address=address)


def check_reachable(host: str, port: int) -> None:
    """Fail within seconds if nothing listens; Ray's clients have no timeout or a long one."""
    socket.create_connection((host, port), timeout=SECONDS_TO_CONNECT).close()
