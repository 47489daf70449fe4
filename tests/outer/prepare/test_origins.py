"""Each document of an output names the record that it was, and the commands say it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from texts import Here, documents, jsonl, parquet, texts

from meshfeed.cli.main import main
from meshfeed.formats.prepared import ORIGINS, Origins
from meshfeed.prepare import Text, prepare

BYTES = Text(tokenizer="bytes")


def record(origin: dict[str, Any]) -> str:
    """The text of the record that an origin names."""
    path = Path(origin["file"])
    if "line" in origin:
        raw = path.read_bytes()
        lines = (gzip.decompress(raw) if path.suffix == ".gz" else raw).split(b"\n")
        return json.loads(lines[origin["line"] - 1])["text"]
    if "row" in origin:
        return pq.read_table(path)["text"][origin["row"]].as_py()
    if "item" in origin:
        return json.loads(path.read_text())[origin["item"]]["text"]
    return path.read_text()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Records with blank lines, malformed ones, and repetitions among them, in files of all kinds."""
    folder, some = (
        tmp_path_factory.mktemp("inputs"),
        [f"{at} {text}" for at, text in enumerate(texts(120, 4))],
    )
    jsonl(folder / "a.jsonl", some[:50], blank_every=7)
    with (folder / "a.jsonl").open("a") as file:
        print("{", json.dumps({"other": 1}), json.dumps({"text": some[3]}), sep="\n", file=file)
    jsonl(folder / "b.jsonl.gz", [*some[50:70], some[0], *some[70:80]])
    parquet(folder / "c.parquet", [*some[80:100], some[1], None, *some[100:110]])
    (folder / "d.txt").write_text(some[110])
    (folder / "e.json").write_text(json.dumps([{"text": each} for each in some[111:]]))
    return sorted(folder.iterdir())


@pytest.mark.parametrize("options", [{}, {"dedup": True, "validation": 0.3}], ids=["plain", "sets"])
def test_each_document_is_the_record_that_it_names(
    inputs: list[Path], tmp_path: Path, options: dict[str, Any]
) -> None:
    made = []
    for part_bytes in (300, 1 << 20):
        out = tmp_path / str(part_bytes)
        prepare(inputs, out, BYTES, max_errors=3, part_bytes=part_bytes, engine=Here(), **options)
        folders = [out / "train", out / "validation"] if options else [out]
        for folder in folders:
            there = documents(folder)
            origins = Origins.of_store(str(folder))
            assert origins is not None and there
            assert [record(each).encode() for each in origins.of(np.arange(len(there)))] == there
            made.append((folder / ORIGINS).read_bytes())
    assert made[: len(made) // 2] == made[len(made) // 2 :], "the parts decide nothing"
    assert options or np.load(tmp_path / "300" / ORIGINS).shape[1] < 25, "runs, not documents"


def test_commands_name_file_and_line(
    inputs: list[Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "500")  # paths are not broken
    out, removal = tmp_path / "out", tmp_path / "removal.txt"
    prepare(inputs, out, BYTES, max_errors=3, engine=Here())
    removal.write_text("8\n60")
    there = documents(out)
    for command in (
        ["trace", str(out), "--document", "8"],
        ["exposure", str(out), str(removal), "--until", "3"],
    ):
        words = [*command, "--sequences", "50"]
        assert main([*words, "--json"]) == 0
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        told = [line for line in lines if "document" in line]
        assert told and [record(line["origin"]).encode() for line in told] == [
            there[line["document"]] for line in told
        ]
        assert main(words) == 0
        assert f"{inputs[0]} line 11" in capsys.readouterr().out, "8 documents, and 2 blank lines"


def test_a_range_of_a_store_has_the_origins_of_its_documents(
    inputs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(inputs, tmp_path / "out", BYTES, max_errors=3, engine=Here())
    there = documents(tmp_path / "out")
    (tmp_path / "recipe.py").write_text(
        "import meshfeed as mf\n"
        f"some = mf.open({str(tmp_path / 'out')!r})[5:][3:40]\n"
        "recipe = mf.Recipe(data=some, sequence=mf.Documents(), batch=mf.Batch(50))\n"
        "packing = mf.Packing(capacity=4096)\n"
    )
    assert main(["trace", str(tmp_path / "recipe.py"), "--document", "2", "--json"]) == 0
    (line,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert line["document"] == 2 and record(line["origin"]).encode() == there[10]


def test_stores_without_origins(inputs: list[Path], tmp_path: Path) -> None:
    prepare(inputs[:1], tmp_path / "out", BYTES, max_errors=3, engine=Here())
    (tmp_path / "out" / ORIGINS).unlink()
    assert Origins.of_store(str(tmp_path / "out")) is None
    assert Origins.of_store("s3://bucket/out") is None
