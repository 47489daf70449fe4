"""Files of token lists as a token store. JSON lines, Parquet and Arrow build on it.

The first process of a node to ask reads the files once, part by part, and keeps the tokens in the node's
cache; all processes map them. Nothing is decoded after that: a read costs what it costs for a .bin.
"""

from __future__ import annotations

import hashlib
import os
import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from meshfeed.arrays import Array, Bools, Longs
from meshfeed.errors import ChangedError, OptionError
from meshfeed.files import ByteFile, Cache, FileStats, Folder
from meshfeed.files.url import is_hub, local_path
from meshfeed.formats.foreign_columns import ForeignStore
from meshfeed.formats.prepared import documents_in, is_report
from meshfeed.formats.tokens import TokenColumn
from meshfeed.store.base import LengthsIndex
from meshfeed.store.format import Place, StoreFormat
from meshfeed.store.loss_columns import LOSS_COLUMNS
from meshfeed.store.node_arrays import Arrays, built_in_parts, joined, key_of_parts
from meshfeed.store.open import stores_inside

VERSION = 1
"""Part of the fingerprint."""
_KEPT_VERSION = 3
"""Part of the key of what is kept: after a change here, nothing older is used."""

LINES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".json.gz", ".json.zst", ".ndjson", ".ndjson.gz", ".ndjson.zst")
"""Suffixes of JSON lines of text."""
_KINDS = (*LINES, ".parquet", ".arrow")
"""Suffixes of documents. A folder has one kind of them, since others would be passed over in silence."""
_SHARD = re.compile(r"(.+[-.])(\d{5})-of-(\d{5})(?:-[0-9a-f]+)?\.[\w.]+")
# words of a name by which `datasets` tells splits
_OF_TRAIN = re.compile(r"(?:^|.*[-._ /\d])(?:train|training)[-._ /\d]", re.I)
_OF_TEST = re.compile(
    r"(?:^|.*[-._ /\d])(?:test|testing|valid|validation|val|dev|eval|evaluation)[-._ /\d]", re.I
)
_TEXT_OF_SPLIT = re.compile(r"(?:.*[./])?(?:train|test|valid|validation|val|dev)\.txt", re.I)
_PACKED = re.compile(r".*\.(jsonl?|ndjson|parquet|arrow)\.(gz|zst|bz2|xz|lz4|br|zip|z|7z)", re.I)
_BLOCK_BYTES = 1 << 12
_NUM_BLOCKS = 16


@dataclass(frozen=True, slots=True)
class FileSpan:
    """A part of a file that is read as one. The unit of begin and end depends on the format."""

    file: int
    begin: int
    end: int


class DocumentFiles(ForeignStore):
    """Records in files, each a document, as one stream of tokens.

    The first process of a node to count documents or read tokens reads all files, and keeps their tokens in
    the cache; where a local file was written since, all are read again.

    Args:
        path: its name in messages.
        files: of the records, in order.
        column: the column of tokens, and how it holds them.
        cache: where the tokens are kept.

    All methods raise StoreError, naming file and record.
    """

    format = "documents"
    not_pickled = ("_kept", "files_version")

    def __init__(self, path: str, files: Sequence[ByteFile], column: TokenColumn, cache: Cache) -> None:
        super().__init__()
        self.path, self._files, self._column = path, tuple(files), column
        self.kept_in = self._cache = cache
        self._read = FileStats()

    # -- what a format defines --------------------------------------------------------------------------

    @abstractmethod
    def _spans(self) -> list[FileSpan]:
        """The parts to read, each in some seconds; a function of the files alone."""

    @abstractmethod
    def _scan(self, span: FileSpan, beside: Bools) -> Iterator[tuple[Longs, Array]]:
        """Lengths and tokens of the documents of a part, some at a time: int64 [n], and [sum] back to back.

        beside: bool [len(LOSS_COLUMNS)], set for each of LOSS_COLUMNS that exists. The file is entered.
        """

    # -- attributes -------------------------------------------------------------------------------------

    @property
    def stats(self) -> FileStats:
        return sum((file.stats for file in self._files), self._read)

    @cached_property
    def digest(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Hex digest of what decides the tokens: sizes and sampled blocks of the files, and the column.

        On the Hub, its hashes replace the blocks; elsewhere, the digest does not depend on the path. It
        distinguishes corpora, but may miss a single changed token.
        """
        _ = self.files_version  # before they are read
        return sampled_digest(f"{self.format} {VERSION} {self._column.digest}", self._files)

    @cached_property
    def _kept(self) -> dict[str, Array]:
        """starts: see LengthsIndex. tokens: of all documents. most: [1], the largest. beside: see `_scan`."""
        of = {"content": self.digest, "files": self.files_version}
        key = key_of_parts(kind=self.format, version=_KEPT_VERSION, **of)

        def whole(_: Sequence[FileSpan], parts: Sequence[Mapping[str, Array]]) -> Arrays:
            if self._version_now() != self.files_version:
                raise ChangedError(
                    f"{self.path}: was written while it was read, or since; open it again once it is whole"
                )
            flags = joined(parts, "beside", np.bool_).reshape(-1, len(LOSS_COLUMNS))
            return {
                "starts": np.concatenate(([0], joined(parts, "lengths").cumsum())),
                "tokens": [np.zeros(0, self._column.dtype(0)), *(part["tokens"] for part in parts)],
                "most": joined(parts, "most").max(initial=0, keepdims=True),
                "beside": np.logical_or.reduce(flags, axis=0),
            }

        return built_in_parts(self._cache.kept(), key, self._spans, self._part, whole)

    def _part(self, span: FileSpan) -> Mapping[str, Array]:
        beside, most, lengths = np.zeros(len(LOSS_COLUMNS), np.bool_), 0, [np.zeros(0, np.int64)]
        tokens: list[Array] = [np.zeros(0, self._column.dtype(0))]
        with self._files[span.file]:
            for of_some, some in self._scan(span, beside):
                largest = int(some.max(initial=0))
                lengths.append(of_some)
                tokens.append(some.astype(self._column.dtype(largest)))
                most = max(most, largest)
        whole = {"lengths": np.concatenate(lengths), "tokens": np.concatenate(tokens)}
        return whole | {"most": np.array([most]), "beside": beside}

    @cached_property
    def files_version(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Of its files when it was first asked for: digest, tokens and columns are of these."""
        return self._version_now()

    def _version_now(self) -> str:
        return " ".join(file.version for file in self._files)

    def _columns_of_loss(self) -> Mapping[str, DocumentFiles]:
        found = {
            name: type(self)(self.path, self._files, TokenColumn(name, of_loss=True), self._cache)
            for name, is_there in zip(LOSS_COLUMNS, self._kept["beside"].tolist())
            if is_there and name != self._column.name
        }
        for column in found.values():
            column.files_version, column._read = self.files_version, self._read
        return found

    @property
    def documents(self) -> LengthsIndex:
        return LengthsIndex(self._kept["starts"])

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest of uint16, int32 and int64 that holds all tokens."""
        return self._kept["tokens"].dtype

    @property
    def largest_token(self) -> int | None:
        return int(self._kept["most"][0])

    def check(self) -> Self:
        for file in self._files:
            _ = file.size_bytes
        return self

    def verify(self) -> Iterator[float]:
        """Compare the files, as they are now, with what is kept, yielding the fraction done, in (0, 1]."""
        kept, first, begin = self._kept, 0, 0
        lengths, tokens = np.diff(kept["starts"]), kept["tokens"]
        with self._cache.anew() as cache:
            files = [each.within(cache) for each in self._files]
            now = type(self)(self.path, files, self._column, cache)
            spans = now._spans()
            for done, span in enumerate(spans, start=1):
                found = now._part(span)
                stop, end = first + found["lengths"].size, begin + found["tokens"].size
                same = np.array_equal(found["lengths"], lengths[first:stop])
                if not same or not np.array_equal(found["tokens"], tokens[begin:end]):
                    raise ChangedError(
                        f"{files[span.file].url}: has other tokens than when this node read it; put the old "
                        f"file back, or remove {self._cache.kept_path} to read it anew"
                    )
                first, begin = stop, end
                yield done / len(spans)

    def facts(self) -> dict[str, Any]:
        return {
            "format": f"{self.format}, {len(self._files)} file{'s' * (len(self._files) != 1)}",
            "column": " or ".join(self._column.names),
            "size_bytes": sum(file.size_bytes for file in self._files),
        }

    def read_into(self, out: Array, starts: Longs, stops: Longs) -> None:
        tokens = self._kept["tokens"]
        pieces = (tokens[start:stop] for start, stop in zip(starts.tolist(), stops.tolist()))
        np.concatenate([tokens[:0], *pieces], out=out)
        self._read.reads += starts.size
        self._read.bytes_read += out.nbytes


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

    Raises OptionError for several kinds of documents, several splits of the Hub in one folder, and a list of
    what `meshfeed prepare` left out.
    """
    if place.name.lower().endswith(suffixes) and place.is_file:
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
    unread = [name for name in names if _PACKED.fullmatch(name) and not name.lower().endswith(_KINDS)]
    names = [name for name in names if name.lower().endswith(_KINDS)]
    kinds = [kind for kind in _KINDS if any(name.lower().endswith(kind) for name in names)]
    if not {*suffixes}.intersection(kinds):
        return None
    if others := [kind for kind in kinds if kind not in suffixes]:
        raise OptionError(
            f"{place.shown}: both {suffixes[0]} and {' and '.join(others)} files; keep each kind in a folder "
            f"of its own"
        )
    if unread:
        raise OptionError(
            f"{place.shown}: {unread[0]} is compressed as none is read here; decompress it, or move it away"
        )
    root = Path(os.path.realpath(local_path(folder.url)))
    there = () if folder.is_remote else {str(root / name) for name in names}
    for name in there and names:
        if (root / name).is_symlink() and os.path.realpath(root / name) in there:
            raise OptionError(f"{place.shown}: {name} is a link to another of its files; move it away")
    splits = sorted({found[1] for name in names if (found := _SHARD.fullmatch(name))})
    if is_hub(place.given) and "*" not in place.name and len(splits) > 1:
        paths = ", ".join(f"{place.shown.rstrip('/')}/{split}*{Path(names[0]).suffix}" for split in splits)
        raise OptionError(f"{place.shown}: several splits in one folder; give one: {paths}")
    if "*" not in place.name:
        refuse_others(place.shown, [*names, *place.linked], "a pattern of files of one folder")
    return folder, names


def refuse_others(shown: str, names: Sequence[str], or_else: str) -> None:
    """Raises OptionError for a folder with links to folders, NAME/, train and test files, or lost shards."""
    if linked := [name for name in names if name.endswith("/")]:
        raise OptionError(
            f"{shown}: links to folders, as {linked[0]}, are not followed; move them away, and give each "
            f"folder, or {or_else}"
        )
    shards = sorted({found.groups() for name in names if (found := _SHARD.fullmatch(name))})
    names = [name for name in names if name.lower().endswith(_KINDS) or _TEXT_OF_SPLIT.fullmatch(name)]
    trains = [name for name in names if _OF_TRAIN.match(name)]
    tests = [name for name in names if _OF_TEST.match(name) and name not in trains]
    if trains and tests:
        raise OptionError(
            f"{shown}: {trains[0]} and {tests[0]}: give the folder of one split, or {or_else}; to train on "
            f"several, give each as a source of a mf.Mixture"
        )
    spread = [(first.rpartition("/")[2], of, num) for first, of, num in shards]  # over folders, too
    over_all = [Counter((name, num) for name, _, num in each) for each in (spread, {*spread})]
    for (first, num), has in Counter((first, num) for first, _, num in shards).items():
        name = first.rpartition("/")[2]
        if has < int(num) and any(each[name, num] != int(num) for each in over_all):
            raise OptionError(
                f"{shown}: {has} of the {int(num)} shards {first}*-of-{num} are there; give "
                f"a folder with all of them, or {or_else}"
            )
