"""Requests to storage: retries, hedging, and counters.

A request that takes far longer than similar recent ones is sent again on another thread, and the first good
answer counts (hedging; Dean and Barroso, "The Tail at Scale", 2013). Transient failures are retried after a
random pause that doubles, or when the server asks. If requests time out together, fewer are sent at a time.
A permanent failure raises one of the errors of `meshfeed.errors`.
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from dataclasses import dataclass
from typing import Any, TypeVar

from meshfeed.errors import StoreError, UnavailableError
from meshfeed.files.url import without_secrets
from meshfeed.remote.errors import has_no_names, is_unknown_host, kind_of, reason

T = TypeVar("T")

_log = logging.getLogger("meshfeed")

GIVE_UP = "give_up_s"
"""Storage option: `Patience.give_up_s`."""

_THREADS = 48
_RECENT = 64  # requests whose times define what is slow
_ENOUGH = 8
_SLOW = 3.0  # times the ninth decile
_MIN_SLOW_S = 0.25
_HEDGED_SHARE, _HEDGED_BYTES = 0.015, 128 << 10  # share of the bytes fetched, and an initial allowance
_UNKNOWN = 3  # attempts at a host whose name is unknown, and that never answered: no network, or a wrong URL
_NAMELESS_S = 15.0  # how long a name service may not answer, for a host that never answered
_LATE = 0.9  # share of a time limit after which a failure counts as running into it
_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 10.0
_MOST_ASKED_S = 3600.0  # how long servers may ask a request to wait, on top of its own time limit


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
        timeout_s: of each wait for an answer or for more of its body.
        give_up_s: of all attempts of a request together.
        attempts: the most attempts; None for as many as fit into that time.
        hedge: whether slow requests are sent a second time.
    """

    timeout_s: float = 30.0
    give_up_s: float = 180.0
    attempts: int | None = None
    hedge: bool = True

    @classmethod
    def of(cls, options: Mapping[str, str]) -> Patience:
        """From storage options, see GIVE_UP. Raises StoreError for invalid text."""
        usual = cls()
        if GIVE_UP not in options:
            return usual
        try:
            give_up_s = float(options[GIVE_UP])
        except ValueError:
            give_up_s = math.nan
        if not 0 < give_up_s < math.inf:
            raise StoreError(f"option {GIVE_UP}={options[GIVE_UP]!r}: give seconds above 0")
        return cls(timeout_s=min(usual.timeout_s, give_up_s), give_up_s=give_up_s)


class Line:
    """How many requests to a storage root may be in flight. Threads share one.

    Any number, until a request runs into its time limit beside others. They slow each other down, so from
    then on half as many may be in flight. Each time that many are answered, it grows by one.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._most = math.inf
        self._num_flying = 0
        self._lowered_s = self._answered_s = -math.inf

    @property
    def has_answered(self) -> bool:
        return self._answered_s > -math.inf

    def enter(self, most_s: float) -> float:
        """Wait for a turn, but at most most_s without an answer to any request.

        Returns the seconds until the last such answer: storage was not failing then.
        """
        with self._changed:
            began = time.monotonic()
            while self._num_flying >= self._most:
                rest_s = max(self._answered_s, began) + most_s - time.monotonic()
                if rest_s <= 0:
                    break
                self._changed.wait(rest_s)
            self._num_flying += 1
            return max(self._answered_s - began, 0.0)

    def leave(self, began_s: float, *, is_answered: bool, is_late: bool) -> None:
        """A request is over. is_late: it ran into its time limit."""
        with self._changed:
            if is_answered:
                self._answered_s = time.monotonic()
                self._most = math.inf if self._most > _THREADS else self._most + 1 / self._most
            elif is_late and self._num_flying > 1 and began_s > self._lowered_s:  # once for all in flight
                self._lowered_s = time.monotonic()
                self._most = max(self._num_flying // 2, 1)
            self._num_flying -= 1
            self._changed.notify_all()


@dataclass(slots=True)
class Counts:
    """Counters: requests, how many of them were hedges or retries, and bytes received."""

    requests: int = 0
    hedges: int = 0
    hedges_won: int = 0
    hedged_bytes: int = 0
    retries: int = 0
    bytes_fetched: int = 0


class Retries:
    """Sends requests to one storage root. Threads share one.

    Args:
        root: as messages name it.
        patience: timeouts and retries.
    """

    def __init__(self, root: str, patience: Patience) -> None:
        self._root, self._patience = root, patience
        self.counts = Counts()
        self._line = Line()
        self._recent = defaultdict[int, deque[float]](lambda: deque(maxlen=_RECENT))
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="meshfeed-client")

    def close(self) -> None:
        """Start no further requests."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _read(self, get: Callable[[str], Any], path: str, begin: int, end: int) -> Any:
        """Exactly the bytes [begin, end) from `get`, as a buffer; hedged and retried.

        get: sends one request. Its argument names the range, for errors.
        """
        where = f"{self._name(path)}: bytes {begin}..{end}"

        def whole() -> Any:
            body = get(where)
            if len(body) != end - begin:
                raise ConnectionError(f"received {len(body)} of {end - begin} bytes")
            with self._lock:
                self.counts.bytes_fetched += len(body)
            return body

        return self._retry(lambda: self._hedged(whole, end - begin), path, where)

    def _retry(self, ask: Callable[[], T], path: str, where: str) -> T:
        """Call `ask` until it answers, fails for good, or time is up."""
        began, pause_s, attempt, waited_s = time.monotonic(), _PAUSE_S, 0, 0.0
        while True:
            attempt += 1
            # a server that asks to wait, this process or another, is not failing: that time does not count
            rested_s = self._wait()
            began, waited_s = began + rested_s, waited_s + rested_s
            began += self._line.enter(self._patience.give_up_s - (time.monotonic() - began))
            with self._lock:
                self.counts.requests += 1
                self.counts.retries += attempt > 1
            try:
                return self._in_line(ask)
            except StoreError:
                raise
            except Exception as error:
                self._refuse(error, path, where)
                asked_s = min(self._asked_to_wait_s(error), max(_MOST_ASKED_S - waited_s, 0))
                began, waited_s = began + asked_s, waited_s + asked_s
                pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)
                rest_s = self._patience.give_up_s - (time.monotonic() - began) - pause_s
                if attempt > 1:
                    _log.warning("%s: attempt %d failed: %s", where, attempt, reason(error))
                is_unknown = is_unknown_host(error) and attempt >= _UNKNOWN
                is_unknown |= has_no_names(error) and time.monotonic() - began >= _NAMELESS_S
                is_lost = is_unknown and not self._line.has_answered
                if is_lost or attempt == self._patience.attempts or rest_s < 0:
                    raise UnavailableError(
                        f"{where}: failed {attempt} times in {time.monotonic() - began:.0f} s, last: "
                        f"{reason(error)}; check the URL, the network and the storage service"
                    ) from error
                time.sleep(max(asked_s, random.uniform(pause_s / 2, pause_s)))

    def _in_line(self, ask: Callable[[], T]) -> T:
        """Call `ask` when `Line` allows it."""
        began, is_answered, is_late = time.monotonic(), False, False
        try:
            answer = ask()
            is_answered = True
            return answer
        except StoreError:
            is_answered = True
            raise
        except Exception:
            is_late = time.monotonic() - began > _LATE * self._patience.timeout_s
            raise
        finally:
            self._line.leave(began, is_answered=is_answered, is_late=is_late)

    def _wait(self) -> float:
        """Wait for as long as the server has asked others to; returns the seconds."""
        return 0.0

    def _refuse(self, error: Exception, path: str, where: str) -> None:
        """Raise permanent errors; return for transient ones."""
        kind = kind_of(error, path)
        if kind is not None:
            raise kind(f"{where}: {reason(error, path)}") from error

    def _asked_to_wait_s(self, error: Exception) -> float:
        """How long the server has asked to wait; 0 if it has not."""
        return 0.0

    def _hedged(self, ask: Callable[[], T], num_bytes: int) -> T:
        """The answer to a request; if it is slow for its size, the first answer of two requests."""
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
        """Whether a body may be requested twice: hedging adds at most two percent of bytes."""
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
