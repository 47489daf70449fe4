"""A cache of answers, each computed once however many threads ask."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Once(Generic[T]):
    """Answers by key. One thread computes an answer while the others wait; answers expire.

    kept_s: how long an answer is valid. most: the number of answers kept.
    """

    def __init__(self, kept_s: float = float("inf"), most: int = 4096) -> None:
        self._kept_s, self._most = kept_s, most
        self._known: OrderedDict[Hashable, tuple[float, Future[T]]] = OrderedDict()
        self._lock = threading.Lock()

    def answer(self, key: Hashable, ask: Callable[[], T]) -> T:
        """The result of `ask` for a key. Raises its errors, which are not kept: a later call asks again."""
        now, mine = time.monotonic(), Future[T]()
        with self._lock:
            asked, future = self._known.get(key, (now, mine))
            if future.done() and now - asked > self._kept_s:
                future = mine
            if future is mine:
                self._known[key] = now, mine
                if len(self._known) > self._most:
                    self._known.popitem(last=False)
        if future is mine:
            try:
                mine.set_result(ask())
            except BaseException as error:
                self.forget(lambda other: other == key)
                mine.set_exception(error)
        return future.result()

    def forget(self, which: Callable[[Any], bool] = lambda key: True) -> None:
        """Drop the answers of some keys, or of all."""
        with self._lock:
            for key in [key for key in self._known if which(key)]:
                del self._known[key]
