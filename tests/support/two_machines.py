"""Two machines on this one: network namespaces with a cable between them, each with its own host name and hosts file.

Needs Linux, util-linux and iproute2, and a kernel that lets this user make namespaces. Nothing outside of them changes.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

_NAMESPACES = ["unshare", "--user", "--map-root-user", "--net", "--mount", "--uts"]
# as Debian writes them: the name of a machine itself is a loopback address
_HOSTS = ("127.0.1.1 node0\n10.99.0.2 node1\n", "127.0.1.1 node1\n10.99.0.1 node0\n")
# $1: the directory of the hosts files; $2: seconds; the rest: the command
_NODE_1 = """
hostname node1
mount --bind "$1/hosts1" /etc/hosts
ip link set lo up
echo $$ > "$1/pid"
until ip address add 10.99.0.2/24 dev eth1 2> /dev/null; do sleep 0.05; done
ip link set eth1 up
shift
SLURM_PROCID=1 exec timeout --signal KILL "$@"
"""
_NODE_0 = """
hostname node0
mount --bind "$1/hosts0" /etc/hosts
ip link set lo up
unshare --net --mount --uts sh -c "$NODE_1" sh "$@" &
until [ -s "$1/pid" ]; do sleep 0.05; done
ip link add eth0 type veth peer name eth1 netns "$(cat "$1/pid")"
ip address add 10.99.0.1/24 dev eth0
ip link set eth0 up
shift
SLURM_PROCID=0 timeout --signal KILL "$@" && wait $!
"""


def can_make_machines() -> bool:
    if not all(map(shutil.which, ("unshare", "hostname", "ip"))):
        return False
    cable = ["ip", "link", "add", "eth0", "type", "veth"]
    return subprocess.run([*_NAMESPACES, *cable], capture_output=True, check=False).returncode == 0


def run_on_two_machines(
    directory: Path, *arguments: str, environment: Mapping[str, str], seconds: int
) -> subprocess.CompletedProcess[str]:
    """Run `python ARGUMENTS` on both, as two tasks of srun; the machine with rank 0 is called node0."""
    for number, names in enumerate(_HOSTS):
        (directory / f"hosts{number}").write_text(f"127.0.0.1 localhost\n{names}")
    step = {"SLURM_STEP_NODELIST": "node[0-1]", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "NODE_1": _NODE_1}
    return subprocess.run(
        [*_NAMESPACES, "sh", "-c", _NODE_0, "sh", str(directory), str(seconds), sys.executable, *arguments],
        env={**environment, **step},
        capture_output=True,
        text=True,
        check=False,
    )
