"""A store of documents with given lengths and made-up tokens: for tests, plans and benchmarks."""

from __future__ import annotations

import hashlib
import os
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from meshfeed.arrays import Array, Longs
from meshfeed.errors import StoreError
from meshfeed.files import FileStats
from meshfeed.intervals import numbers_in
from meshfeed.store.base import LengthsIndex, StreamStore

_VOCAB = 32_768


class Lengths(StreamStore):
    """Documents of given lengths; token t of the stream is a hash of t.

    Keeps only the lengths, in memory. Works like any token store.

    Args:
        lengths: tokens of each document; whole numbers from 0.

    Raises StoreError for anything else.
    """

    path = "Lengths"

    def __init__(self, lengths: npt.ArrayLike) -> None:
        given = np.asarray(lengths)
        if given.ndim != 1 or (given.size and given.dtype.kind not in "iu") or (given < 0).any():
            raise StoreError("Lengths: give one whole number from 0 for each document, in one dimension")
        super().__init__()
        self._lengths = given.astype(np.int64)
        self._documents = LengthsIndex(np.concatenate(([0], np.cumsum(self._lengths))))
        self._stats = FileStats()

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Self:
        """From a text file of lengths: one per line, or several between commas or spaces.

        A first line without a number is taken for the header of a CSV. Raises StoreError for any other text,
        and for a file without a length.
        """
        where, lengths = os.fspath(path), list[int]()
        try:
            lines = Path(path).read_text().splitlines()
        except OSError as bad:
            raise StoreError(f"{where}: {bad.strerror}") from bad
        except ValueError as bad:
            raise StoreError(f"{where} is not a text file; write one whole number per line") from bad
        for number, line in enumerate(lines, 1):
            values = line.replace(",", " ").split()
            numbers = (value.lstrip("+-.")[:1].isdigit() for value in values)
            if number > 1 or len(lines) == 1 or any(numbers):
                try:
                    lengths += map(_length_of, values)
                except ValueError as bad:
                    raise StoreError(f"{where}:{number}: {bad}") from None
        if not lengths:
            raise StoreError(f"{where} holds no lengths; write one whole number per line")
        return cls(np.array(lengths, np.int64))

    @classmethod
    def lognormal(
        cls,
        count: int,
        *,
        mean: float,
        sigma: float,
        shortest: int = 1,
        longest: int = 2**31 - 1,
        seed: int = 0,
    ) -> Self:
        """`count` lengths with this mean before they are clipped to shortest ... longest.

        sigma: of the logarithm of the lengths; 0 makes all equal. Raises StoreError for invalid parameters.
        """
        if count < 0 or mean <= 0 or sigma < 0 or not 0 <= shortest <= longest:
            raise StoreError(
                f"Lengths.lognormal(count={count}, mean={mean}, sigma={sigma}, shortest={shortest}, "
                f"longest={longest}): counts and sigma from 0, mean above 0, shortest up to longest"
            )
        rng = np.random.default_rng(seed)
        drawn = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, count)
        return cls(drawn.clip(shortest, longest).astype(np.int64))

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(np.uint16)

    @property
    def documents(self) -> LengthsIndex:
        return self._documents

    @property
    def stats(self) -> FileStats:
        return self._stats

    @cached_property
    def fingerprint(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return hashlib.blake2b(self._lengths.tobytes(), digest_size=16).hexdigest()

    def read_into(self, out: Array, starts: Longs, stops: Longs) -> None:
        sizes = stops - starts
        place = numbers_in(starts, sizes).astype(np.uint64)
        out[:] = (place * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(40)) % np.uint64(_VOCAB)
        self._stats.reads += sizes.size
        self._stats.bytes_read += out.nbytes

    def _refuse_not_entered(self) -> None:
        return  # there is nothing to open

    def __repr__(self) -> str:
        return f"Lengths({self.num_documents} documents, {self.num_tokens} tokens)"


def _length_of(text: str) -> int:
    """The length in a text. Raises ValueError saying what is wrong."""
    try:
        length = int(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a whole number; write one per line") from None
    if length < 0:
        raise ValueError(f"{length}; a length is 0 or more")
    if length >= 2**63:
        raise ValueError(f"{length}; a length is below 2**63")
    return length
