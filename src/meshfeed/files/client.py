"""The storage client: stat, ranges and listing over obstore, with hedging and retries.

A request that takes far longer than similar recent ones is sent again on another thread, and the first good
answer counts (hedging; Dean and Barroso, "The Tail at Scale", 2013). Transient failures are retried after a
random pause that doubles. A permanent failure raises one of the errors of `meshfeed.errors`.

Used by the helper, and for writing (`writer`): obstore's runtime does not survive a fork.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from meshfeed.errors import (
    ChangedError,
    StoreError,
    UnavailableError,
)
from meshfeed.extras import install
from meshfeed.files.local import typed_errors
from meshfeed.files.refusals import REPLACED, kind_of, reason, refuses_method
from meshfeed.files.url import AUTHORIZATION, credentials_of, split, without_secrets

T = TypeVar("T")

_log = logging.getLogger("meshfeed")

_THREADS = 48
_RECENT = 64  # requests whose times define what is slow
_ENOUGH = 8
_SLOW = 3.0  # times the ninth decile
_MIN_SLOW_S = 0.25
_HEDGED_SHARE, _HEDGED_BYTES = 0.015, 128 << 10  # share of the bytes fetched, and an initial allowance
_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 10.0


@dataclass(frozen=True, slots=True)
class Stat:
    """Size and version of an object in storage.

    Attributes:
        size_bytes: its size.
        tag: identifies this version, such as an ETag.
    """

    size_bytes: int
    tag: str


@dataclass(frozen=True, slots=True)
class Patience:
    """Timeouts and retries of storage requests.

    Attributes:
        timeout_s: of one request, including its body.
        give_up_s: of all attempts of a request together.
        attempts: the most attempts; None for as many as fit into that time.
        hedge: whether slow requests are sent a second time.
    """

    timeout_s: float = 30.0
    give_up_s: float = 180.0
    attempts: int | None = None
    hedge: bool = True


@dataclass(slots=True)
class Counts:
    """Counters: requests, how many of them were hedges or retries, and bytes received."""

    requests: int = 0
    hedges: int = 0
    hedges_won: int = 0
    hedged_bytes: int = 0
    retries: int = 0
    bytes_fetched: int = 0


class Client:
    """Reads the objects under one root. Threads share one. All methods may raise StoreError.

    Args:
        root: such as s3://bucket or https://host.
        options: obstore's names: `endpoint`, `region`, `skip_signature`, credentials and so on; the cloud's
            usual credential chain supplies the rest.
        patience: timeouts and retries.
    """

    def __init__(self, root: str, options: Mapping[str, str], patience: Patience | None = None) -> None:
        self._root, self._patience = split(root.rstrip("/"))[0], patience or Patience()
        self._store = store_of(self._root, credentials_of(root) | dict(options), self._patience)
        self.counts = Counts()
        self._recent = defaultdict[int, deque[float]](lambda: deque(maxlen=_RECENT))
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="meshfeed-client")

    def stat(self, path: str) -> Stat:
        """Size and version. Raises MissingError, or another StoreError."""
        import obstore

        def head() -> Stat:
            try:
                found = obstore.head(self._store, path)
            except Exception as error:
                if not refuses_method(error):
                    raise
                found = obstore.get(self._store, path, options={"range": (0, 1)}).meta
            return Stat(found["size"], _tag_of(found))

        return self._retry(head, path, self._name(path))

    def read(self, path: str, begin: int, end: int, tag: str) -> Any:
        """Exactly the bytes [begin, end) of the version `tag`, as a buffer."""
        if begin == end:
            return b""
        import obstore

        where = f"{self._name(path)}: bytes {begin}..{end}"
        # A weak tag never matches (RFC 9110, 13.1.1); it is compared with the answer's.
        condition = {} if tag.startswith(("modified ", "W/")) else {"if_match": tag}

        def get() -> Any:
            options: Any = {"range": (begin, end), **condition}
            answer = obstore.get(self._store, path, options=options)
            if _tag_of(answer.meta) != tag:
                raise ChangedError(f"{where}: {REPLACED}")
            body = answer.bytes()
            if len(body) != end - begin:
                raise ConnectionError(f"received {len(body)} of {end - begin} bytes")
            with self._lock:
                self.counts.bytes_fetched += len(body)
            return body

        return self._retry(lambda: self._hedged(get, end - begin), path, where)

    def list(self, prefix: str) -> list[tuple[str, int]]:
        """(path, size) of all objects below a prefix, sorted."""
        if self._root.startswith("http"):
            raise StoreError(f"{self._name(prefix)}: HTTP has no listing; name the file itself")
        import obstore

        def listed() -> list[tuple[str, int]]:
            pages = obstore.list(self._store, prefix)
            return sorted((item["path"], item["size"]) for page in pages for item in page)

        return self._retry(listed, prefix, self._name(prefix))

    def close(self) -> None:
        """Start no more requests."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    # -- retries and hedging --------------------------------------------------------------------------

    def _retry(self, ask: Callable[[], T], path: str, where: str) -> T:
        """Ask until there is an answer, a permanent error, or no time left."""
        began, pause_s, attempt = time.monotonic(), _PAUSE_S, 0
        while True:
            attempt += 1
            with self._lock:
                self.counts.requests += 1
                self.counts.retries += attempt > 1
            try:
                return ask()
            except StoreError:
                raise
            except Exception as error:
                self._refuse(error, path, where)
                pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)
                rest_s = self._patience.give_up_s - (time.monotonic() - began) - pause_s
                if attempt > 1:
                    _log.warning("%s: attempt %d failed: %s", where, attempt, reason(error))
                if attempt == self._patience.attempts or rest_s < 0:
                    raise UnavailableError(
                        f"{where}: failed {attempt} times in {time.monotonic() - began:.0f} s, last: "
                        f"{reason(error)}; check the URL, the network and the storage service"
                    ) from error
                time.sleep(random.uniform(pause_s / 2, pause_s))

    def _refuse(self, error: Exception, path: str, where: str) -> None:
        """Raise permanent errors; return for transient ones."""
        kind = kind_of(error, path)
        if kind is not None:
            raise kind(f"{where}: {reason(error, path)}") from error

    def _hedged(self, ask: Callable[[], T], num_bytes: int) -> T:
        """The answer of a request, or the first of two if it is slow for its size."""
        recent = self._recent[num_bytes.bit_length()]
        first = self._pool.submit(self._timed, ask, recent)
        slow_s = self._slow_s(recent)
        done, _ = wait([first], slow_s)
        if done or not self._may_hedge(num_bytes):
            return first.result()
        second = self._pool.submit(self._timed, ask, recent)
        for each in as_completed([first, second]):
            if each.exception() is None:
                with self._lock:
                    self.counts.hedges_won += each is second
                return each.result()
        return first.result()

    def _timed(self, ask: Callable[[], T], recent: deque[float]) -> T:
        began = time.monotonic()
        answer = ask()
        with self._lock:
            recent.append(time.monotonic() - began)
        return answer

    def _slow_s(self, recent: deque[float]) -> float | None:
        """Seconds after which a request is slow; None after too few requests."""
        with self._lock:
            times = sorted(recent)
        if not self._patience.hedge or len(times) < _ENOUGH:
            return None
        return max(_SLOW * times[len(times) * 9 // 10], _MIN_SLOW_S)

    def _may_hedge(self, num_bytes: int) -> bool:
        """Whether a body may be requested twice: hedging adds at most two per cent of bytes."""
        with self._lock:
            hedged = self.counts.hedged_bytes + num_bytes
            if hedged > max(_HEDGED_BYTES, _HEDGED_SHARE * self.counts.bytes_fetched):
                return False
            self.counts.hedged_bytes = hedged
            self.counts.hedges += 1
            self.counts.requests += 1
            return True

    def _name(self, path: str) -> str:
        return without_secrets(f"{self._root}/{path}")


class LocalReader:
    """Reads files of this machine, by absolute path, as a Client reads objects."""

    def stat(self, path: str) -> Stat:
        with typed_errors(path):
            found = Path(path).stat()
        return Stat(found.st_size, f"{found.st_mtime_ns:x}-{found.st_ino:x}-{found.st_size:x}")

    def read(self, path: str, begin: int, end: int, tag: str) -> bytes:
        with typed_errors(path), Path(path).open("rb", buffering=0) as stream:
            data = os.pread(stream.fileno(), end - begin, begin)
        if len(data) != end - begin or self.stat(path).tag != tag:
            raise ChangedError(f"{path}: bytes {begin}..{end}: {REPLACED}")
        return data


Reader = Client | LocalReader


def _tag_of(meta: Any) -> str:
    return meta["e_tag"] or f"modified {meta['last_modified'].isoformat()} {meta['size']}"


def store_of(
    root: str, options: Mapping[str, str], patience: Patience, retries: Mapping[str, Any] | None = None
) -> Any:
    """obstore's store of a root. retries: obstore's retry_config; None for none. Raises StoreError."""
    global _process
    _process = _process or os.getpid()
    if _process != os.getpid():
        raise StoreError(
            f"{root}: this process was forked from one that has used object storage, so requests would hang "
            f"here; start it with spawn"
        )
    try:
        from obstore.store import from_url
    except ImportError as missing:
        raise StoreError(f"{root}: remote storage needs obstore: {install('remote')}") from missing
    lower = {name.lower(): value for name, value in options.items()}
    authorization = lower.pop(AUTHORIZATION, None)
    given: Any = {name: value for name, value in lower.items() if _plain(name) not in _OF_CLIENT}
    endpoint = next((value for name, value in given.items() if "endpoint" in name), root)
    client: Any = {
        "timeout": f"{patience.timeout_s * 1e3:.0f}ms",
        "connect_timeout": f"{min(patience.timeout_s, 5.0) * 1e3:.0f}ms",
        "allow_http": endpoint.startswith("http://"),
    } | {_plain(name): value for name, value in lower.items() if _plain(name) in _OF_CLIENT}
    if authorization is not None:
        client["default_headers"] = {AUTHORIZATION: authorization}
    try:
        retry: Any = retries or {"max_retries": 0}
        return from_url(root, config=given or None, client_options=client, retry_config=retry)
    except BaseException as error:  # it panics on unknown options
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise StoreError(f"{root}: {reason(error)}; check the URL and the storage options") from error


_process: int | None = None
"""The process that has used obstore."""


def _plain(name: str) -> str:
    return name.removeprefix("aws_").removeprefix("azure_").removeprefix("google_")


_OF_CLIENT = (
    "allow_http",
    "allow_invalid_certificates",
    "connect_timeout",
    "timeout",
    "proxy_url",
    "user_agent",
)
