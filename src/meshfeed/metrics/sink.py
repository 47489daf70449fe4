"""What sinks of metrics are told: that a run starts, and what each of its steps has cost."""

from __future__ import annotations

import importlib.metadata
import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshfeed.layout import Layout

_NOTHING = nullcontext()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStart:
    """One rank begins a run.

    Attributes:
        step: the first that it will be handed.
        time_s: unix time.
        rank, world_size: which of how many.
        layout: text that `Layout.parse` takes; None where no text tells it all.
        coord: place of the rank by dimension.
        delivery: how its data comes.
        fingerprint: the recipe's; None where an iterator is the recipe.
        is_lowest: whether it is the lowest rank, which tells what is equal on all.
        sources: their names.
        host, pid: the process.
        meshfeed: the package's version; None where it is not installed.
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
        """A run that begins now, in this process."""
        text = str(layout)
        is_plain = layout.table is None and np.array_equal(Layout.parse(text).grid(), layout.grid())
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
            meshfeed=package_version(),
        )


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step as one rank was handed it, complete.

    Attributes:
        step: from 0.
        time_s: unix time at which the loop got it.
        tokens: of the global batch, without padding.
        stats: what it has cost; see `batch.Step`.
    """

    step: int
    time_s: float
    tokens: int
    stats: Mapping[str, Any]


class Sink:
    """Where metrics go; derive from it, or use those of this package. All methods do nothing here."""

    def take(self, entries: Sequence[RunStart | StepRecord]) -> None:
        """Some more of a run, in order: all of it, or an error and none of it.

        The first start is told on the thread of the training loop, before training: an error there ends the
        run. All the rest is told about once a second, on a thread that nobody waits for, and what ends in an
        error is told again with the next.
        """

    def stage(self, name: str) -> AbstractContextManager[Any]:
        """Entered around each stage of the producer, on its thread, and around each wait of the loop."""
        return _NOTHING

    def close(self) -> None:
        """Nothing more will come, unless another run starts."""


def package_version() -> str | None:
    """The version of meshfeed that is installed; None in a checkout that is not."""
    try:
        return importlib.metadata.version("meshfeed")
    except importlib.metadata.PackageNotFoundError:
        return None
