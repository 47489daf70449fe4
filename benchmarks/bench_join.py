"""How long the ranks of a job take to join, and to their first batch: 256 processes on one machine, through
one TCPStore.

Each connects to the store first, as torch.distributed does at a job's start. Then all begin at once, and a
round is over for the job when it is for its last rank. The limit is a barrier over the same store: to say
that one is here, and to wait until all are. A join is a run that all ranks begin together, up to its first
step. The first join of a process also starts its threads and its second connection; later ones find them. The
first batch is that of a process that has imported all, and opens the corpus, whose index the node has cached.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from queue import Queue

import measure
from measure import Row
from torch.distributed import TCPStore

import meshfeed as mf
from corpus import recipe_of, write_corpus

RANKS, ROUNDS, LONG, HOST = 256, 6, timedelta(minutes=10), "127.0.0.1"


def measured(short: bool) -> Iterator[Row]:
    """Each round: a barrier of the store, and a join of all ranks."""
    ranks, rounds = (8, 2) if short else (RANKS, ROUNDS)
    with tempfile.TemporaryDirectory() as folder:
        store = TCPStore(HOST, 0, None, True, timeout=LONG, wait_for_workers=False)
        write_corpus(Path(folder) / "text", num_tokens=200_000)
        path = f"{folder}/text"
        taken = list(measure.from_ranks(joining, ranks, ranks, ranks, store.port, rounds, path))
        first = {
            num: list(measure.from_ranks(first_batch, num, num, num, store.port, path))
            for num in (1, 8, 64, 256)
            if num <= ranks
        }
    barrier = [max(each[0][r] for each in taken) for r in range(rounds)]
    join = [max(each[1][r] for each in taken) for r in range(rounds)]
    limit = "a barrier through the same store"
    yield Row(name="joining of 256 ranks, the first loop", against=limit, value=join[0] / barrier[0])
    yield Row(
        name="joining of 256 ranks, later loops", against=limit, value=measure.ratio(join[1:], barrier[1:])
    )
    processor = statistics.median(sum(each[2][r] for each in taken) for r in range(1, rounds))
    yield Row(
        name="the ranks' processor time in a later join", value=1e3 * processor / ranks, unit="ms a rank"
    )
    for num, used in first.items():
        yield Row(
            name=f"a rank's processor time from its start to its first batch, {num} ranks",
            value=1e3 * statistics.median(used),
            unit="ms",
        )


def joining(
    rank: int,
    _: int,
    results: Queue[tuple[list[float], list[float], list[float]]],
    ranks: int,
    port: int,
    rounds: int,
    path: str,
) -> None:
    """Seconds of each barrier and each join of one rank, and of its processor in the joins."""
    os.environ["RES_OPTIONS"] = (
        "timeout:1 attempts:1"  # a resolver that is slow would be all that is measured
    )
    store = TCPStore(HOST, port, None, False, timeout=LONG)
    recipe = recipe_of(path, length=32, sequences=ranks)
    barriers: list[float] = []
    joins: list[float] = []
    processor: list[float] = []
    layout, timeout_s = mf.Layout(dp=ranks), LONG.total_seconds()
    with mf.Feed(recipe, layout, rank, transport=mf.Transport(rendezvous=store, timeout_s=timeout_s)) as feed:
        for r in range(rounds):
            gather(store, f"ready {r}", ranks)
            began = time.perf_counter()
            gather(store, f"barrier {r}", ranks)
            barriers.append(time.perf_counter() - began)
            gather(store, f"again {r}", ranks)
            began, used = time.perf_counter(), time.process_time()
            next(feed.run(0, layout=layout, rank=rank, generation=r, meet=True))
            joins.append(time.perf_counter() - began)
            processor.append(time.process_time() - used)
            gather(store, f"joined {r}", ranks)
    results.put((barriers, joins, processor))


def first_batch(rank: int, _: int, results: Queue[float], ranks: int, port: int, path: str) -> None:
    """Seconds of processor time of one rank, from its start to its first microbatch."""
    os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"
    store = TCPStore(HOST, port, None, False, timeout=LONG)
    recipe = recipe_of(path, length=32, sequences=ranks)
    layout, timeout_s = mf.Layout(dp=ranks), LONG.total_seconds()
    with mf.Feed(
        recipe,
        layout,
        rank,
        transport=mf.Transport(rendezvous=store, name=f"first {ranks}", timeout_s=timeout_s),
    ) as feed:
        for step in feed:
            next(step.microbatches)
            results.put(time.process_time())
            break
        gather(store, f"first {ranks}", ranks)


def gather(store: TCPStore, name: str, ranks: int) -> None:
    """Wait until all ranks are here."""
    if store.add(name, 1) == ranks:
        store.set(f"{name} all", "1")
    store.wait([f"{name} all"], LONG)


if __name__ == "__main__":
    measure.main(__doc__, measured)
