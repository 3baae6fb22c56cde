"""Judges: functions, an endpoint over HTTP, and the win rate of their verdicts."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from thresher.errors import UserError
from thresher.sampling.answers import Answer, SampledAnswers, SampledPrompt
from thresher.sampling.judges import (
    EndpointJudge,
    JudgeError,
    from_both_orders,
    from_scores,
    judge_answers,
    load_judge,
    parse_reply,
    wilson_interval,
    win_rate_metrics,
)


def sample(policy: str, reference: str, prompt: str = "say something") -> SampledPrompt:
    return SampledPrompt(prompt, Answer(policy, (5, 2), True), Answer(reference, (6, 2), True), 0.0)


@pytest.mark.parametrize(
    ("wins", "n", "expected"),
    # solutions of (p - m)^2 = z^2 p (1 - p) / n, computed with 30 digits
    [(8, 10, (0.4901625, 0.9433178)), (0, 10, (0.0, 0.2775328)), (50, 100, (0.4038315, 0.5961685))],
)
def test_wilson_interval_of_known_counts(wins: int, n: int, expected: tuple[float, float]) -> None:
    assert wilson_interval([1.0] * wins + [0.0] * (n - wins)) == pytest.approx(expected, abs=1e-6)


def test_ties_count_one_half_and_do_not_narrow_the_interval() -> None:
    assert wilson_interval([0.5] * 10) == pytest.approx(wilson_interval([1.0, 0.0] * 5))


@pytest.mark.parametrize(
    ("policy_first", "reference_first", "outcome", "is_inconsistent"),
    [(1, 0, 1.0, False), (0, 1, 0.0, False), (1, 1, 0.5, True), (0, 0, 0.5, True), (0.5, 0.5, 0.5, False)],
)
def test_a_verdict_that_follows_the_position_is_a_tie(
    policy_first: float, reference_first: float, outcome: float, is_inconsistent: bool
) -> None:
    verdict = from_both_orders(policy_first, reference_first)
    assert (verdict.outcome, verdict.is_inconsistent) == (outcome, is_inconsistent)


def test_metrics_of_scores_have_rewards_and_no_inconsistency() -> None:
    metrics = win_rate_metrics([from_scores(2.0, 1.0), from_scores(1.0, 1.0), from_scores(0.0, 3.0), from_scores(4, 1)])
    assert metrics["samples/win_rate"] == 0.625
    assert (metrics["samples/reward"], metrics["samples/reward_reference"]) == (1.75, 1.5)
    assert "samples/inconsistent" not in metrics


def write_judge(tmp_path: Path, text: str, name: str) -> str:
    (tmp_path / "my_judge.py").write_text(text)
    return f"{tmp_path / 'my_judge.py'}:{name}"


def test_a_comparing_function_sees_both_orders(tmp_path: Path) -> None:
    text = (
        "seen = []\ndef compare(prompt, first, second):\n    seen.append((first, second))\n    return first > second\n"
    )
    judge = load_judge(write_judge(tmp_path, text, "compare"))
    verdicts = judge.verdicts([sample("b", "a"), sample("a", "c"), sample("same", "same")])
    assert [each.outcome for each in verdicts] == [1.0, 0.0, 0.5]
    seen = judge.function.__globals__["seen"]
    assert seen == [("b", "a"), ("a", "b"), ("a", "c"), ("c", "a")]  # equal answers need no judge


def test_a_judge_may_be_in_a_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "judges_of_ours.py").write_text("def length(prompt, answer, unit=1):\n    return len(answer) / unit\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    verdicts = load_judge("judges_of_ours:length").verdicts([sample("longer", "short")])
    assert [(each.outcome, each.rewards) for each in verdicts] == [(1.0, (6.0, 5.0))]


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("", "score", "has no function score"),
        ("def score(answer):\n    return 0\n", "score", "1 parameters without a default; write score"),
        ("import nothing_of_that_name\n", "score", "cannot import .*my_judge.py: ModuleNotFoundError"),
        ("1 +\n", "score", "SyntaxError"),
    ],
)
def test_a_judge_that_cannot_be_used_is_a_user_error(tmp_path: Path, text: str, name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_judge(write_judge(tmp_path, text, name))


@pytest.mark.parametrize("location", ["my_judge", "my_judge.py", ":score"])
def test_a_location_without_a_function_is_a_user_error(location: str) -> None:
    with pytest.raises(UserError, match=r"samples\.judge"):
        load_judge(location)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def judge(prompt, answer):\n    return float('nan')\n", "returned nan"),
        ("def judge(prompt, answer):\n    return 'good'\n", "returned 'good' instead of a number"),
        ("def judge(prompt, first, second):\n    return 2\n", "returned 2.0; a comparison is a probability"),
        ("def judge(prompt, first, second):\n    return 1 / 0\n", "raised ZeroDivisionError"),
    ],
)
def test_a_value_that_is_no_verdict_leaves_no_win_rate(
    tmp_path: Path, text: str, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    judge = load_judge(write_judge(tmp_path, text, "judge"))
    metrics, verdicts = judge_answers(judge, SampledAnswers((sample("a", "b"),)), step=3)
    assert "samples/win_rate" not in metrics
    assert verdicts == [None]
    assert message in caplog.text


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        *(("A", 1.0), (" B.", 0.0), ("**A**", 1.0), ("Answer B is better", 0.0), ("", 0.5), ("A or B", 0.5)),
        *(("<think>A? No, A is rude.</think>\nB", 0.0), ("ABBA", 0.5), ("Because", 0.5)),
    ],
)
def test_replies_are_read_only_if_they_name_one_letter(reply: str, expected: float) -> None:
    assert parse_reply(reply) == expected


class Server(ThreadingHTTPServer):
    """Answers with the next of the given (status, body), the last one for ever; keeps what it was asked."""

    def __init__(self, replies: list[tuple[int, Any]]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.replies, self.requests, self.lock = replies, [], threading.Lock()
        self.headers: dict[str, str] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.requests.append((self.path, self.headers.get("Authorization"), body))
            replies = self.server.replies
            status, reply = replies.pop(0) if len(replies) > 1 else replies[0]
        if callable(reply):
            reply = reply(body["messages"][0]["content"])
        content = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
        self.send_response(status)
        if status == 302:
            self.send_header("Location", f"{self.server.url}/elsewhere")
        for name, value in (self.server.headers | {"Content-Length": str(len(content))}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Keep the terminal clean."""


@contextmanager
def serve(*replies: tuple[int, Any]) -> Iterator[Server]:
    with Server(list(replies)) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def chat(text: str | None) -> dict[str, Any]:
    return {"choices": [{"message": {"role": "assistant", "content": text}}]}


def prefers_good(question: str) -> dict[str, Any]:
    """Prefer the answer with the word good, whatever its position; A if none has it."""
    second = question.split("[Answer B]")[1].split("Which answer is better?")[0]
    return chat("B" if "good" in second else "A")


def test_an_endpoint_is_asked_in_both_orders() -> None:
    with serve((200, prefers_good)) as server:
        judge = EndpointJudge(server.url, "a-judge", api_key="secret", instructions="Prefer good answers.")
        verdicts = judge.verdicts([sample("good", "bad"), sample("bad", "good"), sample("x", "y"), sample("z", "z")])
    assert [(each.outcome, each.is_inconsistent) for each in verdicts] == [
        (1.0, False),
        (0.0, False),
        (0.5, True),  # the judge says A twice
        (0.5, False),
    ]
    assert len(server.requests) == 6
    assert {path for path, _, _ in server.requests} == {"/v1/chat/completions"}
    assert {key for _, key, _ in server.requests} == {"Bearer secret"}
    body = server.requests[0][2]
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("a-judge", 0, 16)
    assert body["messages"][0]["content"].startswith("Prefer good answers.")


def judge_of(server: Server, waits: list[float], **settings: Any) -> EndpointJudge:
    return EndpointJudge(server.url, "m", sleep=waits.append, concurrency=1, **settings)


def test_requests_that_fail_are_repeated_with_growing_waits() -> None:
    waits: list[float] = []
    with serve((503, b"busy"), (200, b"not json"), (429, b"slow down"), (200, chat("A"))) as server:
        assert judge_of(server, waits).compare("p", "a", "b") == 1.0
    assert waits == [1.0, 2.0, 4.0]


@pytest.mark.parametrize(
    ("reply", "num_requests", "message"),
    [
        ((503, b"busy"), 4, "failed after 4 attempts: status 503: busy"),
        ((401, b"wrong key"), 1, "failed after 1 attempts: status 401: wrong key"),
        ((302, b""), 1, "status 302"),
        ((200, {"error": "no model"}), 4, r"no choices\[0\].message.content"),
    ],
)
def test_an_endpoint_that_keeps_failing_is_an_error(reply: tuple[int, Any], num_requests: int, message: str) -> None:
    with serve(reply) as server, pytest.raises(JudgeError, match=message):
        judge_of(server, []).compare("p", "a", "b")
    assert len(server.requests) == num_requests


def test_a_server_that_does_not_answer_is_an_error() -> None:
    timed_out = pytest.raises(JudgeError, match="failed after 2 attempts: TimeoutError")
    with Server([(200, chat("A"))]) as server, timed_out:  # listens, but does not serve
        judge_of(server, [], timeout=0.2, attempts=2).compare("p", "a", "b")
    with pytest.raises(JudgeError, match=r"ConnectionRefusedError|URLError"):
        judge_of(server, [], attempts=1).compare("p", "a", "b")


def test_a_reply_without_text_is_a_tie() -> None:
    with serve((200, chat(None))) as server:
        assert judge_of(server, []).compare("p", "a", "b") == 0.5


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ((200, b"[" * 200_000), "RecursionError"),
        ((401, b"bad api key: plainsecretkey0123"), r"status 401: bad api key: \*\*\*"),
    ],
)
def test_a_hostile_reply_leaves_no_win_rate_and_shows_no_key(reply: tuple[int, Any], message: str) -> None:
    with serve(reply) as server, pytest.raises(JudgeError, match=message):
        judge_of(server, [], api_key="plainsecretkey0123").compare("p", "a", "b")


def test_a_server_says_how_long_to_wait() -> None:
    waits: list[float] = []
    with serve((429, b"slow down"), (429, b"slow down"), (200, chat("A"))) as server:
        server.headers["Retry-After"] = "7"
        assert judge_of(server, waits).compare("p", "a", "b") == 1.0
    assert waits == [7.0, 7.0]


@pytest.mark.parametrize("start", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n"], ids=["headers", "body"])
def test_a_server_that_sends_a_byte_at_a_time_is_not_waited_for(start: bytes) -> None:
    """The timeout of a socket is that of one read."""
    ended = threading.Event()

    def drip(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            connection.sendall(start)
            while not ended.wait(0.05):
                connection.sendall(b"H")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=drip, args=(listener,))
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        started = time.monotonic()
        with pytest.raises(JudgeError, match=r"TimeoutError: no complete reply within 0.5 s"):
            EndpointJudge(url, "m", timeout=0.5, attempts=1).compare("p", "a", "b")
        assert time.monotonic() - started < 5
        ended.set()
        thread.join()
