"""How long a rank stops when others are lost or come back: `Feed.at` and `Feed.run`.

A pause is from the call to the first microbatch in the new place. For `run` it is less the meeting: what
the call and the next loop wait for other ranks. It comes while the model trains, when a rank has read ahead.
Packed documents, 8,192 tokens a microbatch, from local files that are in memory, as those of a running job
are; all defaults.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import measure
import torch.distributed as dist
from measure import Row

import meshfeed as mf
from corpus import write_corpus
from meshfeed.deliver import Meeting
from meshfeed.feed.run import Run

MOVES = 200
PLACES = ("dp4", "dp3", "dp2", "tp2-dp2", "cp2-dp2", "pp2-dp2", "dp6", "dp8")
OF_TWO = ("dp2", "tp2", "cp2", "pp2")
PACKING = mf.Packing(capacity=8192)
LONGEST_MS = 50.0


def measured(short: bool) -> Iterator[Row]:
    """Pauses of a rank that is told its place, and of two that meet, each on a core of its own."""
    moves = 6 if short else MOVES
    with tempfile.TemporaryDirectory() as scratch:
        path = str(Path(scratch) / "c")
        write_corpus(Path(path), num_tokens=8_000_000, mean=600)
        pauses, dropped = told(path, moves)
        yield from _rows("feed.at", pauses)
        yield Row(
            name="feed.at: bytes read ahead and dropped",
            against="what the rank reads in a step",
            value=dropped,
        )
        seen = [*measure.from_ranks(regroups, 2, 2, path, moves)]
    by_move = [max(of_ranks) for of_ranks in zip(*(pauses for pauses, _ in seen), strict=True)]
    yield from _rows("feed.run, without the meeting", by_move)
    meetings = [max(of_ranks) for of_ranks in zip(*(meetings for _, meetings in seen), strict=True)]
    yield Row(name="the meeting of two processes", value=1e3 * statistics.median(meetings), unit="ms")


def _rows(what: str, pauses: list[float]) -> Iterator[Row]:
    longest = sorted(pauses)[-max(1, len(pauses) // 100)]
    yield Row(name=f"{what}: median pause", value=1e3 * statistics.median(pauses), unit="ms", aim=LONGEST_MS)
    yield Row(name=f"{what}: 99 of 100 pauses", value=1e3 * longest, unit="ms", aim=LONGEST_MS)


def recipe_of(path: str) -> mf.Recipe:
    """256 documents a step, some 150,000 tokens."""
    return mf.Recipe(data=mf.open(path), sequence=mf.Documents(), batch=mf.Batch(256))


def told(path: str, moves: int) -> tuple[list[float], float]:
    """Seconds of each move of a rank by `Feed.at`, and bytes that were read in vain over those of a step."""
    dice, pauses, recipe = random.Random(0), list[float](), recipe_of(path)
    taken, steps, step = 0.0, 0, 0
    with mf.Feed(recipe, packing=PACKING, transport=mf.Transport(delivery="direct")) as feed:
        for _ in range(moves):
            layout = mf.Layout.parse(dice.choice(PLACES))
            rank = dice.randrange(layout.world_size)
            for number in range(3):
                began = time.perf_counter()
                given = feed.at(step, layout, rank)
                next(given.microbatches)
                if number == 0:
                    pauses.append(time.perf_counter() - began)
                for _ in given.microbatches:
                    pass
                taken += given.stats.bytes_read
                if number == 2:
                    _train(feed)
                step, steps = step + 1, steps + 1
        store: Any = recipe.sources[0]
        feed.close()
        return pauses, (store.stats.bytes_read - taken) / moves / (taken / steps)


def regroups(rank: int, port: int, results: Any, path: str, moves: int) -> None:
    """Seconds of each move of a rank, without the meeting, and of the meeting."""
    store = dist.TCPStore("127.0.0.1", port, None, rank == 0, wait_for_workers=False)
    met = [0.0]
    Meeting.meet = _timed(Meeting.meet, met)
    Run.start = _timed(Run.start, met)
    dice, pauses, meetings, first = random.Random(0), list[float](), list[float](), 0
    with mf.Feed(recipe_of(path), packing=PACKING) as feed:
        for generation in range(moves):
            layout, met[0] = mf.Layout.parse(dice.choice(OF_TWO)), 0.0
            began = time.perf_counter()
            place: Any = {"layout": layout, "rank": rank, "generation": generation, "rendezvous": store}
            run = feed.run(first, **place, meet=True)
            for step in run:
                if step.index == run.step:
                    next(step.microbatches)
                    pauses.append(time.perf_counter() - began - met[0])
                    meetings.append(met[0])
                for _ in step.microbatches:
                    pass
                first = step.index + 1
                if step.index == run.step + 2:
                    _train(feed)
                    break
        results.put((pauses, meetings))
        store.add("done", 1)
        while rank == 0 and store.add("done", 0) < 2:
            time.sleep(0.01)


def _train(feed: mf.Feed) -> None:
    """Take as long as a trainer does, at least: until the feed has read ahead."""
    while feed._loop.on._prefetcher.num_ready < 2:
        time.sleep(0.001)


def _timed(call: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    """The same, with its time added up."""

    def timed(*args: Any, **options: Any) -> Any:
        began = time.perf_counter()
        try:
            return call(*args, **options)
        finally:
            seconds[0] += time.perf_counter() - began

    return timed


if __name__ == "__main__":
    measure.main(__doc__, measured)
