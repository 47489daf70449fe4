"""Any store that `mf.open` reads -> a token store: .bin/.idx or, with further columns, dataset.json."""

from __future__ import annotations

import io
import os
import shutil
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from meshfeed.columns import Array
from meshfeed.errors import StoreError
from meshfeed.files import typed_errors
from meshfeed.files.url import is_remote
from meshfeed.formats.foreign_columns import ForeignColumns
from meshfeed.formats.parquet import RawStream
from meshfeed.formats.prepared import ORIGINS, VALUES
from meshfeed.store import (
    DatasetStore,
    DatasetWriter,
    IndexedStore,
    IndexedWriter,
    MultimodalStore,
    StreamStore,
)
from meshfeed.store.loss_columns import ATTENTION_MASK, LABELS, LOSS_MASK

I64 = npt.NDArray[np.int64]
Add = Callable[[I64, Mapping[str, Array]], None]
"""Adds documents: their lengths, and each column's values back to back."""

TOKENS = "tokens"
BATCH_TOKENS = 1 << 20
_BATCH_DOCUMENTS = 1 << 14
_BATCHES_AHEAD = 8
_UNLISTED = f"*{VALUES}, if there are any: its storage lists no files"
_SUFFIXES = (".bin", ".idx")
_AT_ENDS = {LABELS: -100, LOSS_MASK: 0}
"""Value of shifted columns at a document's last token, which has no label."""


class Conversion:
    """A store to be written again as a token store.

    Documents keep their order, ends and tokens, including empty ones. A further column is kept if it has one
    number for each token; otherwise it is refused by name, unless it is dropped by name. Of JSON lines, only
    the tokens, `labels` and a loss mask are read, and the mask becomes `loss_mask`. Labels that are not
    shifted are written shifted, as in dataset.json, and the loss mask with them, so the new store trains the
    same. An attention mask that is 1 everywhere is dropped; one with a 0 is refused, unless it is dropped by
    name. Values that `prepare --keep` put beside a dataset.json are copied if the new store is a folder, too.
    Memory is bounded by some 2**20 tokens (or one document), and by what the source decodes at once.

    Args:
        store: as `mf.open` returns it.
        path: to write, on this machine: the prefix of .bin and .idx or, with further columns, a folder with
            dataset.json.
        dtype: of the tokens, large enough for each; None for the store's.
        drop: columns to leave out; also "sequences" and "modes", which only .bin/.idx has.
        overwrite: whether a store at the path may be replaced.
    """

    def __init__(
        self,
        store: StreamStore,
        path: str | os.PathLike[str],
        *,
        dtype: npt.DTypeLike | None = None,
        drop: Collection[str] = (),
        overwrite: bool = False,
    ) -> None:
        self._store, self._given, self._dtype = store, os.fspath(path), dtype
        self._drop, self._overwrite = tuple(drop), overwrite
        self._moved: frozenset[str] = frozenset()
        self._dtypes: Mapping[str, np.dtype[Any]] = {}
        self._copied, self._not_copied = list[str](), list[str]()
        self.num_documents = self.num_tokens = 0

    def run(self) -> Iterator[float]:
        """Write it, yielding the share done, in (0, 1]; it appears when the iterator ends.

        Raises StoreError.
        """
        path, stores = self._path(), self._stores()
        self._dtypes = {name: self._dtype_of(name, store) for name, store in stores.items()}
        self.num_documents = self.num_tokens = 0
        is_folder = len(self._dtypes) > 1
        _refuse_ambiguous(path, is_folder=is_folder)
        beside = _beside(self._store)
        self._copied = [name for name in beside if is_folder and name.endswith(VALUES)]
        self._not_copied = [name for name in beside if name not in self._copied]
        with typed_errors(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
        if is_folder:
            _refuse_stale(path, self._copied)
        with ExitStack() as stack:
            for store in stores.values():
                stack.enter_context(store)
            add = self._writing(stack, path)
            for documents, lengths in _announced(stores):
                values = {name: _read(store, documents, lengths) for name, store in stores.items()}
                for name in self._moved:
                    values[name] = _shifted(values[name], lengths, _AT_ENDS[name])
                add(lengths, values)
                self.num_documents += lengths.size
                self.num_tokens += int(lengths.sum())
                yield self.num_documents / self._store.num_documents

    def facts(self) -> dict[str, Any]:
        """The results, as JSON-able values."""
        path = self._path()
        alone = len(self._dtypes) == 1
        files = [Path(f"{path}{suffix}") for suffix in (".bin", ".idx", ".sums")] if alone else path.iterdir()
        return {
            "source": self._store.path,
            "destination": str(path),
            "format": "megatron",
            "num_documents": self.num_documents,
            "num_tokens": self.num_tokens,
            "columns": {name: f"ndarray:{dtype.name}" for name, dtype in self._dtypes.items()},
            "dropped": list(self._drop),
            "copied": self._copied,
            "not_copied": self._not_copied,
            "size_bytes": sum(file.stat().st_size for file in files),
        }

    def _writing(self, stack: ExitStack, path: Path) -> Add:
        """Enter a writer of the columns; in a folder, copy the values, too."""
        if len(self._dtypes) == 1:
            pair = stack.enter_context(IndexedWriter(path, self._dtypes[TOKENS], overwrite=self._overwrite))
            return lambda lengths, values: pair.add_documents(values[TOKENS], lengths)
        made = stack.enter_context(DatasetWriter(path, self._dtypes, overwrite=self._overwrite))
        for name in self._copied:
            with cast(DatasetStore, self._store).folder.file(name) as file:
                shutil.copyfileobj(io.BufferedReader(RawStream(file)), made.add_file(name))
        return lambda lengths, values: made.add_documents(lengths, **values)

    def _path(self) -> Path:
        """The path to write. Raises StoreError for a path that cannot be used."""
        path = Path(self._given)
        if is_remote(self._given):
            raise StoreError(f"{self._given}: convert to a path of this machine, and copy it from there")
        if path.suffix == ".parquet":
            raise StoreError(f"{path}: token stores are written, not Parquet; pyarrow writes that")
        path = path.with_suffix("") if path.suffix in _SUFFIXES else path
        if not is_remote(self._store.path) and Path(self._store.path).resolve() == path.resolve():
            raise StoreError(f"{path}: is the source; write to another path")
        return path

    def _stores(self) -> Mapping[str, StreamStore]:
        """The columns to write, each as a store. Raises StoreError for data that would be lost."""
        store, drop = self._store, self._drop
        others, losses = store.beside(), _losses(store)
        for name in drop:
            if name not in others and name not in losses:
                there = ", ".join([*others, *losses]) or "nothing but tokens"
                raise StoreError(f"{store.path}: no {name!r} to drop; there is {there}")
        for name, what in losses.items():
            if name not in drop:
                raise StoreError(f"{store.path}: has {what}, which would be lost; allow it by --drop {name}")
        kept = {name: other for name, other in others.items() if name not in drop}
        if ATTENTION_MASK in kept and isinstance(store, ForeignColumns):
            try:
                store.refuse_padding(kept.pop(ATTENTION_MASK))
            except StoreError as error:
                raise StoreError(f"{error}; or allow it by --drop {ATTENTION_MASK}") from error
            self._drop = (*drop, ATTENTION_MASK)
        if isinstance(store, ForeignColumns):
            try:
                kept = dict(store.with_loss_mask(kept))
            except StoreError as error:
                raise StoreError(f"{error}; or leave one behind by --drop NAME") from error
        if LABELS in kept and store.labels_are == "unshifted":
            self._moved = frozenset(_AT_ENDS.keys() & kept.keys())
        if TOKENS in kept:
            raise StoreError(
                f"{store.path}: another column is called {TOKENS!r}; leave it behind by --drop tokens"
            )
        return {TOKENS: store, **kept}

    def _dtype_of(self, name: str, store: StreamStore) -> np.dtype[Any]:
        if name == TOKENS:
            return store.dtype if self._dtype is None else np.dtype(self._dtype)
        try:
            return store.dtype
        except StoreError as error:
            raise StoreError(f"{error}; or leave column {name!r} behind by --drop {name}") from error


def _losses(store: StreamStore) -> Mapping[str, str]:
    """Data of a store that a conversion loses: name -> description."""
    tokens = store.tokens if isinstance(store, DatasetStore) else store
    pairs = [each for each in (tokens, *store.beside().values()) if isinstance(each, IndexedStore)]
    losses: dict[str, str] = {}
    if isinstance(store, MultimodalStore):
        losses["parts"] = "images, audio or video"
    if any(pair.has_modes for pair in pairs):
        losses["modes"] = "a mode for each sequence"
    if any(_has_several(pair) for pair in pairs):
        losses["sequences"] = "documents of several sequences"
    return losses


def _has_several(store: IndexedStore) -> bool:
    """Whether a document has more than one sequence."""
    for begin in range(0, store.num_documents, BATCH_TOKENS):
        documents = np.arange(begin, min(begin + BATCH_TOKENS, store.num_documents) + 1)
        if (np.diff(store.index().first_sequences_of(documents)) > 1).any():
            return True
    return False


def _beside(store: StreamStore) -> list[str]:
    """The files that `prepare` put beside a store: values of its documents, and their origins."""
    if not isinstance(store, DatasetStore):
        return []
    try:
        names = [name for name, _ in store.folder.names() if "/" not in name]
    except StoreError:
        return [_UNLISTED]
    return [name for name in names if name.endswith(VALUES) or name == ORIGINS]


def _refuse_ambiguous(path: Path, *, is_folder: bool) -> None:
    """Raises StoreError for a path at which both a pair and something else would be."""
    if is_folder:
        for pair in (each for suffix in _SUFFIXES if (each := Path(f"{path}{suffix}")).exists()):
            raise StoreError(
                f"{pair}: would be opened in place of the folder {path}; move it away, or choose another path"
            )
    elif path.exists():
        raise StoreError(
            f"{path}: is a {'folder' if path.is_dir() else 'file'}, in place of which the .bin/.idx pair "
            f"would be opened; choose another prefix"
        )


def _refuse_stale(path: Path, values: Collection[str]) -> None:
    """Raises StoreError for a folder with files beside a store that would be taken for the new one's."""
    with typed_errors(path):
        there = sorted(each.name for each in path.iterdir()) if path.is_dir() else []
    for name in there:
        if name == ORIGINS or (name.endswith(VALUES) and name not in values):
            raise StoreError(
                f"{path / name}: belongs to another store, and would be taken for the new one's; move it "
                f"away, or choose another path"
            )


def _announced(stores: Mapping[str, StreamStore]) -> Iterator[tuple[I64, I64]]:
    """(documents, their lengths), in order; each is announced to the stores some batches earlier."""
    waiting: deque[tuple[I64, I64]] = deque()
    for documents, lengths in _batches(stores[TOKENS]):
        for name, store in stores.items():
            apart = np.flatnonzero(store.lengths(documents) != lengths)
            if apart.size:
                raise StoreError(
                    f"{stores[TOKENS].path}: document {documents[apart[0]]}: {name} and tokens differ in "
                    f"length; leave it behind by --drop {name}"
                )
            if store.is_stream:
                store.will_need(*_range(store, documents, lengths))
        waiting.append((documents, lengths))
        if len(waiting) > _BATCHES_AHEAD:
            yield waiting.popleft()
    yield from waiting


def _batches(store: StreamStore) -> Iterator[tuple[I64, I64]]:
    """(documents, their lengths), in order, about 2**20 tokens together but at least one document."""
    for begin in range(0, store.num_documents, _BATCH_DOCUMENTS):
        documents = np.arange(begin, min(begin + _BATCH_DOCUMENTS, store.num_documents))
        lengths = store.lengths(documents)
        # ends 3 7 9 12 14, batches of 4 -> parts 0 1 2 2 3
        _, first = np.unique((lengths.cumsum() - 1).clip(0) // BATCH_TOKENS, return_index=True)
        yield from zip(np.split(documents, first[1:]), np.split(lengths, first[1:]))


def _read(store: StreamStore, documents: I64, lengths: I64) -> Array:
    """All values of some documents, back to back."""
    if store.is_stream:
        return store.read_stream(*_range(store, documents, lengths))
    return np.concatenate([store.read(i, 0, n) for i, n in zip(documents.tolist(), lengths.tolist())])


def _shifted(values: Array, lengths: I64, at_end: int) -> Array:
    """The values of each document one place earlier, back to back. at_end: of its last token."""
    moved = np.append(values[1:], values.dtype.type(at_end)) if values.size else values
    moved[(lengths.cumsum() - 1)[lengths > 0]] = at_end
    return moved


def _range(store: StreamStore, documents: I64, lengths: I64) -> tuple[I64, I64]:
    """Begin and end in the stream of adjacent documents; int64 [1] each."""
    begin = store.offsets(documents[:1])
    return begin, begin + lengths.sum()
