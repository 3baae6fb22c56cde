"""Runtime for a run whose processes torchrun or srun started: rank 0 leads, the other ranks follow.

Rank 0 runs the pipeline as the driver of a Ray run does: it prepares pairs, logs, tracks and decides. Each call of its
`LaunchedRanks` is executed by rank 0 itself, and by the other ranks, which wait for calls in `LaunchSession.follow`.
Calls travel through the store of the launcher's rendezvous as JSON, so that waiting has no timeout, however long
preparation takes. Arguments that JSON does not have are broadcast by the process group, which starts with the models.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import socket
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from thresher.builders.inputs import RunInputs
from thresher.builders.precompute import ProgressCallback
from thresher.builders.reference import frozen_weights_digest
from thresher.builders.reference_mode import reference_mode
from thresher.builders.run import logging_dir, stop_file
from thresher.config import DPOConfig, parse_config
from thresher.distributed.timeouts import PEER_TIMEOUT
from thresher.errors import PeerError, ResourceError, UserError, exit_code_of
from thresher.losses.objective import Objective
from thresher.observability.details import DETAIL
from thresher.observability.run_log import worker_log
from thresher.plan.budget import with_token_budget
from thresher.reference.modes import ReferenceMode
from thresher.runtime import RunHandle
from thresher.runtime.devices import CPU, claim_gpu, uses_cpu_instead
from thresher.runtime.group import CachedReference, GroupStarter, with_absolute_cache_dir
from thresher.runtime.launch import Launch
from thresher.runtime.process_group import init_process_group
from thresher.runtime.rank import PolicyRank
from thresher.training.preemption import stop_on_signals

logger = logging.getLogger(__name__)

_ROLE, _EXIT, _FAILURE = "actor_train", "exit", "failure"
_MAX_POLL_INTERVAL = 0.25
# a rank that lost a connection waits this long for the error of the rank that closed it
_SECONDS_FOR_CAUSE = 5.0
_SECONDS_TO_EXIT = 10.0

_session: LaunchSession | None = None
_num_sessions = 0


class LaunchedRank(PolicyRank):
    """A rank of the policy in a process that the launcher started."""

    def __init__(self, launch: Launch, store: Store):
        super().__init__(launch.rank, launch.size, CPU)
        self._launch, self._store = launch, store
        self.config: DPOConfig | None = None

    def open(self, values: dict[str, Any]) -> None:
        """Set the environment of a config, open the log of a follower, and find the device."""
        self.config = config = parse_config(values)
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

    def join(self) -> int:
        """Join the process group; return the number of nodes."""
        address = _local_address(*self._launch.master)
        store = PrefixStore("process group", self._store)
        self._world = init_process_group(self._rank, self._size, store, address, self._device)
        return len(set(self._world.all_gather_object(socket.gethostname())))


class LaunchSession:
    """The processes of a launched run, connected by a store."""

    def __init__(self, launch: Launch, store: Store):
        self.launch = launch
        self.store = store
        self._num_calls = 0
        self._others_are_busy = False

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

    def follow(self) -> None:
        """Execute the calls of rank 0 until it ends the run; exit with its exit code unless that is 0."""
        try:
            self._follow(LaunchedRank(self.launch, self.store))
        except KeyboardInterrupt:  # rank 0 reports it
            raise SystemExit(exit_code_of(KeyboardInterrupt())) from None

    def _follow(self, rank: LaunchedRank) -> None:
        with contextlib.ExitStack() as stack:
            for number in itertools.count(1):
                method, arguments = self._receive(number)
                if method == _EXIT:
                    break
                try:
                    getattr(rank, method)(*arguments)
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
            if code and not self.store.check([_FAILURE]):
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
        is_plain = _is_json(arguments)
        self.store.set(f"call/{self._num_calls}", json.dumps([method, arguments if is_plain else None]))
        if not is_plain:
            dist.broadcast_object_list([arguments])

    def _receive(self, number: int) -> tuple[str, tuple[Any, ...]]:
        try:
            self._poll(lambda: self.store.check([f"call/{number}"]))
            method, arguments = json.loads(self.store.get(f"call/{number}"))
            if arguments is None:
                received: list[Any] = [None]
                dist.broadcast_object_list(received)
                arguments = received[0]
        except RuntimeError as error:
            if not _is_lost_connection(error):
                raise
            logger.info("rank 0 has ended")
            raise SystemExit(1) from None
        return method, arguments

    def _wait_for_others(self) -> None:
        self._poll(lambda: self._others_have_finished() or self.store.check([_FAILURE]))
        if not self._others_have_finished():
            raise self._failure_of_peer()
        self._others_are_busy = False

    def _others_have_finished(self) -> bool:
        return int(self.store.add(f"done/{self._num_calls}", 0)) == self.launch.size - 1

    def _poll(self, is_done: Callable[[], bool], seconds: float = float("inf")) -> bool:
        """Poll less and less often; signals are handled between two polls. Return False after `seconds`."""
        deadline, interval = time.monotonic() + seconds, 0.001
        while not is_done():
            if time.monotonic() > deadline:
                return False
            time.sleep(interval)
            interval = min(1.5 * interval, _MAX_POLL_INTERVAL)
        return True

    def _cause_of(self, error: Exception) -> Exception:
        """Return the first error of all ranks: this one, or PeerError if another rank reports its error."""
        if isinstance(error, PeerError):
            return error
        try:
            if _is_lost_connection(error):
                if self._poll(lambda: self.store.check([_FAILURE]), _SECONDS_FOR_CAUSE):
                    return self._failure_of_peer()
                error = UserError(_lost_message(_first_sentence(error), self.launch.launcher))
            if int(self.store.add("claims", 1)) == 1:
                return error
            self._poll(lambda: self.store.check([_FAILURE]), _SECONDS_FOR_CAUSE)
            return self._failure_of_peer()
        except dist.DistError:  # the store has ended with the process that hosts it
            return PeerError("rank 0 has ended", 1)

    def _publish_failure(self, message: str, code: int) -> None:
        with contextlib.suppress(dist.DistError):  # the store has ended
            self.store.set(_FAILURE, json.dumps([message, code]))

    def _failure_of_peer(self) -> PeerError:
        message, code = json.loads(self.store.get(_FAILURE))
        return PeerError(message, code)

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
        (loaded,) = self.ranks.call("load", config, inputs)
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
    host, port = launch.master
    try:
        url = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
        store, _, _ = next(rendezvous(url, launch.rank, launch.size, timeout=PEER_TIMEOUT))
    except (dist.DistError, ValueError) as error:
        raise ResourceError(
            f"rank {launch.rank} of {launch.size} cannot connect to the other ranks at {host}:{port}: "
            f"{str(error).splitlines()[0]}; set MASTER_ADDR to the node of rank 0 and MASTER_PORT to a free port"
        ) from None
    _num_sessions += 1
    prefix = f"thresher {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)} {_num_sessions}"
    session = _session = LaunchSession(launch, PrefixStore(prefix, store))
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
    ranks.call("open", config.model_dump(mode="json", exclude_unset=True))
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


def _local_address(host: str, port: int) -> str:
    """Return the address of this machine in the network of another one; empty if there is no way to it."""
    with contextlib.suppress(OSError):
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    return ""


def _lost_message(reason: str, launcher: str) -> str:
    if "timed out" in reason.lower():
        return (
            f"another rank hangs: it did not enter a collective in time ({reason}); raise heartbeat_timeout if it only "
            "needs longer, or rerun the same command to resume"
        )
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


def _is_lost_connection(error: Exception) -> bool:
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def _destroy_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
