"""Counters of data read and delivered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshfeed.deliver import Traffic

COUNTERS = ("bytes_read", "bytes_fetched", "opens", "collectives", "delivered_bytes")
"""The counters of every microbatch, summed in a step's stats."""


class Meter:
    """Counts data read and delivered, from one `take` to the next."""

    def __init__(self, sources: Sequence[Any], *traffic: Traffic) -> None:
        self._sources, self._traffic = sources, traffic
        self._before = self._now()

    def take(self) -> dict[str, int]:
        """The counts since the last call."""
        before, self._before = self._before, self._now()
        return {name: now - then for name, now, then in zip(COUNTERS, self._before, before)}

    def _now(self) -> tuple[int, ...]:
        stores = [source.stats for source in self._sources]
        return (
            sum(stats.bytes_read for stats in stores),
            sum(stats.bytes_fetched for stats in stores),
            sum(stats.opens for stats in stores),
            sum(traffic.collectives for traffic in self._traffic),
            sum(traffic.num_bytes for traffic in self._traffic),
        )
