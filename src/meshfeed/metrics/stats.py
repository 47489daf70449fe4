"""The costs of one step on one rank: what a step offers as `stats`, and the counters and sums behind it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from meshfeed.deliver import Traffic
from meshfeed.metrics.clock import Span, exposed_wait, work

COUNTERS = ("bytes_read", "bytes_fetched", "opens", "collectives", "delivered_bytes")
"""The counters of every microbatch, summed in a step's stats."""

SequenceName = tuple[int, int, int]
"""(source, epoch, index) of a sequence."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepStats(Mapping[str, Any]):
    """What a step cost this rank so far, and how balanced its plan is.

    Also a mapping by name, without the values that are None: `stats["bytes_read"]`.

    Attributes:
        exposed_wait_s: seconds that the loop waited, by stage. Stages are start (joining the peers), plan (of
            a later step), read (storage, or a user's iterator), exchange, deliver (including waits for
            peers), build, copy, verify and other.
        work_s: seconds that the producer worked, by stage.
        queue_depth: reads that were ready, of at most `prefetch`, when the loop asked for the step.
        bytes_read: from storage.
        bytes_fetched: from remote storage, by this process.
        opens: data files opened.
        collectives: collectives called.
        delivered_bytes: sent or received.
        efficiency, objective_over_bound, max_over_mean, padding: of the global batch's packs; see `Account`.
            None without packing, as are the next two.
        oversize, empty: the sequences that were too long, and those without tokens.
        source_drawn, source_epochs: sequences of each source up to this step, and the same in epochs; arrays.
            None for a single source, as is the next.
        source_asked: the recipe's share of each source in this step; an array.
        metrics_lost: steps that a metrics sink has failed to take so far; None without sinks.
    """

    exposed_wait_s: Mapping[str, float] = field(default_factory=dict[str, float])
    work_s: Mapping[str, float] = field(default_factory=dict[str, float])
    queue_depth: int = 0
    bytes_read: int = 0
    bytes_fetched: int = 0
    opens: int = 0
    collectives: int = 0
    delivered_bytes: int = 0
    efficiency: float | None = None
    objective_over_bound: float | None = None
    max_over_mean: float | None = None
    padding: float | None = None
    oversize: Sequence[SequenceName] | None = None
    empty: Sequence[SequenceName] | None = None
    source_drawn: npt.NDArray[np.int64] | None = None
    source_epochs: npt.NDArray[np.float64] | None = None
    source_asked: npt.NDArray[np.float64] | None = None
    metrics_lost: int | None = None

    def __getitem__(self, name: str) -> Any:
        value = getattr(self, name) if name in _NAMES else None
        if value is None:
            raise KeyError(name)
        return value

    def __iter__(self) -> Iterator[str]:
        return (name for name in _NAMES if getattr(self, name) is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)


_NAMES = tuple(each.name for each in fields(StepStats))


class StepCosts:
    """Adds up what a step costs. planned: what its plan says already."""

    def __init__(self, planned: StepStats) -> None:
        self._planned = planned
        self._wait: dict[str, float] = {}
        self._work: dict[str, float] = {}
        self._counts: dict[str, int] = dict.fromkeys(COUNTERS, 0)

    def begin(self, queue_depth: int, metrics_lost: int | None) -> None:
        """The loop receives the step."""
        self._planned = replace(self._planned, queue_depth=queue_depth, metrics_lost=metrics_lost)

    def waited(self, start: float, stop: float, spans: Sequence[Span]) -> None:
        """The loop asked for something at `start` and got it at `stop`. spans: how it was made."""
        _add(self._wait, exposed_wait(start, stop, spans))
        _add(self._work, work(spans))

    def counted(self, counts: Mapping[str, int]) -> None:
        """Add counters."""
        _add(self._counts, counts)

    @property
    def stats(self) -> StepStats:
        """The costs so far."""
        return replace(
            self._planned, exposed_wait_s=dict(self._wait), work_s=dict(self._work), **self._counts
        )


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
        bytes_read = bytes_fetched = opens = collectives = delivered_bytes = 0
        for source in self._sources:
            stats = source.stats
            bytes_read += stats.bytes_read
            bytes_fetched += stats.bytes_fetched
            opens += stats.opens
        for traffic in self._traffic:
            collectives += traffic.collectives
            delivered_bytes += traffic.num_bytes
        return bytes_read, bytes_fetched, opens, collectives, delivered_bytes


def _add(sums: dict[str, Any], more: Mapping[str, float]) -> None:
    for name, amount in more.items():
        sums[name] = sums.get(name, 0) + amount
