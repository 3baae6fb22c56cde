"""A judge behind an endpoint that speaks OpenAI's chat completions, such as `transformers serve`, vLLM or a service.

Each pair of answers is shown in both orders. The standard library sends the requests: a client library would add a
dependency for one POST. Redirects are refused, because they would carry the API key to another host.
"""

from __future__ import annotations

import json
import re
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any

from thresher.redact import MASK, redact_text
from thresher.sampling.answers import SampledPrompt
from thresher.sampling.judges import JudgeError, Verdict, compare_answers

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
