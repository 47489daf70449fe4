"""MDS, MosaicML Streaming's format, as a token store and as a dataset of samples; without its pickles."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod
from typing import Any, Self, overload

import numpy as np
import numpy.typing as npt

from meshfeed.arrays import Longs
from meshfeed.errors import OptionError, StoreError
from meshfeed.files import ByteFile, Content, Folder
from meshfeed.formats.documents import read_bytes
from meshfeed.formats.items import Column, Head, Items, ItemsFile
from meshfeed.formats.mds_index import INDEX, MDSShard, least_bytes, parse_index
from meshfeed.formats.mds_sample import DTYPE_CODES, PICKLE, MDSSample, decode, ndarray_of, refused_pickle
from meshfeed.formats.sharded import ShardedStore
from meshfeed.formats.shards import EvenDocuments, ShardedDataset
from meshfeed.order import EpochIndex
from meshfeed.store.base import StreamStore, checked_places
from meshfeed.store.format import Place, StoreFormat


class MDSDataset(ShardedDataset):
    """See `MDSStore`."""

    kind, format = "mds", "MDS, version 2"

    def __init__(
        self, folder: Folder, *, column: str | None = None, dtype: npt.DTypeLike | None = None
    ) -> None:
        super().__init__(folder, column=column)
        self._given_dtype = dtype

    @cached_property
    def _parsed(self) -> tuple[bytes, list[Column], list[MDSShard]]:
        index = self.folder.file(INDEX)
        text = index.peek([(0, index.size_bytes)])[0]
        return text, *parse_index(index.url, text)

    @property
    def shards(self) -> list[MDSShard]:
        return self._parsed[2]

    @property
    def fields(self) -> list[Column]:
        return self._parsed[1]

    def laid_out(self) -> Items:
        fields, given = self.fields, self._given_dtype
        at = self._column_of_tokens([each.name for each in fields if each.encoding.startswith("ndarray")])
        where, encoding = f"{self.path}: column {fields[at].name!r}", fields[at].encoding
        if encoding == PICKLE:
            raise refused_pickle(where)
        try:
            kind = ndarray_of(encoding)
        except ValueError as error:
            raise StoreError(f"{where}: {error}") from error
        if kind is None:
            if encoding != "bytes" or given is None:
                raise OptionError(
                    f"{where} is {encoding}; tokens are an ndarray, or bytes with mf.open(path, dtype=...)"
                )
            return self._made_of(at, np.dtype(given))
        if kind.dtype is None:
            if not given:  # as in the first array; the others must agree
                value = self._first_value(self._made_of(at, np.dtype(np.uint8)))
                if value and value[0] not in DTYPE_CODES:
                    raise StoreError(f"{where} has no array in sample 0; copy the shard again")
                given = DTYPE_CODES[value[0]] if value else np.uint16
            return self._made_of(at, np.dtype(given), ArrayHead(has_dtype=True))
        if given is not None and np.dtype(given) != kind.dtype:
            raise OptionError(f"{where} is {encoding}, not dtype={given!r}; leave that out")
        if kind.shape is None:
            return self._made_of(at, kind.dtype, ArrayHead(has_dtype=False))
        num_tokens = prod(kind.shape)
        if fields[at].size_bytes not in (None, num_tokens * kind.dtype.itemsize):
            raise StoreError(
                f"{where} is {encoding}, its size {fields[at].size_bytes}; recreate the "
                f"index, or copy it again"
            )
        return self._made_of(at, kind.dtype, num_tokens=num_tokens)

    def _made_of(
        self, at: int, dtype: np.dtype[Any], head: Head | None = None, num_tokens: int | None = None
    ) -> Items:
        sizes = tuple(field.size_bytes for field in self.fields)
        return Items(
            noun="sample",
            sizes=sizes,
            stored_sizes=tuple(at for at, size in enumerate(sizes) if size is None),
            at=at,
            dtype=np.dtype(dtype.name),
            head=head,
            num_tokens=num_tokens,
            has_gap=True,
        )

    def identity(self) -> bytes:
        return self._parsed[0] + f"{self.column} {self._given_dtype}".encode()

    def within(self, folder: Folder) -> Self:
        return type(self)(folder, column=self.column, dtype=self._given_dtype)

    def content(self, number: int) -> Content | None:
        return self.shards[number].content

    def refuse_size(self, number: int, file: ByteFile) -> None:
        expected = self.shards[number].raw_bytes
        if file.size_bytes != expected:
            raise StoreError(f"{file.url}: {file.size_bytes} bytes, its index says {expected}; copy it again")

    @cached_property
    def even(self) -> EvenDocuments | None:
        """If no value varies in size, samples fill a shard up to its end."""
        items = self.items
        if items.num_tokens is None or None in items.sizes:
            return None
        counts, sizes = (
            np.array([(s.num_documents, s.raw_bytes) for s in self.shards], np.int64).reshape(-1, 2).T
        )
        stride = items.least_bytes
        return EvenDocuments(sizes - counts * stride + least_bytes(self.fields[: items.at]), stride)

    def verify(self, number: int) -> None:
        try:
            _ = self.items
        except StoreError:  # samples need no tokens
            items, count = self._made_of(0, np.dtype(np.uint8)), self.shards[number].num_documents
            with ItemsFile(self.checked_file(number, whole=True), count, items) as file:
                if self.fields:
                    file.spans(np.arange(count), 0)
        else:
            super().verify(number)


class MDSStore(ShardedStore):
    """An MDS dataset: a document is the token column of a sample, in the order of the index.

    `verify` checks the hashes of local shards, which are read in place.

    As a dataset for `mf.Mapped`, `store[EpochIndex]` is a sample with all its columns, decoded.

    Args:
        folder: holds index.json.
        column: of the tokens; None takes "tokens", "input_ids", or the only ndarray.
        dtype: of the tokens, if the column is plain bytes.

    If every array has the same shape, the lengths of documents are in the index. If only one column varies in
    size, they are in the head of every shard, 4 bytes a sample. (An ndarray column with a dtype is then
    assumed to have one dimension, if sizes and some samples agree; `verify` checks all.) If several columns
    vary, or arrays store their own dtype, every sample must be read: the first process of a node fetches the
    whole dataset once, as it does if shards are compressed or have hashes.
    """

    def __init__(
        self, folder: Folder, *, column: str | None = None, dtype: npt.DTypeLike | None = None
    ) -> None:
        super().__init__(MDSDataset(folder, column=column, dtype=dtype))

    @overload
    def __getitem__(self, documents: slice) -> StreamStore: ...
    @overload
    def __getitem__(self, documents: EpochIndex | int) -> dict[str, Any]: ...

    def __getitem__(self, documents: slice | EpochIndex | int) -> StreamStore | dict[str, Any]:
        """A sample, as an item of a dataset, or some documents as a store."""
        if isinstance(documents, slice):
            return super().__getitem__(documents)
        return self.sample(documents if isinstance(documents, int) else documents.index)

    def sample(
        self, index: int, names: Container[str] | None = None, *, images: bool = True
    ) -> dict[str, Any]:
        """The named columns of a sample, or all of them, decoded. images: see `mds_sample.decode`.

        Pickled columns are never decoded: naming one, or looking it up in the sample, raises StoreError.
        """
        (place,) = checked_places(self.path, np.array([index]), len(self), "sample").tolist()
        number = int(self.shard_ends.searchsorted(place, side="right"))
        first = int(self.dataset.firsts[number])
        fields = self.dataset.fields
        with self:
            file = self._files.file(number)
            where = f"{file.url}: sample {place - first}"
            table = 4 * (1 + place - first)
            begin, end = np.frombuffer(read_bytes(file, table, table + 8), "<u4").tolist()
            try:
                if not 4 <= begin <= end <= file.size_bytes:
                    raise ValueError(f"bytes {begin}..{end} of {file.size_bytes}")
                values = _values_of(fields, read_bytes(file, begin, end))
            except ValueError as error:
                raise StoreError(f"{where} has {error}; copy it again") from error
        found = {
            field.name: decode(field.encoding, value, f"{where}, column {field.name!r}", images=images)
            for field, value in zip(fields, values)
            if (names is None and field.encoding != PICKLE) or (names is not None and field.name in names)
        }
        pickled = tuple(field.name for field in fields if field.encoding == PICKLE)
        return MDSSample(found, where, pickled) if pickled else found


@dataclass(frozen=True, slots=True)
class ArrayHead(Head):
    """u8 dtype, if it has one | u8 number of dimensions << 2 | code of the width | dimensions."""

    has_dtype: bool

    def sizes(self, file: ItemsFile, begins: Longs, sizes: Longs) -> Longs:
        lead = int(self.has_dtype)
        file.refuse(begins, sizes < lead + 1, "an array without a header")
        if self.has_dtype:
            same = [code for code, name in DTYPE_CODES.items() if np.dtype(name) == file.items.dtype]
            other = ~np.isin(file.raw[begins], same)
            file.refuse(begins, other, f"an array of another dtype than {file.items.dtype.name}")
        shapes = file.raw[begins + lead].astype(np.int64)
        return lead + 1 + (shapes >> 2) * (1 << (shapes & 3))

    def sizes_of_rows(self, sizes: Longs, itemsize: int) -> Longs | None:
        if self.has_dtype:
            return None
        found = np.zeros_like(sizes)
        for width in (1, 2, 4):  # of the dimension: the narrowest that holds it
            elements, rest = np.divmod(sizes - 1 - width, itemsize)
            least = 0 if width == 1 else 1 << 4 * width
            found[(rest == 0) & (elements >= least) & (elements < 1 << 8 * width)] = 1 + width
        return found if found.all() else None

    def of_row(self, elements: int) -> bytes:
        code = 0 if elements < 1 << 8 else 1 if elements < 1 << 16 else 2
        return bytes([1 << 2 | code]) + elements.to_bytes(1 << code, "little")


def _values_of(fields: Sequence[Column], sample: bytes) -> list[bytes]:
    """The values of a sample, by column. Raises ValueError for bytes that are not such a sample."""
    sizes = [field.size_bytes for field in fields]
    begin = 4 * sizes.count(None)
    words = iter(np.frombuffer(sample[:begin], "<u4").tolist())
    ends = list(accumulate((next(words, 0) if size is None else size for size in sizes), initial=begin))
    if ends[-1] != len(sample):
        raise ValueError(f"values of {ends[-1] - begin} bytes in {len(sample)}")
    return [sample[begin:end] for begin, end in pairwise(ends)]


class MDSFormat(StoreFormat):
    """A folder with MDS's index.json."""

    name = "MDS"
    lies_at = "a folder of an MDS dataset"
    options = ("column", "dtype")

    def open(self, place: Place) -> MDSStore | None:
        """The store, if there is an index.json: that of litdata is recognised before.

        Raises OptionError for a dtype that MDS does not have.
        """
        if place.is_file or not place.holds(place.within, INDEX):
            return None
        _ = place.dtype_among(tuple(DTYPE_CODES.values()))
        return MDSStore(place.within, column=place.column, dtype=place.dtype)
