"""meshfeed exposure against trace, step by step, and what it says of lists that are wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshfeed as mf
from meshfeed.cli.main import main
from meshfeed.store import IndexedWriter

RECIPES = """
import meshfeed as mf

code, docs = mf.open("{folder}/code"), mf.open("{folder}/docs")
data = mf.Mixture({{"code": (code, 2), "docs": (docs, 1)}}).then(4, {{"code": 1, "docs": 3}})
windows = mf.Recipe(data=data, sequence=mf.Windows(40), batch=mf.Batch(sequences=8), seed=3)
documents = mf.Recipe(data=data, sequence=mf.Documents(), batch=mf.Batch(sequences=12), seed=3)
ends = mf.Recipe(data=code, sequence=mf.Windows(40), batch=mf.Batch(sequences=8), epochs=2)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, rng = tmp_path_factory.mktemp("exposed"), np.random.default_rng(0)
    for name, count in (("code", 60), ("docs", 25)):
        with IndexedWriter(path / name, np.uint16) as writer:
            for document in range(count):
                writer.add_document(
                    np.zeros(0 if document % 10 == 7 else int(rng.integers(1, 90)), np.uint16)
                )
    (path / "recipes.py").write_text(RECIPES.format(folder=path))
    return path


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert main([*arguments, "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def listed(folder: Path, text: str) -> str:
    (path := folder / "removal.txt").write_text(text)
    return str(path)


PACKED = ("--capacity", "128", "--policy", "dynamic_cp")


@pytest.mark.parametrize("name", ["windows", "documents"])
def test_each_sight_and_its_ranks_are_those_of_trace(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """A window's last label is no token of a trace: what holds it alone is told by exposure only."""
    recipe, job = f"{folder}/recipes.py:{name}", ["--layout", "tp2-cp2-dp2"]
    job += ["--micro-batch-size", "2"] if name == "windows" else PACKED
    wanted = {("code", d) for d in (0, 3, 7, 30, 31, 59)} | {("docs", d) for d in (0, 11, 24)}
    file = listed(folder, "".join(f"{source}\t{document}\n" for source, document in sorted(wanted)))
    summary, *lines = told(capsys, "exposure", recipe, file, "--until", "9", "--ranks", *job)
    seen: dict[tuple[Any, ...], tuple[int, set[int]]] = {}
    for step in range(9):
        for line in told(capsys, "trace", recipe, "--step", str(step), *job):
            if (line["source"], line["document"]) in wanted:
                start, stop = map(int, line["tokens"].split(":"))
                of = tuple(line[key] for key in ("step", "place", "source", "epoch", "index", "document"))
                tokens, ranks = seen.get(of, (0, set()))
                seen[of] = tokens + stop - start, ranks | set(line["ranks"])
    labels = 0
    for line in lines:
        of = tuple(line[key] for key in ("step", "place", "source", "epoch", "index", "document"))
        tokens, ranks = seen.pop(of, (0, set()))
        assert line["tokens"] - tokens in (0, 1) if name == "windows" else line["tokens"] == tokens
        assert line["ranks"] and ranks <= set(line["ranks"])
        labels += line["tokens"] - tokens
        assert name == "windows" or ranks == set(line["ranks"])
    assert not seen and (labels > 0) == (name == "windows")
    assert summary == {
        "until": 9,
        "documents": len(wanted),
        "seen": len({(line["source"], line["document"]) for line in lines}),
        "sequences": len(lines),
        "tokens": sum(line["tokens"] for line in lines),
        "first_step": lines[0]["step"],
        "last_step": lines[-1]["step"],
        "restart_step": lines[0]["step"],
        "last_step_with_loss": lines[-1]["step"],
        "restart_step_with_loss": lines[0]["step"],
    }
    assert not any(line["excluded"] for line in lines)


def test_what_is_excluded_is_told_to_bear_no_loss(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows keep the tokens of a document that is excluded; packs of documents do not."""
    monkeypatch.setenv("COLUMNS", "300")
    ledger = tmp_path / "ledger.jsonl"
    mf.amendments.Ledger(
        (
            mf.amendments.Amendment(0, mf.amendments.Exclude({"docs": [11]})),
            mf.amendments.Amendment(12, mf.amendments.Exclude({"code": [3, 41]})),
        )
    ).write(ledger)
    ends = {"code": 12, "docs": 0}  # the first step without loss
    file = listed(folder, "code\t3\ncode\t41\ndocs\t11\n")
    of = "--until", "30", "--amendments", str(ledger), "--checkpoint-every", "5"
    summary, *lines = told(capsys, "exposure", f"{folder}/recipes.py:windows", file, *of)
    assert all(line["excluded"] == (line["step"] >= ends[line["source"]]) for line in lines)
    before = [line["step"] for line in lines if not line["excluded"]]
    assert before and before[-1] == summary["last_step_with_loss"] < 12 < summary["last_step"]
    assert summary["restart_step_with_loss"] == before[0] // 5 * 5
    assert main(["exposure", f"{folder}/recipes.py:windows", file, *of]) == 0
    assert f"excluded after step {before[-1]}: tokens of an excluded document bear no loss\n" in (
        capsys.readouterr().out
    )
    summary, *lines = told(capsys, "exposure", f"{folder}/recipes.py:documents", file, *of)
    assert lines and all(line["source"] == "code" and line["step"] < 12 for line in lines)
    assert summary["last_step_with_loss"] == summary["last_step"]
    assert not any(line["excluded"] for line in lines)


def test_what_later_amendments_name_need_not_be_there(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A source has grown at step 12 by a store that is gone."""
    with mf.IndexedWriter(tmp_path / "more", np.uint16) as writer:
        writer.add_document(np.arange(500))
    ledger, file = tmp_path / "ledger.jsonl", listed(folder, "code\t3\ncode\t41\ndocs\t11\n")
    grown = mf.amendments.Amendment(12, mf.amendments.Grow("docs", str(tmp_path / "more")))
    mf.amendments.Ledger((mf.amendments.Amendment(3, mf.amendments.Exclude({"docs": [11]})), grown)).write(
        ledger
    )
    recipe, capacity = f"{folder}/recipes.py:documents", ("--capacity", "512")
    of = "--amendments", str(ledger)
    asked = [
        ("exposure", recipe, file, *of, "--until", "12"),
        ("trace", recipe, *of, *capacity, "--step", "11"),
    ]
    wanted = [told(capsys, *words) for words in asked]
    for each in tmp_path.glob("more*"):
        each.unlink()
    assert [told(capsys, *words) for words in asked] == wanted and all(wanted)
    for words in (
        ("exposure", recipe, file, *of, "--until", "13"),
        ("trace", recipe, *of, *capacity, "--step", "12"),
    ):
        assert main([*words]) != 0
        assert str(tmp_path / "more") in capsys.readouterr().err


def test_the_last_checkpoint_that_saw_none(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = f"{folder}/recipes.py:ends"
    summary, *lines = told(
        capsys, "exposure", recipe, listed(folder, "12\n\n12\n"), "--checkpoint-every", "3"
    )
    assert summary["documents"] == summary["seen"] == 1 and {line["document"] for line in lines} == {12}
    assert {line["epoch"] for line in lines} == {0, 1}
    first = summary["first_step"]
    assert first == min(line["step"] for line in lines) and summary["restart_step"] == first // 3 * 3
    (summary,) = told(
        capsys, "exposure", recipe, listed(folder, "7"), "--until", "20", "--checkpoint-every", "8"
    )
    assert (summary["first_step"], summary["restart_step"], summary["seen"]) == (None, 16, 0), (
        "no token in it"
    )


def test_what_people_read(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    many = listed(folder, "".join(f"code\t{document}\r\n" for document in range(60)))
    recipe = f"{folder}/recipes.py:windows"
    assert main(["exposure", recipe, many, "--until", "30"]) == 0
    out = capsys.readouterr().out
    assert "54 of 60 documents seen before step 30: " in out and "sequences of steps 0 to 29\n" in out
    assert "more: --json prints all" in out and "train again from the state of step 0" in out
    assert main(["exposure", recipe, listed(folder, "code\t7"), "--until", "30"]) == 0
    assert capsys.readouterr().out == "0 of 1 document seen before step 30\n"


@pytest.mark.parametrize(
    ("arguments", "text", "message"),
    [
        (
            ["windows"],
            "code\t1\n\nbooks\t3\n",
            "removal.txt: line 3: 'books\\t3'; write NAME<tab>NUMBER, where NAME",
        ),
        (["windows"], "code 1", "line 1: 'code 1'; write NAME<tab>NUMBER"),
        (["windows"], "code\t-1", "line 1"),
        (["windows"], "code\t²", "line 1"),
        (["ends"], "5\ncode\t1", "line 2: 'code\\t1'; write the number of a document"),
        (["ends"], f"5\n{10**30}", f"line 2: document {10**30}: IndexedStore("),
        (["ends"], "60", "has 60, counted from 0"),
        (["ends"], " \n", "names no document"),
        (["ends"], None, "nowhere.txt: No such file or directory; give a text file"),
        (["windows", "--until"], "code\t1", "this recipe never ends; give --until STEP"),
        (["ends", "--micro-batch-size", "2"], "1", "--micro-batch-size has no effect without --ranks"),
        (["ends", "--layout", "dp2"], "1", "--layout has no effect without --ranks"),
        (["documents", "--ranks"], "code\t1", "needs packing; give --capacity N"),
        (
            ["documents", "--ranks", "--micro-batch-size", "2"],
            "1",
            "--micro-batch-size is of sequences of one",
        ),
    ],
)
def test_what_it_refuses(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], text: str | None, message: str
) -> None:
    name, *options = arguments
    file = str(folder / "nowhere.txt") if text is None else listed(folder, text)
    options = options[:-1] if options[-1:] == ["--until"] else [*options, "--until", "9"]
    assert main(["exposure", f"{folder}/recipes.py:{name}", file, *options]) == 2
    assert message in capsys.readouterr().err
