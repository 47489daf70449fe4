"""From opening a store to the first batch: a million tokens in a thousand documents, and a million
million in 15 million documents.

The large store is a sparse file of 2 TB with an index of 300 MB. Order is computed and the index is
mapped, so neither time nor memory should grow; each figure is taken in a process of its own, which has
imported everything (see `import`). The first start on a node copies the index and is not counted. A resume
at step 10**6 of the large store is a start like any other, and is measured beside them.

And what many files and processes cost: looks at the file system (strace) and requests for metadata (nginx) of
8 processes of a node for one pair that the node knows; 10,000 such pairs, opened and entered by 8 processes
at a time; the first batch of 10,000 remote shards of MDS.

Needs strace, nginx and mosaicml-streaming.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import measure
import numpy as np
from measure import Row

import meshfeed as mf
from meshfeed.store import Store

ROUNDS = 7
SMALL, LARGE = "10⁶ tokens in 1,000 documents", "10¹² tokens in 15M documents"
STORES = {SMALL: (10**6, 1000), LARGE: (10**12, 15_000_000)}
CASES = {SMALL: (SMALL, 0), LARGE: (LARGE, 0), f"{LARGE}, resumed": (LARGE, 10**6)}
NOISE = 1.1  # what should be 1
PROCESSES = 8


def measured(short: bool) -> Iterator[Row]:
    """All of it."""
    yield from of_stores(short)
    yield from of_nodes()
    yield from of_pairs(50 if short else 10_000)
    yield from of_shards(50 if short else 10_000)


def of_stores(short: bool) -> Iterator[Row]:
    """Time and memory of each start, and the size of a state."""
    with tempfile.TemporaryDirectory() as scratch:
        taken: dict[str, list[dict[str, float]]] = {name: [] for name in CASES}
        for at, (tokens, documents) in enumerate(STORES.values()):
            write_sparse(Path(scratch) / f"{at}", tokens, documents)
        for round_ in range(2 if short else 1 + ROUNDS):
            for name, (store, step) in CASES.items():
                prefix = str(Path(scratch) / f"{list(STORES).index(store)}")
                command = [sys.executable, __file__, "--first-batch", prefix, str(step)]
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                if round_:
                    taken[name].append(json.loads(done.stdout))
    small = taken.pop(SMALL)
    for name, runs in taken.items():
        for what, key in (("time to", "seconds"), ("peak memory until", "peak_bytes")):
            yield Row(
                name=f"{what} the first batch of {name}",
                against=SMALL,
                value=statistics.median(a[key] / b[key] for a, b in zip(runs, small, strict=True)),
                aim=NOISE,
            )
    yield Row(name="a state, as JSON", value=small[0]["state_bytes"], unit="bytes")


def of_nodes() -> Iterator[Row]:
    """What the processes of a node ask about a pair before they read it."""
    measure.needs("strace")
    measure.needs("nginx")
    from corpus import write_corpus
    from services.nginx import Nginx

    with tempfile.TemporaryDirectory() as scratch:
        (folder := Path(scratch) / "served").mkdir()
        write_corpus(folder / "pair", num_tokens=20_000)
        trace = Path(scratch) / "trace"
        run_node([f"{folder}/pair"], f"{scratch}/near")
        run_node([f"{folder}/pair"], f"{scratch}/near", "strace", "-f", "-e", "trace=%file", "-o", str(trace))
        looks = [
            line
            for line in trace.read_text().splitlines()
            if f"{folder}/pair." in line and "open" not in line
        ]
        yield Row(
            name=f"looks at the file system for a local pair, {PROCESSES} processes",
            value=len(looks),
            unit="",
            aim=3,
        )
        with Nginx(folder) as server:
            run_node([f"{server.url}/pair"], f"{scratch}/far")
            heads = [each for each in server.requests() if each.method == "HEAD"]
        yield Row(
            name=f"requests for metadata of a remote pair, {PROCESSES} processes",
            value=len(heads),
            unit="",
            aim=4,
        )


def of_pairs(count: int) -> Iterator[Row]:
    """A job of many sources, on a node that knows them."""
    from raw_index import write_raw

    with tempfile.TemporaryDirectory() as scratch:
        tokens = np.arange(64, dtype="<u2").tobytes()
        for i in range(count):
            write_raw(f"{scratch}/{i}", lengths=[64], pointers=[0], documents=[0, 1], data=tokens)
        pairs = [f"{scratch}/{i}" for i in range(count)]
        run_node(pairs, f"{scratch}/cache")
        seconds, used = run_node(pairs, f"{scratch}/cache")
    name = f"10,000 known pairs, {PROCESSES} processes open and enter them"
    yield Row(name=f"{name}: time", value=seconds, unit="s", aim=30)
    yield Row(name=f"{name}: CPU time of all", value=used, unit="s")


def of_shards(count: int) -> Iterator[Row]:
    """CPU time to the first batch from many remote shards, of a node that does not know them."""

    import mosaic
    from services.nginx import Nginx

    with tempfile.TemporaryDirectory() as scratch:
        samples = [{"tokens": np.full(64, i, np.uint16)} for i in range(10)]
        folder = mosaic.written(Path(scratch) / "mds", {"tokens": "ndarray:uint16"}, samples)
        index = json.loads((folder / "index.json").read_text())
        (shard,) = index["shards"]
        index["shards"] = []
        for i in range(count):
            os.link(folder / shard["raw_data"]["basename"], folder / f"{i}.mds")
            index["shards"].append(shard | {"raw_data": shard["raw_data"] | {"basename": f"{i}.mds"}})
        (folder / "index.json").write_text(json.dumps(index))
        with Nginx(folder) as server:
            command = [sys.executable, __file__, "--shards", server.url, f"{scratch}/cache"]
            used = float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    yield Row(name="CPU time to the first batch of 10,000 remote shards of MDS", value=used, unit="s")


def first_batch_of_shards(url: str, cache: str) -> float:
    """CPU seconds of this process and its fetcher."""
    from bench_stream import cpu_s

    take_first(mf.Lengths([100_000]), 0)
    before = cpu_s()
    take_first(mf.open(url, cache=cache), 0)
    return cpu_s() - before


def run_node(pairs: list[str], cache: str, *tracer: str) -> tuple[float, float]:
    """Seconds, and CPU seconds of all, that the processes of a node take to open and enter some pairs."""
    command = [*tracer, sys.executable, __file__, "--node", cache]
    done = subprocess.run(command, input="\n".join(pairs), check=True, stdout=subprocess.PIPE, text=True)
    seconds, used = json.loads(done.stdout)
    return seconds, used


def node(cache: str, pairs: list[str]) -> tuple[float, float]:
    """Be the parent of these processes; see `run_node`."""
    take_first(mf.Lengths([100_000]), 0)  # imports what they need
    fork = multiprocessing.get_context("fork")
    meet = fork.Barrier(PROCESSES + 1)

    def rank() -> None:
        meet.wait()
        stores = [mf.open(pair, cache=cache) for pair in pairs]
        meet.wait()
        with contextlib.ExitStack() as stack:
            for store in stores:
                stack.enter_context(store)
            stores[0].read(0, 0, 1)
            meet.wait()

    ranks = [fork.Process(target=rank) for _ in range(PROCESSES)]
    for each in ranks:
        each.start()
    time.sleep(0.1)  # as in a job, they have begun long before they open anything
    meet.wait()
    began = time.perf_counter()
    meet.wait()
    meet.wait()
    seconds = time.perf_counter() - began
    for each in ranks:
        each.join()
    if any(each.exitcode for each in ranks):
        raise SystemExit("a process failed; its error is above")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, used.ru_utime + used.ru_stime


def write_sparse(prefix: Path, tokens: int, documents: int) -> None:
    """A store of documents that differ by a token at most; all tokens are zero and take no disk space."""
    lengths = np.full(documents, tokens // documents, np.int64)
    lengths[: tokens % documents] += 1
    ends = np.cumsum(lengths)
    header = b"MMIDIDX\0\0" + np.array([1], "<u8").tobytes() + bytes([8])
    counts = np.array([documents, documents + 1], "<u8").tobytes()
    arrays = lengths.astype("<i4").tobytes() + (2 * (ends - lengths)).astype("<i8").tobytes()
    numbers = np.arange(documents + 1, dtype="<i8").tobytes()
    Path(f"{prefix}.idx").write_bytes(header + counts + arrays + numbers)
    with Path(f"{prefix}.bin").open("wb") as data:
        data.truncate(2 * int(lengths.sum()))


def first_batch(prefix: str, step: int) -> dict[str, float]:
    """Open, and take the first microbatch of a step; seconds and bytes."""
    take_first(mf.Lengths([100_000]), 0)  # imports what a first batch needs
    began = time.perf_counter()
    state = take_first(mf.open(prefix), step)
    seconds = time.perf_counter() - began
    own_peak = re.search(
        r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text()
    )  # getrusage has the parent's
    assert own_peak is not None
    return {"seconds": seconds, "peak_bytes": int(own_peak[1]) * 1024, "state_bytes": len(json.dumps(state))}


def take_first(data: Store, step: int) -> dict[str, Any]:
    """Take the first microbatch of a step; the state then."""
    recipe = mf.Recipe(data=data, sequence=mf.Windows(4096), batch=mf.Batch(sequences=8))
    with mf.Feed(recipe) as feed:
        feed.load_state_dict(mf.State(recipe=recipe.summary(), step=step).to_json())
        next(next(iter(feed)).microbatches)
        return feed.state_dict()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--first-batch"]:
        print(json.dumps(first_batch(sys.argv[2], int(sys.argv[3]))))
    elif sys.argv[1:2] == ["--shards"]:
        print(first_batch_of_shards(*sys.argv[2:4]), flush=True)
        os._exit(0)  # shards that are being opened ahead are of no interest
    elif sys.argv[1:2] == ["--node"]:
        print(json.dumps(node(sys.argv[2], sys.stdin.read().split("\n"))))
    else:
        measure.main(__doc__, measured)
