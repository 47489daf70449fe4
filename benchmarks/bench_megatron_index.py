"""Seconds to build the index of a Megatron job over 10M documents, and of its blends: against Megatron-core.

Both sides give the same arrays to the last bit; every round checks that. "In memory" is the arithmetic:
documents of all epochs shuffled, samples cut, samples shuffled; Megatron's side with its compiled helper.
"Into a cache" is what a job waits for: reading the .idx, the arithmetic, and the files. Both give the
bits of NumPy's legacy shuffle, ours by a compiled loop; what two shuffles by NumPy would allow is shown, too.
"""

from __future__ import annotations

import itertools
import os
import shutil
import struct
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path

import measure
import numpy as np
from measure import Row, in_turn, ratio

import meshfeed as mf
from meshfeed.integrations.megatron.gpt_order import blend_of_weights, build_index, passes_of

SEED, LENGTH = 1234, 4096
BLENDS = (3, 50)
PEER = "Megatron-core"


def measured(short: bool) -> Iterator[Row]:
    """Index in memory and into a cache, and blends."""
    documents, blend, rounds = (10_000, 10_000, 1) if short else (10_000_000, 10_000_000, 3)
    lengths = np.random.default_rng(SEED).integers(1, 2000, documents).astype(np.int32)
    for epochs in (1, 3):
        yield from in_memory(lengths, epochs, rounds)
    yield into_a_cache(lengths, rounds)
    for count in BLENDS:
        yield blends(count, blend, rounds)


def in_memory(lengths: np.ndarray, epochs: int, rounds: int) -> Iterator[Row]:
    """The arithmetic alone, of as many epochs."""
    from megatron.core.datasets import helpers
    from megatron.core.datasets.gpt_dataset import _build_document_index, _build_shuffle_index

    tokens = int(lengths.sum(dtype=np.int64))
    num_samples = int((epochs - 0.05) * tokens) // LENGTH
    passes = passes_of(tokens, LENGTH, num_samples)
    if passes.num_epochs != epochs or passes.separate_last:
        raise RuntimeError(f"{passes} is not what is measured here")
    made: dict[str, list[np.ndarray]] = {}

    def theirs() -> None:
        random = np.random.RandomState(SEED)
        documents = np.arange(lengths.size, dtype=np.int32)
        int(np.sum(lengths[documents]))
        document = _build_document_index(documents, epochs, random, False)
        sample = helpers.build_sample_idx(lengths.copy(), document, LENGTH, epochs, tokens, True, True)
        total = sample.shape[0] - 1
        made["theirs"] = [document, sample, _build_shuffle_index(total, total, random)]

    def ours() -> None:
        made["ours"] = list(build_index(passes, lengths, 0, SEED).values())

    def numpy_shuffles() -> None:
        random = np.random.RandomState(SEED)
        random.shuffle(np.arange(epochs * lengths.size, dtype=np.int64))
        random.shuffle(np.arange(passes.num_samples, dtype=np.uint32))

    took = in_turn({PEER: theirs, "meshfeed": ours, "two shuffles by NumPy": numpy_shuffles}, rounds)
    check(made)
    what = f"speed of the index of 10M documents, in memory, {epochs} epoch{'s' * (epochs > 1)}"
    yield speed(what, took)
    yield Row(
        name=f"{what}: most that two shuffles by NumPy allow",
        against=PEER,
        value=ratio(took[PEER], took["two shuffles by NumPy"]),
    )


def into_a_cache(lengths: np.ndarray, rounds: int) -> Row:
    """From an .idx on disk to arrays on disk, as a job does it."""
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split

    with tempfile.TemporaryDirectory() as scratch:
        prefix, turn = Path(scratch) / "corpus", itertools.count()
        write_index(prefix, lengths)
        num_samples = int(0.95 * lengths.sum(dtype=np.int64)) // LENGTH
        made: dict[str, list[np.ndarray]] = {}

        def fresh() -> Path:
            for old in Path(scratch).glob("cache*"):
                shutil.rmtree(old)
            return Path(scratch) / f"cache{next(turn)}"

        def theirs() -> None:
            config = GPTDatasetConfig(
                random_seed=SEED,
                sequence_length=LENGTH,
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
            folder = fresh()
            rule = mf.MegatronGPT(LENGTH, samples=num_samples, index_cache=folder)
            recipe = mf.Recipe(data=mf.open(prefix), sequence=rule, batch=mf.Batch(sequences=256), seed=SEED)
            rule.prepare(recipe)
            (entry,) = (each for each in folder.iterdir() if each.is_dir())
            names = ("document", "sample", "shuffle")
            made["ours"] = [np.load(entry / f"{name}.npy", mmap_mode="r") for name in names]

        took = in_turn({PEER: theirs, "meshfeed": ours}, rounds)
        check(made)
    return speed("speed of the index of 10M documents, from .idx into a cache", took)


def blends(count: int, size: int, rounds: int) -> Row:
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

    took = in_turn({PEER: theirs, "meshfeed": ours}, rounds)
    check(made)
    return Row(
        name=f"speed of blending {count} sources, 10M samples",
        against=f"{PEER}'s compiled loop",
        value=ratio(took[PEER], took["meshfeed"]),
        aim=1.0,
        at_least=True,
    )


def speed(name: str, took: dict[str, list[float]]) -> Row:
    """How many times faster than the peer."""
    value = ratio(took[PEER], took["meshfeed"])
    return Row(name=name, against=PEER, value=value, aim=3.0, at_least=True)


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
    measure.main(__doc__, measured)
