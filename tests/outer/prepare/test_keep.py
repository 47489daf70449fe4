"""`prepare --keep`: a value of each document for each column, whatever the engine, parts, kills and sets."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from media import SPECIAL, picture, tar, tokenizer
from PIL import Image
from texts import Here, documents, jsonl, tree

import meshfeed as mf
import mosaic
from meshfeed.cli.main import main
from meshfeed.errors import PrepareError
from meshfeed.formats.prepared import values_name
from meshfeed.prepare import Local, Multimodal, Text, prepare

pytestmark = pytest.mark.usefixtures("quick_workers")

BYTES = Text(tokenizer="bytes")
KEEP = ("license", "crawled on")
VALUES: list[tuple[Any, str]] = [
    ("MIT", "MIT"),
    ("two\nlines\u2028or three\r\n", "two lines or three"),
    ("größer", "größer"),
    ("", ""),
    (None, ""),
    (2021, "2021"),
    (0.5, "0.5"),
    (True, "true"),
    (["a", "b\n"], '["a", "b\\n"]'),
    ({"id": "CC0"}, '{"id": "CC0"}'),
    ("\ud800", "?"),
]
"""What a record has, and the line that is kept of it."""


def captions(folder: Path) -> Multimodal:
    words = tokenizer(folder / "words.json")
    return Multimodal(text=Text(tokenizer=words), tokens={"image": SPECIAL[0]})


def lines(path: Path, column: str = KEEP[0]) -> list[str]:
    text = (path / values_name(column)).read_text(encoding="utf-8")
    assert not text or text.endswith("\n")
    return text.split("\n")[:-1]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Text -> line is its first word: "3 ..." has VALUES[3]. Repeated texts have another value."""
    folder = tmp_path_factory.mktemp("kept")
    records = [
        {"text": f"{at % len(VALUES)} {at}", "license": VALUES[at % len(VALUES)][0]} for at in range(90)
    ]
    rest = ["", "{", json.dumps({"license": "of no text"}), json.dumps({"text": "3 without the column"})]
    again = [json.dumps({"text": each["text"], "license": "again"}) for each in records[:9]]
    (folder / "a.jsonl").write_text("\n".join([*map(json.dumps, records), *rest, *again]))
    (folder / "b.json").write_text(json.dumps([{"text": "0 of a list", "license": "MIT", "more": 1}]))
    day = datetime.date(2024, 2, 29)
    table = {"text": ["4 row", "0 row", None], "license": [None, "MIT", "x"], "crawled on": [day, None, day]}
    pq.write_table(pa.table(table), folder / "c.parquet", row_group_size=2)
    pq.write_table(pa.table({"text": ["3 of another table"]}), folder / "d.parquet")
    with pa.OSFile(str(folder / "e.arrow"), "wb") as sink:
        some = pa.table({"license": ["MIT"], "text": ["0 arrow"]})
        with pa.ipc.new_stream(sink, some.schema) as writer:
            writer.write_table(some)
    (folder / "f.txt").write_text("3 a file of text")
    return sorted(folder.iterdir())


@pytest.mark.parametrize("options", [{}, {"dedup": True, "validation": 0.3}], ids=["plain", "sets"])
def test_each_document_has_the_value_of_its_record(
    inputs: list[Path], tmp_path: Path, options: dict[str, Any]
) -> None:
    made = list[dict[str, bytes]]()
    for part_bytes in (300, 1 << 20):
        out = tmp_path / str(part_bytes)
        done = prepare(
            inputs, out, BYTES, max_errors=3, part_bytes=part_bytes, engine=Here(), keep=KEEP, **options
        )
        made.append(tree(out))
        repeated = 0
        for name in ("train", "validation") if options else (".",):
            there = [each.decode() for each in documents(out / name)]
            kept, days = lines(out / name), lines(out / name, KEEP[1])
            assert len(kept) == len(days) == len(there) > 5
            for text, value, day in zip(there, kept, days):
                repeated += value == "again"
                assert value in (VALUES[int(text.split()[0])][1], "again"), text
                assert day == ("2024-02-29" if text == "4 row" else "")
            told = done.manifest["stores"][name]["kept"]
            assert told == {KEEP[0]: sum(map(bool, kept)), KEEP[1]: sum(map(bool, days))}
        assert repeated == (0 if options else 9), "of repeated documents, the first one's value stays"
    assert made[0] == made[1], "the parts decide nothing"


def test_the_rest_of_the_output_does_not_depend_on_it(inputs: list[Path], tmp_path: Path) -> None:
    for name, keep in (("with", KEEP), ("without", ())):
        prepare(inputs, tmp_path / name, BYTES, max_errors=3, engine=Here(), keep=keep)
    kept, plain = tree(tmp_path / "with"), tree(tmp_path / "without")
    assert kept.keys() - plain.keys() == {"license.values", "crawled_on.values"}
    assert all(kept[name] == plain[name] for name in plain if name != "manifest.json")


def test_a_job_goes_on_with_the_same_columns_alone(inputs: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    how: dict[str, Any] = {"max_errors": 3, "part_bytes": 300}
    prepare(inputs, tmp_path / "whole", BYTES, engine=Local(2), keep=KEEP, **how)
    with pytest.raises(KeyboardInterrupt):
        prepare(inputs, out, BYTES, engine=Here(stop_after=2), keep=KEEP, **how)
    for keep in ("license", ()):
        with pytest.raises(
            PrepareError, match=r"of another job: keep was \['license', 'crawled on'\] and is"
        ):
            prepare(inputs, out, BYTES, engine=Here(), keep=keep, resume=True, **how)
    prepare(inputs, out, BYTES, engine=Here(), keep=KEEP, resume=True, **how)
    assert tree(out) == tree(tmp_path / "whole")
    prepare(inputs, out, BYTES, engine=Here(), overwrite=True, **how)
    assert not list(out.glob("*.values")), "an output that has some is replaced as a whole"


def test_columns_that_cannot_be_kept(inputs: list[Path], tmp_path: Path) -> None:
    for keep, message in (
        (("license", ""), "--keep license,: the name of a column is empty"),
        (("a/b", "a b"), r"two of these columns would be written to a_b.values; rename one"),
    ):
        with pytest.raises(PrepareError, match=message):
            prepare(inputs, tmp_path / "out", BYTES, keep=keep)
    with pytest.raises(PrepareError, match="--keep license: text files have no columns; leave it out"):
        prepare(inputs[-1:], tmp_path / "out", BYTES, keep="license")


@pytest.mark.parametrize("name", ["c.parquet", "e.arrow", "mds"])
def test_a_column_that_no_table_has_ends_the_run_before_it_begins(
    inputs: list[Path], tmp_path: Path, name: str
) -> None:
    table, encoding = inputs[0].parent / name, BYTES
    if name == "mds":
        table, encoding = tmp_path / "mds", captions(tmp_path)
        with mosaic.imported(keep=()).MDSWriter(
            out=str(table), columns={"text": "str", "license": "str"}
        ) as made:
            made.write({"text": "x", "license": "MIT"})
    with pytest.raises(
        PrepareError, match=r"--keep licence: no input has such a column; .*'license'"
    ) as caught:
        prepare(
            [table],
            tmp_path / "out",
            encoding,
            engine=Here(stop_after=0),
            keep=("license", "licence"),
            max_errors=1,
        )
    assert not hasattr(caught.value, "__notes__")
    assert not list(tmp_path.glob("out*")), "nothing was kept"


@pytest.mark.parametrize("name", ["a.jsonl", "tar"])
def test_a_column_that_no_record_has_is_not_published(
    inputs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    given = [str(inputs[0].parent / name), "--tokenizer", "bytes", "--max-errors", "3"]
    if name == "tar":
        told = json.dumps({"text": "<image>x", "license": "CC0"}).encode()
        tar(tmp_path / "a.tar", [("1.png", picture(2, 3)), ("1.json", told)])
        words = tokenizer(tmp_path / "words.json")
        given = [str(tmp_path / "a.tar"), "--tokenizer", words, "--multimodal", "--image-token", SPECIAL[0]]
    words = ["prepare", *given, "--out", str(tmp_path / "out"), "--keep"]
    for more in ([], ["--resume"]):
        assert main([*words, "license,licence", *more]) == 2
        err = capsys.readouterr().err
        assert (
            "--keep licence: no document has a value of it; columns that are there: 'text', 'license'" in err
        )
        assert "--overwrite and the right name" in err and "continue with --resume" not in err
        assert not (tmp_path / "out").exists()
    assert main([*words, "license", "--overwrite"]) == 0


@pytest.mark.parametrize("name", ["a.jsonl", "b.parquet", "c"])
def test_the_limit_of_a_record_counts_what_is_kept(tmp_path: Path, name: str) -> None:
    record, path = {"text": "<image>", "license": "y" * 900}, tmp_path / name
    if name == "c":
        with mosaic.imported(keep=()).MDSWriter(
            out=str(path), columns={"text": "str", "license": "str", "image": "png"}
        ) as made:
            made.write({**record, "image": Image.new("RGB", (3, 2))})
    elif name == "b.parquet":
        pq.write_table(pa.Table.from_pylist([record]), path)
    else:
        path.write_text(json.dumps(record))
    how, encoding = {"engine": Here(), "keep": "license"}, captions(tmp_path) if name == "c" else BYTES
    with pytest.raises(PrepareError, match=r"more than 900 bytes; .*--max-record-bytes"):
        prepare([path], tmp_path / "out", encoding, max_record_bytes=900, **how)
    prepare([path], tmp_path / "out", encoding, max_record_bytes=1200, **how)


def test_a_column_of_nulls_is_kept(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x", "year": null}\n')
    pq.write_table(pa.table({"text": ["y"], "year": pa.nulls(1)}), tmp_path / "b.parquet")
    for name in ("a.jsonl", "b.parquet"):
        made = prepare([tmp_path / name], tmp_path / f"out.{name}", BYTES, engine=Here(), keep="year")
        assert made.manifest["stores"]["."]["kept"] == {"year": 0}


def test_samples_of_tars_and_mds(tmp_path: Path) -> None:
    picture_ = picture(2, 3)
    told = json.dumps({"text": "<image>x", "license": "CC0"}).encode()
    shards = tmp_path / "shards"
    shards.mkdir()
    tar(shards / "a.tar", [("1.png", picture_), ("1.json", told), ("2.png", picture_), ("2.txt", b"y")])
    columns = {"text": "str", "image": "png", "license": "int"}
    with mosaic.imported(keep=()).MDSWriter(out=str(tmp_path / "mds"), columns=columns) as writer:
        writer.write({"text": "<image>", "image": Image.new("RGB", (3, 2)), "license": 7})
    for where, wanted in ((shards, ["CC0", ""]), (tmp_path / "mds", ["7"])):
        prepare([where], tmp_path / "out", captions(tmp_path), engine=Here(), keep="license", overwrite=True)
        assert lines(tmp_path / "out") == wanted


def test_the_commands(inputs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`prepare --keep`, then `audit --by` of a store alone and of a mixture, without further work."""
    out, other = tmp_path / "out", jsonl(tmp_path / "other.jsonl", ["no licence " * 9] * 20)
    words = ["--tokenizer", "bytes", "--keep", "license,crawled on", "--max-errors", "3"]
    assert main(["prepare", *map(str, inputs), "--out", str(out), *words]) == 0
    assert "1 document with a value of 'crawled on'" in capsys.readouterr().out
    assert main(["prepare", str(other), "--out", str(tmp_path / "other"), "--tokenizer", "bytes"]) == 0
    (tmp_path / "recipe.py").write_text(
        f"import meshfeed as mf\nout, other = mf.open({str(out)!r}), mf.open({str(tmp_path / 'other')!r})\n"
        "data = mf.Mixture({'out': (out, 1), 'other': (other, 1)})\n"
        "recipe = mf.Recipe(data=data, sequence=mf.Documents(), batch=mf.Batch(8), seed=1)\n"
    )
    capsys.readouterr()
    kept, tokens = lines(out), dict[str, int]()
    with mf.open(out) as store:
        for value, length in zip(kept, store.lengths(np.arange(len(kept))).tolist()):
            tokens[value] = tokens.get(value, 0) + length
    whole = ["--sequences", str(len(kept)), "--until", "1"]
    assert main(["audit", str(out), *whole, "--by", "license", "--json"]) == 0
    by = json.loads(capsys.readouterr().out)["by"]
    assert {each["value"]: each["tokens"] for each in by} == tokens
    (tmp_path / "given.txt").write_text("".join(f"{each}\n" for each in kept))
    recipe, found = str(tmp_path / "recipe.py"), list[Any]()
    for given in ("license", "out=license", f"out={tmp_path}/given.txt"):
        assert main(["audit", recipe, "--until", "5", "--by", given, "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1] == found[2] and {each["source"] for each in found[0]["by"]} == {"out"}
    for given, message in (
        (["date"], "--by date: no store has kept such a column by `meshfeed prepare --keep`"),
        (
            ["license", "out=crawled on"],
            "--by out=crawled on: 'out' has values already; ask for each column alone",
        ),
    ):
        by_ = [word for each in given for word in ("--by", each)]
        assert main(["audit", recipe, "--until", "5", *by_]) == 2
        assert message in capsys.readouterr().err
