"""MDS, MosaicML Streaming's format, as a token store and as a dataset of samples; without its pickles."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from meshfeed.errors import StoreError
from meshfeed.files import ByteFile, FileStats, Folder
from meshfeed.order import EpochIndex
from meshfeed.store.index_cache import Array, key_of_parts
from meshfeed.store.lengths import built_in_parts, joined
from meshfeed.store.mds_index import INDEX, Column, Shard, parse_index
from meshfeed.store.mds_sample import DTYPE_CODES, decode, ndarray_of
from meshfeed.store.mds_shard import ShardFile, Tokens
from meshfeed.store.stream import I64, LengthsIndex, Pieces, checked_out, checked_places, checked_ranges

_TOKENS = ("tokens", "input_ids")
_OPEN_SHARDS = 128
_SAMPLED_BYTES = 1 << 12
_NUM_SAMPLED = 8


class MDSStore:
    """An MDS dataset: a document is the token column of a sample, and documents lie end to end.

    Making one only remembers; the attributes read index.json, once. Everything else wants `with store:`. At
    most 128 shards are open at a time. A shard that is compressed, or far away with hashes in the index, is
    fetched and checked as a whole before a byte of it is used; `verify` checks the hashes of local ones.

    As a dataset for `mf.Mapped`, `store[EpochIndex]` is a sample with all its columns, decoded.

    Args:
        folder: holds index.json.
        column: of the tokens; None takes "tokens", "input_ids", or the only ndarray.
        dtype: of the tokens, where the column is plain bytes.

    How long documents are is known from the index where every array has one shape; else it is read once per
    node from the head of every shard, and kept beside the cache. All methods raise StoreError.
    """

    def __init__(
        self, folder: Folder, *, column: str | None = None, dtype: npt.DTypeLike | None = None
    ) -> None:
        self.path = folder.url
        self._folder, self._column, self._given_dtype = folder, column, dtype
        self._depth = 0
        self._lock = threading.RLock()
        self._files: dict[int, ByteFile] = {}
        self._open: OrderedDict[int, ShardFile] = OrderedDict()

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

    @property
    def shard_ends(self) -> I64:
        """Documents up to the end of each shard; int64 [num_shards]."""
        return self._shard_ends

    @cached_property
    def _shard_ends(self) -> I64:
        return np.cumsum([shard.num_samples for shard in self._parsed[2]], dtype=np.int64)

    def __len__(self) -> int:
        return int(self.shard_ends[-1]) if self.shard_ends.size else 0

    @property
    def num_documents(self) -> int:
        """Samples."""
        return len(self)

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return self._documents.num_tokens

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the tokens, little-endian."""
        return self._tokens.dtype

    @property
    def wants_ahead(self) -> bool:
        """Whether the shards lie far away, so that ranges should be announced many steps before."""
        return self._folder.is_remote

    @property
    def stats(self) -> FileStats:
        """What reading tokens has cost so far."""
        with self._lock:
            return sum((file.stats for file in self._files.values()), FileStats())

    @property
    def fingerprint(self) -> str:
        """Hex digest of the index, the token column, and some blocks of the shards."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        text, _, shards = self._parsed
        digest = hashlib.blake2b(text, digest_size=16)
        digest.update(f"{self._column} {self._given_dtype}".encode())
        for at in np.linspace(0, len(shards) - 1, min(_NUM_SAMPLED, len(shards))).astype(int).tolist():
            file = self._folder.file(shards[at].name)
            middle = file.size_bytes // 2
            digest.update(file.peek([(middle, middle + _SAMPLED_BYTES)])[0])
        return digest.hexdigest()

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
        return Tokens(at, dtype.newbyteorder("<"), kind)

    def _first_dtype(self, column: int) -> np.dtype[Any]:
        """What the first array says of its elements; the others must say the same."""
        for number, shard in enumerate(self._parsed[2]):
            if shard.num_samples:
                with ShardFile(shard, self._parsed[1], self._file_of(number)) as file:
                    value = file.value(0, column)
                if value and value[0] in DTYPE_CODES:
                    return np.dtype(DTYPE_CODES[value[0]])
                raise StoreError(f"{file.file.url}: sample 0 has no array in its token column")
        return np.dtype(np.uint16)

    # -- entering and leaving -----------------------------------------------------------------------------

    def __enter__(self) -> Self:
        with self._lock:
            self._depth += 1
        return self

    def __exit__(self, *exc: object) -> None:
        with self._lock:
            self._depth -= 1
            if self._depth == 0:
                while self._open:
                    self._close_oldest()

    def __getstate__(self) -> dict[str, Any]:
        known = ("_parsed", "_fingerprint", "_tokens")
        given = {"given": (self._folder, self._column, self._given_dtype)}
        return given | {name: self.__dict__[name] for name in known if name in self.__dict__}

    def __setstate__(self, state: dict[str, Any]) -> None:
        folder, column, dtype = state.pop("given")
        self.__init__(folder, column=column, dtype=dtype)
        self.__dict__.update(state)

    def __repr__(self) -> str:
        return f"MDSStore({self.path!r})"

    # -- documents and the stream -------------------------------------------------------------------------

    def lengths(self, documents: I64) -> I64:
        """Tokens of each document; int64 [n] -> int64 [n]."""
        return self._documents.lengths(checked_places(self.path, documents, len(self), "document"))

    def offsets(self, documents: I64) -> I64:
        """Stream offset, in tokens, of each document's first; int64 [n] -> int64 [n]."""
        return self._documents.offsets(checked_places(self.path, documents, len(self), "document"))

    def read(self, document: int, start: int, stop: int) -> npt.NDArray[Any]:
        """Tokens start..stop of one document; [stop - start] of `dtype`."""
        at = np.array([document])
        first, length = int(self.offsets(at)[0]), int(self.lengths(at)[0])
        if not 0 <= start <= stop <= length:
            raise StoreError(
                f"{self.path}: tokens {start}..{stop} of document {document} asked for, it has {length}"
            )
        return self.read_stream(np.array([first + start]), np.array([first + stop]))

    def read_stream(self, starts: I64, stops: I64, out: npt.NDArray[Any] | None = None) -> npt.NDArray[Any]:
        """Tokens of the stream's ranges, back to back; see IndexedStore."""
        starts, stops = checked_ranges(self.path, self.num_tokens, starts, stops)
        out = checked_out(self.path, out, self.dtype, int((stops - starts).sum()))
        pieces = self._documents.pieces(starts, stops)
        shards = self.shard_ends.searchsorted(pieces.documents, side="right")
        sizes = pieces.lengths * self.dtype.itemsize
        places = sizes.cumsum() - sizes
        for number in np.unique(shards).tolist():
            mine = np.flatnonzero(shards == number)
            with self._lock:
                shard = self._shard(number)
                begins = self._begins(shard, number, pieces.take(mine))
                shard.file.read_into(out.view(np.uint8), begins, sizes[mine], places[mine])
        return out

    def document_starts(self, starts: I64, stops: I64) -> tuple[I64, I64]:
        """Offsets of documents strictly inside each range, and how many each has; see IndexedStore."""
        starts, stops = checked_ranges(self.path, self.num_tokens, starts, stops)
        return self._documents.document_starts(starts, stops)

    def will_need(self, starts: I64, stops: I64) -> None:
        """Announce ranges of the stream that will be read, each once; whole shards where they are checked."""
        starts, stops = checked_ranges(self.path, self.num_tokens, starts, stops)
        pieces = self._documents.pieces(starts, stops)
        shards = self.shard_ends.searchsorted(pieces.documents, side="right")
        for number in np.unique(shards).tolist():
            mine = np.flatnonzero(shards == number)
            with self._lock:
                if self._parsed[2][number].content is not None and number not in self._open:
                    # to open it would wait for all of it
                    self._file_of(number).will_need(np.zeros(1, np.int64), np.ones(1, np.int64))
                    continue
                shard = self._shard(number)
                some = pieces.take(mine)
                begins = self._begins(shard, number, some)
                shard.file.will_need(begins, begins + some.lengths * self.dtype.itemsize)

    def forget_needs(self) -> None:
        """What was announced and is not read yet will not be."""
        with self._lock:
            for file in self._files.values():
                file.forget_needs()

    def _begins(self, shard: ShardFile, number: int, pieces: Pieces) -> I64:
        """Byte of the shard where each piece starts."""
        samples = pieces.documents - (self.shard_ends[number] - self._parsed[2][number].num_samples)
        begins, counts = shard.token_spans(samples, self._tokens)
        wrong = pieces.end > counts
        if wrong.any():
            raise StoreError(
                f"{shard.file.url}: sample {samples[wrong.argmax()]} has {counts[wrong.argmax()]} tokens, "
                f"fewer than when its lengths were noted; clear the cache folder, or copy the shard again"
            )
        return begins + pieces.begin * self.dtype.itemsize

    # -- samples ------------------------------------------------------------------------------------------

    def __getitem__(self, at: EpochIndex | int) -> dict[str, Any]:
        return self.sample(at if isinstance(at, int) else at.index)

    def sample(self, index: int) -> dict[str, Any]:
        """Every column of a sample, decoded; see `mds_sample.decode`."""
        (place,) = checked_places(self.path, np.array([index]), len(self), "sample").tolist()
        number = int(self.shard_ends.searchsorted(place, side="right"))
        first = int(self.shard_ends[number]) - self._parsed[2][number].num_samples
        with self, self._lock:
            shard = self._shard(number)
            where = f"{shard.file.url}: sample {place - first}"
            return {
                column.name: decode(
                    column.encoding, shard.value(place - first, at), f"{where}, column {column.name!r}"
                )
                for at, column in enumerate(self._parsed[1])
            }

    def facts(self) -> dict[str, Any]:
        """What it is, as JSON-able values."""
        columns = ", ".join(f"{name}: {encoding}" for name, encoding in self.encodings.items())
        return {"format": "MDS, version 2", "num_shards": self.shard_ends.size, "columns": columns}

    def verify(self) -> Iterator[float]:
        """Check hashes, offsets and sizes of values, shard by shard, yielding the part done, in (0, 1]."""
        _, columns, shards = self._parsed
        for number, shard in enumerate(shards):
            with ShardFile(shard, columns, self._folder.file(shard.name, shard.content)) as file:
                if columns and shard.num_samples:
                    file.spans(np.arange(shard.num_samples), 0)
            yield (number + 1) / len(shards)

    # -- lengths ------------------------------------------------------------------------------------------

    @cached_property
    def _documents(self) -> LengthsIndex:
        fixed, shards = self._tokens.fixed, range(len(self._parsed[2]))
        if fixed is not None:
            return LengthsIndex(np.arange(len(self) + 1, dtype=np.int64) * fixed)
        if not self._folder.is_remote:
            return LengthsIndex(_joined(shards, [self._part(number) for number in shards])["starts"])
        key = key_of_parts(kind="mds", version=2, content=self.fingerprint)
        return LengthsIndex(
            built_in_parts(self._folder.kept, key, lambda: shards, self._part, _joined)["starts"]
        )

    def _part(self, number: int) -> dict[str, npt.NDArray[Any]]:
        """Tokens of each document of one shard."""
        shard = self._parsed[2][number]
        with ShardFile(shard, self._parsed[1], self._file_of(number)) as file:
            return {"lengths": file.token_spans(np.arange(shard.num_samples), self._tokens)[1]}

    # -- shards -------------------------------------------------------------------------------------------

    def _file_of(self, number: int) -> ByteFile:
        file = self._files.get(number)
        if file is None:
            shard = self._parsed[2][number]
            whole = shard.content is not None and (self._folder.is_remote or shard.content.codec is not None)
            file = self._files[number] = self._folder.file(shard.name, shard.content if whole else None)
        return file

    def _shard(self, number: int) -> ShardFile:
        """A shard, entered; the one that was used longest ago makes room."""
        if not self._depth:
            raise StoreError(f"{self.path}: not entered; read from it inside `with store:`")
        shard = self._open.pop(number, None)
        if shard is None:
            while len(self._open) >= _OPEN_SHARDS:
                self._close_oldest()
            shard = ShardFile(self._parsed[2][number], self._parsed[1], self._file_of(number)).__enter__()
        self._open[number] = shard
        return shard

    def _close_oldest(self) -> None:
        _, shard = self._open.popitem(last=False)
        shard.__exit__()


def _joined(shards: Sequence[int], arrays: Sequence[Mapping[str, Array]]) -> Mapping[str, Array]:
    return {"starts": np.concatenate(([0], joined(arrays, "lengths").cumsum(dtype=np.int64)))}
