"""The errors a person can mend: what was wrong, what we got, what to try.

The command line prints a `UserError` as one message and exits with code 2; every other exception is a defect of ours.
"""

import errno

from thresher.redact import redact_text

# a full disk, a disk or file server that is away, files that a peer took away while it ended
_TRANSIENT_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOENT}


class UserError(Exception):
    """A mistake in the input, the configuration or the environment, with its mend in the text.

    Secrets are masked where it is made: a message is printed, logged, and sent from process to process.
    """

    def __init__(self, message: str):
        super().__init__(redact_text(message))


class CheckpointError(UserError):
    """A checkpoint that is missing, torn or made for another run."""


class WorkerLostError(UserError):
    """A part of the run died or hangs, through no fault of its input: it can go on from its newest checkpoint.

    The first line is what happened; what a person can do stands below it, and is told where the run does not go on.
    """


class DiskError(CheckpointError, WorkerLostError):
    """Something could not be written: the disk is full, or fails. What was written before is whole."""

    @staticmethod
    def is_transient(error: OSError) -> bool:
        """Say if trying again may help; a place that may not be written needs a person."""
        return error.errno in _TRANSIENT_ERRNOS


class ResourceError(UserError):
    """The cluster has no room for what the config asks for: a mistake at first, and a node that is away later on."""


class RescaleRequested(Exception):  # noqa: N818  # control flow, no error
    """The run can go on better with other workers than it has, and everything is saved for that."""


class WorkerError(RuntimeError):
    """Something unforeseen in a worker, a defect of ours or a peer that went away; the text holds its traceback."""

    def __init__(self, message: str):
        super().__init__(redact_text(message))


class RunStopped(Exception):  # noqa: N818  # control flow, no error
    """The run was asked to stop, and did; the command line leaves with exit_code."""

    def __init__(self, step: int | None, exit_code: int = 0):
        saved = f"after step {step}, which is saved" if step is not None else "before the last steps could be saved"
        super().__init__(f"stopped as asked {saved}; the same command goes on from the newest checkpoint")
        self.exit_code = exit_code
