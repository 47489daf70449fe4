"""The interface of metrics sinks, and their records: the start of a run, and the costs of each step."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from meshfeed.extras import version_of
from meshfeed.layout import Layout
from meshfeed.metrics.stages import Span
from meshfeed.metrics.stats import StepStats

_NOTHING = nullcontext()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStart:
    """One rank begins a run.

    Attributes:
        step: its first step.
        time_s: unix time.
        rank, world_size: of the job.
        layout: text for `Layout.parse`; None if a table arranges the ranks.
        coord: coordinate of the rank by dimension.
        delivery: name of the delivery.
        fingerprint: the recipe's; None for an Exchange.
        is_lowest: whether it is the lowest rank, which reports values that are equal on all ranks.
        sources: their names.
        host, pid: the process.
        meshfeed: the package's version; None if it is not installed.
        decode_workers: processes of each reader that decode images, audio and video; 0 if the reader itself
            does, None if its rule decodes nothing.
        edges: what the recipe begins anew, in words -> steps from one beginning to the next; see
            `edges.edges_of`.
        comes_and_goes: whether processes get their ranks while they run, and other ones later.
    """

    step: int
    time_s: float
    rank: int
    world_size: int
    layout: str | None
    coord: Mapping[str, int]
    delivery: str
    fingerprint: str | None
    is_lowest: bool
    sources: tuple[str, ...]
    host: str
    pid: int
    meshfeed: str | None
    decode_workers: int | None = None
    edges: Mapping[str, float] = field(default_factory=dict[str, float])
    comes_and_goes: bool = False

    @classmethod
    def here(
        cls,
        step: int,
        layout: Layout,
        rank: int,
        delivery: str,
        fingerprint: str | None = None,
        sources: Sequence[str] = (),
    ) -> RunStart:
        """A run that begins now, in this process; what has a default keeps it."""
        text = str(layout)
        plain = Layout.parse(text)
        ranks = plain.ranks()
        is_plain = np.array_equal(ranks, layout.ranks()) and np.array_equal(
            plain.coords(), layout.coords(ranks)
        )
        return cls(
            step=step,
            time_s=time.time(),
            rank=rank,
            world_size=layout.world_size,
            layout=text if is_plain else None,
            coord=layout.coord(rank)._asdict(),
            delivery=delivery,
            fingerprint=fingerprint,
            is_lowest=rank == int(layout.ranks().min()),
            sources=tuple(sources),
            host=socket.gethostname(),
            pid=os.getpid(),
            meshfeed=version_of("meshfeed"),
        )


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One complete step of one rank.

    Attributes:
        step: from 0.
        time_s: unix time at which the loop asked for it.
        tokens: of the global batch, without padding.
        stats: its costs.
    """

    step: int
    time_s: float
    tokens: int
    stats: StepStats


def by_runs(entries: Sequence[RunStart | StepRecord]) -> Iterator[Sequence[RunStart | StepRecord]]:
    """The records of one run after the other, each with its start if that is among them."""
    firsts = [at for at, entry in enumerate(entries) if not at or isinstance(entry, RunStart)]
    return (entries[first:stop] for first, stop in pairwise([*firsts, len(entries)]))


class Sink:
    """Receives metrics. Subclass it, or use one of this package's sinks. Here all methods do nothing."""

    def take(self, entries: Sequence[RunStart | StepRecord]) -> None:
        """Take more records of a run, in order: all of them, or raise an error and take none.

        A start is the first of them, and begins another run, in which this process may have another rank.
        The first start is passed on the thread of the training loop, before training; an error there ends the
        run. Later records come about once a second on a background thread. After an error they are passed
        again with the next ones.
        """

    def stage(self, name: str) -> AbstractContextManager[Any]:
        """Entered around each stage of the producer, on its thread, and around each wait of the loop."""
        return _NOTHING

    def waited(self, start: float, stop: float, spans: Sequence[Span]) -> None:
        """Called on the loop's thread after each of its waits, from `start` to `stop` of `time.monotonic`.

        spans: stages of the producer since the last wait; parts of them lie before this one. An error is
        logged, and the sink is told of no further wait.
        """

    def close(self) -> None:
        """No more records follow, unless another run starts."""
