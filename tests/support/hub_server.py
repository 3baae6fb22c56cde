"""The parts of the Hugging Face Hub's API that an upload uses, on loopback; commits are kept in memory."""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import yaml

_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+", re.ASCII)
_RELATIONS = ("adapter", "finetune", "merge", "quantized")


class HubServer(ThreadingHTTPServer):
    """A Hub of one owner, "someone".

    repos: files of each repository by their path. private: names of private ones. branches: repository and branch of
    each commit. messages: of all commits. tokens: of all requests. status: of every answer, if not 200.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos: dict[str, dict[str, bytes]] = {}
        self.private: set[str] = set()
        self.branches: list[tuple[str, str]] = []
        self.messages: list[str] = []
        self.tokens: set[str | None] = set()
        self.status: int | None = None

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: HubServer

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.tokens.add(self.headers.get("Authorization"))
        path = self.path.partition("?")[0]
        if self.server.status is not None:
            self._answer({"error": "refused by the test"}, self.server.status)
        elif path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'someone'}/{asked['name']}"
            if name in self.server.repos:
                self._answer({"error": "You already created this model repo", "url": name}, 409)
                return
            self.server.repos[name] = {}
            if asked.get("private") or asked.get("visibility") == "private":  # by the version of huggingface_hub
                self.server.private.add(name)
            self._answer({"url": f"{self.server.address}/{name}", "name": name, "id": name})
        elif "/branch/" in path:
            self._answer({})
        elif path == "/api/validate-yaml":
            errors = [{"message": each} for each in card_errors(json.loads(body)["content"])]
            self._answer({"errors": errors, "warnings": []}, 400 if errors else 200)
        elif "/preupload/" in path:
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False, "oid": None}
                for file in json.loads(body)["files"]
            ]
            self._answer({"files": files})
        elif "/commit/" in path:
            name, _, branch = path.removeprefix("/api/models/").partition("/commit/")
            self.server.branches.append((name, branch))
            self._commit(name, body)
        else:
            self._answer({"error": f"not served here: {path}"}, 404)

    def do_GET(self) -> None:
        name = self.path.removeprefix("/api/models/").partition("/revision/")[0]
        if name in self.server.repos:
            files = [{"rfilename": file} for file in self.server.repos[name]]
            is_private = name in self.server.private
            self._answer({"id": name, "sha": "0" * 40, "private": is_private, "siblings": files})
        else:
            self._answer({"error": f"not served here: {self.path}"}, 404)

    def _commit(self, name: str, body: bytes) -> None:
        for line in body.splitlines():
            operation = json.loads(line)
            value = operation["value"]
            if operation["key"] == "header":
                self.server.messages.append(value["summary"])
            elif operation["key"] == "file":
                self.server.repos[name][value["path"]] = base64.b64decode(value["content"])
        self._answer(
            {"success": True, "commitUrl": f"{self.server.address}/{name}/commit/{'1' * 40}", "commitOid": "1" * 40}
        )

    def _answer(self, value: dict[str, Any], status: int = 200) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


def card_errors(card: str) -> list[str]:
    """What the Hub refuses in the header of a model card, as its documentation of metadata says."""
    parts = card.split("---\n", 2)
    if len(parts) != 3 or parts[0]:
        return ["no header"]
    values = yaml.safe_load(parts[1])
    names = {name: values.get(name, []) for name in ("base_model", "datasets")}
    lists = {name: [value] if isinstance(value, str) else value for name, value in names.items()}
    errors = [
        f'"{name}" {each!r} is no name' for name, found in lists.items() for each in found if not _NAME.fullmatch(each)
    ]
    if values.get("base_model_relation", "finetune") not in _RELATIONS:
        errors.append('"base_model_relation" must be one of adapter, finetune, merge, quantized')
    if not all(isinstance(tag, str) for tag in values.get("tags", [])):
        errors.append('"tags" must be an array of strings')
    if not re.fullmatch("[a-z]{2,3}", str(values.get("language", "en"))):
        errors.append('"language" must be a code')
    if not re.fullmatch(r"[a-z0-9.+-]+", str(values.get("license", "mit"))):
        errors.append('"license" must be an identifier')
    return errors


@contextmanager
def hub_server() -> Iterator[HubServer]:
    server = HubServer()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
