"""The common part of stores whose documents are in many files."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from meshfeed.arrays import Array, Longs
from meshfeed.errors import ChangedError, OptionError
from meshfeed.files import ByteFile, FileStats
from meshfeed.files.url import without_secrets
from meshfeed.formats.foreign_columns import ForeignStore, cure
from meshfeed.formats.items import ItemsFile
from meshfeed.formats.shard_files import ShardFiles
from meshfeed.formats.shards import ShardedDataset, at_once
from meshfeed.formats.tokens import TOKEN_COLUMNS
from meshfeed.remote.cached import CachedFile
from meshfeed.store.base import LengthsIndex, Multiples, Pieces, grouped
from meshfeed.store.loss_columns import LOSS_COLUMNS
from meshfeed.store.node_arrays import built_in_parts, joined, key_of_parts

_SHARDS_OF_PART = 64


class ShardedStore(ForeignStore):
    """A StreamStore over the shards of a folder: documents follow each other in the order of the index.

    The lengths of documents and their positions in the shards come from the index. If it does not have them,
    they are read from the head of every shard, several at a time, once per node, and kept next to the cache.
    A local folder of few shards is read again in every process: that takes milliseconds and leaves no files.
    After that, reading or announcing a range touches only its own bytes.
    """

    not_pickled = ("_files", "_looked", "_known_table")

    def __init__(self, dataset: ShardedDataset) -> None:
        super().__init__()
        self.dataset, self.path, self._folder = dataset, dataset.path, dataset.folder
        self.kept_in, self.wants_ahead = self._folder.cache, self._folder.is_remote
        self._forget()

    def _forget(self) -> None:
        self._files = ShardFiles(self.path, self._same_file, is_remote=self._folder.is_remote)
        self._looked = FileStats()
        self._known_table: Mapping[str, Array] | None = None

    def verify(self) -> Iterator[float]:
        """Check hashes, offsets and sizes, as the files are now, yielding the fraction done, in (0, 1]."""
        with self._folder.cache.anew() as cache:
            dataset = self.dataset.within(replace(self._folder, cache=cache))
            for number in range(len(dataset.shards)):
                dataset.verify(number)
                yield (number + 1) / len(dataset.shards)

    @property
    def is_summed(self) -> bool:
        return all(self.dataset.hashes())

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.dataset.items.dtype

    @property
    def encodings(self) -> Mapping[str, str]:
        return {field.name: field.encoding for field in self.dataset.fields}

    def facts(self) -> dict[str, Any]:
        columns = ", ".join(f"{name}: {encoding}" for name, encoding in self.encodings.items())
        return {"format": self.dataset.format, "num_shards": self.shard_ends.size, "columns": columns}

    @property
    def shard_ends(self) -> Longs:
        return self.dataset.shard_ends

    @property
    def num_documents(self) -> int:
        return int(self.shard_ends[-1]) if self.shard_ends.size else 0

    @property
    def stats(self) -> FileStats:
        of_columns = (store.stats for store in (self._columns or {}).values())
        return sum(of_columns, self._looked + self._files.stats)

    @property
    def digest(self) -> str:
        return self.dataset.digest

    def _columns_of_loss(self) -> Mapping[str, ShardedStore]:
        """Of nested items, those of the tokens' own object, else of the nearest around it.

        Raises OptionError for one elsewhere, unless it is beside other tokens.
        """
        own, paths = self.dataset, [field.name for field in self.dataset.fields]
        found, tokens = dict[str, str](), paths[own.items.at]
        for path in sorted(paths, key=lambda path: path.count(".")):
            around, dot, name = path.rpartition(".")
            if path == tokens or name not in LOSS_COLUMNS or name in self._ignored:
                continue
            if tokens.startswith(around + dot):
                found[name] = path
            elif not any(around + dot + each in paths for each in TOKEN_COLUMNS):
                raise OptionError(
                    f"{self.path}: column {path!r} is in another object than the tokens, {tokens!r}; "
                    f"write it beside them, or {cure(name)}"
                )
        return {name: ShardedStore(type(own)(own.folder, column=path)) for name, path in found.items()}

    def acquire(self, stack: contextlib.ExitStack) -> None:
        """Allow reads; the first read of a shard opens it."""
        self._files.open()
        stack.callback(self._files.close)
        super().acquire(stack)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()

    def read_into(self, out: Array, starts: Longs, stops: Longs) -> None:
        shards, begins, sizes = self._bytes_of(self.documents.pieces(starts, stops))
        places, raw = sizes.cumsum() - sizes, out.view(np.uint8)
        for number, mine in grouped(shards):
            self._files.read_into(number, raw, begins[mine], sizes[mine], places[mine])

    def will_need(self, starts: Longs, stops: Longs) -> None:
        """Announce ranges of the stream that will be read, each once; waits for lengths at most."""
        shards, begins, sizes = self._bytes_of(self.documents.pieces(*self._ranges(starts, stops)))
        for number, mine in grouped(shards):
            self._files.will_need(number, begins[mine], begins[mine] + sizes[mine])

    def forget_needs(self) -> None:
        self._files.forget_needs()

    def _bytes_of(self, pieces: Pieces) -> tuple[Longs, Longs, Longs]:
        """(shard, first byte in it, bytes) of each piece; int64 [k] each."""
        shards = self.shard_ends.searchsorted(pieces.documents, side="right")
        even, itemsize = self.dataset.even, self.dtype.itemsize
        if even is None:
            begins = self._table["begins"][pieces.documents]
        else:
            begins = even.first[shards] + (pieces.documents - self.dataset.firsts[shards]) * even.stride_bytes
        return shards, begins + pieces.begin * itemsize, pieces.lengths * itemsize

    @property
    def documents(self) -> LengthsIndex:
        fixed = self.dataset.items.num_tokens
        return LengthsIndex(self._table["starts"] if fixed is None else Multiples(fixed, len(self) + 1))

    @property
    def _table(self) -> Mapping[str, Array]:
        """starts: see LengthsIndex. begins: byte of its shard where each document's tokens begin.

        versions: of each shard, when it was looked into; see `_tag`.
        """
        # not a cached_property: Python 3.11 would hold its lock while we wait for storage
        if self._known_table is None:
            self._known_table = self._looked_up()
        return self._known_table

    def _looked_up(self) -> Mapping[str, Array]:
        numbers = range(len(self.dataset.shards))
        parts = [numbers[at : at + _SHARDS_OF_PART] for at in range(0, len(numbers), _SHARDS_OF_PART)]
        if len(parts) <= 1 and not self._folder.is_remote:
            return _whole(parts, [self._part(part) for part in parts])
        return built_in_parts(self._folder.cache.kept(), self._key, lambda: parts, self._part, _whole)

    @property
    def _key(self) -> str:
        """Of what is kept: by the address of remote shards, since each one's version would take a request."""
        files = without_secrets(self._folder.url) if self._folder.is_remote else self.files_version
        return key_of_parts(kind=self.dataset.kind, version=5, content=self.dataset.digest, files=files)

    @property
    def files_version(self) -> str:
        """Of remote shards, when they were looked into: `_same_file` refuses others."""
        if self._folder.is_remote:
            return hashlib.blake2b(self._table["versions"].tobytes(), digest_size=16).hexdigest()
        return " ".join(map(self._local_version, range(len(self.dataset.shards))))

    def _local_version(self, number: int) -> str:
        """Of a local shard as it is stored: in the node's cache, copies of a compressed one differ."""
        return self._folder.file(self.dataset.shards[number].name).version

    def _tag(self, number: int, file: ByteFile) -> int:
        """Of the version of a shard, 63 bits."""
        version = file.version if self._folder.is_remote else self._local_version(number)
        return int.from_bytes(hashlib.blake2b(version.encode(), digest_size=8).digest()) >> 1

    def _same_file(self, number: int) -> ByteFile:
        """The file of a shard. Raises ChangedError for one that is not what was looked into."""
        file = self.dataset.checked_file(number)
        if self._known_table is None or self._tag(number, file) == self._known_table["versions"][number]:
            return file
        if self._folder.is_remote:
            shutil.rmtree(self._folder.cache.kept() / self._key, ignore_errors=True)  # the next run's, too
        raise ChangedError(
            f"{file.url}: was replaced after this node had looked up its documents; if the dataset is whole, "
            f"open it again, and all of it is looked up anew",
            path=file.url,
        )

    def _part(self, numbers: Sequence[int]) -> Mapping[str, Array]:
        """begins and lengths of all documents of some shards."""
        files = at_once(self.dataset.file, numbers)
        counts = [self.dataset.shards[number].num_documents for number in numbers]
        CachedFile.glance(files, [*map(ItemsFile.glanced_bytes, counts)])
        found = at_once(self._looked_into, [*zip(numbers, files)])
        self._looked = sum((file.stats for file in files), self._looked)
        begins, lengths = zip(*found)
        versions = np.array([*map(self._tag, numbers, files)])
        return {"begins": np.concatenate(begins), "lengths": np.concatenate(lengths), "versions": versions}

    def _looked_into(self, shard: tuple[int, ByteFile]) -> tuple[Longs, Longs]:
        number, file = shard
        self.dataset.refuse_size(number, file)
        return self.dataset.places(number, file)


def _whole(parts: Sequence[Any], arrays: Sequence[Mapping[str, Array]]) -> Mapping[str, Array]:
    starts = np.concatenate(([0], joined(arrays, "lengths").cumsum(dtype=np.int64)))
    return {"starts": starts} | {name: joined(arrays, name) for name in ("begins", "versions")}
