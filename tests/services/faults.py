"""A proxy that does to storage what networks and services do, by a plan, and counts what passes."""

from __future__ import annotations

import contextlib
import http.client
import io
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import urlsplit

_CHUNK_BYTES = 1 << 14
_KEPT = ("Content-Length", "Content-Range", "ETag", "Last-Modified", "Content-Type", "Accept-Ranges")

EXPIRED = (
    403,
    b"<?xml version='1.0'?><Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>",
)
SKEWED = (
    403,
    b"<?xml version='1.0'?><Error><Code>RequestTimeTooSkewed</Code><Message>The difference between the request time "
    b"and the current time is too large.</Message></Error>",
)
FORBIDDEN = (
    403,
    b"<?xml version='1.0'?><Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>",
)
OTHER_REGION = (
    400,
    b"<?xml version='1.0'?><Error><Code>AuthorizationHeaderMalformed</Code><Message>The authorization header is "
    b"malformed; the region 'us-east-1' is wrong; expecting 'eu-central-1'</Message><Region>eu-central-1</Region></Error>",
)


@dataclass(frozen=True)
class Fault:
    """What happens to one request; nothing by default.

    Attributes:
        answer: status and body in place of the upstream's.
        reset: the connection is reset after so many bytes of the body.
        cut: the connection is closed after so many bytes of the body.
        flip: this byte of the body comes with a bit turned.
        flip_most: only in a body of at most so many bytes.
        delay_s: before the answer.
        stall: nothing comes until `Faults.release`.
    """

    answer: tuple[int, bytes] | None = None
    reset: int | None = None
    cut: int | None = None
    flip: int | None = None
    flip_most: int = 1 << 62
    delay_s: float = 0.0
    stall: bool = False


NOTHING = Fault()

_POLL_S = 0.02  # how soon a server notices that it ends

Plan = Callable[[int, str, str], Fault]
"""(number of the request, method, path) -> what happens to it."""


@dataclass
class Faults:
    """A proxy in front of `upstream` while entered; `plan` may be changed meanwhile.

    Attributes:
        done: kind of fault -> how often it happened.
        num_bytes: of bodies sent.
        hidden: (method, header) that are not passed on.
        weak_tags: ETags are told as weak ones, and no condition on one holds.
    """

    upstream: str
    plan: Plan = lambda number, method, path: NOTHING
    done: Counter[str] = field(default_factory=Counter)
    num_requests: int = 0
    num_bytes: int = 0
    weak_tags: bool = False
    hidden: frozenset[tuple[str, str]] = frozenset()
    _released: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __enter__(self) -> Self:
        proxy = self

        class Handler(_Handler):
            of = proxy

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(_POLL_S,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.release()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        """Of the proxy."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def release(self) -> None:
        """Let what stalls go on."""
        self._released.set()

    def next_fault(self, method: str, path: str) -> Fault:
        with self._lock:
            number, self.num_requests = self.num_requests, self.num_requests + 1
            fault = self.plan(number, method, path)
            for name in ("answer", "reset", "cut", "flip", "delay_s", "stall"):
                if getattr(fault, name) != getattr(NOTHING, name):
                    self.done[name] += 1
        return fault


class _Whole(io.BytesIO):
    """A body that came in chunks."""

    @property
    def length(self) -> int:
        return len(self.getvalue())


class _Handler(BaseHTTPRequestHandler):
    of: Faults
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_HEAD(self) -> None:
        self._pass_on()

    def do_GET(self) -> None:
        self._pass_on()

    def do_PUT(self) -> None:
        self._pass_on(self.rfile.read(int(self.headers.get("Content-Length", 0))))

    do_POST = do_DELETE = do_PUT

    def _pass_on(self, body: bytes | None = None) -> None:
        fault = self.of.next_fault(self.command, self.path)
        if fault.stall:
            self.of._released.wait()
        time.sleep(fault.delay_s)
        given = fault.answer
        if self.of.weak_tags and self.headers.get("If-Match", "").startswith("W/"):
            given = 412, b""
        if given is not None:
            status, told = given
            self.send_response(status)
            self.send_header("Content-Length", str(len(told)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(told)
            return
        where = urlsplit(self.of.upstream)
        upstream = http.client.HTTPConnection(where.hostname or "", where.port)
        headers = {
            name: value for name, value in self.headers.items() if name.lower() != "connection"
        }  # the host, too: a signature may be of it
        upstream.request(self.command, self.path, body, headers)
        answer = upstream.getresponse()
        self.send_response(answer.status)
        for name in _KEPT:
            if answer.getheader(name) is not None and (self.command, name) not in self.of.hidden:
                weak = "W/" if name == "ETag" and self.of.weak_tags else ""
                self.send_header(name, weak + (answer.getheader(name) or ""))
        body: Any = answer
        if answer.getheader("Content-Length") is None and answer.status != 204:  # it came in chunks
            whole = answer.read()
            self.send_header("Content-Length", str(len(whole)))
            body = _Whole(whole)
        self.end_headers()
        self._send_body(body, fault)
        upstream.close()

    def _send_body(self, answer: Any, fault: Fault) -> None:
        sent, flip = 0, fault.flip if (answer.length or 0) <= fault.flip_most else None
        stop = fault.reset if fault.reset is not None else fault.cut
        while piece := answer.read(_CHUNK_BYTES):
            if flip is not None and sent <= flip < sent + len(piece):
                turned = bytearray(piece)
                turned[flip - sent] ^= 1
                piece = bytes(turned)
            piece = piece if stop is None else piece[: stop - sent]
            self.wfile.write(piece)
            sent += len(piece)
            self.of.num_bytes += len(piece)
            if stop is not None and sent >= stop:
                if fault.reset is not None:
                    # closing without lingering resets
                    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.close_connection = True
                self.connection.close()
                return

    def handle(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # the client has gone
            super().handle()

    def finish(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            super().finish()

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""
