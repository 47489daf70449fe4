"""From one reader to a tensor-parallel group of four processes: latency of a microbatch, and collectives.

The usual way, as Megatron-style trainers do it: one broadcast per tensor (tokens, labels, loss mask,
position ids), one per packing tensor (cu_seqlens, cu_seqlens_padded, max_seqlen) and one before each of
those whose size only the reader knows, and for the number of documents. Its tensors lie ready in memory.
`broadcast_object_list` pickles the same tensors in one call. meshfeed's ways also read the tokens from a
store and build the tensors on every rank, and are charged for it. All over gloo, on one machine.

A microbatch is one window. Latency is from asking for it to having it, on a rank that receives.

    python benchmarks/bench_delivery.py [--microbatches 256]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from measure import verdict

import meshfeed as mf
from meshfeed.store import IndexedWriter

RANKS = 4
ROUNDS = 5
AIMS = {"meshfeed share": 0.10, "meshfeed broadcast": 0.25}


def main() -> None:
    """Run and print."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--microbatches", type=int, default=256)
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as scratch:
        prefix = Path(scratch) / "corpus"
        write_store(prefix)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        results = context.SimpleQueue()
        ranks = [
            context.Process(target=rank_main, args=(rank, port, str(prefix), args.microbatches, results))
            for rank in range(RANKS)
        ]
        for process in ranks:
            process.start()
        for length in (4096, 32_768):
            report(length, args.microbatches, results.get())
        for process in ranks:
            process.join()


def report(length: int, count: int, measured: dict[str, dict[str, Any]]) -> None:
    """One table and the verdicts."""
    print(f"{RANKS} processes, {length:,} tokens per microbatch, {count} of them, {ROUNDS} rounds in turn")
    print(f"  {'':28} {'mean':>9} {'p50':>9} {'p99':>9}  collectives")
    for name, figures in measured.items():
        latencies = np.concatenate(figures["latencies"]) * 1e3
        print(
            f"  {name:28} {latencies.mean():>6.2f} ms {np.median(latencies):>6.2f} ms "
            f"{np.percentile(latencies, 99):>6.2f} ms  {figures['collectives'] / count:.2f}"
        )
    usual = measured["usual, with packing tensors"]
    for name, aim in AIMS.items():
        pairs = zip(measured[name]["latencies"], usual["latencies"], strict=True)
        ratio = statistics.median(float(ours.mean() / theirs.mean()) for ours, theirs in pairs)
        print("  " + verdict(f"{name} : usual, with packing tensors (means)", ratio, aim, at_least=False))


def write_store(prefix: Path) -> None:
    """Some 20 million tokens in documents of about a thousand."""
    rng = np.random.default_rng(0)
    with IndexedWriter(prefix, np.uint16) as writer:
        for _ in range(20_000):
            writer.add_document(rng.integers(0, 50_000, 1000).astype(np.uint16))


def rank_main(rank: int, port: int, prefix: str, count: int, results: Any) -> None:
    """One process: every contestant in turn, `ROUNDS` times after a warm-up."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    for length in (4096, 32_768):
        contestants: dict[str, Callable[[], tuple[Any, Callable[[], int]]]] = {
            "usual": partial(usual, rank, length, packed=False),
            "usual, with packing tensors": partial(usual, rank, length, packed=True),
            "broadcast_object_list": partial(pickled, rank, length),
            "meshfeed broadcast": partial(fed, prefix, length, "broadcast"),
            "meshfeed share": partial(fed, prefix, length, "share"),
        }
        measured = {name: {"latencies": [], "collectives": 0} for name in contestants}
        for round_ in range(ROUNDS + 1):
            for name, contestant in contestants.items():
                dist.barrier()
                batches, collectives = contestant()
                next(batches)  # meeting the peers is not part of a microbatch
                latencies = np.empty(count)
                for at in range(count):
                    began = time.perf_counter()
                    next(batches)
                    latencies[at] = time.perf_counter() - began
                if round_:
                    measured[name]["latencies"].append(latencies)
                    measured[name]["collectives"] = collectives()
                batches.close()
        if rank == RANKS - 1:
            results.put(measured)
    dist.destroy_process_group()


def usual(rank: int, length: int, *, packed: bool) -> tuple[Iterator[Any], Callable[[], int]]:
    """A broadcast per tensor, and one for every number that only the reader knows."""
    calls = 0

    def send(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        dist.broadcast(tensor, src=0)
        return tensor

    def batches() -> Iterator[Any]:
        tokens = torch.randint(0, 50_000, (1, length))
        documents = torch.arange(0, length + 1, 1024, dtype=torch.int32)
        while True:
            for known in (1, 1, 1):  # microbatch size, sequence length, number of documents
                send(torch.tensor([known]))
            got = [send(tokens if rank == 0 else torch.empty_like(tokens)) for _ in range(3)]
            mask = torch.ones(1, length) if rank == 0 else torch.empty(1, length)
            got.append(send(mask))
            if packed:
                for _ in range(2):
                    size = send(torch.tensor([documents.numel()]))
                    got.append(send(documents if rank == 0 else torch.empty(int(size), dtype=torch.int32)))
                got.append(send(torch.tensor([1024])))
            yield got

    return batches(), lambda: calls


def pickled(rank: int, length: int) -> tuple[Iterator[Any], Callable[[], int]]:
    """The same tensors in one pickled object."""
    calls = 0

    def batches() -> Iterator[Any]:
        nonlocal calls
        names = ("tokens", "labels", "position_ids", "loss_mask", "cu_seqlens", "cu_seqlens_padded")
        tokens = torch.randint(0, 50_000, (1, length))
        while True:
            calls += 2  # its size, then itself
            boxed = [dict.fromkeys(names, tokens) if rank == 0 else None]
            dist.broadcast_object_list(boxed, src=0)
            yield boxed[0]

    return batches(), lambda: calls


def fed(prefix: str, length: int, delivery: Any) -> tuple[Iterator[Any], Callable[[], int]]:
    """meshfeed on the calling thread, so that no work hides behind another."""
    recipe = mf.Recipe(
        data=mf.open(prefix),
        sequence=mf.Windows(length, reset_attention_mask=True),
        batch=mf.Batch(sequences=64),
    )
    stats: list[dict[str, Any]] = []

    def batches() -> Iterator[Any]:
        with mf.Feed(recipe, mf.Layout(tp=RANKS), delivery=delivery, prefetch=0) as feed:
            for step in feed:
                stats.append(step.stats)
                yield from step.microbatches

    return batches(), lambda: sum(each["collectives"] for each in stats)


if __name__ == "__main__":
    main()
