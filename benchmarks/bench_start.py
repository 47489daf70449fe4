"""From opening a store to the first batch: a million tokens against a million million.

The large store is a sparse file of 2 TB. Order is computed and the index is mapped, so neither time nor
memory should grow; each figure is taken in a process of its own. A resume at step 10**6 of the large store
is a start like any other, and is measured beside them.

    python benchmarks/bench_start.py
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import meshfeed as mf

DOCUMENTS = 1000
ROUNDS = 7
CASES = {"10^6 tokens": (10**6, 0), "10^12 tokens": (10**12, 0), "10^12 tokens, resumed": (10**12, 10**6)}


def main() -> None:
    """Run and print."""
    with tempfile.TemporaryDirectory() as scratch:
        measured: dict[str, list[dict[str, float]]] = {name: [] for name in CASES}
        for name, (tokens, _) in CASES.items():
            write_sparse(Path(scratch) / name.split()[0], tokens)
        for _ in range(ROUNDS):
            for name, (_, step) in CASES.items():
                command = [sys.executable, __file__, str(Path(scratch) / name.split()[0]), str(step)]
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                measured[name].append(json.loads(done.stdout))
    for name, runs in measured.items():
        milliseconds = statistics.median(run["seconds"] for run in runs) * 1e3
        mebibytes = statistics.median(run["grown_bytes"] for run in runs) / 2**20
        print(f"{name:24} first batch after {milliseconds:6.2f} ms, memory grown by {mebibytes:.2f} MiB")
    small = measured["10^6 tokens"]
    for name in [name for name in CASES if name != "10^6 tokens"]:
        pairs = list(zip(measured[name], small))
        slower = statistics.median(a["seconds"] / b["seconds"] for a, b in pairs)
        peak = statistics.median(a["peak_bytes"] / b["peak_bytes"] for a, b in pairs)
        print(f"{name} : 10^6 tokens: time {slower:.2f}, peak memory {peak:.3f} (aim: 1 within noise)")


def write_sparse(prefix: Path, tokens: int) -> None:
    """A store of equal documents whose tokens are all zero, and take no room on the disk."""
    lengths = np.full(DOCUMENTS, tokens // DOCUMENTS, np.int64)
    pointers = np.concatenate(([0], np.cumsum(lengths)[:-1])) * 2
    header = b"MMIDIDX\0\0" + np.array([1], "<u8").tobytes() + bytes([8])
    counts = np.array([DOCUMENTS, DOCUMENTS + 1], "<u8").tobytes()
    arrays = lengths.astype("<i4").tobytes() + pointers.astype("<i8").tobytes()
    documents = np.arange(DOCUMENTS + 1, dtype="<i8").tobytes()
    Path(f"{prefix}.idx").write_bytes(header + counts + arrays + documents)
    with Path(f"{prefix}.bin").open("wb") as data:
        data.truncate(2 * int(lengths.sum()))


def first_batch(prefix: str, step: int) -> dict[str, float]:
    """Open, and take the first microbatch of a step; seconds and bytes."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    recipe = mf.Recipe(data=mf.open(prefix), sequence=mf.Windows(4096), batch=mf.Batch(sequences=8))
    with mf.Feed(recipe) as feed:
        feed.load_state_dict(mf.State(recipe=recipe.summary(), step=step).to_json())
        next(next(iter(feed)).microbatches)
        seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"seconds": seconds, "grown_bytes": (peak - before) * 1024, "peak_bytes": peak * 1024}


if __name__ == "__main__":
    if len(sys.argv) == 3:
        print(json.dumps(first_batch(sys.argv[1], int(sys.argv[2]))))
    else:
        main()
