"""A server with the part of the Hugging Face Hub's interface that downloads use."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import huggingface_hub
import pytest

COMMIT = "a" * 40
OLDER = "b" * 40


@dataclass(slots=True)
class Repo:
    """A data set or a model: its files at each commit."""

    commits: dict[str, dict[str, bytes]]
    branches: dict[str, str] = field(default_factory=lambda: {"main": COMMIT})
    refusal: str = ""
    """The Hub's error code, for one that is gated."""
    status: int = 0
    """Status of every answer, if it is refused."""
    message: str = ""
    """What the Hub says with it."""
    num_parameters: int = 0
    """What the Hub says of a model's weights; 0: nothing."""


@dataclass(slots=True)
class HubServer:
    """Address, data sets and models by id, and the paths that were asked for."""

    url: str
    repos: dict[str, Repo]
    requests: list[str] = field(default_factory=list)


@contextmanager
def hub_server(repos: Mapping[str, Repo]) -> Iterator[HubServer]:
    """Serve data sets and models on a free port of this machine."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    hub = HubServer(url=f"http://127.0.0.1:{server.server_port}", repos=dict(repos))
    server.hub = hub  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def used_hub(repos: Mapping[str, Repo], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """Make such a server the Hub of this process, with an empty cache in `folder`."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with hub_server(repos) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        hub: HubServer = self.server.hub  # type: ignore[attr-defined]
        path = unquote(urlsplit(self.path).path)
        hub.requests.append(path)
        parts = path.strip("/").split("/")
        start = {"api": 2, "datasets": 1}.get(parts[0], 0)  # a model's files are at /owner/name/resolve
        name = "/".join(parts[start : start + 2])
        repo = hub.repos.get(name)
        if repo is None:
            return self._refuse(401, "RepoNotFound")
        if repo.refusal or repo.status:
            return self._refuse(repo.status or 403, repo.refusal, repo.message)
        place = parts[start + 2 :]
        verb, revision, *rest = place or ("revision", "main")
        commit = repo.branches.get(revision, revision)
        files = repo.commits.get(commit)
        if files is None:
            return self._refuse(404, "RevisionNotFound")
        match verb:
            case "revision":
                siblings = [{"rfilename": file, "size": len(data)} for file, data in files.items()]
                found = {"id": name, "sha": commit, "siblings": siblings}
                if repo.num_parameters:
                    found["safetensors"] = {"parameters": {"F32": repo.num_parameters}, "total": repo.num_parameters}
                self._send(json.dumps(found).encode())
            case "tree":
                entries = [
                    {"type": "file", "path": file, "size": len(data), "oid": _etag(data)}
                    for file, data in files.items()
                ]
                self._send(json.dumps(entries).encode())
            case "resolve" if "/".join(rest) in files:
                data = files["/".join(rest)]
                self._send(data, {"ETag": f'"{_etag(data)}"', "X-Repo-Commit": commit})
            case _:
                self._refuse(404, "EntryNotFound")

    do_HEAD = do_GET  # noqa: N815

    def _send(self, body: bytes, headers: Mapping[str, str] = {}) -> None:
        self.send_response(200)
        for key, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def _refuse(self, status: int, code: str, message: str = "") -> None:
        self.send_response(status)
        for key, value in (("X-Error-Code", code), ("X-Error-Message", message)):
            if value:
                self.send_header(key, value)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing on stderr."""


def _etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
