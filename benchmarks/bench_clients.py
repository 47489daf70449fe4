"""Storage clients: obstore against fsspec, ranges of one object over HTTP from one nginx.

Both keep 16 requests in flight: obstore from threads, as a fetcher does,
fsspec by `cat_ranges` of its HTTP file system (aiohttp). Blocks of 4 MiB, as the node's cache fetches them,
and ranges of 64 KiB, as single documents are. Rates per second, and per second of CPU time in this process.
Needs nginx.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import measure
import numpy as np
from measure import Row

IN_FLIGHT, ROUNDS = 16, 5
Ranges = Sequence[tuple[int, int]]


def measured(short: bool) -> Iterator[Row]:
    """Both sizes of range."""
    measure.needs("nginx")
    from services.nginx import Nginx

    size = (16 if short else 512) << 20
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        data = np.random.default_rng(0).integers(0, 256, size, np.uint8)
        data.tofile(folder / "object")
        with Nginx(folder) as server:
            clients = {"obstore": with_obstore(server.url), "fsspec": with_fsspec(server.url)}
            for bytes_each, count in ((4 << 20, size >> 22), (64 << 10, min(size >> 17, 4096))):
                yield from compare(clients, data, bytes_each, count, rounds=1 if short else ROUNDS)


def compare(
    clients: dict[str, Callable[[Ranges], Sequence[Any]]], data: Any, each: int, count: int, rounds: int
) -> Iterator[Row]:
    """One size of range; every client's bytes are checked."""
    begins = np.random.default_rng(1).permutation(data.size // each)[:count] * each
    ranges = [(begin, begin + each) for begin in begins.tolist()]
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in clients}
    for number in range(rounds + 1):
        for name, fetch in clients.items():
            wall, cpu = time.perf_counter(), time.process_time()
            found = fetch(ranges)
            if number:
                spent[name].append((time.perf_counter() - wall, time.process_time() - cpu))
            else:  # the first round warms connections, and is checked
                for (begin, end), got in zip(ranges, found, strict=True):
                    if not np.array_equal(np.frombuffer(got, np.uint8), data[begin:end]):
                        raise RuntimeError(f"{name}: bytes {begin}..{end} are wrong")
    for what, place in (("rate", 0), ("rate per second of CPU time", 1)):
        pairs = zip(spent["fsspec"], spent["obstore"], strict=True)
        yield Row(
            name=f"obstore's {what}, ranges of {each >> 10:,} KiB",
            against="fsspec",
            value=statistics.median(a[place] / b[place] for a, b in pairs),
        )


def with_obstore(url: str) -> Callable[[Ranges], Sequence[Any]]:
    """Single requests of threads, as a fetcher makes them."""
    from obstore import get_range
    from obstore.store import from_url

    store = from_url(url, client_options={"allow_http": True})
    pool = ThreadPoolExecutor(IN_FLIGHT)

    def fetch(ranges: Ranges) -> Sequence[Any]:
        return list(pool.map(lambda at: get_range(store, "object", start=at[0], end=at[1]), ranges))

    return fetch


def with_fsspec(url: str) -> Callable[[Ranges], Sequence[Any]]:
    """Its own gathering of ranges."""
    import fsspec

    system = fsspec.filesystem("http")

    def fetch(ranges: Ranges) -> Sequence[Any]:
        starts, ends = [begin for begin, _ in ranges], [end for _, end in ranges]
        return system.cat_ranges([f"{url}/object"] * len(ranges), starts, ends, batch_size=IN_FLIGHT)

    return fetch


if __name__ == "__main__":
    measure.main(__doc__, measured)
