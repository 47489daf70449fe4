"""One format into another and back: documents, tokens and columns as plain lists, and other people's readers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshfeed as mf
import mosaic
from meshfeed.cli.main import main
from meshfeed.errors import StoreError
from meshfeed.files.sums import BLOCK_BYTES
from meshfeed.prepare import convert_read
from meshfeed.prepare.convert import Conversion
from meshfeed.store.mds_writer import MDSWriter
from services.needs import needs
from services.nginx import Nginx
from soak import cases
from streams import check_tokens

streaming = mosaic.imported()

FORMATS = ("megatron", "mds", "parquet")
PAIRS = [(a, b) for a in FORMATS for b in FORMATS if a != b]
DTYPES = ("uint8", "int8", "int16", "uint16", "int32", "int64")


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many batches of few documents."""
    monkeypatch.setattr(convert_read, "BATCH_TOKENS", 100)


def place(folder: Path, to: str) -> Path:
    return folder / {"megatron": "store", "mds": "store-mds", "parquet": "store.parquet"}[to]


def convert(source: Path, target: Path, to: str, **options: Any) -> dict[str, Any]:
    given = {name: options.pop(name) for name in ("column",) if name in options}
    conversion = Conversion(mf.open(source, **given), target, to=to, **options)
    assert list(conversion.run())[-1:] in ([1.0], [])
    return conversion.facts()


def tokens_in(path: Path, to: str) -> list[list[int]]:
    """All documents, by other people's readers where there are any for this machine."""
    if to == "parquet":
        return pq.read_table(path).column("tokens").to_pylist()
    if to == "mds":
        dataset = streaming.LocalDataset(local=str(path))
        return [dataset[i]["tokens"].tolist() for i in range(len(dataset))]
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(path), mmap=path.with_suffix(".bin").stat().st_size > 0)
    return [dataset[i].tolist() for i in range(len(dataset))]


def dtype_in(path: Path, to: str) -> np.dtype[Any]:
    if to != "parquet":
        return mf.open(path).dtype
    return np.dtype(pq.read_schema(path).field("tokens").type.value_type.to_pandas_dtype())


def write(path: Path, documents: Sequence[Sequence[int]], dtype: str) -> Path:
    with mf.IndexedWriter(path, dtype) as writer:
        for document in documents:
            writer.add_document(np.array(document, dtype))
    return path


def documents_of(seed: int = 0, count: int = 60, most: int = 60_000) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    sizes = [0, *rng.integers(0, 40, count).tolist(), 300, 256, 255, 1, 0]
    return [rng.integers(0, most, size).tolist() for size in sizes]


# -- every direction ------------------------------------------------------------------------------------


@settings(max_examples=cases(15), deadline=None)
@given(
    lengths=st.lists(st.integers(0, 30) | st.sampled_from([255, 256, 400]), min_size=1, max_size=12),
    dtype=st.sampled_from(DTYPES),
    way=st.permutations(FORMATS),
)
def test_any_way_through_the_formats_changes_nothing(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], dtype: str, way: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("way")
    rng = np.random.default_rng(sum(lengths))
    documents = [rng.integers(0, np.iinfo(dtype).max, n, endpoint=True).tolist() for n in lengths]
    path = write(folder / "from", documents, dtype)
    for step, to in enumerate([*way, "megatron"]):
        (folder / str(step)).mkdir()
        target = place(folder / str(step), to)
        facts = convert(path, target, to)
        assert (facts["num_documents"], facts["num_tokens"]) == (len(lengths), sum(lengths))
        assert tokens_in(target, to) == documents, to
        assert dtype_in(target, to) == dtype, to
        path = target
    for suffix in (".bin", ".idx"):
        assert path.with_suffix(suffix).read_bytes() == (folder / "from").with_suffix(suffix).read_bytes()


@pytest.mark.parametrize(("source", "to"), PAIRS)
def test_our_reader_reads_it_and_trains_on_it(tmp_path: Path, source: str, to: str) -> None:
    documents = documents_of()
    path = write(tmp_path / "from", documents, "uint16")
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    if source != "megatron":
        convert(path, place(tmp_path / "a", source), source)
        path = place(tmp_path / "a", source)
    target = place(tmp_path / "b", to)
    convert(path, target, to)
    store = mf.open(target, cache=tmp_path / "cache")
    check_tokens(store, [np.array(document, "uint16") for document in documents])
    assert list(store.verify())[-1] == 1
    fed = []
    for each in (tmp_path / "from", target):
        recipe = mf.Recipe(
            data=mf.open(each), sequence=mf.Windows(16), batch=mf.Batch(sequences=4), shuffle="none", epochs=1
        )
        fed.append(
            [row for step in mf.Feed(recipe) for m in step.microbatches for row in m["tokens"].tolist()]
        )
    assert fed[0] == fed[1] and fed[0]


@pytest.mark.parametrize("to", FORMATS)
def test_folders_on_the_way_are_made_or_the_one_that_cannot_be_is_named(tmp_path: Path, to: str) -> None:
    path = write(tmp_path / "from", [[1, 2]], "uint16")
    target = place(tmp_path / "a" / "b", to)
    convert(path, target, to)
    assert tokens_in(target, to) == [[1, 2]]
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=f"{tmp_path / 'file'}: "):
        convert(path, place(tmp_path / "file", to), to)


def test_no_document_at_all(tmp_path: Path) -> None:
    write(tmp_path / "from", [], "uint16")
    for to in ("parquet", "mds"):
        target = place(tmp_path, to)
        assert convert(tmp_path / "from", target, to)["num_documents"] == 0
    assert pq.read_table(tmp_path / "store.parquet").num_rows == 0
    convert(tmp_path / "store.parquet", tmp_path / "back", "megatron")
    assert (tmp_path / "back.idx").read_bytes() == (tmp_path / "from.idx").read_bytes()


# -- MDS, as MosaicML Streaming writes it ------------------------------------------------------------------


@pytest.mark.parametrize("hashes", [[], ["sha1", "xxh64"]])
@pytest.mark.parametrize("shard_bytes", [2000, 1 << 14, 1 << 26])
def test_mds_equals_theirs_byte_for_byte(tmp_path: Path, hashes: list[str], shard_bytes: int) -> None:
    rng = np.random.default_rng(3)
    columns = {
        "tokens": "ndarray:uint16",
        "name": "str",
        "n": "int",
        "f": "float32",
        "raw": "bytes",
        "b": "uint8",
    }
    samples = [
        {
            "tokens": rng.integers(0, 60_000, int(size)).astype("uint16"),
            "name": f"größe {i}",
            "n": -i,
            "f": np.float32(i / 3),
            "raw": bytes(i % 5),
            "b": np.uint8(i),
        }
        for i, size in enumerate(rng.integers(1, 700, 100))
    ]
    for made in (
        streaming.MDSWriter(
            out=str(tmp_path / "theirs"), columns=columns, hashes=hashes, size_limit=shard_bytes
        ),
        MDSWriter(tmp_path / "ours", columns, hashes=hashes, shard_bytes=shard_bytes),
    ):
        with made as writer:
            for sample in samples:
                (writer.add_sample if isinstance(writer, MDSWriter) else writer.write)(sample)
    theirs = {path.name: path.read_bytes() for path in (tmp_path / "theirs").iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "ours").iterdir()} == theirs
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours", "theirs"]


@pytest.mark.parametrize(
    ("sample", "said"),
    [
        ({"tokens": [1]}, r"sample 1 has columns \['tokens'\], where \['n', 'tokens'\] belong"),
        ({"tokens": [[1]], "n": 1}, r"sample 1, column 'tokens': shape \(1, 1\)"),
        ({"tokens": [70_000], "n": 1}, "int64 values that uint16 cannot hold"),
        ({"tokens": ["a"], "n": 1}, "<U1 where numbers belong"),
        ({"tokens": [1], "n": 1.5}, "column 'n': float64 values that int64 cannot hold"),
    ],
)
def test_mds_refuses_what_it_cannot_hold(tmp_path: Path, sample: dict[str, Any], said: str) -> None:
    with (
        pytest.raises(StoreError, match=said),
        MDSWriter(tmp_path / "mds", {"tokens": "ndarray:uint16", "n": "int"}) as writer,
    ):
        writer.add_sample({"tokens": [65_535, 0], "n": 1})
        writer.add_sample(sample)
    assert not list(tmp_path.iterdir())


# -- columns beside the tokens --------------------------------------------------------------------------


def test_columns_of_every_token_go_through_all_formats(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    documents = documents_of(5)
    whole = [
        {"tokens": d, "loss_mask": rng.integers(0, 2, len(d)).tolist(), "weight": rng.random(len(d)).tolist()}
        for d in documents
    ]
    dtypes = {"tokens": "u2", "loss_mask": "u1", "weight": "f8"}
    with mf.DatasetWriter(tmp_path / "from", dtypes) as writer:
        for document in whole:
            writer.add_document(**{name: np.array(document[name], dtypes[name]) for name in dtypes})
    convert(tmp_path / "from", tmp_path / "m", "mds")
    convert(tmp_path / "m", tmp_path / "p.parquet", "parquet")
    convert(tmp_path / "p.parquet", tmp_path / "back", "megatron")
    assert pq.read_table(tmp_path / "p.parquet").to_pylist() == whole
    theirs = streaming.LocalDataset(local=str(tmp_path / "m"))
    assert [{name: theirs[i][name].tolist() for name in dtypes} for i in range(len(theirs))] == whole
    for path in (tmp_path / "from").iterdir():
        if path.name != "dataset.json":
            assert (tmp_path / "back" / path.name).read_bytes() == path.read_bytes(), path.name
    assert mf.open(tmp_path / "back").facts() == mf.open(tmp_path / "from").facts()
    convert(tmp_path / "m", tmp_path / "alone", "megatron", drop=["loss_mask", "weight"])
    assert tokens_in(tmp_path / "alone", "megatron") == documents


def test_columns_of_other_lengths_are_no_columns_of_tokens(tmp_path: Path) -> None:
    table = {"tokens": [[1, 2], [3], [4]], "weight": [[1, 2], [3, 4], []]}
    lists = pa.list_(pa.int32())
    pq.write_table(
        pa.table({name: pa.array(rows, lists) for name, rows in table.items()}), tmp_path / "p.parquet"
    )
    with pytest.raises(StoreError, match=r"document 1: weight and tokens differ in length; .*--drop weight"):
        convert(tmp_path / "p.parquet", tmp_path / "m", "megatron")
    convert(tmp_path / "p.parquet", tmp_path / "m", "megatron", drop=["weight"])
    assert tokens_in(tmp_path / "m", "megatron") == table["tokens"]


def test_plain_columns_go_from_mds_to_parquet_and_back(tmp_path: Path) -> None:
    columns = {
        "ids": "ndarray:int32",
        "name": "str",
        "n": "int",
        "f": "float32",
        "raw": "bytes",
        "h": "uint16",
    }
    samples = [
        {
            "ids": np.arange(i % 7, dtype="i4"),
            "name": f"é{i}",
            "n": -i,
            "f": i / 3,
            "raw": bytes(i % 3),
            "h": i,
        }
        for i in range(40)
    ]
    samples = [sample | {"f": np.float32(sample["f"])} for sample in samples]
    with MDSWriter(tmp_path / "m", columns, shard_bytes=700) as writer:
        for sample in samples:
            writer.add_sample(sample)
    facts = convert(tmp_path / "m", tmp_path / "p.parquet", "parquet", column="ids")
    assert facts["columns"] == {
        "tokens": "ndarray:int32", "f": "float32", "h": "uint16", "n": "int", "name": "str", "raw": "bytes"
    }  # fmt: skip
    rows = pq.read_table(tmp_path / "p.parquet").to_pylist()
    told = [
        {"tokens": s["ids"].tolist()} | {k: s[k] for k in ("f", "h", "n", "name", "raw")} for s in samples
    ]
    assert rows == told
    convert(tmp_path / "p.parquet", tmp_path / "again", "mds")
    theirs = streaming.LocalDataset(local=str(tmp_path / "again"))
    assert [{**theirs[i], "tokens": theirs[i]["tokens"].tolist()} for i in range(len(theirs))] == told
    with pytest.raises(StoreError, match=r"column 'f' is float32, which megatron cannot hold: .*--drop f"):
        convert(tmp_path / "again", tmp_path / "b", "megatron")
    convert(tmp_path / "again", tmp_path / "b", "megatron", drop=["f", "h", "n", "name", "raw"])
    assert tokens_in(tmp_path / "b", "megatron") == [row["tokens"] for row in told]


def test_arrow_types_of_all_kinds(tmp_path: Path) -> None:
    lists = [[1, 2], [], [3], [2**31]]
    for number, kind in enumerate((pa.list_(pa.int64()), pa.large_list(pa.uint32()), pa.list_(pa.uint64()))):
        table = pa.table(
            {
                "input_ids": pa.array(lists, kind),
                "pair": pa.array([[1, 2]] * 4, pa.list_(pa.int16(), 2)),
                "kind": pa.array(["a", "b", "a", "b"]).dictionary_encode(),
                "big": pa.array([b"x"] * 4, pa.large_binary()),
            }
        )
        pq.write_table(table, tmp_path / f"{number}.parquet", row_group_size=3)
        convert(tmp_path / f"{number}.parquet", tmp_path / str(number), "mds")
        theirs = streaming.LocalDataset(local=str(tmp_path / str(number)))
        assert [theirs[i]["tokens"].tolist() for i in range(4)] == lists
        assert theirs[0]["tokens"].dtype.name == str(kind.value_type)
        assert [theirs[i]["kind"] for i in range(4)] == ["a", "b", "a", "b"]
        assert theirs[3]["pair"].tolist() == [1, 2] and theirs[3]["big"] == b"x"


# -- what another format cannot hold ------------------------------------------------------------------------


def test_what_would_be_lost_is_refused_by_name(tmp_path: Path) -> None:
    with mf.IndexedWriter(tmp_path / "several", "u2", modes=True) as writer:
        writer.add_sequence([1, 2], mode=1)
        writer.add_sequence([3])
        writer.end_document()
        writer.end_document()
        writer.add_sequence([4])
        writer.end_document()
    target = tmp_path / "p.parquet"
    with pytest.raises(StoreError, match=r"has a mode for each sequence, .* allow it by --drop modes"):
        convert(tmp_path / "several", target, "parquet")
    with pytest.raises(StoreError, match=r"no 'mode' to drop; there is modes"):
        convert(tmp_path / "several", target, "parquet", drop=["mode"])
    with pytest.raises(StoreError, match=r"has documents of several sequences, .*--drop sequences"):
        convert(tmp_path / "several", target, "parquet", drop=["modes"])
    assert not target.exists()
    convert(tmp_path / "several", target, "parquet", drop=["modes", "sequences"])
    assert tokens_in(target, "parquet") == [[1, 2, 3], [], [4]]


def test_pictures_and_json_are_refused_and_dropped(tmp_path: Path) -> None:
    columns = {"tokens": "ndarray:uint32", "meta": "json", "picture": "png", "grid": "ndarray:int16:2,3"}
    from PIL import Image

    picture = Image.fromarray(np.zeros((4, 5, 3), np.uint8))
    with streaming.MDSWriter(out=str(tmp_path / "m"), columns=columns) as writer:
        for i in range(3):
            sample = {"tokens": np.arange(1 + i, dtype="u4"), "meta": {"i": i}}
            writer.write(sample | {"picture": picture, "grid": np.zeros((2, 3), "i2")})
    drop: list[str] = []
    for name, kind in (("grid", "ndarray:int16:2,3"), ("meta", "json"), ("picture", "png")):
        for to in ("mds", "parquet"):
            with pytest.raises(
                StoreError, match=f"column '{name}' is {kind}, which {to} cannot hold.*--drop {name}"
            ):
                convert(tmp_path / "m", place(tmp_path, to), to, drop=drop)
        drop.append(name)
    with pytest.raises(StoreError, match=r"uint32 has no code in \.idx; name another by --dtype"):
        convert(tmp_path / "m", tmp_path / "b", "megatron", drop=drop)
    convert(tmp_path / "m", tmp_path / "b", "megatron", drop=drop, dtype="int32")
    assert tokens_in(tmp_path / "b", "megatron") == [[0], [0, 1], [0, 1, 2]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.bin", "b.idx", "b.sums", "m"]


@pytest.mark.parametrize(
    ("dtype", "to", "tokens", "said"),
    [
        (
            "uint8",
            None,
            [1, 300],
            "document 2 has the token 300, which uint8 cannot hold; take a wider dtype",
        ),
        ("uint16", None, [1, -1], "document 2 has the token -1, which uint16 cannot hold"),
        (None, "parquet", [1, -1], "document 2 has the token -1; tokens in Parquet are whole numbers from 0"),
        (
            "float32",
            "parquet",
            [1],
            "ndarray:float32, which parquet cannot hold: tokens in Parquet are whole",
        ),
    ],
)
def test_tokens_that_do_not_fit(
    tmp_path: Path, dtype: str | None, to: str | None, tokens: list[int], said: str
) -> None:
    write(tmp_path / "from", [[1], [], tokens], "int32")
    with pytest.raises(StoreError, match=said):
        convert(tmp_path / "from", place(tmp_path, to or "mds"), to or "mds", dtype=dtype)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["from.bin", "from.idx", "from.sums"]


def test_rows_that_are_no_documents(tmp_path: Path) -> None:
    def table(values: Any, kind: Any, **more: Any) -> None:
        pq.write_table(pa.table({"tokens": pa.array(values, kind)} | more), tmp_path / "p.parquet")

    table([[1], None], pa.list_(pa.int32()))
    with pytest.raises(StoreError, match=r"row 1, column 'tokens': a null"):
        convert(tmp_path / "p.parquet", tmp_path / "m", "mds")
    table([[1, 2], [], [3, None]], pa.list_(pa.int32()))
    with pytest.raises(StoreError, match=r"row 2, column 'tokens': a null"):
        convert(tmp_path / "p.parquet", tmp_path / "m", "mds")
    table(["a"], pa.string())
    with pytest.raises(StoreError, match=r"column 'tokens' is str, .*meshfeed prepare"):
        convert(tmp_path / "p.parquet", tmp_path / "m", "mds")
    table([[1]], pa.list_(pa.int32()), input_ids=[[2]], made=pa.array([0], pa.timestamp("ms")))
    with pytest.raises(StoreError, match=r"tokens from column 'input_ids', and another column is called"):
        convert(tmp_path / "p.parquet", tmp_path / "m", "mds", column="input_ids")
    with pytest.raises(StoreError, match=r"column 'made' is timestamp\[ms\], which mds cannot hold"):
        convert(tmp_path / "p.parquet", tmp_path / "m", "mds")
    (tmp_path / "d.jsonl").write_text('{"tokens": [1]}\n')
    with pytest.raises(StoreError, match=r"jsonl, 1 file; converted are .*meshfeed prepare"):
        convert(tmp_path / "d.jsonl", tmp_path / "m", "mds")


# -- what is there already, and kills --------------------------------------------------------------------------


@pytest.mark.parametrize("to", FORMATS)
def test_what_exists_is_kept_unless_told_otherwise(tmp_path: Path, to: str) -> None:
    write(tmp_path / "old", [[1, 2]], "uint16")
    write(tmp_path / "new", [[3]] * 500, "uint16")
    target = place(tmp_path, to)
    convert(tmp_path / "old", target, to)
    with pytest.raises(StoreError, match="exists already"):
        convert(tmp_path / "new", target, to)
    assert tokens_in(target, to) == [[1, 2]]
    with pytest.raises(StoreError, match="is what is read"):
        convert(target, target, to, overwrite=True)
    before = sorted(path.name for path in tmp_path.iterdir())
    convert(tmp_path / "new", target, to, overwrite=True)
    assert tokens_in(target, to) == [[3]] * 500
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_only_a_dataset_is_replaced_by_one(tmp_path: Path) -> None:
    write(tmp_path / "from", [[1]], "uint16")
    (tmp_path / "m").mkdir()
    convert(tmp_path / "from", tmp_path / "m", "mds")  # an empty folder is taken
    (tmp_path / "m" / "thesis.tex").write_text("mine")
    with pytest.raises(StoreError, match=r"thesis\.tex: belongs to no MDS dataset, and is not removed"):
        convert(tmp_path / "from", tmp_path / "m", "mds", overwrite=True)
    with mf.DatasetWriter(tmp_path / "d", {"tokens": "u2", "loss_mask": "u1"}) as writer:
        writer.add_document(tokens=[1], loss_mask=[1])
    with pytest.raises(StoreError, match=r"m: holds something that is no dataset"):
        convert(tmp_path / "d", tmp_path / "m", "megatron", overwrite=True)
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed" / "tokens.bin.0123abcd.tmp").write_text("half")
    convert(tmp_path / "d", tmp_path / "killed", "megatron")
    assert mf.open(tmp_path / "killed").fingerprint == mf.open(tmp_path / "d").fingerprint
    (tmp_path / "n").write_text("a file")
    with pytest.raises(StoreError, match="n: is no Parquet"):
        convert(tmp_path / "from", tmp_path / "n", "parquet", overwrite=True)
    with pytest.raises(StoreError, match="belongs to no MDS dataset"):
        convert(tmp_path / "from", tmp_path / "n", "mds", overwrite=True)
    assert (tmp_path / "m" / "thesis.tex").read_text() == "mine"


@pytest.mark.parametrize("to", FORMATS)
def test_a_conversion_left_half_way_leaves_nothing(tmp_path: Path, to: str) -> None:
    write(tmp_path / "from", documents_of(), "uint16")
    before = sorted(path.name for path in tmp_path.iterdir())
    run = Conversion(mf.open(tmp_path / "from"), place(tmp_path, to), to=to).run()
    assert 0 < next(run) < 1
    assert len(list(tmp_path.iterdir())) > len(before)
    run.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == before


KILLED = """
import sys
from meshfeed.prepare import convert_read
from meshfeed.prepare.convert import Conversion
import meshfeed as mf
convert_read.BATCH_TOKENS = 100
source, *targets = sys.argv[1:]
runs = [Conversion(mf.open(source), target, to=to).run() for target, to in zip(targets[::2], targets[1::2])]
for run in runs * 5:
    next(run)
print("half-way", flush=True)
sys.stdin.read()
"""


def test_a_killed_conversion_is_not_taken_for_a_whole_one(tmp_path: Path) -> None:
    documents = documents_of()
    write(tmp_path / "from", documents, "uint16")
    targets = [part for to in FORMATS for part in (str(place(tmp_path, to)), to)]
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path / "from"), *targets],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    watch = threading.Timer(120, process.kill)
    watch.start()
    assert process.stdout is not None
    told = process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    watch.cancel()
    assert told == "half-way\n"
    assert len([path for path in tmp_path.iterdir() if path.suffix == ".tmp"]) >= 4
    for to in FORMATS:
        target = place(tmp_path, to)
        with pytest.raises(StoreError):
            mf.open(target)
        convert(tmp_path / "from", target, to)
        assert tokens_in(target, to) == documents


# -- from far away, and large ----------------------------------------------------------------------------------


def test_from_far_away(tmp_path: Path) -> None:
    needs("nginx")
    documents = documents_of()
    (tmp_path / "www").mkdir()
    write(tmp_path / "www" / "store", documents, "uint16")
    for to in ("mds", "parquet"):
        convert(tmp_path / "www" / "store", place(tmp_path / "www", to), to)
    with Nginx(tmp_path / "www") as server:
        for source, to in PAIRS:
            store = mf.open(
                f"{server.url}/{place(tmp_path, source).name}",
                cache=mf.Cache(tmp_path / "far", block_bytes=4096),
            )
            target = place(tmp_path, to).with_stem(f"{source}-{to}")
            assert list(Conversion(store, target, to=to).run())[-1] == 1.0
            assert tokens_in(target, to) == documents


@pytest.mark.parametrize("to", ["megatron", "mds"])
def test_memory_does_not_grow_with_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    monkeypatch.setattr(convert_read, "BATCH_TOKENS", 4000)
    peaks: list[int] = []
    for number, count in enumerate((1, 1500, 4500)):  # the first imports what is wanted
        write(tmp_path / str(number), [range(500)] * count, "uint16")
        options: dict[str, Any] = {"shard_bytes": 1 << 16} if to == "mds" else {}
        run = Conversion(mf.open(tmp_path / str(number)), tmp_path / f"{number}-{to}", to=to, **options).run()
        tracemalloc.start()
        for _ in run:
            pass
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    more = (tmp_path / "2.bin").stat().st_size - (tmp_path / "1.bin").stat().st_size
    assert (tmp_path / "1.bin").stat().st_size > BLOCK_BYTES, "both hold a block that is compared"
    assert peaks[2] - peaks[1] < more / 10


# -- the command ---------------------------------------------------------------------------------------------


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "from", documents_of(), "uint16")
    source = str(tmp_path / "from")
    assert (
        main(["convert", source, str(tmp_path / "m"), "--to", "mds", "--shard-bytes", "4096", "--json"]) == 0
    )
    facts = json.loads(capsys.readouterr().out)
    sizes = [path.stat().st_size for path in (tmp_path / "m").iterdir()]
    assert facts.pop("elapsed_s") >= 0
    assert facts == {
        "source": source,
        "destination": str(tmp_path / "m"),
        "format": "mds",
        "num_documents": 66,
        "num_tokens": sum(map(len, documents_of())),
        "columns": {"tokens": "ndarray:uint16"},
        "dropped": [],
        "size_bytes": sum(sizes),
    }
    assert len(sizes) > 2 and max(sizes) <= 4096
    assert main(["convert", str(tmp_path / "m"), str(tmp_path / "b.bin")]) == 0  # the suffix says it
    assert "66 documents" in capsys.readouterr().out
    assert (tmp_path / "b.idx").read_bytes() == (tmp_path / "from.idx").read_bytes()
    assert main(["convert", source, str(tmp_path / "c")]) == 2
    assert "name one of megatron, mds, parquet by --to" in capsys.readouterr().err
    assert main(["convert", source, str(tmp_path / "c.parquet"), "--shard-bytes", "9"]) == 2
    assert "says nothing about parquet" in capsys.readouterr().err
    assert main(["convert", source, "s3://bucket/c.parquet"]) == 2
    assert "a path of this machine" in capsys.readouterr().err
    with pytest.raises(StoreError, match=r"dtype 'float99': "):
        convert(tmp_path / "from", tmp_path / "c", "mds", dtype="float99")
    assert os.listdir(tmp_path).count("c") == 0
