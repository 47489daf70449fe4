"""Tables -> stores: what each format can hold, and the writer of each."""

from __future__ import annotations

import contextlib
import importlib
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self, cast

import numpy as np

from meshfeed.errors import StoreError
from meshfeed.extras import install
from meshfeed.files import typed_errors
from meshfeed.prepare.convert_read import TOKENS, Batch, Lists, list_dtype
from meshfeed.store import DatasetWriter, IndexedWriter, MDSWriter
from meshfeed.store.dataset import NAME
from meshfeed.store.index import DTYPES
from meshfeed.store.indexed_writer import sync_directory
from meshfeed.store.mds_sample import DTYPE_CODES
from meshfeed.store.mds_writer import SHARD_BYTES

_MAGIC = b"PAR1"
_PLAIN = ("int", "str", "bytes", *DTYPE_CODES.values())


class Sink(ABC):
    """Writes a store that appears whole at a clean end of `with`, and not at all elsewhere.

    Args:
        path: of the store.
        columns: name -> what it holds; see convert_read.
        shard_bytes: of a shard at most; None for the format's own measure, if it has one.
        overwrite: whether a store that is there may be replaced.

    All methods raise StoreError.
    """

    name: ClassVar[str]
    has_shards: ClassVar[bool] = False

    def __init__(
        self, path: Path, columns: Mapping[str, str], *, shard_bytes: int | None, overwrite: bool
    ) -> None:
        if shard_bytes is not None and not self.has_shards:
            raise StoreError(
                f"{path}: shard_bytes={shard_bytes} says nothing about {self.name}; leave it out"
            )
        self.path, self.columns, self._overwrite = path, columns, overwrite
        self._shard_bytes = SHARD_BYTES if shard_bytes is None else shard_bytes
        self._stack = contextlib.ExitStack()

    @classmethod
    @abstractmethod
    def unfit(cls, name: str, kind: str) -> str | None:
        """Why a column cannot be held; None where it can."""

    @abstractmethod
    def __enter__(self) -> Self: ...

    @abstractmethod
    def add(self, batch: Batch) -> None:
        """Add documents."""

    def __exit__(self, kind: type[BaseException] | None, *exc: Any) -> None:
        self._stack.__exit__(kind, *exc)

    @property
    @abstractmethod
    def files(self) -> Sequence[Path]:
        """All that was written."""


class IndexedSink(Sink):
    """A .bin/.idx pair or, where there are columns beside the tokens, a folder with dataset.json."""

    name = "megatron"

    @classmethod
    def unfit(cls, name: str, kind: str) -> str | None:
        """See Sink."""
        dtype = list_dtype(kind)
        if dtype is None:
            return "it holds a number for each token, and nothing else"
        if dtype not in DTYPES.values():
            return f"{dtype.name} has no code in .idx{'; name another by --dtype' if name == TOKENS else ''}"
        return None

    def __enter__(self) -> Self:
        dtypes = {name: cast(Any, list_dtype(kind)) for name, kind in self.columns.items()}
        self._alone, self._num_documents = len(dtypes) == 1, 0
        if self._alone:
            self._one = self._stack.enter_context(
                IndexedWriter(self.path, dtypes[TOKENS], overwrite=self._overwrite)
            )
        else:
            with typed_errors(self.path):
                there = [path.name for path in self.path.iterdir()] if self.path.is_dir() else []
                if NAME not in there and not all(name.endswith(".tmp") for name in there):  # of a killed run
                    raise StoreError(f"{self.path}: holds something that is no dataset; take another path")
            self._several = self._stack.enter_context(
                DatasetWriter(self.path, dtypes, overwrite=self._overwrite)
            )
        return self

    def add(self, batch: Batch) -> None:
        """See Sink."""
        columns = {name: cast(Lists, batch[name]) for name in self.columns}
        tokens = columns[TOKENS]
        if self._alone:
            self._one.add_documents(tokens.values, tokens.lengths)
            return
        for name, column in columns.items():
            apart = np.flatnonzero(column.lengths != tokens.lengths)
            if apart.size:
                document = self._num_documents + int(apart[0])
                raise StoreError(
                    f"{self.path}: document {document}: {name} and tokens differ in length; leave it behind "
                    f"by --drop {name}"
                )
        self._several.add_documents(tokens.lengths, **{name: each.values for name, each in columns.items()})
        self._num_documents += len(tokens)

    @property
    def files(self) -> Sequence[Path]:
        """See Sink."""
        if not self._alone:
            return list(self.path.iterdir())
        return [Path(f"{self.path}{suffix}") for suffix in (".bin", ".idx", ".sums")]


class MdsSink(Sink):
    """An MDS folder."""

    name = "mds"
    has_shards = True

    @classmethod
    def unfit(cls, name: str, kind: str) -> str | None:
        """See Sink."""
        return _unwritten(kind)

    def __enter__(self) -> Self:
        self._writer = self._stack.enter_context(
            MDSWriter(self.path, self.columns, shard_bytes=self._shard_bytes, overwrite=self._overwrite)
        )
        return self

    def add(self, batch: Batch) -> None:
        """See Sink."""
        for row in zip(*(batch[name] for name in self.columns)):
            self._writer.add_sample(dict(zip(self.columns, row)))

    @property
    def files(self) -> Sequence[Path]:
        """See Sink."""
        return list(self.path.iterdir())


class ParquetSink(Sink):
    """One Parquet file; a batch is a row group."""

    name = "parquet"

    @classmethod
    def unfit(cls, name: str, kind: str) -> str | None:
        """See Sink."""
        dtype = list_dtype(kind)
        if name == TOKENS and dtype is not None and dtype.kind == "f":
            return "tokens in Parquet are whole numbers"
        return _unwritten(kind)

    def __enter__(self) -> Self:
        try:
            self._arrow = importlib.import_module("pyarrow")
            parquet = importlib.import_module("pyarrow.parquet")
        except ImportError as missing:
            raise StoreError(f"{self.path}: Parquet needs pyarrow: {install('tables')}") from missing
        self._refuse_existing()
        self._part = self.path.with_name(f"{self.path.name}.{secrets.token_hex(4)}.tmp")
        self._schema = self._arrow.schema(
            {name: self._type(kind) for name, kind in self.columns.items()}.items()
        )
        with typed_errors(self.path), contextlib.ExitStack() as stack:
            stack.callback(self._part.unlink, missing_ok=True)
            self._stream = stack.enter_context(self._part.open("xb"))
            self._writer = parquet.ParquetWriter(
                self._stream, self._schema, compression="zstd", use_dictionary=False
            )
            self._stack = stack.pop_all()
        self._num_rows = 0
        return self

    def add(self, batch: Batch) -> None:
        """See Sink."""
        with typed_errors(self.path):
            columns = [self._array(name, batch[name]) for name in self.columns]
            self._writer.write_table(self._arrow.table(columns, schema=self._schema))
        self._num_rows += len(batch[TOKENS])

    def _array(self, name: str, values: Lists | Sequence[Any]) -> Any:
        arrow, kind = self._arrow, self._schema.field(name).type
        if not isinstance(values, Lists):
            return arrow.array(values, kind)
        if name == TOKENS and values.values.dtype.kind == "i" and values.values.min(initial=0) < 0:
            bad = int((values.values < 0).argmax())
            row = self._num_rows + int(values.lengths.cumsum().searchsorted(bad, side="right"))
            raise StoreError(
                f"{self.path}: document {row} has the token {values.values[bad]}; tokens in Parquet are "
                f"whole numbers from 0"
            )
        offsets = np.concatenate(([0], values.lengths.cumsum())).astype(np.int32)
        return arrow.ListArray.from_arrays(arrow.array(offsets), arrow.array(values.values), type=kind)

    def _type(self, kind: str) -> Any:
        dtype = list_dtype(kind)
        if dtype is not None:
            return self._arrow.list_(self._arrow.from_numpy_dtype(dtype))
        if kind in ("str", "bytes"):
            return self._arrow.string() if kind == "str" else self._arrow.binary()
        return self._arrow.from_numpy_dtype(np.dtype("int64" if kind == "int" else kind))

    def __exit__(self, kind: type[BaseException] | None, *exc: Any) -> None:
        with typed_errors(self.path), self._stack:
            with contextlib.nullcontext() if kind is None else contextlib.suppress(OSError, ValueError):
                self._writer.close()
            if kind is None:
                self._stream.flush()
                os.fsync(self._stream.fileno())
                self._refuse_existing()
                self._part.replace(self.path)
                sync_directory(self.path.parent)

    def _refuse_existing(self) -> None:
        with typed_errors(self.path):
            if self.path.is_dir() or (self.path.exists() and not self._overwrite):
                raise StoreError(
                    f"{self.path}: exists already; take another path or pass overwrite=True (--overwrite)"
                )
            if self.path.exists():
                with self.path.open("rb") as there:
                    if there.read(len(_MAGIC)) != _MAGIC:
                        raise StoreError(
                            f"{self.path}: is no Parquet, and is not replaced; take another path"
                        )

    @property
    def files(self) -> Sequence[Path]:
        """See Sink."""
        return [self.path]


def _unwritten(kind: str) -> str | None:
    is_written = kind in _PLAIN or list_dtype(kind) is not None
    return None if is_written else "only numbers, lists of them, text and bytes are written"


SINKS: Mapping[str, type[Sink]] = {kind.name: kind for kind in (IndexedSink, MdsSink, ParquetSink)}
