"""Stores as tables: documents with all their columns, batch after batch, whatever the format.

What a column holds is said as MDS says it: `ndarray:DTYPE` for a list of numbers, a DTYPE for one number,
`int`, `str`, `bytes`. Whatever else a format calls a column stands for itself, and no format can hold it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from meshfeed.columns import Array
from meshfeed.errors import StoreError
from meshfeed.store import DatasetStore, IndexedStore, MDSStore, OpenedStore
from meshfeed.store.mds_sample import DTYPE_CODES, ndarray_of
from meshfeed.store.parquet import ParquetStore

I64 = npt.NDArray[np.int64]

TOKENS = "tokens"
BATCH_TOKENS = 1 << 20
_BATCH_DOCUMENTS = 1 << 14
_TOKEN_BYTES = 4
_SPANS_AHEAD = 8


@dataclass(frozen=True, slots=True)
class Lists:
    """A column of lists of numbers: values back to back [sum(lengths)], and how many each has, int64 [n]."""

    values: Array
    lengths: I64

    def __iter__(self) -> Iterator[Array]:
        ends = self.lengths.cumsum()
        return (self.values[a:b] for a, b in zip((ends - self.lengths).tolist(), ends.tolist()))

    def __len__(self) -> int:
        return self.lengths.size


Batch = Mapping[str, Lists | Sequence[Any]]
"""Some documents: column -> a value of each. "tokens" is one."""


class Source(ABC):
    """A store to read whole, once.

    Attributes:
        columns: name -> what it holds; the tokens are called "tokens".
        losses: name -> what else the store has, of which a batch tells nothing.
        num_documents: in the store.
    """

    columns: Mapping[str, str]
    losses: Mapping[str, str]
    num_documents: int

    @abstractmethod
    def batches(self, names: Collection[str]) -> Iterator[Batch]:
        """All documents in order, some at a time, with the named columns. Raises StoreError."""


def source_of(store: OpenedStore) -> Source:
    """An opened store as a table. Raises StoreError for a format that is not read like this."""
    match store:
        case IndexedStore():
            return _Indexed(store, {TOKENS: store})
        case DatasetStore():
            return _Indexed(store, {TOKENS: store.tokens, **store.columns})
        case MDSStore():
            return _Mds(store)
        case ParquetStore():
            return _Parquet(store)
        case _:
            raise StoreError(
                f"{store.path}: {store.facts()['format']}; converted are Megatron's .bin/.idx, folders with "
                f"dataset.json, MDS and Parquet; for text there is `meshfeed prepare`"
            )


class _Indexed(Source):
    def __init__(self, store: IndexedStore | DatasetStore, columns: Mapping[str, IndexedStore]) -> None:
        self._store, self._columns = store, columns
        self.columns = {name: f"ndarray:{each.dtype.name}" for name, each in columns.items()}
        self.num_documents = store.num_documents
        self.losses = {}
        for each in columns.values():
            if each.has_modes:
                self.losses["modes"] = "a mode for each sequence"
            if _has_several(each):
                self.losses["sequences"] = "documents of several sequences"

    def batches(self, names: Collection[str]) -> Iterator[Batch]:
        """See Source."""
        with self._store:
            for first, stop in _announced([self._columns[name] for name in names]):
                yield {name: _lists(self._columns[name], first, stop) for name in names}


class _Mds(Source):
    losses: Mapping[str, str] = {}

    def __init__(self, store: MDSStore) -> None:
        self._store, self._tokens = store, store.token_column
        self.num_documents = store.num_documents
        others = {name: kind for name, kind in store.encodings.items() if name != self._tokens}
        _refuse_tokens_beside(store.path, self._tokens, others)
        self.columns = {TOKENS: f"ndarray:{store.dtype.name}"} | {
            name: self._kind(name, encoding) for name, encoding in others.items()
        }

    def _kind(self, name: str, encoding: str) -> str:
        try:
            array = ndarray_of(encoding)
        except ValueError:
            return encoding
        if array is None or len(array.shape or (1,)) > 1:
            return encoding
        if array.dtype is None and self.num_documents:
            first = self._store.sample(0, (name,))[name]
            return f"ndarray:{first.dtype.name}"
        return encoding if array.dtype is None else f"ndarray:{array.dtype.name}"

    def batches(self, names: Collection[str]) -> Iterator[Batch]:
        """See Source."""
        others = [name for name in names if name != TOKENS]
        with self._store:
            for first, stop in _announced([self._store]):
                batch: dict[str, Lists | Sequence[Any]] = {TOKENS: _lists(self._store, first, stop)}
                rows = [self._store.sample(i, others) for i in range(first, stop)] if others else []
                for name in others:
                    values = [row[name] for row in rows]
                    dtype = list_dtype(self.columns[name])
                    batch[name] = values if dtype is None else self._joined(name, values, dtype, first)
                yield batch

    def _joined(self, name: str, values: list[Array], dtype: np.dtype[Any], first: int) -> Lists:
        for i, value in enumerate(values):
            if value.ndim != 1 or value.dtype != dtype:
                raise StoreError(
                    f"{self._store.path}: sample {first + i}, column {name!r}: {value.dtype.name} of shape "
                    f"{value.shape}, the first is {dtype.name} of one dimension; leave the column out by "
                    f"--drop {name}"
                )
        return Lists(np.concatenate(values), np.array([value.size for value in values]))


class _Parquet(Source):
    losses: Mapping[str, str] = {}

    def __init__(self, store: ParquetStore) -> None:
        self._store, self.num_documents = store, store.num_rows
        schema, self._tokens = store.schema()
        kinds = {field.name: _kind_of(field.type) for field in schema}
        tokens = kinds.pop(self._tokens)
        _refuse_tokens_beside(store.path, self._tokens, kinds)
        if not tokens.startswith("ndarray:"):
            raise StoreError(
                f"{store.path}: column {self._tokens!r} is {tokens}, where lists of whole numbers belong; "
                f"name another by --column, or prepare text with `meshfeed prepare`"
            )
        self.columns = {TOKENS: tokens, **kinds}

    def batches(self, names: Collection[str]) -> Iterator[Batch]:
        """See Source."""
        stored = {name: self._tokens if name == TOKENS else name for name in names}
        for url, first, batch in self._store.batches(list(stored.values()), _TOKEN_BYTES * BATCH_TOKENS):
            made = {
                name: _values(batch.column(column), self.columns[name]) for name, column in stored.items()
            }
            for name, values in made.items():
                if isinstance(values, _Null):
                    raise StoreError(
                        f"{url}: row {first + values.row}, column {stored[name]!r}: a null, which no other "
                        f"format has; leave the row out, or the column by --drop"
                    )
            yield cast(Batch, made)


@dataclass(frozen=True, slots=True)
class _Null:
    """A row where a value is missing, or one among its values."""

    row: int


def _values(array: Any, kind: str) -> Lists | Sequence[Any] | _Null:
    """An Arrow array of what `kind` says."""
    if hasattr(array.type, "index_type"):
        array = array.dictionary_decode()
    if array.null_count:
        return _Null(_first_null(array))
    if list_dtype(kind) is None:
        return array.to_pylist() if kind in ("str", "bytes") else array.to_numpy(zero_copy_only=False)
    if hasattr(array.type, "list_size"):
        lengths = np.full(len(array), array.type.list_size, np.int64)
    else:
        lengths = np.diff(array.offsets.to_numpy()).astype(np.int64)
    values = array.flatten()
    if values.null_count:
        return _Null(int(lengths.cumsum().searchsorted(_first_null(values), side="right")))
    return Lists(values.to_numpy(zero_copy_only=False), lengths)


def _first_null(array: Any) -> int:
    return int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])


def list_dtype(kind: str) -> np.dtype[Any] | None:
    """Of the numbers in a column of lists; None for another column."""
    name, _, dtype = kind.partition(":")
    return np.dtype(dtype) if name == "ndarray" and dtype in DTYPE_CODES.values() else None


def _announced(stores: Sequence[IndexedStore | MDSStore]) -> Iterator[tuple[int, int]]:
    """Documents first..stop, all in order; stores with these documents are told some spans before."""
    waiting: deque[tuple[int, int]] = deque()
    for span in _spans(stores[0]):
        for store in stores:
            if getattr(store, "is_stream", True):
                begin, end = _range(store, *span)
                store.will_need(begin, end)
        waiting.append(span)
        if len(waiting) > _SPANS_AHEAD:
            yield waiting.popleft()
    yield from waiting


def _spans(store: OpenedStore) -> Iterator[tuple[int, int]]:
    """Documents first..stop, all in order, some 2**20 tokens together but at least one document."""
    for begin in range(0, store.num_documents, _BATCH_DOCUMENTS):
        end = min(begin + _BATCH_DOCUMENTS, store.num_documents)
        ends = store.lengths(np.arange(begin, end)).cumsum()
        first = 0
        while first < ends.size:
            room = BATCH_TOKENS + (int(ends[first - 1]) if first else 0)
            stop = max(int(ends.searchsorted(room, side="right")), first + 1)
            yield begin + first, begin + stop
            first = stop


def _lists(store: OpenedStore, first: int, stop: int) -> Lists:
    documents = np.arange(first, stop)
    lengths = store.lengths(documents)
    if getattr(store, "is_stream", True):
        return Lists(store.read_stream(*_range(store, first, stop)), lengths)
    parts = [store.read(i, 0, int(length)) for i, length in zip(documents.tolist(), lengths)]
    return Lists(np.concatenate(parts), lengths)


def _range(store: OpenedStore, first: int, stop: int) -> tuple[I64, I64]:
    """Begin and end in the stream of documents first..stop, at least one; int64 [1] each."""
    both = np.array([first, stop - 1])
    ends = store.offsets(both) + store.lengths(both)
    return store.offsets(both[:1]), ends[1:]


def _has_several(store: IndexedStore) -> bool:
    """Whether a document has more than one sequence."""
    if store.num_sequences > store.num_documents:
        return True
    index = store.index()
    blocks = range(0, store.num_documents, BATCH_TOKENS)
    ends = ((first, min(first + BATCH_TOKENS, store.num_documents)) for first in blocks)
    return any((np.diff(index.first_sequences_of(np.arange(a, b + 1))) > 1).any() for a, b in ends)


def _kind_of(arrow: Any) -> str:
    """What an Arrow type holds."""
    if hasattr(arrow, "index_type"):
        arrow = arrow.value_type
    text = str(arrow).removeprefix("large_")
    if text in ("string", "binary"):
        return {"string": "str", "binary": "bytes"}[text]
    is_list = text.startswith(("list<", "fixed_size_list<"))
    number = {"halffloat": "float16", "float": "float32", "double": "float64"}
    name = str(arrow.value_type if is_list else arrow)
    name = number.get(name, name)
    if name not in DTYPE_CODES.values():
        return str(arrow)
    return f"ndarray:{name}" if is_list else name


def _refuse_tokens_beside(path: str, column: str, others: Collection[str]) -> None:
    if TOKENS in others:
        raise StoreError(
            f"{path}: tokens from column {column!r}, and another column is called {TOKENS!r}; write it again "
            f"with another name"
        )
