"""Metrics of a run on Ray as its agent exports them, and the Grafana dashboard that shows them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import ProxyHandler, build_opener

import jsonschema
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.support.compared_runs import merge
from tests.support.paths import ROOT
from tests.support.ports import free_ports
from thresher.config import parse_config
from thresher.observability.log_files import METRICS
from thresher.observability.trackers.jsonl import read_records
from thresher.pipeline import DPOPipeline

pytestmark = pytest.mark.distributed

DASHBOARD = json.loads((ROOT / "examples" / "grafana" / "dashboard.json").read_text())
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
_SECONDS = 60  # Ray exports every 10


Samples = dict[str, list[tuple[dict[str, str], float]]]


class AtTheEnd:
    """A callback that looks at the metrics after the last evaluation, while the workers still run."""

    def __init__(self, look: Callable[[], bool]):
        self._look = look

    def on_evaluate(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        deadline = time.monotonic() + _SECONDS
        while state.global_step == state.max_steps and not self._look() and time.monotonic() < deadline:
            time.sleep(0.5)


def read(url: str) -> bytes:
    with build_opener(ProxyHandler({})).open(url, timeout=10) as answer:
        return answer.read()


def scraped(nodes: list[dict[str, Any]]) -> Samples:
    """Return the samples of thresher that the agents of Ray nodes export, by name."""
    found: Samples = {}
    for node in nodes:
        text = read(f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics").decode()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name.startswith("ray_thresher_"):
                    found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def run_on_two(base: dict[str, Any], output: Path, look: Callable[[], bool]) -> None:
    changes = {"runtime": "ray", "exp_name": "two", "output_dir": str(output), "actor_train": {"num_workers": 2}}
    changes["profile"] = {"steps": [2]}
    changes["reference"] = {"mode": "precompute", "cache_dir": str(output / "cache")}
    DPOPipeline(parse_config(merge(base, changes)), callbacks=[AtTheEnd(look)]).run()


def test_the_agent_exports_what_the_dashboard_shows_and_each_rank_writes_its_profile(base, ray_here, tmp_path):
    import ray

    shown = {name for query in QUERIES for name in re.findall(r"ray_thresher_\w+", query)}
    found: Samples = {}

    def look() -> bool:
        found.clear()
        found.update(
            {
                name: [each for each in samples if each[0]["run"] == "two"]
                for name, samples in scraped(ray.nodes()).items()
            }
        )
        steps = [value for _, value in found.get("ray_thresher_step", [])]
        return steps == [4] and {labels["rank"] for labels, _ in found.get("ray_thresher_checkpoint_seconds", [])} == {
            "0",
            "1",
        }

    run_on_two(base, tmp_path / "run", look)
    assert shown <= found.keys()
    last: dict[str, float] = {}
    for record in read_records(tmp_path / "run" / "logs" / METRICS):
        last |= record
    assert {path.name for path in (tmp_path / "run" / "logs" / "profile").iterdir()} == {
        f"rank-{rank}-step-2.trace.json.gz" for rank in (0, 1)
    }
    of_split = {labels["split"]: value for labels, value in found["ray_thresher_loss"]}
    assert of_split == {"train": pytest.approx(last["loss"]), "eval": pytest.approx(last["eval/loss"])}
    assert [value for _, value in found["ray_thresher_learning_rate"]] == [pytest.approx(last["lr"])]
    of_rank = {
        labels["rank"]: value
        for labels, value in found["ray_thresher_peak_memory_bytes"]
        if labels["role"] == "actor_train"
    }
    assert of_rank.keys() == {"0", "1"}
    assert all(value > 1e8 for value in of_rank.values())  # torch alone needs more


def test_a_second_attempt_continues_at_its_checkpoint_and_counts_recoveries(ray_here, tmp_path):
    import ray

    from thresher.observability.trackers.ray_metrics import RayMetricsTracker
    from thresher.observability.trackers.tracker import RunInfo

    tracker = RayMetricsTracker()
    tracker.start(RunInfo("recovered", tmp_path, {}, total_steps=9, total_pairs=9), resume_step=3)
    (tmp_path / "recoveries.jsonl").write_text("{}\n{}\n")
    tracker.log(4, {"loss": 0.5, "loss/of a subset": 0.1, "eval/set/loss": 0.2, "eval/loss": 0.3})
    deadline, found = time.monotonic() + _SECONDS, {}
    while "ray_thresher_recoveries" not in found and time.monotonic() < deadline:
        time.sleep(0.5)
        found = {
            name: own
            for name, samples in scraped(ray.nodes()).items()
            if (own := {(labels.get("split"), value) for labels, value in samples if labels["run"] == "recovered"})
        }
    tracker.close("finished")
    assert found == {
        "ray_thresher_step": {(None, 4)},
        "ray_thresher_total_steps": {(None, 9)},
        "ray_thresher_recoveries": {(None, 2)},
        "ray_thresher_loss": {("train", 0.5), ("eval", 0.3)},
    }


@pytest.mark.hand
def test_the_dashboard_has_grafanas_schema():
    folder = Path(os.environ["GRAFANA_SCHEMAS"])
    schemas = {path.name.partition(".")[0]: json.loads(path.read_text()) for path in folder.glob("*.jsonschema.json")}

    def check(value: object, name: str, definition: str) -> None:
        schema = schemas[name] | {"$ref": f"#/definitions/{definition}"}
        jsonschema.Draft7Validator(schema).validate(value)

    check(DASHBOARD, "dashboard", "Dashboard")
    for panel in DASHBOARD["panels"]:
        check(panel, "dashboard", "Panel")
        check(panel["options"], panel["type"], "Options")
        for target in panel["targets"]:
            check(target, "prometheus", "Dataquery")
    for variable in DASHBOARD["templating"]["list"]:
        check(variable, "dashboard", "VariableModel")
    with pytest.raises(jsonschema.ValidationError, match="Additional properties"):
        check(DASHBOARD | {"panel": []}, "dashboard", "Dashboard")


@pytest.mark.hand
def test_every_query_of_the_dashboard_returns_data_from_prometheus(base, ray_here, tmp_path):
    import ray

    targets = [f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}" for node in ray.nodes()]
    config = tmp_path / "prometheus.yml"
    scrape = {"job_name": "ray", "scrape_interval": "1s", "static_configs": [{"targets": targets}]}
    config.write_text(yaml.safe_dump({"scrape_configs": [scrape]}))
    address = f"127.0.0.1:{free_ports()[0]}"
    command = [os.environ["PROMETHEUS"], f"--config.file={config}", f"--web.listen-address={address}"]
    answers: dict[str, list[Any]] = {}

    def look() -> bool:
        for query in QUERIES:
            # Grafana puts allValue of the variable there
            parameters = urlencode({"query": query.replace("$run", ".+")})
            answers[query] = json.loads(read(f"http://{address}/api/v1/query?{parameters}"))["data"]["result"]
        return all(answers.values())

    with subprocess.Popen([*command, f"--storage.tsdb.path={tmp_path / 'data'}"], stderr=subprocess.DEVNULL) as server:
        try:
            run_on_two(base, tmp_path / "run", look)
            labels = json.loads(read(f"http://{address}/api/v1/label/run/values?match[]=ray_thresher_step"))["data"]
        finally:
            server.terminate()
    assert [query for query, found in answers.items() if not found] == []
    assert "two" in labels
