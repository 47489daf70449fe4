"""Write a folder with dataset.json: several .bin/.idx pairs of the same documents."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy.typing as npt

from meshfeed.arrays import Array, Longs
from meshfeed.errors import OptionError, StoreError
from meshfeed.files import typed_errors
from meshfeed.files.local.durable import durable_file
from meshfeed.store.dataset import FORMAT, NAME, VERSION
from meshfeed.store.indexed_writer import IndexedWriter
from meshfeed.whole import of_kind, path_text


class DatasetWriter:
    """Writes a folder of columns. Its dataset.json appears last, complete, at a clean end of `with`.

        with DatasetWriter("chats", {"tokens": "u2", "loss_mask": "u1"}) as writer:
            writer.add_document(tokens=[5, 7, 9], loss_mask=[0, 1, 1])

    Args:
        folder: created if missing; its parent must exist.
        columns: name -> dtype, as `IndexedWriter` takes it; "tokens" is one. Names are file names, too.
        overwrite: whether an existing dataset may be replaced.

    All methods raise StoreError.
    """

    version = VERSION

    def __init__(
        self, folder: str | os.PathLike[str], columns: Mapping[str, npt.DTypeLike], *, overwrite: bool = False
    ) -> None:
        self.folder = Path(path_text(OptionError, folder=folder))
        of_kind(OptionError, Mapping, columns=columns)
        self._overwrite = overwrite
        if "tokens" not in columns or not all(str(name).isidentifier() for name in columns):
            raise StoreError(
                f"{self.folder}: columns {list(columns)}; one is 'tokens', and all are names as in Python"
            )
        self._writers = {name: self._writer(name, dtype) for name, dtype in columns.items()}
        self._further = dict[str, IndexedWriter]()  # of the same documents
        self._stack: contextlib.ExitStack | None = None

    def __enter__(self) -> Self:
        with typed_errors(self.folder):
            self.folder.mkdir(exist_ok=True)
            if (self.folder / NAME).exists() and not self._overwrite:
                raise StoreError(
                    f"{self.folder / NAME}: exists already; take another path or pass overwrite=True "
                    f"(--overwrite)"
                )
        with contextlib.ExitStack() as stack:
            for writer in (*self._writers.values(), *self._further.values()):
                stack.enter_context(writer)
            self._stack = stack.pop_all()
        return self

    def add_document(self, **columns: npt.ArrayLike) -> None:
        """Add a document: one value per token in each column, [n] each, that its dtype can hold."""
        document = self._refuse_others(columns)
        for name, writer in self._writers.items():
            writer.add_document(columns[name])
        self._refuse_apart(document)

    def add_documents(self, lengths: Longs, **columns: Array) -> None:
        """Add documents: their lengths, int64 [n], and each column's values back to back, [sum]."""
        document = self._refuse_others(columns)
        for name, writer in self._writers.items():
            writer.add_documents(columns[name], lengths)
        self._refuse_apart(document)

    def _refuse_others(self, columns: Mapping[str, object]) -> int:
        """The number of the next document. Raises StoreError unless it has the dataset's columns."""
        document = self._writers["tokens"].num_documents
        if columns.keys() != self._writers.keys():
            raise StoreError(
                f"{self.folder}: document {document} has columns {sorted(columns)}, where "
                f"{sorted(self._writers)} belong"
            )
        return document

    def __exit__(self, kind: type[BaseException] | None, *exc: Any) -> None:
        stack, self._stack = self._stack, None
        if stack is None:
            raise StoreError(f"{self.folder}: not writing; use it inside `with`")
        if kind is not None:
            stack.__exit__(kind, *exc)  # the writers remove their files
            return
        with stack:
            self._refuse_apart(self._writers["tokens"].num_documents - 1)
            self._refuse_further_apart()
            with typed_errors(self.folder):  # so that no dataset.json names files of another dataset
                (self.folder / NAME).unlink(missing_ok=True)
        self._publish()

    def _refuse_apart(self, document: int) -> None:
        tokens = self._writers["tokens"]
        for name, writer in self._writers.items():
            if (writer.num_documents, writer.num_tokens) != (tokens.num_documents, tokens.num_tokens):
                raise StoreError(
                    f"{self.folder}: document {document}: {name} and tokens differ in length; give one value "
                    f"of {name} for each token, and write the dataset again"
                )

    def _refuse_further_apart(self) -> None:
        expected = self._writers["tokens"].num_documents
        for name, writer in self._further.items():
            if writer.num_documents != expected:
                raise StoreError(
                    f"{self.folder}: {expected} documents, and {name} of {writer.num_documents}; add the "
                    f"{name} of each document, of one without any too"
                )

    def _writer(self, name: str, dtype: npt.DTypeLike) -> IndexedWriter:
        return IndexedWriter(self.folder / name, dtype, overwrite=self._overwrite)

    def _content(self) -> dict[str, Any]:
        return {"format": FORMAT, "version": self.version, "columns": {name: name for name in self._writers}}

    def _publish(self) -> None:
        with durable_file(self.folder / NAME) as stream:
            stream.write(json.dumps(self._content(), indent=2).encode())
