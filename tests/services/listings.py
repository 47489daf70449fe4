"""A server that speaks enough of S3 to list and read objects, and lies in its listings by a plan."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

ERROR = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Reduce your rate.</Message></Error>"


@dataclass(frozen=True)
class Page:
    """One answer.

    Attributes:
        keys: in its order.
        token: of the page that follows; None without one.
        is_cut: whether keys follow.
        body: in place of a listing.
    """

    keys: tuple[str, ...]
    token: str | None
    is_cut: bool
    body: bytes | None = None


Lie = Callable[[Page, "Lister", Mapping[str, str]], Page]
"""(honest page, server, query) -> what is sent."""


@dataclass
class Lister:
    """A server of one bucket, `bucket`, while entered.

    Attributes:
        objects: key -> content.
        lie: may be changed meanwhile.
        page_size: keys of a page.
        num_listings: pages that were sent.
    """

    objects: Mapping[str, bytes]
    lie: Lie = lambda page, server, query: page
    page_size: int = 10
    num_listings: int = 0

    def __enter__(self) -> Self:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"of": self}))
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def options(self) -> dict[str, str]:
        """What a client has to be told."""
        endpoint = f"http://127.0.0.1:{self._server.server_port}"
        return {"endpoint": endpoint, "region": "x", "skip_signature": "true"}

    def page(self, query: Mapping[str, str]) -> Page:
        """The honest answer."""
        after = query.get("continuation-token") or query.get("start-after", "")
        keys = sorted(key for key in self.objects if key.startswith(query.get("prefix", "")) and key > after)
        here = tuple(keys[: self.page_size])
        is_cut = len(keys) > len(here)
        return Page(here, here[-1] if is_cut else None, is_cut)

    def listing(self, query: Mapping[str, str]) -> bytes:
        """A page as it is sent."""
        self.num_listings += 1
        page = self.lie(self.page(query), self, query)
        return self.body(page) if page.body is None else page.body

    def body(self, page: Page) -> bytes:
        """A page as XML."""
        found = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{len(self.objects.get(key, b'x'))}</Size>"
            f"<LastModified>2026-11-01T00:00:00Z</LastModified></Contents>"
            for key in page.keys
        )
        token = page.token and f"<NextContinuationToken>{escape(page.token)}</NextContinuationToken>"
        cut = f"<IsTruncated>{str(page.is_cut).lower()}</IsTruncated>"
        return f"<?xml version='1.0'?><ListBucketResult>{cut}{token or ''}{found}</ListBucketResult>".encode()


def no_token(page: Page, server: Lister, query: Mapping[str, str]) -> Page:
    """More follows, and nobody is told how to ask for it."""
    return replace(page, token=None)


def first_version(page: Page, server: Lister, query: Mapping[str, str]) -> Page:
    """A server that knows neither where to begin nor tokens."""
    return no_token(server.page({"prefix": query.get("prefix", "")}), server, query)


def error(page: Page, server: Lister, query: Mapping[str, str]) -> Page:
    """An error's document under status 200."""
    return replace(page, body=ERROR)


def broken(page: Page, server: Lister, query: Mapping[str, str]) -> Page:
    """The document ends in its middle."""
    body = server.body(page)
    return replace(page, body=body[: len(body) // 2])


def overlapping(page: Page, server: Lister, query: Mapping[str, str]) -> Page:
    """The next page begins with the last two names of this one."""
    return replace(page, token=page.token and page.keys[-3])


def same_token(page: Page, server: Lister, query: Mapping[str, str]) -> Page:
    """The next page is this one, and so is the one after it."""
    here = {name: value for name, value in query.items() if name in ("prefix", "start-after")}
    return replace(server.page(here), token=query.get("start-after", "!"), is_cut=True)


def empty_forever(page: Page, server: Lister, query: Mapping[str, str]) -> Page:
    """Pages without a name that promise more."""
    return Page((), "more", True)


def backwards(page: Page, server: Lister, query: Mapping[str, str]) -> Page:
    """Names in the reverse order."""
    return replace(page, keys=page.keys[::-1])


def swapped(page: Page, server: Lister, query: Mapping[str, str]) -> Page:
    """The first two names in the reverse order, if it has others."""
    return replace(page, keys=(*page.keys[1::-1], *page.keys[2:])) if page.keys[4:] else page


def outside(page: Page, server: Lister, query: Mapping[str, str]) -> Page:
    """A name that is not below the prefix."""
    return replace(page, keys=(*page.keys, "zzz/elsewhere.jsonl"))


LIES: tuple[Lie, ...] = (
    no_token,
    first_version,
    error,
    broken,
    overlapping,
    same_token,
    empty_forever,
    backwards,
    swapped,
    outside,
)


def at_random(seed: int, share: float) -> Lie:
    """So many of the pages are lies, each of some kind."""
    rng = random.Random(seed)

    def lie(page: Page, server: Lister, query: Mapping[str, str]) -> Page:
        return rng.choice(LIES)(page, server, query) if rng.random() < share else page

    return lie


def once(number: int, lie: Lie) -> Lie:
    """One page is a lie."""

    def one(page: Page, server: Lister, query: Mapping[str, str]) -> Page:
        return lie(page, server, query) if server.num_listings == number else page

    return one


class _Handler(BaseHTTPRequestHandler):
    of: Lister
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        if "list-type" in (query := {name: values[0] for name, values in parse_qs(url.query).items()}):
            self._send(200, self.of.listing(query), {})
            return
        content = self.of.objects.get(unquote(url.path).removeprefix("/bucket/"))
        if content is None:
            self._send(404, b"", {})
            return
        about = {"ETag": f'"{len(content)}"', "Last-Modified": "Sun, 01 Nov 2026 10:00:00 GMT"}
        span = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if span is None:
            self._send(200, content, about)
            return
        begin, end = int(span[1]), min(int(span[2]) + 1, len(content))
        self._send(
            206, content[begin:end], about | {"Content-Range": f"bytes {begin}-{end - 1}/{len(content)}"}
        )

    def _send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""
