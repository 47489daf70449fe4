"""Bytes fetched for each byte consumed on a node: by ranks of a replica that want it, and with a small cache.

The corpus (8 MB of tokens, one epoch) lies behind nginx, whose access log counts every byte of every answer,
index and headers included. Real ranks on gloo read it whole at tp * cp * pp = 1, 2, 4, 8: as meshfeed does
by itself (delivery auto, which is share here), by direct reads through the node's cache, and the usual way,
every rank for itself.

Then a corpus of 100 MB and a cache that holds a part of it, without checksums, with those that a writer makes
(64 KiB), and with larger ones (1 MiB): jobs of one process that shuffle by blocks read an epoch. Two jobs
share the cache and read the same order, the second ten steps behind the first.

Needs nginx.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import measure
from measure import Row

LAYOUTS = ("tp1", "tp2", "tp2-cp2", "tp2-cp2-pp2")
WAYS = {
    "delivery auto": ("auto", False),
    "direct, through the node's cache": ("direct", False),
    "every rank for itself": ("direct", True),
}
LENGTH, SEQUENCES = 1024, 128  # windows of 2 KiB
MB_WINDOWS = 500
SHARDS = {"8 MB": (8 * MB_WINDOWS, 1, 1), "1 MB": (MB_WINDOWS, 2, 2)}
"""Windows of a shard; shards that a lane shuffles together; lanes."""
SUMS = {"no .sums": None, ".sums of 64 KiB": 1 << 16, ".sums of 1 MiB": 1 << 20}
FIFTH = "a fifth"
CACHES = (
    ("1 MB", FIFTH, "no .sums", 1),
    ("1 MB", FIFTH, "no .sums", 2),
    ("1 MB", FIFTH, ".sums of 64 KiB", 1),
    ("1 MB", FIFTH, ".sums of 64 KiB", 2),
    ("1 MB", FIFTH, ".sums of 1 MiB", 1),
    ("1 MB", "4 shards a lane", "no .sums", 1),
    ("8 MB", FIFTH, "no .sums", 1),
    ("8 MB", FIFTH, "no .sums", 2),
    ("8 MB", FIFTH, ".sums of 64 KiB", 1),
    ("8 MB", FIFTH, ".sums of 1 MiB", 1),
)
BEHIND = 10
"""Steps of the second job behind the first."""


def measured(short: bool) -> Iterator[Row]:
    """Each layout and way; each size of shards."""
    measure.needs("nginx")
    yield from of_layouts(short)
    yield from of_small_caches(short)


def of_layouts(short: bool) -> Iterator[Row]:
    """Bytes fetched with a cache that holds the corpus."""
    import meshfeed as mf
    import world
    from corpus import write_corpus
    from remote.test_far import NUM_TOKENS, one_epoch
    from services.nginx import Nginx

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "served").mkdir()
        write_corpus(folder / "served/corpus", num_tokens=NUM_TOKENS, mean=2_000)
        consumed = sum(file.stat().st_size for file in (folder / "served").iterdir())
        for layout in LAYOUTS[1:2] if short else LAYOUTS:
            for way, (delivery, alone) in WAYS.items():
                ranks = mf.Layout.parse(layout).world_size
                with Nginx(folder / "served") as server:
                    cache = folder / f"{layout} {way}"
                    world.run(one_epoch, ranks, f"{server.url}/corpus", str(cache), layout, delivery, alone)
                    fetched = server.fetched_bytes() / consumed
                yield Row(
                    name=f"bytes fetched on a node for each byte consumed, {layout}, {way}",
                    value=fetched,
                    unit="",
                    aim=None if alone else 1.02,
                )


def of_small_caches(short: bool) -> Iterator[Row]:
    """Bytes fetched with a cache that does not."""
    from corpus import write_corpus
    from services.nginx import Nginx

    with tempfile.TemporaryDirectory() as scratch:
        served = Path(scratch) / "served"
        served.mkdir()
        num_tokens = LENGTH * MB_WINDOWS * (30 if short else 104)
        for sums in SUMS.values():
            write_corpus(served / f"{sums}", num_tokens=num_tokens, mean=20_000, checksum_bytes=sums)
        for size, held, sums, jobs in CACHES[:1] if short else CACHES:
            prefix, (sequences, window, lanes) = f"{SUMS[sums]}", SHARDS[size]
            limit = 2 * num_tokens // 5 if held == FIFTH else 4 * lanes * sequences * LENGTH * 2
            with Nginx(served) as server, tempfile.TemporaryDirectory() as cache:
                run_jobs([f"{server.url}/{prefix}", cache, limit, sequences, window, lanes], jobs)
                fetched = server.fetched_bytes()
            corpus_bytes = sum(file.stat().st_size for file in served.glob(f"{prefix}.*"))
            together = "" if jobs == 1 else f", {jobs} jobs"
            yield Row(
                name=f"bytes fetched for each byte, a cache of {held}, shards of {size}, {sums}{together}",
                value=fetched / corpus_bytes,
                unit="",
                aim=1.02,
            )


def run_jobs(args: Sequence[object], jobs: int) -> None:
    """Run jobs over an epoch, step by step, each some steps behind the one before."""
    command = [sys.executable, __file__, "--job", *map(str, args)]
    pipe = subprocess.PIPE
    running = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(jobs)]
    turn, going = 0, list(running)
    while going:
        for at, process in enumerate(running):
            if process in going and turn >= at * BEHIND:
                assert process.stdin is not None and process.stdout is not None
                print(file=process.stdin, flush=True)
                if process.stdout.readline() != "step\n":
                    going.remove(process)
        turn += 1
    if any(process.wait() for process in running):
        raise SystemExit("a job failed; its error is above")


def job(url: str, cache: str, limit: int, sequences: int, window: int, lanes: int) -> None:
    """Read an epoch, a step for each line."""
    import meshfeed as mf
    from services.unhedged import unhedged

    with unhedged():
        recipe = mf.Recipe(
            data=mf.open(url, cache=mf.Cache(cache, limit_bytes=limit, block_bytes=1 << 20)),
            sequence=mf.Windows(LENGTH),
            batch=mf.Batch(sequences=SEQUENCES),
            shuffle=mf.Blocks(sequences=sequences, window=window, lanes=lanes),
            epochs=1,
        )
        with mf.Feed(recipe, micro_batch_size=SEQUENCES, pad_rows=True) as feed:
            steps = iter(feed)
            for _ in sys.stdin:
                step = next(steps, None)
                if step is None:
                    break
                for _ in step.microbatches:
                    pass
                print("step", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--job"]:
        job(*sys.argv[2:4], *map(int, sys.argv[4:]))
    else:
        measure.main(__doc__, measured)
