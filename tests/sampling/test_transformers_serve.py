"""A judge behind a real `transformers serve`; needs `pip install openai`, which transformers[serving] depends on."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.paths import shared_path
from thresher.sampling.answers import Answer, SampledPrompt
from thresher.sampling.judges import EndpointJudge, JudgeError

pytestmark = [pytest.mark.hand, pytest.mark.real]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the stories model with a chat template."""
    directory = tmp_path_factory.mktemp("judge") / "model"
    shutil.copytree(shared_path("models", "stories260K_hf"), directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[str]:
    pytest.importorskip("openai", reason="transformers serve needs openai: pip install 'transformers[serving]'")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    code = "from transformers.cli.transformers import main; main()"
    options = ["--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
    process = subprocess.Popen([sys.executable, "-c", code, "serve", str(model), *options])
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            assert process.poll() is None, "transformers serve ended"
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()  # noqa: S310
                break
            except OSError:
                time.sleep(0.5)
        yield f"{url}/v1"
    finally:
        process.terminate()
        process.wait(30)


def test_the_reply_is_what_the_model_generates_and_verdicts_have_both_orders(server: str, model: Path) -> None:
    judge = EndpointJudge(server, str(model), instructions="Judge.", max_tokens=12, concurrency=2, timeout=300)
    question = "Which answer is better, A or B?"
    loaded, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )["input_ids"]
    with torch.no_grad():
        output = loaded.generate(ids, max_new_tokens=12, do_sample=False)
    assert judge.ask(question) == tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
    answers = [Answer(text, (5, 6), False) for text in ("Once upon a time", "The end")]
    (verdict,) = judge.verdicts([SampledPrompt("Tell a story", *answers, log_ratio=0.0)])
    wins = [judge.compare("Tell a story", first.text, second.text) for first, second in (answers, answers[::-1])]
    assert verdict.outcome == (wins[0] + 1 - wins[1]) / 2


def test_a_request_that_the_server_rejects_is_an_error_with_its_message(server: str) -> None:
    judge = EndpointJudge(server, "no-such/model", timeout=300, attempts=1)
    with pytest.raises(JudgeError, match="failed after 1 attempts: status 4"):
        judge.ask("Which is better?")
