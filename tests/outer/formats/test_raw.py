"""Files of raw tokens: one document, read as NumPy reads it, here and over HTTP."""

from __future__ import annotations

import gzip
import lzma
import os
from pathlib import Path

import numpy as np
import pytest
import zstandard

import meshfeed as mf
from meshfeed.errors import OptionError, StoreError
from meshfeed.formats.raw import DTYPES
from meshfeed.store.marks import marks_of
from meshfeed.testing import assert_store
from services.needs import needs
from services.nginx import Nginx
from soak import some


@some(2)
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_the_file(tmp_path: Path, dtype: str) -> None:
    tokens = np.random.default_rng(0).integers(0, 1 + min(np.iinfo(dtype).max, 2**40), 1_000).astype(dtype)
    tokens.tofile(tmp_path / "train.bin")
    store = mf.open(tmp_path / "train.bin", dtype=dtype)
    assert store.dtype == dtype and list(store.verify())[-1] == 1
    assert_store(store, [tokens])
    if dtype == "uint16":
        recipe = mf.Recipe(data=store, sequence=mf.Windows(32), batch=mf.Batch(sequences=8), epochs=1)
        steps = list(mf.simulate(recipe, mf.Layout.parse("dp2"), 3))
        assert len(steps) == 6


def test_the_dtype_is_part_of_the_fingerprint(tmp_path: Path) -> None:
    np.arange(64, dtype=np.uint16).tofile(tmp_path / "a.tokens")
    (tmp_path / "b").write_bytes((tmp_path / "a.tokens").read_bytes())
    short = mf.open(tmp_path / "a.tokens", dtype=np.uint16)
    assert mf.open(tmp_path / "b", dtype="<u2").fingerprint == short.fingerprint
    assert mf.open(tmp_path / "b", dtype="int32").fingerprint != short.fingerprint
    with mf.open(tmp_path / "b", dtype="int32") as store:
        assert store.num_tokens == 32


def test_what_a_node_derives_is_of_the_bytes_that_are_there_now(tmp_path: Path) -> None:
    """The fingerprint samples the file, so it misses a token that is written in place; the marks must not."""
    path, cache = tmp_path / "train.bin", mf.Cache(tmp_path / "cache")
    tokens = np.zeros(1 << 20, np.uint16)
    fingerprints, counts = set[str](), list[int]()
    for at in (50_000, 50_000, 60_000):
        tokens[at] = 7
        tokens.tofile(path)
        os.utime(path, ns=(at, at))
        store = mf.open(path, dtype="uint16", cache=cache)
        assert store.kept_in == cache
        fingerprints.add(store.fingerprint)
        counts += marks_of(store, cache, (7,)).count(np.array([0]), np.array([tokens.size])).tolist()
    assert len(fingerprints) == 1 and counts == [1, 1, 2]


def test_what_cannot_be_tokens_is_refused(tmp_path: Path) -> None:
    (tmp_path / "odd.bin").write_bytes(bytes(7))
    with pytest.raises(StoreError, match=r"odd\.bin: 7 bytes are not a whole number of uint16 tokens"):
        mf.open(tmp_path / "odd.bin", dtype="uint16")
    for dtype in ("float32", "nonsense", "int16", ">u2"):
        with pytest.raises(OptionError, match=f"dtype='{dtype}': choose one of uint8, uint16"):
            mf.open(tmp_path / "odd.bin", dtype=dtype)
    (tmp_path / "empty.bin").touch()
    with pytest.raises(StoreError, match=r"empty\.bin: an empty file holds no tokens"):
        mf.open(tmp_path / "empty.bin", dtype="uint16")
    np.save(tmp_path / "array.npy", np.arange(9, dtype=np.uint16))
    with pytest.raises(StoreError, match=r"array\.npy: a \.npy file, whose bytes would be read as tokens"):
        mf.open(tmp_path / "array.npy", dtype="uint16")
    tokens = np.arange(4096, dtype=np.uint16).tobytes()
    for packed, how in (
        (gzip.compress(tokens), "gzip"),
        (zstandard.compress(tokens), "zstd"),
        (lzma.compress(tokens), "xz"),
    ):
        (tmp_path / "packed.bin").write_bytes(packed)
        with pytest.raises(StoreError, match=rf"packed\.bin: packed by {how}, whose bytes would be read"):
            mf.open(tmp_path / "packed.bin", dtype="uint8")
    (tmp_path / "headed.bin").write_bytes(b"LITPKDS" + bytes(17) + tokens)  # as lit-gpt and TinyLlama have it
    with pytest.raises(
        StoreError, match=r"headed\.bin: of lit-gpt, with a header, whose bytes would be read"
    ):
        mf.open(tmp_path / "headed.bin", dtype="uint16")
    for magic, what in ((b"PAR1", "a Parquet file, .*; name it .parquet"), (b"\x89HDF\r\n", "an HDF5 file")):
        (tmp_path / "other.bin").write_bytes(magic + tokens)
        with pytest.raises(StoreError, match=rf"other\.bin: {what}"):
            mf.open(tmp_path / "other.bin", dtype="uint8")
    np.savez(tmp_path / "arrays.npz", np.arange(9, dtype=np.uint16))
    with pytest.raises(StoreError, match=r"arrays\.npz: a zip archive"):
        mf.open(tmp_path / "arrays.npz", dtype="uint8")
    for magic, version, dtype in ((20240520, 1, "uint16"), (20240801, 7, "uint32")):  # as llm.c writes shards
        tokens, head, path = np.arange(40, dtype=dtype), np.zeros(256, np.int32), tmp_path / "headed.bin"
        head[:3] = magic, version, tokens.size
        path.write_bytes(head.tobytes() + tokens.tobytes())
        with pytest.raises(StoreError, match=r"headed\.bin: begins with the header of llm\.c .*offset=1024"):
            mf.open(path, dtype=dtype)
        np.fromfile(path, dtype, offset=1024).tofile(path)
        with mf.open(path, dtype=dtype) as store:
            assert store.read(0, 0, 40).tolist() == tokens.tolist()
    for dtype in ("int32", "int64"):
        np.array([1, 2, -7, 3], dtype).tofile(tmp_path / "minus.bin")
        with mf.open(tmp_path / "minus.bin", dtype=dtype) as store:
            assert store.read(0, 0, 2).tolist() == [1, 2] and store.read(0, 3, 3).size == 0
            with pytest.raises(StoreError, match=r"minus\.bin: token 2, counted from 0, is -7; tokens are"):
                store.read_stream(np.array([3, 0, 1]), np.array([4, 1, 4]))
    with mf.IndexedWriter(tmp_path / "pair", "uint16") as writer:
        writer.add_document(np.arange(5))
    with pytest.raises(OptionError, match="a Megatron store has no option dtype; leave out dtype='uint16'"):
        mf.open(tmp_path / "pair.bin", dtype="uint16")


def test_over_http(tmp_path: Path) -> None:
    needs("nginx")
    (tmp_path / "www").mkdir()
    tokens = np.arange(20_000, dtype=np.uint16)
    tokens.tofile(tmp_path / "www" / "train.bin")
    with Nginx(tmp_path / "www") as server:
        cache = mf.Cache(tmp_path / "cache", block_bytes=4096)
        store = mf.open(f"{server.url}/train.bin", dtype="uint16", cache=cache)
        assert store.wants_ahead
        with store:
            store.will_need(np.array([5]), np.array([15_000]))
            assert np.array_equal(store.read_stream(np.array([5]), np.array([15_000])), tokens[5:15_000])
