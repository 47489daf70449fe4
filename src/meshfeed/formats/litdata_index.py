"""index.json of a litdata dataset: its chunks and columns, checked."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from meshfeed.errors import StoreError
from meshfeed.formats.index_json import IndexReader
from meshfeed.formats.items import Column, Shard

INDEX = "index.json"
_MOST_BYTES = 1 << 32  # offsets in a chunk are u32
_MOST_ITEMS = 1 << 30
_MOST_PATH = 1000
_TOKENS_LOADER = "TokensLoader"
_LOADERS = (_TOKENS_LOADER, "PyTreeLoader")
_FLAT = "no_header_tensor"
_FIXED_BYTES: Mapping[str, int] = {"int": 8, "float": 8, "bool": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk(Shard):
    """A chunk.

    Attributes:
        given_bytes: its size, uncompressed if the codec is "zstd"; before litdata 0.2.40 without its head.
        num_tokens: in it; None if the index does not say.
    """

    given_bytes: int
    num_tokens: int | None

    @property
    def head_bytes(self) -> int:
        """Bytes of the number of items and their offsets."""
        return 4 * (self.num_documents + 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class LitdataIndex:
    """The content of an index.

    Attributes:
        columns: in the order in which items hold them. Names are paths in the item, such as "meta.ids", or
            "item" where the item is the leaf; an encoding is litdata's serializer, with a code where all
            values have one dtype: "no_header_tensor:16".
        is_bare: items are the bytes of the first column and nothing else, as TokensLoader has them.
        codec: "zstd" if each chunk is compressed as a whole, "litdata" if groups of items inside it are;
            None without compression.
        chunks: in the order of the items.
    """

    columns: tuple[Column, ...]
    is_bare: bool
    codec: str | None
    chunks: tuple[Chunk, ...]


def is_litdata(text: bytes) -> bool:
    """Whether an index.json is litdata's; that of MDS has other keys."""
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(given, dict) and "chunks" in given and "shards" not in given


def parse_index(url: str, text: bytes) -> LitdataIndex:
    """The index, checked. Raises StoreError for an encrypted dataset, or an unknown layout."""
    reader = _LitdataIndexReader(url)
    given = reader.json(text)
    config = reader.entry(given, "config")
    if config.get("encryption") is not None:
        raise StoreError(f"{url}: the dataset is encrypted; write it again without encryption")
    loader = config.get("item_loader")
    if loader is not None and loader not in _LOADERS:
        raise StoreError(
            f"{url}: written for {str(loader)[:50]}; read are datasets for {' and '.join(_LOADERS)}"
        )
    columns = reader.columns(config)
    chunks = tuple(
        reader.chunk(each, f"chunks[{i}]") for i, each in enumerate(reader.listed(given, "chunks"))
    )
    reader.refuse_twice("chunks", [chunk.name for chunk in chunks])
    # litdata once wrote a lone tensor of one dimension without a header
    alone = len(columns) == 1 and columns[0].encoding.startswith(_FLAT)
    return LitdataIndex(
        columns=columns,
        is_bare=loader == _TOKENS_LOADER or (loader is None and alone),
        codec=reader.codec(config),
        chunks=chunks,
    )


class _LitdataIndexReader(IndexReader):
    def chunk(self, entry: Any, where: str) -> Chunk:
        name = self.text(entry, "filename", where)
        has_dim = cast(dict[str, Any], entry).get("dim") is not None
        return Chunk(
            name=name,
            num_documents=self.whole(entry, "chunk_size", _MOST_ITEMS, where),
            given_bytes=self.whole(entry, "chunk_bytes", _MOST_BYTES, where),
            num_tokens=self.whole(entry, "dim", _MOST_BYTES, where) if has_dim else None,
        )

    def codec(self, config: dict[str, Any]) -> str | None:
        compression, level = config.get("compression"), config.get("compression_level")
        if compression is None:
            return None
        if not isinstance(compression, str) or compression.partition(":")[0] != "zstd":
            self.refuse("config.compression", f"is {str(compression)[:50]}; only zstd is known")
        if level == "sample":
            raise StoreError(
                f"{self.url}: every item is compressed by itself (compression_level='sample'), so "
                f"its length is not known; write it again uncompressed, or with compression_level='batch'"
            )
        if level not in (None, "", "chunk", "batch"):
            self.refuse("config.compression_level", f"is {str(level)[:50]}; known are chunk and batch")
        return "litdata" if level == "batch" else "zstd"

    def columns(self, config: dict[str, Any]) -> tuple[Column, ...]:
        forms = self.listed(config, "data_format", "config")
        if not forms or not all(isinstance(form, str) for form in forms):
            self.refuse("config.data_format", "is not a list of texts")
        spec = config.get("data_spec")
        names = list(map(str, range(len(forms))))
        if spec is not None:
            names = self.names(spec)
        if len(names) != len(forms) or len(set(names)) < len(names):
            self.refuse("config.data_spec", f"has not one name for each of {len(forms)} columns")
        return tuple(Column(name, form, _FIXED_BYTES.get(form)) for name, form in zip(names, forms))

    def names(self, spec: Any) -> list[str]:
        """Paths of the leaves of a tree, [protocol, {"type", "context", "children_spec"}] in a text."""
        where = "config.data_spec"
        tree = self.json(spec, where) if isinstance(spec, str) else None
        if not isinstance(tree, list) or len(cast(list[Any], tree)) != 2:
            self.refuse(where, "is not a tree")
        found: list[str] = []
        left: list[tuple[str, Any]] = [("", cast(list[Any], tree)[1])]
        while left:
            path, node = left.pop()
            if self.field(node, "type", where) is None:
                found.append(path.removeprefix(".") or "item")
                continue
            if len(path) > _MOST_PATH:
                self.refuse(where, f"has columns with names of more than {_MOST_PATH} letters")
            children = self.listed(node, "children_spec", where)
            keys = self.keys(self.field(node, "context", where), len(children))
            left.extend(reversed([(f"{path}.{key}", child) for key, child in zip(keys, children)]))
        return found

    def keys(self, context: Any, count: int) -> Sequence[str]:
        """Keys of a dict's children; for lists and other containers, their numbers."""
        keys: Any = self.json(context, "config.data_spec") if isinstance(context, str) else None
        if isinstance(keys, list) and len(cast(list[Any], keys)) == count:
            return [str(key)[:200] for key in cast(list[Any], keys)]
        return list(map(str, range(count)))
