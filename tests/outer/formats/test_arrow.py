"""Arrow folders: what `datasets` saves, what pyarrow writes in any shape, and damage."""

from __future__ import annotations

import json
import shutil
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from save_with_datasets import FOLDER, TEXTS, TOKENS, saved

import meshfeed as mf
from meshfeed.errors import MeshfeedError, MissingError, StoreError
from meshfeed.prepare.inputs.chat_columns import ChatColumns
from meshfeed.prepare.inputs.files import find_inputs
from meshfeed.prepare.inputs.records import Reading, records
from meshfeed.testing import assert_store
from services.needs import needs
from services.nginx import Nginx
from soak import cases


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MESHFEED_CACHE", str(tmp_path / "cache"))


def write(path: Path, table: pa.Table, rows: int | None = None, **how: Any) -> Path:
    with pa.ipc.new_stream(str(path), table.schema, **how) as writer:
        writer.write_table(table, max_chunksize=rows)
    return path


def read_all(store: Any) -> list[int]:
    with store:
        return store.read_stream(np.array([0]), np.array([store.num_tokens])).tolist()


def test_a_folder_that_datasets_saved(tmp_path: Path) -> None:
    folder = saved(tmp_path / "saved")
    store = mf.open(folder / "train")
    assert store.dtype == np.int32
    assert_store(store, [np.array(each, np.int32) for each in TOKENS])
    assert_store(mf.open(folder / "test"), [TOKENS[at] for at in (6, 1)])
    texts = [np.frombuffer(text.encode(), np.uint8) for text in TEXTS]
    assert_store(mf.open(folder / "train", tokenizer="bytes"), texts)
    pairs = mf.open(folder / "train", column="pairs")
    assert pairs.dtype == np.uint16 and read_all(pairs)[-2:] == [7, 8]
    assert len({each.fingerprint for each in (store, pairs, mf.open(folder / "test"))}) == 3
    with pytest.raises(StoreError, match=r"row 0 \(column 'labels'\): token -100; tokens are whole numbers"):
        _ = mf.open(folder / "train", column="labels").num_tokens
    with pytest.raises(
        StoreError, match=r"'picture' is (list|extension)<.*where lists of whole numbers belong"
    ):
        _ = mf.open(folder / "train", column="picture").num_tokens


@pytest.mark.parametrize("suffix", ["arrow", "parquet"])
def test_two_columns_of_a_name_that_is_read_are_refused(tmp_path: Path, suffix: str) -> None:
    """Others may have one name. Also where text is prepared, and for a column beside it."""
    lists, text = pa.array([[1]]), pa.array(["hi"])

    def path(*columns: tuple[str, Any]) -> str:
        table = pa.Table.from_arrays([each for _, each in columns], names=[name for name, _ in columns])
        where = str(tmp_path / f"{'-'.join(table.column_names)}.{suffix}")
        if suffix == "parquet":
            pq.write_table(table, where)
        else:
            with pa.ipc.new_stream(where, table.schema) as writer:
                writer.write_table(table)
        return where

    assert mf.open(path(("tokens", lists), ("x", lists), ("x", lists))).num_tokens == 1
    for name, columns in {
        "tokens": [("tokens", lists)] * 2,
        "labels": [("tokens", lists), ("labels", lists), ("labels", lists)],
        "text": [("text", text)] * 2,
        "tools": [
            ("messages", pa.array([[{"role": "user", "content": "a"}]])),
            ("tools", text),
            ("tools", text),
        ],
    }.items():
        with pytest.raises(StoreError, match=f"{suffix}: 2 columns '{name}'; rename or drop all but one"):
            if name == "tools":
                ((file,), _) = find_inputs([path(*columns)])
                _ = [*records(file, 0, 1, Reading(ChatColumns(), (), 1 << 20))]
            else:
                with mf.open(path(*columns), tokenizer="bytes" if name == "text" else None) as store:
                    _ = store.columns


def test_a_folder_that_datasets_saved_is_read_over_plain_http(tmp_path: Path) -> None:
    """Which lists nothing: state.json names the files, dataset_dict.json the splits."""
    needs("nginx")
    folder = Path(shutil.copytree(saved(tmp_path / "saved"), tmp_path / "served"))
    with Nginx(folder) as server:
        far, near = mf.open(f"{server.url}/train"), mf.open(folder / "train")
        assert far.fingerprint == near.fingerprint and read_all(far) == read_all(near)
        with pytest.raises(
            StoreError, match=r"a DatasetDict; give the path of one split: \S+/test, \S+/train$"
        ):
            mf.open(server.url)
        (folder / "odd").mkdir()
        (folder / "odd/dataset_dict.json").write_text("[]")
        with pytest.raises(StoreError, match=r"dataset_dict\.json: does not say its splits"):
            mf.open(f"{server.url}/odd")
        told = r"/none: no token store: found nothing at this URL, storage has no .*/none/state\.json.*HTTP lists no"
        with pytest.raises(MissingError, match=told):
            mf.open(f"{server.url}/none")


def test_folders_that_are_no_dataset_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"a DatasetDict; give the path of one split: \S+/test, \S+/train$"):
        mf.open(FOLDER)
    folder = Path(shutil.copytree(FOLDER / "train", tmp_path / "train"))
    state = json.loads((folder / "state.json").read_text())
    for change, said in (
        (
            {"_indices_data_files": [{"filename": "indices.arrow"}]},
            "reordered by an index; .*flatten_indices",
        ),
        ({"_data_files": None}, r"state\.json: does not say its data files"),
        ({"_data_files": []}, r"state\.json: names no data files"),
        ({"_data_files": [{"filename": "../test/data-00000-of-00001.arrow"}]}, r"without '\.\.'"),
    ):
        (folder / "state.json").write_text(json.dumps(state | change))
        with pytest.raises(StoreError, match=said):
            mf.open(folder)
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(MissingError, match="data-00001-of-00002"):
        mf.open(folder)


SCALARS = [
    pa.null(),
    pa.bool_(),
    pa.int8(),
    pa.float64(),
    pa.string(),
    pa.string_view(),
    pa.large_binary(),
    pa.timestamp("us"),
]
TYPES = st.recursive(
    st.sampled_from(SCALARS),
    lambda inner: st.one_of(
        inner.map(pa.list_),
        inner.map(pa.large_list),
        inner.map(lambda kind: pa.list_(kind, 2)),
        st.lists(inner, min_size=1, max_size=3).map(
            lambda kinds: pa.struct([(f"f{i}", kind) for i, kind in enumerate(kinds)])
        ),
    ),
    max_leaves=4,
)
INTEGERS = st.sampled_from([pa.int8(), pa.uint16(), pa.int32(), pa.uint32(), pa.int64(), pa.uint64()])


@settings(max_examples=cases(12), deadline=None)
@given(data=st.data())
def test_any_column_behind_any_others(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """pyarrow is the oracle: it finds the column by reading all of a batch."""
    folder = tmp_path_factory.mktemp("arrow")
    element = data.draw(INTEGERS)
    form = data.draw(st.sampled_from(["list", "large", "fixed", "view", "large view"]))
    kind = {
        "list": pa.list_(element),
        "large": pa.large_list(element),
        "fixed": pa.list_(element, 3),
        "view": pa.list_view(element),
        "large view": pa.large_list_view(element),
    }[form]
    size = 3 if form == "fixed" else None
    lists = st.lists(st.integers(0, 100), min_size=size or 0, max_size=size or 5)
    values = data.draw(st.lists(lists, max_size=12))
    before = data.draw(st.lists(TYPES, max_size=3))
    columns = {f"c{i}": pa.nulls(len(values), each) for i, each in enumerate(before)}
    table = pa.table(columns | {"here": pa.array(values, kind), "behind": pa.array(range(len(values)))})
    table = table.slice(data.draw(st.integers(0, 2)))  # offsets that do not begin at 0
    path = folder / "c.arrow"
    rows = data.draw(st.integers(1, 5))
    if data.draw(st.booleans()):
        write(path, table, rows)
    else:
        with pa.ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=rows)
    expected = table.column("here").to_pylist()
    store = mf.open(path, column="here", cache=folder / "cache")
    assert store.lengths(np.arange(store.num_documents)).tolist() == [len(each) for each in expected]
    assert read_all(store) == list(chain.from_iterable(expected))
    with store:
        for document, tokens in enumerate(expected):
            assert store.read(document, len(tokens) // 2, len(tokens)).tolist() == tokens[len(tokens) // 2 :]


@settings(max_examples=cases(20), deadline=None)
@given(at=st.integers(0, 3_200), byte=st.integers(0, 255), cut=st.booleans())
def test_damage_is_a_store_error_or_another_token(
    tmp_path_factory: pytest.TempPathFactory, at: int, byte: int, cut: bool
) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    raw = bytearray((FOLDER / "train" / "data-00000-of-00002.arrow").read_bytes())
    at = min(at, len(raw) - 1)
    raw[at] = byte
    (folder / "c.arrow").write_bytes(raw[:at] if cut else raw)
    try:
        read_all(mf.open(folder / "c.arrow", cache=folder / "cache"))
    except MeshfeedError as error:
        assert isinstance(error, StoreError) and "c.arrow" in str(error)
    else:
        assert not cut, "a file that is cut short must not pass for a shorter one"


def test_a_second_stream_in_a_file_is_not_passed_over(tmp_path: Path) -> None:
    one = write(tmp_path / "one.arrow", pa.table({"tokens": [[1, 2], [3]]})).read_bytes()
    (tmp_path / "two.arrow").write_bytes(2 * one)
    with pytest.raises(StoreError, match=rf"two\.arrow: byte {len(one)}: more follows the end of its stream"):
        _ = mf.open(tmp_path / "two.arrow").num_documents


def test_more_rows_than_the_file_has_bytes_for_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "c.arrow", pa.table({"tokens": [[i, i] for i in range(150)]}))
    told, wrong = (count.to_bytes(8, "little") for count in (150, 10**6))
    raw = path.read_bytes()
    assert raw.count(told) == 2  # of the batch, and of the column
    path.write_bytes(raw.replace(told, wrong))
    with pytest.raises(StoreError, match=r"c\.arrow: not readable"):
        read_all(mf.open(path))


@pytest.mark.parametrize(
    ("values", "kind", "said"),
    [
        ([[1]] * 4 + [None, [2]], pa.list_(pa.int32()), r"row 4 \(column 'tokens'\): null where a list of tokens"),
        ([[1], [2, None], []], pa.large_list(pa.int32()), r"row 1 .*: a null among its tokens"),
        ([[1, 2], None], pa.list_(pa.int32(), 2), "row 1 .*: null where a list"),
        ([[1], [1, 2**63]], pa.list_(pa.uint64()), r"row 1 .*: token 9223372036854775808; tokens"),
        ([[1], [3, -2]], pa.list_(pa.int8()), r"row 1 .*: token -2; tokens"),
        ([[1.5]], pa.list_(pa.float32()), "is list<.*, where lists of whole numbers belong"),
        (["x"], pa.string(), "is string, where lists of whole numbers belong"),
        (["x"], pa.dictionary(pa.int8(), pa.string()), "is dictionary<.*, where lists of whole numbers belong"),
    ],
)  # fmt: skip
def test_a_wrong_row_is_named(tmp_path: Path, values: list[Any], kind: Any, said: str) -> None:
    path = write(tmp_path / "c.arrow", pa.table({"tokens": pa.array(values, kind)}), rows=3)
    with pytest.raises(StoreError, match=rf"c\.arrow: (column 'tokens' )?{said}"):
        read_all(mf.open(path))


def test_a_batch_may_hold_no_token(tmp_path: Path) -> None:
    rows = [[], [], [], [7]]
    path = write(tmp_path / "c.arrow", pa.table({"tokens": pa.array(rows, pa.list_(pa.int32()))}), rows=2)
    assert_store(mf.open(path), [np.array(row, np.uint16) for row in rows])


def test_compressed_batches_and_what_is_not_read(tmp_path: Path) -> None:
    table = pa.table({"tokens": [[1, 2]]})
    packed = write(tmp_path / "z.arrow", table, options=pa.ipc.IpcWriteOptions(compression="lz4"))
    assert read_all(mf.open(packed)) == [1, 2]
    (tmp_path / "n.arrow").write_bytes(b"no Arrow at all")
    with pytest.raises(StoreError, match=r"n\.arrow: not readable"):
        _ = mf.open(tmp_path / "n.arrow").num_tokens
    with pytest.raises(StoreError, match="no column 'nowhere', found 'tokens'; name it by column="):
        _ = mf.open(packed, column="nowhere").num_tokens


def test_only_the_footer_of_a_file_counts(tmp_path: Path) -> None:
    """polars writes no schema where pyarrow puts one, before the record batches."""
    table = pa.table({"tokens": pa.array([[1, 2], [], [3]], pa.large_list(pa.int64()))})
    path = tmp_path / "c.arrow"
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    raw = path.read_bytes()
    path.write_bytes(raw[:8] + bytes(8) + raw[16:])
    assert pa.ipc.open_file(str(path)).read_all() == table
    assert_store(mf.open(path), [np.array(row, np.uint16) for row in ([1, 2], [], [3])])


@pytest.mark.parametrize("new", [pa.ipc.new_stream, pa.ipc.new_file])
def test_views_and_text_of_every_type_far_away(tmp_path: Path, new: Any) -> None:
    needs("nginx")
    texts = ["short", "a text of more than twelve bytes", "", "short"]
    kinds = {
        "view": pa.array(texts, pa.string_view()),
        "words": pa.array(texts).dictionary_encode(),
        "lists": pa.array([[1], [2, 3], [], [4]], pa.list_view(pa.int32())),
    }
    table = pa.table(kinds)
    (tmp_path / "www").mkdir()
    with new(str(tmp_path / "www" / "c.arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    with Nginx(tmp_path / "www") as server:
        url, cache = f"{server.url}/c.arrow", tmp_path / "far"
        for name in ("view", "words"):
            store = mf.open(url, column=name, tokenizer="bytes", cache=cache)
            assert_store(store, [np.frombuffer(text.encode(), np.uint8) for text in texts])
        lists = mf.open(url, column="lists", cache=cache)
        assert_store(lists, [np.array(row, np.uint16) for row in ([1], [2, 3], [], [4])])
