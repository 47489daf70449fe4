"""MDS, MosaicML Streaming's format, as a token store and as a dataset of samples; without its pickles."""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator, Mapping
from functools import cached_property
from math import prod
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from meshfeed.errors import StoreError
from meshfeed.files import ByteFile, Content, Folder
from meshfeed.formats.mds_index import INDEX, Column, Shard, least_bytes, parse_index
from meshfeed.formats.mds_sample import (
    DTYPE_CODES,
    PICKLE,
    Sample,
    decode,
    ndarray_of,
    refused_pickle,
)
from meshfeed.formats.mds_shard import ShardFile, Tokens, refuse_size, values_of
from meshfeed.formats.sharded import Even, ShardedStore
from meshfeed.order import EpochIndex
from meshfeed.store.base import checked_places
from meshfeed.store.format import Place, StoreFormat
from meshfeed.store.stream import I64

_TOKENS = ("tokens", "input_ids")


class MDSStore(ShardedStore):
    """An MDS dataset: a document is the token column of a sample, and documents lie end to end.

    `verify` checks the hashes of local shards, which are read in place.

    As a dataset for `mf.Mapped`, `store[EpochIndex]` is a sample with all its columns, decoded.

    Args:
        folder: holds index.json.
        column: of the tokens; None takes "tokens", "input_ids", or the only ndarray.
        dtype: of the tokens, where the column is plain bytes.

    How long documents are is known from the index where every array has one shape, and from the head of every
    shard, 4 bytes a sample, where only one column differs in size. (An ndarray column with a dtype is then
    taken to have one dimension, if sizes and some samples agree; `verify` looks at all.) Where several
    columns differ, or arrays tell their own dtype, every sample has to be looked at: the first process of a
    node to ask fetches the whole dataset once, as it does where shards are compressed or have hashes.
    """

    kind = "mds"

    def __init__(
        self, folder: Folder, *, column: str | None = None, dtype: npt.DTypeLike | None = None
    ) -> None:
        super().__init__(folder)
        self._column, self._given_dtype = column, dtype

    # -- what it is ---------------------------------------------------------------------------------------

    @cached_property
    def _parsed(self) -> tuple[bytes, list[Column], list[Shard]]:
        index = self._folder.file(INDEX)
        text = index.peek([(0, index.size_bytes)])[0]
        return text, *parse_index(index.url, text)

    @property
    def encodings(self) -> Mapping[str, str]:
        """Name -> encoding of every column."""
        return {column.name: column.encoding for column in self._parsed[1]}

    def beside(self) -> Mapping[str, MDSStore]:
        """Every other column, as a store whose tokens it is."""
        others = [column.name for at, column in enumerate(self._parsed[1]) if at != self._tokens.at]
        return {name: MDSStore(self._folder, column=name) for name in others}

    @property
    def shards(self) -> list[Shard]:
        """As the index lists them."""
        return self._parsed[2]

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the tokens, little-endian."""
        return self._tokens.dtype

    @cached_property
    def _tokens(self) -> Tokens:
        columns = self._parsed[1]
        arrays = [column.name for column in columns if column.encoding.startswith("ndarray")]
        names = [column.name for column in columns]
        usual = next((name for name in _TOKENS if name in names), None)
        name = self._column or usual or (arrays[0] if len(arrays) == 1 else None)
        if name not in names:
            raise StoreError(
                f"{self.path}: its columns are {', '.join(names)}; say which holds tokens: "
                f"mf.open(path, column=...)"
            )
        at = names.index(name)
        encoding = columns[at].encoding
        if encoding == PICKLE:
            raise refused_pickle(f"{self.path}: column {name!r}")
        try:
            kind = ndarray_of(encoding)
        except ValueError as error:
            raise StoreError(f"{self.path}: column {name!r}: {error}") from error
        if kind is None and (encoding != "bytes" or self._given_dtype is None):
            raise StoreError(
                f"{self.path}: column {name!r} is {encoding}; tokens are an ndarray, or bytes with "
                f"mf.open(path, dtype=...)"
            )
        if kind is None or kind.dtype is None:
            dtype = (
                np.dtype(self._given_dtype) if kind is None or self._given_dtype else self._first_dtype(at)
            )
        else:
            dtype = kind.dtype
            size = kind.shape and prod(kind.shape) * dtype.itemsize
            if size and columns[at].size_bytes not in (None, size):
                raise StoreError(
                    f"{self.path}: column {name!r} is {encoding}, its size {columns[at].size_bytes}; "
                    f"recreate the index, or copy it again"
                )
        return Tokens(at, dtype.newbyteorder("<"), kind)

    def _first_dtype(self, column: int) -> np.dtype[Any]:
        """What the first array says of its elements; the others must say the same."""
        for number, shard in enumerate(self._parsed[2]):
            if shard.num_samples:
                with ShardFile(shard, self._parsed[1], self._checked_file(number)) as file:
                    value = file.value(0, column)
                if value and value[0] in DTYPE_CODES:
                    return np.dtype(DTYPE_CODES[value[0]])
                raise StoreError(f"{file.file.url}: sample 0 has no array in its token column")
        return np.dtype(np.uint16)

    # -- what ShardedStore asks ---------------------------------------------------------------------------

    def _identity(self) -> bytes:
        return self._parsed[0] + f"{self._column} {self._given_dtype}".encode()

    def _content(self, number: int) -> Content | None:
        return self._parsed[2][number].content

    def _refuse_size(self, number: int, file: ByteFile) -> None:
        refuse_size(self._parsed[2][number], file)

    def _places(self, number: int, file: ByteFile) -> tuple[I64, I64]:
        with ShardFile(self._parsed[2][number], self._parsed[1], file) as shard:
            return shard.places(self._tokens)

    @cached_property
    def _fixed_tokens(self) -> int | None:
        return self._tokens.fixed

    @cached_property
    def _even(self) -> Even | None:
        """Where no value differs in size, samples fill a shard up to its end."""
        columns, tokens = self._parsed[1], self._tokens
        if tokens.fixed is None or any(column.size_bytes is None for column in columns):
            return None
        counts, sizes = (
            np.array([(s.num_samples, s.raw_bytes) for s in self.shards], np.int64).reshape(-1, 2).T
        )
        stride = least_bytes(columns)
        return Even(sizes - counts * stride + least_bytes(columns[: tokens.at]), stride)

    # -- samples ------------------------------------------------------------------------------------------

    def __getitem__(self, at: EpochIndex | int) -> dict[str, Any]:
        return self.sample(at if isinstance(at, int) else at.index)

    def sample(self, index: int, names: Container[str] | None = None) -> dict[str, Any]:
        """The named columns of a sample, or every one, decoded; see `mds_sample.decode`.

        Pickled ones are never decoded: naming one, or looking it up in the sample, raises StoreError.
        """
        (place,) = checked_places(self.path, np.array([index]), len(self), "sample").tolist()
        number = int(self.shard_ends.searchsorted(place, side="right"))
        first = int(self._firsts[number])
        columns = self._parsed[1]
        with self:
            file = self._files.file(number)
            where = f"{file.url}: sample {place - first}"
            begin, end = np.frombuffer(_read(file, 4 * (1 + place - first), 8), "<u4").tolist()
            try:
                if not 4 <= begin <= end <= file.size_bytes:
                    raise ValueError(f"bytes {begin}..{end} of {file.size_bytes}")
                values = values_of(columns, _read(file, begin, end - begin))
            except ValueError as error:
                raise StoreError(f"{where} has {error}; copy it again") from error
        found = {
            column.name: decode(column.encoding, value, f"{where}, column {column.name!r}")
            for column, value in zip(columns, values)
            if (names is None and column.encoding != PICKLE) or (names is not None and column.name in names)
        }
        pickled = tuple(column.name for column in columns if column.encoding == PICKLE)
        return Sample(found, where, pickled) if pickled else found

    def facts(self) -> dict[str, Any]:
        """What it is, as JSON-able values."""
        columns = ", ".join(f"{name}: {encoding}" for name, encoding in self.encodings.items())
        return {"format": "MDS, version 2", "num_shards": self.shard_ends.size, "columns": columns}

    def _within(self, folder: Folder) -> Self:
        return type(self)(folder, column=self._column, dtype=self._given_dtype)

    def _verified(self) -> Iterator[float]:
        """Check hashes, offsets and sizes of values, shard by shard, yielding the part done, in (0, 1]."""
        _, columns, shards = self._parsed
        with contextlib.suppress(StoreError):  # samples need no tokens
            _ = self._tokens
        tokens: Tokens | None = vars(self).get("_tokens")
        for number, shard in enumerate(shards):
            with ShardFile(shard, columns, self._folder.file(shard.name, shard.content)) as file:
                samples = np.arange(shard.num_samples)
                if columns and samples.size:
                    file.spans(samples, 0)
                if tokens is not None:
                    file.refuse_other_places(tokens)
            yield (number + 1) / len(shards)


def _read(file: ByteFile, begin: int, size: int) -> bytes:
    out = np.empty(size, np.uint8)
    file.read_into(out, np.array([begin]), np.array([size]))
    return out.tobytes()


class MDSFormat(StoreFormat):
    """A folder with MDS's index.json."""

    name = "MDS"
    lies_at = "a folder of an MDS dataset"
    options = ("column", "dtype")

    def open(self, place: Place) -> MDSStore | None:
        """The store, if there is an index.json: that of litdata is recognised before."""
        if place.is_file or not place.holds(place.within, INDEX):
            return None
        return MDSStore(place.within, column=place.column, dtype=place.dtype)
