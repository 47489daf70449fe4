"""Damaged and hostile files: whatever lies in a header, opening and reading it works or is a MeshfeedError.

test_fuzz.py runs them; `make soak` runs them long.
"""

from __future__ import annotations

import json
import random
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet

import meshfeed as mf
from meshfeed.formats.mds import MDSStore
from meshfeed.store import DatasetWriter, IndexedWriter

_NUMBERS = (0, 1, -1, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**63 - 1, -(2**63))
_VALUES: tuple[Any, ...] = (
    *_NUMBERS,
    None,
    True,
    1.5,
    float("nan"),
    1e300,
    "",
    "../x",
    "/etc/passwd",
    "ndarray:uint16:0",
    "ndarray:uint16:99999999999999",
    "ndarray:nonsense",
    "pkl",
    "pickle",
    "no_header_tensor:16",
    "no_header_numpy:99",
    "tensor",
    "zstd:3",
    "a" * 300,
    "\0",
    [],
    {},
    [[]],
    [None] * 3,
)


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Some bytes changed, cut, repeated or overwritten with telling numbers, mostly near the front."""
    made = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        at = rng.randrange(len(made) + 1) if rng.random() < 0.5 else rng.randrange(min(len(made), 64) + 1)
        match rng.randrange(5):
            case 0 if at < len(made):
                made[at] ^= 1 << rng.randrange(8)
            case 1:
                del made[at:]
            case 2:
                made[at:at] = made[at : at + rng.randrange(64)]
            case 3:
                form = rng.choice(("<i", "<q", "<I", "<Q"))
                number = rng.choice(_NUMBERS)
                bits = 8 * struct.calcsize(form)
                made[at : at + bits // 8] = struct.pack(form.upper(), number % (1 << bits))
            case _:
                del made[at : at + rng.randrange(16)]
    return bytes(made)


def changed_json(given: Any, rng: random.Random) -> Any:
    """A JSON value with some part of it replaced, removed or repeated."""
    if rng.random() < 0.15 or not isinstance(given, (dict, list)) or not given:
        return rng.choice(_VALUES)
    if isinstance(given, dict):
        key = rng.choice(list(given))
        if rng.random() < 0.15:
            return {name: value for name, value in given.items() if name != key}
        return given | {key: changed_json(given[key], rng)}
    at = rng.randrange(len(given))
    if rng.random() < 0.2:
        return given[:at] + given[at : at + 1] + given[at:] if rng.random() < 0.5 else given[:at]
    return [*given[:at], changed_json(given[at], rng), *given[at + 1 :]]


# -- targets: valid files, and how to use them ----------------------------------------------------------------


class Indexed:
    """Megatron's .bin/.idx."""

    def __init__(self, folder: Path) -> None:
        with IndexedWriter(folder / "c", np.uint16) as writer:
            for length in (3, 0, 7, 1, 40):
                writer.add_document(np.arange(length, dtype=np.uint16))
        self._folder = folder
        self._idx, self._bin = (folder / "c.idx").read_bytes(), (folder / "c.bin").read_bytes()

    def damage(self, rng: random.Random) -> None:
        """Write the files, one of them damaged."""
        which = rng.random()
        (self._folder / "c.idx").write_bytes(damaged(self._idx, rng) if which < 0.9 else self._idx)
        (self._folder / "c.bin").write_bytes(damaged(self._bin, rng) if which > 0.85 else self._bin)

    def use(self) -> None:
        """Open and read everything."""
        use_store(mf.open(self._folder / "c"))


class Sharded:
    """A folder of shards with an index.json.

    Attributes:
        index: what the index says. shards: name -> bytes.
    """

    index: Any
    shards: dict[str, bytes]

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def damage(self, rng: random.Random) -> None:
        """Write the files, the index or a shard damaged."""
        which = rng.random()
        text = json.dumps(self.index)
        if which < 0.45:
            given: Any = self.index
            for _ in range(rng.choice((1, 1, 2, 3))):
                given = changed_json(given, rng)
            text = json.dumps(given)
        elif which < 0.55:
            text = damaged(text.encode(), rng).decode("latin-1")
        (self._folder / "index.json").write_text(text)
        for i, (name, data) in enumerate(self.shards.items()):
            hurt = which > 0.5 and i == 0
            (self._folder / name).write_bytes(damaged(data, rng) if hurt else data)

    def use(self) -> None:
        """Open and read everything."""
        store: Any = mf.open(self._folder)
        use_store(store)
        if isinstance(store, MDSStore):
            with store:
                for i in range(min(store.num_documents, 5)):
                    store.sample(i)
        list(store.verify())


class Mds(Sharded):
    """MDS: index.json and shards, columns of every kind of size."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        columns = [("name", "str", None), ("number", "int", 8), ("tokens", "ndarray:uint16", None)]
        shards = [self._shard(columns, count) for count in (3, 1)]
        entries = [
            {
                "version": 2,
                "format": "mds",
                "samples": count,
                "column_names": [name for name, _, _ in columns],
                "column_encodings": [encoding for _, encoding, _ in columns],
                "column_sizes": [size for _, _, size in columns],
                "compression": None,
                "hashes": [],
                "size_limit": 1 << 20,
                "raw_data": {"basename": f"shard.{i:05}.mds", "bytes": len(data), "hashes": {}},
                "zip_data": None,
            }
            for i, (data, count) in enumerate(zip(shards, (3, 1)))
        ]
        self.index = {"version": 2, "shards": entries}
        self.shards = {f"shard.{i:05}.mds": data for i, data in enumerate(shards)}

    @staticmethod
    def _shard(columns: list[tuple[str, str, int | None]], count: int) -> bytes:
        samples: list[bytes] = []
        for i in range(count):
            tokens = np.arange(5 + i, dtype="<u2")
            array = bytes([1 << 2, tokens.size]) + tokens.tobytes()
            name = f"sample {i}".encode()
            samples.append(struct.pack("<II", len(name), len(array)) + name + struct.pack("<q", i) + array)
        config = json.dumps({"columns": columns}).encode()
        first = 4 * (count + 2) + len(config)
        offsets = np.cumsum([first, *map(len, samples)]).astype("<u4")
        return struct.pack("<I", count) + offsets.tobytes() + config + b"".join(samples)


class Litdata(Sharded):
    """litdata: items of a text, a number and an array with a header, or of a bare array."""

    def __init__(self, folder: Path, *, is_bare: bool = False) -> None:
        super().__init__(folder)
        forms = ["no_header_numpy:5"] if is_bare else ["str", "int", "numpy"]
        leaf = {"type": None, "context": None, "children_spec": []}
        tree = {
            "type": "builtins.dict",
            "context": '["name", "number", "tokens"]',
            "children_spec": [leaf] * 3,
        }
        self.shards = {f"chunk-0-{i}.bin": self._chunk(is_bare, count) for i, count in enumerate((3, 1))}
        self.index = {
            "chunks": [
                {
                    "filename": name,
                    "chunk_bytes": len(data),
                    "chunk_size": count,
                    "dim": dim if is_bare else None,
                }
                for (name, data), count, dim in zip(self.shards.items(), (3, 1), (18, 5))
            ],
            "config": {
                "compression": None,
                "data_format": forms,
                "data_spec": json.dumps([1, leaf if is_bare else tree]),
                "encryption": None,
                "item_loader": "TokensLoader" if is_bare else "PyTreeLoader",
            },
        }

    @staticmethod
    def _chunk(is_bare: bool, count: int) -> bytes:
        items: list[bytes] = []
        for i in range(count):
            tokens = np.arange(5 + i, dtype="<u2")
            name, array = f"item {i}".encode(), struct.pack("<3I", 5, 1, tokens.size) + tokens.tobytes()
            sizes = struct.pack("<3I", len(name), 8, len(array))
            items.append(tokens.tobytes() if is_bare else sizes + name + struct.pack("<q", i) + array)
        offsets = np.cumsum([4 * (count + 2), *map(len, items)]).astype("<u4")
        return struct.pack("<I", count) + offsets.tobytes() + b"".join(items)


class Dataset:
    """A folder with dataset.json: tokens, and a column of another dtype beside them."""

    def __init__(self, folder: Path) -> None:
        with DatasetWriter(folder / "d", {"tokens": "u2", "loss_mask": "u1"}) as writer:
            for length in (3, 0, 7, 1, 40):
                values = np.arange(length)
                writer.add_document(tokens=values, loss_mask=values % 2)
        self._folder = folder / "d"
        self._given = json.loads((self._folder / "dataset.json").read_text())
        self._idx = (self._folder / "loss_mask.idx").read_bytes()

    def damage(self, rng: random.Random) -> None:
        """Write dataset.json, or the index of its column, damaged."""
        which = rng.random()
        given, text = self._given, json.dumps(self._given)
        if which < 0.6:
            for _ in range(rng.choice((1, 1, 2, 3))):
                given = changed_json(given, rng)
            text = json.dumps(given)
        elif which < 0.8:
            text = damaged(text.encode(), rng).decode("latin-1")
        (self._folder / "dataset.json").write_text(text)
        (self._folder / "loss_mask.idx").write_bytes(damaged(self._idx, rng) if which > 0.75 else self._idx)

    def use(self) -> None:
        """Open and read everything."""
        store: Any = mf.open(self._folder, cache=self._folder / "cache")
        use_store(store)
        list(store.verify())
        with store:
            for column in store.columns.values():
                use_store(column)


class Jsonl:
    """Lines of tokens."""

    def __init__(self, folder: Path) -> None:
        self._path, self._cache = folder / "c.jsonl", folder / "cache"
        lines = [json.dumps({"id": i, "tokens": list(range(i * 3))}) for i in range(6)]
        self._data = "\n".join(lines).encode()

    def damage(self, rng: random.Random) -> None:
        """Write the file, damaged."""
        self._path.write_bytes(damaged(self._data, rng))

    def use(self) -> None:
        """Open and read everything, with an index that is made anew."""
        shutil.rmtree(self._cache, ignore_errors=True)
        use_store(mf.open(self._path, cache=self._cache))


class Parquet(Jsonl):
    """Rows of tokens."""

    def __init__(self, folder: Path) -> None:
        self._path, self._cache = folder / "c.parquet", folder / "cache"
        rows = {"id": range(6), "tokens": [list(range(i * 3)) for i in range(6)]}
        pyarrow.parquet.write_table(pyarrow.table(rows), self._path, row_group_size=4)
        self._data = self._path.read_bytes()

    def damage(self, rng: random.Random) -> None:
        """Write the file, its pages damaged; some damage of the footer ends the process inside pyarrow."""
        footer = 8 + int.from_bytes(self._data[-8:-4], "little")
        self._path.write_bytes(damaged(self._data[:-footer], rng) + self._data[-footer:])


TARGETS: dict[str, Callable[[Path], Any]] = {
    ".idx": Indexed,
    "MDS": Mds,
    "dataset.json": Dataset,
    "JSONL": Jsonl,
    "Parquet": Parquet,
    "litdata": Litdata,
    "litdata, bare": partial(Litdata, is_bare=True),
}


def use_store(store: Any) -> None:
    """All that a sequence rule may ask of a store."""
    _ = store.fingerprint, store.dtype
    documents = np.arange(min(store.num_documents, 20))
    with store:
        lengths = store.lengths(documents)
        for document, length in zip(documents.tolist(), lengths.tolist()):
            store.read(document, 0, min(length, 1 << 16))
        if getattr(store, "is_stream", True):  # a .bin/.idx pair may be in any order
            end = min(store.num_tokens, 1 << 16)
            store.offsets(documents)
            store.read_stream(np.array([0]), np.array([end]))
            store.document_starts(np.array([0]), np.array([end]))


def tried(name: str, count: int, seed: int) -> Iterator[str]:
    """How each of `count` inputs ended: "fine" or the error's class. Raises what is no MeshfeedError."""
    with tempfile.TemporaryDirectory() as scratch:
        target = TARGETS[name](Path(scratch))
        for number in range(count):
            target.damage(random.Random(f"{seed} {number}"))
            try:
                target.use()
                yield "fine"
            except mf.MeshfeedError as error:
                yield type(error).__name__
            except BaseException as error:
                raise AssertionError(
                    f"{name}, seed {seed}, input {number}: {type(error).__name__}: {error}"
                ) from error
