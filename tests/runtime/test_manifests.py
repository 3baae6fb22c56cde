"""The cluster files in examples/, checked with the installed packages."""

from __future__ import annotations

import re
import subprocess
from typing import Any

import pytest
import yaml

from tests.support.paths import ROOT

EXAMPLES = ROOT / "examples"


# the fields that the file uses, from KubeRay's API reference (docs.ray.io, KubeRay 1.7.1; unchanged since 1.5.1)
KUBERAY_FIELDS: dict[str, dict[str, type]] = {
    "RayJobSpec": {
        "entrypoint": str,
        "shutdownAfterJobFinishes": bool,
        "ttlSecondsAfterFinished": int,
        "backoffLimit": int,
        "rayClusterSpec": dict,
    },
    "RayClusterSpec": {"rayVersion": str, "authOptions": dict, "headGroupSpec": dict, "workerGroupSpecs": list},
    "AuthOptions": {"mode": str},
    "HeadGroupSpec": {"rayStartParams": dict, "template": dict},
    "WorkerGroupSpec": {
        "groupName": str,
        "replicas": int,
        "minReplicas": int,
        "maxReplicas": int,
        "rayStartParams": dict,
        "template": dict,
    },
}


@pytest.fixture
def ray_job() -> dict[str, Any]:
    return yaml.safe_load((EXAMPLES / "kuberay" / "rayjob.yaml").read_text())


def test_ray_up_accepts_the_cluster_file():
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = yaml.safe_load((EXAMPLES / "ray_cluster" / "cluster.yaml").read_text())
    prepared = prepare_config(config)
    validate_config(prepared)  # ray-schema.json, and further checks
    assert [kind["min_workers"] for kind in prepared["available_node_types"].values()] == [2]
    with pytest.raises(Exception, match="Additional properties are not allowed"):
        validate_config(prepared | {"head_start_command": []})


def test_every_command_that_starts_ray_requires_a_token():
    config = yaml.safe_load((EXAMPLES / "ray_cluster" / "cluster.yaml").read_text())
    starts = [*config["head_start_ray_commands"], *config["worker_start_ray_commands"]]
    for command in (each for each in starts if "ray start" in each):
        assert "RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=" in command


def test_rays_autoscaler_accepts_the_cluster_of_the_ray_job(ray_job):
    from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr

    # KubeRay creates a RayCluster from the job's rayClusterSpec; Ray converts it to a config for ray-schema.json
    derived = _derive_autoscaling_config_from_ray_cr({"metadata": ray_job["metadata"], "spec": cluster_spec(ray_job)})
    kinds = derived["available_node_types"]
    assert kinds["headgroup"]["resources"] == {"CPU": 4, "GPU": 0, "memory": 16 * 2**30}
    assert kinds["gpu"]["resources"] == {"CPU": 32, "GPU": 8, "memory": 256 * 2**30}
    assert (kinds["gpu"]["min_workers"], kinds["gpu"]["max_workers"]) == (2, 2)


def test_the_ray_job_has_the_fields_of_kuberays_api_reference(ray_job):
    cluster = cluster_spec(ray_job)
    sections = [
        ("RayJobSpec", ray_job["spec"]),
        ("RayClusterSpec", cluster),
        ("AuthOptions", cluster["authOptions"]),
        ("HeadGroupSpec", cluster["headGroupSpec"]),
        *(("WorkerGroupSpec", group) for group in cluster["workerGroupSpecs"]),
    ]
    assert (ray_job["apiVersion"], ray_job["kind"]) == ("ray.io/v1", "RayJob")
    for name, section in sections:
        assert {key: type(value) for key, value in section.items()} == KUBERAY_FIELDS[name], name
    for _, section in sections[3:]:  # arguments of `ray start`, which must be strings
        assert all(isinstance(value, str) for value in section["rayStartParams"].values())
    assert re.fullmatch("[a-z]([-a-z0-9]{0,45}[a-z0-9])?", ray_job["metadata"]["name"])  # KubeRay's limit is 47


def test_the_ray_job_requires_a_token_and_the_pinned_ray_version(ray_job):
    constraints = (EXAMPLES.parent / "constraints.txt").read_text()
    assert cluster_spec(ray_job)["authOptions"] == {"mode": "token"}
    assert cluster_spec(ray_job)["rayVersion"] == re.search(r"^ray(?:\[.*\])?==(\S+)", constraints, re.MULTILINE)[1]


def test_every_volume_that_a_pod_of_the_ray_job_mounts_exists(ray_job):
    spec = cluster_spec(ray_job)
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        mounted = {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}


def cluster_spec(ray_job: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = ray_job["spec"]["rayClusterSpec"]
    return spec


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*/*.s*h")) + sorted(EXAMPLES.glob("*/*.sbatch")), ids=str)
def test_shell_scripts_parse(script):
    done = subprocess.run(["/bin/bash", "-n", str(script)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
