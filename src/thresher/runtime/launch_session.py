"""The processes of a launched run, connected by a store: rank 0 requests calls, and the other ranks follow.

Calls travel through the store of the launcher's rendezvous as signed JSON, so waiting has no timeout, however long
preparation takes. Arguments that JSON does not have are broadcast by the process group, which starts with the models;
the call has their digest. The first rank that fails claims the failure, and all others end with its exit code. A rank
that ends or is stopped without a word is found by its missing heartbeats: by rank 0 where it waits for the others
outside of collectives, and rank 0 itself by all others at any time.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import os
import pickle
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from thresher.distributed.groups import is_lost_connection
from thresher.errors import PeerError, UserError, exit_code_of
from thresher.observability.heartbeat import heartbeat
from thresher.observability.run_log import worker_log
from thresher.redact import restore_secrets
from thresher.runtime.launch import Launch
from thresher.runtime.launch_store import SignedMessages, open_store, read_token, sign_messages
from thresher.runtime.rank import PolicyRank
from thresher.runtime.stalls import poll_interval, watch_stalls
from thresher.training.preemption import stop_on_signals

logger = logging.getLogger(__name__)

_ROLE, _EXIT, _FAILURE, _HEARTBEAT = "actor_train", "exit", "failure", "heartbeat"
# what rank 0 may request of the other ranks
_CALLS_TO_START = {"receive", "join", "smallest_gpu", "find_damage", "load", "build", "score_missing", "begin"}
_QUESTIONS = {"device", "step", "last_evaluation", "count_cached"}
_CALLS_TO_TRAIN = {"run", "stopped_at", "evaluate_and_record", "save", "wait_for_saves"}
_MAX_POLL_INTERVAL = 0.25
# a rank that lost a connection waits this long for the error of the rank that closed it
_SECONDS_FOR_CAUSE = 5.0
_SECONDS_TO_EXIT = 10.0
_RANK_0_ENDED = "rank 0 has ended without saying why; see what it printed, then rerun the same command to resume"
Values = Mapping[str, Any]
T = TypeVar("T")

_session: LaunchSession | None = None
_num_sessions = 0


@dataclass
class LaunchSession:
    """The processes of a launched run, connected by a store."""

    launch: Launch
    store: Store
    messages: SignedMessages
    end_watch: Callable[[], None] = lambda: None
    _heartbeat_timeout: float = float("inf")  # until the ranks have a config
    _num_calls: int = 0
    _others_are_busy: bool = False

    @contextlib.contextmanager
    def on_all(self, method: str, *arguments: object) -> Iterator[None]:
        """Request a call of all other ranks while the body runs on rank 0; then wait until they have finished it."""
        timeout = self._heartbeat_timeout  # of the calls before: during `receive`, the others do not send yet
        try:
            self._request(method, *arguments)
            yield
            others = range(1, self.launch.size)
            silence = _SilenceDetector(lambda rank: int(self.store.add(f"{_HEARTBEAT}/{rank}", 0)), others, timeout)
            found = self._poll(lambda: self._others_have_finished() or self._failure_of_peer() or silence.find())
            if isinstance(found, Exception):
                raise found
            self._others_are_busy = False
        except Exception as error:
            cause = self._cause_of(error)
            if not isinstance(cause, PeerError):
                self._publish_failure(str(cause), exit_code_of(cause))
            if cause is error:
                raise
            raise cause from error

    def follow(self, rank: PolicyRank, own_values: Callable[[], Values]) -> None:
        """Execute the calls of rank 0 on this rank until it ends the run; exit with its exit code unless that is 0."""
        try:
            self._follow(rank, own_values)
        except KeyboardInterrupt:  # rank 0 reports it
            raise SystemExit(exit_code_of(KeyboardInterrupt())) from None

    def _follow(self, rank: PolicyRank, own_values: Callable[[], Values]) -> None:
        with contextlib.ExitStack() as stack:
            for number in itertools.count(1):
                method, arguments = self._receive(number)
                if method == _EXIT:
                    break
                try:
                    if method == "receive":  # secrets of the config are not sent: this process has read its own
                        arguments = (restore_secrets(arguments[0], own_values), *arguments[1:])
                    result = getattr(rank, method)(*arguments)
                    if isinstance(result, Iterator):
                        deque(result, maxlen=0)  # rank 0 yields the items
                    if method == "receive":
                        self.watch(rank)
                except Exception as error:
                    raise SystemExit(self._report(error, rank)) from error
                if method == "begin":  # as rank 0 does now
                    stack.enter_context(stop_on_signals(rank.config.stop_file, rank.config.graceful_stop_timeout))
                with _ends_with_rank_0():
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
        if all(isinstance(each, str | int | float | dict | None) for each in arguments):
            self.messages.send(name, [method, arguments, None])
        else:
            pickled = pickle.dumps(arguments)
            self.messages.send(name, [method, len(pickled), _digest(pickled)])
            _broadcast(bytearray(pickled))

    def _receive(self, number: int) -> tuple[str, tuple[Any, ...]]:
        with _ends_with_rank_0():
            method, arguments, digest = self._poll(lambda: self.messages.find(f"call/{number}"))
            if method not in {_EXIT} | _CALLS_TO_START | _QUESTIONS | _CALLS_TO_TRAIN:
                raise UserError(f"rank 0 requests {method!r}, which is not a call of a run")
            if digest is not None:
                pickled = _broadcast(bytearray(arguments))
                if _digest(pickled) != digest:  # not of rank 0: unpickling it would execute what it says
                    raise UserError(f"the arguments of {method} were changed on the way; check who is in this network")
                arguments = pickle.loads(pickled)  # noqa: S301  # of rank 0
        return method, arguments

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
                # what the library says, without its advice and the place in its source
                line = (str(error).splitlines() or [repr(error)])[0]
                reason = line.removeprefix(line.partition("] ")[0] + "] ").partition(". ")[0]
                error = UserError(
                    f"the connection to another rank was lost ({reason}); see the report of {self.launch.launcher} on "
                    "the process that ended, then rerun the same command to resume"
                )
            if self._is_first_to_fail():
                return error
            failure = self._poll(self._failure_of_peer, _SECONDS_FOR_CAUSE)
            return failure or error
        except dist.DistError:  # the store has ended with the process that hosts it
            return UserError(_RANK_0_ENDED)

    def _publish_failure(self, message: str, code: int) -> None:
        with contextlib.suppress(dist.DistError):  # the store has ended
            self.messages.send(_FAILURE, [message, code])

    def _failure_of_peer(self) -> PeerError | None:
        found = self.messages.find(_FAILURE)
        return None if found is None else PeerError(*found)

    def _is_first_to_fail(self) -> bool:
        return int(self.store.add("claims", 1)) == 1

    def watch(self, rank: PolicyRank) -> None:
        """End this process if it makes no progress in a step for `heartbeat_timeout`: another rank hangs."""
        if rank.is_open:
            timeout = rank.config.heartbeat_timeout
            self.end_watch()  # of an earlier run
            self._heartbeat_timeout = timeout
            end_stalls = watch_stalls(timeout, lambda seconds: self._end_stuck(rank, seconds, timeout))
            end_heartbeats = self.send_heartbeats(timeout, lambda message: self._end(rank, message))

            def end() -> None:
                end_stalls()
                end_heartbeats()

            self.end_watch = end

    def send_heartbeats(self, timeout: float, when_silent: Callable[[str], None]) -> Callable[[], None]:
        """Show the others that this process exists while its main thread waits or computes; return what ends it.

        when_silent: called with a message if rank 0, which the others follow, sends no heartbeats.
        """
        # its own client: the main thread's one is busy while it waits for a key
        store = self.store.clone()  # type: ignore[attr-defined]  # torch's stubs lack it
        ended, count_of_rank_0 = threading.Event(), 0

        def send() -> None:
            nonlocal count_of_rank_0
            with contextlib.suppress(dist.DistError):  # the store has ended
                while not ended.wait(poll_interval(timeout)):
                    store.add(f"{_HEARTBEAT}/{self.launch.rank}", 1)
                    count_of_rank_0 = int(store.add(f"{_HEARTBEAT}/0", 0))

        def listen() -> None:
            # stalls of a step are found first, which have a better message
            silence = _SilenceDetector(lambda _: count_of_rank_0, range(1), timeout, share=1.0)
            while not ended.wait(poll_interval(timeout)):
                if (error := silence.find()) is not None:
                    when_silent(str(error))
                    return

        # two threads: the store does not answer while the process that hosts it is stopped
        works = [send, listen] if self.launch.rank else [send]
        threads = [threading.Thread(target=work, name="heartbeats", daemon=True) for work in works]
        for thread in threads:
            thread.start()

        def end() -> None:
            ended.set()
            for thread in threads:
                thread.join(_SECONDS_FOR_CAUSE)

        return end

    def _end_stuck(self, rank: PolicyRank, seconds: float, timeout: float) -> None:
        message = (
            f"no progress for {seconds:.0f} s in {heartbeat().activity}: another rank hangs, or the step needs longer "
            f"than heartbeat_timeout={timeout:g}; rerun the same command to resume, with a larger one if it does"
        )
        self._end(rank, message)

    def _end(self, rank: PolicyRank, message: str) -> None:
        """Called in a thread, while the main one waits for a rank that may host the store."""
        rank.log_stacks()
        is_first = _within(_SECONDS_FOR_CAUSE, self._is_first_to_fail)  # None: the process of the store is the one
        if is_first is not False:
            logger.error("%s", message)
        if is_first:
            _within(_SECONDS_FOR_CAUSE, lambda: self._publish_failure(message, exit_code_of(UserError(message))))
        logging.shutdown()
        os._exit(exit_code_of(UserError(message)))

    def _report(self, error: Exception, rank: PolicyRank) -> int:
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
            if rank.is_open:
                message += f"; see {worker_log(rank.config.log_dir, _ROLE, self.launch.rank)}"
            logger.error("%s failed", name, exc_info=cause)
        self._publish_failure(message, code)
        return code


@contextlib.contextmanager
def _ends_with_rank_0() -> Iterator[None]:
    """Report a lost connection as the end of rank 0, which hosts the store."""
    try:
        yield
    except RuntimeError as error:
        if not is_lost_connection(error):
            raise
        logger.error("%s", _RANK_0_ENDED)
        raise SystemExit(exit_code_of(UserError(_RANK_0_ENDED))) from None


class _SilenceDetector:
    """Finds a rank whose heartbeats have stopped. Polls count, not the clock, for the reason of StallDetector."""

    def __init__(self, count: Callable[[int], int], ranks: range, timeout: float, share: float = 0.75):
        """count: heartbeats of a rank. share: of the polls of one timeout, after which a rank without any is lost."""
        self._count, self._ranks = count, ranks
        self._interval = poll_interval(timeout)
        self._max_polls = share * timeout / self._interval
        self._counts: dict[int, int] = {}
        self._num_polls: Counter[int] = Counter()
        self._next_poll = time.monotonic() + self._interval  # most calls have finished by then

    def find(self) -> UserError | None:
        """Return an error if a rank has sent no heartbeat for too long; to be called often."""
        if time.monotonic() < self._next_poll:
            return None
        self._next_poll = time.monotonic() + self._interval
        for rank in self._ranks:
            count = self._count(rank)
            self._num_polls[rank] = self._num_polls[rank] + 1 if self._counts.get(rank) == count else 0
            self._counts[rank] = count
            if self._num_polls[rank] >= self._max_polls:
                return UserError(
                    f"rank {rank} has sent no heartbeat for {self._num_polls[rank] * self._interval:.0f} s: it has "
                    "ended, is stopped, or is in a call that blocks all its threads; see what it printed, then rerun "
                    "the same command to resume"
                )
        return None


@contextlib.contextmanager
def open_session(launch: Launch) -> Iterator[LaunchSession]:
    """Connect to the other processes of the launched run. When rank 0 leaves the context, the other ranks end."""
    global _session, _num_sessions  # like a process group, a process has one
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


def current_session() -> LaunchSession:
    if _session is None:
        raise RuntimeError("runtime torchrun needs a session; run the config with DPOPipeline")
    return _session


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
    """Fill the bytes with rank 0's."""
    dist.broadcast(torch.frombuffer(content, dtype=torch.uint8), src=0)
    return content


def _destroy_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
