"""Documents in JSONL, Parquet and Arrow: the same stream as a .bin/.idx of the same tokens, wherever the files lie."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

import meshfeed as mf
from meshfeed.errors import ChangedError, MissingError, OptionError, StoreError
from meshfeed.files import LocalFile
from meshfeed.formats import jsonl, parquet
from meshfeed.store import IndexedWriter, open_store
from services.needs import needs
from services.nginx import Nginx
from soak import cases, some

LENGTHS = [0, 5, 0, 0, 130, 1, 40, 77, 0, 3, 250, 60, 2, 0, 88, 31, 9, 64, 5, 0]
TEXTS = ["", "plain words", "ünïcödé ☃ 🎉", "", "a b c d", 'quote " and \\ and \n newline', "x" * 300]

Writer = Callable[[Path, str, list[Any]], Path]


def write_jsonl(path: Path, column: str, values: list[Any]) -> Path:
    lines = [json.dumps({"id": i, column: value}, ensure_ascii=i % 2 == 0) for i, value in enumerate(values)]
    path.with_suffix(".jsonl").write_bytes("\n \r\n".join(lines).encode())  # no newline at the end
    return path.with_suffix(".jsonl")


def write_parquet(path: Path, column: str, values: list[Any]) -> Path:
    kind = pa.string() if values and all(isinstance(value, str) for value in values) else pa.list_(pa.int32())
    table = pa.table({"id": list(range(len(values))), column: pa.array(values, kind)})
    pq.write_table(table, path.with_suffix(".parquet"), row_group_size=3)
    return path.with_suffix(".parquet")


def write_arrow(path: Path, column: str, values: list[Any]) -> Path:
    is_text = values and all(isinstance(value, str) for value in values)
    kind = pa.large_string() if is_text else pa.large_list(pa.uint16())
    table = pa.table({"id": list(range(len(values))), column: pa.array(values, kind)})
    with pa.ipc.new_stream(str(path.with_suffix(".arrow")), table.schema) as writer:
        writer.write_table(table, max_chunksize=3)
    return path.with_suffix(".arrow")


WRITERS: list[Writer] = [write_jsonl, write_parquet, write_arrow]
formats = pytest.mark.parametrize("write", WRITERS, ids=["jsonl", "parquet", "arrow"])


@pytest.fixture(scope="module")
def documents() -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, 60_000, n).tolist() for n in LENGTHS]


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Spans and steps that cut lines and files many times over."""
    monkeypatch.setattr(jsonl, "_SPAN_BYTES", 97)
    monkeypatch.setattr(jsonl, "_STEP_BYTES", 41)
    monkeypatch.setattr(jsonl, "_LINES_TOGETHER", 3)
    monkeypatch.setattr(parquet, "_SPAN_BYTES", 1)
    monkeypatch.setenv("MESHFEED_CACHE", str(tmp_path / "cache"))


def write_indexed(path: Path, documents: list[list[int]], dtype: str = "u2") -> Any:
    with IndexedWriter(path, dtype) as writer:
        for tokens in documents:
            writer.add_document(np.array(tokens, dtype))
    return open_store(path)


def assert_same(store: Any, expected: Any) -> None:
    rng = np.random.default_rng(0)
    everything = np.arange(expected.num_documents)
    with store, expected:
        assert (store.num_documents, store.num_tokens) == (expected.num_documents, expected.num_tokens)
        for name in ("lengths", "offsets"):
            assert np.array_equal(getattr(store, name)(everything), getattr(expected, name)(everything))
        for _ in range(20):
            ranges = np.sort(rng.integers(0, store.num_tokens + 1, (5, 2)))
            begins, ends = ranges.T.copy()
            store.will_need(begins, ends)
            out = np.empty(int((ends - begins).sum()), store.dtype)
            assert store.read_stream(begins, ends, out) is out
            assert np.array_equal(out, expected.read_stream(begins, ends))
            for got, wanted in zip(
                store.document_starts(begins, ends), expected.document_starts(begins, ends), strict=True
            ):
                assert got.tolist() == wanted.tolist()
        longest = int(expected.lengths(everything).argmax())
        assert np.array_equal(store.read(longest, 3, 9), expected.read(longest, 3, 9))
        store.will_need(begins, ends)
        store.forget_needs()
    assert list(store.verify())[-1] == 1


@formats
def test_token_lists(tmp_path: Path, documents: list[list[int]], write: Writer) -> None:
    path = write(tmp_path / "c", "input_ids", documents)
    expected = write_indexed(tmp_path / "d", documents)
    store = open_store(path)
    assert store.dtype == np.uint16
    assert_same(store, expected)
    for other in (pickle.loads(pickle.dumps(store)), copy.copy(store), open_store(path, column="input_ids")):
        assert_same(other, expected)


@formats
def test_a_folder_of_files_is_one_store(tmp_path: Path, documents: list[list[int]], write: Writer) -> None:
    folder = tmp_path / "many"
    (folder / "deeper").mkdir(parents=True)
    (folder / "_meta").mkdir()
    write(folder / "b", "tokens", documents[7:])
    write(folder / "a", "tokens", documents[:3])
    write(folder / "deeper" / "c", "tokens", [])
    write(folder / "aa", "tokens", documents[3:7])
    write(folder / "_meta" / "x", "tokens", documents)
    suffix = write(folder / ".hidden", "tokens", documents).suffix
    store = open_store(folder)
    assert_same(store, write_indexed(tmp_path / "d", documents))
    assert open_store(f"{folder}/").fingerprint == store.fingerprint
    assert open_store(f"{folder}/*{suffix}").num_documents == len(documents)
    (other := "c.parquet" if write is write_jsonl else "c.jsonl")
    (folder / other).write_text("")
    with pytest.raises(StoreError, match=r"many/?: both \.\w+ and \.\w+ files"):
        open_store(folder)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    words = {word: i for i, word in enumerate(["?", *sorted({w for t in TEXTS for w in t.split()}), "[CLS]"])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.post_processor = tokenizers.processors.BertProcessing(("[CLS]", 1), ("[CLS]", 1))
    made.enable_truncation(3)
    made.enable_padding(length=9)
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


@formats
def test_text_through_a_tokenizer(tmp_path: Path, tokenizer: Path, write: Writer) -> None:
    path = write(tmp_path / "c", "words", TEXTS)
    store = open_store(path, column="words", tokenizer=tokenizer)
    words = sorted({w for t in TEXTS for w in t.split()})
    expected = write_indexed(tmp_path / "d", [[words.index(w) + 1 for w in t.split()] for t in TEXTS])
    with expected:
        everything = np.array([0]), np.array([expected.num_tokens])
        for one in (store, pickle.loads(pickle.dumps(store))):
            with one:
                assert one.read_stream(*everything).tolist() == expected.read_stream(*everything).tolist()
    as_bytes = open_store(path, column="words", tokenizer="bytes")
    told = {store.fingerprint, as_bytes.fingerprint}
    tokenizer.write_text(tokenizer.read_text().replace('"plain"', '"other"'))
    told.add(open_store(path, column="words", tokenizer=tokenizer).fingerprint)
    assert len(told) == 3, "what decides the tokens decides the fingerprint"


@formats
def test_nothing_in_it(tmp_path: Path, write: Writer) -> None:
    store = open_store(write(tmp_path / "c", "tokens", []))
    with store:
        assert (store.num_documents, store.num_tokens, store.dtype) == (0, 0, np.uint16)
        assert store.read_stream(np.zeros(1, np.int64), np.zeros(1, np.int64)).size == 0
    (tmp_path / "e.jsonl").write_bytes(b"")
    assert open_store(tmp_path / "e.jsonl").num_documents == 0
    (tmp_path / "w.jsonl").write_bytes(b"\n \n\n")
    assert open_store(tmp_path / "w.jsonl").num_documents == 0


@pytest.mark.parametrize(
    ("most", "dtype"), [(65_535, "u2"), (65_536, "i4"), (2**31, "i8"), (2**63 - 1, "i8")]
)
def test_the_least_dtype_that_holds_all_tokens(tmp_path: Path, most: int, dtype: str) -> None:
    path = write_jsonl(tmp_path / "c", "tokens", [[1], [0, most], []])
    with open_store(path) as store:
        assert store.dtype == np.dtype(dtype)
        assert store.read(1, 0, 2).tolist() == [0, most]


@settings(max_examples=cases(10), deadline=None)
@given(
    lines=st.lists(
        st.sampled_from([b"", b" ", b'{"tokens": [1]}', b'{"tokens": []}', b'{"tokens":[1,2,3,4]}'])
    ),
    span=st.integers(1, 40),
    step=st.integers(1, 40),
)
def test_every_line_is_of_one_span(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], span: int, step: int
) -> None:
    folder = tmp_path_factory.mktemp("lines")
    (folder / "c.jsonl").write_bytes(b"\n".join(lines))
    expected = [len(json.loads(line)["tokens"]) for line in lines if line.strip()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jsonl, "_SPAN_BYTES", span)
        patch.setattr(jsonl, "_STEP_BYTES", step)
        with open_store(folder / "c.jsonl", cache=folder / "cache") as store:
            assert store.lengths(np.arange(store.num_documents)).tolist() == expected


# -- shuffled and fed -----------------------------------------------------------------------------------


@formats
@pytest.mark.parametrize("rule", ["windows", "documents"])
def test_a_feed_gives_what_it_gives_of_an_indexed_store(
    tmp_path: Path, documents: list[list[int]], write: Writer, rule: str
) -> None:
    packing = None if rule == "windows" else mf.Packing(capacity=256)

    def seen(store: Any) -> list[Any]:
        sequence = mf.Windows(16) if rule == "windows" else mf.Documents()
        recipe = mf.Recipe(data=store, sequence=sequence, batch=mf.Batch(sequences=5), seed=3, epochs=2)
        with mf.Feed(recipe, packing=packing) as feed:
            return [[m["tokens"].tolist(), m["labels"].tolist()] for step in feed for m in step.microbatches]

    expected = seen(write_indexed(tmp_path / "d", documents))
    assert seen(open_store(write(tmp_path / "c", "tokens", documents))) == expected


# -- far away -------------------------------------------------------------------------------------------


@some(1)
@formats
def test_over_http(tmp_path: Path, documents: list[list[int]], write: Writer) -> None:
    needs("nginx")
    (tmp_path / "www").mkdir()
    path = write(tmp_path / "www" / "c", "tokens", documents)
    expected = write_indexed(tmp_path / "d", documents)
    with Nginx(tmp_path / "www") as server:
        store = open_store(f"{server.url}/{path.name}", cache=mf.Cache(tmp_path / "far", block_bytes=4096))
        assert_same(store, expected)
        assert store.fingerprint == open_store(path).fingerprint
        kept = open_store(f"{server.url}/{path.name}", cache=mf.Cache(tmp_path / "far", block_bytes=4096))
        with kept:
            assert kept.read_stream(np.array([0]), np.array([kept.num_tokens])).size
        assert kept.stats.bytes_fetched == 0 < store.stats.bytes_fetched, "read once for each node"
        with pytest.raises(MissingError, match=r"nothing\.jsonl: no token store: found nothing at this URL"):
            open_store(f"{server.url}/nothing.jsonl")


# -- what is wrong --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"tokens": [1, 2', "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[1, 2]", "list where a JSON object belongs"),
        (b'{"text": "x"}', r"no 'tokens' or 'input_ids', found 'text'; to read its text, name a tokenizer"),
        (b'{"tokens": null}', "null where a list of tokens belongs"),
        (b'{"tokens": "text"}', "str where a list of tokens belongs"),
        (b'{"tokens": [1, -2]}', "token 1 is -2; tokens are whole numbers from 0"),
        (b'{"tokens": [1, true]}', "token 1 is True"),
        (b'{"tokens": [1.5]}', "token 0 is 1.5"),
        (b'{"tokens": [[1]]}', r"token 0 is \[1\]"),
        (b'{"tokens": [9223372036854775808]}', "token 0 is 9223372036854775808"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: bytes, said: str) -> None:
    path = tmp_path / "c.jsonl"
    before = b'{"tokens": [1]}\n\n{"tokens": []}\n' * 20
    path.write_bytes(before + line + b'\n{"tokens": [2]}\n')
    with pytest.raises(StoreError, match=rf"c\.jsonl: line 61 \(byte {len(before)}\): .*{said}"):
        _ = open_store(path).num_documents


@pytest.mark.parametrize(
    ("line", "said"),
    [(b'{"text": [1]}', "list where text belongs"), (b'{"text": "\\ud800"}', "text is not Unicode")],
)
def test_a_wrong_text_is_named(tmp_path: Path, line: bytes, said: str) -> None:
    (tmp_path / "c.jsonl").write_bytes(b'{"text": "a"}\n' + line)
    with pytest.raises(StoreError, match=rf"line 2 \(byte 14\): {said}"):
        _ = open_store(tmp_path / "c.jsonl", tokenizer="bytes").num_documents


@pytest.mark.parametrize(
    ("values", "kind", "tokenizer", "said"),
    [
        ([[1]] * 4 + [None], pa.list_(pa.int32()), None, r"row 4 \(row group 1, .*null where a list"),
        ([[1]] * 4 + [[2, -3]], pa.list_(pa.int32()), None, r"row 4 \(row group 1, .*token -3"),
        ([[1]] * 4 + [[2, None]], pa.list_(pa.int32()), None, r"row 4 \(row group 1, .*a null among"),
        ([[], [1, 2**63]], pa.list_(pa.uint64()), None, r"row 1 .*token 9223372036854775808"),
        ([[1.5]], pa.list_(pa.float32()), None, "is list.*, where lists of whole numbers belong"),
        ([[15]], pa.list_(pa.duration("s")), None, "is list.*, where lists of whole numbers belong"),
        (["x"], pa.string(), None, "is string, where lists of whole numbers belong"),
        ([[1]], pa.list_(pa.int32()), "bytes", "row 0: list where text belongs"),
        (["x", None], pa.string(), "bytes", "row 1: null where text belongs"),
    ],
)
def test_a_wrong_row_is_named(
    tmp_path: Path, values: list[Any], kind: Any, tokenizer: str | None, said: str
) -> None:
    pq.write_table(pa.table({"tokens": pa.array(values, kind)}), tmp_path / "c.parquet", row_group_size=3)
    with pytest.raises(StoreError, match=rf"c\.parquet: {said}|c\.parquet: column 'tokens' {said}"):
        _ = open_store(tmp_path / "c.parquet", column="tokens", tokenizer=tokenizer).num_documents


@pytest.mark.parametrize(
    "kind",
    [
        pa.large_list(pa.int64()),
        pa.list_(pa.uint8()),
        pa.list_(pa.int16(), 2),
        pa.list_(pa.uint64()),
        pa.list_view(pa.int32()),
        pa.large_list_view(pa.uint16()),
    ],
    ids=str,
)
def test_lists_of_other_types(tmp_path: Path, kind: Any) -> None:
    pq.write_table(pa.table({"tokens": pa.array([[1, 2], [3, 4], [5, 6]], kind)}), tmp_path / "c.parquet")
    with open_store(tmp_path / "c.parquet") as store:
        assert store.read_stream(np.array([1]), np.array([6])).tolist() == [2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    "kind", [pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())], ids=str
)
def test_text_of_other_types(tmp_path: Path, kind: Any) -> None:
    pq.write_table(pa.table({"text": pa.array(["ab", "", "ab"]).cast(kind)}), tmp_path / "c.parquet")
    with open_store(tmp_path / "c.parquet", tokenizer="bytes") as store:
        assert store.read_stream(np.array([1]), np.array([4])).tobytes() == b"bab"


def test_a_page_with_another_checksum_is_refused(tmp_path: Path) -> None:
    path, table = tmp_path / "c.parquet", pa.table({"tokens": [list(range(i, i + 50)) for i in range(200)]})
    pq.write_table(table, path, compression="NONE", use_dictionary=False, write_page_checksum=True)
    assert open_store(path, cache=tmp_path / "whole").num_tokens == 10_000
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1  # of a token, which would be another one
    path.write_bytes(raw)
    with pytest.raises(StoreError, match=r"c\.parquet: row group 0: not readable: .*CRC.*copy it again"):
        _ = open_store(path, cache=tmp_path / "cache").num_tokens


@pytest.mark.parametrize("bloom", [{}, {"bloom_filter_options": {"id": True}}], ids=["", "bloom"])
@pytest.mark.parametrize("index", [False, True])
@given(st.lists(st.lists(st.integers(0, 3), max_size=20), min_size=2, max_size=3))
@settings(max_examples=cases(4), deadline=None)
def test_files_joined_by_cat_are_refused(
    tmp_path_factory: pytest.TempPathFactory, index: bool, bloom: Any, lengths: list[list[int]]
) -> None:
    """The last footer would read the first file's pages; whole files, of any rows and indexes, are read."""
    folder, files = tmp_path_factory.mktemp("joined"), list[bytes]()
    for i, each in enumerate(lengths):
        documents = pa.array([[8] * n for n in each], pa.list_(pa.int32()))
        table = pa.table({"id": range(len(each)), "tokens": documents, "raw": [b"PAR1PAR1"] * len(each)})
        path = folder / f"{i}.parquet"
        pq.write_table(table, path, row_group_size=9, write_page_index=index, use_dictionary=False, **bloom)
        assert open_store(path, cache=folder).lengths(np.arange(len(each))).tolist() == each
        files.append(path.read_bytes())
    (folder / "all.parquet").write_bytes(b"".join(files))
    joints = "|".join(str(sum(map(len, files[:i]))) for i in range(1, len(files)))
    with pytest.raises(StoreError, match=rf"all\.parquet: byte ({joints}): another Parquet file begins"):
        _ = open_store(folder / "all.parquet", cache=folder).num_documents


@pytest.mark.parametrize("other", ["b.jsonl.gz", "b.json.zst", "b.ndjson", "b.parquet"])
def test_a_folder_of_several_kinds_is_refused(tmp_path: Path, other: str) -> None:
    """What a store of one kind passed over would be lost without a word."""
    (tmp_path / "a.jsonl").write_text('{"tokens": [1]}\n')
    (tmp_path / other).write_bytes(b"")
    kind = other.partition(".")[2]
    with pytest.raises(OptionError, match=rf"both \.jsonl and \.{kind} files; keep each kind in a folder"):
        open_store(tmp_path)
    with pytest.raises(OptionError, match=rf"both \.jsonl and \.{kind} files; keep each kind in a folder"):
        open_store(tmp_path / "*")


@pytest.mark.parametrize("other", ["b.jsonl.xz", "b.parquet.gz", "b.json.bz2"])
def test_a_folder_with_a_file_that_is_packed_otherwise_is_refused(tmp_path: Path, other: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"tokens": [1]}\n')
    (tmp_path / other).write_bytes(b"")
    with pytest.raises(OptionError, match=rf"{other} is compressed as none is read here"):
        open_store(tmp_path)


def test_suffixes_may_be_in_capitals(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"tokens": [1]}\n')
    (tmp_path / "B.JSONL").write_text('{"tokens": [2]}\n{"tokens": [3]}\n')
    assert (mf.open(tmp_path).num_documents, mf.open(tmp_path / "B.JSONL").num_documents) == (3, 2)
    pq.write_table(pa.table({"tokens": [[4]]}), tmp_path / "C.Parquet")
    with pytest.raises(OptionError, match=r"both \.jsonl and \.parquet files"):
        mf.open(tmp_path)


def test_a_folder_of_train_and_test_is_refused(tmp_path: Path) -> None:
    """As on the Hub; a pattern may ask for both. Names are told as `datasets` tells them."""
    train = ("train.jsonl", "train-00000-of-00001.jsonl", "data/train_1.jsonl", "train/1.jsonl")
    test = (
        "test.jsonl",
        "validation-00000-of-00001.jsonl",
        "data/dev-1.jsonl",
        "eval/1.jsonl",
        "web_test.jsonl",
    )
    others = ("contest.jsonl", "latest-1.jsonl", "web.jsonl")

    def opened(*names: str) -> int:
        shutil.rmtree(tmp_path / "x", ignore_errors=True)
        for name in names:
            (tmp_path / "x" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "x" / name).write_text('{"tokens": [1, 2]}\n')
        return mf.open(tmp_path / "x", cache=tmp_path / "cache").num_documents

    assert (opened(*train, *others), opened(*test, *others)) == (7, 8)
    for pair in itertools.product(train, test):
        with pytest.raises(OptionError, match=rf"x: {pair[0]} and {pair[1]}: give the folder of one split"):
            opened(*pair, *others)
    assert mf.open(f"{tmp_path}/x/*.jsonl", cache=tmp_path / "cache").num_documents == 4


def test_a_folder_that_lacks_a_shard_is_refused(tmp_path: Path) -> None:
    """As after a download that stopped; a pattern says that these are meant. Some count from 1."""

    def write(*names: str) -> None:
        for name in names:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / f"{name}.jsonl").write_text('{"tokens": [1]}\n')

    write("train-00000-of-00002", "train-00001-of-00002-0a1b2c", "x/c4-train.00002-of-00003")
    with pytest.raises(OptionError, match=r"1 of the 3 shards x/c4-train\.\*-of-00003 are there; give a f"):
        mf.open(tmp_path)
    assert mf.open(f"{tmp_path}/x/*.jsonl").num_documents == 1
    write("x/c4-train.00001-of-00003", "x/c4-train.00003-of-00003")
    assert mf.open(tmp_path).num_documents == 5
    write("y/de-00000-of-00002", "z/de-00001-of-00002")  # a folder of the Hub has 10,000 files at most
    assert mf.open(tmp_path).num_documents == 7
    (tmp_path / "z/de-00001-of-00002.jsonl").rename(tmp_path / "z/de-00000-of-00002.jsonl")
    with pytest.raises(OptionError, match=r"1 of the 2 shards y/de-\*-of-00002 are there"):
        mf.open(tmp_path)


def test_a_folder_with_a_link_to_another_or_to_its_own_files_is_refused(tmp_path: Path) -> None:
    """What is behind the one would be lost, the other be there twice; files elsewhere are linked one by one."""
    for name in ("web", "code"):
        (tmp_path / name).mkdir()
        write_jsonl(tmp_path / name / "0", "tokens", [[1]])
    (tmp_path / "web/more").symlink_to(tmp_path / "code")
    with pytest.raises(OptionError, match=r"web: links to folders, as more/, are not followed"):
        mf.open(tmp_path / "web")
    (tmp_path / "web/more").rename(tmp_path / "web/_more")
    (tmp_path / "web/1.jsonl").symlink_to(tmp_path / "code/0.jsonl")
    assert mf.open(tmp_path / "web").num_documents == 2
    (tmp_path / "web/2.jsonl").symlink_to("0.jsonl")
    with pytest.raises(OptionError, match=r"web: 2\.jsonl is a link to another of its files; move it away"):
        mf.open(tmp_path / "web")


def test_no_parquet(tmp_path: Path) -> None:
    (tmp_path / "c.parquet").write_bytes(b"PAR1 but no more than that PAR1")
    with pytest.raises(StoreError, match=r"c\.parquet: not readable"):
        _ = open_store(tmp_path / "c.parquet").num_documents
    pq.write_table(pa.table({"x": [1]}), tmp_path / "d.parquet")
    with pytest.raises(StoreError, match=r"d\.parquet: no column 'text', found 'x'; name it by column="):
        _ = open_store(tmp_path / "d.parquet", tokenizer="bytes").num_documents


def test_tokenizers_that_are_none(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "c", "text", TEXTS)
    with pytest.raises(MissingError, match="nowhere: missing"):
        open_store(path, tokenizer=tmp_path / "nowhere")
    with pytest.raises(StoreError, match=r"c\.jsonl: no tokenizer"):
        open_store(path, tokenizer=path)
    write_indexed(tmp_path / "d", [[1]])
    with pytest.raises(StoreError, match="a Megatron store has no option"):
        open_store(tmp_path / "d", column="text")


@formats
def test_a_package_that_is_missing_is_named(
    tmp_path: Path, write: Writer, monkeypatch: pytest.MonkeyPatch, tokenizer: Path
) -> None:
    path = write(tmp_path / "c", "text", TEXTS)
    other = tmp_path / "other.json"  # not one that this process has loaded
    other.write_bytes(tokenizer.read_bytes())
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(StoreError, match=r"pip install '(pyarrow|jinja2)>="):
        open_store(path, tokenizer=other)


def changed(path: Path) -> list[list[int]]:
    """Other tokens in a place that the fingerprint does not sample: what the file holds now."""
    lines = path.read_text().splitlines()
    lines[450] = json.dumps({"tokens": [7] * 66}).ljust(len(lines[450]))[: len(lines[450])]
    path.write_text("\n".join(lines))
    os.utime(path, (1, 1))  # nginx makes its tag of seconds
    return [json.loads(line)["tokens"] for line in lines]


@pytest.fixture
def long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(jsonl, "_SPAN_BYTES", 1 << 20)
    lines = [json.dumps({"tokens": [i] * 40}) for i in range(100, 999)]
    (tmp_path / "c.jsonl").write_text("\n".join(lines))
    return tmp_path / "c.jsonl"


def test_a_file_that_was_written_again_is_read_again(long: Path) -> None:
    with open_store(long) as store:
        assert store.read(450, 0, 2).tolist() == [550, 550]
    now = changed(long)
    with open_store(long) as again:
        assert again.fingerprint == store.fingerprint, "too small a change to be seen at once"
        assert again.lengths(np.arange(899)).tolist() == [len(each) for each in now]
        assert again.read(450, 0, 66).tolist() == [7] * 66


def test_an_object_that_was_written_again_is_read_again(long: Path, tmp_path: Path) -> None:
    needs("nginx")
    with Nginx(long.parent) as server:
        for i in range(2):
            now = changed(long) if i else [json.loads(line)["tokens"] for line in long.open()]
            cache = mf.Cache(tmp_path / "far")
            shutil.rmtree(cache.own_path / "answers", ignore_errors=True)  # half a minute later
            with open_store(f"{server.url}/c.jsonl", cache=cache) as store:
                assert store.read(450, 0, len(now[450])).tolist() == now[450]


def test_verify_finds_a_change_that_leaves_the_time(long: Path) -> None:
    with open_store(long) as store:
        assert list(store.verify())[-1] == 1
    before = long.stat()
    changed(long)
    os.utime(long, ns=(before.st_atime_ns, before.st_mtime_ns))
    with (
        open_store(long) as again,
        pytest.raises(ChangedError, match=r"c\.jsonl: has other tokens than when this node read it"),
    ):
        list(again.verify())


def test_a_file_that_is_written_while_it_is_read_is_refused(
    long: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scan = jsonl.JsonlStore._scan

    def scan_and_write(self: Any, *span: Any) -> Any:
        yield from scan(self, *span)
        changed(long)

    with monkeypatch.context() as patch:
        patch.setattr(jsonl.JsonlStore, "_scan", scan_and_write)
        with pytest.raises(ChangedError, match=r"c\.jsonl: was written while it was read"):
            _ = open_store(long).num_documents
    assert open_store(long).num_documents == 899


@formats
def test_what_is_asked_wrongly(tmp_path: Path, documents: list[list[int]], write: Writer) -> None:
    store = open_store(write(tmp_path / "c", "tokens", documents))
    with pytest.raises(StoreError, match="not entered"):
        store.read(4, 0, 1)
    with store:
        for ask, said in (
            (lambda: store.lengths(np.array([len(documents)])), "document 20 asked for, it has 20"),
            (lambda: store.offsets(np.array([-1])), "document -1 asked for"),
            (lambda: store.read(1, 2, 9), r"tokens 2\.\.9 of document 1 asked for, it has 5"),
            (lambda: store.read_stream(np.array([3]), np.array([2])), "range 0"),
            (lambda: store.read_stream(np.array([0]), np.array([10**6])), "the stream has 765"),
            (lambda: store.read_stream(np.array([0]), np.array([2, 3])), "both must be"),
            (lambda: store.read_stream(np.array([0]), np.array([2]), np.zeros(2)), "out is float64"),
        ):
            with pytest.raises(StoreError, match=said):
                ask()


def test_text_without_a_tokenizer_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(StoreError, match=r"line 1 .* to read its text, name a tokenizer: tokenizer="):
        _ = mf.open(tmp_path / "a.jsonl").num_documents
    for kind in (pa.string(), pa.large_string(), pa.dictionary(pa.int8(), pa.string())):
        pq.write_table(pa.table({"text": pa.array(["a"]).cast(kind)}), tmp_path / "a.parquet")
        with pytest.raises(StoreError, match=r"found 'text'; to read its text, name a tokenizer: tokenizer="):
            _ = mf.open(tmp_path / "a.parquet").num_documents
    pq.write_table(pa.table({"text": [1]}), tmp_path / "a.parquet")
    with pytest.raises(StoreError, match="found 'text'; name it by column="):
        _ = mf.open(tmp_path / "a.parquet").num_documents


def test_a_footer_of_an_earlier_pyarrow_is_searched(tmp_path: Path) -> None:
    """Up to pyarrow 24, nobody is told where bloom filters are: they are among the bytes that are looked into."""
    table = pa.table({"id": range(50), "tokens": [[8]] * 50})
    pq.write_table(table, path := tmp_path / "c.parquet", bloom_filter_options={"id": True})
    column = SimpleNamespace(
        data_page_offset=4, dictionary_page_offset=None, total_compressed_size=9, has_dictionary_page=False
    )
    groups = SimpleNamespace(num_columns=1, column=lambda at: column)
    found = pq.read_metadata(path)
    old = SimpleNamespace(
        serialized_size=found.serialized_size, num_row_groups=1, row_group=lambda at: groups
    )
    for size in (1, 2):
        path.write_bytes(path.read_bytes() * size)
        with LocalFile(str(path)) as file, contextlib.ExitStack() as stack:
            if size == 2:
                stack.enter_context(pytest.raises(StoreError, match="another Parquet file begins"))
            parquet._refuse_joined(file, old)
