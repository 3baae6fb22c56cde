"""A Ray session for the length of a run: a cluster that is there, or one of our own on this machine.

Ray of our own listens on loopback only, asks for a token and reports to nobody; `environment` sees to that.
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
    """Connect to the cluster at `address`, or start one here; a session that the process already has is kept."""
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
        raise refusal(str(address), error) from None
    except (OSError, ValueError, RuntimeError, RayError) as error:
        where = f"the Ray cluster at {address}" if address else "Ray on this machine"
        raise ResourceError(
            f"cannot connect to {where}: {str(error).strip()}; check ray_address, and that RAY_AUTH_TOKEN_PATH names "
            "the cluster's token"
        ) from None
    try:
        yield
    finally:
        ray.shutdown()


def refusal(cluster: str, error: AuthenticationError) -> UserError:
    """Say that a cluster does not take our token."""
    reason = error.message.splitlines()[0].strip()
    return UserError(
        f"the Ray cluster at {cluster} refuses us: {reason}; set RAY_AUTH_TOKEN_PATH to a file with the cluster's token"
    )


def _check_cluster(address: str) -> None:
    """Fail at once where nobody listens, or our token is refused: Ray would go on trying, for minutes and for 20 s."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit():
        knock(host, int(port))
        GcsClient(address=address)


def knock(host: str, port: int) -> None:
    """Fail within seconds where nobody listens: Ray's clients know no time-out, or a long one."""
    socket.create_connection((host, port), timeout=SECONDS_TO_CONNECT).close()
