"""meshfeed trace against what simulate hands out, and documents there and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshfeed as mf
from meshfeed.cli.main import main
from meshfeed.order import draws_of_step
from meshfeed.store import IndexedWriter
from pictures import write_pictures

RECIPE = """
import meshfeed as mf

code, docs = mf.open("{folder}/code"), mf.open("{folder}/docs")
data = mf.Mixture({{"code": (code, 2), "docs": (docs, 1)}})
recipe = mf.Recipe(data=data, sequence=mf.{rule}, batch=mf.Batch(sequences=6), seed=3)
blocks = mf.Recipe(
    data=data, sequence=mf.{rule}, batch=mf.Batch(sequences=6), shuffle=mf.Blocks(sequences=5, lanes=2)
)
other = mf.Recipe(data=code, sequence=mf.{rule}, batch=mf.Batch(sequences=6), epochs=1)
nothing = 5
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stores whose every token tells its document: document * 100 + place, mod 2**16."""
    path, rng = tmp_path_factory.mktemp("traced"), np.random.default_rng(0)
    for name, count in (("code", 60), ("docs", 25)):
        with IndexedWriter(path / name, np.uint16) as writer:
            for document in range(count):
                size = 0 if document % 10 == 7 else int(rng.integers(1, 90))
                writer.add_document((document * 100 + np.arange(size)).astype(np.uint16))
    for rule in ("Windows(40)", "Documents()"):
        (path / f"{rule[:4]}.py").write_text(RECIPE.format(folder=path, rule=rule))
    return path


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert main(["trace", *arguments, "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def tokens_of(line: dict[str, Any]) -> list[int]:
    start, stop = map(int, line["tokens"].split(":"))
    return [line["document"] * 100 + at for at in range(start, stop)]


def recipe_in(file: Path, name: str = "recipe") -> mf.Recipe:
    made: dict[str, Any] = {}
    exec(file.read_text(), made)
    return made[name]


@pytest.mark.parametrize("recipe", ["recipe", "blocks"])
@pytest.mark.parametrize("step", [0, 5, 40])
def test_windows_are_told_token_by_token(
    folder: Path, capsys: pytest.CaptureFixture[str], step: int, recipe: str
) -> None:
    file = folder / "Wind.py"
    for rank, layout in ((0, "dp1"), (3, "tp2-dp3"), (5, "dp3-tp2")):
        (made,) = mf.simulate(
            recipe_in(file, recipe), mf.Layout.parse(layout), [step], ranks=[rank], micro_batch_size=2
        )
        wanted = [row.tolist() for m in made.microbatches for row in m["tokens"][: len(m.draws)]]
        lines = told(capsys, f"{file}:{recipe}", "--step", str(step), "--layout", layout, "--rank", str(rank),
                     "--micro-batch-size", "2")  # fmt: skip
        by_place: dict[int, list[int]] = {}
        for line in lines:
            by_place.setdefault(line["place"], []).extend(tokens_of(line))
        assert list(by_place.values()) == wanted
        assert {line["source"] for line in lines} <= {"code", "docs"}


def test_packed_documents_are_told_with_their_ranks(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    packing = ("--capacity", "128", "--policy", "balanced")
    lines = told(capsys, str(folder / "Docu.py"), "--step", "3", "--layout", "dp4", *packing)
    draws = draws_of_step(recipe_in(folder / "Docu.py"), 3)
    some = {place for place in range(6) if draws.index[place] % 10 != 7}
    assert {line["place"] for line in lines} == some
    assert all(line["document"] == draws.index[line["place"]] for line in lines)
    of_rank = told(capsys, str(folder / "Docu.py"), "--step", "3", "--layout", "dp4", *packing, "--rank", "2")
    assert 0 < len(of_rank) < len(lines)
    assert [line for line in lines if line in of_rank] == of_rank


@pytest.mark.parametrize("recipe", ["recipe", "blocks"])
@pytest.mark.parametrize("name", ["Wind", "Docu"])
def test_where_a_document_went_is_where_it_is_seen(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str, recipe: str
) -> None:
    file, packing = str(folder / f"{name}.py:{recipe}"), ["--capacity", "128"] if name == "Docu" else []
    for document in ("code:0", "code:31", "docs:24", "code:59"):
        found = told(capsys, file, "--document", document, "--epochs", "0:3")
        assert name == "Wind" or [line["epoch"] for line in found] == [0, 1, 2]
        for line in found:
            seen = told(capsys, file, "--step", str(line["step"]), *packing)
            here = [s for s in seen if s["place"] == line["place"]]
            assert f"{here[0]['source']}:{line['index']}" == f"{document[:4]}:{here[0]['index']}"
            assert int(document[5:]) in {s["document"] for s in here}


def test_every_sight_of_a_document_is_found(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, seen = str(folder / "Wind.py"), dict[int, set[tuple[int, int, int, int]]]()
    for step in range(25):
        for line in told(capsys, file, "--step", str(step)):
            if line["source"] == "code":
                sight = (line["epoch"], line["index"], step, line["place"])
                seen.setdefault(line["document"], set()).add(sight)
    for document in (0, 1, 12, 30, 31, 45, 58, 59):
        found = told(capsys, file, "--document", f"code:{document}", "--epochs", "0:9")
        assert seen[document] == {
            (line["epoch"], line["index"], line["step"], line["place"])
            for line in found
            if line["step"] is not None and line["step"] < 25
        }, document


@pytest.mark.parametrize("packing", [[], ["--capacity", "512"]])
def test_a_document_never_comes_in_a_step_that_is_skipped(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], packing: list[str]
) -> None:
    file, ledger = folder / "Docu.py", str(tmp_path / "ledger.jsonl")
    skip = mf.amendments.Amendment(1, mf.amendments.SkipSteps(3, 4))
    mf.amendments.Ledger((skip,)).write(ledger)
    draws = draws_of_step(recipe_in(file), 3)
    document = f"{('code', 'docs')[draws.source[0]]}:{draws.index[0]}"
    (line,) = told(capsys, str(file), "--document", document, *packing)
    assert line["step"] == 3
    (line,) = told(capsys, str(file), "--document", document, *packing, "--amendments", ledger)
    assert line["step"] is line["place"] is line["microbatch"] is None and not line["ranks"]


def test_a_store_alone_and_tables(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, str(folder / "code"), "--document", "3", "--sequences", "8")
    assert found[0]["index"] == 3 and found[0]["step"] < 8
    for arguments in (["--document", "3"], ["--document", "7"], ["--step", "0", "--capacity", "512"]):
        assert main(["trace", str(folder / "code"), *arguments]) == 0
    assert "place" in capsys.readouterr().out
    ended = told(capsys, str(folder / "Docu.py") + ":other", "--document", "5", "--epochs", "1:2")
    assert [line["step"] for line in ended] == [None]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["Wind.py", "--document", "books:3"], "write code:NUMBER, docs:NUMBER"),
        (["Wind.py", "--document", "code:x"], "write code:NUMBER"),
        (["Wind.py", "--document", "code:99"], "document 99"),
        (["Wind.py:nothing", "--step", "0"], "makes no mf.Recipe called 'nothing'"),
        (["Nowhere.py", "--step", "0"], "no such file"),
        (["Wind.py:other", "--step", "99"], "the stream ends before"),
        (["Docu.py", "--step", "0"], "give --capacity"),
        (["Broken.py", "--step", "0"], "Broken.py:1: ZeroDivisionError"),
    ],
)
def test_what_cannot_be_traced(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    (folder / "Broken.py").write_text("1 / 0\n")
    assert main(["trace", str(folder / arguments[0]), *arguments[1:]]) == 2
    assert message in capsys.readouterr().err


def test_a_step_without_tokens_is_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with mf.IndexedWriter(tmp_path / "c", np.uint16) as writer:
        for length in (5, 0, 4):
            writer.add_document(np.arange(length, dtype=np.uint16))
    (tmp_path / "r.py").write_text(
        f"import meshfeed as mf\nrecipe = mf.Recipe(mf.open({str(tmp_path / 'c')!r}), mf.Documents(), 1, shuffle='none')\n"
    )
    arguments = ["trace", str(tmp_path / "r.py"), "--capacity", "16", "--step"]
    assert main([*arguments, "1"]) == 0
    assert capsys.readouterr().out == "nothing\n"


def test_a_plan_tells_of_each_source(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", str(folder / "Docu.py"), "--layout", "dp2", "--capacity", "256", "--steps", "0:3"]
    assert main([*arguments, "--json"]) == 0
    steps = json.loads(capsys.readouterr().out)["steps"]
    assert [sum(each["sequences"] for each in step["sources"].values()) for step in steps] == [6, 12, 18]
    assert steps[2]["sources"]["code"]["epochs"] == steps[2]["sources"]["code"]["sequences"] / 60
    assert main(arguments) == 0
    assert "docs: 6 sequences, 0.240 epochs after step 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["Wind.py", "--step", "0", "--oversize", "drop"],
            "--oversize is of sequences that are packed, and Wind",
        ),
        (
            ["Wind.py", "--step", "0", "--align-pack", "1"],
            "--align-pack is of sequences that are packed, and Wind",
        ),
        (["Wind.py", "--document", "code:3", "--cost", "none"], "--cost is of sequences that are packed"),
        (
            ["Docu.py", "--document", "code:3", "--oversize", "drop"],
            "--oversize changes nothing without --capacity",
        ),
        (
            ["Docu.py", "--document", "code:3", "--alpha", "25100"],
            "--alpha changes nothing without --capacity",
        ),
        (["Docu.py", "--document", "code:3", "--rank", "0"], "--rank needs --capacity"),
        (["Docu.py", "--document", "code:3", "--layout", "dp2"], "--layout needs --capacity"),
        (
            ["Docu.py", "--step", "0", "--capacity", "99", "--micro-batch-size", "1"],
            "--micro-batch-size is of",
        ),
        (["Wind.py", "--step", "0", "--epochs", "0:1"], "--epochs is of --document"),
    ],
)
def test_options_that_would_change_nothing_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    assert main(["trace", str(folder / arguments[0]), *arguments[1:]]) == 2
    assert says in capsys.readouterr().err


PARTS = """
import meshfeed as mf
from pictures import Listen, Look

rule = mf.Multimodal(image=Look(), audio=Listen())
recipe = mf.Recipe(data=mf.open("{folder}"), sequence=rule, batch=mf.Batch(sequences=20))
"""


def test_the_bytes_of_every_part_that_a_rank_saw(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_pictures(tmp_path / "store")
    (file := tmp_path / "recipe.py").write_text(PARTS.format(folder=tmp_path / "store"))
    recipe, packing = recipe_in(file), mf.Packing(capacity=64)
    for made in mf.simulate(recipe, mf.Layout(dp=2), 1, packing=packing):
        lines = told(
            capsys, str(file), "--step", "0", "--layout", "dp2", "--rank", str(made.rank), "--capacity", "64"
        )
        found = []
        for part in (part for line in lines for part in line["parts"]):
            start, stop = map(int, part["bytes"].split(":"))
            found.append((part["part"], part["kind"], Path(part["file"]).read_bytes()[start:stop]))
        wanted = []
        with mf.open(tmp_path / "store") as store:
            for index in (i for m in made.microbatches for i in m.draws.index.tolist()):
                kinds = store.parts(np.array([index])).kind.tolist()
                at = np.arange(len(kinds))
                data = store.read_parts(np.full(at.size, index), at)
                wanted += [
                    (i, ("image", "audio")[kind], each) for i, kind, each in zip(at.tolist(), kinds, data)
                ]
        assert found == wanted and found
    documents = told(capsys, str(file), "--document", "3")
    assert [line["parts"] for line in documents] == [[]], "without a packing, nobody has it"
    monkeypatch.setenv("COLUMNS", "300")
    assert main(["trace", str(file), "--step", "0", "--capacity", "64"]) == 0
    assert "0 audio 341:347" in capsys.readouterr().out
