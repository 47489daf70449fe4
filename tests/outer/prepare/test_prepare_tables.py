"""JSON lists, and what `datasets` and polars save, become what the same records as JSON lines become."""

from __future__ import annotations

import base64
import gzip
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from media import picture
from texts import Here, tree

import meshfeed as mf
from meshfeed.cli.main import main
from meshfeed.errors import ChecksumError, MeshfeedError, PrepareError, StoreError
from meshfeed.formats.prepared import ORIGINS
from meshfeed.prepare import Multimodal, Text, prepare
from meshfeed.prepare.inputs.json_list import elements
from meshfeed.store.loss_columns import ATTENTION_MASK, LOSS_COLUMNS, OF_OTHERS
from services.needs import needs
from services.nginx import Nginx
from soak import cases

sys.path.append(str(Path(__file__).parents[1] / "formats"))
from save_with_datasets import TEXTS, TOKENS, saved

BYTES = Text(tokenizer="bytes", eod="0")
WORDS = [f"word {i} " * (i % 7) + 'größe \\ " [{,}]' for i in range(60)]
RECORDS = [{"text": text, "of": {"no": [{"use": "]"}, {"use": "}"}]}} for text in WORDS]


def stores(folder: Path) -> dict[str, bytes]:
    """What was made, without what was asked and of which files."""
    return {name: data for name, data in tree(folder).items() if name not in ("manifest.json", ORIGINS)}


@pytest.fixture
def wanted(tmp_path: Path) -> dict[str, bytes]:
    """Of RECORDS as JSON lines."""
    (tmp_path / "wanted.jsonl").write_text("".join(json.dumps(each) + "\n" for each in RECORDS))
    prepare([tmp_path / "wanted.jsonl"], tmp_path / "wanted", BYTES, engine=Here())
    return stores(tmp_path / "wanted")


# -- JSON lists -------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.integers() | st.text(st.sampled_from('ab\\"[]{},\n é'), max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def cut(raw: bytes, size: int) -> Iterable[bytes]:
    return (raw[at : at + size] for at in range(0, len(raw), size))


@settings(max_examples=cases(60), deadline=None)
@given(
    st.lists(JSON, max_size=6),
    st.integers(1, 40),
    st.sampled_from([None, 1]),
    st.sampled_from(["", "\ufeff", " \n", "\ufeff" + "\n" * 50]),
    st.sampled_from(["", "\n", " \r\n" * 50]),
    st.data(),
)
def test_a_list_is_its_elements_however_its_bytes_come(
    values: list[Any], size: int, indent: int | None, before: str, behind: str, data: st.DataObject
) -> None:
    raw = f"{before}{json.dumps(values, indent=indent, ensure_ascii=False)}{behind}".encode()
    found = list(elements(cut(raw, size), 1 << 20, "x"))
    assert [json.loads(text or b"") for _, _, text in found] == values
    assert [raw[begin:end] for begin, end, _ in found] == [text for _, _, text in found]
    for most in (0, 3):
        short = list(elements(cut(raw, size), most, "x"))
        assert [each[:2] for each in short] == [each[:2] for each in found]
        wanted = [text if text and len(text) <= most else None for *_, text in found]
        assert [text for *_, text in short] == wanted
    if values:
        first = data.draw(st.integers(0, len(values) - 1))
        last = data.draw(st.integers(first, len(values) - 1))
        begin, end = found[first][0], found[last][1]
        some = elements(cut(raw[begin:end], size), 1 << 20, "x", at=begin, within=True)
        assert list(some) == found[first : last + 1]


@pytest.mark.parametrize(
    "raw",
    [b"", b"{}", b'{"a": 1}\n{"b": 2}', b"[1] x", b"[1][2]", b"[1]]", b"[1],", b'"s"', b",", b"x [1]", b"]"],
)
def test_what_is_not_one_list_is_refused(raw: bytes) -> None:
    for size in (1, 3, 99):
        for most_bytes in (0, 99):
            with pytest.raises(StoreError, match="x: not one JSON list"):
                list(elements(cut(raw, size), most_bytes, "x"))


def test_a_list_that_is_cut_off_is_refused() -> None:
    raw = json.dumps([{"text": "a, b"}, {"text": "]"}]).encode()
    for size in range(1, len(raw)):
        with pytest.raises(ChecksumError, match="does not end; copy the file again"):
            list(elements([raw[:size]], 99, "x"))


@pytest.mark.parametrize(
    "raw",
    [b"[1 2]", b"[{]}]", b"[{]}", b"[{},]", b"[,]", b"[,{}]", b"[{},,{}]", b"[{} {}]", b"[{}x]", b"[x{}]",
     b'["a""b"]', b'[1"a"]', b"[[}]]", b"[{}, ]", b'[{"a": [1}]]'],
)  # fmt: skip
def test_a_list_that_does_not_hold_together_is_damaged(tmp_path: Path, raw: bytes) -> None:
    """And none of it becomes a malformed record, which --max-errors would leave out."""
    for size in (1, 3, 99):
        for most_bytes in (0, 99):
            with pytest.raises(ChecksumError, match=r"x: byte .* the list is damaged"):
                list(elements(cut(raw, size), most_bytes if size > 3 else 99, "x"))
    (tmp_path / "a.json").write_bytes(raw)
    with pytest.raises(MeshfeedError, match="the list is damaged"):
        prepare([tmp_path / "a.json"], tmp_path / "out", BYTES, engine=Here(), kind="json", max_errors=9)


def test_a_json_list_is_read_by_its_elements(tmp_path: Path, wanted: dict[str, bytes]) -> None:
    """In every cut; compressed, too, where it is said to be one."""
    raw = json.dumps(RECORDS, indent=1).encode()
    (tmp_path / "a.json").write_bytes(b"\xef\xbb\xbf" + raw)
    (tmp_path / "b.json.gz").write_bytes(gzip.compress(raw))
    for part_bytes in (1, 300, None):
        prepare(
            [tmp_path / "a.json"], tmp_path / f"out{part_bytes}", BYTES, engine=Here(), part_bytes=part_bytes
        )
        assert stores(tmp_path / f"out{part_bytes}") == wanted
    prepare([tmp_path / "b.json.gz"], tmp_path / "gz", BYTES, engine=Here(), kind="json")
    assert stores(tmp_path / "gz") == wanted


def test_what_is_wrong_in_a_list_is_named_by_its_place(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('[{"text": "a"}, {"text": 5}, {"text": "b"}, 7, {"text": tru}]')
    out = tmp_path / "out"
    with pytest.raises(PrepareError, match=r"a\.json: byte 44: int where a JSON object belongs"):
        prepare([path], out, BYTES, engine=Here())
    prepare([path], out, BYTES, engine=Here(), max_errors=3, part_bytes=1)
    told = [json.loads(line) for line in (out / "errors.jsonl").read_text().splitlines()]
    assert [(each["item"], each["byte"]) for each in told] == [(1, 16), (3, 44), (4, 47)]
    path.write_text(json.dumps([{"text": "x" * 500}]))
    with pytest.raises(PrepareError, match=r"a\.json: byte 1: a record of more than 99 bytes"):
        prepare([path], tmp_path / "large", BYTES, engine=Here(), max_record_bytes=99)
    path.write_text(json.dumps(RECORDS))
    with pytest.raises(PrepareError, match="one list of records is read by --format json"):
        prepare([path], tmp_path / "lines", BYTES, engine=Here(), kind="jsonl")
    path.write_text('{"text": "a"}')
    with pytest.raises(PrepareError, match=r"Say kind= \(--format\) jsonl, json or text"):
        prepare([path], tmp_path / "lines", BYTES, engine=Here())


def test_the_list_of_llava_is_read_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "coco").mkdir()
    (tmp_path / "coco/1.png").write_bytes(picture(5, 9))
    rows = [{"id": str(i), "image": "coco/1.png", "text": f"<image> {i}"} for i in range(3)] + [
        {"text": "none"}
    ]
    (tmp_path / "llava.json").write_text(json.dumps(rows))
    words = [
        "prepare",
        str(tmp_path / "llava.json"),
        "--multimodal",
        "--tokenizer",
        "bytes",
        "--image-token",
        "#",
    ]
    assert main([*words, "--out", str(tmp_path / "out"), "--workers", "1"]) == 0
    assert "4 documents" in (said := capsys.readouterr().out) and "3 parts" in said


# -- Arrow ------------------------------------------------------------------------------------------------


def save(folder: Path, tables: list[pa.Table], rows: int = 7) -> Path:
    """As save_to_disk lays a dataset out."""
    folder.mkdir(parents=True)
    names = [f"data-{i:05}-of-{len(tables):05}.arrow" for i in range(len(tables))]
    for name, table in zip(names, tables):
        with pa.ipc.new_stream(str(folder / name), table.schema) as writer:
            writer.write_table(table, rows)
    told = {"_data_files": [{"filename": name} for name in names], "_indices_data_files": None}
    (folder / "state.json").write_text(json.dumps(told))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def test_a_saved_dataset_is_read_in_every_cut(tmp_path: Path, wanted: dict[str, bytes]) -> None:
    """By its files alone, and not by what a map has left beside them."""
    both = [pa.Table.from_pylist(RECORDS[:25]), pa.Table.from_pylist(RECORDS[25:])]
    folder = save(tmp_path / "saved", both)
    (folder / "cache-0123.arrow").write_bytes((folder / "data-00000-of-00002.arrow").read_bytes())
    for part_bytes in (1, 500, None):
        prepare([folder], tmp_path / f"out{part_bytes}", BYTES, engine=Here(), part_bytes=part_bytes)
        assert stores(tmp_path / f"out{part_bytes}") == wanted
    (folder / "state.json").unlink()
    passed: list[Any] = []
    prepare([folder], tmp_path / "plain", BYTES, engine=Here(), on_passed_over=passed.append)
    assert stores(tmp_path / "plain") == wanted and passed[0][".arrow"] == 1


def test_files_of_polars_are_read(tmp_path: Path, wanted: dict[str, bytes]) -> None:
    """Arrow files: a footer, compression, views of strings."""
    table = pa.Table.from_pylist(RECORDS)
    views = pa.schema([("text", pa.string_view())])
    for i, (some, compression) in enumerate(
        ((table, None), (table, "zstd"), (table.select(["text"]).cast(views), "lz4"))
    ):
        path = tmp_path / f"{i}.arrow"
        options = pa.ipc.IpcWriteOptions(compression=compression)
        with pa.ipc.new_file(str(path), some.schema, options=options) as writer:
            writer.write_table(some, 11)
        prepare([path], tmp_path / f"out{i}", BYTES, engine=Here(), part_bytes=1)
        assert stores(tmp_path / f"out{i}") == wanted, i


@pytest.mark.parametrize("file", ["pairs.jsonl", "pairs.parquet"])
def test_pairs_of_answers_are_no_documents(tmp_path: Path, file: str) -> None:
    """Of which one side, or the prompt, would be dropped. Where the prompt is in both, one side may be trained on."""
    pair = {"chosen": "yes", "rejected": "no"}

    def prepared(row: dict[str, str], column: str | None) -> None:
        (tmp_path / file).write_text(json.dumps(row) + "\n")
        if file.endswith("parquet"):
            pq.write_table(pa.Table.from_pylist([row]), tmp_path / file)
        prepare([tmp_path / file], tmp_path / "out", Text(tokenizer="bytes", column=column), engine=Here())

    for row, column in ((pair, None), (pair | {"prompt": "?"}, None), (pair | {"prompt": "?"}, "chosen")):
        with pytest.raises(MeshfeedError, match=r"'chosen' and 'rejected' are a pair, .*docs/datasets\.md"):
            prepared(row, column)
    prepared(pair, "chosen")
    assert mf.open(tmp_path / "out").num_documents == 1


def test_what_datasets_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = saved(tmp_path / "saved")
    with pytest.raises(StoreError, match=r"a DatasetDict; give the path of one split: .*/test, .*/train"):
        prepare([folder], tmp_path / "no", BYTES, engine=Here())
    prepare([folder / "train"], tmp_path / "text", Text(tokenizer="bytes"), engine=Here())
    with mf.open(tmp_path / "text") as store:
        lengths = store.lengths(np.arange(store.num_documents)).tolist()
        assert lengths == [len(text.encode()) for text in TEXTS]
    words = ["prepare", str(folder / "train"), "--tokenizer", "none", "--out", str(tmp_path / "tokens")]
    assert main([*words, "--workers", "1"]) == 2, "it has labels"
    assert "'labels' next to the tokens: prepare does not keep such columns" in capsys.readouterr().err
    save(
        tmp_path / "own",
        [pa.table({"input_ids": TOKENS, "attention_mask": [[1] * len(each) for each in TOKENS]})],
    )
    words[1] = str(tmp_path / "own")
    assert main([*words, "--workers", "1"]) == 0
    with mf.open(tmp_path / "tokens") as store:
        lengths = store.lengths(np.arange(store.num_documents))
        tokens = store.read_stream(np.array([0]), np.array([lengths.sum()]))
        assert [each.tolist() for each in np.split(tokens, lengths.cumsum()[:-1])] == TOKENS
    assert main(["prepare", str(folder), "--tokenizer", "none", "--out", str(tmp_path / "no")]) == 2
    assert "a DatasetDict; give the path of one split" in capsys.readouterr().err


def test_damaged_and_other_tables_are_named(tmp_path: Path) -> None:
    folder = save(tmp_path / "saved", [pa.Table.from_pylist(RECORDS)])
    (path,) = folder.glob("data-*")
    raw = path.read_bytes()
    for size in (len(raw) - 8, len(raw) - 100, 40):
        path.write_bytes(raw[:size])
        with pytest.raises(StoreError, match=r"data-00000-of-00001\.arrow.*copy it again"):
            prepare([folder], tmp_path / "out", BYTES, engine=Here())
    path.write_bytes(raw)
    with pytest.raises(StoreError, match="no column 'prose', found 'text', 'of'"):
        prepare([folder], tmp_path / "out", Text(tokenizer="bytes", column="prose"), engine=Here())
    table = pa.table({"text": ["a", None, "b"]})
    nulls = save(tmp_path / "nulls", [table])
    with pytest.raises(PrepareError, match=r"data-00000-of-00001\.arrow: row 1"):
        prepare([nulls], tmp_path / "out", BYTES, engine=Here())
    told = json.loads((folder / "state.json").read_text()) | {
        "_indices_data_files": [{"filename": "i.arrow"}]
    }
    (folder / "state.json").write_text(json.dumps(told))
    with pytest.raises(StoreError, match=r"reordered by an index; save it again after flatten_indices\(\)"):
        prepare([folder], tmp_path / "out", BYTES, engine=Here())


@pytest.mark.parametrize("column", [name for name in LOSS_COLUMNS if name != ATTENTION_MASK])
def test_what_says_how_to_train_on_tokens_is_refused_in_every_format(tmp_path: Path, column: str) -> None:
    """It would be lost, and every token would bear loss. A text is tokenized, so nothing fits it anyway."""
    row = {"input_ids": [5, 6], column: [0, 1], "text": "ab"}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    (tmp_path / "a.json").write_text(json.dumps([row]))
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "a.parquet")
    save(tmp_path / "a", [pa.Table.from_pylist([row])])
    cure = OF_OTHERS.get(column, r"open the files as they are, mf\.open\(PATH\)")
    for name in ("a.jsonl", "a.json", "a.parquet", "a"):
        with pytest.raises(MeshfeedError, match=rf"'{column}' next to the tokens: .*{cure}"):
            prepare([tmp_path / name], tmp_path / "out", Text(), engine=Here())
        prepare([tmp_path / name], tmp_path / f"text-{name}", BYTES, engine=Here())


def test_a_saved_dataset_has_images(tmp_path: Path) -> None:
    """Structs of bytes and path; the same as data URLs in JSON lines."""
    images = [picture(2 + i, 3, seed=i) for i in range(9)]
    structs = [{"bytes": data, "path": None} for data in images]
    table = pa.table({"text": [f"<image> {i}" for i in range(9)], "image": structs})
    how = Multimodal(text=Text(tokenizer="bytes"), tokens={"image": "\x01"})
    urls = [f"data:image/png;base64,{base64.b64encode(data).decode()}" for data in images]
    lines = [json.dumps({"text": f"<image> {i}", "image": url}) for i, url in enumerate(urls)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    prepare([tmp_path / "a.jsonl"], tmp_path / "wanted", how, engine=Here())
    prepare([save(tmp_path / "saved", [table], 2)], tmp_path / "out", how, engine=Here(), part_bytes=1)
    assert stores(tmp_path / "out") == stores(tmp_path / "wanted")


def test_files_of_a_web_server(
    tmp_path: Path, wanted: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHFEED_CACHE", str(tmp_path / "cache"))
    save(tmp_path / "in/saved", [pa.Table.from_pylist(RECORDS)])
    (tmp_path / "in/a.json").write_text(json.dumps(RECORDS))
    needs("nginx")
    with Nginx(tmp_path / "in", "") as server:
        for name in ("saved/data-00000-of-00001.arrow", "a.json"):
            prepare(
                [f"{server.url}/{name}"],
                tmp_path / f"out-{Path(name).stem}",
                BYTES,
                engine=Here(),
                part_bytes=500,
            )
            assert stores(tmp_path / f"out-{Path(name).stem}") == wanted


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "arrow"])
def test_tokens_with_padding_are_refused(tmp_path: Path, kind: str) -> None:
    """By an attention mask that is not 1, as `convert` and `open` do; one of 1 everywhere says nothing."""
    out = iter(range(99))

    def prepared(mask: Any) -> dict[str, bytes]:
        rows = [{"input_ids": [1, 2, 3]} | ({} if mask is None else {"attention_mask": mask})]
        path, folder = tmp_path / f"rows.{kind}", tmp_path / f"out{next(out)}"
        if kind == "parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        elif kind == "arrow":
            with pa.ipc.new_file(str(path), pa.Table.from_pylist(rows).schema) as writer:
                writer.write_table(pa.Table.from_pylist(rows))
        else:
            path.write_text(json.dumps(rows if kind == "json" else rows[0]))
        prepare([path], folder, Text(), engine=Here())
        return stores(folder)

    plain = prepared(None)
    for ones in ([1, 1, 1], [True] * 3, [1.0] * 3):
        assert prepared(ones) == plain
    for padded in ([1, 1, 0], [0, 1, 1], [1, 1, 2], [True, True, False], [1, None, 1], [[1, 1, 0]]):
        with pytest.raises(PrepareError, match="'attention_mask' is not 1 at every token"):
            prepared(padded)
