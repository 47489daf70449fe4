"""From opening a store to the first batch: a million tokens in a thousand documents, and a million
million in 15 million documents.

The large store is a sparse file of 2 TB with an index of 300 MB. Order is computed and the index is
mapped, so neither time nor memory should grow; each figure is taken in a process of its own, which has
imported everything (see `import`). The first start on a node copies the index and is not counted. A resume
at step 10**6 of the large store is a start like any other, and is measured beside them.
"""

from __future__ import annotations

import json
import re
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


def measured(short: bool) -> Iterator[Row]:
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
    else:
        measure.main(__doc__, measured)
