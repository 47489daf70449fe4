"""litdata's datasets as a token store. Pickles are never loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib import import_module
from typing import Any

import numpy as np

from meshfeed.arrays import Longs
from meshfeed.errors import StoreError
from meshfeed.extras import install
from meshfeed.files import ByteFile, Content, Folder
from meshfeed.formats.items import Column, Head, Items, ItemsFile
from meshfeed.formats.litdata_index import INDEX, Chunk, LitdataIndex, is_litdata, parse_index
from meshfeed.formats.sharded import ShardedStore
from meshfeed.formats.shards import ShardedDataset
from meshfeed.store.format import Place, StoreFormat
from meshfeed.store.loss_columns import MASKS

_MOST_DIMS = 16
_ZSTD_HEAD_BYTES = 18
_FRAMED = b"LDFZ01"


class LitdataDataset(ShardedDataset):
    """See `LitdataStore`."""

    kind, format = "litdata", "litdata"

    @cached_property
    def _index(self) -> LitdataIndex:
        index = self.folder.file(INDEX)
        return parse_index(index.url, index.peek([(0, index.size_bytes)])[0])

    @property
    def shards(self) -> Sequence[Chunk]:
        return self._index.chunks

    @property
    def fields(self) -> Sequence[Column]:
        """The columns of an item; TokensLoader keeps only the first."""
        return self._index.columns[:1] if self._index.is_bare else self._index.columns

    def laid_out(self) -> Items:
        fields = self.fields
        at = self._column_of_tokens([each.name for each in fields if _has_tokens(each.encoding)])
        try:
            kind = _tokens_in(fields[at].encoding, is_mask=fields[at].name.rpartition(".")[2] in MASKS)
            if isinstance(kind, np.dtype):
                return self._made_of(at, kind)
            value = self._first_value(self._made_of(at, np.dtype(np.uint8)))
            return self._made_of(at, kind.dtype_in(value) if value else np.dtype(np.uint16), kind)
        except ValueError as error:
            raise StoreError(f"{self.path}: column {fields[at].name!r} {error}") from error

    def _made_of(self, at: int, dtype: np.dtype[Any], head: Head | None = None) -> Items:
        sizes = tuple(field.size_bytes for field in self.fields)
        stored = () if self._index.is_bare else tuple(range(len(sizes)))
        return Items(noun="item", sizes=sizes, stored_sizes=stored, at=at, dtype=dtype, head=head)

    def identity(self) -> bytes:
        index = asdict(self._index)
        index["columns"] = [{"name": each.name, "form": each.encoding} for each in self._index.columns]
        return json.dumps([index, self.column], sort_keys=True).encode()

    def content(self, number: int) -> Content | None:
        chunk, codec = self._index.chunks[number], self._index.codec
        if codec is None:
            return None
        if codec == "zstd":
            head_bytes = chunk.head_bytes if self._leaves_out_heads else 0
            return Content(codec=codec, raw_bytes=chunk.given_bytes + head_bytes)
        file = self.folder.file(chunk.name)
        last = 24 + 4 * chunk.num_documents
        head, end = file.peek([(0, len(_FRAMED)), (last, last + 4)])  # of the last item, in the chunk's table
        if head != _FRAMED:
            return None  # litdata leaves some items as they are, such as arrays of two dimensions alone
        if len(end) != 4:
            raise StoreError(
                f"{file.url}: byte {last}: no table of {chunk.num_documents} items; copy it again"
            )
        raw_bytes = chunk.head_bytes + int.from_bytes(end, "little")
        return Content(codec=codec, raw_bytes=raw_bytes, stored_bytes=chunk.given_bytes)

    @cached_property
    def _leaves_out_heads(self) -> bool:
        """Whether the sizes in the index exclude heads, by the zstd header of the first chunk."""
        chunk = self._index.chunks[0]
        file = self.folder.file(chunk.name)
        (head,) = file.peek([(0, _ZSTD_HEAD_BYTES)])
        try:
            size = import_module("zstandard").get_frame_parameters(head).content_size
        except ImportError as missing:
            raise StoreError(f"{file.url}: zstd needs zstandard: {install('mds')}") from missing
        except Exception as error:  # zstandard has its own
            raise StoreError(f"{file.url}: byte 0: no zstd data: {error}; copy it again") from error
        return size == chunk.given_bytes + chunk.head_bytes

    def refuse_size(self, number: int, file: ByteFile) -> None:
        chunk, codec = self._index.chunks[number], self._index.codec
        given = chunk.given_bytes
        if codec is None and file.size_bytes not in (given, given + chunk.head_bytes):
            raise StoreError(f"{file.url}: {file.size_bytes} bytes, its index says {given}; copy it again")

    def places(self, number: int, file: ByteFile) -> tuple[Longs, Longs]:
        begins, counts = super().places(number, file)
        total = self._index.chunks[number].num_tokens
        if total is not None and int(counts.sum()) != total:
            raise StoreError(f"{file.url}: {counts.sum()} tokens, its index says {total}; copy it again")
        return begins, counts

    def verify(self, number: int) -> None:
        super().verify(number)
        self.places(number, self.checked_file(number))


class LitdataStore(ShardedStore):
    """A litdata dataset: a document is the tokens of one item, in the order of the dataset.

    litdata's own TokensLoader ignores items: it cuts the tokens of each chunk into blocks of one size, drops
    the rest at a chunk's end, and shuffles blocks. Here no token is dropped: `Windows` cuts the stream of all
    chunks, and `Documents` returns the items.

    Args:
        folder: holds index.json.
        column: of the tokens, by its path in the item ("meta.ids"); None takes "tokens", "input_ids", or the
            only tensor or array of integers. One of several dimensions is read row by row.

    If nothing but the tokens varies in length, the lengths of documents are in each chunk's head. Otherwise
    every item must be read: the first process of a node fetches the whole dataset once.

    Raises StoreError for data that are encrypted, compressed item by item, or not integers.
    """

    def __init__(self, folder: Folder, *, column: str | None = None) -> None:
        super().__init__(LitdataDataset(folder, column=column))


_SIZES = (8, 16, 32, 64)
_OF_TORCH: Mapping[int, str] = {11: "uint8", 12: "int8", 20: "uint16"} | {
    13 + 2 * at + alias: f"int{size}" for at, size in enumerate(_SIZES[1:]) for alias in (0, 1)
}
_OF_NUMPY: Mapping[int, str] = dict(enumerate(f"{kind}{size}" for kind in ("int", "uint") for size in _SIZES))
"""Codes of integers."""
_MASKS_OF_TORCH: Mapping[int, str] = {19: "uint8"} | {
    2 * at + alias: f"float{size}" for at, size in ((0, 32), (1, 64), (4, 16)) for alias in (0, 1)
}
_MASKS_OF_NUMPY: Mapping[int, str] = {8: "float16", 9: "float32", 10: "float64", 13: "uint8"}
"""Codes of what else a mask may be: floats, and bools, each a byte of 0 or 1."""


@dataclass(frozen=True, slots=True)
class TensorHead(Head):
    """u32 dtype | u32 number of dimensions | u32 dimensions.

    Attributes:
        dtypes: code -> dtype, of those that may be.
        order: of the bytes of a word, "<" or ">".
    """

    dtypes: Mapping[int, str]
    order: str

    def dtype_in(self, value: bytes) -> np.dtype[Any]:
        """Dtype of an array's elements. Raises ValueError for another one than `dtypes` have."""
        if len(value) < 8:
            raise ValueError("has an array without a whole header")
        return _dtype_of(self.dtypes, int(np.frombuffer(value[:4], f"{self.order}u4")[0]))

    def sizes(self, file: ItemsFile, begins: Longs, sizes: Longs) -> Longs:
        dtype, short = file.items.dtype, "an array without a whole header"
        file.refuse(begins, sizes < 8, short)
        codes, ndims = file.words(begins, 2, self.order).T
        same = [code for code, name in self.dtypes.items() if dtype == np.dtype(name)]
        file.refuse(begins, ~np.isin(codes, same), f"an array of another dtype than {dtype.name}")
        file.refuse(begins, ndims > _MOST_DIMS, f"an array of more than {_MOST_DIMS} dimensions")
        heads = 8 + 4 * ndims
        file.refuse(begins, sizes < heads, short)
        elements = np.ones(begins.size, np.float64)  # exact up to 2**53; larger ones are wrong anyway
        for dim in range(int(ndims.max())):
            deep = np.flatnonzero(ndims > dim)
            elements[deep] *= file.words(begins[deep] + 8 + 4 * dim, 1, self.order)[:, 0]
        other = elements * dtype.itemsize != sizes - heads
        file.refuse(begins, other, "an array whose shape is not its size")
        return heads


def _tokens_in(encoding: str, *, is_mask: bool = False) -> np.dtype[Any] | TensorHead:
    """The dtype of the tokens in a column, or the head that gives it for each value.

    Raises ValueError unless they are integers; a mask may be of floats or bools, too.
    """
    name, _, code = encoding.partition(":")
    of_torch, of_numpy = _OF_TORCH, _OF_NUMPY
    if is_mask:
        of_torch, of_numpy = {**of_torch, **_MASKS_OF_TORCH}, {**of_numpy, **_MASKS_OF_NUMPY}
    if name == "tensor":
        return TensorHead(of_torch, ">")
    if name == "numpy":
        return TensorHead(of_numpy, "<")
    if name not in ("no_header_tensor", "no_header_numpy"):
        raise ValueError(f"is {encoding}; tokens are a tensor, or an array of NumPy")
    if not (code.isascii() and code.isdecimal() and len(code) < 4):
        raise ValueError(f"is {encoding}, a dtype that is unknown")
    return _dtype_of(of_torch if name == "no_header_tensor" else of_numpy, int(code))


def _has_tokens(encoding: str) -> bool:
    try:
        _tokens_in(encoding)
    except ValueError:
        return False
    return True


def _dtype_of(dtypes: Mapping[int, str], code: int) -> np.dtype[Any]:
    if code not in dtypes:
        raise ValueError(f"is of dtype {code}; tokens are integers")
    return np.dtype(np.dtype(dtypes[code]).name)


class LitdataFormat(StoreFormat):
    """A folder with litdata's index.json."""

    name = "litdata"
    lies_at = "a folder of a litdata dataset"
    options = ("column",)

    def open(self, place: Place) -> LitdataStore | None:
        if place.is_file or not place.holds(place.within, INDEX):
            return None
        index = place.within.file(INDEX)
        if not is_litdata(index.peek([(0, index.size_bytes)])[0]):
            return None
        return LitdataStore(place.within, column=place.column)
