"""One shard of an MDS dataset: where its samples lie, and their values.

Little-endian. A sample has a word for the size of each value whose column has no fixed size, then the values:

    u32 num_samples | u32 offsets[num_samples + 1] | the writer's settings | samples
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from meshfeed.errors import StoreError
from meshfeed.files import ByteFile
from meshfeed.formats.mds_index import Column, Shard, least_bytes
from meshfeed.formats.mds_sample import DTYPE_CODES, Ndarray
from meshfeed.formats.table_file import TableFile

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
        return None if shape is None else prod(shape)

    def head_bytes(self, sizes: I64) -> I64 | None:
        """Bytes before the elements of values of such sizes, where those tell; int64 [n] -> int64 [n].

        Of arrays whose shape differs they tell it if all have one dimension, which is for the caller to see.
        """
        if self.kind is None or (self.kind.dtype is not None and self.kind.shape is not None):
            return np.zeros_like(sizes)
        if self.kind.dtype is None:
            return None
        found = np.zeros_like(sizes)
        for width in (1, 2, 4):  # of the dimension, the least that holds it
            elements, rest = np.divmod(sizes - 1 - width, self.dtype.itemsize)
            least = 0 if width == 1 else 1 << 4 * width
            found[(rest == 0) & (elements >= least) & (elements < 1 << 8 * width)] = 1 + width
        return found if found.all() else None


def row_head(elements: int) -> bytes:
    """What lies before the elements of an array of one dimension whose dtype the encoding tells."""
    code = 0 if elements < 1 << 8 else 1 if elements < 1 << 16 else 2
    return bytes([1 << 2 | code]) + elements.to_bytes(1 << code, "little")


def refuse_size(shard: Shard, file: ByteFile) -> None:
    """Raise StoreError for a file that has not the size that the index says."""
    if file.size_bytes != shard.raw_bytes:
        raise StoreError(
            f"{file.url}: {file.size_bytes} bytes, its index says {shard.raw_bytes}; copy it again"
        )


def values_of(columns: Sequence[Column], sample: bytes) -> list[bytes]:
    """The values of a sample, by column. Raises ValueError for bytes that are no such sample."""
    sizes = [column.size_bytes for column in columns]
    begin = 4 * sizes.count(None)
    words = iter(np.frombuffer(sample[:begin], "<u4").tolist())
    ends = list(accumulate((next(words, 0) if size is None else size for size in sizes), initial=begin))
    if ends[-1] != len(sample):
        raise ValueError(f"values of {ends[-1] - begin} bytes in {len(sample)}")
    return [sample[begin:end] for begin, end in pairwise(ends)]


class ShardFile(TableFile):
    """A shard, readable while entered. All methods raise StoreError, naming file and byte."""

    noun = "samples"
    has_gap = True

    def __init__(self, shard: Shard, columns: Sequence[Column], file: ByteFile) -> None:
        super().__init__(file, shard.num_samples, least_bytes(columns))
        self.shard = shard
        self._columns = columns
        self._variable = [at for at, column in enumerate(columns) if column.size_bytes is None]

    def _read_table(self) -> I64:
        refuse_size(self.shard, self.file)
        return super()._read_table()

    def places(self, tokens: Tokens) -> tuple[I64, I64]:
        """(byte where its tokens begin, tokens) of every sample; int64 [num_samples] each.

        By the table alone where that tells, else by the heads of all samples, for which the whole shard is
        announced. Where it is for arrays to tell their shapes, they are taken to have one dimension if their
        sizes fit that, and the first and the last of the shard do.
        """
        found = self._by_table(tokens)
        if found is not None:
            return found
        begins, counts = zip(*(self.token_spans(some, tokens) for some in self._slices()))
        return np.concatenate(begins), np.concatenate(counts)

    def refuse_other_places(self, tokens: Tokens) -> None:
        """Raise StoreError where what `places` takes for granted does not hold of a sample."""
        every = np.arange(self.shard.num_samples)
        told, found = self._by_table(tokens), self.token_spans(every, tokens)
        wrong = np.zeros(0) if told is None else (told[0] != found[0]) | (told[1] != found[1])
        if wrong.any():
            i = int(wrong.argmax())
            raise StoreError(
                f"{self.file.url}: byte {found[0][i]}: sample {i} has an array of several dimensions, others "
                f"have one; write it again with one"
            )

    def _by_table(self, tokens: Tokens) -> tuple[I64, I64] | None:
        sizes = [column.size_bytes for column in self._columns]
        size, before, after = sizes[tokens.at], sizes[: tokens.at], sizes[tokens.at + 1 :]
        lead = 4 * len(self._variable)
        begins = self._offsets[:-1] + lead + sum(each or 0 for each in before)
        ends = self._offsets[1:] - sum(each or 0 for each in after)
        if size is not None and None not in before:
            ends = begins + size
        elif size is not None and None not in after:
            begins = ends - size
        elif None in before or None in after:
            return None
        heads = tokens.head_bytes(ends - begins)
        if heads is None:
            return None
        found = self._counted(begins + heads, ends - begins - heads, tokens)
        return found if not heads.any() or self._are_rows(begins, heads, found[1]) else None

    def _are_rows(self, begins: I64, heads: I64, counts: I64) -> bool:
        """Whether the first array and the last have the heads of one dimension."""
        ends = [0, -1] if begins.size > 1 else [0]
        spans = zip(begins[ends].tolist(), (begins + heads)[ends].tolist())
        return self.file.peek(list(spans)) == [row_head(count) for count in counts[ends].tolist()]

    def _counted(self, begins: I64, sizes: I64, tokens: Tokens) -> tuple[I64, I64]:
        """(first byte, number) of the tokens in some bytes."""
        counts, rest = np.divmod(sizes, tokens.dtype.itemsize)
        wrong = (sizes < 0) | (rest != 0)
        if tokens.fixed is not None:
            wrong |= counts != tokens.fixed
        if wrong.any():
            i = int(wrong.argmax())
            raise StoreError(
                f"{self.file.url}: byte {begins[i]}: {sizes[i]} bytes are not a whole number of "
                f"{tokens.dtype.name}, or not as many as the encoding says; copy it again"
            )
        return begins, counts

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
        return self._counted(begins, sizes, tokens)

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
            same = [code for code, name in DTYPE_CODES.items() if np.dtype(name) == tokens.dtype]
            wrong = ~np.isin(self._bytes[begins], same)
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
