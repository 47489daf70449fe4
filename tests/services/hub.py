"""A server that plays the Hugging Face Hub and the storage behind it, on two ports of this machine."""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

PAGE = 3
"""Files in a page of a listing; the Hub has 1,000."""
Refusal = tuple[int, dict[str, str]]


@dataclass
class Hub:
    """One dataset while entered; a push moves its branch to a new commit.

    Attributes:
        repo: owner/name.
        files: path -> content, of the branch main. Only files of more than 100 bytes are on other storage.
        refuse: (kind, number of its requests) -> status and headers in place of an answer.
        signed_s: how long a signed URL holds.
        asked: kind -> number of requests: revision, tree, resolve, bytes (of storage).
        answers: every (kind, status), in order.
        links: whether a page of a listing names the next one; "same" for itself.
        more_bytes: that answers for bytes tell each object to have beyond its own.
        token: if given, the Hub answers 401 without it.
    """

    repo: str
    files: Mapping[str, bytes]
    refuse: Callable[[str, int], Refusal | None] = lambda kind, number: None
    signed_s: float = 3600.0
    asked: Counter[str] = field(default_factory=Counter)
    answers: list[tuple[str, int]] = field(default_factory=list)
    links: bool | str = True
    more_bytes: int = 0
    token: str | None = None

    def __post_init__(self) -> None:
        self.commits: dict[str, Mapping[str, bytes]] = {}
        self.lock = threading.Lock()
        self.push(self.files)

    def push(self, files: Mapping[str, bytes]) -> str:
        """Commit files to main; returns the commit."""
        self.files = dict(files)
        digests = [(path, hashlib.sha256(content).hexdigest()) for path, content in sorted(files.items())]
        self.head = hashlib.sha1(f"{len(self.commits)} {digests}".encode()).hexdigest()
        self.commits[self.head] = self.files
        return self.head

    def __enter__(self) -> Self:
        self._servers = [_Server(("127.0.0.1", 0), _handler(self, kind)) for kind in (_Hub, _Storage)]
        for server in self._servers:
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        hosts = ("127.0.0.1", "localhost")  # clients ask differently for what another host has
        ports = (server.server_port for server in self._servers)
        self.endpoint, self.storage = (f"http://{host}:{port}" for host, port in zip(hosts, ports))
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def url(self, path: str = "", revision: str = "main") -> str:
        """Of a file or folder."""
        return f"hf://datasets/{self.repo}@{revision}/{path}".rstrip("/")


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256  # that connect at once


def _handler(hub: Hub, kind: type[_Answers]) -> type[_Answers]:
    return type(kind.__name__, (kind,), {"hub": hub})


class _Answers(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def is_refused(self, kind: str) -> bool:
        with self.hub.lock:
            self.hub.asked[kind] += 1
            number = self.hub.asked[kind]
        refusal = self.hub.refuse(kind, number)
        if refusal is not None:
            self.answer(kind, *refusal)
        return refusal is not None

    def answer(self, kind: str, status: int, headers: Mapping[str, str], body: bytes = b"") -> None:
        with self.hub.lock:
            self.hub.answers.append((kind, status))
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_range(self, kind: str, content: bytes, headers: Mapping[str, str]) -> None:
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if found is None:
            self.answer(kind, 200, {**headers, "Content-Length": str(len(content))}, content)
            return
        begin, end = int(found[1]), min(int(found[2]) + 1, len(content))
        span = {"Content-Range": f"bytes {begin}-{end - 1}/{len(content) + self.hub.more_bytes}"}
        self.answer(kind, 206, {**headers, **span}, content[begin:end])


class _Hub(_Answers):
    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, url = self.hub, urlsplit(self.path)
        path = unquote(url.path)
        if hub.token is not None and self.headers.get("Authorization") != f"Bearer {hub.token}":
            self.answer("denied", 401, {"X-Error-Code": "RepoNotFound"})
        elif path.startswith(of := f"/api/datasets/{hub.repo}/revision/"):
            self._revision(path.removeprefix(of))
        elif path.startswith(of := f"/api/datasets/{hub.repo}/tree/"):
            self._tree(path.removeprefix(of), parse_qs(url.query))
        elif path.startswith(of := f"/datasets/{hub.repo}/resolve/"):
            self._resolve(*path.removeprefix(of).split("/", 1))
        else:
            self.answer("other", 404, {"X-Error-Code": "RepoNotFound"})

    def _revision(self, revision: str) -> None:
        if self.is_refused("revision"):
            return
        commit = self.hub.head if revision == "main" else revision
        if commit not in self.hub.commits:
            self.answer("revision", 404, {"X-Error-Code": "RevisionNotFound"})
            return
        siblings = [{"rfilename": path} for path in sorted(self.hub.commits[commit])]
        body = json.dumps({"id": self.hub.repo, "sha": commit, "siblings": siblings}).encode()
        self.answer("revision", 200, {"Content-Type": "application/json"}, body)

    def _tree(self, commit: str, query: Mapping[str, list[str]]) -> None:
        if self.is_refused("tree"):
            return
        commit = self.hub.head if commit == "main" else commit
        if commit not in self.hub.commits:
            self.answer("tree", 404, {"X-Error-Code": "RevisionNotFound"})
            return
        files = sorted(self.hub.commits[commit].items())
        at = int(query.get("cursor", ["0"])[0])
        entries = [{"type": "directory", "oid": "0" * 40, "size": 0, "path": "data"}] if not at else []
        for path, content in files[at : at + PAGE]:
            entry = {"type": "file", "oid": _blob(content), "size": len(content), "path": path}
            if _is_large(content):
                entry["lfs"] = {"oid": _etag(content), "size": len(content), "pointerSize": 134}
            entries.append(entry)
        headers = {"Content-Type": "application/json"}
        if self.hub.links and at + PAGE < len(files):
            here = f"{self.hub.endpoint}{urlsplit(self.path).path}"
            headers["Link"] = (
                f'<{here}?recursive=True&cursor={at + PAGE * (self.hub.links is True)}>; rel="next"'
            )
        self.answer("tree", 200, headers, json.dumps(entries).encode())

    def _resolve(self, commit: str, path: str) -> None:
        if self.is_refused("resolve"):
            return
        commit = self.hub.head if commit == "main" else commit
        content = self.hub.commits.get(commit, {}).get(path)
        if content is None:
            self.answer("resolve", 404, {"X-Error-Code": "EntryNotFound"})
            return
        headers = {"X-Repo-Commit": commit, "ETag": f'"{_etag(content)}"', "Accept-Ranges": "bytes"}
        if not _is_large(content):
            self.send_range("resolve", content, headers)
            return
        linked = {"X-Linked-Size": str(len(content)), "X-Linked-ETag": f'"{_etag(content)}"'}
        until = time.time() + self.hub.signed_s
        location = f"{self.hub.storage}/{_etag(content)}?Expires={until}&Signature=s3cret"
        self.answer("resolve", 302, {**headers, **linked, "Location": location})


class _Storage(_Answers):
    def do_GET(self) -> None:
        if self.is_refused("bytes"):
            return
        url = urlsplit(self.path)
        query = parse_qs(url.query)
        if "Authorization" in self.headers or float(query["Expires"][0]) < time.time():
            self.answer("bytes", 403, {})
            return
        everything = (content for files in self.hub.commits.values() for content in files.values())
        content = next(each for each in everything if _etag(each) == url.path[1:])
        self.send_range("bytes", content, {"ETag": '"of-the-storage"'})


def _is_large(content: bytes) -> bool:
    return len(content) > 100


def _blob(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _etag(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest() if _is_large(content) else _blob(content)
