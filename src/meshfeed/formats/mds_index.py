"""index.json of an MDS dataset (MosaicML Streaming's format): its shards and columns, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from meshfeed.files import Content
from meshfeed.formats.index_json import IndexReader
from meshfeed.formats.items import Column, Shard

INDEX = "index.json"
CODECS = ("zstd", "gz", "bz2", "br", "snappy")
_MOST_BYTES = (1 << 32) - 1  # offsets in a shard are u32


@dataclass(frozen=True, slots=True, kw_only=True)
class MDSShard(Shard):
    """A file of samples.

    Attributes:
        raw_bytes: its size uncompressed.
        content: its compression and hashes; None if the index has neither.
    """

    raw_bytes: int
    content: Content | None


def parse_index(url: str, text: bytes) -> tuple[list[Column], list[MDSShard]]:
    """Columns, in the order in which samples hold them, and shards. Raises StoreError."""
    reader = _MDSIndexReader(url)
    given = reader.json(text)
    version = reader.whole(given, "version", 1 << 16)
    if version != 2:
        reader.refuse("version", f"is {version}; only version 2 is known")
    entries = reader.listed(given, "shards")
    columns: list[Column] = []
    shards: list[MDSShard] = []
    for at, entry in enumerate(entries):
        found = reader.columns(entry, f"shards[{at}]")
        if at == 0:
            columns = found
        elif found != columns:
            reader.refuse(f"shards[{at}]", "has other columns than shards[0]")
        shards.append(reader.shard(entry, f"shards[{at}]", least_bytes(columns)))
    reader.refuse_twice("shards", [entry["raw_data"]["basename"] for entry in entries])
    return columns, shards


def least_bytes(columns: Sequence[Column]) -> int:
    """Size of the smallest sample: a word for each size that varies, and the values of fixed size."""
    return sum(4 if column.size_bytes is None else column.size_bytes for column in columns)


class _MDSIndexReader(IndexReader):
    def columns(self, entry: Any, where: str) -> list[Column]:
        if self.text(entry, "format", where) != "mds":
            self.refuse(f"{where}.format", f"is {entry['format']!r}; only mds can be read by place")
        lists = [self.listed(entry, f"column_{part}", where) for part in ("names", "encodings", "sizes")]
        if len({len(each) for each in lists}) != 1:
            self.refuse(where, "has column names, encodings and sizes of different numbers")
        columns: list[Column] = []
        for name, encoding, size in zip(*lists):
            if not isinstance(name, str) or not isinstance(encoding, str):
                self.refuse(f"{where}.column_names", "hold something that is not a text")
            if size is not None and (type(size) is not int or not 0 <= size <= _MOST_BYTES):
                self.refuse(f"{where}.column_sizes", f"hold {str(size)[:50]}")
            columns.append(Column(name, encoding, size))
        if len({column.name for column in columns}) < len(columns):
            self.refuse(f"{where}.column_names", "name a column twice")
        return columns

    def shard(self, entry: Any, where: str, least: int) -> MDSShard:
        """least: bytes of a sample at least."""
        raw = self.field(entry, "raw_data", where)
        raw_name, raw_bytes = self.text(raw, "basename", where), self.whole(raw, "bytes", _MOST_BYTES, where)
        raw_hashes = self.hashes(raw, f"{where}.raw_data")
        samples = self.whole(entry, "samples", _MOST_BYTES, where)
        if raw_bytes < 4 * (samples + 2) + samples * least:
            self.refuse(
                where,
                f"has {raw_bytes} bytes, too few for {samples} samples of {least} at least, with offsets",
            )
        compression, name = self.field(entry, "compression", where), raw_name
        content = Content(raw_bytes=raw_bytes, stored_bytes=raw_bytes, raw_hashes=raw_hashes)
        if compression is not None:
            family = str(compression).partition(":")[0]
            if family not in CODECS:
                self.refuse(f"{where}.compression", f"is {compression!r}; known are {', '.join(CODECS)}")
            packed = self.field(entry, "zip_data", where)
            name = self.text(packed, "basename", where)
            content = replace(
                content,
                codec=family,
                stored_bytes=self.whole(packed, "bytes", _MOST_BYTES, where),
                stored_hashes=self.hashes(packed, f"{where}.zip_data"),
            )
        is_checked = content.codec is not None or raw_hashes
        return MDSShard(
            name=name, raw_bytes=raw_bytes, num_documents=samples, content=content if is_checked else None
        )

    def hashes(self, given: Any, where: str) -> Mapping[str, str]:
        hashes = self.field(given, "hashes", where) or {}
        if not isinstance(hashes, dict) or not all(isinstance(v, str) for v in cast(Any, hashes).values()):
            self.refuse(f"{where}.hashes", "is not an object of texts")
        return cast(dict[str, str], hashes)
