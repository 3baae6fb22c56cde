"""Run the steps of docker/Dockerfile, and then a command as its user, in a directory tree with the base image's files.

For a machine without images; needs root. The directory has Debian and, in /usr/local, Python, as the base image does:
    python scripts/try_dockerfile.py DIRECTORY thresher demo
Build arguments and the settings of pip and git are read from the environment.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

DOCKERFILE = Path(__file__).resolve().parents[1] / "docker" / "Dockerfile"


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """Yield each instruction with its arguments, lines joined and comments left out."""
    lines = re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)).splitlines()
    yield from ((name, rest) for name, _, rest in (line.partition(" ") for line in lines if line))


def main() -> None:
    root, command = Path(sys.argv[1]), sys.argv[2:]
    environment = {"PATH": "/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}
    environment |= {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "GIT_", "SSL_"))}
    user, directory = "0", "/"
    for name, rest in [*instructions(DOCKERFILE.read_text(encoding="utf-8")), ("RUN", shlex.join(command))]:
        if name == "RUN":
            print(f"$ {rest}", flush=True)
            enter = ["chroot", f"--userspec={user}:{user}", root, "/bin/sh", "-c", f"cd {directory} && {rest}"]
            subprocess.run(enter, env=environment, check=True)
        elif name == "COPY":
            source, target = rest.split()
            shutil.copy(DOCKERFILE.parents[1] / source, root / target.lstrip("/"))
        elif name in ("ARG", "ENV"):
            given = dict(each.split("=", 1) for each in shlex.split(rest))
            environment = given | environment if name == "ARG" else environment | given
        elif name == "USER":
            user, environment["HOME"] = rest, "/home/trainer"
        elif name == "WORKDIR":
            directory = rest
        elif name not in ("FROM", "CMD"):
            raise SystemExit(f"{name} is not understood; add it to scripts/try_dockerfile.py")


if __name__ == "__main__":
    main()
