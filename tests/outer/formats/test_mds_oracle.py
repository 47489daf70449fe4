"""MDS as MosaicML Streaming itself writes and reads it: every encoding, compression and hash."""

from __future__ import annotations

import io
import itertools
import os
import pickle
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshfeed as mf
import mosaic
from meshfeed.errors import StoreError
from meshfeed.formats.mds import MDSStore
from meshfeed.formats.mds_sample import decode
from meshfeed.testing import assert_store
from soak import SOAK, some

streaming = mosaic.imported()

SEED = 7
DTYPES = (
    "uint8",
    "int8",
    "uint16",
    "int16",
    "uint32",
    "int32",
    "uint64",
    "int64",
    "float16",
    "float32",
    "float64",
)
COMPRESSIONS = (None, "zstd:3", "gz:6", "bz2:9", "br:5", "snappy")
HASHES = (None, ["sha1"], ["md5", "xxh64"])


def written(folder: Path, columns: dict[str, str], samples: list[dict[str, Any]], **options: Any) -> Path:
    with streaming.MDSWriter(out=str(folder), columns=columns, size_limit=1 << 14, **options) as writer:
        for sample in samples:
            writer.write(sample)
    return folder


def theirs(folder: Path, raw: Path | None = None) -> list[dict[str, Any]]:
    dataset = streaming.LocalDataset(local=str(raw or folder))
    return [dataset[i] for i in range(len(dataset))]


def token_samples(rng: np.random.Generator, count: int = 300, most: int = 700) -> list[dict[str, Any]]:
    return [
        {"tokens": rng.integers(0, 60_000, int(rng.integers(1, most))).astype(np.uint16), "name": f"doc {i}"}
        for i in range(count)
    ]


@some(2)
@pytest.mark.parametrize(
    ("compression", "hashes"),
    itertools.product(COMPRESSIONS, HASHES)
    if SOAK
    else [(compression, HASHES[at % 3]) for at, compression in enumerate(COMPRESSIONS)],
)
def test_token_documents(compression: str | None, hashes: list[str] | None, tmp_path: Path) -> None:
    samples = token_samples(np.random.default_rng(SEED))
    columns = {"tokens": "ndarray:uint16", "name": "str"}
    folder = written(tmp_path / "mds", columns, samples, compression=compression, hashes=hashes or [])
    store = mf.open(folder, cache=tmp_path / "cache")
    assert isinstance(store, MDSStore) and store.shard_ends.size > 3
    assert_store(store, [sample["tokens"] for sample in samples])
    if compression is None:
        for i, sample in enumerate(theirs(folder)):
            ours = store.sample(i)
            assert ours["name"] == sample["name"] and np.array_equal(ours["tokens"], sample["tokens"])
    assert list(store.verify())[-1] == 1


@some(5)
@pytest.mark.parametrize(
    ("encoding", "made"),
    [
        ("ndarray:int32:257", lambda rng: rng.integers(0, 1 << 30, 257).astype(np.int32)),
        ("ndarray:uint16", lambda rng: rng.integers(0, 9, int(rng.integers(1, 90_000))).astype(np.uint16)),
        ("ndarray", lambda rng: rng.integers(0, 99, int(rng.integers(1, 600))).astype(np.uint32)),
        ("ndarray:uint8", lambda rng: rng.integers(0, 99, int(rng.integers(1, 300))).astype(np.uint8)),
    ],
)
@pytest.mark.parametrize(
    "beside", [{}, {"a": "str"}, {"zz": "int"}, {"a": "str", "zz": "bytes", "n": "uint16"}]
)
def test_tokens_of_every_kind_beside_others(
    encoding: str, made: Any, beside: dict[str, str], tmp_path: Path
) -> None:
    rng = np.random.default_rng(SEED)
    others = {"a": lambda i: "x" * (i % 7), "zz": lambda i: i if beside["zz"] == "int" else b"z" * (i % 5)}
    others["n"] = lambda i: i
    samples = [{"input_ids": made(rng)} | {name: others[name](i) for name in beside} for i in range(60)]
    folder = written(tmp_path, {"input_ids": encoding} | beside, samples)
    assert_store(mf.open(folder), [sample["input_ids"] for sample in samples])


def test_every_encoding_equals_theirs(tmp_path: Path) -> None:
    from PIL import Image

    rng = np.random.default_rng(SEED)

    def image(size: int) -> Any:
        return Image.fromarray(rng.integers(0, 255, (size, size + 3, 3)).astype(np.uint8))

    columns = {
        "bytes": "bytes",
        "str": "str",
        "int": "int",
        "str_int": "str_int",
        "str_float": "str_float",
        "str_decimal": "str_decimal",
        "json": "json",
        "pil": "pil",
        "png": "png",
        "jpeg": "jpeg",
        "pils": "list[pil]",
        "pngs": "list[png]",
        "any": "ndarray",
        "shaped": "ndarray:float32:2,3",
        "typed": "ndarray:int64",
        **{f"scalar_{dtype}": dtype for dtype in DTYPES},
    }
    samples = []
    for i in range(25):
        samples.append(
            {
                "bytes": bytes(rng.integers(0, 256, i).astype(np.uint8)),
                "str": "größe " * i,
                "int": -(1 << 40) + i,
                "str_int": 10**30 + i,
                "str_float": i / 7,
                "str_decimal": Decimal(i) / 8,
                "json": {"a": [i, None, "x"]},
                "pil": image(4 + i % 3),
                "png": image(5),
                "jpeg": image(8),
                "pils": [image(3) for _ in range(1 + i % 3)],
                "pngs": [image(3) for _ in range(1 + i % 2)],
                "any": rng.integers(0, 9, (1 + i % 3, 300)).astype(np.int16),
                "shaped": rng.random((2, 3)).astype(np.float32),
                "typed": rng.integers(0, 9, (2, 1 + i)),
                **{f"scalar_{dtype}": np.dtype(dtype).type(i) for dtype in DTYPES},
            }
        )
    folder = written(tmp_path, columns, samples)
    store = mf.open(folder)
    with store:
        for i, sample in enumerate(theirs(folder)):
            ours = store.sample(i)
            assert ours.keys() == sample.keys()
            for name, value in sample.items():
                assert same(ours[name], value), (i, name)


def same(ours: Any, value: Any) -> bool:
    if isinstance(value, list):
        return len(ours) == len(value) and all(map(same, ours, value))
    if hasattr(value, "tobytes") and hasattr(value, "mode"):
        return ours.mode == value.mode and ours.size == value.size and ours.tobytes() == value.tobytes()
    if isinstance(value, np.ndarray):
        return ours.dtype == value.dtype and np.array_equal(ours, value)
    return type(ours) is type(value) and ours == value


def test_windows_and_documents_train_on_it(tmp_path: Path) -> None:
    samples = token_samples(np.random.default_rng(SEED), 200)
    folder = written(tmp_path / "mds", {"tokens": "ndarray:uint16", "name": "str"}, samples)
    stream = np.concatenate([sample["tokens"] for sample in samples]).astype(np.int64)
    recipe = mf.Recipe(
        data=mf.open(folder), sequence=mf.Windows(100), batch=mf.Batch(sequences=8), shuffle="none", epochs=1
    )
    got = [row for step in mf.Feed(recipe) for m in step.microbatches for row in m["tokens"].tolist()]
    assert (
        np.concatenate(got)[: 100 * (stream.size // 100)].tolist()
        == stream[: 100 * (stream.size // 100)].tolist()
    )
    recipe = mf.Recipe(
        data=mf.open(folder),
        sequence=mf.Documents(),
        batch=mf.Batch(sequences=16),
        shuffle=mf.Blocks(window=2, lanes=2),
        seed=1,
        epochs=1,
    )
    seen: dict[int, list[int]] = {}
    for step in mf.Feed(recipe, packing=mf.Packing(capacity=4096)):
        for microbatch in step.microbatches:
            starts = microbatch["cu_seqlens_padded"].tolist()
            sizes = microbatch["cu_seqlens"].diff().tolist()
            for index, start, size in zip(microbatch.draws.index.tolist(), starts, sizes):
                seen[index] = microbatch["tokens"][0, start : start + size].tolist()
    assert seen == {i: sample["tokens"].tolist() for i, sample in enumerate(samples)}


def test_a_pickled_column_makes_only_itself_unreadable(tmp_path: Path) -> None:
    with streaming.MDSWriter(out=str(tmp_path / "m"), columns=PICKLED) as writer:
        for i in range(5):
            writer.write({"tokens": np.arange(i + 1, dtype=np.uint16), "thing": {"a": i}, "note": f"n{i}"})
    with mf.open(tmp_path / "m") as store:
        assert isinstance(store, MDSStore) and len(store) == 5
        assert store.read(4, 0, 5).tolist() == list(range(5))
        sample = store[3]
        assert sample["note"] == "n3" and sorted(sample) == ["note", "tokens"]
        for kept in (sample, pickle.loads(pickle.dumps(sample))):
            with pytest.raises(StoreError, match=r"sample 3, column 'thing': pickled \(pkl\)"):
                kept["thing"]
            with pytest.raises(KeyError):
                kept["nothing"]
        with pytest.raises(StoreError, match="pickled"):
            store.sample(3, ["thing"])
    with pytest.raises(StoreError, match="column 'thing': pickled"):
        mf.open(tmp_path / "m", column="thing").dtype  # noqa: B018


PICKLED = {"tokens": "ndarray:uint16", "thing": "pkl", "note": "str"}


def test_no_column_of_images_starts_ghostscript(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import EpsImagePlugin, Image

    stream, started = io.BytesIO(), tmp_path / "started"
    Image.new("RGB", (8, 4)).save(stream, "EPS")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/gs").write_text(f"#!/bin/sh\necho 10 | tee {started}\n")
    (tmp_path / "bin/gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)
    with pytest.raises(OSError):
        Image.open(stream).load()
    assert started.exists(), "Pillow by itself starts it"
    started.unlink()
    eps = stream.getvalue()
    columns = {"tokens": "ndarray:uint16", "images": "jpeg_array"}
    with streaming.MDSWriter(out=str(tmp_path / "shards"), columns=columns) as writer:
        writer.write({"tokens": np.arange(3, dtype=np.uint16), "images": [eps]})
    with (
        mf.open(tmp_path / "shards") as store,
        pytest.raises(StoreError, match="no jpeg_array: cannot identify image file"),
    ):
        assert isinstance(store, MDSStore)
        store[0]["images"]
    counts = np.array([1, len(eps)], "<u4").tobytes()
    for encoding, value in (("jpeg", eps), ("png", eps), ("list[jpeg]", b"\0" * 4 + counts + eps)):
        with pytest.raises(StoreError, match="cannot identify image file"):
            decode(encoding, value, "here")
    assert not started.exists()


def test_an_image_larger_than_its_bytes_takes_no_memory() -> None:
    header = np.array([60_000, 60_000, 3], "<u4").tobytes()
    with pytest.raises(
        StoreError, match="no pil: an image 60000 pixels wide x 60000 high; copy the shard again"
    ):
        decode("pil", header + b"RGB" + bytes(99), "here")


def test_both_names_of_arrays_of_jpegs(tmp_path: Path) -> None:
    from PIL import Image

    image = Image.new("RGB", (8, 4), (200, 10, 10))
    stream = io.BytesIO()
    image.save(stream, "JPEG")
    for encoding in ("jpeg_array", "jpegarray"):
        columns = {"tokens": "ndarray:uint16", "images": encoding}
        with streaming.MDSWriter(out=str(tmp_path / encoding), columns=columns) as writer:
            writer.write({"tokens": np.arange(3, dtype=np.uint16), "images": [stream.getvalue()] * 2})
        with mf.open(tmp_path / encoding) as store:
            assert isinstance(store, MDSStore)
            assert [each.size for each in store[0]["images"]] == [(8, 4)] * 2
