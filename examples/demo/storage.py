"""A storage server that behaves like a remote one: slow to answer, narrow, and now and then very late.

It serves a folder over HTTP with range requests, and counts what it sends.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from email.utils import formatdate
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import unquote, urlsplit

_CHUNK_BYTES = 1 << 12
_FIRST_LATE = 20


@dataclass(slots=True)
class Manners:
    """How the storage answers.

    Attributes:
        latency_s: from a request to the first byte of its answer.
        bytes_per_s: that all answers together get; None for no limit.
        late_every: of so many requests one is late, the 20th of each hundred where it is 100; None for none.
        late_by: how many times as long as usual a late answer takes, from the request to its last byte.
    """

    latency_s: float = 0.05
    bytes_per_s: float | None = None
    late_every: int | None = 100
    late_by: float = 20.0


@dataclass(slots=True)
class Served:
    """Answers to GET since the last reset, those of them that were late, and the bytes of their bodies."""

    requests: int = 0
    late: int = 0
    num_bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, manners: Manners) -> bool:
        """Count a request; returns whether it is to be late."""
        with self._lock:
            self.requests += 1
            every = manners.late_every
            late = every is not None and self.requests % every == min(_FIRST_LATE, every - 1)
            self.late += late
            return late

    def sent(self, num_bytes: int) -> None:
        """Count bytes of a body."""
        with self._lock:
            self.num_bytes += num_bytes


class SlowStorage:
    """Serves the files of a folder while entered; `manners` may be changed meanwhile.

    Attributes:
        served: what it has sent; take a new one to count anew.
    """

    def __init__(self, folder: Path, manners: Manners) -> None:
        self.manners, self.served = manners, Served()
        self._folder = folder.resolve()
        self._free_at_s, self._lock = 0.0, threading.Lock()

    @property
    def url(self) -> str:
        """Where the folder is served."""
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}"

    def __enter__(self) -> Self:
        storage = self

        class Handler(_Handler):
            """Of this server."""

            of = storage

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="slow-storage", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def file(self, path: str) -> Path | None:
        """The file behind a request's path; None where there is none below the folder."""
        found = (self._folder / unquote(urlsplit(path).path).lstrip("/")).resolve()
        return found if found.is_file() and found.is_relative_to(self._folder) else None

    def delay_s(self, num_bytes: int, late: bool) -> float:
        """From a request for so many bytes to the first byte of its answer."""
        manners = self.manners
        sending_s = num_bytes / manners.bytes_per_s if manners.bytes_per_s else 0.0
        usual_s = manners.latency_s + sending_s
        return manners.late_by * usual_s - sending_s if late else manners.latency_s

    def wait_for_room(self, num_bytes: int) -> None:
        """Wait until the line, which all answers share, has carried so many bytes."""
        rate = self.manners.bytes_per_s
        if rate is None:
            return
        with self._lock:
            self._free_at_s = max(self._free_at_s, time.monotonic()) + num_bytes / rate
            free_at_s = self._free_at_s
        time.sleep(max(free_at_s - time.monotonic(), 0.0))


class _Handler(BaseHTTPRequestHandler):
    of: SlowStorage
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_HEAD(self) -> None:
        time.sleep(self.of.manners.latency_s)
        self._begin()

    def do_GET(self) -> None:
        served = self.of.served
        late = served.add(self.of.manners)
        time.sleep(self.of.delay_s(self._asked_bytes(), late))
        found = self._begin()
        if found is None:
            return
        path, begin, end = found
        with path.open("rb") as stream:
            stream.seek(begin)
            for at in range(begin, end, _CHUNK_BYTES):
                chunk = stream.read(min(_CHUNK_BYTES, end - at))
                self.of.wait_for_room(len(chunk))
                try:
                    self.wfile.write(chunk)
                except OSError:  # whoever asked has gone
                    self.close_connection = True
                    return
                served.sent(len(chunk))

    def _asked_bytes(self) -> int:
        """How long the body will be; 0 where the file is missing."""
        path = self.of.file(self.path)
        size = 0 if path is None else path.stat().st_size
        first, _, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
        return max(min(int(last) + 1 if last else size, size) - int(first), 0)

    def _begin(self) -> tuple[Path, int, int] | None:
        """Send status and headers; what is to be sent then."""
        path = self.of.file(self.path)
        if path is None:
            self.send_error(HTTPStatus.NOT_FOUND)
            return None
        stat = path.stat()
        tag = f'"{stat.st_mtime_ns:x}-{stat.st_size:x}"'
        if self.headers.get("If-Match", tag) != tag:
            self.send_error(HTTPStatus.PRECONDITION_FAILED)
            return None
        begin, end, wanted = 0, stat.st_size, self.headers.get("Range")
        if wanted is not None:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            begin, end = int(first), min(int(last) + 1 if last else end, end)
            if begin >= stat.st_size:
                self.send_error(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE)
                return None
            self.send_response(HTTPStatus.PARTIAL_CONTENT)
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{stat.st_size}")
        else:
            self.send_response(HTTPStatus.OK)
        self.send_header("Content-Length", str(end - begin))
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", tag)
        self.send_header("Last-Modified", formatdate(stat.st_mtime, usegmt=True))
        self.end_headers()
        return path, begin, end

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""
