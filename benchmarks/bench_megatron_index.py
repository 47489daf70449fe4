"""Seconds to build the index of a Megatron job over 10M documents, and of its blends: against Megatron-core.

Both sides give the same arrays to the last bit; every round checks that. "In memory" is the arithmetic:
documents of all epochs shuffled, samples cut, samples shuffled; Megatron's side with its compiled helper.
"Into a cache" is what a job waits for: reading the .idx, the arithmetic, and the files. The shuffles are
NumPy's legacy one on both sides, since nothing else gives its bits: they are the limit, shown as such.

    python benchmarks/bench_megatron_index.py [--documents 10000000] [--length 4096] [--rounds 3]
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import statistics
import struct
import tempfile
import types
from pathlib import Path

import numpy as np
from measure import in_turn, ratio, verdict

import meshfeed as mf
from meshfeed.order.megatron import blend_of_weights, build_index, passes_of

SEED = 1234
BLENDS = ((3, 10_000_000), (50, 10_000_000))


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--documents", type=int, default=10_000_000)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    lengths = np.random.default_rng(SEED).integers(1, 2000, args.documents).astype(np.int32)
    for epochs in (1, 3):
        in_memory(lengths, args.length, epochs, args.rounds)
    into_a_cache(lengths, args.length, args.rounds)
    for count, size in BLENDS:
        blends(count, size, args.rounds)


def in_memory(lengths: np.ndarray, length: int, epochs: int, rounds: int) -> None:
    """The arithmetic alone, of as many epochs."""
    from megatron.core.datasets import helpers
    from megatron.core.datasets.gpt_dataset import _build_document_index, _build_shuffle_index

    tokens = int(lengths.sum(dtype=np.int64))
    num_samples = int((epochs - 0.05) * tokens) // length
    passes = passes_of(tokens, length, num_samples)
    if passes.num_epochs != epochs or passes.separate_last:
        raise RuntimeError(f"{passes} is not what is measured here")
    made: dict[str, list[np.ndarray]] = {}

    def theirs() -> None:
        random = np.random.RandomState(SEED)
        documents = np.arange(lengths.size, dtype=np.int32)
        int(np.sum(lengths[documents]))
        document = _build_document_index(documents, epochs, random, False)
        sample = helpers.build_sample_idx(lengths.copy(), document, length, epochs, tokens, True, True)
        total = sample.shape[0] - 1
        made["theirs"] = [document, sample, _build_shuffle_index(total, total, random)]

    def ours() -> None:
        made["ours"] = list(build_index(passes, lengths, 0, SEED).values())

    def shuffles() -> None:
        random = np.random.RandomState(SEED)
        random.shuffle(np.arange(epochs * lengths.size, dtype=np.int64))
        random.shuffle(np.arange(passes.num_samples, dtype=np.uint32))

    took = in_turn({"Megatron": theirs, "meshfeed": ours, "the two shuffles": shuffles}, rounds)
    check(made)
    print(f"{lengths.size:,} documents, {epochs} epochs, {passes.num_samples:,} samples, in memory, seconds")
    show(took)
    limit = ratio(took["Megatron"], took["the two shuffles"])
    print(f"  the shuffles alone, without which there are no equal bits, allow {limit:.2f} at most")


def into_a_cache(lengths: np.ndarray, length: int, rounds: int) -> None:
    """From an .idx on disk to arrays on disk, as a job does it."""
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split

    with tempfile.TemporaryDirectory() as scratch:
        prefix, turn = Path(scratch) / "corpus", itertools.count()
        write_index(prefix, lengths)
        num_samples = int(0.95 * lengths.sum(dtype=np.int64)) // length
        made: dict[str, list[np.ndarray]] = {}

        def fresh() -> Path:
            for old in Path(scratch).glob("cache*"):
                shutil.rmtree(old)
            return Path(scratch) / f"cache{next(turn)}"

        def theirs() -> None:
            config = GPTDatasetConfig(
                random_seed=SEED,
                sequence_length=length,
                blend=([str(prefix)], None),
                split="1,0,0",
                path_to_cache=str(fresh()),
                tokenizer=types.SimpleNamespace(eod=0, vocab_size=50_000, unique_identifiers={}),
                reset_position_ids=False,
                reset_attention_mask=False,
                eod_mask_loss=False,
                create_attention_mask=False,
            )
            indexed = IndexedDataset(str(prefix))
            documents = np.arange(lengths.size, dtype=np.int32)
            dataset = GPTDataset(indexed, str(prefix), documents, num_samples, Split.train, config)
            made["theirs"] = [dataset.document_index, dataset.sample_index, dataset.shuffle_index]

        def ours() -> None:
            rule = mf.MegatronGPT(length, samples=num_samples, cache=fresh())
            recipe = mf.Recipe(data=mf.open(prefix), sequence=rule, batch=mf.Batch(sequences=256), seed=SEED)
            rule.prepare(recipe)
            (entry,) = (each for each in Path(str(rule.cache)).iterdir() if each.is_dir())
            names = ("document", "sample", "shuffle")
            made["ours"] = [np.load(entry / f"{name}.npy", mmap_mode="r") for name in names]

        took = in_turn({"Megatron": theirs, "meshfeed": ours}, rounds)
        check(made)
    print(
        f"{lengths.size:,} documents, from .idx into a cache (ours is on the disk when it returns), seconds"
    )
    show(took)


def blends(count: int, size: int, rounds: int) -> None:
    """The greedy rule over weights, against its compiled loop."""
    from megatron.core.datasets import helpers
    from megatron.core.datasets.utils import normalize

    weights = np.random.default_rng(count).uniform(0.1, 5, count).tolist()
    made: dict[str, list[np.ndarray]] = {}

    def theirs() -> None:
        dataset, sample = np.zeros(size, np.int16), np.zeros(size, np.int64)
        shares = normalize(normalize(weights))
        helpers.build_blending_indices(dataset, sample, shares, count, size, False)
        made["theirs"] = [dataset, sample]

    def ours() -> None:
        made["ours"] = list(blend_of_weights(weights, size).values())

    took = in_turn({"Megatron": theirs, "meshfeed": ours}, rounds)
    check(made)
    print(f"a blend of {count} datasets, {size:,} samples, seconds (no aim: theirs is a compiled loop)")
    for name, times in took.items():
        print(f"  {name:24} {statistics.median(times):>8.3f}")
    print(f"  Megatron : meshfeed: {ratio(took['Megatron'], took['meshfeed']):.3f}")


def show(took: dict[str, list[float]]) -> None:
    """Medians, and the ratio that is aimed at."""
    for name, times in took.items():
        print(f"  {name:24} {statistics.median(times):>8.3f}")
    print("  " + verdict("Megatron : meshfeed", ratio(took["Megatron"], took["meshfeed"]), 3, at_least=True))


def check(made: dict[str, list[np.ndarray]]) -> None:
    """Both sides are the same to the last bit."""
    for theirs, ours in zip(made["theirs"], made["ours"], strict=True):
        if theirs.dtype != ours.dtype or not np.array_equal(theirs, ours):
            raise RuntimeError("the two sides differ")


def write_index(prefix: Path, lengths: np.ndarray) -> None:
    """An .idx of one sequence per document, and a .bin that is a hole."""
    ends = np.cumsum(lengths, dtype=np.int64)
    with prefix.with_suffix(".idx").open("wb") as stream:
        stream.write(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, lengths.size, lengths.size + 1))
        stream.write(lengths.astype("<i4").tobytes())
        stream.write(((ends - lengths) * 2).astype("<i8").tobytes())
        stream.write(np.arange(lengths.size + 1, dtype="<i8").tobytes())
    prefix.with_suffix(".bin").touch()
    os.truncate(prefix.with_suffix(".bin"), int(ends[-1]) * 2)


if __name__ == "__main__":
    main()
