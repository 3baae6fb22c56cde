"""Contributor files: forms, hooks and the workflow parse, and versions and paths agree with the repository."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.version import Version

import thresher

ROOT = Path(__file__).resolve().parents[2]
FORMS = ["bug_report.yml", "feature_request.yml", "wrong_number.yml"]
REPOSITORY = "https://github.com/thresher-ai/thresher"
# elements that GitHub's issue forms know, and the keys without which one rejects an element
ATTRIBUTES = {
    "markdown": {"value"},
    "input": {"label"},
    "textarea": {"label"},
    "dropdown": {"label", "options"},
    "checkboxes": {"label", "options"},
}


def load(name: str) -> Any:
    # BaseLoader: YAML 1.1 would read the key `on` of a workflow as true
    return yaml.load((ROOT / name).read_text(encoding="utf-8"), Loader=yaml.BaseLoader)  # noqa: S506


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", FORMS)
def test_an_issue_form_has_what_github_requires(name: str) -> None:
    form = load(f".github/ISSUE_TEMPLATE/{name}")
    assert form.keys() >= {"name", "description", "labels", "body"}
    for element in form["body"]:
        assert element["attributes"].keys() >= ATTRIBUTES[element["type"]], element
    ids = [element["id"] for element in form["body"] if element["type"] != "markdown"]
    labels = [element["attributes"]["label"] for element in form["body"] if element["type"] != "markdown"]
    assert len(set(ids)) == len(ids)
    assert len(set(labels)) == len(labels)
    for element in form["body"]:
        options = element["attributes"].get("options", [])
        # an option with an unquoted colon would be a mapping
        texts = [option["label"] if element["type"] == "checkboxes" else option for option in options]
        assert all(isinstance(text, str) for text in texts)
        assert len(set(texts)) == len(texts)


def test_the_form_for_wrong_numbers_requires_all_that_is_needed_to_repeat_them() -> None:
    body = load(".github/ISSUE_TEMPLATE/wrong_number.yml")["body"]
    required = {element["id"] for element in body if element.get("validations", {}).get("required") == "true"}
    assert required >= {"config", "versions", "expected", "seen", "computed"}


def test_vulnerabilities_are_sent_to_a_private_form() -> None:
    links = load(".github/ISSUE_TEMPLATE/config.yml")["contact_links"]
    assert all(link.keys() == {"name", "url", "about"} for link in links)
    private = f"{REPOSITORY}/security/advisories/new"
    assert private in [link["url"] for link in links]
    assert private in read("SECURITY.md")


def test_hooks_run_tools_of_the_checkout_and_download_nothing() -> None:
    config = load(".pre-commit-config.yaml")
    hooks = [hook for repo in config["repos"] for hook in repo["hooks"]]
    assert [repo["repo"] for repo in config["repos"]] == ["local"]
    assert {hook["language"] for hook in hooks} == {"system"}
    assert {stage for hook in hooks for stage in hook["stages"]} == set(config["default_install_hook_types"])
    programs = {hook["entry"].split()[0] for hook in hooks}
    assert programs == {".venv/bin/ruff", "scripts/check"}
    assert os.access(ROOT / "scripts/check", os.X_OK)


@pytest.mark.parametrize("name", ["ci.yml", "publish.yml"])
def test_every_action_is_pinned_to_a_commit_and_keeps_no_credentials(name: str) -> None:
    steps = [step for job in load(f".github/workflows/{name}")["jobs"].values() for step in job["steps"]]
    used = [step for step in steps if "uses" in step]
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40}", step["uses"]) for step in used)
    checkouts = [step for step in used if step["uses"].startswith("actions/checkout@")]
    assert all(step["with"]["persist-credentials"] == "false" for step in checkouts)


def test_publishing_is_started_by_hand_and_a_dry_run_by_default() -> None:
    workflow = load(".github/workflows/publish.yml")
    assert workflow["on"].keys() == {"push", "workflow_dispatch"}
    assert workflow["on"]["push"] == {"tags": ["v*"]}
    assert workflow["on"]["workflow_dispatch"]["inputs"]["dry_run"]["default"] == "true"
    jobs = workflow["jobs"]
    assert workflow["permissions"] == {}
    assert {name: job["permissions"] for name, job in jobs.items()} == {
        "build": {"contents": "read"},
        "install": {"contents": "read"},
        "publish": {"attestations": "write", "contents": "write", "id-token": "write"},
    }
    assert jobs["publish"]["needs"] == ["build", "install"]
    assert jobs["publish"]["if"] == "github.event_name == 'workflow_dispatch' && !inputs.dry_run"
    assert jobs["publish"]["environment"] == "pypi"
    # trusted publishing: no step has a token of the index
    assert "secrets." not in read(".github/workflows/publish.yml")


def test_publishing_builds_and_checks_with_the_scripts_of_the_repository() -> None:
    jobs = load(".github/workflows/publish.yml")["jobs"]
    runs = {name: [step["run"] for step in job["steps"] if "run" in step] for name, job in jobs.items()}
    assert [run.split()[0] for run in runs["build"]] == ["pip", "scripts/build", "scripts/sbom"]
    assert runs["install"] == ["scripts/first-hour dist/*.whl"]
    assert jobs["install"]["strategy"]["matrix"] == {"python": ["3.11", "3.12", "3.13"]}
    for script in ("build", "sbom", "first-hour"):
        assert os.access(ROOT / "scripts" / script, os.X_OK)
    # the packages are built once: what was installed and checked is what is published
    (check, _) = runs["publish"]
    assert check == 'test "$GITHUB_REF_TYPE" = tag && test -f "dist/thresher-${GITHUB_REF_NAME#v}.tar.gz"'


def test_the_workflow_runs_the_script_of_ci_and_nothing_else() -> None:
    workflow = load(".github/workflows/ci.yml")
    assert workflow.keys() >= {"name", "on", "jobs"}
    assert workflow["permissions"] == {"contents": "read"}
    (job,) = workflow["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    assert os.access(ROOT / ".ci/run", os.X_OK)
    assert int(job["timeout-minutes"]) == 90
    (python,) = [step["with"]["python-version"] for step in job["steps"] if "setup-python" in step.get("uses", "")]
    assert python == "3.11"


def test_the_package_has_the_version_of_changelog_and_citation_or_develops_the_next() -> None:
    sections = re.findall(r"^## \[(.+?)\](?: - (\S+))?$", read("CHANGELOG.md"), flags=re.MULTILINE)
    assert sections[0] == ("Unreleased", "")
    version, date = sections[1]
    citation = load("CITATION.cff")
    assert citation["version"] == version
    assert citation["date-released"] == date
    package = Version(thresher.__version__)
    # between releases the package is `.dev0` of the next, so nobody takes a checkout for the release before it
    assert package.is_devrelease == (package != Version(version))
    assert package >= Version(version)


def test_every_version_of_the_changelog_has_a_link() -> None:
    text = read("CHANGELOG.md")
    versions = re.findall(r"^## \[(.+?)\]", text, flags=re.MULTILINE)
    assert versions == re.findall(rf"^\[(.+?)\]: {REPOSITORY}/", text, flags=re.MULTILINE)


def test_the_citation_agrees_with_the_package() -> None:
    citation = load("CITATION.cff")
    project = tomllib.loads(read("pyproject.toml"))["project"]
    assert citation.keys() >= {"cff-version", "message", "title", "authors"}
    assert citation["cff-version"] == "1.2.0"
    assert citation["license"] == project["license"]
    assert [author["name"] for author in citation["authors"]] == [author["name"] for author in project["authors"]]
    assert citation["repository-code"] == project["urls"]["Repository"] == REPOSITORY
    assert all(url.startswith(REPOSITORY) for url in project["urls"].values())


def test_owned_paths_exist_and_have_owners() -> None:
    lines = [line.split() for line in read(".github/CODEOWNERS").splitlines() if line and not line.startswith("#")]
    assert lines[0][0] == "*"
    for pattern, *owners in lines:
        assert owners
        assert all(re.fullmatch(r"@[\w-]+(/[\w-]+)?", owner) for owner in owners)
        if pattern != "*":
            assert pattern.startswith("/")
            path = ROOT / pattern[1:]
            assert path.is_dir() if pattern.endswith("/") else path.is_file(), pattern


@pytest.mark.parametrize("name", ["CHANGELOG.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "RELEASING.md"])
def test_files_that_are_linked_exist(name: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", read(name)):
        assert target.startswith("https://") or (ROOT / target).exists(), target
