"""The store of a launched run, and messages in it that are signed.

torch's store has no credentials: any process that reaches its port can read and write every key. So that ranks obey
rank 0 alone, each message is signed with a key that only processes with this user's token can compute. Rank 0 listens
on the master address alone; the store of torchrun's agent listens on all addresses.
"""

from __future__ import annotations

import errno
import functools
import hmac
import ipaddress
import json
import logging
import os
import secrets
import socket
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from thresher.distributed.groups import PEER_TIMEOUT
from thresher.durable import ensure_token
from thresher.errors import ResourceError
from thresher.runtime.launch import Launch

logger = logging.getLogger(__name__)

TOKEN_VARIABLE = "THRESHER_TOKEN"  # noqa: S105  # a name, not a token
_SIGNATURE_LENGTH = 64  # of the hexadecimal digits of SHA-256


@functools.cache  # a process has one, even for a second run in it
def open_store(launch: Launch) -> Store:
    """Connect to the launcher's store, or to the one that rank 0 creates."""
    host, port = launch.master
    try:
        hosts = launch.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        listener = _bind(host, port).detach() if hosts else None
        return TCPStore(host, port, launch.size, hosts, PEER_TIMEOUT, master_listen_fd=listener)
    except (dist.DistError, OSError, ValueError) as error:
        raise ResourceError(
            f"rank {launch.rank} of {launch.size} cannot connect to the other ranks at {host}:{port}: "
            f"{str(error).splitlines()[0]}; set MASTER_ADDR to the node of rank 0 and MASTER_PORT to a free port"
        ) from None


def _bind(host: str, port: int) -> socket.socket:
    """Bind a socket to the master address, or to all addresses if other nodes know this host by another one."""
    # many systems resolve the name of a host to a loopback address on that host; some addresses are of a load balancer
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    if host == "localhost" or is_loopback(host) or not is_loopback(str(address[0])):
        try:
            return socket.create_server(address, family=family)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def is_loopback(address: str) -> bool:
    """Return whether this is an address, not a name, of the loopback interface."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


class SignedMessages:
    """Messages by name in a store, of which only those count that a process with the same key has sent."""

    def __init__(self, store: Store, key: bytes):
        self._store = store
        self._key = key
        self._refused: set[str] = set()

    def send(self, name: str, message: object) -> None:
        text = json.dumps(message).encode()
        self._store.set(name, self._sign(name, text) + text.decode())

    def find(self, name: str) -> Any:
        """Return the message; None until it arrives. A message with a wrong signature does not count."""
        if not self._store.check([name]):
            return None
        received = self._store.get(name)
        signature, text = received[:_SIGNATURE_LENGTH], received[_SIGNATURE_LENGTH:]
        if hmac.compare_digest(signature, self._sign(name, text).encode()):
            return json.loads(text)
        if name not in self._refused:
            self._refused.add(name)
            logger.warning("refused a message that no rank of this run has signed: another process writes to its store")
        return None

    def _sign(self, name: str, text: bytes) -> str:
        return hmac.digest(self._key, name.encode() + b"\n" + text, "sha256").hex()


def sign_messages(store: Store, launch: Launch, token: bytes) -> SignedMessages:
    """Agree with all ranks on the key of this session, derived from the token that only they know."""
    # each rank adds random bytes, so that no message of an earlier session is valid in this one
    own = secrets.token_hex(16)
    names = [f"random/{rank}" for rank in range(launch.size)]
    store.set(names[launch.rank], own)
    store.wait(names, PEER_TIMEOUT)
    values = store.multi_get(names)
    values[launch.rank] = own.encode()
    messages = SignedMessages(store, hmac.digest(token, b"\n".join(values), "sha256"))
    if launch.rank == 0:
        messages.send("hello", [])
        return messages
    store.wait(["hello"], PEER_TIMEOUT)
    if messages.find("hello") is None:
        raise ResourceError(
            f"rank {launch.rank} of {launch.size} on {socket.gethostname()} does not have the token of rank 0, by "
            f"which it would recognize its calls; set {TOKEN_VARIABLE} to the same random text on all nodes, or share "
            f"{_token_file()} between them"
        )
    return messages


def read_token() -> bytes:
    """Return the token of this user, made by the first process that needs it."""
    given, path = os.environ.get(TOKEN_VARIABLE), _token_file()
    if given:
        return given.encode()
    try:
        ensure_token(path)
        return path.read_bytes()
    except OSError as error:
        raise ResourceError(
            f"cannot use {path}, the token by which the ranks of a run recognize each other: {error.strerror}; set "
            f"{TOKEN_VARIABLE} to the same random text on all nodes"
        ) from None


def _token_file() -> Path:
    return Path.home() / ".thresher" / "token"
