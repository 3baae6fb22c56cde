"""Runtime for a run whose processes torchrun or srun started: rank 0 leads, the other ranks follow.

Rank 0 runs the pipeline as the driver of a Ray run does: it prepares pairs, logs, tracks and decides. Each call of its
`LaunchedRanks` is executed by rank 0 itself, and by the other ranks, which wait for calls in `LaunchSession.follow`.
Calls travel through the store of the launcher's rendezvous as signed JSON, so that waiting has no timeout, however long
preparation takes. Arguments that JSON does not have are broadcast by the process group, which starts with the models;
the call has their digest. Secrets of the config are not sent: each rank has read them itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import os
import pickle
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from thresher.builders.inputs import RunInputs
from thresher.builders.precompute import ProgressCallback
from thresher.builders.reference import frozen_weights_digest
from thresher.builders.reference_mode import reference_mode
from thresher.builders.run import logging_dir, stop_file
from thresher.config import DPOConfig, parse_config
from thresher.distributed.groups import PEER_TIMEOUT, is_lost_connection
from thresher.errors import PeerError, UserError, exit_code_of
from thresher.losses.objective import Objective
from thresher.observability.details import DETAIL
from thresher.observability.heartbeat import heartbeat
from thresher.observability.run_log import worker_log
from thresher.plan.budget import with_token_budget
from thresher.redact import MASK, redact, restore_secrets
from thresher.reference.modes import ReferenceMode
from thresher.runtime import RunHandle
from thresher.runtime.devices import CPU, claim_gpu, uses_cpu_instead
from thresher.runtime.group import CachedReference, GroupStarter, with_absolute_cache_dir
from thresher.runtime.launch import Launch
from thresher.runtime.launch_store import SignedMessages, is_loopback, open_store, read_token, sign_messages
from thresher.runtime.process_group import init_process_group
from thresher.runtime.rank import LoadedPolicy, PolicyRank
from thresher.runtime.stalls import StallWatch
from thresher.training.preemption import stop_on_signals

logger = logging.getLogger(__name__)

_ROLE, _EXIT, _FAILURE = "actor_train", "exit", "failure"
# what rank 0 may request of the other ranks
_CALLS = frozenset(
    {
        "open",
        "join",
        "smallest_gpu",
        "find_damage",
        "load_policy",
        "build",
        "score_missing_quietly",
        "begin",
        "run_quietly",
        "stopped_at",
        "evaluate_quietly",
        "save",
        "wait_for_saves",
    }
)
_MAX_POLL_INTERVAL = 0.25
# a rank that lost a connection waits this long for the error of the rank that closed it
_SECONDS_FOR_CAUSE = 5.0
_SECONDS_TO_EXIT = 10.0
_RANK_0_ENDED = "rank 0 has ended without saying why; see what it printed, then rerun the same command to resume"
Values = Mapping[str, Any]
T = TypeVar("T")

_session: LaunchSession | None = None
_num_sessions = 0


class LaunchedRank(PolicyRank):
    """A rank of the policy in a process that the launcher started."""

    def __init__(self, launch: Launch, store: Store):
        super().__init__(launch.rank, launch.size, CPU)
        self._launch, self._store = launch, store
        self.config: DPOConfig | None = None

    def open(self, values: Values) -> None:
        """Set the environment of a config, open the log of a follower, and find the device."""
        self.config = config = parse_config(dict(values))
        # torch warns about its own use of meshes; on Ray, the warning is in the output of the workers
        warnings.filterwarnings("ignore", "Slicing a flattened dim", UserWarning)
        environment = config.environment_of(_ROLE)
        os.environ.update(environment)
        log_dir = logging_dir(config).resolve()
        self._device = device_of_rank(self._launch, config)
        self._prepare_device(_ROLE, log_dir)
        if self._rank and (warning := self.open_log(log_dir, _ROLE, logging.INFO, sorted(environment))):
            logger.error("%s", warning)
        if not self._rank:
            for note in self._device_notes:
                logger.info("%s", note, extra=DETAIL)

    @property
    def opened(self) -> DPOConfig:
        """The config, which is known after `open`."""
        if self.config is None:
            raise RuntimeError("rank 0 has not sent a config")
        return self.config

    def join(self) -> int:
        """Join the process group; return the number of nodes."""
        store = PrefixStore("process group", self._store)
        address = _address_among_ranks(store, self._launch)
        self._world = init_process_group(self._rank, self._size, store, address, self._device)
        return len(set(self._world.all_gather_object(socket.gethostname())))

    def load_policy(self, inputs: RunInputs) -> LoadedPolicy:
        """Load the policy of the config that this rank has opened."""
        return self.load(self.opened, inputs)


class LaunchSession:
    """The processes of a launched run, connected by a store."""

    def __init__(self, launch: Launch, store: Store, messages: SignedMessages):
        self.launch = launch
        self.store = store
        self._messages = messages
        self._num_calls = 0
        self._others_are_busy = False
        self._watch = StallWatch()

    @contextlib.contextmanager
    def on_all(self, method: str, *arguments: object) -> Iterator[None]:
        """Request a call of all other ranks while the body runs on rank 0; then wait until they have finished it."""
        try:
            self._request(method, *arguments)
            yield
            self._wait_for_others()
        except Exception as error:
            cause = self._cause_of(error)
            if not isinstance(cause, PeerError):
                self._publish_failure(str(cause), exit_code_of(cause))
            if cause is error:
                raise
            raise cause from error

    def follow(self, own_values: Callable[[], Values]) -> None:
        """Execute the calls of rank 0 until it ends the run; exit with its exit code unless that is 0.

        own_values: reads the config that this process was given; its secrets are not sent.
        """
        try:
            self._follow(LaunchedRank(self.launch, self.store), own_values)
        except KeyboardInterrupt:  # rank 0 reports it
            raise SystemExit(exit_code_of(KeyboardInterrupt())) from None

    def _follow(self, rank: LaunchedRank, own_values: Callable[[], Values]) -> None:
        with contextlib.ExitStack() as stack:
            for number in itertools.count(1):
                method, arguments = self._receive(number)
                if method == _EXIT:
                    break
                try:
                    if method == "open":
                        arguments = (restore_secrets(arguments[0], own_values), *arguments[1:])
                    getattr(rank, method)(*arguments)
                    if method == "open":
                        self.watch(rank)
                except Exception as error:
                    raise SystemExit(self._report(error, rank)) from error
                if method == "begin" and rank.config is not None:  # as rank 0 does now
                    stack.enter_context(stop_on_signals(stop_file(rank.config), rank.config.graceful_stop_timeout))
                self.store.add(f"done/{number}", 1)
        (code,) = arguments
        if not code:
            _destroy_process_group()
        self.store.add(f"done/{number}", 1)
        if code:
            raise SystemExit(code)

    def close(self, error: BaseException | None) -> None:
        """End the other ranks with the exit code of the run; called by rank 0."""
        code = 0 if error is None else exit_code_of(error)
        with contextlib.suppress(dist.DistError):
            if code and self._failure_of_peer() is None:
                self._publish_failure(str(error), code)
            were_busy = self._others_are_busy
            self._request(_EXIT, code)
            if not code:
                _destroy_process_group()
            # ranks in a collective notice the end of this process; the others may need this process for the store
            if not were_busy:
                self._poll(self._others_have_finished, _SECONDS_TO_EXIT)

    def _request(self, method: str, *arguments: object) -> None:
        self._num_calls += 1
        self._others_are_busy = True
        name = f"call/{self._num_calls}"
        if _is_json(arguments):
            self._messages.send(name, [method, arguments, None])
        else:
            pickled = pickle.dumps(arguments)
            self._messages.send(name, [method, len(pickled), _digest(pickled)])
            _broadcast(bytearray(pickled))

    def _receive(self, number: int) -> tuple[str, tuple[Any, ...]]:
        try:
            method, arguments, digest = self._poll(lambda: self._messages.find(f"call/{number}"))
            if method != _EXIT and method not in _CALLS:
                raise UserError(f"rank 0 requests {method!r}, which is no call of a run")
            if digest is not None:
                pickled = _broadcast(bytearray(arguments))
                if _digest(pickled) != digest:  # not of rank 0: unpickling it would execute what it says
                    raise UserError(f"the arguments of {method} were changed on the way; check who is in this network")
                arguments = pickle.loads(pickled)  # noqa: S301  # of rank 0
        except RuntimeError as error:
            if not is_lost_connection(error):
                raise
            logger.error("%s", _RANK_0_ENDED)
            raise SystemExit(exit_code_of(UserError(_RANK_0_ENDED))) from None
        return method, arguments

    def _wait_for_others(self) -> None:
        self._poll(lambda: self._others_have_finished() or self._failure_of_peer())
        if not self._others_have_finished():
            raise self._failure_of_peer() or PeerError("a rank failed", 1)
        self._others_are_busy = False

    def _others_have_finished(self) -> bool:
        return int(self.store.add(f"done/{self._num_calls}", 0)) == self.launch.size - 1

    def _poll(self, find: Callable[[], Any], seconds: float = float("inf")) -> Any:
        """Poll less and less often, until there is something; signals are handled between two polls."""
        deadline, interval = time.monotonic() + seconds, 0.001
        while not (found := find()) and time.monotonic() < deadline:
            time.sleep(interval)
            interval = min(1.5 * interval, _MAX_POLL_INTERVAL)
        return found

    def _cause_of(self, error: Exception) -> Exception:
        """Return the first error of all ranks: this one, or PeerError if another rank reports its error."""
        if isinstance(error, PeerError):
            return error
        try:
            if is_lost_connection(error):
                failure: PeerError | None = self._poll(self._failure_of_peer, _SECONDS_FOR_CAUSE)
                if failure is not None:
                    return failure
                error = UserError(_lost_message(_first_sentence(error), self.launch.launcher))
            if self._is_first_to_fail():
                return error
            failure = self._poll(self._failure_of_peer, _SECONDS_FOR_CAUSE)
            return failure or PeerError("another rank failed", 1)
        except dist.DistError:  # the store has ended with the process that hosts it
            return UserError(_RANK_0_ENDED)

    def _publish_failure(self, message: str, code: int) -> None:
        with contextlib.suppress(dist.DistError):  # the store has ended
            self._messages.send(_FAILURE, [message, code])

    def _failure_of_peer(self) -> PeerError | None:
        found = self._messages.find(_FAILURE)
        return None if found is None else PeerError(*found)

    def _is_first_to_fail(self) -> bool:
        return int(self.store.add("claims", 1)) == 1

    def watch(self, rank: LaunchedRank) -> None:
        """End this process if it makes no progress in a step for `heartbeat_timeout`: another rank hangs."""
        if rank.config is not None:
            timeout = rank.config.heartbeat_timeout
            self._watch.start(timeout, lambda seconds: self._end_stuck(rank, seconds, timeout))

    def end_watch(self) -> None:
        self._watch.end()

    def _end_stuck(self, rank: LaunchedRank, seconds: float, timeout: float) -> None:
        """Called in a thread, while the main one waits for a rank that may be that of the store."""
        message = (
            f"no progress for {seconds:.0f} s in {heartbeat().activity}: another rank hangs, or the step needs longer "
            f"than heartbeat_timeout={timeout:g}; rerun the same command to resume, with a larger one if it does"
        )
        rank.log_stacks()
        is_first = _within(_SECONDS_FOR_CAUSE, self._is_first_to_fail)  # None: the process of the store is the one
        if is_first is not False:
            logger.error("%s", message)
        if is_first:
            _within(_SECONDS_FOR_CAUSE, lambda: self._publish_failure(message, exit_code_of(UserError(message))))
        logging.shutdown()
        os._exit(exit_code_of(UserError(message)))

    def _report(self, error: Exception, rank: LaunchedRank) -> int:
        """Show the error of this rank, unless another one was first; return the exit code."""
        cause = self._cause_of(error)
        code = exit_code_of(cause)
        if isinstance(cause, PeerError):
            return code
        message = str(cause)
        if isinstance(cause, UserError):
            logger.error("%s", message)
        else:
            name = f"rank {self.launch.rank} of {self.launch.size}"
            message = f"{name} failed: {cause!r}"
            if rank.config is not None:
                message += f"; see {worker_log(logging_dir(rank.config), _ROLE, self.launch.rank)}"
            logger.error("%s failed", name, exc_info=cause)
        self._publish_failure(message, code)
        return code


class LaunchedRanks:
    """All ranks of a launched run, called by rank 0, which is one of them."""

    def __init__(self, session: LaunchSession):
        self._session = session
        self._rank = LaunchedRank(session.launch, session.store)
        self._has_joined = False
        self.num_nodes = 1

    def __len__(self) -> int:
        return self._session.launch.size

    def open(self, values: Values) -> None:
        """Open the config on all ranks; the others add their own secrets to it."""
        with self._session.on_all("open", _without_secrets(values)):
            self._rank.open(values)
            self._session.watch(self._rank)

    def join(self) -> None:
        """Let all ranks join the process group, unless they have."""
        if not self._has_joined:
            (self.num_nodes,) = self.call("join")
            self._has_joined = True

    def call(self, method: str, *arguments: object) -> list[Any]:
        """Call a method of every rank; return the result of rank 0."""
        with self._session.on_all(method, *arguments):
            return [getattr(self._rank, method)(*arguments)]

    def stream(self, method: str, others_method: str, *arguments: object) -> Iterator[Any]:
        """Yield the items of a generator method of rank 0, while the other ranks run `others_method`."""
        with self._session.on_all(others_method, *arguments):
            yield from getattr(self._rank, method)(*arguments)


@dataclass(frozen=True)
class TorchrunRuntime:
    """Starts the trainers of a launched run; used by rank 0."""

    config: DPOConfig
    mode: ReferenceMode
    ranks: LaunchedRanks

    def find_damage(self, checkpoint: Path) -> list[str]:
        self.ranks.join()
        damage: list[str] = self.ranks.call("find_damage", checkpoint)[0]
        return damage

    def start(self, inputs: RunInputs, checkpoint: Path | None, progress: ProgressCallback) -> RunHandle:
        """Load the models on all ranks, and restore a checkpoint if there is one."""
        config, mode = self.config, self.mode
        weights = frozen_weights_digest(config, mode)
        self.ranks.join()
        inputs = with_token_budget(config, inputs, checkpoint, lambda: self.ranks.call("smallest_gpu")[0])
        (loaded,) = self.ranks.call("load_policy", inputs)
        cached = CachedReference.look_up(config, inputs, mode, weights)
        return GroupStarter(config, inputs, self.ranks, loaded, cached, progress).build(checkpoint, mode, weights)


@contextlib.contextmanager
def open_session(launch: Launch) -> Iterator[LaunchSession]:
    """Connect to the other processes of the launched run; the session of this process is reused if there is one.

    When rank 0 leaves the context, the other ranks end.
    """
    global _session, _num_sessions  # like a process group, a process has one
    if _session is not None:
        yield _session
        return
    store = open_store(launch)
    _num_sessions += 1
    prefix = f"thresher {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)} {_num_sessions}"
    store = PrefixStore(prefix, store)
    session = _session = LaunchSession(launch, store, sign_messages(store, launch, read_token()))
    try:
        yield session
    except BaseException as error:
        if launch.rank == 0:
            session.close(error)
        raise
    else:
        if launch.rank == 0:
            session.close(None)
    finally:
        session.end_watch()
        _session = None


@contextlib.contextmanager
def open_torchrun_runtime(config: DPOConfig, objective: Objective) -> Iterator[TorchrunRuntime]:
    """Find the devices of all ranks."""
    if _session is None:
        raise RuntimeError("runtime torchrun needs a session; run the config with DPOPipeline")
    launch, mode = _session.launch, reference_mode(config, objective)
    config = with_absolute_cache_dir(config, mode)
    logger.info("runtime torchrun: %s started %d processes", launch.launcher, launch.size)
    ranks = LaunchedRanks(_session)
    ranks.open(config.model_dump(mode="json", exclude_unset=True))
    yield TorchrunRuntime(config, mode, ranks)


def device_of_rank(launch: Launch, config: DPOConfig) -> torch.device:
    """Return the GPU of a rank: the mapped one, else the one with its local rank; the CPU if there is none."""
    count, mapping = torch.cuda.device_count(), config.actor_train.device_mapping
    if uses_cpu_instead() or (not count and not mapping):
        return CPU
    if mapping:  # ids count on from node to node
        index = mapping[launch.rank] % (config.num_gpus_per_node or max(1, count))
    else:
        index = launch.local_rank if count > 1 else 0  # Slurm can show each task its own GPU alone
    return claim_gpu(f"rank {launch.rank} of {launch.size}", index)


def _address_among_ranks(store: Store, launch: Launch) -> str:
    """Return the address of this node in the network of all ranks; empty if there is no way to it.

    The node of rank 0 often resolves its own name to a loopback address; it is then the one on the way to another node.
    """
    address = _local_address(*launch.master)
    names = [f"address/{rank}" for rank in range(launch.size)]
    store.set(names[launch.rank], address)
    if not is_loopback(address):
        return address
    store.wait(names, PEER_TIMEOUT)
    others = [text for value in store.multi_get(names) if (text := value.decode()) and not is_loopback(text)]
    return _local_address(others[0], launch.master[1]) if others else address


def _local_address(host: str, port: int) -> str:
    """Return the address of this machine in the network of another one; empty if there is no way to it."""
    with contextlib.suppress(OSError):
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    return ""


def _lost_message(reason: str, launcher: str) -> str:
    return (
        f"the connection to another rank was lost ({reason}); see the report of {launcher} on the process that ended, "
        "then rerun the same command to resume"
    )


def _first_sentence(error: Exception) -> str:
    """Return what a library says without its advice and the place in its source."""
    line = (str(error).splitlines() or [repr(error)])[0]
    return line.removeprefix(line.partition("] ")[0] + "] ").partition(". ")[0]


def _is_json(arguments: tuple[object, ...]) -> bool:
    return all(isinstance(each, (str, int, float, dict, type(None))) for each in arguments)


def _without_secrets(values: Values) -> dict[str, Any]:
    """Return a config as it is sent: variables of the environment are private, whatever their names."""
    shown = redact(values)
    for section in (shown, shown.get("actor_train", {}), shown.get("reference", {})):
        section |= {"system_envs": dict.fromkeys(section["system_envs"], MASK)} if "system_envs" in section else {}
    return shown


def _within(seconds: float, call: Callable[[], T]) -> T | None:
    """Return the result of a call of the store, None if the process that hosts it does not answer in time."""
    results: list[T] = []

    def run() -> None:
        with contextlib.suppress(dist.DistError):
            results.append(call())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None


def _digest(content: bytes | bytearray) -> str:
    return hashlib.sha256(content).hexdigest()


def _broadcast(content: bytearray) -> bytearray:
    """Fill the bytes with those of rank 0."""
    dist.broadcast(torch.frombuffer(content, dtype=torch.uint8), src=0)
    return content


def _destroy_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
