"""Windows read per second on one thread and through a Feed: against a memory map and Megatron-core.

Two limits, both a plain copy out of a memory map. What a user would write makes the four tensors that a
trainer takes (tokens, labels, loss mask, position ids) for every batch: 4,096 tokens cost 8 KB of reading and
112 KB of writing. Equal work is tokens and labels alone, 64 KB of writing: meshfeed makes loss masks and
positions once where documents have no say in them, as anybody could. The peer is Megatron-core's GPTDataset
over the same .bin/.idx, by itself and under torch's DataLoader without worker processes.

Two loops: one that only takes its batches, and one that trains (a matrix product of some 0.1 ms per
window on one thread; a language model needs many times that), where what counts is the time that the
loop takes beyond its own arithmetic.

What the copies cost hangs on their process. Where something large was freed before, malloc gives them pages
that the process has; in a process of their own, the system clears fresh pages for every batch. So they are
measured both ways: in one process with a Feed, which is their best case, and each contestant in its own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import measure
import numpy as np
import torch
from measure import Row, in_turn, ratio

import meshfeed as mf
from meshfeed.store import IndexedWriter

SEED, LENGTH = 1234, 4096
BATCHES = (1, 32)
ALL_FOUR = "a memory-map copy of all four tensors"
EQUAL = "equal work: a memory-map copy of tokens and labels"
ALONE, LOADER = "Megatron's GPTDataset", "Megatron's GPTDataset under DataLoader"

AIMS = (  # against, ours, at least so many times as fast
    (ALL_FOUR, "one thread", 1.5),
    (ALL_FOUR, "Feed", 1.0),
    (EQUAL, "one thread", 0.8),
    (EQUAL, "Feed", 0.5),
)

Batches = Callable[[], Iterator[torch.Tensor]]


def measured(short: bool) -> Iterator[Row]:
    """Every size of batch."""
    torch.set_num_threads(1)
    num_windows, rounds = (256, 1) if short else (4096, 7)
    with tempfile.TemporaryDirectory() as scratch:
        prefix = Path(scratch) / "corpus"
        write_store(prefix, num_windows * LENGTH + 1)
        for batch in BATCHES[:1] if short else BATCHES:
            yield from compare(prefix, Path(scratch) / "cache", num_windows, batch, rounds)
            yield from apart(prefix, num_windows, batch, rounds=1 if short else 5)


def compare(prefix: Path, cache: Path, num_windows: int, batch: int, rounds: int) -> Iterator[Row]:
    """All contestants at one batch size, in one process."""
    alone, data_loader = megatron(prefix, cache, LENGTH, batch, num_windows)
    loops = contestants(prefix, num_windows, batch) | {ALONE: alone, LOADER: data_loader}
    took = in_turn({name: taking(batches) for name, batches in loops.items()}, rounds)
    yield from rows_of(took, batch, *AIMS, (ALONE, "one thread", 8.0), (LOADER, "Feed", 6.0))
    trained = in_turn(
        {"arithmetic": arithmetic(num_windows, batch)}
        | {name: training(loops[name], batch) for name in ("Feed", LOADER)},
        rounds=min(rounds, 3),
    )
    own = statistics.median(trained.pop("arithmetic"))
    for name, times in trained.items():
        yield Row(
            name=f"what a training loop waits for a window, {name}, batches of {batch}",
            value=(statistics.median(times) - own) / num_windows * 1e6,
            unit="µs",
        )


def contestants(prefix: Path, num_windows: int, batch: int) -> dict[str, Batches]:
    """Ours, and the plain copies."""
    recipe = mf.Recipe(
        data=mf.open(prefix), sequence=mf.Windows(LENGTH), batch=mf.Batch(sequences=256), seed=SEED
    )
    return {
        ALL_FOUR: memory_map(prefix, batch, num_windows, written=4),
        EQUAL: memory_map(prefix, batch, num_windows, written=2),
        "one thread": through_feed(recipe, batch, num_windows, prefetch=0),
        "Feed": through_feed(recipe, batch, num_windows, prefetch=4),
    }


def rows_of(
    took: dict[str, list[float]], batch: int, *aims: tuple[str, str, float], where: str = ""
) -> Iterator[Row]:
    """How many times as fast ours is, by what each took in each round."""
    for peer, name, aim in aims:
        yield Row(
            name=f"windows per second, {name}, batches of {batch}{where}",
            against=peer,
            value=ratio(took[peer], took[name]),
            aim=aim,
            at_least=True,
        )


def apart(prefix: Path, num_windows: int, batch: int, rounds: int) -> Iterator[Row]:
    """Ours and the plain copies, each in a process of its own in every round."""
    took: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name in contestants(prefix, num_windows, batch):
            command = [sys.executable, __file__, "--contestant", name, "--prefix", str(prefix)]
            command += ["--windows", str(num_windows), "--batch", str(batch)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            took.setdefault(name, []).append(json.loads(done.stdout))
    yield from rows_of(took, batch, *AIMS, where=", each in a process of its own")


def contestant() -> None:
    """Print the seconds that one contestant takes in this process: the median of several passes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--contestant", required=True)
    parser.add_argument("--prefix", type=Path, required=True)
    parser.add_argument("--windows", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    run = taking(contestants(args.prefix, args.windows, args.batch)[args.contestant])
    run()  # imports, and pages of the file
    print(json.dumps(statistics.median(in_turn({"": run}, rounds=5)[""])))


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


def memory_map(prefix: Path, batch: int, num_windows: int, *, written: int) -> Batches:
    """The limit: the same bytes into so many tensors for every batch, and nothing else."""
    tokens = np.asarray(np.memmap(f"{prefix}.bin", np.uint16, "r"))
    order = np.random.default_rng(SEED).permutation(num_windows).reshape(-1, batch).tolist()
    ones, positions = np.ones(LENGTH, np.float32), np.arange(LENGTH)

    def batches() -> Iterator[torch.Tensor]:
        for windows in order:
            inputs, labels = np.empty((batch, LENGTH), np.int64), np.empty((batch, LENGTH), np.int64)
            fields = [inputs, labels]
            if written == 4:
                fields += [np.empty((batch, LENGTH), np.int64), np.empty((batch, LENGTH), np.float32)]
            for row, window in enumerate(windows):
                start = window * LENGTH
                inputs[row] = tokens[start : start + LENGTH]
                labels[row] = tokens[start + 1 : start + LENGTH + 1]
                if written == 4:
                    fields[2][row], fields[3][row] = positions, ones
            made = [torch.from_numpy(field) for field in fields]
            yield made[0]

    return batches


def through_feed(recipe: mf.Recipe, batch: int, num_windows: int, prefetch: int) -> Batches:
    """Order, plan, read, build: on the calling thread where prefetch is 0."""

    def batches() -> Iterator[torch.Tensor]:
        left = num_windows
        with mf.Feed(recipe, micro_batch_size=batch, transport=mf.Transport(prefetch=prefetch)) as feed:
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
    if "--contestant" in sys.argv:
        contestant()
    else:
        measure.main(__doc__, measured)
