"""One format of tokens -> another: .bin/.idx, MDS and Parquet, every document and every column."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from meshfeed.errors import StoreError
from meshfeed.files import typed_errors
from meshfeed.files.url import is_remote
from meshfeed.prepare.convert_read import TOKENS, Batch, Lists, Source, source_of
from meshfeed.prepare.convert_write import SINKS, Sink
from meshfeed.store import OpenedStore

_SUFFIXES = {".bin": "megatron", ".idx": "megatron", ".parquet": "parquet"}


class Conversion:
    """A store, about to be written again in another format.

    Documents keep their order, ends and tokens, empty ones too. The tokens' column is called "tokens", and
    columns beside it are carried; what the other format cannot hold is refused by name unless it is dropped
    by name. Memory is bounded by some 2**20 tokens (or one document), a row group of the source where that is
    Parquet, or a shard of the destination where that is MDS.

    Args:
        store: to read; .bin/.idx, a folder with dataset.json, MDS or Parquet, here or far away.
        path: to write, on this machine. For .bin/.idx the prefix; with columns beside the tokens a folder
            with dataset.json.
        to: "megatron", "mds" or "parquet"; None where the suffix of the path tells.
        dtype: of the tokens; None for the source's. Each must fit.
        drop: columns to leave behind; also "sequences" and "modes", which only Megatron's stores have.
        shard_bytes: of a shard of MDS at most; None for the writer's own measure.
        overwrite: whether a store of that format at the path may be replaced.

    Raises StoreError.
    """

    def __init__(
        self,
        store: OpenedStore,
        path: str | os.PathLike[str],
        *,
        to: str | None = None,
        dtype: npt.DTypeLike | None = None,
        drop: Collection[str] = (),
        shard_bytes: int | None = None,
        overwrite: bool = False,
    ) -> None:
        self._store, self._drop = store, tuple(drop)
        kind, where = _kind_of(os.fspath(path), to)
        self._source = source_of(store)
        self._columns = _kept(store.path, self._source, kind, self._drop, dtype)
        if _same(store.path, where):
            raise StoreError(f"{where}: is what is read; write to another path")
        self._sink = kind(where, self._columns, shard_bytes=shard_bytes, overwrite=overwrite)
        self.num_documents = self.num_tokens = 0

    def run(self) -> Iterator[float]:
        """Write it, yielding the part done, in (0, 1]; it appears with the end of the iterator."""
        total, dtype = self._source.num_documents, np.dtype(self._columns[TOKENS].partition(":")[2])
        self.num_documents = self.num_tokens = 0
        with typed_errors(folder := self._sink.path.parent):
            folder.mkdir(parents=True, exist_ok=True)
        with self._sink as sink:
            for batch in self._source.batches(self._columns):
                fitting = self._fitting(batch, dtype)
                sink.add(fitting)
                self.num_documents += len(fitting[TOKENS])
                yield self.num_documents / total
            if self.num_documents != total:
                raise StoreError(
                    f"{self._store.path}: {self.num_documents} documents read of {total}; copy it again"
                )

    def facts(self) -> dict[str, Any]:
        """What was done, as JSON-able values."""
        return {
            "source": self._store.path,
            "destination": str(self._sink.path),
            "format": self._sink.name,
            "num_documents": self.num_documents,
            "num_tokens": self.num_tokens,
            "columns": dict(self._columns),
            "dropped": list(self._drop),
            "size_bytes": sum(path.stat().st_size for path in self._sink.files),
        }

    def _fitting(self, batch: Batch, dtype: np.dtype[Any]) -> Batch:
        """The batch with tokens of the type asked for, exactly."""
        tokens = batch[TOKENS]
        if not isinstance(tokens, Lists):
            raise StoreError(f"{self._store.path}: tokens that are no lists; name their column by --column")
        self.num_tokens += tokens.values.size
        if tokens.values.dtype == dtype:
            return batch
        made = tokens.values.astype(dtype)
        # Back again, too: 2**63 as uint64 is, as int64, equal to nothing else.
        wrong = (made != tokens.values) | ((made < 0) != (tokens.values < 0))
        if wrong.any():
            at = int(wrong.argmax())
            row = self.num_documents + int(tokens.lengths.cumsum().searchsorted(at, side="right"))
            raise StoreError(
                f"{self._store.path}: document {row} has the token {tokens.values[at]}, which {dtype.name} "
                f"cannot hold; take a wider dtype"
            )
        return {**batch, TOKENS: Lists(made, tokens.lengths)}


def _kind_of(path: str, to: str | None) -> tuple[type[Sink], Path]:
    """What to write, and where."""
    if is_remote(path):
        raise StoreError(f"{path}: convert to a path of this machine, and copy it from there")
    found = _SUFFIXES.get(Path(path).suffix)
    to = to or found or "no format"
    if to not in SINKS:
        raise StoreError(f"{path}: {to} asked for; name one of {', '.join(SINKS)} by --to")
    return SINKS[to], Path(path).with_suffix("") if found == to == "megatron" else Path(path)


def _kept(
    path: str, source: Source, kind: type[Sink], drop: Collection[str], dtype: npt.DTypeLike | None
) -> Mapping[str, str]:
    """The columns to write: all that are not dropped. Raises StoreError for what would be lost."""
    columns = dict(source.columns)
    if dtype is not None:
        columns[TOKENS] = f"ndarray:{_dtype_of(dtype)}"
    for name in drop:
        if name == TOKENS or (name not in columns and name not in source.losses):
            there = [*(name for name in columns if name != TOKENS), *source.losses]
            raise StoreError(
                f"{path}: no {name!r} to drop; there is {', '.join(there) or 'nothing but tokens'}"
            )
        columns.pop(name, None)
    for name, what in source.losses.items():
        if name not in drop:
            raise StoreError(f"{path}: has {what}, which {kind.name} would lose; allow it by --drop {name}")
    for name, held in columns.items():
        why = kind.unfit(name, held)
        if why is not None:
            way = "" if name == TOKENS else f"; leave it behind by --drop {name}"
            raise StoreError(f"{path}: column {name!r} is {held}, which {kind.name} cannot hold: {why}{way}")
    return columns


def _dtype_of(given: npt.DTypeLike) -> str:
    try:
        return np.dtype(given).name
    except TypeError as error:
        raise StoreError(
            f"dtype {given!r}: {error}; uint16 and int32 are two that all formats know"
        ) from error


def _same(path: str, where: Path) -> bool:
    return not is_remote(path) and Path(path).resolve() == where.resolve()
