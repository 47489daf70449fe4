"""meshfeed audit: the figures of a scan, and a digest that changes with any of what it covers alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from demo.storage import Manners, SlowStorage

import meshfeed as mf
from meshfeed.cli.main import main
from meshfeed.store import IndexedWriter

RECIPES = """
import meshfeed as mf

code, docs = mf.open("{folder}/code"), mf.open("{folder}/docs")
data = mf.Mixture({{"code": (code, 2), "docs": (docs, 1)}})
made = dict(sequence=mf.Documents(), batch=mf.Batch(sequences=9))
recipe = mf.Recipe(data=data, seed=3, **made)
later = mf.Recipe(data=data.then(8, {{"code": 1, "docs": 5}}), seed=3, **made)
other = mf.Recipe(data=data, seed=4, **made)
wide = mf.Recipe(data=data, sequence=mf.Windows(20), batch=mf.Batch(sequences=8), seed=3)
megatron = mf.Recipe(data=data, sequence=mf.MegatronGPT(20, samples=99), batch=mf.Batch(sequences=8))
ends = mf.Recipe(data=code, sequence=mf.Windows(20), batch=mf.Batch(sequences=8), epochs=2)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, rng = tmp_path_factory.mktemp("audited"), np.random.default_rng(0)
    for name, count in (("code", 60), ("docs", 25)):
        with IndexedWriter(path / name, np.uint16) as writer:
            for _ in range(count):
                writer.add_document(np.zeros(int(rng.integers(1, 90)), np.uint16))
    (path / "recipes.py").write_text(RECIPES.format(folder=path))
    return path


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def lines_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert main([*arguments, "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_the_figures_are_those_of_the_steps(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = f"{folder}/recipes.py"
    audit = told(capsys, "audit", recipe, "--until", "8")
    job = "--steps", "0:8", "--layout", "dp1", "--capacity", "512"
    steps = told(capsys, "plan", recipe, *job)["steps"]
    assert {
        e["source"]: {"sequences": e["sequences"], "epochs": e["epochs"]} for e in audit["sources"]
    } == steps[-1]["sources"]
    assert (
        audit["tokens"] == sum(step["tokens"] for step in steps) == sum(e["tokens"] for e in audit["sources"])
    )
    assert audit["sequences"] == 72
    assert main(["audit", recipe, "--until", "8"]) == 0
    out = capsys.readouterr().out
    assert audit["digest"] in out and f"{audit['tokens']:,}" in out


def test_the_digest_is_of_all_that_decides_the_steps(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    digests = {
        (name, until): told(capsys, "audit", f"{folder}/recipes.py:{name}", "--until", until)["digest"]
        for name in ("recipe", "later", "other")
        for until in ("8", "9")
    }
    assert digests["recipe", "8"] == digests["later", "8"], "what changes later does not count"
    assert len(set(digests.values())) == 5


LEDGER = mf.amendments.Ledger(
    (
        mf.amendments.Amendment(2, mf.amendments.Exclude({"code": [3, 8, 40]})),
        mf.amendments.Amendment(5, mf.amendments.SkipSteps(6, 8)),
    )
)


@pytest.mark.parametrize("name", ["recipe", "wide", "megatron"])
@pytest.mark.parametrize("amended", [False, True])
def test_tokens_by_a_value_of_each_document(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str, amended: bool
) -> None:
    """As `trace` shows them, step by step: several epochs, holes and steps left out."""
    rng, of = np.random.default_rng(1), {}
    of["code"] = rng.choice(["MIT", "GPL 3", "\u00fc"], 60).tolist()
    of["docs"] = [str(year) for year in rng.integers(2019, 2022, 25)]
    (folder / "licences.txt").write_text("".join(f"{each}\n" for each in of["code"]))
    np.save(folder / "years.npy", np.array(of["docs"], int))
    LEDGER.write(folder / "ledger.jsonl")
    ledger = ["--amendments", f"{folder}/ledger.jsonl"] if amended else []
    by = "--by", f"docs={folder}/years.npy", "--by", f"code={folder}/licences.txt"
    recipe = f"{folder}/recipes.py:{name}"
    audit = told(capsys, "audit", recipe, "--until", "12", *by, *ledger)
    wanted, job = dict[Any, int](), ["--capacity", "128"] if name == "recipe" else []
    for step in range(12):
        if amended and step in (6, 7):
            continue
        for line in lines_of(capsys, "trace", recipe, "--step", str(step), *job, *ledger):
            start, stop = map(int, line["tokens"].split(":"))
            at = line["source"], of[line["source"]][line["document"]]
            wanted[at] = wanted.get(at, 0) + stop - start
    assert {(each["source"], each["value"]): each["tokens"] for each in audit["by"]} == wanted
    for source in audit["sources"]:
        mine = [each["tokens"] for each in audit["by"] if each["source"] == source["source"]]
        assert sum(mine) == source["tokens"] and mine == sorted(mine, reverse=True)
    plain = told(capsys, "audit", recipe, "--until", "12", *ledger)
    assert {**audit, "by": 0, "digest": 0} == {**plain, "by": 0, "digest": 0}
    assert audit["digest"] != plain["digest"]


def test_values_that_are_not_one_for_each_document(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "short.txt").write_text("a\nb\n")
    np.save(folder / "wide.npy", np.zeros((60, 2)))
    (folder / "some.txt").write_text("a\n" * 60)
    for by, message in (
        (f"{folder}/short.txt", "write NAME=FILE, where NAME is one of code, docs"),
        (f"code={folder}/short.txt", "2 values; IndexedStore("),
        (f"code={folder}/wide.npy", "an array of shape (60, 2)"),
        ("code=nowhere.npy", "nowhere.npy: "),
    ):
        assert main(["audit", f"{folder}/recipes.py", "--until", "3", "--by", by]) == 2
        assert message in capsys.readouterr().err
    assert main(["audit", f"{folder}/recipes.py:ends", "--until", "3", "--by", "code=some.txt"]) == 2
    assert "--by code=some.txt: no such file; a store alone takes FILE" in capsys.readouterr().err
    assert main(["audit", f"{folder}/recipes.py:ends", "--until", "3", "--by", f"{folder}/some.txt"]) == 0
    assert "100.0000%" in capsys.readouterr().out


def test_values_in_remote_storage(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values, served = np.arange(60) % 7, tmp_path / "served"
    served.mkdir()
    np.save(served / "v.npy", values)
    (served / "v.txt").write_text("".join(f"{each}\n" for each in values))
    (served / "bad.npy").write_bytes(b"no array")
    job = "audit", f"{folder}/code", "--until", "2", "--sequences", "30", "--cache", str(tmp_path / "cache")
    near = told(capsys, *job, "--by", f"{served}/v.npy")
    with SlowStorage(served, Manners(latency_s=0.0, late_every=None)) as storage:
        for name in ("v.npy", "v.txt"):
            assert told(capsys, *job, "--by", f"{storage.url}/{name}") == near
        for name, message in (("bad.npy", "give a text file, or .npy"), ("none.npy", "none.npy: ")):
            assert main([*job, "--by", f"{storage.url}/{name}"]) == 2
            assert message in capsys.readouterr().err


def test_columns_that_were_not_kept_and_blank_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with mf.DatasetWriter(tmp_path / "d", {"tokens": "uint16"}) as writer:
        writer.add_document(tokens=np.zeros(9, np.uint16))
    (tmp_path / "d" / "license.values").write_text("\n")
    job = "audit", str(tmp_path / "d"), "--until", "1", "--sequences", "1", "--by"
    assert main([*job, "licence"]) == 2
    assert "`meshfeed prepare --keep` has kept (there are license)" in capsys.readouterr().err
    assert main([*job, "license"]) == 0
    assert "(blank)" in capsys.readouterr().out
    assert told(capsys, *job, "license")["by"] == [{"source": "", "value": "", "tokens": 9}]


@pytest.mark.parametrize("name", ["recipe", "wide"])
def test_steps_skipped_far_beyond_its_end(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """And those that two amendments skip, once."""
    skips = (
        mf.amendments.SkipSteps(5, 10**12),
        mf.amendments.SkipSteps(2, 4),
        mf.amendments.SkipSteps(3, 6),
        mf.amendments.SkipSteps(12, 10**30),
    )
    mf.amendments.Ledger(tuple(mf.amendments.Amendment(1, skip) for skip in skips)).write(
        tmp_path / "ledger.jsonl"
    )
    ledger = ["--amendments", f"{tmp_path}/ledger.jsonl"]
    skipped = told(capsys, "audit", f"{folder}/recipes.py:{name}", "--until", "10", *ledger)
    plain = told(capsys, "audit", f"{folder}/recipes.py:{name}", "--until", "2")
    assert skipped["tokens"] == plain["tokens"] and skipped["sequences"] == plain["sequences"]


def test_a_store_alone_and_the_end(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    audit = told(capsys, "audit", f"{folder}/recipes.py:ends")
    (source,) = audit["sources"]
    assert (source["source"], source["epochs"], source["tokens"]) == ("", 2.0, 20 * source["sequences"])
    assert main(["audit", f"{folder}/recipes.py"]) == 2
    assert "this recipe never ends; give --until STEP" in capsys.readouterr().err
