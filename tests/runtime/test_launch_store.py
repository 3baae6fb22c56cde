"""Messages between launched ranks: only signed ones count, secrets are not sent, the store listens on one address."""

from __future__ import annotations

import os
import socket
import stat
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from queue import Queue

import psutil
import pytest
import torch.distributed as dist

from tests.support.ports import free_ports, listening
from tests.support.two_machines import can_make_machines, run_on_two_machines
from thresher.errors import ResourceError, UserError
from thresher.redact import MASK, restore_secrets
from thresher.runtime import torchrun
from thresher.runtime.launch import Launch
from thresher.runtime.launch_session import LaunchSession
from thresher.runtime.launch_store import SignedMessages, is_loopback, open_store, read_token, sign_messages
from thresher.runtime.torchrun import LaunchedRank, LaunchedRanks, address_among_ranks

SECRETS = {
    "tracker_kwargs": {"wandb_api_key": "0123456789secret", "project": "mine"},
    "system_envs": {"PLAIN": "secret of the environment"},
    "actor_train": {"system_envs": {"OTHER": "secret of the role"}},
    "reference": {"system_envs": {"THIRD": "secret of the reference"}},
    "output_dir": "here",
}


def launch_of(rank: int, size: int = 2) -> Launch:
    return Launch("srun", rank, size, rank, ("127.0.0.1", 1))


def on_both(work: Callable[[int], object]) -> list[object]:
    """Run two ranks in threads; return their results or errors."""

    def run(rank: int) -> object:
        try:
            return work(rank)
        except (UserError, SystemExit) as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, (0, 1)))


def sessions(store: dist.Store, token: bytes = b"token") -> list[LaunchSession]:
    launches = [launch_of(rank) for rank in (0, 1)]
    clients = [store.clone() for _ in launches]  # one per rank, as in two processes
    messages = on_both(lambda rank: sign_messages(clients[rank], launches[rank], token))
    return [LaunchSession(*each) for each in zip(launches, clients, messages, strict=True)]


def test_a_message_that_no_rank_has_signed_is_refused_and_the_right_one_replaces_it(caplog):
    store = dist.HashStore()
    first, second = (SignedMessages(store, b"key") for _ in range(2))
    store.set("call/1", "0" * 64 + '["receive", [{}], null]')
    assert second.find("call/1") is None
    assert second.find("call/1") is None
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "refused a message that no rank of this run has signed"
    ]
    first.send("call/1", ["join", [], None])
    assert second.find("call/1") == ["join", [], None]


@pytest.mark.parametrize("stored", ["", "short", "\x00" * 80])
def test_a_message_of_any_bytes_is_refused(stored):
    store = dist.HashStore()
    store.set("call/1", stored)
    assert SignedMessages(store, b"key").find("call/1") is None


def test_a_message_is_valid_under_its_own_name_alone():
    store = dist.HashStore()
    messages = SignedMessages(store, b"key")
    messages.send("call/1", ["join", [], None])
    store.set("call/2", store.get("call/1").decode())
    assert messages.find("call/2") is None


def test_a_message_of_an_earlier_session_with_the_same_token_is_refused():
    earlier, later = dist.HashStore(), dist.HashStore()
    sessions(earlier)[0].messages.send("call/1", ["join", [], None])
    follower = sessions(later)[1]
    later.set("call/1", earlier.get("call/1").decode())
    assert follower.messages.find("call/1") is None


def test_a_rank_with_another_token_says_what_to_set():
    store = dist.HashStore()
    tokens = [b"one", b"other"]
    first, second = on_both(lambda rank: sign_messages(store, launch_of(rank), tokens[rank]))
    assert isinstance(first, SignedMessages)
    assert isinstance(second, ResourceError)
    assert "does not have the token of rank 0" in str(second)
    assert "set THRESHER_TOKEN to the same random text on all nodes" in str(second)


def test_a_call_that_is_not_on_the_list_is_refused_even_if_it_is_signed():
    first, second = sessions(dist.HashStore())
    first.messages.send("call/1", ["log_stacks", [], None])
    with pytest.raises(UserError, match="'log_stacks', which is not a call of a run"):
        second.follow(LaunchedRank(second.launch, second.store), dict)


def test_a_rank_that_ends_without_a_word_in_a_call_is_found_by_its_missing_heartbeats():
    first, second = sessions(dist.HashStore())
    first._heartbeat_timeout = 2.0
    second.send_heartbeats(2.0, pytest.fail)()  # ended at once, as by SIGKILL
    message = r"rank 1 has sent no heartbeat for [\d.]+ s: it has ended, is stopped, .* rerun the same command"
    with pytest.raises(UserError, match=message), first.on_all("save"):
        pass


def test_a_rank_that_sends_heartbeats_may_take_any_time_for_a_call_even_while_it_waits_in_the_store():
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    first, second = sessions(store)
    first._heartbeat_timeout = 2.0
    first_ends = first.send_heartbeats(2.0, pytest.fail)
    end = second.send_heartbeats(2.0, pytest.fail)

    def save() -> None:
        with first.on_all("save"):
            pass

    with ThreadPoolExecutor(1) as pool:
        saving = pool.submit(save)
        with pytest.raises(dist.DistStoreError):
            second.store.wait(["never set"], timedelta(seconds=6))
        assert not saving.done()
        second.store.add("done/1", 1)
        saving.result(timeout=60)
    end()
    first_ends()


def test_a_rank_0_that_is_stopped_outside_of_a_step_is_found_by_the_others():
    first, second = sessions(dist.HashStore())
    silent: Queue[tuple[float, str]] = Queue()
    end_of_first = first.send_heartbeats(2.0, pytest.fail)
    end = second.send_heartbeats(2.0, lambda message: silent.put((time.monotonic(), message)))
    time.sleep(4.0)
    assert silent.empty(), "rank 0 sends heartbeats, however long its call takes"
    stopped = time.monotonic()
    end_of_first()
    found, message = silent.get(timeout=30)
    assert 1.5 < found - stopped < 8.0
    assert message.startswith("rank 0 has sent no heartbeat for 2 s: it has ended, is stopped, ")
    end()


def test_ranks_that_do_not_send_heartbeats_yet_may_take_any_time_to_receive_a_config():
    first, second = sessions(dist.HashStore())

    def receive() -> None:
        with first.on_all("receive"):
            first._heartbeat_timeout = 0.8

    with ThreadPoolExecutor(1) as pool:
        receiving = pool.submit(receive)
        time.sleep(3.0)
        assert not receiving.done()
        second.store.add("done/1", 1)
        receiving.result(timeout=60)


def test_secrets_and_the_environment_are_not_sent_and_each_rank_adds_its_own(monkeypatch):
    store = dist.HashStore()
    first, second = sessions(store)
    opened: dict[int, object] = {}
    monkeypatch.setattr(LaunchedRank, "receive", lambda rank, values: opened.__setitem__(rank._rank, dict(values)))

    def run(rank: int) -> None:
        if rank:
            second.follow(LaunchedRank(second.launch, store), lambda: SECRETS)
        else:
            LaunchedRanks(first, SECRETS)
            first.close(None)

    on_both(run)
    assert opened == {0: SECRETS, 1: SECRETS}
    sent = store.get("call/1").decode()
    assert "here" in sent
    assert "secret" not in sent


def test_secrets_are_restored_in_nested_values_and_unknown_ones_stay_masked():
    redacted = {"a": {"b": [MASK, "c"]}, "d": f"https://{MASK}@host", "e": MASK}
    own = {"a": {"b": ["secret", "other"]}, "d": "https://login@host"}
    assert restore_secrets(redacted, lambda: own) == {
        "a": {"b": ["secret", "c"]},
        "d": "https://login@host",
        "e": MASK,
    }


def addresses_of(port: int) -> set[str]:
    """Addresses on which a socket of this machine listens at the port, in the kernel's notation."""
    found = [each.partition(":") for each in listening().values()]
    return {address for address, _, number in found if int(number, 16) == port}


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_rank_0_listens_on_the_master_address_alone(host, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    (port,) = free_ports()
    store = open_store(Launch("srun", 0, 1, 0, (host, port)))
    store.set("key", "value")
    assert store.get("key") == b"value"
    assert addresses_of(port) <= {"0100007F", "00000000000000000000000001000000"}
    assert addresses_of(port)


@pytest.mark.parametrize(
    ("routes", "addresses"),
    [
        # Debian gives a machine's own name a loopback address, so the way to rank 0 is local there and remote elsewhere
        ([{"node0": "127.0.1.1", "10.0.0.2": "10.0.0.1"}, {"node0": "10.0.0.2"}], ["10.0.0.1", "10.0.0.2"]),
        ([{"node0": "10.0.0.1"}, {"node0": "10.0.0.2"}], ["10.0.0.1", "10.0.0.2"]),
        ([{"node0": "127.0.1.1"}, {"node0": "127.0.1.1"}], ["127.0.1.1", "127.0.1.1"]),  # one machine
    ],
    ids=["own name is loopback", "own name is remote", "one machine"],
)
def test_ranks_on_several_nodes_never_talk_over_loopback(routes, addresses, monkeypatch):
    """The routes of two machines are given: this one has no second."""
    here = threading.local()
    monkeypatch.setattr(torchrun, "_local_address", lambda host, _: here.routes[host])
    store = dist.HashStore()

    def address(rank: int) -> str:
        here.routes = routes[rank]
        return address_among_ranks(store, Launch("srun", rank, 2, 0, ("node0", 1)))

    assert on_both(address) == addresses


def test_rank_0_whose_name_is_loopback_uses_the_interface_of_the_other_rank():
    """With the interfaces of this machine: the routes are the kernel's."""
    statistics = psutil.net_if_stats()
    addresses = [
        each.address
        for interface, found in psutil.net_if_addrs().items()
        for each in found
        if each.family == socket.AF_INET and statistics[interface].isup and not is_loopback(each.address)
    ]
    if not addresses:
        pytest.skip("this machine has no interface besides loopback")
    store, masters = dist.HashStore(), ("127.0.1.1", addresses[0])  # the name of node 0, resolved there and elsewhere

    def address(rank: int) -> str:
        return address_among_ranks(store, Launch("srun", rank, 2, 0, (masters[rank], 1)))

    assert on_both(address) == [addresses[0]] * 2


# what a rank of two does until it is connected with the other one, and then the numbers of nodes and its interfaces
JOIN = """
import os
from thresher.runtime.launch import find_launch
from thresher.runtime.launch_store import open_store
from thresher.runtime.torchrun import LaunchedRank
launch = find_launch(os.environ)
nodes = LaunchedRank(launch, open_store(launch)).join()
print(launch.rank, nodes, os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"], flush=True)
"""


@pytest.mark.hand  # CI has the addresses alone
@pytest.mark.distributed
def test_two_machines_whose_own_names_are_loopback_connect_over_their_network(tmp_path):
    if not can_make_machines():
        pytest.skip("this user cannot make network namespaces")
    done = run_on_two_machines(tmp_path, "-c", JOIN, environment={**os.environ, "OMP_NUM_THREADS": "1"}, seconds=240)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 2 eth0 eth0", "1 2 eth1 eth1"]


def test_a_port_in_use_is_an_error_that_names_the_variables():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = int(server.getsockname()[1])
        with pytest.raises(ResourceError, match=r"set MASTER_ADDR to the node of rank 0 and MASTER_PORT to a free"):
            open_store(Launch("srun", 0, 1, 0, ("127.0.0.1", port)))


def test_the_token_is_a_private_file_that_the_environment_replaces(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("THRESHER_TOKEN", raising=False)
    token = read_token()
    assert stat.S_IMODE((tmp_path / ".thresher" / "token").stat().st_mode) == 0o600
    assert (len(token), read_token()) == (64, token)
    monkeypatch.setenv("THRESHER_TOKEN", "another")
    assert read_token() == b"another"


def test_a_home_that_cannot_be_written_is_an_error_that_names_the_variable(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    monkeypatch.delenv("THRESHER_TOKEN", raising=False)
    with pytest.raises(ResourceError, match="set THRESHER_TOKEN to the same random text on all nodes"):
        read_token()
