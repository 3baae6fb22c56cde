"""Secrets are masked; ordinary settings that resemble them are not."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thresher.redact import redact, redact_text

CANARY = "c4n4ry-Value"


@pytest.mark.parametrize(
    "config",
    [
        {"hf_token": CANARY},
        {"token": CANARY},
        {"hubToken": CANARY},
        {"HF_TOKEN": CANARY},
        {"auth_tokens": [CANARY, CANARY]},
        {"wandb": {"api_key": CANARY}},
        {"wandb": {"apiKey": CANARY}},
        {"trackers": [{"WANDB_API_KEY": CANARY}]},
        {"db-password": CANARY},
        {"client_secret": CANARY},
        {"aws_secret_access_key": CANARY},
        {"credentials": {"user": CANARY, "parts": (CANARY,)}},
        {"headers": {"Authorization": CANARY}},
        {"note": f"Bearer {CANARY}"},
        {"uri": f"https://me:{CANARY}@host:80/path"},
        {"uri": f"https://{CANARY}@host/path"},
        {"uri": f"postgresql://me:{CANARY}/p@ss@host/db"},
        {"uri": f"sqlite://{CANARY}:{CANARY}@host"},
        {"files": [f"https://host/data?a=1&token={CANARY}&b=2"]},
        {"files": [f"https://host/data?X-Amz-Signature={CANARY}"]},
        {"file": f"https://host/blob?sv=1&sig={CANARY}"},
        {"note": "use hf_c4n4ryValuec4n4ryValue here"},
        {"note": "use ghp_c4n4ryValuec4n4ryValue here"},
        {"note": f"DefaultEndpointsProtocol=https;AccountName=me;AccountKey={CANARY}==;EndpointSuffix=core.net"},
        {"note": f'the server said {{"api_key": "{CANARY}"}}'},
        {"note": f"{{'hf_token': '{CANARY} {CANARY}'}}"},
        {"note": f"user: me, password: {CANARY}"},
        {"note": f"Authorization: Basic {CANARY} was sent"},
        {"note": f"thresher train --wandb-api-key {CANARY} run.yaml"},
        {"note": "AIzac4n4ryValuec4n4ryValuec4n4ryValue12345"},
        *({"note": f"{start}c4n4ryValuec4n4ryValue here"} for start in ("xoxb-", "nvapi-", "gsk_", "npm_", "pypi-")),
        {"note": "eyJc4n4ryValue.eyJc4n4ryValue.c4n4ry"},
    ],
)
def test_secrets_are_masked(config: dict[str, object]) -> None:
    text = json.dumps(redact(config))
    assert "c4n4ry" not in text
    assert "***" in text


def test_a_number_can_be_a_password() -> None:
    assert redact({"password": 1234}) == {"password": "***"}


@pytest.mark.parametrize(
    "config",
    [
        {"tokenizer": "gpt2", "max_tokens": 512, "token_budget": 4096, "tokens_per_micro_batch": 1},
        {"pad_token": "<pad>", "eos_token_id": 2, "special_tokens": ["<a>"], "num_token": 3},
        {"stop_tokens": ["</s>"], "chosen_key": "chosen", "prompt_key": "question", "keys": ["a"]},
        {"use_auth_token": True, "hf_token": None, "password": None},
        {"model": "org/model", "path": "/data/a@b/c", "url": "hf://datasets/org/name@main/x.parquet"},
        {"uri": "http://localhost:5000/path", "git": "git@host:a/b", "beta": 0.1, "layers": [1, 2]},
        {"secretary_problem": 1, "monkey": 2, "query": "https://host/a?page=2&sort=up"},
    ],
)
def test_settings_that_resemble_secrets_are_unchanged(config: dict[str, object]) -> None:
    assert redact(config) == config


def test_only_the_credentials_of_a_url_are_masked() -> None:
    assert redact_text("at https://me:pw@host:80/a?b=c ok") == "at https://***@host:80/a?b=c ok"


@pytest.mark.parametrize(
    "text",
    [
        "tracker_kwargs.wandb_api_key: Input should be a valid string",
        "the pad token: <pad>",
        "thresher plan --max-tokens 512 --pad-token <pad>",
        "a=1;b=2",
    ],
)
def test_text_that_names_no_secret_is_unchanged(text: str) -> None:
    assert redact_text(text) == text


def test_redacting_does_not_modify_its_input() -> None:
    config = {"a": {"token": CANARY}}
    redact(config)
    assert config == {"a": {"token": CANARY}}


@settings(max_examples=50, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["token", "note", "api_key", "max_tokens", "a"]),
        st.text(max_size=30) | st.integers() | st.from_regex(r"\Ahttps://[a-z]*:?[a-z/]*@[a-z]+\?sig=[a-z]*\Z"),
    )
)
def test_redacting_twice_changes_nothing(config: dict[str, object]) -> None:
    assert redact(redact(config)) == redact(config)
