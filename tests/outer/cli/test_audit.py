"""meshfeed audit: the figures of a scan, and a digest that changes with any of what it covers alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

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


def test_a_store_alone_and_the_end(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    audit = told(capsys, "audit", f"{folder}/recipes.py:ends")
    (source,) = audit["sources"]
    assert (source["source"], source["epochs"], source["tokens"]) == ("", 2.0, 20 * source["sequences"])
    assert main(["audit", f"{folder}/recipes.py"]) == 2
    assert "this recipe never ends; give --until STEP" in capsys.readouterr().err
