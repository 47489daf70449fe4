"""A folder with dataset.json: several .bin/.idx pairs of the same documents: tokens and further columns.

    {"format": "meshfeed", "version": 1, "columns": {"tokens": "tokens", "loss_mask": "mask"}}

A column's value is the relative prefix of its pair. All have the same documents with the same lengths, so
a token's values are at its position in the stream of each column.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Self, cast

import numpy as np

from meshfeed.arrays import Array, Longs
from meshfeed.errors import OptionError, StoreError
from meshfeed.files import Cache, Fetching, FileStats, Folder
from meshfeed.store.base import LabelsAre, LengthsIndex, StreamStore
from meshfeed.store.format import Place, StoreFormat
from meshfeed.store.indexed import IndexedStore, indexed_in
from meshfeed.store.loss_columns import as_used

NAME = "dataset.json"
FORMAT, VERSION = "meshfeed", 1
_MOST_BYTES = 1 << 20
_BLOCK = 1 << 18  # documents whose lengths are checked together


class DatasetStore(StreamStore):
    """A folder with dataset.json: its tokens as a token store, and its other columns.

    It is read like its tokens (see `IndexedStore`); entering it also enters its columns.

    Attributes:
        folder: the folder, as it was opened.
        path: of the folder, for messages.
        tokens: the store of the column "tokens".
        columns: name -> store of each other column.
    """

    def __init__(
        self,
        folder: Folder,
        path: str,
        tokens: IndexedStore,
        columns: Mapping[str, IndexedStore],
        cache: Cache,
        further: Sequence[IndexedStore] = (),
    ) -> None:
        super().__init__()
        self.folder, self.path, self.tokens, self.kept_in = folder, path, tokens, cache
        self._columns, self._further, self._used = dict(columns), tuple(further), ""
        self._is_whole, self.wants_ahead = False, tokens.wants_ahead

    @property
    def _stores(self) -> tuple[IndexedStore, ...]:
        return (self.tokens, *self._columns.values(), *self._further)

    @property
    def columns(self) -> Mapping[str, IndexedStore]:
        return self._columns

    def check(self) -> Self:
        """Check each index as `IndexedStore.check` does, and that numbers of documents and tokens agree."""
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
        """Check all entries of each index, and lengths against the tokens', yielding the fraction done."""
        stores = [self.tokens, *self._columns.values()]
        total = len(stores) + len(self._columns)
        for done, store in enumerate(stores):
            yield from ((done + part) / total for part in store.verify())
        for done, (name, store) in enumerate(self._columns.items(), start=len(stores) + 1):
            self._compare(name, store)
            yield done / total

    def refuse_apart(self) -> None:
        """Raises StoreError for columns of other lengths than the tokens; many are compared once per node."""
        if self._columns and self.num_documents <= _BLOCK:
            self._compared()
        elif self._columns:
            self.once_per_node(self._compared, kind="lengths of columns", version=1)

    def _compared(self) -> Longs:
        for name, store in self._columns.items():
            self._compare(name, store)
        return np.zeros(1, np.int64)

    @property
    def is_summed(self) -> bool:
        return all(store.is_summed for store in self._stores)

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

    @cached_property
    def fingerprint(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Hex digest of all names and fingerprints; it does not depend on the path."""
        return self._fingerprint_of_columns()

    def _fingerprint_of_columns(self) -> str:
        columns = {name: store.fingerprint for name, store in sorted(self._columns.items())}
        text = json.dumps({"tokens": self.tokens.fingerprint, "columns": columns})
        return as_used(digest_of(text), self._used)

    @property
    def stats(self) -> FileStats:
        return sum((store.stats for store in self._stores), FileStats())

    @property
    def files_version(self) -> str:
        return " ".join(store.files_version for store in self._stores)

    def used_as(self, labels: LabelsAre | None, ignore: frozenset[str]) -> Self:
        """See `StreamStore`. ignore: any of its columns."""
        for name in sorted(ignore - self._columns.keys()):
            raise OptionError(
                f"{self.path}: ignore={name!r}: it has {', '.join(self._columns) or 'no columns but tokens'}"
            )
        self._columns = {name: store for name, store in self._columns.items() if name not in ignore}
        if ignore or labels not in (None, self.labels_are):
            self._used = f"labels={labels or self.labels_are} ignore={','.join(sorted(ignore))}"
        self.labels_are = labels or self.labels_are
        return self

    # -- as its tokens ----------------------------------------------------------------------------------

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.tokens.dtype

    @property
    def documents(self) -> LengthsIndex:
        return self.tokens.documents

    @property
    def num_documents(self) -> int:
        return self.tokens.num_documents

    @property
    def num_tokens(self) -> int:
        return self.tokens.num_tokens

    @property
    def fetching(self) -> Fetching | None:
        return self.tokens.fetching

    def cut(self, begins: Longs, ends: Longs) -> None:
        for store in (self.tokens, *self._columns.values()):
            store.cut(begins, ends)

    def read_into(self, out: Array, starts: Longs, stops: Longs) -> None:
        """Tokens of stream ranges. For a column, use `columns[name].read_stream`."""
        self.tokens.read_into(out, starts, stops)

    def will_need(self, starts: Longs, stops: Longs) -> None:
        """Announce ranges of the tokens. For a column, use `columns[name].will_need`."""
        self.tokens.will_need(starts, stops)

    def forget_needs(self) -> None:
        for store in self._stores:
            store.forget_needs()

    def acquire(self, stack: contextlib.ExitStack) -> None:
        """Enter the tokens, every column, and what else belongs to its documents, compared the first time."""
        for store in self._stores:
            stack.enter_context(store)
        if not self._is_whole:
            self.refuse_apart()
            self._is_whole = True

    def __repr__(self) -> str:
        return f"DatasetStore({self.path!r}, columns {', '.join(self._columns) or 'none'})"


def digest_of(text: str) -> str:
    """Hex digest of a text."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def read_dataset(folder: Folder, shown: str) -> dict[str, Any]:
    """The content of a dataset.json. Raises StoreError unless it is one."""
    where = f"{shown}/{NAME}"
    file = folder.file(NAME)
    if file.size_bytes > _MOST_BYTES:
        raise StoreError(f"{where}: {file.size_bytes} bytes, at most {_MOST_BYTES}; it is not a dataset.json")
    try:
        given: Any = json.loads(file.peek([(0, file.size_bytes)])[0])
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{where}: not valid JSON: {error}; write it again") from error
    if not isinstance(given, dict):
        raise StoreError(f"{where}: not a JSON object; write it again")
    content = cast(dict[str, Any], given)
    if content.get("format") != FORMAT:
        raise StoreError(f'{where}: "format" is {content.get("format")!r}, where {FORMAT!r} belongs')
    return content


def pairs_in(
    content: Mapping[str, Any], folder: Folder, shown: str, key: str, wanted: Sequence[str]
) -> dict[str, IndexedStore]:
    """Name -> store of each pair under a key of a dataset.json, `wanted` among them. Raises StoreError."""
    found, where = content.get(key), f"{shown}/{NAME}"
    if not isinstance(found, dict) or not all(name in found for name in wanted):
        names = " and ".join(f'"{name}"' for name in wanted)
        raise StoreError(f'{where}: "{key}" is not an object with {names} in it; write it again')
    prefixes = cast(dict[str, Any], found)
    for name, prefix in prefixes.items():
        if not name or not isinstance(prefix, str):
            raise StoreError(
                f"{where}: {key.removesuffix('s')} {name!r} is {prefix!r}; give the relative prefix of a "
                f".bin/.idx pair"
            )
    return {name: indexed_in(folder, prefix, f"{shown}/{prefix}") for name, prefix in prefixes.items()}


class DatasetFormat(StoreFormat):
    """A folder with dataset.json."""

    name = "a dataset.json"
    lies_at = f"a folder with {NAME}"

    def open(self, place: Place) -> DatasetStore | None:
        inside = place.name == NAME
        folder = place.beside if inside else place.within
        if (place.is_file and not inside) or not place.holds(folder, NAME):
            return None
        shown = place.shown.removesuffix(NAME) if inside else place.shown
        shown = shown.rstrip("/") or shown or "."
        return self._store(read_dataset(folder, shown), folder, shown, place.cache)

    def _store(
        self, content: Mapping[str, Any], folder: Folder, shown: str, cache: Cache
    ) -> DatasetStore | None:
        """The store, checked; None for a dataset of another format."""
        if "parts" in content:
            return None
        if content.get("version") != VERSION or type(content["version"]) is not int:
            raise StoreError(
                f'{shown}/{NAME}: "version" is {content.get("version")!r}; only {VERSION} and '
                f"{VERSION + 1} are known; update meshfeed, or write it again"
            )
        stores = pairs_in(content, folder, shown, "columns", ("tokens",))
        return DatasetStore(folder, shown, stores.pop("tokens"), stores, cache).check()
