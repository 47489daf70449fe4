"""examples/online_mixing.py: what a rule does to a mixture is replayed from its ledger, under another layout."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import online_mixing
import pytest

import meshfeed as mf
import world

STEPS = 25  # of which the 10th and the 20th reweigh


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    online_mixing.write_corpus(folder)
    return folder


def run(rank: int, layout: str, folder: Path, ledger: Path, rule: str, out: Path, steps: int = STEPS) -> None:
    made, recipe = online_mixing.RULES[rule]() if rule else None, online_mixing.recipe_of(folder)
    with pytest.MonkeyPatch.context() as patch:
        small = replace(recipe, batch=mf.Batch(tokens=2_000))
        patch.setattr(online_mixing, "recipe_of", lambda folder: small)
        online_mixing.train(mf.Layout.parse(layout), folder, ledger, made, steps, out)


@pytest.mark.parametrize("rule", sorted(online_mixing.RULES))
def test_a_replay_trains_on_the_same(rule: str, corpus: Path, tmp_path: Path) -> None:
    for name in ("run", "again"):
        (tmp_path / name).mkdir()
    ledger = tmp_path / "ledger.jsonl"
    world.run(run, 4, "tp2-dp2", corpus, ledger, rule, tmp_path / "run")
    agreed = [*mf.amendments.Ledger.read(ledger)]
    world.run(run, 2, "cp2", corpus, ledger, "", tmp_path / "again")
    first, again = (json.loads((tmp_path / name / "losses.json").read_text()) for name in ("run", "again"))
    np.testing.assert_allclose(first, again, rtol=0, atol=1e-12)
    assert np.less(first[-1], first[0]).all()
    assert [change.amounts.keys() for _, change in agreed] == [online_mixing.CHOICES.keys()] * (
        STEPS // online_mixing.EVERY
    )
    assert [*mf.amendments.Ledger.read(ledger)] == agreed, "a replay adds nothing"
    last = agreed[-1].change.amounts
    assert last["easy"] < max(last.values()), "it is learned first"


def test_a_source_that_has_grown_is_reweighed_as_one(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with mf.IndexedWriter(tmp_path / "more", np.uint16) as writer:
        for length in range(20, 120):
            writer.add_document(np.arange(length) % online_mixing.TOKENS)
    ledger = tmp_path / "ledger.jsonl"
    grow = mf.amendments.Amendment(3, mf.amendments.Grow("easy", str(tmp_path / "more")))
    mf.amendments.Ledger((grow,)).write(ledger)
    world.run(run, 2, "cp2", corpus, ledger, "excess", tmp_path / "run", 12)
    grown, reweighed = mf.amendments.Ledger.read(ledger)
    assert grown == grow
    assert reweighed.change.amounts.keys() == online_mixing.CHOICES.keys()
    losses = json.loads((tmp_path / "run" / "losses.json").read_text())
    assert {len(of_step) for of_step in losses} == {len(online_mixing.CHOICES)}
