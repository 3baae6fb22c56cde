"""Errors that `thresher submit` reports before it connects; no server listens at the address of these tests."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from zipfile import ZipFile

import pytest
from ray._private.runtime_env.packaging import create_package

from tests.support.paths import ROOT
from thresher.cli.submit import resolve_paths
from thresher.config import parse_config
from thresher.errors import UserError
from thresher.runtime.ray import jobs

CONFIG = ROOT / "examples" / "polite_smollm2" / "dpo_config.yaml"
INVALID = {
    "an address without a scheme": (
        ["--address=10.0.0.1:8265"],
        "--address 10.0.0.1:8265 is not a URL; give the dashboard of the cluster, such as http://HEAD:8265",
    ),
    "a login in an address": (
        ["--address=ray://me:0pensesame@head:1"],
        "--address ray://***@head:1 is not a URL; give the dashboard of the cluster, such as http://HEAD:8265",
    ),
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


CONFIG_OF_QUICKSTART = {
    "pretrain": "model",
    "output_dir": "output/first",
    "actor_train": {"data_args": {"file_name": ["train.jsonl", "../more/*.jsonl", "s3://bucket/a.jsonl"]}},
    "validation": {"data_args": {"file_name": "/data/validation.jsonl", "template": "chat.jinja"}},
    "reference": {"model_args": {"model_name_or_path": "org/name"}},
}


def test_relative_paths_of_a_job_become_absolute(tmp_path, monkeypatch):
    """A path that may be a name on the hub is resolved only if it exists; a job runs in a different directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    values, resolved = resolve_paths(parse_config(CONFIG_OF_QUICKSTART), has_uploads=False)
    more = f"{tmp_path.parent}/more/*.jsonl"
    assert values == {
        "pretrain": f"{tmp_path}/model",
        "output_dir": f"{tmp_path}/output/first",
        "actor_train": {"data_args": {"file_name": [f"{tmp_path}/train.jsonl", more, "s3://bucket/a.jsonl"]}},
        "validation": {"data_args": {"file_name": ["/data/validation.jsonl"], "template": f"{tmp_path}/chat.jinja"}},
        "reference": {"model_args": {"model_name_or_path": "org/name"}},
    }
    assert resolved == [
        f"output_dir={tmp_path}/output/first",
        f"pretrain={tmp_path}/model",
        f"actor_train.data_args.file_name={tmp_path}/train.jsonl,{more},s3://bucket/a.jsonl",
        f"validation.data_args.template={tmp_path}/chat.jinja",
    ]
    assert parse_config(values).output_dir == values["output_dir"]


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ("margin.py:loss", "{here}/margin.py:loss"),
        ({"sigmoid": 1.0, "margin.py:loss": 0.5}, {"sigmoid": 1.0, "{here}/margin.py:loss": 0.5}),
        ("sigmoid", "sigmoid"),
        ({"kto": 1.0, "bco": 0.5}, {"kto": 1.0, "bco": 0.5}),
        ("absent.py:loss", "absent.py:loss"),
    ],
)
def test_files_of_functions_and_prompts_become_absolute(tmp_path, monkeypatch, given, sent):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kto").mkdir()
    (tmp_path / "margin.py").write_text("def loss(logps): ...\ndef score(prompt, answer): ...\n")
    samples = {"prompts_file": "prompts.txt", "judge": "margin.py:score"}
    values, _ = resolve_paths(parse_config({"pref_loss": given, "samples": samples}), has_uploads=False)
    assert values["samples"] == {"prompts_file": f"{tmp_path}/prompts.txt", "judge": f"{tmp_path}/margin.py:score"}
    expected = {name.format(here=tmp_path): weight for name, weight in sent.items()} if isinstance(sent, dict) else sent
    assert values["pref_loss"] == (expected.format(here=tmp_path) if isinstance(expected, str) else expected)


def test_inputs_stay_relative_to_an_uploaded_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = parse_config(CONFIG_OF_QUICKSTART | {"logging_dir": "logs"})
    values, resolved = resolve_paths(config, has_uploads=True)
    assert resolved == [f"output_dir={tmp_path}/output/first", f"logging_dir={tmp_path}/logs"]
    assert values["pretrain"] == "model"
    assert values["actor_train"] == CONFIG_OF_QUICKSTART["actor_train"]


def test_a_default_output_dir_is_resolved_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    values, _ = resolve_paths(parse_config({}), has_uploads=False)
    assert Path(values["output_dir"]).parent.is_relative_to(tmp_path)


def test_a_template_by_name_stays_a_name_and_files_are_found_in_dataset_dir(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "pairs.jsonl").touch()
    data = {"file_name": "pairs.jsonl", "dataset_dir": "data", "template": "chatml"}
    values, _ = resolve_paths(parse_config({"actor_train": {"data_args": data}}), has_uploads=False)
    assert values["actor_train"]["data_args"] == {
        "file_name": [str(tmp_path / "data" / "pairs.jsonl")],
        "dataset_dir": str(tmp_path / "data"),
        "template": "chatml",
    }


def test_files_with_secrets_are_not_uploaded(tmp_path, monkeypatch):
    for name in ("train.jsonl", ".env", "inside/.netrc", "inside/notes.txt", ".ssh/id_rsa"):
        (tmp_path / "work" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "work" / name).write_text("x")
    uploaded: list[str] = []

    def submit_job(*, runtime_env: dict, **_: object) -> str:
        """As Ray's client packs the directory."""
        package = tmp_path / "package.zip"
        create_package(runtime_env["working_dir"], package, True, excludes=runtime_env.get("excludes"))
        uploaded.extend(name for name in ZipFile(package).namelist() if not name.endswith("/"))
        return "job-1"

    client = jobs.JobClient.__new__(jobs.JobClient)
    client.url, client._client = "http://127.0.0.1:1", SimpleNamespace(submit_job=submit_job)
    assert client.submit({}, tmp_path / "work") == "job-1"
    assert sorted(uploaded) == ["inside/notes.txt", jobs.CONFIG_NAME, "train.jsonl"]


@pytest.mark.parametrize("num_failures", [2, 1000])
def test_a_cluster_whose_agents_start_is_asked_again(monkeypatch, num_failures):
    class Server:
        """Ray's client, just after `ray start`."""

        calls = 0

        def submit_job(self, **_: object) -> str:
            self.calls += 1
            if self.calls <= num_failures:
                raise RuntimeError("Request failed with status code 500: No available agent to submit job, please try")
            return "job-1"

    monkeypatch.setattr(jobs, "_SECONDS_BETWEEN_POLLS", 0.01)
    monkeypatch.setattr(jobs, "_SECONDS_FOR_AGENTS", 0.2)
    client = jobs.JobClient.__new__(jobs.JobClient)
    client.url, client._client = "http://127.0.0.1:1", Server()
    if num_failures == 2:
        assert client.submit({}, None) == "job-1"
    else:
        with pytest.raises(UserError, match=r"rejected the job: .*No available agent"):
            client.submit({}, None)
        assert client._client.calls > 3
