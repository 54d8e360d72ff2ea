"""A small hub of models and data sets on this machine, for tests: repositories in memory, tokens, faults, a log.

It speaks as much of the hub's protocol as ``huggingface_hub`` uses to resolve, list and download.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

TOKENS = {"hf_me": "me", "hf_other": "other"}


@dataclass
class Repository:
    """A repository: the commit of every revision, the files of every commit, and who may see them."""

    private: bool = False
    gated: bool = False
    revisions: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)

    def commit(self, files: dict[str, bytes], revision: str = "main") -> str:
        """Add a commit with these files and let the revision be it."""
        found = hashlib.sha1(f"{len(self.commits)} {revision} {sorted(files)}".encode()).hexdigest()
        self.commits[found] = files
        self.revisions[revision] = found
        return found


class Hub:
    """The hub; ``fault`` may answer a request, given its method and path, with a status or ``drop`` the connection."""

    def __init__(self) -> None:
        self.repositories: dict[tuple[str, str], Repository] = {}
        self.requests: list[str] = []
        self.fault: Callable[[str, str], int | str | None] = lambda method, path: None
        self.open = True
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        """Refuse connections from now on, and end those that are open."""
        self.fault = lambda method, path: "drop"
        self.open = False
        self._server.shutdown()
        self._server.server_close()

    def add(self, name: str, source: Path | dict[str, bytes], kind: str = "models", revision: str = "main",
            private: bool = False, gated: bool = False) -> str:  # fmt: skip
        """Add a folder, or files, as a commit of a repository; return the commit."""
        if isinstance(source, Path):
            source = {str(p.relative_to(source)): p.read_bytes() for p in sorted(source.rglob("*")) if p.is_file()}
        repository = self.repositories.setdefault((kind, name), Repository(private, gated))
        return repository.commit(dict(source), revision)

    def asked(self, part: str = "") -> list[str]:
        """Return the requests with ``part`` in them, without those that say who is asking."""
        return [line for line in self.requests if part in line and "agent-harnesses" not in line]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: Any) -> None:
        """Keep the tests' output clean."""

    def _send(self, status: int, body: Any = b"", **headers: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _refuse(self, status: int, message: str, code: str = "") -> None:
        more = {"X_Error_Code": code} if code else {}
        self._send(status, {"error": message}, X_Error_Message=message, **more)

    @property
    def _user(self) -> str | None:
        return TOKENS.get((self.headers.get("Authorization") or "").removeprefix("Bearer "))

    def _handle(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        self.data = self.rfile.read(length)
        url = urlsplit(self.path)
        self.hub.requests.append(f"{self.command} {unquote(self.path)}")
        fault = self.hub.fault(self.command, self.path)
        if fault == "drop":
            self.close_connection = True
            self.connection.shutdown(2)
        elif isinstance(fault, int):
            self._refuse(fault, "out of order")
        elif self.headers.get("Authorization") and not self._user:
            self._refuse(401, "Invalid credentials in Authorization header")
        else:
            self._dispatch(unquote(url.path), parse_qs(url.query))

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _handle

    def _dispatch(self, path: str, query: dict[str, list[str]]) -> None:
        if found := re.fullmatch(r"/(?:(datasets)/)?([^/]+/[^/]+|[^/]+)/resolve/(.+?)/([^/].*)", path):
            return self._file(found[1] or "models", *found.group(2, 3, 4))
        if found := re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree)/(.+?))?", path):
            return self._api(found[1], found[2], found[3] or "", found[4] or "main")
        self._refuse(404, f"no page {path}")

    def _repository(self, kind: str, name: str, content: bool) -> Repository | None:
        """Return a repository, or refuse it as the hub does."""
        found, user = self.hub.repositories.get((kind, name)), self._user
        mine = user == name.split("/")[0]
        if found is None or (found.private and not mine):
            self._refuse(404 if user else 401, "Repository not found", "RepoNotFound")
            return None
        if found.gated and content and not mine:
            self._refuse(403 if user else 401, f"Access to {name} is restricted.", "GatedRepo")
            return None
        return found

    def _file(self, kind: str, name: str, revision: str, file: str) -> None:
        if (repository := self._repository(kind, name, content=True)) is None:
            return
        commit = repository.revisions.get(revision, revision)
        if (data := repository.commits.get(commit, {}).get(file)) is None:
            return self._refuse(404, "Entry not found", "EntryNotFound")
        self._send(200, data, X_Repo_Commit=commit, ETag=f'"{_blob(data)}"')

    def _api(self, kind: str, name: str, verb: str, revision: str) -> None:
        if (repository := self._repository(kind, name, content=False)) is None:
            return
        commit = repository.revisions.get(revision, revision)
        if (files := repository.commits.get(commit)) is None:
            return self._refuse(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        if verb == "tree":
            listed = [
                {"type": "file", "oid": _blob(data), "size": len(data), "path": path} for path, data in files.items()
            ]
            return self._send(200, listed)
        siblings = [{"rfilename": path} for path in files]
        self._send(200, {"id": name, "sha": commit, "private": repository.private, "siblings": siblings, "tags": []})


def _blob(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@contextmanager
def running(cache: Path) -> Iterator[Hub]:
    """Let this process use a new hub, with an empty cache, as a new process would."""
    from huggingface_hub import constants

    from lit_compress.utils import hub

    made = Hub()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", made.endpoint)
        patch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", made.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        )
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setattr(constants, "HF_HUB_CACHE", str(cache))
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        patch.setattr(constants, "HF_TOKEN_PATH", str(cache / "no-token"))
        patch.delenv("HF_TOKEN", raising=False)
        patch.setattr(hub, "_resolved", {})
        patch.setattr("lit_compress.utils.progress._noted", set())
        patch.setattr("time.sleep", lambda seconds: None)  # between tries
        yield made
        if made.open:
            made.close()


def as_a_new_process() -> None:
    """Forget what was resolved."""
    from lit_compress.utils import hub

    hub._resolved.clear()
