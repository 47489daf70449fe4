"""Storage clients: obstore against fsspec, ranges of one object over HTTP from one nginx.

Both keep 16 requests in flight: obstore from threads, as the leader of a node does,
fsspec by `cat_ranges` of its HTTP file system (aiohttp). Blocks of 4 MiB, as the node's cache fetches them,
and ranges of 64 KiB, as single documents are. Rates per second, and per second of CPU time in this process.

    pip install 'fsspec[http]' obstore
    python benchmarks/bench_clients.py [--mib 512]      needs nginx
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

IN_FLIGHT, ROUNDS = 16, 5
Ranges = Sequence[tuple[int, int]]


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=512, help="size of the object")
    size = parser.parse_args().mib << 20
    from services.nginx import Nginx

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        data = np.random.default_rng(0).integers(0, 256, size, np.uint8)
        data.tofile(folder / "object")
        with Nginx(folder) as server:
            clients = {"obstore": with_obstore(server.url), "fsspec": with_fsspec(server.url)}
            for bytes_each, count in ((4 << 20, size >> 22), (64 << 10, min(size >> 17, 4096))):
                compare(clients, data, bytes_each, count)


def compare(clients: dict[str, Callable[[Ranges], Sequence[Any]]], data: Any, each: int, count: int) -> None:
    """One size of range; every client's bytes are checked."""
    begins = np.random.default_rng(1).permutation(data.size // each)[:count] * each
    ranges = [(begin, begin + each) for begin in begins.tolist()]
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in clients}
    for number in range(ROUNDS + 1):
        for name, fetch in clients.items():
            wall, cpu = time.perf_counter(), time.process_time()
            found = fetch(ranges)
            if number:
                spent[name].append((time.perf_counter() - wall, time.process_time() - cpu))
            else:  # the first round warms connections, and is checked
                for (begin, end), got in zip(ranges, found, strict=True):
                    if not np.array_equal(np.frombuffer(got, np.uint8), data[begin:end]):
                        raise RuntimeError(f"{name}: bytes {begin}..{end} are wrong")
    print(f"{count} ranges of {each >> 10} KiB, {IN_FLIGHT} in flight, medians of {ROUNDS}")
    for name, rounds in spent.items():
        wall, cpu = (statistics.median(times) for times in zip(*rounds))
        gigabytes = each * count / 1e9
        print(f"  {name:10} {gigabytes / wall:6.2f} GB/s   {gigabytes / cpu:6.2f} GB per CPU second")
    for what, place in (("time", 0), ("CPU time", 1)):
        pairs = zip(spent["fsspec"], spent["obstore"])
        print(f"  fsspec takes {statistics.median(a[place] / b[place] for a, b in pairs):.2f} x the {what}")


def with_obstore(url: str) -> Callable[[Ranges], Sequence[Any]]:
    """Single requests of threads, as the node's leader makes them."""
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
    main()
