"""Other formats into token stores: documents, tokens and columns as plain lists, and other people's readers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.datasets.indexed_dataset import IndexedDataset

import lit
import meshfeed as mf
import mosaic
from meshfeed.cli.main import main
from meshfeed.errors import StoreError
from meshfeed.files.sums import BLOCK_BYTES
from meshfeed.prepare import convert as module
from meshfeed.prepare.convert import Conversion
from meshfeed.testing import assert_store
from pictures import write_pictures
from services.needs import needs
from services.nginx import Nginx
from soak import cases, some

DTYPES = ("uint8", "int8", "int16", "uint16", "int32", "int64")
Documents = Sequence[Sequence[int]]


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many batches of few documents."""
    monkeypatch.setattr(module, "BATCH_TOKENS", 100)


def convert(source: Path, target: Path, **options: Any) -> dict[str, Any]:
    conversion = Conversion(mf.open(source, column=options.pop("column", None)), target, **options)
    assert list(conversion.run())[-1:] in ([1.0], [])
    return conversion.facts()


def tokens_in(prefix: Path) -> list[list[int]]:
    """All documents of a .bin/.idx pair, as Megatron reads them."""
    dataset = IndexedDataset(str(prefix), mmap=prefix.with_suffix(".bin").stat().st_size > 0)
    return [dataset[i].tolist() for i in range(len(dataset))]


def documents_of(seed: int = 0, count: int = 60, most: int = 60_000) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    sizes = [0, *rng.integers(0, 40, count).tolist(), 300, 256, 255, 1, 0]
    return [rng.integers(0, most, size).tolist() for size in sizes]


def indexed(path: Path, documents: Documents, dtype: str = "uint16") -> Path:
    with mf.IndexedWriter(path, dtype) as writer:
        for document in documents:
            writer.add_document(np.array(document, dtype))
    return path


def mds(path: Path, documents: Documents, dtype: str = "uint16") -> Path:
    """Their writer takes no array without elements, so none of the documents may be empty."""
    samples = [{"tokens": np.array(document, dtype)} for document in documents]
    return mosaic.written(path, {"tokens": f"ndarray:{dtype}"}, samples, size_limit=1 << 12)


def parquet(path: Path, documents: Documents, dtype: str = "uint16") -> Path:
    tokens = pa.array(documents, pa.list_(pa.from_numpy_dtype(np.dtype(dtype))))
    pq.write_table(pa.table({"tokens": tokens}), path.with_suffix(".parquet"), row_group_size=20)
    return path.with_suffix(".parquet")


def jsonl(path: Path, documents: Documents, dtype: str = "uint16") -> Path:
    lines = [json.dumps({"tokens": document, "url": "far"}) + "\n" for document in documents]
    path.with_suffix(".jsonl").write_text("".join(lines))
    return path.with_suffix(".jsonl")


def litdata(path: Path, documents: Documents, dtype: str = "uint16") -> Path:
    return lit.written(path, [{"tokens": np.array(document, dtype)} for document in documents])


SOURCES: Mapping[str, Callable[[Path, Documents], Path]] = {
    "indexed": indexed, "mds": mds, "parquet": parquet, "jsonl": jsonl, "litdata": litdata
}  # fmt: skip


# -- every format ---------------------------------------------------------------------------------------


@settings(max_examples=cases(15), deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30) | st.sampled_from([255, 256, 400]), min_size=1, max_size=12),
    dtype=st.sampled_from(DTYPES),
)
def test_mds_gives_the_pair_that_was_written_at_once(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], dtype: str
) -> None:
    folder = tmp_path_factory.mktemp("way")
    rng = np.random.default_rng(sum(lengths))
    documents = [rng.integers(0, np.iinfo(dtype).max, n, endpoint=True).tolist() for n in lengths]
    facts = convert(mds(folder / "from", documents, dtype), folder / "to")
    assert (facts["num_documents"], facts["num_tokens"]) == (len(lengths), sum(lengths))
    indexed(folder / "expected", documents, dtype)
    for suffix in (".bin", ".idx", ".sums"):
        assert (folder / f"to{suffix}").read_bytes() == (folder / f"expected{suffix}").read_bytes()
    convert(folder / "to", folder / "again" / "to")
    assert tokens_in(folder / "again" / "to") == documents


@some(2)
@pytest.mark.parametrize("source", SOURCES)
def test_every_format_is_read_and_trained_on(tmp_path: Path, source: str) -> None:
    documents = [each for each in documents_of() if each or source != "mds"]
    path = SOURCES[source](tmp_path / "from", documents)
    target = tmp_path / "made" / "on the way" / "store"
    assert convert(path, target)["columns"] == {"tokens": "ndarray:uint16"}
    assert tokens_in(target) == documents
    store = mf.open(target, cache=tmp_path / "cache")
    assert_store(store, [np.array(document, "uint16") for document in documents])
    assert list(store.verify())[-1] == 1
    fed: list[torch.Tensor] = []
    for each in (path, target):
        recipe = mf.Recipe(
            data=mf.open(each, cache=tmp_path / "cache"),
            sequence=mf.Windows(16),
            batch=mf.Batch(sequences=4),
            shuffle="none",
            epochs=1,
        )
        with mf.Feed(recipe) as feed:
            fed.append(torch.cat([m["tokens"] for step in feed for m in step.microbatches]))
    assert torch.equal(*fed) and fed[0].numel()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=f"{tmp_path / 'file'}: "):
        convert(indexed(tmp_path / "from", [[1, 2]]), tmp_path / "file" / "to")


def test_no_document_at_all(tmp_path: Path) -> None:
    for source in (indexed(tmp_path / "from", []), parquet(tmp_path / "from", [])):
        target = tmp_path / f"{source.name}-to"
        assert convert(source, target.with_suffix(""), overwrite=True)["num_documents"] == 0
        assert tokens_in(target.with_suffix("")) == []


def test_a_store_that_is_no_stream_becomes_one(tmp_path: Path) -> None:
    """Sequences that lie in the .bin in another order than in the index."""
    documents = documents_of()
    indexed(tmp_path / "from", documents)
    raw = (tmp_path / "from.bin").read_bytes()
    idx, count = bytearray((tmp_path / "from.idx").read_bytes()), len(documents)
    at = 34 + 4 * count
    pointers = np.frombuffer(idx[at : at + 8 * count], "<i8")
    idx[at : at + 8 * count] = (pointers + 2).astype("<i8").tobytes()  # a token that is nobody's comes first
    (tmp_path / "from.idx").write_bytes(idx)
    (tmp_path / "from.bin").write_bytes(b"\0\0" + raw)
    (tmp_path / "from.sums").unlink()
    convert(tmp_path / "from", tmp_path / "to")
    assert tokens_in(tmp_path / "to") == documents and mf.open(tmp_path / "to").facts()["is_stream"]


# -- columns beside the tokens --------------------------------------------------------------------------


def test_columns_of_every_token_are_carried(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    dtypes = {"tokens": "uint16", "loss_mask": "uint8", "weight": "float64"}
    documents = [
        {
            "tokens": np.array(document, "uint16"),
            "loss_mask": rng.integers(0, 2, len(document)).astype("uint8"),
            "weight": rng.random(len(document)),
        }
        for document in documents_of(5)
        if document
    ]
    with mf.DatasetWriter(tmp_path / "expected", dtypes) as writer:
        for document in documents:
            writer.add_document(**document)
    columns = {name: f"ndarray:{dtype}" for name, dtype in dtypes.items()}
    mosaic.written(tmp_path / "mds", columns, documents)
    for source in ("expected", "mds"):
        facts = convert(tmp_path / source, tmp_path / f"{source}-to")
        assert facts["columns"] == columns
        files = list((tmp_path / f"{source}-to").iterdir())
        assert facts["size_bytes"] == sum(path.stat().st_size for path in files)
        for path in files:
            if path.suffix != ".json":
                assert path.read_bytes() == (tmp_path / "expected" / path.name).read_bytes(), path.name
    lit.written(tmp_path / "lit", documents)
    with pytest.raises(
        StoreError, match=r"column 'weight' is of dtype 10; tokens are integers.*--drop weight"
    ):
        convert(tmp_path / "lit", tmp_path / "lit-to")
    convert(tmp_path / "lit", tmp_path / "lit-to", drop=["weight"])
    for name in ("tokens", "loss_mask"):
        made = (tmp_path / "lit-to" / f"{name}.bin").read_bytes()
        assert made == (tmp_path / "expected" / f"{name}.bin").read_bytes()
    convert(tmp_path / "mds", tmp_path / "alone", drop=["loss_mask", "weight"])
    assert tokens_in(tmp_path / "alone") == [each["tokens"].tolist() for each in documents]


def test_values_of_documents_are_copied_where_they_stay_true(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target, pair = (str(tmp_path / name) for name in ("from", "to", "pair"))
    with mf.DatasetWriter(source, {"tokens": "uint16", "loss_mask": "uint8"}) as writer:
        for length in (4, 0, 6):
            writer.add_document(
                tokens=np.arange(length, dtype=np.uint16), loss_mask=np.ones(length, np.uint8)
            )
    Path(source, "license.values").write_text("MIT\n\nCC0\n")
    np.save(Path(source, "origins.npy"), np.zeros((3, 1), np.int64))
    assert main(["convert", source, target]) == 0
    told = capsys.readouterr().out
    assert "copied license.values\nnot copied: origins.npy; " in told
    assert (
        main(
            [
                "audit",
                target,
                "--sequences",
                "1",
                "--window",
                "4",
                "--until",
                "1",
                "--by",
                "license",
                "--json",
            ]
        )
        == 0
    )
    assert {each["value"] for each in json.loads(capsys.readouterr().out)["by"]} <= {"MIT", "", "CC0"}
    assert main(["convert", source, pair, "--drop", "loss_mask", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["copied"], facts["not_copied"]) == ([], ["license.values", "origins.npy"])
    assert sorted(os.listdir(tmp_path)) == ["from", "pair.bin", "pair.idx", "pair.sums", "to"]
    # values of the store that is replaced would be taken for the new one's
    Path(source, "license.values").unlink()
    before = sorted(os.listdir(target))
    assert main(["convert", source, target, "--overwrite"]) == 2
    assert "to/license.values: belongs to another store" in capsys.readouterr().err
    assert sorted(os.listdir(target)) == before


def test_columns_of_parquet(tmp_path: Path) -> None:
    lists = [[1, 2], [], [3], [2**31]]
    for number, kind in enumerate((pa.list_(pa.int64()), pa.large_list(pa.uint32()), pa.list_(pa.uint64()))):
        table = {
            "input_ids": pa.array(lists, kind),
            "mask": pa.array([[1, 0], [], [1], [0]], pa.list_(pa.int8())),
        }
        source = tmp_path / f"{number}.parquet"
        pq.write_table(pa.table(table), source, row_group_size=3)
        target = tmp_path / str(number)
        columns = {"tokens": "ndarray:int64", "mask": "ndarray:uint16"}
        assert convert(source, target)["columns"] == columns
        store = mf.open(target)
        assert_store(store, [np.array(each, "int64") for each in lists])
        with store.columns["mask"] as mask:
            assert mask.read(0, 0, 2).tolist() == [1, 0]


def test_columns_of_other_lengths_are_no_columns_of_tokens(tmp_path: Path) -> None:
    table = {"tokens": [[1, 2], [3], [4]], "weight": [[1, 2], [3, 4], []]}
    lists = pa.list_(pa.int32())
    pq.write_table(
        pa.table({name: pa.array(rows, lists) for name, rows in table.items()}), tmp_path / "p.parquet"
    )
    with pytest.raises(StoreError, match=r"document 1: weight and tokens differ in length; .*--drop weight"):
        convert(tmp_path / "p.parquet", tmp_path / "m")
    convert(tmp_path / "p.parquet", tmp_path / "n", drop=["weight"])
    assert tokens_in(tmp_path / "n") == table["tokens"]


# -- what a token store cannot hold ---------------------------------------------------------------------


def test_modes_and_sequences_are_not_lost_unasked(tmp_path: Path) -> None:
    with mf.IndexedWriter(tmp_path / "several", "u2", modes=True) as writer:
        writer.add_sequence([1, 2], mode=1)
        writer.add_sequence([3])
        writer.end_document()
        writer.end_document()
        writer.add_sequence([4])
        writer.end_document()
    target = tmp_path / "to"
    with pytest.raises(StoreError, match=r"has a mode for each sequence, .* allow it by --drop modes"):
        convert(tmp_path / "several", target)
    with pytest.raises(StoreError, match=r"no 'mode' to drop; there is modes"):
        convert(tmp_path / "several", target, drop=["mode"])
    with pytest.raises(StoreError, match=r"has documents of several sequences, .*--drop sequences"):
        convert(tmp_path / "several", target, drop=["modes"])
    assert not target.with_suffix(".idx").exists()
    convert(tmp_path / "several", target, drop=["modes", "sequences"])
    assert tokens_in(target) == [[1, 2, 3], [], [4]]


def test_pictures_text_and_json_are_refused_and_dropped(tmp_path: Path) -> None:
    from PIL import Image

    columns = {"tokens": "ndarray:uint32", "meta": "json", "picture": "png", "url": "str"}
    samples = [
        {
            "tokens": np.arange(1 + i, dtype="u4"),
            "meta": {"i": i},
            "picture": Image.fromarray(np.zeros((4, 5, 3), np.uint8)),
            "url": "far",
        }
        for i in range(3)
    ]
    mosaic.written(tmp_path / "m", columns, samples)
    drop: list[str] = []
    for name, kind in (("meta", "json"), ("picture", "png"), ("url", "str")):
        with pytest.raises(StoreError, match=f"column '{name}' is {kind}.*--drop {name}"):
            convert(tmp_path / "m", tmp_path / "b", drop=drop)
        drop.append(name)
    with pytest.raises(StoreError, match=r"dtype uint32 has no code in this format; use"):
        convert(tmp_path / "m", tmp_path / "b", drop=drop)
    convert(tmp_path / "m", tmp_path / "b", drop=drop, dtype="int32")
    assert tokens_in(tmp_path / "b") == [[0], [0, 1], [0, 1, 2]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.bin", "b.idx", "b.sums", "m"]


@pytest.mark.parametrize(
    ("dtype", "tokens", "said"),
    [
        ("uint8", [1, 300], r"document 2\): token 1 is 300, which uint8 cannot hold; choose a wider dtype"),
        ("uint16", [1, -1], r"document 2\): token 1 is -1, which uint16 cannot hold"),
    ],
)
def test_tokens_that_do_not_fit(tmp_path: Path, dtype: str, tokens: list[int], said: str) -> None:
    indexed(tmp_path / "from", [[1], [], tokens], "int32")
    with pytest.raises(StoreError, match=said):
        convert(tmp_path / "from", tmp_path / "to", dtype=dtype)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["from.bin", "from.idx", "from.sums"]


def test_rows_that_are_no_documents(tmp_path: Path) -> None:
    def table(values: Any, kind: Any, **more: Any) -> None:
        pq.write_table(pa.table({"tokens": pa.array(values, kind)} | more), tmp_path / "p.parquet")

    table([[1], None], pa.list_(pa.int32()))
    with pytest.raises(StoreError, match=r"row 1 .*null where a list of tokens belongs"):
        convert(tmp_path / "p.parquet", tmp_path / "m")
    table(["a"], pa.string())
    with pytest.raises(StoreError, match=r"column 'tokens' is string, where lists of whole numbers belong"):
        convert(tmp_path / "p.parquet", tmp_path / "m")
    table([[1]], pa.list_(pa.int32()), input_ids=[[2]], made=pa.array([0], pa.timestamp("ms")))
    with pytest.raises(StoreError, match=r"another column is called 'tokens'.* --drop tokens"):
        convert(tmp_path / "p.parquet", tmp_path / "m", column="input_ids")
    with pytest.raises(StoreError, match=r"column 'made' is timestamp\[ms\].*--drop made"):
        convert(tmp_path / "p.parquet", tmp_path / "m", column="input_ids", drop=["tokens"])
    convert(tmp_path / "p.parquet", tmp_path / "m", column="input_ids", drop=["tokens", "made"])
    assert tokens_in(tmp_path / "m") == [[2]]


# -- what is there already, and kills --------------------------------------------------------------------------


def test_what_exists_is_kept_unless_told_otherwise(tmp_path: Path) -> None:
    indexed(tmp_path / "old", [[1, 2]])
    indexed(tmp_path / "new", [[3]] * 500)
    target = tmp_path / "to"
    convert(tmp_path / "old", target)
    with pytest.raises(StoreError, match="exists already"):
        convert(tmp_path / "new", target)
    assert tokens_in(target) == [[1, 2]]
    with pytest.raises(StoreError, match="is the source; write"):
        convert(target, target, overwrite=True)
    before = sorted(path.name for path in tmp_path.iterdir())
    convert(tmp_path / "new", target, overwrite=True)
    assert tokens_in(target) == [[3]] * 500
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_conversion_left_half_way_leaves_nothing(tmp_path: Path) -> None:
    indexed(tmp_path / "from", documents_of())
    before = sorted(path.name for path in tmp_path.iterdir())
    run = Conversion(mf.open(tmp_path / "from"), tmp_path / "to").run()
    assert 0 < next(run) < 1
    assert len(list(tmp_path.iterdir())) > len(before)
    run.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == before


KILLED = """
import sys
from meshfeed.prepare import convert
import meshfeed as mf
convert.BATCH_TOKENS = 100
run = convert.Conversion(mf.open(sys.argv[1]), sys.argv[2]).run()
for _ in range(5):
    next(run)
print("half-way", flush=True)
sys.stdin.read()
"""


def test_a_killed_conversion_is_not_taken_for_a_whole_one(tmp_path: Path) -> None:
    documents = documents_of()
    indexed(tmp_path / "from", documents)
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path / "from"), str(tmp_path / "to")],
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
    assert [path for path in tmp_path.iterdir() if path.suffix == ".tmp"]
    with pytest.raises(StoreError):
        mf.open(tmp_path / "to")
    convert(tmp_path / "from", tmp_path / "to")
    assert tokens_in(tmp_path / "to") == documents


# -- from far away, and large ----------------------------------------------------------------------------------


def test_from_far_away(tmp_path: Path) -> None:
    needs("nginx")
    documents = [each for each in documents_of() if each]
    (tmp_path / "www").mkdir()
    for name in ("indexed", "mds", "parquet"):
        path = SOURCES[name](tmp_path / "www" / name, documents)
        with Nginx(tmp_path / "www") as server:
            cache = mf.Cache(tmp_path / f"far-{name}", block_bytes=4096)
            store = mf.open(f"{server.url}/{path.name}", cache=cache)
            assert list(Conversion(store, tmp_path / name).run())[-1] == 1.0
        assert tokens_in(tmp_path / name) == documents


def test_memory_does_not_grow_with_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BATCH_TOKENS", 4000)
    peaks: list[int] = []
    for number, count in enumerate((1, 1500, 4500)):  # the first imports what is wanted
        indexed(tmp_path / str(number), [range(500)] * count)
        run = Conversion(mf.open(tmp_path / str(number)), tmp_path / f"{number}-to").run()
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
    source = str(mds(tmp_path / "from", [[7], *([1, 2, 3] * 30 for _ in range(65))]))
    assert main(["convert", source, str(tmp_path / "b.bin"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts.pop("elapsed_s") >= 0
    assert facts == {
        "source": source,
        "destination": str(tmp_path / "b"),
        "format": "megatron",
        "num_documents": 66,
        "num_tokens": 1 + 65 * 90,
        "columns": {"tokens": "ndarray:uint16"},
        "dropped": [],
        "copied": [],
        "not_copied": [],
        "size_bytes": sum((tmp_path / f"b.{end}").stat().st_size for end in ("bin", "idx", "sums")),
    }
    assert main(["convert", source, str(tmp_path / "c"), "--dtype", "int32"]) == 0
    assert "66 documents" in capsys.readouterr().out
    assert main(["convert", source, str(tmp_path / "c.parquet")]) == 2
    assert "pyarrow writes that" in capsys.readouterr().err
    assert main(["convert", source, "s3://bucket/c"]) == 2
    assert "a path of this machine" in capsys.readouterr().err
    assert "c.parquet" not in os.listdir(tmp_path)


def test_parts_would_be_lost(tmp_path: Path) -> None:
    write_pictures(tmp_path / "d")
    with pytest.raises(StoreError, match=r"has images, audio or video, which would be lost; .*--drop parts"):
        list(Conversion(mf.open(tmp_path / "d"), tmp_path / "c").run())
    list(Conversion(mf.open(tmp_path / "d"), tmp_path / "c", drop=["parts"]).run())
    with mf.open(tmp_path / "d") as store:
        texts = [store.read(at, 0, int(size)) for at, size in enumerate(store.lengths(np.arange(len(store))))]
    assert_store(mf.open(tmp_path / "c"), texts)
