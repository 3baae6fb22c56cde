"""Errors that `thresher submit` reports before it connects; no server listens at the address of these tests."""

from __future__ import annotations

import pytest

from tests.support.paths import ROOT

CONFIG = ROOT / "examples" / "polite_smollm2" / "dpo_config.yaml"
TEMPORARY = "but a job runs in a temporary directory; give an absolute path that all nodes share"
INVALID = {
    "an address without a scheme": (
        ["--address=10.0.0.1:8265"],
        "--address 10.0.0.1:8265 is not a URL; give the dashboard of the cluster, such as http://HEAD:8265",
    ),
    "a login in an address": (
        ["--address=ray://me:0pensesame@head:1"],
        "--address ray://***@head:1 is not a URL; give the dashboard of the cluster, such as http://HEAD:8265",
    ),
    "a relative output_dir": (["output_dir=here"], f"output_dir is here, {TEMPORARY}"),
    "a relative logging_dir": (["output_dir=/out", "logging_dir=logs"], f"logging_dir is logs, {TEMPORARY}"),
    "a relative cache of all kinds": (["output_dir=/o", "cache_dir=c"], f"cache_dir is c, {TEMPORARY}"),
    "a relative cache": (["output_dir=/o", "reference.cache_dir=c"], f"reference.cache_dir is c, {TEMPORARY}"),
    "a missing working directory": (
        ["--working-dir=nowhere"],
        "--working-dir nowhere is not a directory; give the directory whose files the job needs",
    ),
    "one process": (
        ["runtime=local"],
        "runtime: local is a single process, but a job runs on the workers of the cluster; use runtime: ray",
    ),
    "an unknown key": (["bta=1"], "invalid configuration:\n  - bta: unknown key; did you mean `beta`?"),
}


@pytest.mark.parametrize(("arguments", "message"), INVALID.values(), ids=INVALID)
def test_an_invalid_job_is_rejected_before_anything_is_sent(command_line, arguments, message):
    result = command_line("submit", CONFIG, "--address=http://127.0.0.1:1", *arguments)
    assert (result.code, result.err.strip()) == (2, f"error: {message}")
