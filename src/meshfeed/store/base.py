"""The base class of token stores, and the arithmetic of stream ranges and documents."""

from __future__ import annotations

import contextlib
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, ClassVar, Literal, Self, cast

import numpy as np

from meshfeed.arrays import Array, Longs
from meshfeed.errors import CacheError, OptionError, StoreError
from meshfeed.files import Cache, Fetching, FileStats
from meshfeed.intervals import distinct, numbers_in
from meshfeed.mixture import Store
from meshfeed.store.index import Index
from meshfeed.store.node_arrays import cached_arrays, key_of_parts
from meshfeed.summary import digest_of

LabelsAre = Literal["shifted", "unshifted"]
"""Whether a column of labels holds, at a token, the next label (shifted) or its own, as in Hugging Face."""

_NOT_PICKLED = ("_depth", "lock", "_opened")


class StreamStore(Store):
    """Documents of tokens, back to back: one unshuffled stream.

    A format adds the starts of documents, a dtype, a fingerprint and `read_into`.

    A constructor only stores its arguments. The attributes work at once; everything else needs
    `with store:`. Threads may share an entered store. A pickled or copied store is not entered. All methods
    may raise StoreError.

    Attributes:
        path: its path or URL, for messages.
        lock: held while it is entered or left; may be taken again.
        labels_are: what a column of labels holds at a token. "shifted": the label that this token predicts,
            usually the next token. "unshifted": the label of this token, which the token before it predicts.
    """

    path: str
    labels_are: LabelsAre = "shifted"
    not_pickled: ClassVar[tuple[str, ...]] = ()
    """Names of attributes that a copy must make again, such as those that `acquire` sets."""
    kept_in: Cache | None = None
    """Where a node keeps what it derives from the store; None: nowhere."""

    def __init__(self) -> None:
        self._depth = 0
        self.lock = threading.RLock()  # garbage collection may take it again

    # -- what a format adds -----------------------------------------------------------------------------

    @property
    @abstractmethod
    def dtype(self) -> np.dtype[Any]:
        """Of the tokens."""

    @property
    @abstractmethod
    def documents(self) -> LengthsIndex:
        """Where documents begin in the stream."""

    @abstractmethod
    def read_into(self, out: Array, starts: Longs, stops: Longs) -> None:
        """Fill `out`, [sum(stops - starts)] of `dtype`, with ranges that were checked to be in the stream."""

    def acquire(self, stack: contextlib.ExitStack) -> None:
        """Open what reads need; `stack` closes it when the last `with` ends."""
        return

    def will_need(self, starts: Longs, stops: Longs) -> None:
        """Announce ranges that will be read, each once; returns at once.

        starts, stops: int64 [m], stream offsets in tokens.
        """
        self._ranges(starts, stops)

    @property
    def stats(self) -> FileStats:
        """What reading has cost so far."""
        return FileStats()

    @property
    def files_version(self) -> str:
        """Of its files, as they are now, beside the fingerprint, which may miss a change; see `ByteFile`."""
        return ""

    @property
    def fetching(self) -> Fetching | None:
        """How its tokens are fetched by blocks; None if they are not. Raises StoreError."""
        return None

    def cut(self, begins: Longs, ends: Longs) -> None:
        """Let blocks that are fetched end where the shards of a shuffle meet. Before the store is entered.

        begins, ends: the tokens that two shards share, see `SequenceRule.joints`; int64 [m] each.
        """

    def facts(self) -> dict[str, Any]:
        """Facts about the store beside its counts, as JSON-able values; "format" is one."""
        return {"format": type(self).__name__}

    def verify(self) -> Iterator[float]:
        """Check the files in full, as they are now, yielding the fraction done, in (0, 1]."""
        yield 1.0

    @property
    def is_summed(self) -> bool:
        """Whether `verify` compares every byte with a checksum or hash that is stored beside it."""
        return False

    @property
    def largest_token(self) -> int | None:
        """The largest token, if the index holds it; None if all tokens would have to be read."""
        return None

    @property
    def is_stream(self) -> bool:
        """Whether stream ranges can be read; if not, only `read` by document."""
        return True

    @property
    def num_parts(self) -> int:
        """Images, audio and video of all documents; 0 for text."""
        return 0

    def used_as(self, labels: LabelsAre | None, ignore: frozenset[str]) -> Self:
        """This store, just opened, with its columns used as given; see `open_store`. Raises OptionError."""
        given = f"labels={labels!r}" if labels is not None else f"ignore={sorted(ignore)}"
        raise OptionError(
            f"{self.path}: {given} is about columns, but this store has tokens only; leave it out"
        )

    # -- common to all formats ---------------------------------------------------------------------------

    def once_per_node(self, make: Callable[[], Longs], **of: int | str) -> Longs:
        """See `Store`; each process makes them if the cache cannot be written. Raises StoreError."""
        if self.kept_in is not None:
            with contextlib.suppress(CacheError):  # not writable, or full
                folder = self.kept_in.kept()
                key = key_of_parts(content=self.fingerprint, files=self.files_version, **of)
                return cached_arrays(folder, key, lambda: {"numbers": make()})["numbers"]
        return make()

    @property
    def num_documents(self) -> int:
        """Documents, including empty ones."""
        return self.documents.num_documents

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return self.documents.num_tokens

    def lengths(self, documents: Longs) -> Longs:
        """Tokens of each document; int64 [n] -> int64 [n]."""
        return self.extents(documents)[1]

    def offsets(self, documents: Longs) -> Longs:
        """Stream offset, in tokens, of each document's first; int64 [n] -> int64 [n]."""
        return self.documents.offsets(self._existing(documents))

    def extents(self, documents: Longs) -> tuple[Longs, Longs]:
        """`offsets` and `lengths` of documents, in one look-up; int64 [n] -> int64 [n] each."""
        begins, lengths = self.documents.extents(self._existing(documents))
        return begins, self._ascending(documents, lengths)

    def document_starts(self, starts: Longs, stops: Longs) -> tuple[Longs, Longs]:
        """Stream offsets o of documents with start < o < stop, range after range, each once.

        starts, stops: int64 [m], stream offsets in tokens. Returns offsets int64 [total], ascending within a
        range, and how many each range has, int64 [m]. A document without tokens shares its offset with the
        next and adds none.
        """
        starts, stops = self._ranges(starts, stops)
        offsets, counts = self.documents.document_starts(starts, stops)
        of_range = np.arange(starts.size).repeat(counts)
        outside = (offsets <= starts[of_range]) | (offsets >= stops[of_range])
        if outside.any() or (np.diff(offsets)[of_range[1:] == of_range[:-1]] < 0).any():
            raise StoreError(
                f"{self.path}: the documents' offsets do not ascend; see `meshfeed inspect --verify`"
            )
        return offsets, counts

    def __len__(self) -> int:
        return self.num_documents

    def __getitem__(self, documents: slice) -> StreamStore:
        """Some of its documents, one after the other, as a store of their own: `store[:1_000_000]`.

        Numbers count from 0 in it. Raises StoreError for anything but a slice without a step.
        """
        if not isinstance(cast(object, documents), slice) or documents.step not in (None, 1):
            raise StoreError(f"{self.path}[{documents}]: give a range of documents, such as store[:1000]")
        first, stop, _ = documents.indices(self.num_documents)
        return DocumentRange(self, first, max(first, stop))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.path!r})"

    def read_stream(self, starts: Longs, stops: Longs, out: Array | None = None) -> Array:
        """Tokens of the stream's ranges, back to back: [sum(stops - starts)] of `dtype`.

        starts, stops: int64 [m], stream offsets in tokens, in any order, overlapping or not.
        out: 1-D, contiguous and of exactly that size to read into and return; None for a new array.
        """
        starts, stops = self._ranges(starts, stops)
        out = self._checked_out(out, int((stops - starts).sum()))
        self._refuse_not_entered()
        self.read_into(out, starts, stops)
        return out

    def read(self, document: int, start: int, stop: int) -> Array:
        """Tokens start..stop of one document; [stop - start] of `dtype`."""
        at = np.array([document])
        first, length = int(self.offsets(at)[0]), int(self.lengths(at)[0])
        self._refuse_outside(document, start, stop, length)
        return self.read_stream(np.array([first + start]), np.array([first + stop]))

    def __enter__(self) -> Self:
        with self.lock:
            if self._depth == 0:
                with contextlib.ExitStack() as stack:
                    self.acquire(stack)
                    self._opened = stack.pop_all()
            self._depth += 1
        return self

    def __exit__(self, *exc: object) -> None:
        with self.lock:
            self._depth -= 1
            if self._depth == 0:
                self._opened.close()

    def also_enter(self, stores: Iterable[StreamStore]) -> None:
        """Enter further stores if it is entered; they are left with it. Under its lock."""
        for store in stores if self._depth else ():
            self._opened.enter_context(store)

    def __getstate__(self) -> dict[str, Any]:
        left_here = {*_NOT_PICKLED, *self.not_pickled}
        return {name: value for name, value in vars(self).items() if name not in left_here}

    def __setstate__(self, state: dict[str, Any]) -> None:
        StreamStore.__init__(self)
        vars(self).update(state)

    # -- checks -----------------------------------------------------------------------------------------

    def _refuse_not_entered(self) -> None:
        if not self._depth:
            raise StoreError(f"{self.path}: not entered; read from it inside `with store:`")

    def _refuse_no_stream(self) -> None:
        if not self.is_stream:
            raise StoreError(
                f"{self.path}: its sequences do not fill its file in order, so it is not a stream; read it "
                f"by document, or write it again"
            )

    def _ascending(self, documents: Longs, lengths: Longs) -> Longs:
        if (lengths < 0).any():
            at = documents[lengths.argmin()]
            raise StoreError(
                f"{self.path}: document {at} ends before it starts; see `meshfeed inspect --verify`"
            )
        return lengths

    def _refuse_outside(self, document: int, start: int, stop: int, length: int) -> None:
        if not 0 <= start <= stop <= length:
            raise StoreError(
                f"{self.path}: tokens {start}..{stop} of document {document} asked for, it has {length}"
            )

    def _existing(self, documents: Longs) -> Longs:
        return checked_places(self.path, documents, self.num_documents, "document")

    def _ranges(self, starts: Longs, stops: Longs) -> tuple[Longs, Longs]:
        """The ranges as int64. Raises StoreError for one outside the stream, or if there is none."""
        self._refuse_no_stream()
        starts, stops = np.asarray(starts, np.int64), np.asarray(stops, np.int64)
        if starts.ndim != 1 or starts.shape != stops.shape:
            raise StoreError(f"{self.path}: starts {starts.shape} and stops {stops.shape}; both must be [m]")
        num_tokens = self.num_tokens
        outside = (starts < 0) | (stops < starts) | (stops > num_tokens)
        if outside.any():
            i = int(outside.argmax())
            raise StoreError(
                f"{self.path}: range {i}: tokens {starts[i]}..{stops[i]} asked for, the stream has "
                f"{num_tokens}"
            )
        return starts, stops

    def _checked_out(self, out: Array | None, total: int) -> Array:
        """`out`, or a new array for `total` tokens. Raises StoreError for one that does not fit."""
        dtype = self.dtype
        if out is None:
            return np.empty(total, dtype)
        if out.dtype != dtype or out.shape != (total,) or not out.flags.carray:
            raise StoreError(
                f"{self.path}: out is {out.dtype.name} {out.shape}; it must be a contiguous, writeable "
                f"{dtype.name} ({total},)"
            )
        return out


class DocumentRange(StreamStore):
    """The documents first..stop of another store, `of`; see `StreamStore.__getitem__`."""

    def __init__(self, of: StreamStore, first: int, stop: int) -> None:
        super().__init__()
        self.of, self.first, self._stop = of, first, stop
        self.path, self.labels_are = f"{of.path}[{first}:{stop}]", of.labels_are
        self.kept_in, self.wants_ahead = of.kept_in, of.wants_ahead

    @cached_property
    def _span(self) -> tuple[int, int]:
        """Its tokens in the other store's stream."""
        with self.of:
            begin, end = self.of.documents.starts[np.array([self.first, self._stop])].tolist()
            return begin, end

    @property
    def begin(self) -> int:
        """Its first token in the other store's stream."""
        return self._span[0]

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.of.dtype

    @property
    def fingerprint(self) -> str:
        return digest_of({"of": self.of.fingerprint, "documents": [self.first, self._stop]})

    @property
    def documents(self) -> LengthsIndex:
        starts, (begin, _) = self.of.documents.starts, self._span
        return LengthsIndex(RangeStarts(starts, self.first, self.num_documents + 1, begin))

    @property
    def num_documents(self) -> int:
        return self._stop - self.first

    @property
    def num_tokens(self) -> int:
        return self._span[1] - self._span[0]

    @property
    def shard_ends(self) -> Longs | None:
        if (ends := self.of.shard_ends) is None:
            return None
        return distinct(ends[ends > self.first].clip(None, self._stop)) - self.first

    @cached_property
    def columns(self) -> Mapping[str, StreamStore]:  # pyright: ignore[reportIncompatibleMethodOverride]
        of = cast(Mapping[str, StreamStore], self.of.columns)
        return {name: store[self.first : self._stop] for name, store in of.items()}

    @property
    def files_version(self) -> str:
        return self.of.files_version

    @property
    def stats(self) -> FileStats:
        return self.of.stats

    def acquire(self, stack: contextlib.ExitStack) -> None:
        for store in (self.of, *self.columns.values()):
            stack.enter_context(store)

    def read_into(self, out: Array, starts: Longs, stops: Longs) -> None:
        self.of.read_into(out, starts + self.begin, stops + self.begin)

    def will_need(self, starts: Longs, stops: Longs) -> None:
        self.of.will_need(starts + self.begin, stops + self.begin)

    def forget_needs(self) -> None:
        self.of.forget_needs()

    def verify(self) -> Iterator[float]:
        return self.of.verify()

    @property
    def is_summed(self) -> bool:
        return self.of.is_summed


def whole_of(store: Any) -> tuple[Any, int]:
    """The store that a range of documents is of, and the number of its first one there; any other, and 0."""
    first = 0
    while isinstance(store, DocumentRange):
        store, first = store.of, first + store.first
    return store, first


def checked_places(name: str, places: Longs, count: int, what: str) -> Longs:
    """Places as int64. Raises StoreError for one that is not in [0, count)."""
    places = np.asarray(places, np.int64)
    outside = (places < 0) | (places >= count)
    if outside.any():
        raise StoreError(
            f"{name}: {what} {places[outside.argmax()]} asked for, it has {count}, counted from 0"
        )
    return places


@dataclass(frozen=True, slots=True)
class Multiples:
    """0, step, 2 step, ... as an array that takes no memory. step: at least 1. size: number of entries."""

    step: int
    size: int

    def __getitem__(self, places: Any) -> Any:
        """Entries at some indices in range; an int or int64 [n]."""
        return places * self.step

    def searchsorted(self, values: Longs, side: Literal["left", "right"] = "left") -> Longs:
        found = -(-values // self.step) if side == "left" else values // self.step + 1
        return found.clip(0, self.size)


@dataclass(frozen=True, slots=True)
class RangeStarts:
    """The entries first..first + size of ascending numbers, less `begin`, which is the first of them."""

    of: Longs | Multiples | Index | RangeStarts
    first: int
    size: int
    begin: int

    def __getitem__(self, places: Any) -> Any:
        return self.of[places + self.first] - self.begin

    def searchsorted(self, values: Longs, side: Literal["left", "right"] = "left") -> Longs:
        return (self.of.searchsorted(values + self.begin, side=side) - self.first).clip(0, self.size)


def extents_of(store: StreamStore, documents: Longs) -> tuple[Longs, Longs]:
    """Offsets and lengths of a store's documents: in one look-up, unless a subclass overrides one of them."""
    if replaces_together(type(store), "extents", "offsets", "lengths"):
        return store.extents(documents)
    return store.offsets(documents), store.lengths(documents)


@lru_cache
def replaces_together(kind: type, method: str, *others: str) -> bool:
    """Whether `method` agrees with the others: no subclass replaces one of those without replacing `method`.

    Of a class and its bases, the first that defines any of them decides.
    """
    own = (vars(each).keys() & {method, *others} for each in kind.__mro__)
    return method in next(filter(None, own))


@dataclass(frozen=True, eq=False)
class LengthsIndex:
    """Documents as one stream of tokens, by array look-ups.

    Attributes:
        starts: stream offset of each document's first token, then the end; int64 [num_documents + 1], or an
            object that looks them up.
    """

    starts: Longs | Multiples | Index | RangeStarts

    @property
    def num_documents(self) -> int:
        """Documents, including empty ones."""
        return self.starts.size - 1

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return int(self.starts[np.array([self.starts.size - 1])][0])

    def offsets(self, documents: Longs) -> Longs:
        """Stream offset of each document's first token; int64 [n]."""
        return self.starts[documents]

    def extents(self, documents: Longs) -> tuple[Longs, Longs]:
        """`offsets` and `lengths` of documents, in one look-up; int64 [n] each."""
        begins, ends = np.split(self.starts[np.concatenate((documents, documents + 1))], 2)
        return begins, ends - begins

    def document_starts(self, begins: Longs, ends: Longs) -> tuple[Longs, Longs]:
        """Offsets of documents strictly inside each range, int64 [total], and their counts, int64 [m].

        A document without tokens shares its offset with the next and adds none.
        """
        first = self.starts.searchsorted(begins, side="right")
        counts = (self.starts.searchsorted(ends, side="left") - first).clip(0)
        found = self.starts[numbers_in(first, counts)]
        of_range = np.arange(counts.size).repeat(counts)
        new = np.ones(found.size, np.bool_)
        new[1:] = (of_range[1:] != of_range[:-1]) | (found[1:] != found[:-1])
        return found[new], np.bincount(of_range[new], minlength=counts.size)

    def pieces(self, begins: Longs, ends: Longs) -> Pieces:
        """The pieces of documents in stream ranges, range after range."""
        first = self.starts.searchsorted(begins, side="right") - 1
        stop = self.starts.searchsorted(ends, side="left")
        counts = np.where(ends > begins, stop - first, 0)
        documents = numbers_in(first, counts)
        starts = self.starts[documents]
        begin = np.maximum(begins.repeat(counts) - starts, 0)
        end = np.minimum(ends.repeat(counts), self.starts[documents + 1]) - starts
        some = end > begin
        return Pieces(documents[some], begin[some], end[some])


@dataclass(frozen=True, slots=True)
class Pieces:
    """Pieces of documents: document, begin and end of each, int64 [k]; none is empty."""

    documents: Longs
    begin: Longs
    end: Longs

    @property
    def lengths(self) -> Longs:
        """Tokens of each; int64 [k]."""
        return self.end - self.begin


def grouped(values: Longs) -> Iterator[tuple[int, Longs]]:
    """Each value with its indices, ascending: 5 7 5 -> (5, [0, 2]), (7, [1])."""
    if not values.size:
        return
    order = values.argsort(kind="stable")
    for places in np.split(order, np.flatnonzero(np.diff(values[order])) + 1):
        yield int(values[places[0]]), places
