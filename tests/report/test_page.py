"""A report on real tiny runs: its data is that of the logs, it loads nothing, and nothing in a log becomes markup."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.report_page import Page
from thresher.data.store.reader import ExampleStore
from thresher.observability.health.monitor import HealthEvent
from thresher.observability.trackers.jsonl import StepLog, read_metrics, read_records
from thresher.report.charts import Chart
from thresher.report.page import MAX_BYTES, render_page, sections_of
from thresher.report.run_files import read_runs
from thresher.report.tables import outcome_rows

vl_convert = pytest.importorskip("vl_convert", reason="the extra report is not installed")

SIDES = ("chosen", "rejected")
HOSTILE = '</script><script>alert(1)</script><img src="http://example.com/x.png">&amp;\x1b[2J'


def page_of(*directories: Path) -> Page:
    return Page(render_page(read_runs(directories), datetime(2026, 11, 16)))


@pytest.fixture(scope="module")
def page(run_dir: Path) -> Page:
    return page_of(run_dir)


@pytest.fixture
def copy_run(run_dir: Path, tmp_path: Path) -> Callable[..., Path]:
    """Copy the logs of the run under another name, with more files."""

    def copy(name: str, **files: list[dict[str, Any]]) -> Path:
        logs = tmp_path / name / "logs"
        shutil.copytree(run_dir / "logs", logs)
        for stem, records in files.items():
            (logs / f"{stem}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        return tmp_path / name

    return copy


def test_curves_hold_the_values_of_the_log(page: Page, run_dir: Path) -> None:
    log = read_metrics(run_dir / "logs" / "metrics.jsonl")
    for chart, metric in (("loss", "loss"), ("rewards-accuracies", "rewards/accuracies"), ("kl", "kl")):
        for kind, name in (("training", metric), ("validation", f"eval/{metric}")):
            logged = [(record["step"], pytest.approx(record[name], rel=1e-5)) for record in log if name in record]
            assert page.points(chart, kind=kind) == logged
    assert [step for step, _ in page.points("loss", kind="validation")] == [2, 4]


def test_the_distribution_holds_every_validation_pair(page: Page, run_dir: Path) -> None:
    last = read_records(run_dir / "logs" / "eval_pairs.jsonl")[-1]
    margins = [c - r for c, r in zip(last["rewards/chosen"], last["rewards/rejected"], strict=True)]
    lengths = [c - r for c, r in zip(last["lengths/chosen"], last["lengths/rejected"], strict=True)]
    assert page.points("margin-by-length") == [
        (length, pytest.approx(margin, rel=1e-5)) for length, margin in zip(lengths, margins, strict=True)
    ]
    shares = page.points("margin-distribution", evaluation="step 4")
    assert sum(share for _, share in shares) == pytest.approx(1.0, abs=1e-5)


def test_tables_show_what_was_run(page: Page, run_dir: Path) -> None:
    config = json.loads((run_dir / "logs" / "run.json").read_text())["config"]
    assert "All 4 steps done. Reward accuracy on validation pairs" in page.text
    assert "sigmoid(beta=0.1)" in page.text
    assert "actor_train.training_args.learning_rate" in page.text
    assert "rows read" in page.text
    assert "Training pairs: 21" in page.text
    assert config["pretrain"] in page.text
    assert "torch" in page.text
    assert "No events; most rules compare from pair 516 on, and the run has seen 21." in page.text
    assert "Report on tiny" in page.text  # exp_name is the default
    assert {
        "summary",
        "health",
        "curves",
        "pairs",
        "frontier",
        "speed",
        "data",
        "config",
        "environment",
        "metrics",
    } == set(page.sections)


def test_runs_on_labels_show_both_labels_apart(label_run: Path) -> None:
    page, logs = page_of(label_run), label_run / "logs"
    last = read_records(logs / "eval_pairs.jsonl")[-1]
    desirable = [reward for reward, label in zip(last["rewards/response"], last["label"], strict=True) if label]
    assert len(desirable) == 2
    for label, count in (("desirable", 2), ("undesirable", 1)):
        for chart in ("reward-distribution", "probability-distribution"):
            shares = [share for _, share in page.points(chart, side=label) if share]
            assert sum(shares) == pytest.approx(1.0, abs=1e-5)
            assert len(shares) <= count
    middles = [x for x, share in page.points("reward-distribution", side="desirable") if share]
    assert min(middles) == pytest.approx(min(desirable), abs=0.05)
    assert page.points("kto-z0", kind="training")
    assert [step for step, _ in page.points("rewards", side="undesirable")] == [2, 4]
    assert "The reward margin on validation labelled responses" in page.text
    assert "Validation labelled responses: 3" in page.text
    assert "most rules compare from labelled response 516 on" in page.text
    assert not {"margin-distribution", "margin-by-length"} & set(page.charts)


def test_runs_on_lists_show_the_reward_of_each_rank(list_run: Path) -> None:
    """The three validation lists have 2, 3 and 4 responses."""
    page = page_of(list_run)
    last = read_records(list_run / "logs" / "eval_pairs.jsonl")[-1]
    by_rank = [[float(each) for each in last[f"rewards/rank_{rank}"]] for rank in (1, 2, 3, 4)]
    assert [(rank, pytest.approx(float(np.nanmean(each)), rel=1e-5)) for rank, each in enumerate(by_rank, 1)] == (
        page.points("reward-by-rank", evaluation="step 4")
    )
    assert by_rank[0] == last["rewards/chosen"]
    assert [by_rank[1][0], by_rank[2][1], by_rank[3][2]] == last["rewards/rejected"]
    assert np.isnan(by_rank).sum(axis=0).tolist() == [2, 1, 0]
    shares = page.points("margin-distribution", evaluation="step 4")
    margins = [best - np.nanmean([each[at] for each in by_rank[1:]]) for at, best in enumerate(by_rank[0])]
    assert sum(share for x, share in shares if x > 0) == pytest.approx(np.mean(np.array(margins) > 0), abs=0.34)
    assert page.charts["margin-distribution"]["spec"]["description"].startswith("Reward margin of each list")
    assert "Training lists: 21" in page.text
    assert "lists per second" in page.text


def test_runs_of_reward_models_have_rewards_and_true_lengths_but_no_logps(reward_model_run: Path) -> None:
    page = page_of(reward_model_run)
    last = read_records(reward_model_run / "logs" / "eval_pairs.jsonl")[-1]
    assert last.keys() == {"step", "pairs"} | {f"{name}/{s}" for name in ("rewards", "lengths") for s in SIDES}
    store = ExampleStore.open(next((reward_model_run / "data").glob("validation-*")))
    assert [last[f"lengths/{side}"] for side in SIDES] == store.lengths[:, 1:].T.tolist()
    assert page.points("margin-by-length")
    assert "probability-distribution" not in page.charts
    assert re.search(r"Reward accuracy on validation pairs \w+ (at|from) [^;]*\.", page.text)


def test_runs_of_different_kinds_are_compared_in_examples(run_dir: Path, label_run: Path, list_run: Path) -> None:
    page = page_of(run_dir, label_run, list_run)
    assert "examples per second" in page.text
    assert {each["labels"]["side"] for each in page.charts["rewards"]["series"]} == {"chosen", "rejected"}


def test_the_page_requests_nothing_and_is_small(page: Page) -> None:
    assert len(page.html.encode()) < MAX_BYTES == 5_000_000
    for tag, attributes in page.elements:
        assert "src" not in attributes
        assert attributes.get("href", "#").startswith("#"), (tag, attributes)
        assert not [name for name in attributes if name.startswith("on")]
    styles = page.html.partition("<style>")[2].partition("</style>")[0]
    assert "url(" not in styles
    assert "@import" not in styles
    policy = next(str(each["content"]) for _, each in page.elements if each.get("http-equiv"))
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-eval" not in policy
    assert len(re.findall(r"'sha256-", policy)) == 2


@pytest.mark.parametrize("name", ["run_dir", "label_run", "list_run", "reward_model_run"])
def test_every_chart_is_drawn_with_its_points(name: str, request: pytest.FixtureRequest) -> None:
    """Vega itself, without a browser; an invalid specification or field would raise or draw no mark."""
    run: Path = request.getfixturevalue(name)
    charts: list[Chart] = [chart for section in sections_of(read_runs([run])) for chart in section.charts]
    assert len(charts) > (10 if name != "reward_model_run" else 8)
    for chart in charts:
        rows = [
            {**each.labels, **dict(zip(each.columns, values, strict=True))}
            for each in chart.series
            for values in zip(*each.columns.values(), strict=True)
        ]
        spec = {**chart.to_json()["spec"], "data": {"values": rows}, "width": 300}
        svg = vl_convert.vegalite_to_svg(spec)
        assert re.search(r"mark-(line|area|symbol) role-mark", svg), chart.id
        assert "NaN" not in svg
        assert chart.caption


def test_records_of_a_run_have_their_sections(copy_run: Callable[..., Path]) -> None:
    run = copy_run(
        "eventful",
        samples=[
            {
                "step": step,
                "prompt": "Say hello.",
                "policy": f"hello {step}",
                "reference": "good day",
                "policy_tokens": 2,
                "policy_ended": True,
                "policy_repetition": 0.25,
                "win": 0.5,
            }
            for step in (2, 4)
        ],
        recoveries=[
            {"cause": "worker lost", "step": 3, "from_step": 2, "steps_repeated": 1, "seconds": 2.5}
            | {"phases": {"stop": 0.25, "import": 1.5, "model": 0.5, "wait": 0.01, "first step": 0.24}}
        ],
        skipped_steps=[{"step": 1, "reason": "loss", "grad_norm": "nan", "pairs": [{"pair": 17, "fault": "loss"}]}],
    )
    log = StepLog(run / "logs" / "health.jsonl", None)
    log.write(asdict(HealthEvent(3, "kl_limit", "KL is 31", {"kl": 31.25}, "raise beta")) | {"action": "stop"})
    log.write({"step": 3, "continued": ["beta was 0.1, is 0.2"]})
    page = page_of(run)
    for text in (
        "kl limit",
        "KL is 31",
        "beta was 0.1, is 0.2",
        "kl 31.25",
        "raise beta",
        "worker lost",
        "import 1.5, model 0.5, stop 0.2",
        "17 (loss)",
        "good day",
        "tokens 2",
    ):
        assert text in page.text
    for text in ("ended yes", "repetition 0.2500", "win 0.5000"):
        assert text in page.text
    assert "hello 4" in page.text
    assert "hello 2" not in page.text
    outcome = {row.heading: row.cells for row in outcome_rows(read_runs([run]))}
    assert outcome["health events"] == ["1"], "a run that was continued is not a new event"
    assert page.points("answer-length-distribution", answers="policy, after training")


def test_hostile_text_stays_text(copy_run: Callable[..., Path]) -> None:
    run = copy_run(
        "a run <b>named<b> badly",
        health=[{"step": 1, "rule": HOSTILE, "action": HOSTILE, "summary": HOSTILE, "evidence": {HOSTILE: HOSTILE}}],
        samples=[{"step": 1, "prompt": HOSTILE, "policy": HOSTILE, "reference": HOSTILE, HOSTILE: HOSTILE}],
        recoveries=[{"step": 1, "cause": HOSTILE, "phases": {HOSTILE: 1.0, "stop": HOSTILE}}],
        skipped_steps=[{"step": 1, "reason": HOSTILE, "pairs": [{"pair": HOSTILE}]}],
    )
    description = run / "logs" / "run.json"
    values = json.loads(description.read_text())
    values["facts"][HOSTILE] = values["environment"][HOSTILE] = values["config"][HOSTILE] = HOSTILE
    values["data"]["train"]["report"]["files"][0]["name"] = HOSTILE
    description.write_text(json.dumps(values))
    metrics = run / "logs" / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + json.dumps({"step": 5, HOSTILE: 1.0}) + "\n")
    page = page_of(run, copy_run("other"))
    tags = {tag for tag, _ in page.elements}
    assert not tags & {"img", "b"}
    assert [tag for tag, _ in page.elements].count("script") == 3
    assert HOSTILE.replace("\x1b", "\\x1b") in page.text
    assert page.charts["loss"]["series"][0]["labels"]["run"] == "a run <b>named<b> badly"


def test_secrets_of_a_config_are_masked(copy_run: Callable[..., Path]) -> None:
    run = copy_run("secret")
    description = run / "logs" / "run.json"
    values = json.loads(description.read_text())
    values["config"]["tracker_kwargs"]["wandb_api_key"] = "abcdef123456"
    values["facts"]["model"] = "https://me:abcdef123456@host/model"
    description.write_text(json.dumps(values))
    assert "abcdef123456" not in page_of(run).html


def test_several_runs_are_compared(copy_run: Callable[..., Path], run_dir: Path) -> None:
    other = copy_run("other")
    description = other / "logs" / "run.json"
    values = json.loads(description.read_text())
    values["config"]["beta"] = 0.7
    values["facts"]["loss"] = "sigmoid(beta=0.7)"
    description.write_text(json.dumps(values))
    page = page_of(run_dir, other)
    assert {each["labels"]["run"] for each in page.charts["loss"]["series"]} == {"tiny", "other"}
    settings = page.text.partition("Settings in which the runs differ")[2].partition("What was run")[0]
    assert settings.split() == ["setting", "tiny", "other", "beta", "not", "set", "0.7"]
    assert page.points("frontier-eval-rewards-margins", run="other")
    facts = page.text.partition("What was run")[2].split()
    assert facts[:4] == ["fact", "tiny", "other", "loss"]  # what differs comes first


def test_the_title_is_the_name_of_the_experiment(copy_run: Callable[..., Path]) -> None:
    run = copy_run("run")
    description = run / "logs" / "run.json"
    values = json.loads(description.read_text())
    values["config"]["exp_name"] = "polite answers"
    description.write_text(json.dumps(values))
    assert "<title>Report on polite answers</title>" in page_of(run).html


def test_long_logs_of_many_runs_stay_small(copy_run: Callable[..., Path]) -> None:
    event = {"rule": "kl_limit", "action": "warn", "summary": "m" * 100, "evidence": {"kl": 31.25}, "advice": "a" * 100}
    prompts = [{"step": 1, "prompt": str(i), "policy": "p" * 9000, "reference": "r" * 9000} for i in range(30)]
    runs = []
    for number in range(25):
        run = copy_run(f"long-{number}", health=[{"step": i, **event} for i in range(1000)], samples=prompts)
        metrics = run / "logs" / "metrics.jsonl"
        record = json.loads(metrics.read_text().splitlines()[0])
        lines = [json.dumps({**record, "step": step, "loss": 1 / step}) for step in range(1, 1001)]
        metrics.write_text("\n".join(lines) + "\n")
        runs.append(run)
    assert len(page_of(*runs).html.encode()) < MAX_BYTES


def test_an_older_run_without_its_description_is_reported(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "old" / "logs").mkdir(parents=True)
    shutil.copy(run_dir / "logs" / "metrics.jsonl", tmp_path / "old" / "logs")
    shutil.copytree(run_dir / "checkpoints", tmp_path / "old" / "checkpoints")
    page = page_of(tmp_path / "old")
    assert "config" in page.sections
    assert not {"pairs", "data", "environment"} & set(page.sections)
    assert page.points("loss", kind="training")
