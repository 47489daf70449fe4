"""`meshfeed inspect` on every format, near and far: counts, texts, and what an exit status tells."""

from __future__ import annotations

import json
import re
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
from meshfeed.report.samples import loss_of
from meshfeed.store import IndexedWriter

SAVED = Path(__file__).parents[1] / "formats" / "saved_by_datasets"
TEXTS = ["one two three", "a", "three two one <b>two</b>", "two"]
TOKENS = [list(text.encode()) for text in TEXTS]
FORMATS = {
    "bin": "megatron",
    "dataset": "dataset.json",
    "mds": "MDS",
    "litdata": "litdata",
    "jsonl": "dataset.json",
    "parquet": "dataset.json",
}


def write(folder: Path, kind: str, hashes: tuple[str, ...] = ()) -> tuple[str, list[str]]:
    """A store of TEXTS as bytes: its path, and what `inspect` must be told of it. hashes: of MDS."""
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
                out=str(folder / "c"), columns={"tokens": "ndarray:uint8"}, hashes=list(hashes)
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
        case "lists":
            (folder / "c.jsonl").write_text("".join(json.dumps({"tokens": each}) + "\n" for each in TOKENS))
            return str(folder / "c.jsonl"), []
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
    if kind in ("mds", "litdata"):
        assert facts["num_shards"] == 1
        assert facts["shard_documents"] == {"min": 4, "median": 4.0, "max": 4}
    assert main(["inspect", path, *words]) == 0
    said = capsys.readouterr().out
    assert ("t⟦hree two one <b>two</b>⟧" if kind == "dataset" else "three two one <b>two</b>") in said


@pytest.mark.parametrize("kind", ["bin", "dataset", "mds", "litdata", "jsonl"])
def test_far_away_it_is_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    (tmp_path / "served").mkdir()
    path, words = write(tmp_path / "served", kind)
    words += ["--cache", str(tmp_path / "cache"), "--verify"]
    near = told(capsys, path, *words)[1]
    with SlowStorage(tmp_path / "served", Manners(latency_s=0.0, late_every=None)) as storage:
        status, facts, err = told(capsys, f"{storage.url}/{Path(path).name}", *words)
    assert status == 0, err
    for key in (
        "format",
        "num_documents",
        "num_tokens",
        "fingerprint",
        "digest",
        "document_lengths",
        "verified",
    ):
        assert facts[key] == near[key]


@pytest.mark.parametrize("kind", ["bin", "dataset", "mds", "lists"])
@pytest.mark.parametrize("summed", [False, True])
def test_verify_says_whether_all_bytes_were_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, summed: bool
) -> None:
    path, words = write(tmp_path, kind, ("sha1",) if summed else ())
    for sums in [] if summed else [*tmp_path.rglob("*.sums")][-1:]:
        sums.unlink()
    is_summed = summed and kind != "lists"
    status, facts, _ = told(capsys, path, *words, "--verify")
    assert status == 0 and facts["verified"] is True and facts["compared"] is is_summed
    assert main(["inspect", path, *words, "--verify"]) == 0
    said = capsys.readouterr().out
    assert ("tokens were not compared" in said) is not is_summed and facts["digest"] in said
    assert main(["inspect", path, *words, "--verify", "--digest", facts["digest"]]) == 0
    capsys.readouterr()
    status, facts, _ = told(capsys, path, *words, "--verify", "--digest", "0" * 32)
    assert status == 1 and facts["broken"].startswith("the digest of its content is ")


def test_a_broken_store_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, _ = write(tmp_path, "bin")
    assert main(["inspect", path, "--write-checksums"]) == 0
    data = Path(f"{path}.bin")
    data.write_bytes(b"!" + data.read_bytes()[1:])
    capsys.readouterr()
    status, facts, _ = told(capsys, path, "--verify")
    assert status == 1 and "c.bin: bytes 0.." in facts["broken"] and "verified" not in facts


@pytest.mark.parametrize("json_lines", [True, False])
def test_what_is_asked_wrongly_is_no_broken_store(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], json_lines: bool
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    chats = {"messages": [[{"role": "user", "content": "a"}]], "text": ["a"]}
    path = tmp_path / ("c.jsonl" if json_lines else "c.parquet")
    if json_lines:
        path.write_text(json.dumps({name: values[0] for name, values in chats.items()}) + "\n")
    else:
        pq.write_table(pa.table(chats), path)
    wrong = [
        ([str(path)], "no column 'tokens'|no 'tokens' or 'input_ids'"),
        ([str(path), "--column", "text"], "text"),
        ([str(SAVED)], "a DatasetDict; give the path of one split"),
    ]
    for words, says in wrong:
        for options in ([], ["--verify"], ["--json"]):
            assert main(["inspect", *words, *options, "--cache", str(tmp_path / "cache")]) == 2, words
            said = capsys.readouterr()
            assert "broken" not in said.out + said.err
            assert re.search(says, said.err), said.err


def test_what_bears_loss_is_marked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"input_ids": list(b"ask me: tell <i>"), "labels": [-100] * 8 + list(b"tell <i>")}
    (tmp_path / "c.jsonl").write_text(json.dumps(row) + "\n")
    words = [str(tmp_path / "c.jsonl"), "--show", "1", "--cache", str(tmp_path / "cache")]
    assert main(["inspect", *words]) == 0
    said = capsys.readouterr().out
    assert "what bears loss stands in ⟦ ⟧" in said and "109 101 58 32 ⟦116 101 108" in said
    status, facts, _ = told(capsys, *words)
    assert (status, facts["texts"][0]["bears_loss"]) == (0, ["116 101 108 108 32 60 105 62"])
    assert main(["inspect", *words, "--labels", "shifted"]) == 0
    assert "58 32 116 ⟦101 108" in capsys.readouterr().out
    with mf.DatasetWriter(tmp_path / "d", {"tokens": "uint8", "loss_mask": "uint8"}) as writer:
        writer.add_document(tokens=row["input_ids"], loss_mask=[0] * 8 + [1] * 8)
    file = tmp_path / "page.html"
    assert main(["inspect", str(tmp_path / "d"), "--html", str(file), "--tokenizer", "bytes"]) == 0
    page = file.read_text()
    assert (
        'ask me: <span class="loss">tell &lt;i&gt;</span>' in page and "Underlined: what bears loss" in page
    )
    assert main(["inspect", str(tmp_path / "d"), "--show", "1", "--tokenizer", "bytes"]) == 0
    assert "ask me: ⟦tell <i>⟧" in capsys.readouterr().out
    with mf.DatasetWriter(tmp_path / "e", {"tokens": "uint8", "loss_mask": "uint8"}) as writer:
        for bears in (1, 0):
            writer.add_document(tokens=list(b"told"), loss_mask=[bears] * 4)
    _, facts, _ = told(
        capsys, str(tmp_path / "e"), "--show", "2", "--html", str(file), "--tokenizer", "bytes"
    )
    assert facts["texts"] == [
        {"document": 0, "text": "told", "bears_loss": ["old"]},
        {"document": 1, "text": "told"},
    ]
    page = file.read_text()
    for said in ('t<span class="loss">old</span>', "3 bear loss in 1 span<", "0 bear loss in 0 spans"):
        assert said in page, "where all of it bears loss, and where none does"


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
        (("--column", "tokens"), "a Megatron store has no option column; leave out column='tokens'"),
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


def test_a_dataset_and_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with mf.DatasetWriter(tmp_path / "c", {"tokens": "uint16", "weight": "float32"}) as writer:
        for size in (5, 0, 1228):
            writer.add_document(tokens=np.arange(size), weight=np.ones(size))
    assert main(["inspect", str(tmp_path / "c"), "--json", "--verify"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["num_documents"], facts["num_tokens"], facts["verified"]) == (3, 1233, True)
    assert facts["format"] == "meshfeed dataset.json, version 1"
    assert facts["columns"] == "weight (float32)"
    (tmp_path / "d.jsonl").write_text('{"text": "abc"}\n{"text": ""}\n')
    assert main(["inspect", str(tmp_path / "d.jsonl"), "--tokenizer", "bytes", "--json", "--verify"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["format"], facts["num_documents"], facts["num_tokens"]) == (
        "meshfeed dataset.json, version 1",
        2,
        3,
    )
    assert (facts["dtype"], facts["document_lengths"]["max"]) == ("uint8", 3)
    (tmp_path / "d.jsonl").write_text('{"text": 5}\n')
    assert main(["inspect", str(tmp_path / "d.jsonl"), "--tokenizer", "bytes"]) == 1
    assert "line 1 (byte 0): int where text belongs" in capsys.readouterr().err


@pytest.mark.parametrize("labels", [None, "shifted", "unshifted"])
def test_how_much_of_a_store_bears_loss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], labels: Any
) -> None:
    """Over all documents, counted token by token; and where loss begins is shown, however long the prompt."""
    rng, name = np.random.default_rng(4), "labels" if labels else "loss_mask"
    written, expected, without = list[Any](), 0, 0
    with mf.DatasetWriter(tmp_path / "d", {"tokens": "uint8", name: "int16"}) as writer:
        for size in (700, 0, 1, 2, *rng.integers(1, 40, 30).tolist()):
            bears = rng.random(size) < 0.3
            if size == 700:
                bears[:] = np.arange(size) >= 690
            values = np.where(bears, 5, -100) if labels else bears
            writer.add_document(**{"tokens": np.full(size, 97), name: values.astype(np.int16)})
            written.append(bears)
    with mf.open(tmp_path / "d", **({"labels": labels} if labels else {})) as store:
        for bears in written:
            mine = int(bears.sum() if labels == "shifted" else bears[1:].sum())
            expected, without = expected + mine, without + (mine == 0)
        recipe = mf.Recipe(store, mf.Documents(), mf.Batch(len(written)), epochs=1)
        (step,) = mf.simulate(recipe, None, 1, packing=mf.Packing(capacity=1_000))
        assert step.batch.valid_tokens == expected
        told = {"tokens": expected, "of": store.num_tokens, "documents_without": without}
        assert loss_of(store) == told
    if labels != "shifted":
        return
    assert main(["inspect", str(tmp_path / "d"), "--documents", "0", "--labels", "shifted", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["loss"] == told and facts["texts"][0]["bears_loss"] == [" ".join(["97"] * 9)]


@pytest.mark.parametrize("column", ["tokens", "input_ids", "words"])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_lists_of_tokens_are_decoded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, column: str
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows, path = [{column: [*b"one"]}, {column: [*b"two"]}], tmp_path / f"d.{kind}"
    if kind == "jsonl":
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    named = ["--column", column] if column == "words" else []
    words = ["inspect", str(path), *named, "--tokenizer", "bytes", "--show", "2", "--json"]
    assert main(words) == 0
    assert [each["text"] for each in json.loads(capsys.readouterr().out)["texts"]] == ["one", "two"]
    assert main([*words, "--eod-token", "9"]) == 2 and "--eod-token is of text" in capsys.readouterr().err
