"""meshfeed exposure of all sources: the figures of a scan, and a digest of all that decides them."""

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


def test_the_figures_are_those_of_the_steps(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = f"{folder}/recipes.py"
    drawn = told(capsys, "exposure", recipe, "--until", "8")
    job = "--steps", "0:8", "--layout", "dp1", "--capacity", "512"
    steps = told(capsys, "plan", recipe, *job)["steps"]
    assert {
        e["source"]: {"sequences": e["sequences"], "epochs": e["epochs"]} for e in drawn["sources"]
    } == steps[-1]["sources"]
    tokens = sum(each["tokens"] for each in drawn["sources"])
    assert tokens == sum(step["tokens"] for step in steps)
    assert main(["exposure", recipe, "--until", "8"]) == 0
    out = capsys.readouterr().out
    assert drawn["digest"] in out and f"{tokens:,}" in out


def test_the_digest_is_of_all_that_decides_the_steps(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    digests = {
        (name, until): told(capsys, "exposure", f"{folder}/recipes.py:{name}", "--until", until)["digest"]
        for name in ("recipe", "later", "other")
        for until in ("8", "9")
    }
    assert digests["recipe", "8"] == digests["later", "8"], "what changes later does not count"
    assert len(set(digests.values())) == 5


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
    skipped = told(capsys, "exposure", f"{folder}/recipes.py:{name}", "--until", "10", *ledger)
    plain = told(capsys, "exposure", f"{folder}/recipes.py:{name}", "--until", "2")
    assert skipped["sources"] == plain["sources"]
    job = "plan", f"{folder}/recipes.py", *ledger, "--layout", "dp1", "--capacity", "512", "--steps"
    assert [step["step"] for step in told(capsys, *job, f"0:{10**12}")["steps"]] == [0, 1]
    assert main([*job, "6:9"]) == 2
    assert "step 6: an amendment skips it, to step 1" in capsys.readouterr().err, "none of them is left"


def test_a_store_alone_and_the_end(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawn = told(capsys, "exposure", f"{folder}/recipes.py:ends")
    (source,) = drawn["sources"]
    assert (source["source"], source["epochs"], source["tokens"]) == ("", 2.0, 20 * source["sequences"])
    assert main(["exposure", f"{folder}/recipes.py"]) == 2
    assert "this recipe never ends; give --until STEP" in capsys.readouterr().err
    assert main(["exposure", f"{folder}/recipes.py:ends", "--ranks"]) == 2
    assert "--ranks has no effect without LIST" in capsys.readouterr().err
