"""User-facing errors. Each message states the problem, the offending value and what to do.

The command line prints a `UserError` as one message and exits with code 2. The exceptions below that are
not `UserError`s are control flow or report an unexpected failure of a worker; any other exception is a bug.
"""

from __future__ import annotations

import difflib
import errno
import signal
from collections.abc import Iterable, Sequence

from thresher.redact import redact_text

# a full disk, an unreachable disk or file server, files that a peer removed while it shut down
_TRANSIENT_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOENT}

# lower, and one acronym suggests another: ipo for dpo (0.67), orpo for grpo (0.75)
_LEAST_SIMILARITY = 0.8


class UserError(Exception):
    """A mistake in the input, the configuration or the environment; the message says how to fix it.

    Secrets are masked on creation, because messages are printed, logged and sent between processes.
    """

    def __init__(self, message: str):
        super().__init__(redact_text(message))


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that was probably meant, whatever its case; None if all are too different."""
    words = {each.lower(): each for each in known}
    close = difflib.get_close_matches(word.lower(), words, n=1, cutoff=_LEAST_SIMILARITY)
    return words[close[0]] if close else None


def unusable_path(path: object, reason: str | None) -> UserError:
    """Return the error for a path that cannot be read or written."""
    return UserError(f"cannot use {path}: {reason}; check the path and its permissions")


class CheckpointError(UserError):
    """A checkpoint that is missing, corrupt or from another run."""


class WorkerLostError(UserError):
    """A worker died or hangs, not because of its input: the run can resume from its newest checkpoint.

    The first line says what happened. The lines below say what to do, and are shown only if the run ends.
    """


class DiskError(CheckpointError, WorkerLostError):
    """A write failed because the disk is full or failing. Files written earlier are intact."""

    @staticmethod
    def is_transient(error: OSError) -> bool:
        """Return whether a retry may help; missing permissions need the user."""
        return error.errno in _TRANSIENT_ERRNOS


class ResourceError(UserError):
    """The cluster lacks the requested resources: a user error at start-up, a missing node later."""


class PeerError(UserError):
    """Another rank of a launched run failed and has shown this error; the command line exits with its exit code."""

    def __init__(self, message: str, exit_code: int):
        super().__init__(message)
        self.exit_code = exit_code


class RescaleRequested(Exception):  # noqa: N818  # control flow, not an error
    """The run should restart with a different number of workers; its state is saved."""


class WorkerError(RuntimeError):
    """An unexpected exception in a worker; the message contains its traceback."""

    def __init__(self, message: str):
        super().__init__(redact_text(message))


def _saved(step: int | None) -> str:
    if step == 0:
        return "before the first step was complete (nothing to save)"
    return "before the last steps were saved" if step is None else f"after step {step} (checkpoint saved)"


class RunStopped(Exception):  # noqa: N818  # control flow, not an error
    """The run stopped on request; the command line exits with exit_code."""

    def __init__(self, step: int | None, exit_code: int = 0, message: str | None = None):
        super().__init__(message or f"stopped on request {_saved(step)}; rerun the same command to resume")
        self.step = step
        self.exit_code = exit_code


class HealthStopped(RunStopped):
    """A health rule ended the run, because of `health: stop`; `step` has the newest checkpoint."""

    EXIT_CODE = 3

    def __init__(self, step: int, rules: Sequence[str]):
        message = (
            f"stopped by health {_saved(step)}: {', '.join(rules)}; change a setting and add "
            "resume_from_checkpoint=auto to continue with it, or set health=warn to continue unchanged"
        )
        super().__init__(step, self.EXIT_CODE, message)


def exit_code_of(error: BaseException) -> int:
    """Return the exit code of a command that ends with this error."""
    match error:
        case RunStopped() | PeerError():
            return error.exit_code
        case UserError():
            return 2
        case KeyboardInterrupt():
            return 128 + signal.SIGINT
        case SystemExit(code=int(code)):
            return code
    return 1
