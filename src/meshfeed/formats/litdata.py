"""litdata's datasets as a token store; what is pickled stays so."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from importlib import import_module
from typing import Any, Self

import numpy as np

from meshfeed.errors import StoreError
from meshfeed.extras import install
from meshfeed.files import ByteFile, Content, Folder
from meshfeed.formats.litdata_chunk import ChunkFile, Items
from meshfeed.formats.litdata_column import Column
from meshfeed.formats.litdata_index import INDEX, Chunk, Index, is_litdata, parse_index
from meshfeed.formats.sharded import ShardedStore
from meshfeed.store.format import Place, StoreFormat
from meshfeed.store.stream import I64

_TOKENS = ("tokens", "input_ids")
_ZSTD_HEAD_BYTES = 18


class LitdataStore(ShardedStore):
    """A litdata dataset: a document is the tokens of an item as it was written, and documents lie end to end.

    litdata's own TokensLoader knows no items when it reads: it cuts the tokens of each chunk into blocks of
    one size, leaves out what remains at a chunk's end, and shuffles blocks. Here no token is left out:
    `Windows` cuts the stream of all chunks, and `Documents` gives the items back.

    Args:
        folder: holds index.json.
        column: of the tokens, by its path in the item ("meta.ids"); None takes "tokens", "input_ids", or the
            only tensor or array of integers. One of several dimensions is read row by row.

    How long documents are is in each chunk's head where nothing but their tokens differs in length. Else
    every item has to be looked at: the first process of a node to ask fetches the whole dataset once.

    Raises StoreError for what is encrypted, compressed item by item, or no integers.
    """

    kind = "litdata"

    def __init__(self, folder: Folder, *, column: str | None = None) -> None:
        super().__init__(folder)
        self._column = column
        self._contents: dict[int, Content] = {}

    # -- what it is ---------------------------------------------------------------------------------------

    @cached_property
    def _index(self) -> Index:
        index = self._folder.file(INDEX)
        return parse_index(index.url, index.peek([(0, index.size_bytes)])[0])

    @property
    def encodings(self) -> Mapping[str, str]:
        """Path in the item -> litdata's serializer, of every column."""
        return {column.name: column.form for column in self._index.columns}

    def beside(self) -> Mapping[str, LitdataStore]:
        """Every other column, as a store whose tokens it is."""
        others = [column.name for at, column in enumerate(self._columns) if at != self._tokens[0].at]
        return {name: LitdataStore(self._folder, column=name) for name in others}

    @property
    def shards(self) -> Sequence[Chunk]:
        """The chunks."""
        return self._index.chunks

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the tokens, little-endian."""
        return self._tokens[1]

    @property
    def _columns(self) -> Sequence[Column]:
        """Those that items hold: TokensLoader keeps only the first."""
        return self._index.columns[:1] if self._index.is_bare else self._index.columns

    @cached_property
    def _tokens(self) -> tuple[Items, np.dtype[Any]]:
        """What items are made of, and the dtype of their tokens."""
        index, columns = self._index, self._columns
        names = [column.name for column in columns]
        fit = [column.name for column in columns if column.has_tokens]
        usual = next((name for name in _TOKENS if name in names), None)
        name = self._column or usual or (fit[0] if len(fit) == 1 else None)
        if name not in names:
            said = ", ".join(f"{column.name} ({column.form})" for column in columns)
            raise StoreError(
                f"{self.path}: its columns are {said[:500]}; say which holds tokens: "
                f"mf.open(path, column=...)"
            )
        at = names.index(name)
        try:
            family, dtype = columns[at].tokens()
            items = Items(() if index.is_bare else tuple(c.size_bytes for c in columns), at, family)
            return items, self._first_dtype(items) if dtype is None else dtype
        except ValueError as error:
            raise StoreError(f"{self.path}: column {name!r} {error}") from error

    def _first_dtype(self, items: Items) -> np.dtype[Any]:
        """What the first value says of its elements; the others must say the same."""
        for number, chunk in enumerate(self._index.chunks):
            if chunk.num_documents:
                with ChunkFile(chunk, items, self._checked_file(number)) as file:
                    return file.first_dtype()
        return np.dtype(np.uint16)

    # -- what ShardedStore asks ---------------------------------------------------------------------------

    def _identity(self) -> bytes:
        index = asdict(self._index)
        return json.dumps([index, self._column], sort_keys=True).encode()

    def _content(self, number: int) -> Content | None:
        content = self._contents.get(number)
        if content is None and self._index.codec is not None:
            content = self._contents[number] = self._compressed(self._index.chunks[number], self._index.codec)
        return content

    def _compressed(self, chunk: Chunk, codec: str) -> Content:
        if codec == "zstd":
            head_bytes = chunk.head_bytes if self._leaves_out_heads else 0
            return Content(codec=codec, raw_bytes=chunk.given_bytes + head_bytes)
        file = self._folder.file(chunk.name)
        last = 24 + 4 * chunk.num_documents
        (end,) = file.peek([(last, last + 4)])  # of the last item, in the chunk's own table
        if len(end) != 4:
            raise StoreError(
                f"{file.url}: byte {last}: no table of {chunk.num_documents} items; copy it again"
            )
        raw_bytes = chunk.head_bytes + int.from_bytes(end, "little")
        return Content(codec=codec, raw_bytes=raw_bytes, stored_bytes=chunk.given_bytes)

    @cached_property
    def _leaves_out_heads(self) -> bool:
        """Whether the index gives sizes without heads: what zstd says of the first chunk's decides."""
        chunk = self._index.chunks[0]
        file = self._folder.file(chunk.name)
        (head,) = file.peek([(0, _ZSTD_HEAD_BYTES)])
        try:
            size = import_module("zstandard").get_frame_parameters(head).content_size
        except ImportError as missing:
            raise StoreError(f"{file.url}: zstd needs zstandard: {install('mds')}") from missing
        except Exception as error:  # zstandard has its own
            raise StoreError(f"{file.url}: byte 0: no zstd data: {error}; copy it again") from error
        return size == chunk.given_bytes + chunk.head_bytes

    def _refuse_size(self, number: int, file: ByteFile) -> None:
        chunk, codec = self._index.chunks[number], self._index.codec
        given = chunk.given_bytes
        if codec is None and file.size_bytes not in (given, given + chunk.head_bytes):
            raise StoreError(f"{file.url}: {file.size_bytes} bytes, its index says {given}; copy it again")

    def _places(self, number: int, file: ByteFile) -> tuple[I64, I64]:
        with ChunkFile(self._index.chunks[number], self._tokens[0], file) as chunk:
            return chunk.places(self.dtype)

    def facts(self) -> dict[str, Any]:
        """What it is, as JSON-able values."""
        columns = ", ".join(f"{name}: {form}" for name, form in self.encodings.items())
        return {"format": "litdata", "num_shards": self.shard_ends.size, "columns": columns}

    def _within(self, folder: Folder) -> Self:
        return type(self)(folder, column=self._column)

    def _verified(self) -> Iterator[float]:
        """Check offsets, sizes and headers of all items, yielding the part done, in (0, 1]."""
        for number, chunk in enumerate(self._index.chunks):
            with ChunkFile(chunk, self._tokens[0], self._checked_file(number)) as file:
                file.places(self.dtype)
                file.token_spans(np.arange(chunk.num_documents), self.dtype)
            yield (number + 1) / len(self._index.chunks)


class LitdataFormat(StoreFormat):
    """A folder with litdata's index.json."""

    name = "litdata"
    lies_at = "a folder of a litdata dataset"
    options = ("column",)

    def open(self, place: Place) -> LitdataStore | None:
        """The store, if there is an index.json of litdata's."""
        if place.is_file or not place.holds(place.within, INDEX):
            return None
        index = place.within.file(INDEX)
        if not is_litdata(index.peek([(0, index.size_bytes)])[0]):
            return None
        return LitdataStore(place.within, column=place.column)
