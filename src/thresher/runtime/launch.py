"""The launcher of a run, torchrun or srun, as the environment of its processes shows it. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from thresher.config import DPOConfig, parse_config
from thresher.errors import UserError

_TORCHRUN, _SRUN = "torchrun", "srun"
# set in the steps that srun starts, not in a batch script
_STEP_VARIABLES = ("SLURM_STEP_NODELIST", "SLURM_LAUNCH_NODE_IPADDR")
_FIRST_PORT, _NUM_PORTS = 15_000, 15_000  # below the range of ports that systems give out


@dataclass(frozen=True)
class Launch:
    """One process of a launched run."""

    launcher: str
    rank: int
    size: int
    local_rank: int
    master: tuple[str, int]  # host and port of the rendezvous of all processes
    num_restarts: int = 0  # of all processes, by torchrun itself


def find_launch(environ: Mapping[str, str]) -> Launch | None:
    """Return what started this process, None if it was neither torchrun nor srun with several tasks."""
    launcher = _TORCHRUN
    if "TORCHELASTIC_RUN_ID" not in environ and not ("RANK" in environ and _integer(environ, "WORLD_SIZE", 1) > 1):
        in_step = "SLURM_PROCID" in environ and any(environ.get(name) for name in _STEP_VARIABLES)
        if not in_step or _num_tasks(environ) <= 1:
            return None
        environ, launcher = {**environ, **translate_slurm(environ)}, _SRUN
    return Launch(
        launcher,
        rank=_integer(environ, "RANK"),
        size=_integer(environ, "WORLD_SIZE"),
        local_rank=_integer(environ, "LOCAL_RANK", 0),
        master=(environ.get("MASTER_ADDR", "127.0.0.1"), _integer(environ, "MASTER_PORT")),
        num_restarts=_integer(environ, "TORCHELASTIC_RESTART_COUNT", 0),
    )


def translate_slurm(environ: Mapping[str, str]) -> dict[str, str]:
    """Return torch's variables for a task of srun; MASTER_ADDR and MASTER_PORT are kept if they are set."""
    nodes, job = environ.get("SLURM_STEP_NODELIST", ""), _integer(environ, "SLURM_JOB_ID", 0)
    port = _FIRST_PORT + (31 * job + _integer(environ, "SLURM_STEP_ID", 0)) % _NUM_PORTS
    return {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": str(_num_tasks(environ)),
        "LOCAL_RANK": environ.get("SLURM_LOCALID", "0"),
        # rank 0 runs on the first node of the step
        "MASTER_ADDR": environ.get("MASTER_ADDR") or first_node(nodes) or environ["SLURM_LAUNCH_NODE_IPADDR"],
        "MASTER_PORT": environ.get("MASTER_PORT") or str(port),
    }


def first_node(nodes: str) -> str:
    """Return the first node of a list of Slurm, such as gpu[03-05,9],cpu1."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0] if first else "")


def fit_to_launch(config: DPOConfig, launch: Launch | None) -> DPOConfig:
    """Return the config with the launcher's runtime and number of workers; reject one that asks for others."""
    if launch is None:
        if config.runtime == "torchrun":
            raise UserError(
                "runtime is torchrun, but neither torchrun nor srun started this process; use `torchrun "
                "--nproc-per-node N -m thresher train CONFIG`, or runtime: auto"
            )
        return config
    started = f"{launch.launcher} started {launch.size} process{'es' if launch.size > 1 else ''}"
    if config.runtime in ("local", "ray"):
        raise UserError(
            f"runtime is {config.runtime}, but {started}; start thresher without {launch.launcher} (without RANK and "
            "WORLD_SIZE in the environment), or set runtime: torchrun"
        )
    role = config.actor_train
    is_given = bool(role.device_mapping) or role.num_workers is not None
    if is_given and role.num_processes != launch.size:
        key = "device_mapping has" if role.device_mapping else "num_workers is"
        raise UserError(
            f"{started}, but actor_train.{key} {role.num_processes}; start {role.num_processes}, or change or remove "
            f"actor_train.{key.split()[0]}"
        )
    if config.runtime == "torchrun" and is_given:
        return config
    values = config.model_dump(exclude_unset=True)
    workers = {} if is_given else {"num_workers": launch.size}
    return parse_config(values | {"runtime": "torchrun", "actor_train": values.get("actor_train", {}) | workers})


def _num_tasks(environ: Mapping[str, str]) -> int:
    # SLURM_NTASKS may be the job's
    return _integer(environ, "SLURM_STEP_NUM_TASKS", _integer(environ, "SLURM_NTASKS", 1))


def _integer(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name, "" if default is None else str(default))
    if not text.isdigit():
        raise UserError(
            f"the environment variable {name} is {text!r}, not a number; start the run with torchrun or srun"
        )
    return int(text)
