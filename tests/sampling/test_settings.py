"""Settings of samples: what is rejected, and what a check finds before a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from thresher.builders.preflight import check_run
from thresher.builders.samples import build_judge
from thresher.config import parse_config
from thresher.errors import UserError
from thresher.sampling.judges import EndpointJudge

MINIMAL = {"validation": {"split": 0.1}}


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ({"judge": "a:b", "judge_url": "http://host/v1", "judge_model": "m"}, "judge and judge_url are both set"),
        ({"judge_model": "m", "judge_timeout": 5}, "judge_model, judge_timeout have no effect without judge_url"),
        ({"judge_url": "http://host/v1"}, "judge_url needs judge_model"),
        ({"judge_url": "file:///etc/passwd", "judge_model": "m"}, "starts with http:// or https://"),
        ({"temperature": -1}, "samples.temperature: .*greater than or equal to 0"),
        ({"num_promts": 3}, "did you mean `num_prompts`"),
    ],
)
def test_settings_that_cannot_work_are_errors(samples: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_config({**MINIMAL, "samples": samples})


def test_samples_without_prompts_are_an_error() -> None:
    with pytest.raises(UserError, match=r"samples has no effect without validation, whose prompts it answers"):
        parse_config({"samples": {}})
    config = parse_config({"samples": {"prompts_file": "p.txt"}, "eval_steps": 3, "eval_on_start": True})
    assert config.samples is not None
    with pytest.raises(UserError, match="metric_for_best_model has no effect"):
        parse_config({"samples": {"prompts_file": "p.txt"}, "metric_for_best_model": "eval/sft_loss"})


def test_the_key_of_an_endpoint_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = {"judge_url": "http://host/v1", "judge_model": "m", "judge_key_variable": "KEY_OF_THE_JUDGE"}
    config = parse_config({**MINIMAL, "samples": samples})
    monkeypatch.delenv("KEY_OF_THE_JUDGE", raising=False)
    with pytest.raises(UserError, match="environment variable KEY_OF_THE_JUDGE"):
        build_judge(config)
    monkeypatch.setenv("KEY_OF_THE_JUDGE", "secret")
    judge = build_judge(config)
    assert isinstance(judge, EndpointJudge)
    assert judge.api_key == "secret"


def test_a_check_finds_the_judge_and_the_prompts_that_a_run_could_not_use(base: dict[str, Any], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "w5 "}) + "\n" + json.dumps({"question": "w6 "}) + "\n")
    values = {**base, "output_dir": str(tmp_path / "run")}
    samples = {"prompts_file": str(prompts), "judge": f"{tmp_path / 'judge.py'}:score"}
    with pytest.raises(UserError) as found:
        check_run(parse_config({**values, "samples": samples}))
    assert "cannot import" in str(found.value)
    assert f"line 2 of {prompts} is not a prompt: it has no column `prompt`" in str(found.value)
    with pytest.raises(UserError, match=r"samples\.prompts_file .*missing\.txt does not exist"):
        check_run(parse_config({**values, "samples": {"prompts_file": str(tmp_path / "missing.txt")}}))
    (tmp_path / "judge.py").write_text("def score(prompt, answer):\n    return 0\n")
    prompts.write_text(json.dumps({"prompt": [{"role": "user", "content": "w5 "}]}) + "\n")
    check_run(parse_config({**values, "samples": samples}))
