"""The Ray session of a run: an existing cluster, or a local one that is started for the run.

`RaySession` keeps the connection when workers fail, so that a restart starts neither Ray nor its nodes.

A local cluster listens on loopback only, requires a token and sends no usage statistics; `environment` configures this.
Ray lets everybody write to its files, so they are in a directory that only their owner can enter. They are removed at
the end, except after a failure, whose cause may be in Ray's logs.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
from ray._raylet import GcsClient  # type: ignore[attr-defined]  # its stub lacks it
from ray.exceptions import AuthenticationError, RayError

from thresher.durable import ensure_token
from thresher.errors import RescaleRequested, ResourceError, RunStopped, UserError, WorkerError, WorkerLostError
from thresher.observability.details import DETAIL
from thresher.runtime.ray.fork_server import ForkServers

logger = logging.getLogger(__name__)

SECONDS_TO_CONNECT = 10
_TIMED_OUT = "timed out during startup"


class RaySession:
    """The connection to Ray of all attempts of a run, and the fork servers on the nodes."""

    def __init__(self, address: str | None):
        self._address = address
        self._opened: contextlib.ExitStack | None = None
        self._failure: BaseException | None = None  # the first one; Ray's files may have its cause
        self.forks = ForkServers()

    def __enter__(self) -> RaySession:
        return self

    def __exit__(self, _: object, error: BaseException | None, traceback: object) -> None:
        self._close(error)

    @contextlib.contextmanager
    def attempt(self) -> Iterator[None]:
        """Connect, unless the connection of the previous attempt still works."""
        if self._opened is not None and not _reaches_cluster():
            self._close(None)
        if self._opened is None:
            stack = contextlib.ExitStack()
            stack.enter_context(ray_session(self._address))
            self._opened = stack
        try:
            yield
        except (WorkerLostError, WorkerError) as error:
            self._failure = self._failure or error
            raise
        except RescaleRequested:
            raise
        except BaseException as error:
            self._close(error)
            raise

    def _close(self, error: BaseException | None) -> None:
        stack, self._opened, self.forks = self._opened, None, ForkServers()
        if stack is not None:
            cause = self._failure or error
            stack.__exit__(type(cause) if cause else None, cause, cause.__traceback__ if cause else None)


def _reaches_cluster() -> bool:
    """Check the GCS and this process's own raylet: a session survives the loss of any other node."""
    context = ray.get_runtime_context()
    host, _, port = context.gcs_address.rpartition(":")
    try:
        check_reachable(host, int(port))
        (own,) = [node for node in ray.nodes() if node["NodeID"] == context.get_node_id()]
        check_reachable(own["NodeManagerAddress"], own["NodeManagerPort"])
    except (OSError, ValueError, RayError):
        return False
    return bool(own["Alive"])


@contextlib.contextmanager
def ray_session(address: str | None) -> Iterator[None]:
    """Connect to the cluster at `address`, or start a local one; an existing session of this process is reused."""
    if ray.is_initialized():
        yield
        return
    directory: Path | None = None  # of a cluster that is started here
    try:
        if address is None:
            protect_token()
            directory = _start_ray()
        else:
            # Ray retries for minutes if the cluster is unreachable, and for 20 s if it rejects the token
            host, _, port = address.rpartition(":")
            if host and port.isdigit():
                check_reachable(host, int(port))
                GcsClient(address=address)
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
        yield
        succeeded = True
    except (RunStopped, RescaleRequested):
        succeeded = True
        raise
    finally:
        ray.shutdown()
        if directory is not None and succeeded:
            shutil.rmtree(directory, ignore_errors=True)


def _start_ray() -> Path:
    """Start a cluster on this machine, on a busy one with a second try; return the private directory of its files."""
    # Ray's sockets are below it, and the path of a socket has at most 107 bytes
    directory = Path(tempfile.mkdtemp(prefix="thresher-", dir=os.environ.get("RAY_TMPDIR")))
    quiet: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
    for tries_left in (1, 0):
        try:
            ray.init(address="local", _temp_dir=str(directory / "ray"), **quiet)
            break
        except Exception as error:  # Ray has no class for it
            ray.shutdown()
            if _TIMED_OUT not in str(error):
                shutil.rmtree(directory, ignore_errors=True)
                raise
            if not tries_left:
                raise ResourceError(
                    f"Ray did not start in time on this machine, twice: it is overloaded, or the disk of "
                    f"{directory.parent} is full; see {directory}, and run the same command when it has less to do"
                ) from None
            logger.warning("Ray did not start in time; trying once more")
    node = ray.nodes()[0]
    address, port = node["NodeManagerAddress"], node["MetricsExportPort"]
    logger.info("metrics for Prometheus: http://%s:%d/metrics", address, port, extra=DETAIL)
    return directory


def protect_token() -> None:
    """Create Ray's default token for this user alone, or restrict an existing one: Ray makes it readable for all."""
    # all clusters of a user share the file; Ray ignores it if the environment names a different token
    names_another = {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys()
    if os.environ.get("RAY_AUTH_MODE", "token").lower() != "token" or names_another:
        return
    with contextlib.suppress(OSError):  # Ray reports a home directory that it cannot use
        ensure_token(Path.home() / ".ray" / "auth_token")


def auth_error(cluster: str, error: AuthenticationError) -> UserError:
    """Return the error for a cluster that rejects the token."""
    reason = error.message.splitlines()[0].strip()
    return UserError(
        f"authentication with the Ray cluster at {cluster} failed: {reason}; set RAY_AUTH_TOKEN_PATH to a file with "
        "the cluster's token"
    )


def check_reachable(host: str, port: int) -> None:
    """Fail within seconds if nothing listens; Ray's clients have no timeout or a long one."""
    socket.create_connection((host, port), timeout=SECONDS_TO_CONNECT).close()
