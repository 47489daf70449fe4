"""Documents in many files, some of them open at a time: what token stores of shards share."""

from __future__ import annotations

import hashlib
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt

from meshfeed.errors import StoreError
from meshfeed.files import ByteFile, Content, FileStats, Folder
from meshfeed.store.index_cache import Array, key_of_parts
from meshfeed.store.lengths import built_in_parts, joined
from meshfeed.store.stream import I64, LengthsIndex, Pieces, checked_out, checked_places, checked_ranges

_OPEN_SHARDS = 128
_SAMPLED_BYTES = 1 << 12
_NUM_SAMPLED = 8
_NOT_PICKLED = ("_depth", "_lock", "_files", "_open", "_documents")


class Shard(Protocol):
    """What an index says of a shard."""

    @property
    def name(self) -> str:
        """Of its file, relative to the index."""
        ...

    @property
    def num_documents(self) -> int:
        """In it."""
        ...


class ShardFile(Protocol):
    """A shard whose bytes can be read while it is entered."""

    @property
    def file(self) -> ByteFile:
        """Its bytes, uncompressed."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...


File = TypeVar("File", bound=ShardFile)


class ShardedStore(ABC, Generic[File]):
    """A StreamStore over the shards of a folder: documents lie end to end, in the order of the index.

    Making one only remembers. Everything but the attributes wants `with store:`. At most 128 shards are open
    at a time. A shard that is compressed, or far away with hashes in the index, is fetched and checked as a
    whole before a byte of it is used. All methods raise StoreError.

    How long documents are is known from the index or, where that does not tell, read from every shard: once
    per node, kept beside the cache, where shards lie far away.
    """

    kind: ClassVar[str]
    """Of the format, for the key under which lengths are kept."""

    def __init__(self, folder: Folder) -> None:
        self.path = folder.url
        self._folder = folder
        self._forget()

    def _forget(self) -> None:
        self._depth = 0
        self._lock = threading.RLock()
        self._files: dict[int, ByteFile] = {}
        self._open: OrderedDict[int, File] = OrderedDict()

    # -- what a format says -------------------------------------------------------------------------------

    @property
    @abstractmethod
    def shards(self) -> Sequence[Shard]:
        """In the order of their documents."""

    @property
    @abstractmethod
    def dtype(self) -> np.dtype[Any]:
        """Of the tokens, little-endian."""

    @abstractmethod
    def _identity(self) -> bytes:
        """All that decides the tokens but the bytes of the shards."""

    @abstractmethod
    def _content(self, number: int) -> Content | None:
        """What must hold of a shard's bytes; None where nothing is said and nothing is compressed."""

    @abstractmethod
    def _shard_file(self, number: int) -> File:
        """A shard, not entered yet."""

    @abstractmethod
    def _token_spans(self, shard: File, documents: I64) -> tuple[I64, I64]:
        """(first byte, number) of the tokens of some documents of a shard; int64 [n] each."""

    def _lengths_in(self, shard: File, num_documents: int) -> I64:
        """Tokens of every document of a shard; int64 [num_documents]."""
        return self._token_spans(shard, np.arange(num_documents))[1]

    def _announced(self, shard: File, number: int, pieces: Pieces) -> tuple[I64, I64]:
        """Bytes [begin, end) of a shard that a read of such pieces will want; int64 [n] each."""
        begins = self._begins(shard, number, pieces)
        return begins, begins + pieces.lengths * self.dtype.itemsize

    # -- what it is ---------------------------------------------------------------------------------------

    @property
    def shard_ends(self) -> I64:
        """Documents up to the end of each shard; int64 [num_shards]."""
        return self._shard_ends

    @cached_property
    def _shard_ends(self) -> I64:
        return np.cumsum([shard.num_documents for shard in self.shards], dtype=np.int64)

    def __len__(self) -> int:
        return int(self.shard_ends[-1]) if self.shard_ends.size else 0

    @property
    def num_documents(self) -> int:
        """Documents in all shards."""
        return len(self)

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return self._documents.num_tokens

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
        shards = self.shards
        digest = hashlib.blake2b(self._identity(), digest_size=16)
        for at in np.linspace(0, len(shards) - 1, min(_NUM_SAMPLED, len(shards))).astype(int).tolist():
            file = self._folder.file(shards[at].name)
            middle = file.size_bytes // 2
            digest.update(file.peek([(middle, middle + _SAMPLED_BYTES)])[0])
        return digest.hexdigest()

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
        return {name: value for name, value in vars(self).items() if name not in _NOT_PICKLED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.path!r})"

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
                reads = begins, sizes[mine], places[mine]
                if not shard.file.is_remote:  # there, every range that was announced is read as such
                    reads = _joined(*reads)
                shard.file.read_into(out.view(np.uint8), *reads)
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
                if number not in self._open and self._content(number) is not None:
                    # to open it would wait for all of it
                    self._file_of(number).will_need(np.zeros(1, np.int64), np.ones(1, np.int64))
                    continue
                shard = self._shard(number)
                shard.file.will_need(*self._announced(shard, number, pieces.take(mine)))

    def forget_needs(self) -> None:
        """What was announced and is not read yet will not be."""
        with self._lock:
            for file in self._files.values():
                file.forget_needs()

    def _begins(self, shard: File, number: int, pieces: Pieces) -> I64:
        """Byte of the shard where each piece starts."""
        places = pieces.documents - self._first(number)
        begins, counts = self._token_spans(shard, places)
        wrong = pieces.end > counts
        if wrong.any():
            raise StoreError(
                f"{shard.file.url}: document {places[wrong.argmax()]} has {counts[wrong.argmax()]} tokens, "
                f"fewer than when its lengths were noted; clear the cache folder, or copy the shard again"
            )
        return begins + pieces.begin * self.dtype.itemsize

    def _first(self, number: int) -> int:
        """The first document of a shard."""
        return int(self.shard_ends[number]) - self.shards[number].num_documents

    # -- lengths ------------------------------------------------------------------------------------------

    @cached_property
    def _documents(self) -> LengthsIndex:
        fixed, numbers = self._fixed_tokens, range(len(self.shards))
        if fixed is not None:
            return LengthsIndex(np.arange(len(self) + 1, dtype=np.int64) * fixed)
        if not self._folder.is_remote:
            return LengthsIndex(_whole(numbers, [self._part(number) for number in numbers])["starts"])
        key = key_of_parts(kind=self.kind, version=2, content=self.fingerprint)
        arrays = built_in_parts(self._folder.kept, key, lambda: numbers, self._part, _whole)
        return LengthsIndex(arrays["starts"])

    @property
    def _fixed_tokens(self) -> int | None:
        """Tokens of every document, where the index says so."""
        return None

    def _part(self, number: int) -> Mapping[str, Array]:
        """Tokens of each document of one shard."""
        with self._shard_file(number) as file:
            return {"lengths": self._lengths_in(file, self.shards[number].num_documents)}

    # -- shards -------------------------------------------------------------------------------------------

    def _file_of(self, number: int) -> ByteFile:
        file = self._files.get(number)
        if file is None:
            content = self._content(number)
            if content is not None and content.codec is None and not self._folder.is_remote:
                content = None  # read in place
            file = self._files[number] = self._folder.file(self.shards[number].name, content)
        return file

    def _shard(self, number: int) -> File:
        """A shard, entered; the one that was used longest ago makes room."""
        if not self._depth:
            raise StoreError(f"{self.path}: not entered; read from it inside `with store:`")
        shard = self._open.pop(number, None)
        if shard is None:
            while len(self._open) >= _OPEN_SHARDS:
                self._close_oldest()
            shard = self._shard_file(number).__enter__()
        self._open[number] = shard
        return shard

    def _close_oldest(self) -> None:
        _, shard = self._open.popitem(last=False)
        shard.__exit__()


def _whole(shards: Sequence[int], arrays: Sequence[Mapping[str, Array]]) -> Mapping[str, Array]:
    return {"starts": np.concatenate(([0], joined(arrays, "lengths").cumsum(dtype=np.int64)))}


def _joined(begins: I64, sizes: I64, places: I64) -> tuple[I64, I64, I64]:
    """The same reads, where pieces that touch in the file and in the output are one; int64 [k] each."""
    apart = (begins[1:] != (begins + sizes)[:-1]) | (places[1:] != (places + sizes)[:-1])
    first = np.flatnonzero(np.append(True, apart))
    return begins[first], np.add.reduceat(sizes, first), places[first]
