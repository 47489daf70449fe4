"""Congestion control: how many requests to send ahead of time.

Fetching ahead must not delay what is needed now. So the number of requests ahead shrinks while more of them
only slow the others down, and grows otherwise (after TCP Vegas; Brakmo and Peterson, 1995). Each asks
for what storage delivers in about a second, so that a block arrives soon after it is requested.
"""

from __future__ import annotations

_MAX_REQUESTS = 24.0
_SLOWED = 1.5  # if a byte takes this many times the best time, requests slow each other down
_FORGET = 1.02  # the best time grows slowly, since storage changes
_GROWTH, _RETREAT = 0.5, 0.8
_RANGE_S = 1.0
_WEIGHT = 0.3


class Pace:
    """Learns from every request; not thread-safe.

    Attributes:
        at_once: how many requests ahead may be in flight.
        range_bytes: how large a request may be; 0 while unknown, which means one block.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._window = 2.0
        self._latency_s = self._best_s = float("inf")
        self._bytes_per_s = 0.0

    @property
    def at_once(self) -> int:
        return int(self._window)

    @property
    def range_bytes(self) -> int:
        return int(min(self._bytes_per_s * _RANGE_S, self._most_bytes))

    def learn(self, num_bytes: int, seconds: float) -> None:
        if num_bytes <= 0 or seconds <= 0:
            return
        self._latency_s = min(self._latency_s * _FORGET, seconds)
        # the shortest request seen estimates the fixed time of a request
        per_byte_s = max(seconds - self._latency_s, seconds / 100) / num_bytes
        slowed = per_byte_s > _SLOWED * self._best_s
        self._best_s = min(self._best_s * _FORGET, per_byte_s)
        self._window = self._window * _RETREAT if slowed else self._window + _GROWTH
        self._window = min(max(self._window, 1.0), _MAX_REQUESTS)
        rate = num_bytes / seconds
        self._bytes_per_s = (
            rate if not self._bytes_per_s else (1 - _WEIGHT) * self._bytes_per_s + _WEIGHT * rate
        )
