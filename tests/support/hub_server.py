"""The parts of the Hugging Face Hub's API that an upload uses, on loopback; commits are kept in memory."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class HubServer(ThreadingHTTPServer):
    """repos: files of each repository by their path. messages: of all commits. tokens: of all requests."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos: dict[str, dict[str, bytes]] = {}
        self.messages: list[str] = []
        self.tokens: set[str | None] = set()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: HubServer

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.tokens.add(self.headers.get("Authorization"))
        path = self.path.partition("?")[0]
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'someone'}/{asked['name']}"
            self.server.repos.setdefault(name, {})
            self._answer({"url": f"{self.server.address}/{name}", "name": name, "id": name})
        elif path == "/api/validate-yaml":
            self._answer({"errors": [], "warnings": []})
        elif "/preupload/" in path:
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False, "oid": None}
                for file in json.loads(body)["files"]
            ]
            self._answer({"files": files})
        elif "/commit/" in path:
            self._commit(path.removeprefix("/api/models/").partition("/commit/")[0], body)
        else:
            self._answer({"error": f"not served here: {path}"}, 404)

    def do_GET(self) -> None:
        name = self.path.removeprefix("/api/models/").partition("/revision/")[0]
        if name in self.server.repos:
            self._answer({"id": name, "sha": "0" * 40, "siblings": [{"rfilename": f} for f in self.server.repos[name]]})
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
