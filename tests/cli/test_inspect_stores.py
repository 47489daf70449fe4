"""`meshfeed inspect` on every format, near and far: counts, texts, and what an exit status tells."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from demo.storage import Manners, SlowStorage

import lit
import meshfeed as mf
import mosaic
from meshfeed.cli.main import main
from meshfeed.store import IndexedWriter

TEXTS = ["one two three", "a", "three two one <b>two</b>", "two"]
TOKENS = [list(text.encode()) for text in TEXTS]
FORMATS = {
    "bin": "megatron",
    "dataset": "dataset.json",
    "mds": "MDS",
    "litdata": "litdata",
    "jsonl": "jsonl",
    "parquet": "parquet",
}


def write(folder: Path, kind: str) -> tuple[str, list[str]]:
    """A store of TEXTS as bytes: its path, and what `inspect` must be told of it."""
    match kind:
        case "bin":
            with IndexedWriter(folder / "c", np.uint8) as writer:
                for tokens in TOKENS:
                    writer.add_document(np.array(tokens, np.uint8))
            return str(folder / "c"), []
        case "dataset":
            with mf.DatasetWriter(folder / "c", {"tokens": "uint8", "loss_mask": "uint8"}) as writer:
                for tokens in TOKENS:
                    writer.add_document(tokens=np.array(tokens), loss_mask=np.ones(len(tokens), np.uint8))
            return str(folder / "c"), []
        case "mds":
            with mosaic.imported().MDSWriter(
                out=str(folder / "c"), columns={"tokens": "ndarray:uint8"}
            ) as made:
                for tokens in TOKENS:
                    made.write({"tokens": np.array(tokens, np.uint8)})
            return str(folder / "c"), []
        case "litdata":
            lit.written(folder / "c", [{"tokens": np.array(tokens, np.uint8)} for tokens in TOKENS])
            return str(folder / "c"), []
        case "jsonl":
            (folder / "c.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
            return str(folder / "c.jsonl"), ["--tokenizer", "bytes"]
        case _:
            import pyarrow as pa
            import pyarrow.parquet as pq

            pq.write_table(pa.table({"words": TEXTS}), folder / "c.parquet")
            return str(folder / "c.parquet"), ["--tokenizer", "bytes", "--column", "words"]


def told(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any], str]:
    status = main(["inspect", *words, "--json"])
    captured = capsys.readouterr()
    return status, json.loads(captured.out) if captured.out else {}, captured.err


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_is_counted_decoded_and_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    path, words = write(tmp_path, kind)
    words = [*words, "--cache", str(tmp_path / "cache"), "--show", "9", "--verify"]
    if "--tokenizer" not in words:
        words += ["--tokenizer", "bytes"]
    status, facts, err = told(capsys, path, *words)
    assert status == 0, err
    assert FORMATS[kind] in facts["format"]
    assert (facts["num_documents"], facts["num_tokens"]) == (4, sum(map(len, TOKENS)))
    assert facts["dtype"] == "uint8" and facts["verified"] is True
    assert [text["text"] for text in facts["texts"]] == TEXTS
    assert facts["document_lengths"]["max"] == max(map(len, TOKENS))
    assert sum(each["tokens"] for each in facts["document_lengths"]["histogram"]) == facts["num_tokens"]
    if kind in ("mds", "litdata", "jsonl", "parquet"):
        assert facts["num_shards"] == 1
        assert facts["shard_documents"] == {"min": 4, "median": 4.0, "max": 4}
    assert main(["inspect", path, *words]) == 0
    assert "three two one <b>two</b>" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["bin", "dataset", "mds", "litdata", "jsonl"])
def test_far_away_it_is_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    (tmp_path / "served").mkdir()
    path, words = write(tmp_path / "served", kind)
    words += ["--cache", str(tmp_path / "cache"), "--verify"]
    near = told(capsys, path, *words)[1]
    with SlowStorage(tmp_path / "served", Manners(latency_s=0.0, late_every=None)) as storage:
        status, facts, err = told(capsys, f"{storage.url}/{Path(path).name}", *words)
    assert status == 0, err
    for key in ("format", "num_documents", "num_tokens", "fingerprint", "document_lengths", "verified"):
        assert facts[key] == near[key]


def test_a_broken_store_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, _ = write(tmp_path, "bin")
    assert main(["inspect", path, "--write-checksums"]) == 0
    data = Path(f"{path}.bin")
    data.write_bytes(b"!" + data.read_bytes()[1:])
    capsys.readouterr()
    status, facts, _ = told(capsys, path, "--verify")
    assert status == 1 and "c.bin: bytes 0.." in facts["broken"] and "verified" not in facts


def test_a_tokenizer_of_another_vocabulary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = {"one": 0, "two": 1, "three": 2}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="one"))
    (tmp_path / "model").mkdir()
    made.save(str(tmp_path / "model/tokenizer.json"))
    with IndexedWriter(tmp_path / "c", np.uint16) as writer:
        writer.add_document(np.array([0, 1, 2, 1], np.uint16))
    for name in ("model", "model/tokenizer.json"):
        status, facts, _ = told(
            capsys, str(tmp_path / "c"), "--show", "1", "--tokenizer", str(tmp_path / name)
        )
        assert status == 0 and facts["texts"] == [{"document": 0, "text": "one two three two"}]
    assert told(capsys, str(tmp_path / "c"), "--show", "1")[1]["texts"][0]["text"] == "0 1 2 1"
    with IndexedWriter(tmp_path / "d", np.uint16) as writer:
        writer.add_document(np.array([0, 111], np.uint16))
    status, _, err = told(capsys, str(tmp_path / "d"), "--show", "1", "--tokenizer", str(tmp_path / "model"))
    assert status == 2 and "knows tokens below 3, the store has 111" in err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--tokenizer", "bytes"), "add --show N"),
        (("--show", "1", "--tokenizer", "nowhere.json"), "nowhere.json: missing; give its path on this node"),
        (("--column", "tokens"), "column='tokens' says nothing about a Megatron store"),
        (("--storage", "region"), "--storage region: write NAME=VALUE"),
    ],
)
def test_what_cannot_be_asked(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    path, _ = write(tmp_path, "bin")
    status, facts, err = told(capsys, path, *words)
    assert (status, facts) == (2, {}) and says in err
    assert main(["inspect", path, *words]) == 2
    assert capsys.readouterr().out == "", "no answer in words either"


def test_a_shard_that_is_gone_is_a_broken_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, _ = write(tmp_path, "mds")
    shutil.copytree(path, tmp_path / "other")
    next((tmp_path / "other").glob("shard*")).unlink()
    status, facts, _ = told(capsys, str(tmp_path / "other"), "--verify")
    assert status == 1 and "shard" in facts["broken"]
