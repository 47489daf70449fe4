"""How much is asked of storage ahead of time: as much as it carries, and no more.

What is fetched ahead must not stand in the way of what is needed now. So requests ahead are few while each
more of them only makes the others slower, and many while it does not (after TCP Vegas; Brakmo and Peterson,
1995). And each is as long as storage delivers in about a second, for a block to come soon after it is asked.
"""

from __future__ import annotations

_MOST_AT_ONCE = 24.0
_SLOWED = 1.5  # a byte takes so many times what it took at best: others are in the way
_FORGET = 1.02  # what was best fades, for storage changes
_GROWTH, _RETREAT = 0.5, 0.8
_RANGE_S = 1.0
_WEIGHT = 0.3


class Pace:
    """Learns from every request; not thread-safe.

    Attributes:
        at_once: how many requests ahead may be under way.
        range_bytes: how long a request may be; 0 where nothing is known yet, and a block is enough.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._window = 2.0
        self._latency_s = self._best_s = float("inf")
        self._bytes_per_s = 0.0

    @property
    def at_once(self) -> int:
        """See the class."""
        return int(self._window)

    @property
    def range_bytes(self) -> int:
        """See the class."""
        return int(min(self._bytes_per_s * _RANGE_S, self._most_bytes))

    def learn(self, num_bytes: int, seconds: float) -> None:
        """A request has brought so many bytes in so many seconds."""
        if num_bytes <= 0 or seconds <= 0:
            return
        self._latency_s = min(self._latency_s * _FORGET, seconds)
        # the shortest request seen stands for the time that one takes whatever its size
        per_byte_s = max(seconds - self._latency_s, seconds / 100) / num_bytes
        slowed = per_byte_s > _SLOWED * self._best_s
        self._best_s = min(self._best_s * _FORGET, per_byte_s)
        self._window = self._window * _RETREAT if slowed else self._window + _GROWTH
        self._window = min(max(self._window, 1.0), _MOST_AT_ONCE)
        rate = num_bytes / seconds
        self._bytes_per_s = (
            rate if not self._bytes_per_s else (1 - _WEIGHT) * self._bytes_per_s + _WEIGHT * rate
        )
