"""A server that speaks as much of the Hugging Face hub's API as a download needs, and fails as it is told.

    with FakeHub() as hub:
        hub.add("org/model", {"config.json": b"{}", "model.safetensors": weights})
        environment = hub.environment(folder)

`requests` has what it was asked, as `GET /org/model/resolve/main/config.json`.
"""

import hashlib
import json
import os
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

# Files with these endings are in Git LFS.
_LARGE = (".safetensors", ".gguf", ".bin")
_FILE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
_MODEL = re.compile(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?")


@dataclass
class Repository:
    """A model of the hub: its files, and how the hub treats whoever asks for it."""

    files: Mapping[str, bytes]
    gated: bool = False
    private: bool = False
    branches: tuple[str, ...] = ("main",)
    # After so many bytes of a file the connection breaks, as often as the number says.
    cut: dict[str, tuple[int, int]] = field(default_factory=dict)
    # Contents that arrive in place of files.
    damaged: dict[str, bytes] = field(default_factory=dict)

    @property
    def commit(self) -> str:
        """A commit that depends on the files."""
        text = repr(sorted((name, hashlib.sha256(content).hexdigest()) for name, content in self.files.items()))
        return hashlib.sha1(text.encode()).hexdigest()


class FakeHub:
    """The server, which runs inside a `with` block."""

    token = "hf_test"

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.requests: list[str] = []
        self.is_down = False
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> "FakeHub":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        """Its address, for HF_ENDPOINT."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def add(self, name: str, files: Mapping[str, bytes], **facts: object) -> Repository:
        """Add a model."""
        self.repositories[name] = Repository(files, **facts)  # type: ignore[arg-type]
        return self.repositories[name]

    def add_folder(self, name: str, folder: Path) -> Repository:
        """Add a model with the files of a folder."""
        paths = (path for path in folder.rglob("*") if path.is_file())
        return self.add(name, {str(path.relative_to(folder)): path.read_bytes() for path in paths})

    def environment(self, folder: Path, **more: str) -> dict[str, str]:
        """Return the environment of a process that uses this hub, and caches in `folder`."""
        others = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
        return others | {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(folder / "hf"),
            "HF_HUB_DOWNLOAD_TIMEOUT": "5",
            "XDG_CACHE_HOME": str(folder / "cache"),
            **more,
        }

    def downloads(self) -> list[str]:
        """Return the paths of the files whose content was asked for."""
        return [match[3] for line in self.requests if line.startswith("GET") and (match := _FILE.search(line))]

    def _handler(hub: "FakeHub") -> type[BaseHTTPRequestHandler]:  # noqa: N805 (the handler has a self of its own)
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *values: object) -> None:
                pass

            def do_HEAD(self) -> None:
                self._answer()

            def do_GET(self) -> None:
                self._answer()

            def _answer(self) -> None:
                path = unquote(urlsplit(self.path).path)
                hub.requests.append(f"{self.command} {path}")
                match = _MODEL.fullmatch(path) or _FILE.fullmatch(path)
                repository = None if match is None else hub.repositories.get(match[1])
                is_known = self.headers.get("authorization") == f"Bearer {hub.token}"
                if hub.is_down:
                    return self._send(503, b"the hub is down")
                if match is None or repository is None or (repository.private and not is_known):
                    return self._refuse(401, "RepoNotFound", "Repository not found")
                is_file = match.re is _FILE
                if is_file and repository.gated and not is_known:
                    return self._refuse(403, "GatedRepo", f"Access to model {match[1]} is restricted")
                if (match[2] or "main") not in (*repository.branches, repository.commit):
                    return self._refuse(404, "RevisionNotFound", "Invalid rev id")
                if not is_file:
                    return self._send(200, json.dumps(_described(match[1], repository)).encode())
                return self._send_file(repository, match[3])

            def _send_file(self, repository: Repository, name: str) -> None:
                content = repository.files.get(name)
                if content is None:
                    return self._refuse(404, "EntryNotFound", "Entry not found")
                headers = {"X-Repo-Commit": repository.commit, "ETag": f'"{_etag(name, content)}"'}
                sent = repository.damaged.get(name, content)
                start = int((self.headers.get("range") or "bytes=0-").split("=")[1].split("-")[0])
                status = 206 if start else 200
                if start:
                    headers["Content-Range"] = f"bytes {start}-{len(sent) - 1}/{len(sent)}"
                if name.endswith(_LARGE):
                    headers |= {"X-Linked-Etag": headers["ETag"], "X-Linked-Size": str(len(content))}
                after, times = repository.cut.get(name, (0, 0))
                if self.command == "GET" and times:
                    repository.cut[name] = (after, times - 1)
                    self._head(status, len(sent) - start, headers)
                    self.wfile.write(sent[start : start + after])
                    self.wfile.flush()
                    self.close_connection = True
                    self.connection.close()
                    return None
                return self._send(status, sent[start:], headers)

            def _refuse(self, status: int, code: str, message: str) -> None:
                self._send(
                    status, json.dumps({"error": message}).encode(), {"X-Error-Code": code, "X-Error-Message": message}
                )

            def _head(self, status: int, size: int, headers: Mapping[str, str]) -> None:
                self.send_response(status)
                for key, value in {**headers, "Content-Length": str(size)}.items():
                    self.send_header(key, value)
                self.end_headers()

            def _send(self, status: int, content: bytes, headers: Mapping[str, str] | None = None) -> None:
                self._head(status, len(content), headers or {})
                if self.command != "HEAD":
                    self.wfile.write(content)

        return Handler


def _etag(name: str, content: bytes) -> str:
    if name.endswith(_LARGE):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()


def _described(name: str, repository: Repository) -> dict[str, object]:
    siblings = []
    for file, content in repository.files.items():
        entry: dict[str, object] = {"rfilename": file, "size": len(content), "blobId": _etag("", content)}
        if file.endswith(_LARGE):
            entry["lfs"] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
        siblings.append(entry)
    return {
        "id": name,
        "modelId": name,
        "sha": repository.commit,
        "private": repository.private,
        "gated": "auto" if repository.gated else False,
        "tags": [],
        "siblings": siblings,
    }
