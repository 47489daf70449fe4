"""From one reader to a tensor-parallel group of four processes: latency of a microbatch, and collectives.

The usual way, as Megatron-core's `get_batch_on_this_tp_rank` has it: windows, whose shape every rank
knows, take four broadcasts (tokens, labels, loss mask, position ids). Packed documents take five more:
cu_seqlens and cu_seqlens_padded, each after its size, and max_seqlen. Its tensors lie ready in memory.
`broadcast_object_list` pickles the same tensors in one call. meshfeed's ways also read the tokens from a
store and build the tensors on every rank, and are charged for it. All over gloo, on one machine.

A microbatch is one window, and is measured against both usual ways. Latency is from asking for it to
having it, on a rank that receives. It is the mean: meshfeed reads and delivers up to 262,144 tokens at a
time, which are several microbatches, and the usual ways one microbatch.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import measure
import numpy as np
import torch
import torch.distributed as dist
from measure import Row, from_ranks

import meshfeed as mf
from meshfeed.store import IndexedWriter

RANKS = 4
ROUNDS = 5
LENGTHS = (4096, 32_768)
USUAL = ("a broadcast for each of four tensors", "the same, and for each packing tensor")
PICKLED = "broadcast_object_list of the same"
AIMS = {"delivery share": 0.10, "delivery broadcast": 0.25}


def measured(short: bool) -> Iterator[Row]:
    """Both ways of meshfeed beside each usual one."""
    lengths, count, rounds = ((4096,), 64, 1) if short else (LENGTHS, 256, ROUNDS)
    with tempfile.TemporaryDirectory() as scratch:
        prefix = Path(scratch) / "corpus"
        write_store(prefix)
        given = from_ranks(rank_main, RANKS, len(lengths), str(prefix), lengths, count, rounds)
        for length, taken in zip(lengths, given, strict=True):
            yield from rows_of(length, count, taken)


def rows_of(length: int, count: int, taken: dict[str, dict[str, Any]]) -> Iterator[Row]:
    """Ratios of mean latencies, and collectives; and a table for the eye."""
    print(f"{length:,} tokens in a microbatch")
    for name, figures in taken.items():
        latencies = np.concatenate(figures["latencies"]) * 1e3
        print(
            f"  {name:50} mean {latencies.mean():>6.2f} ms, p50 {np.median(latencies):>6.2f} ms, "
            f"p99 {np.percentile(latencies, 99):>6.2f} ms"
        )
    for name, aim in AIMS.items():
        for peer in USUAL:
            pairs = zip(taken[name]["latencies"], taken[peer]["latencies"], strict=True)
            yield Row(
                name=f"{name}, {length:,} tokens, time from asking for a microbatch to having it",
                against=peer,
                value=statistics.median(float(ours.mean() / theirs.mean()) for ours, theirs in pairs),
                aim=aim,
            )
        yield Row(
            name=f"{name}, {length:,} tokens, collectives a microbatch",
            value=taken[name]["collectives"] / count,
            unit="",
        )


def write_store(prefix: Path) -> None:
    """Some 20 million tokens in documents of about a thousand."""
    rng = np.random.default_rng(0)
    with IndexedWriter(prefix, np.uint16) as writer:
        for _ in range(20_000):
            writer.add_document(rng.integers(0, 50_000, 1000).astype(np.uint16))


def rank_main(
    rank: int, port: int, results: Any, prefix: str, lengths: tuple[int, ...], count: int, rounds: int
) -> None:
    """One process: every contestant in turn, so many times after a warm-up."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    for length in lengths:
        contestants: dict[str, Callable[[], tuple[Any, Callable[[], int]]]] = {
            USUAL[0]: partial(usual, rank, length, packed=False),
            USUAL[1]: partial(usual, rank, length, packed=True),
            PICKLED: partial(pickled, rank, length),
            "delivery broadcast": partial(fed, prefix, length, "broadcast"),
            "delivery share": partial(fed, prefix, length, "share"),
        }
        taken = {name: {"latencies": [], "collectives": 0} for name in contestants}
        for round_ in range(rounds + 1):
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
                    taken[name]["latencies"].append(latencies)
                    taken[name]["collectives"] = collectives()
                batches.close()
        if rank == RANKS - 1:
            results.put(taken)
    dist.destroy_process_group()


def usual(rank: int, length: int, *, packed: bool) -> tuple[Iterator[Any], Callable[[], int]]:
    """A broadcast per tensor, and for packed documents one per size that only the reader knows."""
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
    steps: list[mf.Step] = []

    def batches() -> Iterator[Any]:
        with mf.Feed(
            recipe, mf.Layout(tp=RANKS), transport=mf.Transport(delivery=delivery, prefetch=0)
        ) as feed:
            for step in feed:
                steps.append(step)
                yield from step.microbatches

    return batches(), lambda: sum(step.stats.collectives for step in steps)


if __name__ == "__main__":
    measure.main(__doc__, measured)
