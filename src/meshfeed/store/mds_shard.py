"""One shard of an MDS dataset: where its samples lie, and their values.

Little-endian. A sample has a word for the size of each value whose column has no fixed size, then the values:

    u32 num_samples | u32 offsets[num_samples + 1] | the writer's settings | samples
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from meshfeed.errors import StoreError
from meshfeed.files import ByteFile
from meshfeed.store.mds_index import Column, Shard
from meshfeed.store.mds_sample import DTYPE_CODES, Ndarray

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Tokens:
    """The column that holds tokens: its place, its dtype, and what its encoding says of shapes."""

    at: int
    dtype: np.dtype[Any]
    kind: Ndarray | None

    @property
    def fixed(self) -> int | None:
        """Tokens of every document, where the encoding says so."""
        shape = None if self.kind is None or self.kind.dtype is None else self.kind.shape
        return None if shape is None else int(np.prod(shape))


class ShardFile:
    """A shard, readable while entered. All methods raise StoreError, naming file and byte."""

    def __init__(self, shard: Shard, columns: Sequence[Column], file: ByteFile) -> None:
        self.shard, self.file = shard, file
        self._columns = columns
        self._variable = [at for at, column in enumerate(columns) if column.size_bytes is None]

    def __enter__(self) -> Self:
        self.file.__enter__()
        try:
            self._open()
        except BaseException:
            self.file.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.file.__exit__(*exc)

    def _open(self) -> None:
        shard, file = self.shard, self.file
        if file.size_bytes != shard.raw_bytes:
            raise StoreError(
                f"{file.url}: {file.size_bytes} bytes, its index says {shard.raw_bytes}; copy it again"
            )
        count, self._offsets = (
            each[:].astype(np.int64)
            for each in file.arrays(("<u4", 0, 1), ("<u4", 4, shard.num_samples + 1), in_order=True)
        )
        (self._bytes,) = file.arrays(("u1", 0, shard.raw_bytes))
        offsets = self._offsets
        first = 4 * (shard.num_samples + 2)
        if int(count[0]) != shard.num_samples:
            raise StoreError(f"{file.url}: byte 0: {count[0]} samples, its index says {shard.num_samples}")
        sizes = np.diff(offsets)
        if offsets[0] < first or offsets[-1] != shard.raw_bytes or (sizes < self._least).any():
            at = int((sizes < self._least).argmax())
            raise StoreError(
                f"{file.url}: byte {4 * (at + 2)}: the samples' offsets do not ascend by at least "
                f"{self._least} from {first} to {shard.raw_bytes}; copy it again"
            )

    @property
    def _least(self) -> int:
        """Bytes that a sample has at least."""
        return 4 * len(self._variable) + sum(column.size_bytes or 0 for column in self._columns)

    def spans(self, samples: I64, column: int) -> tuple[I64, I64]:
        """(first byte, bytes) of one column's value in each sample; int64 [n] each."""
        begins = self._offsets[samples] + 4 * len(self._variable)
        words = self._words(samples)
        sizes = np.zeros((samples.size, len(self._columns)), np.int64)
        for at, each in enumerate(self._columns):
            sizes[:, at] = words[:, self._variable.index(at)] if each.size_bytes is None else each.size_bytes
        ends = begins + sizes.cumsum(axis=1).T[-1] if sizes.size else begins
        wrong = ends != self._offsets[samples + 1]
        if wrong.any():
            i = int(wrong.argmax())
            raise StoreError(
                f"{self.file.url}: byte {self._offsets[samples[i]]}: sample {samples[i]} has values of "
                f"{sizes[i].sum()} bytes in {np.diff(self._offsets)[samples[i]]}; copy it again"
            )
        return begins + sizes[:, :column].sum(axis=1), sizes[:, column]

    def token_spans(self, samples: I64, tokens: Tokens) -> tuple[I64, I64]:
        """(first byte, number) of the tokens of each sample; int64 [n] each."""
        begins, sizes = self.spans(samples, tokens.at)
        if tokens.kind is not None:
            lead = self._lead(begins, sizes, tokens)
            begins, sizes = begins + lead, sizes - lead
        itemsize = tokens.dtype.itemsize
        wrong = (sizes < 0) | (sizes % itemsize != 0)
        if wrong.any():
            i = int(wrong.argmax())
            raise StoreError(
                f"{self.file.url}: byte {begins[i]}: {sizes[i]} bytes are no whole number of "
                f"{tokens.dtype.name}"
            )
        return begins, sizes // itemsize

    def value(self, sample: int, column: int) -> bytes:
        """The bytes of one value."""
        begin, size = (int(each[0]) for each in self.spans(np.array([sample]), column))
        return self._bytes[begin : begin + size].tobytes()

    def _words(self, samples: I64) -> I64:
        """Sizes of the values of no fixed size; int64 [n, columns of that kind]."""
        places = self._offsets[samples][:, None] + np.arange(4 * len(self._variable))
        words = np.ascontiguousarray(self._bytes[places]).view("<u4")
        return words.reshape(samples.size, len(self._variable)).astype(np.int64)

    def _lead(self, begins: I64, sizes: I64, tokens: Tokens) -> I64:
        """Bytes before the elements of each array: its dtype and its shape, as far as they are not fixed."""
        kind = tokens.kind
        lead = np.zeros(begins.size, np.int64)
        if kind is None or not begins.size:
            return lead
        if kind.dtype is None:
            self._refuse_short(begins, sizes, 1)
            codes = self._bytes[begins]
            wrong = np.array(
                [np.dtype(DTYPE_CODES.get(code, "V1")) != tokens.dtype for code in codes.tolist()]
            )
            if wrong.any():
                at = int(begins[wrong.argmax()])
                raise StoreError(
                    f"{self.file.url}: byte {at}: an array of another dtype than {tokens.dtype.name}"
                )
            lead += 1
        if kind.shape is None:
            self._refuse_short(begins, sizes, int(lead[0]) + 1)
            shapes = self._bytes[begins + lead].astype(np.int64)
            lead += 1 + (shapes >> 2) * (1 << (shapes & 3))
        return lead

    def _refuse_short(self, begins: I64, sizes: I64, least: int) -> None:
        if (sizes < least).any():
            at = int(begins[(sizes < least).argmax()])
            raise StoreError(f"{self.file.url}: byte {at}: an array without a header; copy it again")
