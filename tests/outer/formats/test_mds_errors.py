"""What an MDS dataset may not do: leave its folder, run code, grow beyond what it declares, lie about its bytes."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import json
import struct
import subprocess
import tracemalloc
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

import meshfeed as mf
import mosaic
import quick
from meshfeed.errors import ChecksumError, OptionError, StoreError
from meshfeed.remote.codec import check_hashes, decompress
from soak import some


def written(folder: Path, **options: Any) -> Path:
    rng = np.random.default_rng(0)
    columns = {"tokens": "ndarray:uint16"}
    with mosaic.imported().MDSWriter(out=str(folder), columns=columns, size_limit=4000, **options) as writer:
        for i in range(20):
            writer.write({"tokens": rng.integers(0, 9, 100 + i).astype(np.uint16)})
    return folder


def change(folder: Path, edit: Callable[[dict[str, Any]], Any]) -> Path:
    index = json.loads((folder / "index.json").read_text())
    edit(index)
    (folder / "index.json").write_text(json.dumps(index))
    return folder


def read_all(folder: Path, cache: Path) -> None:
    store: Any = mf.open(folder, cache=cache)
    with store:
        store.read_stream(np.array([0]), np.array([store.num_tokens]))


def shard(index: dict[str, Any], number: int = 0) -> dict[str, Any]:
    return index["shards"][number]


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda i: shard(i)["raw_data"].update(basename="../../etc/passwd"), "only files beside or below"),
        (lambda i: shard(i)["raw_data"].update(basename="/etc/passwd"), "only files beside or below"),
        (lambda i: shard(i)["raw_data"].update(basename="%2e%2e/x"), "only files beside or below"),
        (lambda i: shard(i)["raw_data"].update(basename="s3://other/x"), "only files beside or below"),
        (lambda i: shard(i)["raw_data"].update(basename=""), "only files beside or below"),
        (
            lambda i: [shard(i, n).update(column_encodings=["pkl"]) for n in range(len(i["shards"]))],
            "pickled",
        ),
        (lambda i: shard(i).update(samples=-1), r"shards\[0\]\.samples is -1"),
        (lambda i: shard(i).update(samples=10**9), "too few for"),
        (lambda i: shard(i).update(samples=19), "byte 0: "),
        (lambda i: shard(i)["raw_data"].update(bytes=5000), "its index says 5000"),
        (lambda i: shard(i).update(format="json"), "only mds"),
        (lambda i: shard(i).update(compression="rar"), "known are zstd"),
        (lambda i: shard(i).update(column_sizes=[3, 4]), "different numbers"),
        (lambda i: i["shards"].append(shard(i)), "twice"),
        (lambda i: shard(i, 1).update(column_names=["other"]), r"shards\[1\] has other columns"),
        (lambda i: i.update(version=3), "only version 2"),
        (lambda i: i.update(shards={}), "is not a list"),
    ],
)
def test_a_foreign_index_is_checked(tmp_path: Path, edit: Callable[[Any], Any], says: str) -> None:
    folder = change(written(tmp_path / "mds"), edit)
    with pytest.raises(StoreError, match=says):
        read_all(folder, tmp_path / "cache")


def test_nothing_is_made_as_large_as_an_index_claims(tmp_path: Path) -> None:
    """Only a file of the claimed size makes it true."""
    with mosaic.imported().MDSWriter(out=str(tmp_path), columns={"tokens": "ndarray:uint16:4"}) as writer:
        writer.write({"tokens": np.ones(4, np.uint16)})
    claimed = (1 << 32) - 1
    change(tmp_path, lambda i: shard(i).update(samples=claimed))
    with pytest.raises(StoreError, match=f"too few for {claimed} samples of 8 at least"):
        len(mf.open(tmp_path))
    change(tmp_path, lambda i: shard(i)["raw_data"].update(bytes=1 << 35))
    with pytest.raises(StoreError, match=r"shards\[0\]\.bytes is 34359738368"):
        len(mf.open(tmp_path))
    most = (claimed - 8) // 12
    change(tmp_path, lambda i: (shard(i).update(samples=most), shard(i)["raw_data"].update(bytes=claimed)))
    tracemalloc.start()
    store: Any = mf.open(tmp_path)
    assert store.num_tokens == 4 * most and store.lengths(np.array([most - 1])).tolist() == [4]
    with store, pytest.raises(StoreError, match=f"bytes, its index says {claimed}"):
        store.read(7, 0, 4)
    assert tracemalloc.get_traced_memory()[1] < 1 << 24
    tracemalloc.stop()


def test_a_shard_that_grows_beyond_its_declared_size(tmp_path: Path) -> None:
    folder = written(tmp_path / "mds", compression="zstd:3")
    change(folder, lambda i: shard(i)["raw_data"].update(bytes=shard(i)["raw_data"]["bytes"] - 1))
    with pytest.raises(StoreError, match=r"exceeds the .* bytes that its index declares"):
        read_all(folder, tmp_path / "cache")


@pytest.mark.parametrize("compression", [None, "zstd:3"])
def test_bytes_that_are_not_those_that_were_written(tmp_path: Path, compression: str | None) -> None:
    folder = written(tmp_path / "mds", compression=compression, hashes=["sha1"])
    victim = sorted(path for path in folder.iterdir() if "shard.00001" in path.name)[0]
    data = bytearray(victim.read_bytes())
    data[-5] ^= 4
    victim.write_bytes(bytes(data))
    with pytest.raises(ChecksumError, match=r"shard\.00001.*sha1 is [0-9a-f]{40}, its index says"):
        if compression is None:  # in place, hashes are checked when that is asked for
            list(mf.open(folder).verify())
        else:
            read_all(folder, tmp_path / "cache")


def test_which_column_holds_tokens_must_be_plain(tmp_path: Path) -> None:
    columns = {"a": "ndarray:uint16", "b": "ndarray:uint16", "text": "str", "raw": "bytes"}
    with mosaic.imported().MDSWriter(out=str(tmp_path), columns=columns) as writer:
        one = np.ones(3, np.uint16)
        writer.write({"a": one, "b": one, "text": "x", "raw": one.astype("<u4").tobytes()})
    with pytest.raises(
        StoreError, match=r"its columns are a \(ndarray:uint16\), b .*; say which holds tokens"
    ):
        _ = mf.open(tmp_path).dtype
    with pytest.raises(StoreError, match="'text' is str; tokens are an ndarray"):
        _ = mf.open(tmp_path, column="text").dtype
    for dtype in (">u4", "nonsense", "object"):
        with pytest.raises(OptionError, match=f"dtype='{dtype}': choose one of uint8, .*, little-endian"):
            mf.open(tmp_path, column="raw", dtype=dtype)
    with pytest.raises(OptionError, match="column 'a' is ndarray:uint16, not dtype='int32'"):
        _ = mf.open(tmp_path, column="a", dtype="int32").dtype
    with mf.open(tmp_path, column="raw", dtype=np.uint32) as store:
        assert store.read(0, 0, 3).tolist() == [1, 1, 1]


def packed(codec: str, data: bytes) -> bytes:
    match codec:
        case "zstd":
            return import_module("zstandard").compress(data)
        case "gz":
            return gzip.compress(data, 1)
        case "bz2":
            return bz2.compress(data, 1)
        case "br":
            return import_module("brotli").compress(data, quality=1)
        case _:
            return bytes(import_module("cramjam").snappy.compress_raw(data))


@some(5)
@pytest.mark.parametrize("codec", ["zstd", "gz", "bz2", "br", "snappy"])
@pytest.mark.parametrize("size", [1, 1000, 1 << 21, 3_000_000])
def test_codecs_are_bounded_and_notice_damage(codec: str, size: int) -> None:
    data = np.random.default_rng(0).integers(0, 3, size).astype(np.uint8).tobytes()
    small = packed(codec, data)
    assert decompress(codec, small, size, "x") == data
    with pytest.raises(StoreError, match="x: exceeds"):
        decompress(codec, small, size - 1, "x")
    with pytest.raises(ChecksumError):
        decompress(codec, small, size + 1, "x")
    with pytest.raises(ChecksumError):
        decompress(codec, small[: len(small) // 2], size, "x")


GROWTH = """
import resource, sys
from pathlib import Path
from meshfeed.errors import StoreError
from meshfeed.remote.codec import decompress
codec, path = sys.argv[1:]
data = Path(path).read_bytes()
for name in ("brotli", "zstandard", "cramjam"):
    __import__(name)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    decompress(codec, data, 1000, "x")
except StoreError as error:
    print(type(error).__name__, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize("codec", ["zstd", "gz", "bz2", "br", "snappy", "litdata"])
def test_a_bomb_does_not_fill_the_memory(codec: str, tmp_path: Path) -> None:
    zeros = bytes(100 << 20)
    if codec == "litdata":
        frame = packed("zstd", zeros)
        offsets = np.array([0, len(zeros)], "<u4").tobytes()
        table = struct.pack("<IIQII", 0, 1, 24 + len(offsets) + 24, len(frame), 0)
        bomb = struct.pack("<8sHHIII", b"LDFZ01\0\0", 1, 0, 1, 1, 1) + offsets + table + frame
    else:
        bomb = packed(codec, zeros)
    (tmp_path / "bomb").write_bytes(bomb)
    command = [quick.python(), "-c", GROWTH, codec, str(tmp_path / "bomb")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    name, grown_kib = done.stdout.split()
    assert name == "StoreError" and int(grown_kib) < 32 << 10


@pytest.mark.parametrize("codec", ["gz", "bz2"])
def test_members_lie_back_to_back(codec: str) -> None:
    data = np.random.default_rng(0).integers(0, 3, 3 << 20).astype(np.uint8).tobytes()
    small = packed(codec, data) * 2 + packed(codec, b"x") * 5000 + packed(codec, bytes(1 << 21))
    assert decompress(codec, small, 8 * (1 << 20) + 5000, "x") == data * 2 + b"x" * 5000 + bytes(1 << 21)


def test_hashes() -> None:
    data = b"some bytes"
    check_hashes(data, {"md5": hashlib.md5(data).hexdigest(), "xxh64": xxhash.xxh64_hexdigest(data)}, "x")
    with pytest.raises(ChecksumError, match="x: xxh3_64 is"):
        check_hashes(data, {"xxh3_64": "0" * 16}, "x")
    with pytest.raises(StoreError, match="hash 'sha0' is unknown"):
        check_hashes(data, {"sha0": "0"}, "x")
