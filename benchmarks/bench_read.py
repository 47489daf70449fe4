"""Windows read per second on one thread and through a Feed: against a memory map and Megatron-core.

The limit is a plain copy out of a memory map into the same four tensors (tokens, labels, loss mask,
position ids): 4,096 tokens cost 8 KB of reading and 112 KB of writing. The peer is Megatron-core's
GPTDataset over the same .bin/.idx, by itself and under torch's DataLoader without worker processes.

Two loops: one that only takes its batches, and one that trains (a matrix product of some 0.1 ms per
window on one thread; a language model needs many times that), where what counts is the time that the
loop takes beyond its own arithmetic.

    python benchmarks/bench_read.py [--windows 4096] [--length 4096]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from measure import in_turn, ratio, verdict

import meshfeed as mf
from meshfeed.store import IndexedWriter

SEED = 1234
BATCHES = (1, 8, 32)

Batches = Callable[[], Iterator[torch.Tensor]]


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--windows", type=int, default=4096, help="a multiple of 256")
    parser.add_argument("--length", type=int, default=4096)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        prefix = Path(scratch) / "corpus"
        write_store(prefix, args.windows * args.length + 1)
        for batch in BATCHES:
            compare(prefix, Path(scratch) / "cache", args.windows, args.length, batch)


def compare(prefix: Path, cache: Path, num_windows: int, length: int, batch: int) -> None:
    """All contestants at one batch size."""
    recipe = mf.Recipe(
        data=mf.open(prefix), sequence=mf.Windows(length), batch=mf.Batch(sequences=256), seed=SEED
    )
    alone, data_loader = megatron(prefix, cache, length, batch, num_windows)
    loops: dict[str, Batches] = {
        "memory map": memory_map(prefix, length, batch, num_windows),
        "meshfeed, one thread": through_feed(recipe, batch, num_windows, prefetch=0),
        "meshfeed, Feed": through_feed(recipe, batch, num_windows, prefetch=4),
        "Megatron GPTDataset": alone,
        "Megatron, DataLoader": data_loader,
    }
    took = in_turn({name: taking(batches) for name, batches in loops.items()})
    print(
        f"{num_windows:,} windows of {length:,} tokens in batches of {batch}, medians of 7 rounds, windows/s"
    )
    for name, times in took.items():
        print(f"  {name:24} {num_windows / statistics.median(times):>10,.0f}")
    line = took["memory map"], took["meshfeed, one thread"], took["meshfeed, Feed"]
    peers = took["Megatron GPTDataset"], took["Megatron, DataLoader"]
    print("  " + verdict("one thread : memory map", ratio(line[0], line[1]), 0.7, at_least=True))
    print("  " + verdict("Feed : memory map", ratio(line[0], line[2]), 0.7, at_least=True))
    print("  " + verdict("one thread : Megatron GPTDataset", ratio(peers[0], line[1]), 4, at_least=True))
    print("  " + verdict("Feed : Megatron under DataLoader", ratio(peers[1], line[2]), 4, at_least=True))

    trained = in_turn(
        {"arithmetic": arithmetic(num_windows, batch)}
        | {name: training(loops[name], batch) for name in loops if name != "Megatron GPTDataset"},
        rounds=3,
    )
    own = statistics.median(trained["arithmetic"])
    print("  beyond its own arithmetic a training loop takes, per window:")
    for name in [name for name in trained if name != "arithmetic"]:
        beyond = statistics.median(trained[name]) - own
        print(f"    {name:24} {beyond / num_windows * 1e6:>8.1f} µs  ({beyond / own:+.1%} of the arithmetic)")


def taking(batches: Batches) -> Callable[[], None]:
    """A loop that takes its batches and looks at them."""

    def run() -> None:
        for tokens in batches():
            if tokens.numel() == 0:
                raise RuntimeError("an empty batch")

    return run


def training(batches: Batches, batch: int) -> Callable[[], None]:
    """A loop that does arithmetic with its batches."""
    left, right = operands(batch)

    def run() -> None:
        for tokens in batches():
            left[0, 0] = float(tokens[0, 0] if tokens.ndim > 1 else tokens[0])
            torch.mm(left, right)

    return run


def arithmetic(num_windows: int, batch: int) -> Callable[[], None]:
    """The arithmetic alone."""
    left, right = operands(batch)

    def run() -> None:
        for _ in range(num_windows // batch):
            left[0, 0] = 1.0
            torch.mm(left, right)

    return run


def operands(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two matrices whose product takes about 0.1 ms per window of the batch."""
    return torch.rand(batch * 32, 256), torch.rand(256, 512)


def write_store(prefix: Path, num_tokens: int) -> None:
    """Documents of about a thousand tokens."""
    rng = np.random.default_rng(SEED)
    with IndexedWriter(prefix, np.uint16) as writer:
        left = num_tokens
        while left:
            size = min(int(rng.integers(100, 2000)), left)
            writer.add_document(rng.integers(0, 50_000, size).astype(np.uint16))
            left -= size


def memory_map(prefix: Path, length: int, batch: int, num_windows: int) -> Batches:
    """The limit: the same bytes into the same tensors, and nothing else."""
    tokens = np.asarray(np.memmap(f"{prefix}.bin", np.uint16, "r"))
    order = np.random.default_rng(SEED).permutation(num_windows).reshape(-1, batch).tolist()
    ones, positions = np.ones(length, np.float32), np.arange(length)

    def batches() -> Iterator[torch.Tensor]:
        for windows in order:
            fields = [np.empty((batch, length), np.int64) for _ in range(3)]
            mask = np.empty((batch, length), np.float32)
            for row, window in enumerate(windows):
                start = window * length
                fields[0][row] = tokens[start : start + length]
                fields[1][row] = tokens[start + 1 : start + length + 1]
                fields[2][row] = positions
                mask[row] = ones
            made = [torch.from_numpy(field) for field in (*fields, mask)]
            yield made[0]

    return batches


def through_feed(recipe: mf.Recipe, batch: int, num_windows: int, prefetch: int) -> Batches:
    """Order, plan, read, build: on the calling thread where prefetch is 0."""

    def batches() -> Iterator[torch.Tensor]:
        left = num_windows
        with mf.Feed(recipe, micro_batch_size=batch, prefetch=prefetch) as feed:
            for step in feed:
                for microbatch in step.microbatches:
                    yield microbatch["tokens"]
                    left -= batch
                if left <= 0:
                    return

    return batches


def megatron(prefix: Path, cache: Path, length: int, batch: int, num_windows: int) -> tuple[Batches, Batches]:
    """Megatron-core's own dataset over the same store, by itself and in its trainers' usual loop."""
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split

    config = GPTDatasetConfig(
        random_seed=SEED,
        sequence_length=length,
        blend=([str(prefix)], None),
        split="1,0,0",
        path_to_cache=str(cache),
        tokenizer=types.SimpleNamespace(eod=0, pad=0, vocab_size=50_000, unique_identifiers={}),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    indexed = IndexedDataset(str(prefix))
    documents = np.arange(indexed.document_indices.shape[0] - 1, dtype=np.int32)
    dataset = GPTDataset(indexed, str(prefix), documents, num_windows, Split.train, config)

    def alone() -> Iterator[torch.Tensor]:
        for index in range(num_windows):
            yield dataset[index]["tokens"]

    def under_data_loader() -> Iterator[torch.Tensor]:
        loader = torch.utils.data.DataLoader(dataset, batch_size=batch, num_workers=0)
        for at, fields in enumerate(loader):
            if at == num_windows // batch:
                return
            yield fields["tokens"]

    return alone, under_data_loader


if __name__ == "__main__":
    main()
