"""The order of Megatron-core's GPTDataset and BlendedDataset, bit for bit, as arrays. Pure.

A dataset's documents are shuffled over all epochs, concatenated and cut into samples of equal length, which
are shuffled again. A blend draws each sample from the dataset that lags most behind its weight. Both shuffles
use NumPy's legacy `RandomState` with the job's seed, and the blend compares rounded doubles, so the same
arithmetic is needed here.

Terms are Megatron's: a document is a *sequence* of the .idx, a sample is one row of a batch.
Equal to megatron-core 0.16 to 0.19, on x86-64 (elsewhere a compiler may fuse the blend's multiply and add).
"""

from __future__ import annotations

import ctypes
import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from meshfeed.arrays import Array, Floats, Ints
from meshfeed.errors import RecipeError
from meshfeed.native import ARRAY, LONGS, WHOLE, compiled

Integers = npt.NDArray[np.integer[Any]]

Shuffle = Callable[[Array], None]
Part = Literal["train", "valid", "test"]
PARTS: tuple[Part, ...] = ("train", "valid", "test")

_SEPARATE_BELOW = 0.80  # of an epoch: a last epoch that is used less than this is shuffled by itself
_BLOCK = 1 << 14  # documents whose ends fit a core's cache
_SHUFFLED = np.dtype([("document", "<i4"), ("length", "<i4")])

_HERE = Path(__file__).parent
_shuffle = compiled("mf_shuffle", ARRAY, WHOLE, WHOLE, WHOLE, WHOLE, folder=_HERE)
_blend_steps = compiled("mf_blend", WHOLE, *[ARRAY] * 4, WHOLE, ARRAY, LONGS, folder=_HERE)


def document_range(split: str, part: Part, num_documents: int) -> tuple[int, int]:
    """The documents [begin, end) of a part, of a split such as "969,30,1".

    Raises RecipeError for a split that is not one to three numbers, or that gives the part nothing.
    """
    try:
        shares = [float(text) for text in re.findall(r"[.0-9]+", split)]
    except ValueError as bad:
        raise RecipeError(f"split={split!r}: {bad}; give numbers such as '969,30,1'") from bad
    if not 1 <= len(shares) <= len(PARTS) or not 0 < sum(shares) < math.inf:
        raise RecipeError(f"split={split!r}: give one to three numbers, not all 0, such as '969,30,1'")
    shares += [0.0] * (len(PARTS) - len(shares))
    ends = [0.0, *itertools.accumulate(normalized(shares))]
    place = PARTS.index(part)
    begin, end = (round(edge * float(num_documents)) for edge in ends[place : place + 2])
    if ends[place + 1] <= ends[place]:
        raise RecipeError(f"split={split!r} gives nothing to part={part!r}; choose another part or split")
    return begin, end


def normalized(weights: Sequence[float]) -> list[float]:
    """Weights over their sum, rounded as Megatron rounds them."""
    raw = np.array(weights, np.float64)
    return (raw / np.sum(raw)).tolist()


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """The epochs of a dataset, and the samples that it makes of them.

    Attributes:
        length: tokens of a sample, without the extra one.
        extra: 1 if a sample includes the token after it, for its last label; else 0.
        epoch_tokens: tokens of one epoch.
        num_epochs: how many epochs are concatenated.
        separate_last: whether documents and samples of the last epoch are shuffled by themselves.
        num_samples: samples in all.
        num_first: samples that are shuffled together, before those of a separate last epoch.
    """

    length: int
    extra: int
    epoch_tokens: int
    num_epochs: int
    separate_last: bool
    num_samples: int
    num_first: int


def passes_of(
    epoch_tokens: int, length: int, num_samples: int | None, *, extra: bool = True, drop_last: bool = True
) -> Passes:
    """As many epochs as `num_samples` samples need; None for one epoch.

    epoch_tokens: at least 1. drop_last: whether to drop the tokens at the end that do not fill a sample.
    """
    num_epochs = 1
    if num_samples is not None:
        num_epochs = max(1, -(-(num_samples * length + extra) // epoch_tokens))
    separate, before = False, 0
    if num_samples is not None and num_epochs > 1:
        before = ((num_epochs - 1) * epoch_tokens - extra) // length
        per_epoch = (epoch_tokens - extra) // length
        separate = num_samples - before < int(_SEPARATE_BELOW * per_epoch)
    usable = num_epochs * epoch_tokens - extra
    # In single precision, as in Megatron: past 2**24 tokens this rounds.
    total = usable // length if drop_last else math.ceil(np.float32(usable) / np.float32(length))
    return Passes(
        length=length,
        extra=int(extra),
        epoch_tokens=epoch_tokens,
        num_epochs=num_epochs,
        separate_last=separate,
        num_samples=total,
        num_first=before if separate else total,
    )


def build_index(passes: Passes, lengths: Ints, first_document: int, seed: int) -> dict[str, Integers]:
    """The three arrays of a dataset.

    lengths: tokens of its documents, int32 [d], which are numbered from `first_document`.

    Returns "document", int32 [num_epochs * d]: documents in the order in which they are concatenated;
    "sample", int32 or int64 [num_samples + 1, 2]: index in that order and token in that document where each
    sample starts, and the last one ends; "shuffle", uint32 or int64 [num_samples]: the order of samples.
    """
    if not 0 <= seed < 2**32:
        raise RecipeError(f"seed={seed}: Megatron's order takes seeds from 0 to 2**32 - 1")
    shuffle = _shuffle_of(seed)
    shuffled = _shuffled_documents(passes, lengths, first_document, shuffle)
    document = np.ascontiguousarray(shuffled["document"])
    sample = _sample_starts(passes, shuffled["length"])
    del shuffled
    return {"document": document, "sample": sample, "shuffle": _shuffled_samples(passes, shuffle)}


def _shuffle_of(seed: int) -> Shuffle:
    """The `shuffle` of a `RandomState(seed)`, for arrays of 4 or 8 bytes an element."""
    bits = np.random.MT19937()
    random = np.random.RandomState(bits)
    random.seed(seed)
    if _shuffle is None:
        return random.shuffle
    in_place, interface = _shuffle, bits.ctypes
    next_uint32 = ctypes.cast(interface.next_uint32, ctypes.c_void_p).value

    def shuffle(items: Array) -> None:
        if items.size > 2**32:  # more takes draws of 64 bits
            random.shuffle(items)
        else:
            in_place(items, items.size, items.itemsize, next_uint32, interface.state_address)

    return shuffle


def _shuffled_documents(passes: Passes, lengths: Ints, first_document: int, shuffle: Shuffle) -> Array:
    """Documents with their lengths, in order; the draws of a shuffle depend on its size alone.

    The length is shuffled with its document, because a later look-up would be 10**7 cache misses, and because
    NumPy shuffles eight bytes faster than four.
    """
    count, epochs = lengths.size, passes.num_epochs
    shuffled = np.empty(epochs * count, _SHUFFLED)
    both = shuffled.view("<i8").reshape(epochs, count)  # one field at a time takes three times as long
    np.left_shift(lengths, 32, out=both, dtype=np.int64)
    both += np.arange(first_document, first_document + count)
    together = (epochs - 1) * count if passes.separate_last else epochs * count
    shuffle(shuffled[:together])
    if passes.separate_last:
        shuffle(shuffled[together:])
    return shuffled


def _sample_starts(passes: Passes, lengths: Ints) -> Integers:
    """Where each sample starts in the concatenation of documents of these lengths.

    Sample i starts at token t = i * length, in the first document that ends at or after t + extra. So without
    an extra token it may start behind the last token of a document.
    """
    length, extra = passes.length, passes.extra
    dtype = np.int64 if lengths.size > np.iinfo(np.int32).max else np.int32
    starts = np.empty((passes.num_samples + 1, 2), dtype)
    starts[0] = 0
    known, base = 1, 0  # starts found so far, and tokens before this block
    for first in range(0, lengths.size, _BLOCK):
        sizes = lengths[first : first + _BLOCK]
        ends = np.cumsum(sizes, dtype=np.int64)
        top = base + int(ends[-1])
        reached = min(max((top - extra) // length + 1, known), passes.num_samples + 1)
        tokens = np.arange(known, reached) * length - base
        places = np.searchsorted(ends, tokens + extra)
        starts[known:reached, 0] = places + first
        starts[known:reached, 1] = tokens - (ends[places] - sizes[places])
        known, base = reached, top
    if lengths.size:  # a sample that the tokens do not fill ends with them
        starts[known:] = lengths.size - 1, int(lengths[-1]) - extra
    return starts


def _shuffled_samples(passes: Passes, shuffle: Shuffle) -> Integers:
    dtype = np.int64 if passes.num_samples >= np.iinfo(np.uint32).max - 1 else np.uint32
    shuffled = np.arange(passes.num_samples, dtype=dtype)
    shuffle(shuffled[: passes.num_first])
    if passes.num_first < passes.num_samples:
        shuffle(shuffled[passes.num_first :])
    return shuffled


# -- blends ---------------------------------------------------------------------------------------------


def sizes_of_blend(weights: Sequence[float], num_samples: int, surplus: float) -> tuple[list[int], list[int]]:
    """Samples that each dataset gives to a blend, and the slightly larger number that it is built with.

    weights: of each dataset, any positive numbers. Both lists as long as `weights`.
    """
    given = [math.ceil(num_samples * weight) for weight in normalized(weights)]
    return given, [math.ceil(count * (1 + surplus)) for count in given]


def blend_of_weights(weights: Sequence[float], num_samples: int) -> dict[str, Integers]:
    """At each step, the dataset that lags most behind its weight, the first of equals.

    Returns "dataset", int16 [num_samples], and "sample", int64 [num_samples], which of that dataset's.
    """
    # Normalised twice, as by the builder and by the dataset: each time rounds.
    shares = np.array(normalized(normalized(weights)))
    return _blend(shares, num_samples, None)


def blend_of_sizes(sizes: Sequence[int], num_samples: int | None) -> dict[str, Integers]:
    """Datasets in proportion to their sizes; None draws every sample of each, see `blend_of_weights`."""
    if num_samples is not None:
        return _blend(np.array(normalized(sizes)), min(num_samples, sum(sizes)), None)
    limits = np.array(sizes, np.float64)
    return _blend(limits / np.float64(sum(sizes)), sum(sizes), limits)


def _blend(shares: Floats, num_steps: int, limits: Floats | None) -> dict[str, Integers]:
    """Always the dataset whose count lags most behind its share of the steps so far, the first of equals.

    shares: of each dataset; float64 [d], together 1. limits: samples after which a dataset is left out; None
    where they do not end.
    """
    if shares.size >= np.iinfo(np.int16).max:
        raise RecipeError(f"a blend of {shares.size} datasets; Megatron blends at most 32766")
    dataset, sample = np.empty(num_steps, np.int16), np.empty(num_steps, np.int64)
    counts, lag = np.zeros(shares.size), np.empty(shares.size)
    if _blend_steps is not None:
        ends = np.full(shares.size, np.inf) if limits is None else limits
        _blend_steps(shares.size, shares.copy(), ends, counts, lag, num_steps, dataset, sample)
        return {"dataset": dataset, "sample": sample}
    for step in range(num_steps):
        np.multiply(shares, float(max(step, 1)), out=lag)
        lag -= counts
        if limits is not None:
            lag[counts >= limits] = -np.inf
        chosen = lag.argmax()
        dataset[step], sample[step] = chosen, counts[chosen]
        counts[chosen] += 1
    return {"dataset": dataset, "sample": sample}
