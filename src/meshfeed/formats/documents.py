"""Files that do not record document lengths, as a token store. JSON lines, Parquet and Arrow build on it."""

from __future__ import annotations

import contextlib
import hashlib
import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from meshfeed.columns import Array
from meshfeed.errors import ChangedError, OptionError
from meshfeed.files import ByteFile, Cache, FileStats, Folder
from meshfeed.files.cached import CachedFile
from meshfeed.files.url import is_hub
from meshfeed.formats.foreign_columns import ForeignColumns
from meshfeed.formats.prepared import documents_in, is_report
from meshfeed.formats.tokens import TokenColumn
from meshfeed.store.base import I64, LengthsIndex, Pieces
from meshfeed.store.format import Place, StoreFormat
from meshfeed.store.loss_columns import LOSS_COLUMNS
from meshfeed.store.node_arrays import built_in_parts, joined, key_of_parts
from meshfeed.store.open import stores_inside

VERSION = 1
"""Part of the fingerprint."""
_INDEX_VERSION = 3
"""Part of the index's key: after a change here, an old index is never used."""

SUFFIXES = (".jsonl", ".parquet", ".arrow")
_OF_SPLIT = re.compile(r"(.+)-\d{5}-of-\d{5}(?:-[0-9a-f]+)?\.\w+")
_BLOCK_BYTES = 1 << 12
_NUM_BLOCKS = 16


@dataclass(frozen=True, slots=True)
class FileSpan:
    """A part of a file that is indexed as one. The unit of begin and end depends on the format."""

    file: int
    begin: int
    end: int


class DocumentFiles(ForeignColumns):
    """Records in files, each a document, as one stream of tokens.

    The constructor only stores its arguments. To count documents or tokens, one process per node reads the
    files once and keeps the result in the cache. Use everything else inside `with store:`. Threads may share
    an entered store. A pickled or copied store is not entered.

    Args:
        path: its name in messages.
        files: of the records, in order.
        column: the column of tokens, and how it holds them.
        cache: where the lengths index is kept.

    All methods raise StoreError, naming file and record.
    """

    format = "documents"

    def __init__(self, path: str, files: Sequence[ByteFile], column: TokenColumn, cache: Cache) -> None:
        super().__init__()
        self.path, self._files, self._column, self._cache = path, tuple(files), column, cache

    # -- what a format defines --------------------------------------------------------------------------

    @abstractmethod
    def _spans(self) -> list[FileSpan]:
        """The parts to index, each in some seconds; a function of the files alone."""

    @abstractmethod
    def _scan(self, span: FileSpan) -> Mapping[str, Array]:
        """Of the documents of a part: `lengths` int64 [n], `most` int64 [1] (largest token), `beside` bool
        [len(LOSS_COLUMNS)], whether each of LOSS_COLUMNS exists, and arrays of the format itself."""

    @abstractmethod
    def _joined(
        self, spans: Sequence[FileSpan], arrays: Sequence[Mapping[str, Array]]
    ) -> Mapping[str, Array]:
        """Arrays of the format itself, of all parts."""

    @abstractmethod
    def _tokens(self, documents: I64) -> list[Array]:
        """All tokens of each document; a document may be given several times."""

    @abstractmethod
    def _announce(self, pieces: Pieces) -> None:
        """Announce to the files the bytes that `_tokens` will read."""

    @property
    @abstractmethod
    def shard_ends(self) -> I64:
        """Where shards end, in documents; int64 [num_shards], the last one num_documents."""

    # -- attributes -------------------------------------------------------------------------------------

    @property
    def stats(self) -> FileStats:
        """The cost of reading so far, including the index."""
        return sum((file.stats for file in self._files), FileStats())

    @property
    def wants_ahead(self) -> bool:
        """Whether a file is remote, so that ranges should be announced many steps ahead."""
        return any(file.is_remote for file in self._files)

    @property
    def fingerprint(self) -> str:
        """Hex digest of what decides the tokens: sizes and sampled blocks of the files, and the column.

        It covers the LOSS_COLUMNS in use, so the files are indexed to find them.

        On the Hub, its hashes replace the blocks; elsewhere, the digest does not depend on the path. It
        distinguishes corpora, but may miss a single changed token.
        """
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        return self._as_used(self._content)

    @cached_property
    def _content(self) -> str:
        return sampled_digest(f"{self.format} {VERSION} {self._column.digest}", self._files)

    @cached_property
    def _index(self) -> dict[str, Array]:
        key = key_of_parts(kind=self.format, version=_INDEX_VERSION, content=self._content)
        return built_in_parts(self._cache.kept(), key, self._spans, self._scanned, self._whole)

    def _scanned(self, span: FileSpan) -> Mapping[str, Array]:
        with self._files[span.file]:
            return self._scan(span)

    def _whole(self, spans: Sequence[FileSpan], arrays: Sequence[Mapping[str, Array]]) -> Mapping[str, Array]:
        own = dict(self._joined(spans, arrays))
        counts = np.zeros(len(self._files), np.int64)
        np.add.at(counts, [span.file for span in spans], [part["lengths"].size for part in arrays])
        starts = np.concatenate(([0], joined(arrays, "lengths").cumsum()))
        most = joined(arrays, "most").max(initial=0, keepdims=True)
        flags = joined(arrays, "beside", np.bool_).reshape(-1, len(LOSS_COLUMNS))
        beside: Array = np.logical_or.reduce(flags, axis=0)
        return own | {"starts": starts, "file_ends": counts.cumsum(), "most": most, "beside": beside}

    @property
    def kept_in(self) -> Cache:
        return self._cache

    def _columns_of_loss(self) -> Mapping[str, DocumentFiles]:
        if self._column.of_loss:
            return {}
        there = zip(LOSS_COLUMNS, self._index["beside"].tolist())
        return {name: self._column_beside(name) for name, has in there if has and name != self._column.name}

    def _column_beside(self, name: str) -> DocumentFiles:
        column = TokenColumn(name, of_loss=True)
        store = type(self)(self.path, self._files, column, self._cache)
        store._loss_columns = {}
        return store

    @property
    def documents(self) -> LengthsIndex:
        """Where documents begin, from the index."""
        return LengthsIndex(self._index["starts"])

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest of uint16, int32 and int64 that holds all tokens."""
        return self._column.dtype(int(self._index["most"][0]))

    @property
    def largest_token(self) -> int | None:
        return int(self._index["most"][0])

    def check(self) -> Self:
        """Check that the files exist."""
        for file in self._files:
            _ = file.size_bytes
        return self

    def verify(self) -> Iterator[float]:
        """Read every token, from the files as they are now, yielding the fraction done, in (0, 1]."""
        if not self.wants_ahead:
            yield from self._verified()
            return
        with self._cache.anew() as cache:
            files = [each.within(cache) if isinstance(each, CachedFile) else each for each in self._files]
            yield from type(self)(self.path, files, self._column, cache)._verified()

    def _verified(self) -> Iterator[float]:
        count, step = self.num_documents, 256
        with self:
            for first in range(0, count, step):
                documents = np.arange(first, min(first + step, count))
                self._checked(documents)
                yield min(first + step, count) / count

    def facts(self) -> dict[str, Any]:
        return {
            "format": f"{self.format}, {len(self._files)} file{'s' * (len(self._files) != 1)}",
            "column": " or ".join(self._column.names),
            "num_shards": self.shard_ends.size,
            "size_bytes": sum(file.size_bytes for file in self._files),
        }

    # -- entering and leaving ---------------------------------------------------------------------------

    def acquire(self, stack: contextlib.ExitStack) -> None:
        """Open the files."""
        for file in self._files:
            stack.enter_context(file)
        super().acquire(stack)

    def __getstate__(self) -> dict[str, Any]:
        known = ("path", "_files", "_column", "_cache", "_content", "_fingerprint")
        known += ("labels_are", "_used", "_ignored", "_loss_columns")
        return {name: self.__dict__[name] for name in known if name in self.__dict__}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["path"], state["_files"], state["_column"], state["_cache"])
        vars(self).update(state)

    # -- documents, and the stream ----------------------------------------------------------------------

    def read_into(self, out: npt.NDArray[Any], starts: I64, stops: I64) -> None:
        pieces, at = self.documents.pieces(starts, stops), 0
        tokens = self._checked(pieces.documents)
        for some, begin, end in zip(tokens, pieces.begin.tolist(), pieces.end.tolist()):
            out[at : at + end - begin] = some[begin:end]
            at += end - begin

    def will_need(self, starts: I64, stops: I64) -> None:
        """Announce the bytes of documents in ranges that will be read; returns at once."""
        self._announce(self.documents.pieces(*self._ranges(starts, stops)))

    def forget_needs(self) -> None:
        for file in self._files:
            file.forget_needs()

    # -- below ------------------------------------------------------------------------------------------

    def _checked(self, documents: I64) -> list[Array]:
        """All tokens of each document: as many as the index says."""
        tokens = self._tokens(documents)
        most = int(self._index["most"][0])
        for document, found, expected in zip(documents.tolist(), tokens, self.lengths(documents).tolist()):
            if found.size != expected or (found.max(initial=0) > most and not self._column.of_loss):
                raise ChangedError(
                    f"{self.path}: document {document} has {found.size} tokens up to "
                    f"{found.max(initial=0)}; when it was indexed it had {expected}, none above {most}; the "
                    f"file was changed: put the old one back, or remove {self._cache.kept_path} to "
                    f"index it anew"
                )
        return tokens


def sampled_digest(head: str, files: Sequence[ByteFile]) -> str:
    """Hex digest of a text, and of the sizes and sampled blocks of files.

    On the Hub, uses its hashes of all bytes, which takes no requests; a copy elsewhere has another digest.
    Elsewhere, the digest does not depend on the path.
    """
    digest = hashlib.blake2b(head.encode(), digest_size=16)
    for file in files:
        if file.content_id is not None:
            digest.update(f"{file.size_bytes} {file.content_id};".encode())
            continue
        last = max(file.size_bytes - _BLOCK_BYTES, 0)
        places = sorted({last * i // (_NUM_BLOCKS - 1) for i in range(_NUM_BLOCKS)})
        digest.update(file.size_bytes.to_bytes(8, "little"))
        digest.update(b"".join(file.peek([(at, at + _BLOCK_BYTES) for at in places])))
    return digest.hexdigest()


def read_bytes(file: ByteFile, begin: int, end: int) -> bytes:
    """Bytes begin..end of an entered file."""
    out = np.empty(end - begin, np.uint8)
    file.read_into(out, np.array([begin]), np.array([out.size]))
    return out.tobytes()


class DocumentFilesFormat(StoreFormat):
    """A file of documents, or a folder of them. Subclasses give the suffix."""

    options = ("column",)
    suffix: ClassVar[str]
    store: ClassVar[type[DocumentFiles]]

    def open(self, place: Place) -> DocumentFiles | None:
        """The store, if it is such a file, or a folder with one, and not of text.

        Raises StoreError for a folder of several kinds.
        """
        is_text = place.tokenizer is not None or place.eod is not None
        found = None if is_text else self.files(place)
        if found is None:
            return None
        folder, names = found
        files = [folder.file(name) for name in names]
        return self.store(place.shown, files, TokenColumn(place.column), place.cache).check()

    def files(self, place: Place) -> tuple[Folder, list[str]] | None:
        """The files of the store, by their names in a folder; None if there are none."""
        return files_of(place, (self.suffix,))


def files_of(place: Place, suffixes: tuple[str, ...]) -> tuple[Folder, list[str]] | None:
    """The files of documents that a path means, by their names in a folder; None unless some have a suffix.

    Raises OptionError for several kinds of SUFFIXES, several splits of the Hub in one folder, and a list of
    what `meshfeed prepare` left out.
    """
    if place.name.endswith(suffixes) and place.is_file:
        if is_report(place.beside, place.name):
            raise OptionError(
                f"{place.shown}: lists what `meshfeed prepare` left out, and holds no documents; give "
                f"the path of a store{stores_inside(place.beside)}"
            )
        return place.beside, [place.name]
    if "*" in place.name:
        folder, names = place.beside, [name for name in place.matches if not is_report(place.beside, name)]
    else:
        folder, names = place.within, documents_in(place.within, place.names)
    names = [name for name in names if name.endswith(SUFFIXES + suffixes)]
    others = sorted({Path(name).suffix for name in names if not name.endswith(suffixes)})
    if not any(name.endswith(suffixes) for name in names):
        return None
    if others:
        raise OptionError(
            f"{place.shown}: both {suffixes[0]} and {' and '.join(others)} files; keep each kind in a folder "
            f"of its own"
        )
    splits = sorted({found[1] for name in names if (found := _OF_SPLIT.fullmatch(name))})
    if is_hub(place.given) and "*" not in place.name and len(splits) > 1:
        paths = ", ".join(f"{place.shown.rstrip('/')}/{split}-*{Path(names[0]).suffix}" for split in splits)
        raise OptionError(f"{place.shown}: several splits in one folder; give one: {paths}")
    return folder, names
