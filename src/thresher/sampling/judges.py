"""Judges decide which of two answers is better: a Python function, or a model behind an endpoint; and their log.

A function with two parameters, `score(prompt, answer)`, returns a reward: the answer with the higher one wins. One with
three, `compare(prompt, first, second)`, returns the probability that the first answer is better, or a bool; it is
called in both orders, because judges prefer positions. Their verdicts add up to the policy's win rate against its
reference, with a confidence interval.

An endpoint speaks OpenAI's chat completions, such as `transformers serve`, vLLM or a service. The standard library
sends the requests: a client library would add a dependency for one POST. Redirects are refused, because they would
carry the API key to another host.
"""

from __future__ import annotations

import inspect
import json
import logging
import math
import re
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from pathlib import Path
from typing import Any, Protocol

from thresher.errors import UserError
from thresher.imported_function import import_function
from thresher.observability.log_files import SAMPLES
from thresher.observability.trackers.jsonl import StepLog, encode_number
from thresher.observability.trackers.tracker import Table
from thresher.redact import MASK, redact_text
from thresher.sampling.answers import SampledAnswers, SampledPrompt
from thresher.sampling.length_control import fit_equal_lengths

logger = logging.getLogger(__name__)

TABLE_NAME = "samples/answers"
# of the standard normal distribution: an interval of 95 %
_Z = 1.959963984540054


@dataclass(frozen=True)
class Verdict:
    """A judge's result for one prompt."""

    outcome: float  # 1 if the policy won, 0 if it lost, 0.5 for a tie
    is_inconsistent: bool = False  # it preferred the same position, not the same answer, when the order was swapped
    rewards: tuple[float, float] | None = None  # of policy and reference, if the judge scores answers


def from_scores(policy: float, reference: float) -> Verdict:
    """The higher score wins."""
    return Verdict(0.5 + 0.5 * ((policy > reference) - (policy < reference)), rewards=(policy, reference))


def from_both_orders(policy_first: float, reference_first: float) -> Verdict:
    """Join two comparisons, each the probability that the first answer is better.

    The outcome is the mean of both; a judge that prefers a position, whatever the answers, calls a tie.
    """
    wins = (policy_first, 1.0 - reference_first)
    is_inconsistent = min(wins) < 0.5 < max(wins)
    return Verdict(0.5 * (wins[0] + wins[1]), is_inconsistent)


def wilson_interval(outcomes: Sequence[float]) -> tuple[float, float]:
    """Wilson's score interval of a mean of outcomes between 0 and 1, one per prompt.

    A coin with the same mean has at least the variance of such outcomes, so ties make the interval wider than
    necessary, not narrower. Unlike the normal interval, it has a width at 0 and 1.
    """
    n, mean = len(outcomes), sum(outcomes) / len(outcomes)
    scale = 1.0 + _Z**2 / n
    center = (mean + _Z**2 / (2 * n)) / scale
    half = _Z / scale * math.sqrt(mean * (1.0 - mean) / n + _Z**2 / (4 * n**2))
    return max(0.0, center - half), min(1.0, center + half)


def win_rate_metrics(verdicts: Sequence[Verdict]) -> dict[str, float]:
    """Win rate with its interval, the share of inconsistent verdicts, and the mean rewards of a judge that scores."""
    outcomes = [each.outcome for each in verdicts]
    low, high = wilson_interval(outcomes)
    metrics = {
        "samples/win_rate": sum(outcomes) / len(outcomes),
        "samples/win_rate_low": low,
        "samples/win_rate_high": high,
    }
    rewards = [each.rewards for each in verdicts if each.rewards is not None]
    if rewards:
        metrics["samples/reward"] = sum(policy for policy, _ in rewards) / len(rewards)
        metrics["samples/reward_reference"] = sum(reference for _, reference in rewards) / len(rewards)
    else:
        metrics["samples/inconsistent"] = sum(each.is_inconsistent for each in verdicts) / len(verdicts)
    return metrics


def length_controlled_metrics(samples: Sequence[SampledPrompt], verdicts: Sequence[Verdict]) -> dict[str, float]:
    """Win rate at equal lengths with its 95 % interval; that of the win rate if all verdicts are wins, or losses."""
    outcomes = [each.outcome for each in verdicts]
    fitted = fit_equal_lengths(samples, outcomes)
    if fitted is None:
        rate, (low, high) = outcomes[0], wilson_interval(outcomes)
    else:
        logit, error = fitted
        rate, low, high = (1.0 / (1.0 + math.exp(-each)) for each in (logit, logit - _Z * error, logit + _Z * error))
    name = "samples/win_rate_length_controlled"
    return {name: rate, f"{name}_low": low, f"{name}_high": high}


class JudgeError(Exception):
    """A judge that could not decide: the run continues without a win rate."""


class Judge(Protocol):
    """Decides on all prompts of an evaluation; raises JudgeError if it cannot."""

    def verdicts(self, samples: Sequence[SampledPrompt]) -> list[Verdict]: ...


def compare_answers(
    samples: Sequence[SampledPrompt],
    compare: Callable[[str, str, str], float],
    call: Callable[..., Iterable[float]] = map,
) -> list[Verdict]:
    """Compare answers in both orders; equal ones are a tie. `call` is map, or the same in parallel."""
    orders = [
        (s.prompt, first.text, second.text)
        for s in samples
        if s.policy.text != s.reference.text
        for first, second in ((s.policy, s.reference), (s.reference, s.policy))
    ]
    replies = iter(call(lambda order: compare(*order), orders))
    tie = Verdict(0.5)
    return [
        tie if s.policy.text == s.reference.text else from_both_orders(next(replies), next(replies)) for s in samples
    ]


@dataclass(frozen=True)
class FunctionJudge:
    """The user's function: `score(prompt, answer)`, or `compare(prompt, first, second)`."""

    name: str
    function: Callable[..., Any]
    compares: bool

    def verdicts(self, samples: Sequence[SampledPrompt]) -> list[Verdict]:
        if self.compares:
            return compare_answers(samples, self._compare)
        return [from_scores(*(self._score(s.prompt, each.text) for each in s.answers)) for s in samples]

    def _score(self, prompt: str, answer: str) -> float:
        value = self._call(prompt, answer)
        if not math.isfinite(value):
            raise JudgeError(f"{self.name} returned {value}, which no other score can be compared with")
        return value

    def _compare(self, prompt: str, first: str, second: str) -> float:
        value = self._call(prompt, first, second)
        if not 0.0 <= value <= 1.0:
            raise JudgeError(f"{self.name} returned {value}; a comparison is a probability from 0 to 1")
        return value

    def _call(self, *texts: str) -> float:
        try:
            value = self.function(*texts)
        except Exception as error:  # the user's function may raise anything
            raise JudgeError(f"{self.name} raised {type(error).__name__}: {error}") from error
        try:
            return float(value)
        except (TypeError, ValueError) as error:
            raise JudgeError(f"{self.name} returned {value!r} instead of a number") from error


def load_judge(location: str) -> FunctionJudge:
    """Import the judge at `package.module:function` or `path/to/file.py:function`."""
    function = import_function(location, "samples.judge")
    required = [
        each
        for each in inspect.signature(function).parameters.values()
        if each.default is each.empty and each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]
    if len(required) not in (2, 3):
        raise UserError(
            f"samples.judge: {location} has {len(required)} parameters without a default; write score(prompt, answer) "
            "or compare(prompt, first, second)"
        )
    return FunctionJudge(location, function, compares=len(required) == 3)


def judge_answers(
    judge: Judge | None, answers: SampledAnswers, step: int
) -> tuple[dict[str, float], Sequence[Verdict | None]]:
    """Return the metrics, and a verdict per prompt. A judge that fails is reported, and there is no win rate."""
    metrics, verdicts = answers.metrics(), [None] * len(answers.prompts)
    if judge is None:
        return metrics, verdicts
    try:
        judged = judge.verdicts(answers.prompts)
    except JudgeError as error:
        logger.warning("no win rate after step %d: %s", step, error)
        return metrics, verdicts
    return metrics | win_rate_metrics(judged) | length_controlled_metrics(answers.prompts, judged), judged


class SampleLog:
    """Judges the answers of evaluations, writes them to `samples.jsonl` and sends them to the trackers as a table."""

    def __init__(
        self, run_dir: Path, resume_step: int | None, judge: Judge | None, log_table: Callable[[int, Table], None]
    ) -> None:
        self._log, self._judge, self._log_table = StepLog(run_dir / SAMPLES, resume_step), judge, log_table

    def write(self, step: int, answers: SampledAnswers) -> dict[str, float]:
        """Log the answers of a step; return the metrics."""
        metrics, verdicts = judge_answers(self._judge, answers, step)
        rows = [_row(*each) for each in zip(answers.prompts, verdicts, strict=True)]
        for row in rows:
            self._log.write({"step": step, **row})
        columns = ["step", *rows[0]]
        self._log_table(step, Table(TABLE_NAME, columns, [[step, *row.values()] for row in rows]))
        return metrics


def _row(sample: SampledPrompt, verdict: Verdict | None) -> dict[str, Any]:
    """The row of a prompt. Values of one answer are named for it, as in policy_tokens."""
    row: dict[str, Any] = {"prompt": sample.prompt, "policy": sample.policy.text, "reference": sample.reference.text}
    for side, answer in (("policy", sample.policy), ("reference", sample.reference)):
        row[f"{side}_tokens"] = len(answer.token_ids)
        row[f"{side}_ended"] = answer.ended
        row[f"{side}_repetition"] = round(answer.repetition, 4)
    row["log_ratio"] = encode_number(sample.log_ratio)
    if verdict is not None:
        row["win"] = verdict.outcome
        if verdict.rewards is not None:
            row["policy_reward"], row["reference_reward"] = verdict.rewards
        else:
            row["inconsistent"] = verdict.is_inconsistent
    return row


INSTRUCTIONS = (
    "Compare two answers to the same prompt. Decide which one is more helpful, correct and pleasant to read. Do not "
    "let the order or the length of the answers influence you."
)
_QUESTION = (
    "{instructions}\n\n[Prompt]\n{prompt}\n\n[Answer A]\n{first}\n\n[Answer B]\n{second}\n\n"
    "Which answer is better? Reply with one letter, A or B."
)
_RETRIED = {408, 409, 425, 429, 500, 502, 503, 504}
_MAX_BYTES = 1 << 22
_MAX_WAIT_SECONDS = 60.0


@dataclass(frozen=True)
class EndpointJudge:
    """Asks a model which answer is better.

    A reply without a clear letter counts as a tie. Requests that fail are repeated; if one fails `attempts` times, the
    evaluation has no win rate.
    """

    base_url: str
    model: str
    api_key: str | None = None
    instructions: str = INSTRUCTIONS
    max_tokens: int = 16
    timeout: float = 60.0
    attempts: int = 4
    concurrency: int = 8
    sleep: Callable[[float], None] = time.sleep

    def verdicts(self, samples: Sequence[SampledPrompt]) -> list[Verdict]:
        pool = ThreadPoolExecutor(self.concurrency, thread_name_prefix="judge")
        try:
            return compare_answers(samples, self.compare, pool.map)
        finally:
            pool.shutdown(cancel_futures=True)

    def compare(self, prompt: str, first: str, second: str) -> float:
        """Return 1 if the model prefers the first answer, 0 for the second, 0.5 if its reply is unclear."""
        question = _QUESTION.format(instructions=self.instructions, prompt=prompt, first=first, second=second)
        return parse_reply(self.ask(question))

    def ask(self, question: str) -> str:
        """Return the model's reply to a user message."""
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
            "max_tokens": self.max_tokens,
        }
        problem, wait = "", 0.0
        for attempt in range(self.attempts):
            if attempt:
                self.sleep(min(_MAX_WAIT_SECONDS, max(2.0 ** (attempt - 1), wait)))
            wait = 0.0
            try:
                return _content(self._post(json.dumps(body).encode()))
            except _Refused as error:
                problem, wait = f"status {error.status}: {error}", error.retry_after
                if error.status not in _RETRIED:
                    break
            # refused, reset, timed out, not JSON, nested too deeply
            except (OSError, HTTPException, ValueError, RecursionError) as error:
                problem = f"{type(error).__name__}: {error}"
        problem = problem.replace(self.api_key, MASK) if self.api_key else problem
        raise JudgeError(f"the judge at {self.base_url} failed after {attempt + 1} attempts: {redact_text(problem)}")

    def _post(self, body: bytes) -> bytes:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        url = f"{self.base_url.rstrip('/')}/chat/completions"  # http or https: the config rejects other schemes
        request = urllib.request.Request(url, body, headers)  # noqa: S310
        connections = _Connections()
        # the timeout of a socket limits one read, and a server may send a byte at a time
        timer = threading.Timer(self.timeout, connections.end)
        timer.daemon = True
        timer.start()
        try:
            opener = urllib.request.build_opener(_NoRedirects, connections)
            with opener.open(request, timeout=self.timeout) as response:
                content: bytes = response.read(_MAX_BYTES + 1)
        except urllib.error.HTTPError as error:
            raise _Refused(error) from error
        finally:
            timer.cancel()
            if connections.are_ended:
                raise TimeoutError(f"no complete reply within {self.timeout:g} s")
        if len(content) > _MAX_BYTES:
            raise ValueError(f"the reply is longer than {_MAX_BYTES} bytes")
        return content


class _Refused(Exception):  # noqa: N818  # the reply of a server
    """A reply with an error status; its text is the start of the body."""

    def __init__(self, error: urllib.error.HTTPError) -> None:
        try:
            text = error.read(300).decode(errors="replace")
        except (OSError, HTTPException):
            text = ""
        super().__init__(" ".join(text.split()) or str(error.reason))
        self.status = error.code
        try:
            self.retry_after = float(error.headers.get("Retry-After") or 0)
        except ValueError:  # a date
            self.retry_after = 0.0


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """Leave the redirect to the caller, as an error."""


class _Connections(urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
    """Opens the connections of a request, and can end them from another thread."""

    def __init__(self) -> None:
        super().__init__()
        self._sockets: list[socket.socket] = []
        self.are_ended = False

    def http_open(self, req: urllib.request.Request) -> HTTPResponse:
        return self.do_open(self._tracked(HTTPConnection), req)

    def https_open(self, req: urllib.request.Request) -> HTTPResponse:
        return self.do_open(self._tracked(HTTPSConnection), req)

    def end(self) -> None:
        self.are_ended = True
        for each in self._sockets:
            with suppress(OSError):  # closed already
                each.shutdown(socket.SHUT_RDWR)

    def _tracked(self, kind: type[HTTPConnection]) -> Any:
        sockets = self._sockets

        class Tracked(kind):  # type: ignore[valid-type, misc]
            def connect(self) -> None:
                super().connect()
                sockets.append(self.sock)

        return Tracked


def parse_reply(reply: str) -> float:
    """Return 1 for A, 0 for B and 0.5 for a reply that names both or none. Reasoning up to `</think>` is ignored."""
    letters = set(re.findall(r"(?<![A-Za-z'])[AB](?![A-Za-z'])", reply.rpartition("</think>")[2]))
    return {("A",): 1.0, ("B",): 0.0}.get(tuple(letters), 0.5)


def _content(body: bytes) -> str:
    reply = json.loads(body)
    try:
        content = reply["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        raise ValueError(f"the reply has no choices[0].message.content: {str(reply)[:200]}") from None
    return content if isinstance(content, str) else ""  # null if the model wrote nothing but reasoning
