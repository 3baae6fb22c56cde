"""The Ray session of a run: an existing cluster, or a local one that is started for the run.

A local cluster listens on loopback only, requires a token and sends no usage statistics; `environment` configures this.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Iterator

import ray
from ray._raylet import GcsClient  # type: ignore[attr-defined]  # its stub lacks it
from ray.exceptions import AuthenticationError, RayError

from thresher.errors import ResourceError, UserError

SECONDS_TO_CONNECT = 10


@contextlib.contextmanager
def ray_session(address: str | None) -> Iterator[None]:
    """Connect to the cluster at `address`, or start a local one; an existing session of this process is reused."""
    if ray.is_initialized():
        yield
        return
    try:
        if address is None:
            ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
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
    try:
        yield
    finally:
        ray.shutdown()


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
