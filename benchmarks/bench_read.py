"""Windows read per second on one thread, and through a Feed: against a memory map and Megatron-core.

The limit is a plain copy out of a memory map into the same four tensors (tokens, labels, loss mask,
position ids): 4,096 tokens cost 8 KB of reading and 112 KB of writing. The peer is Megatron-core's
GPTDataset over the same .bin/.idx, by itself and under torch's DataLoader without worker processes.

    python benchmarks/bench_read.py [--windows 4096] [--length 4096] [--batch 8]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import types
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from measure import in_turn, ratio, verdict

import meshfeed as mf
from meshfeed.store import IndexedWriter

SEED = 1234


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=4096)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=8)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        prefix = Path(scratch) / "corpus"
        write_store(prefix, args.windows * args.length + 1)
        steps = args.windows // args.batch
        recipe = mf.Recipe(
            data=mf.open(prefix),
            sequence=mf.Windows(args.length),
            batch=mf.Batch(sequences=args.batch),
            seed=SEED,
        )
        contestants = {
            "memory map": memory_map(prefix, args.length, args.batch, steps),
            "meshfeed, one thread": one_thread(recipe, args.batch, steps),
            "meshfeed, Feed": through_feed(recipe, args.batch, steps),
            **megatron(prefix, Path(scratch), args.length, args.batch, steps),
        }
        seconds = in_turn(contestants)
    print(f"{steps * args.batch:,} windows of {args.length:,} tokens, {args.batch} per batch, medians of 7 rounds")
    for name, times in seconds.items():
        print(f"  {name:32} {steps * args.batch / statistics.median(times):>10,.0f} windows/s")
    limit, alone, feed = (seconds[n] for n in ("memory map", "meshfeed, one thread", "meshfeed, Feed"))
    print(verdict("one thread / memory map", ratio(limit, alone), 0.7, at_least=True))
    print(verdict("Feed / memory map", ratio(limit, feed), 0.7, at_least=True))
    print(verdict("one thread / Megatron GPTDataset", ratio(seconds["Megatron GPTDataset"], alone), 4, at_least=True))
    print(verdict("Feed / Megatron under DataLoader", ratio(seconds["Megatron, DataLoader"], feed), 4, at_least=True))


def write_store(prefix: Path, num_tokens: int) -> None:
    """Documents of about a thousand tokens."""
    rng = np.random.default_rng(SEED)
    with IndexedWriter(prefix, np.uint16) as writer:
        left = num_tokens
        while left:
            size = min(int(rng.integers(100, 2000)), left)
            writer.add_document(rng.integers(0, 50_000, size).astype(np.uint16))
            left -= size


def use(tokens: torch.Tensor) -> None:
    """What a training loop does at the least: look at its batch."""
    if tokens.numel() == 0:
        raise RuntimeError("an empty batch")


def memory_map(prefix: Path, length: int, batch: int, steps: int) -> Callable[[], None]:
    """The limit: the same bytes into the same tensors, and nothing else."""
    tokens = np.asarray(np.memmap(f"{prefix}.bin", np.uint16, "r"))
    order = np.random.default_rng(SEED).permutation(steps * batch).reshape(steps, batch).tolist()
    ones, positions = np.ones(length, np.float32), np.arange(length)

    def run() -> None:
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
            use(made[0])

    return run


def through_feed(recipe: mf.Recipe, batch: int, steps: int, prefetch: int) -> Callable[[], None]:
    """A loop over a Feed: prefetch=0 does all of its work on the calling thread."""

    def run() -> None:
        with mf.Feed(recipe, micro_batch_size=batch, prefetch=prefetch) as feed:
            for step in feed:
                for microbatch in step.microbatches:
                    use(microbatch["tokens"])
                if step.index + 1 == steps:
                    break

    return run


def megatron(
    prefix: Path, scratch: Path, length: int, batch: int, steps: int
) -> dict[str, Callable[[], None]]:
    """Megatron-core's own dataset over the same store, by itself and in its trainers' usual loop."""
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split

    config = GPTDatasetConfig(
        random_seed=SEED,
        sequence_length=length,
        blend=([str(prefix)], None),
        split="1,0,0",
        path_to_cache=str(scratch / "cache"),
        tokenizer=types.SimpleNamespace(eod=0, pad=0, vocab_size=50_000, unique_identifiers={}),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    indexed = IndexedDataset(str(prefix))
    documents = np.arange(indexed.document_indices.shape[0] - 1, dtype=np.int32)
    dataset = GPTDataset(indexed, str(prefix), documents, steps * batch, Split.train, config)

    def alone() -> None:
        for index in range(steps * batch):
            use(dataset[index]["tokens"])

    def under_data_loader() -> None:
        loader = torch.utils.data.DataLoader(dataset, batch_size=batch, num_workers=0)
        for at, fields in enumerate(loader):
            use(fields["tokens"])
            if at + 1 == steps:
                break

    return {"Megatron GPTDataset": alone, "Megatron, DataLoader": under_data_loader}


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
