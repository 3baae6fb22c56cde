"""The cluster files in examples/, checked with the installed packages."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.support.paths import ROOT
from thresher.runtime.launch_store import TOKEN_VARIABLE

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


@pytest.mark.hand
def test_the_ray_job_follows_kuberays_crd(ray_job):
    """KUBERAY_CRD names ray-operator/config/crd/bases/ray.io_rayjobs.yaml of a KubeRay checkout."""
    if "KUBERAY_CRD" not in os.environ:
        pytest.skip("set KUBERAY_CRD to KubeRay's ray.io_rayjobs.yaml")
    (version,) = (
        each
        for each in yaml.safe_load(Path(os.environ["KUBERAY_CRD"]).read_text())["spec"]["versions"]
        if ray_job["apiVersion"] == f"ray.io/{each['name']}"
    )
    schema = version["schema"]["openAPIV3Schema"]
    forbid_unknown_fields(schema)
    schema["properties"]["metadata"] = {"type": "object"}  # the API server checks it, not the CRD
    jsonschema.validate(ray_job, schema)
    with pytest.raises(jsonschema.ValidationError, match="'cluster' was unexpected"):
        jsonschema.validate(ray_job | {"spec": ray_job["spec"] | {"cluster": {}}}, schema)


def forbid_unknown_fields(schema: Any) -> None:
    """Reject what Kubernetes would silently drop."""
    if isinstance(schema, dict):
        if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
            schema.setdefault("additionalProperties", False)
        if schema.get("x-kubernetes-int-or-string"):
            schema.pop("type", None)
        schema = list(schema.values())
    if isinstance(schema, list):
        for each in schema:
            forbid_unknown_fields(each)


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


def test_the_script_of_the_skypilot_task_starts_a_rank_per_gpu(tmp_path):
    """The run script with SkyPilot's variables, and `torchrun` replaced by a program that prints its arguments."""
    task = yaml.safe_load((EXAMPLES / "skypilot" / "train.yaml").read_text())
    (tmp_path / "torchrun").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "torchrun").chmod(0o755)
    variables = {
        "SKYPILOT_NODE_IPS": "192.0.2.1\n192.0.2.2",
        "SKYPILOT_NUM_NODES": str(task["num_nodes"]),
        "SKYPILOT_NUM_GPUS_PER_NODE": task["resources"]["accelerators"].partition(":")[2],
        "SKYPILOT_TASK_ID": "t1",
    }
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"} | variables | task["envs"]
    command = ["/bin/bash", "-euc", task["run"]]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [
        *("--nnodes", "2", "--nproc-per-node", "8", "--rdzv-backend", "c10d", "--rdzv-id", "t1"),
        *("--rdzv-endpoint", "192.0.2.1:29400", "-m", "thresher", "train", "dpo.yaml"),
    ]
    assert task["secrets"] == {TOKEN_VARIABLE: None}  # asked for at launch, so that no token is in the file


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*/*.s*h")) + sorted(EXAMPLES.glob("*/*.sbatch")), ids=str)
def test_shell_scripts_parse(script):
    done = subprocess.run(["/bin/bash", "-n", str(script)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
