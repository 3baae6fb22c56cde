"""Verify the files of a checkpoint on all processes that will read them: each file is hashed by one of them."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from pathlib import Path

from thresher.checkpoint.manifest import read_manifest, record_files
from thresher.distributed.groups import Group
from thresher.distributed.run_on_all import divide_by_size, run_on_all
from thresher.errors import CheckpointError

_INDEX = re.compile(r"-(\d{5,})-of-\d{5,}\.safetensors$")


def find_damage(directory: Path, group: Group) -> list[str]:
    """Compare every file with its digest; return what is wrong, the same on all ranks.

    The files that one process wrote are hashed by one process: on the mesh that saved them, by the one that reads them.
    """

    def verify() -> list[str]:
        files = read_manifest(directory).files
        sets = _sets_of_files(sorted(files), group.size)
        ranks = divide_by_size([sum(files[name].size for name in names) for names in sets], group.size)
        own = [name for names, rank in zip(sets, ranks, strict=True) if rank == group.rank for name in names]
        try:
            records = record_files(directory, own)
        except OSError as error:  # the driver has seen all files
            raise CheckpointError(
                f"a worker on {socket.gethostname()} cannot read {error.filename or directory} "
                f"({error.strerror or error}); all workers must resume from one shared file system"
            ) from error
        return [f"{name} does not match its digest" for name in own if records[name] != files[name]]

    gathered = run_on_all(group, verify, "verify the checkpoint", passed_on=CheckpointError)
    return sorted(problem for problems in gathered for problem in problems)


def _sets_of_files(names: Sequence[str], num_ranks: int) -> list[list[str]]:
    """Group files so that those of one writer go to one rank, unless there are more ranks than writers."""
    by_writer: dict[int, list[str]] = {}
    others = []
    for name in names:
        if found := _INDEX.search(name):
            by_writer.setdefault(int(found[1]), []).append(name)
        else:
            others.append([name])
    of_writers = [by_writer[index] for index in sorted(by_writer)]
    if len(of_writers) < num_ranks:
        of_writers = [[name] for files in of_writers for name in files]
    return others + of_writers
