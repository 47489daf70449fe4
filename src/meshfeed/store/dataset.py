"""A folder with dataset.json: several .bin/.idx pairs of the same documents, tokens and columns beside them.

    {"format": "meshfeed", "version": 1, "columns": {"tokens": "tokens", "loss_mask": "mask"}}

A column's value is the relative prefix of its pair. All have the same documents with the same lengths: what
is of a token lies at the token's place in each column's stream.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, Self, cast

import numpy as np
import numpy.typing as npt

from meshfeed.errors import StoreError
from meshfeed.files import Cache, FileStats, Folder
from meshfeed.store.base import LengthsIndex, StreamStore
from meshfeed.store.format import Place, StoreFormat
from meshfeed.store.indexed import IndexedStore, indexed_in
from meshfeed.store.marks import Marks, marks_of

I64 = npt.NDArray[np.int64]

NAME = "dataset.json"
FORMAT, VERSION = "meshfeed", 1
_MOST_BYTES = 1 << 20
_BLOCK = 1 << 18


class DatasetStore(StreamStore):
    """The tokens of a folder with dataset.json as a token store, and its further columns.

    Making one only remembers. It is read as its tokens are (see `IndexedStore`); entered, its columns are,
    too. Pickled or copied, it arrives not entered.

    Attributes:
        path: of the folder.
        tokens: the store of the column "tokens".
        columns: name -> store of each other column.
    """

    def __init__(
        self, path: str, tokens: IndexedStore, columns: Mapping[str, IndexedStore], cache: Cache
    ) -> None:
        super().__init__()
        self.path, self.tokens, self._cache = path, tokens, cache
        self._columns = dict(columns)

    @property
    def columns(self) -> Mapping[str, IndexedStore]:
        """Name -> store of each column but the tokens."""
        return self._columns

    def beside(self) -> Mapping[str, IndexedStore]:
        """Its columns."""
        return self.columns

    def check(self) -> Self:
        """Check each index as `IndexedStore.check` does, and that all have as many documents and tokens."""
        expected = self.tokens.check()
        for name, store in self._columns.items():
            found = store.check()
            for what in ("num_documents", "num_tokens"):
                if getattr(found, what) != getattr(expected, what):
                    raise StoreError(
                        f"{self.path}/{NAME}: column {name!r} has {what}={getattr(found, what)}, tokens have "
                        f"{getattr(expected, what)}; write both from the same documents"
                    )
        for name, store in {"tokens": self.tokens, **self._columns}.items():
            if not store.is_stream:
                raise StoreError(
                    f"{self.path}/{NAME}: column {name!r} does not fill its .bin in order; write it again"
                )
        return self

    def verify(self) -> Iterator[float]:
        """Check every entry of each index, and every length against the tokens', yielding the part done."""
        stores = [self.tokens, *self._columns.values()]
        total = len(stores) + len(self._columns)
        for done, store in enumerate(stores):
            yield from ((done + part) / total for part in store.verify())
        for done, (name, store) in enumerate(self._columns.items(), start=len(stores) + 1):
            self._compare(name, store)
            yield done / total

    def _compare(self, name: str, store: IndexedStore) -> None:
        with self.tokens, store:
            for first in range(0, self.num_documents, _BLOCK):
                documents = np.arange(first, min(first + _BLOCK, self.num_documents))
                lengths, expected = store.lengths(documents), self.tokens.lengths(documents)
                for i in np.flatnonzero(lengths != expected)[:1]:
                    raise StoreError(
                        f"{self.path}/{NAME}: document {documents[i]} has {lengths[i]} values in column "
                        f"{name!r}, {expected[i]} tokens; write both from the same documents"
                    )

    def facts(self) -> dict[str, Any]:
        columns = {name: store.dtype.name for name, store in self._columns.items()}
        return {
            "format": f"meshfeed {NAME}, version {VERSION}",
            "columns": ", ".join(f"{name} ({dtype})" for name, dtype in columns.items()) or "none but tokens",
            "size_bytes": sum(s.header.bin_size_bytes for s in (self.tokens, *self._columns.values())),
        }

    @property
    def fingerprint(self) -> str:
        """Hex digest of the columns' names and fingerprints, the same wherever the folder lies."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        told = {name: store.fingerprint for name, store in sorted(self._columns.items())}
        text = json.dumps({"tokens": self.tokens.fingerprint, "columns": told})
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    @property
    def stats(self) -> FileStats:
        """What reading tokens and columns has cost so far."""
        return sum((store.stats for store in self._columns.values()), self.tokens.stats)

    def count_marked(self, column: str, starts: I64, stops: I64) -> I64:
        """Values of a column that are not 0, in stream ranges; int64 [m] twice -> int64 [m].

        By an index of one bit for each token, made from the whole column once per node, at the first call.
        """
        return _marks_of(self._columns[column], self._cache).count(starts, stops)

    # -- the face of its tokens -------------------------------------------------------------------------

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.tokens.dtype

    @property
    def documents(self) -> LengthsIndex:
        """Where documents begin: as in its tokens."""
        return self.tokens.documents

    @property
    def num_documents(self) -> int:
        return self.tokens.num_documents

    @property
    def num_tokens(self) -> int:
        return self.tokens.num_tokens

    def lengths(self, documents: I64) -> I64:
        return self.tokens.lengths(documents)

    def document_starts(self, starts: I64, stops: I64) -> tuple[I64, I64]:
        return self.tokens.document_starts(starts, stops)

    @property
    def wants_ahead(self) -> bool:
        return self.tokens.wants_ahead

    def read_into(self, out: npt.NDArray[Any], starts: I64, stops: I64) -> None:
        """Tokens of the stream's ranges; a column's: `columns[name].read_stream`."""
        self.tokens.read_into(out, starts, stops)

    def will_need(self, starts: I64, stops: I64) -> None:
        """Announce ranges of the tokens; a column's are announced to it."""
        self.tokens.will_need(starts, stops)

    def forget_needs(self) -> None:
        for store in (self.tokens, *self._columns.values()):
            store.forget_needs()

    def acquire(self, stack: contextlib.ExitStack) -> None:
        """Enter the tokens and every column."""
        for store in (self.tokens, *self._columns.values()):
            stack.enter_context(store)

    def __repr__(self) -> str:
        return f"DatasetStore({self.path!r}, columns {', '.join(self._columns) or 'none'})"


@functools.lru_cache(maxsize=16)
def _marks_of(column: IndexedStore, cache: Cache) -> Marks:
    """The marks of a column; kept, since they map a file."""
    return marks_of(column, cache)


def open_dataset(folder: Folder, shown: str, cache: Cache) -> DatasetStore:
    """The store of a folder that has a dataset.json, checked. Raises StoreError where it cannot be."""
    where = f"{shown}/{NAME}"
    file = folder.file(NAME)
    if file.size_bytes > _MOST_BYTES:
        raise StoreError(f"{where}: {file.size_bytes} bytes, at most {_MOST_BYTES}; it is not a dataset.json")
    try:
        told: Any = json.loads(file.peek([(0, file.size_bytes)])[0])
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{where}: not valid JSON: {error}; write it again") from error
    stores = {
        name: indexed_in(folder, prefix, f"{shown}/{prefix}")
        for name, prefix in _columns_of(told, where).items()
    }
    return DatasetStore(shown, stores.pop("tokens"), stores, cache).check()


def _columns_of(told: Any, where: str) -> dict[str, str]:
    if not isinstance(told, dict):
        raise StoreError(f"{where}: a JSON object belongs there; write it again")
    said = cast(dict[str, Any], told)
    if said.get("format") != FORMAT:
        raise StoreError(f'{where}: "format" is {said.get("format")!r}, where {FORMAT!r} belongs')
    if said.get("version") != VERSION or type(said["version"]) is not int:
        raise StoreError(f'{where}: "version" is {said.get("version")!r}; only {VERSION} is known')
    columns = said.get("columns")
    if not isinstance(columns, dict) or "tokens" not in columns:
        raise StoreError(f'{where}: "columns" is not an object with "tokens" in it; write it again')
    for name, prefix in cast(dict[str, Any], columns).items():
        if not name or not isinstance(prefix, str):
            raise StoreError(
                f"{where}: column {name!r} is {prefix!r}; give the relative prefix of a .bin/.idx pair"
            )
    return cast(dict[str, str], columns)


class DatasetFormat(StoreFormat):
    """A folder with dataset.json."""

    name = "a dataset.json"
    lies_at = f"a folder with {NAME}"

    def open(self, place: Place) -> DatasetStore | None:
        """The store, if it is such a folder or its dataset.json."""
        inside = place.name == NAME
        folder = place.beside if inside else place.within
        if (place.is_file and not inside) or not place.holds(folder, NAME):
            return None
        shown = place.shown.removesuffix(NAME) if inside else place.shown
        return open_dataset(folder, shown.rstrip("/") or shown or ".", place.cache)
