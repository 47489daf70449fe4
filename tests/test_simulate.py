"""Every rank of many layouts: the same global batch, whoever it is cut for."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from pathlib import Path

import pytest
import torch

import meshfeed as mf
from corpus import recipe_of, write_corpus

LAYOUTS = (
    "dp1", "dp2", "dp3", "dp5", "tp2-dp2", "tp4-pp2", "cp2-dp2", "cp4-dp2-pp2", "dp2-cp2-tp2", "pp2-dp4",
    "tp2-cp2-dp2-pp2", "tp8-cp2-dp4", "tp4-cp4-dp8-pp2", "tp8-cp4-dp8-pp4",
)  # fmt: skip


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "c"
    write_corpus(path)
    return path


def global_batch(recipe: mf.Recipe, layout: mf.Layout, step: int) -> list[tuple[int, int, list[int]]]:
    """(epoch, index, tokens) of every sequence in stream order, put together from what the ranks get.

    Only first-stage ranks of tp 0 are asked: the others hold the same or no tokens.
    """
    asked = [r for r in layout.ranks().tolist() if layout.coord(r).tp == 0 and layout.coord(r).pp == 0]
    pieces: dict[tuple[int, int, int], dict[int, torch.Tensor]] = defaultdict(dict)
    names: dict[tuple[int, int, int], tuple[int, int]] = {}
    for got in mf.simulate(recipe, layout, [step], ranks=asked, micro_batch_size=2):
        for microbatch in got.microbatches:
            for row, (epoch, index) in enumerate(zip(microbatch.draws.epoch, microbatch.draws.index)):
                at = (microbatch.index, got.coord.dp, row)
                names[at] = (int(epoch), int(index))
                pieces[at][got.coord.cp] = microbatch["tokens"][row]
    batch: list[tuple[int, int, list[int]]] = []
    for at in sorted(pieces):
        halves = [pieces[at][cp].chunk(2 if layout.cp > 1 else 1) for cp in range(layout.cp)]
        ordered = [half[0] for half in halves] + ([half[1] for half in halves[::-1]] if layout.cp > 1 else [])
        batch.append((*names[at], torch.cat(ordered).tolist()))
    return batch


@pytest.mark.parametrize("step", [0, 7, 19, 40])
def test_the_global_batch_is_the_same_under_every_layout(corpus: Path, step: int) -> None:
    recipe = recipe_of(corpus)
    wanted = global_batch(recipe, mf.Layout(), step)
    assert len(wanted) == 16
    for text in LAYOUTS:
        assert global_batch(recipe, mf.Layout.parse(text), step) == wanted, text


def test_ranks_of_one_replica_are_handed_the_same_sequences(corpus: Path) -> None:
    layout = mf.Layout.parse("tp2-cp2-dp2-pp3")
    by_replica: dict[int, set[str]] = defaultdict(set)
    for got in mf.simulate(recipe_of(corpus), layout, 1, micro_batch_size=2):
        told = [microbatch.draws.index.tolist() for microbatch in got.microbatches]
        by_replica[got.coord.dp].add(json.dumps(told))
    assert [len(told) for told in by_replica.values()] == [1, 1]


def ledger(recipe: mf.Recipe, layout: mf.Layout, start: int, stop: int) -> list[tuple[int, int, int]]:
    """(step, epoch, index) in the order of the stream, from what one rank of every replica is handed."""
    lines: list[tuple[int, int, int]] = []
    asked = [layout.rank_of(mf.Coord(0, 0, dp, layout.pp - 1)) for dp in range(layout.dp)]
    found: dict[int, list[tuple[int, int, int, int, int]]] = defaultdict(list)
    for got in mf.simulate(recipe, layout, range(start, stop), ranks=asked, micro_batch_size=2):
        for m in got.microbatches:
            for row, (epoch, index) in enumerate(zip(m.draws.epoch.tolist(), m.draws.index.tolist())):
                found[got.batch.step].append((m.index, got.coord.dp, row, epoch, index))
    for step in range(start, stop):
        lines += [(step, epoch, index) for *_, epoch, index in sorted(found[step])]
    return lines


def test_two_hundred_kills_and_resumes_under_other_layouts(corpus: Path) -> None:
    recipe = recipe_of(corpus, length=32, sequences=12)
    steps = 60
    whole = ledger(recipe, mf.Layout(), 0, steps)
    assert len(set(whole)) == steps * 12
    dice = random.Random(2026)
    for _ in range(200):
        killed = dice.randrange(1, steps)
        old, new = (mf.Layout.parse(dice.choice(LAYOUTS)) for _ in range(2))
        saved = json.dumps(mf.State(recipe=recipe.summary(), step=killed).to_json())
        again = mf.Feed(recipe_of(corpus, length=32, sequences=12), new, rank=0)
        again.load_state_dict(json.loads(saved))
        resumed = again.state_dict()["step"]
        start, stop = max(0, killed - 3), min(steps, resumed + 3)
        part = ledger(recipe, old, start, killed) + ledger(recipe, new, resumed, stop)
        assert part == [line for line in whole if start <= line[0] < stop], (str(old), str(new), killed)


def test_the_stream_ends_for_all_ranks_at_once(corpus: Path) -> None:
    recipe = recipe_of(corpus, length=1000, sequences=12, epochs=1)  # 20 windows: a full step and a short one
    layout = mf.Layout.parse("dp4")
    got = list(mf.simulate(recipe, layout, 10, micro_batch_size=2))
    assert [(g.batch.step, g.rank) for g in got] == [(s, r) for s in range(2) for r in range(4)]
    assert {len(g.microbatches) for g in got if g.batch.step == 1} == {1}
    assert {len(g.microbatches) for g in got if g.batch.step == 0} == {2}
    dummies = [m for g in got for m in g.microbatches if m.is_dummy]
    assert len(dummies) == 2, "12 sequences in pairs leave two of four ranks without a second pair"
    assert all(m["loss_mask"].sum() == 0 and m["tokens"].shape == (2, 1000) for m in dummies)
    assert sum(len(m.draws) for g in got for m in g.microbatches) == 20


def test_a_corner_of_sixteen_thousand_ranks(corpus: Path) -> None:
    layout = mf.Layout.parse("tp8-cp4-dp32-pp16", ranks_per_node=8)
    recipe = recipe_of(corpus, sequences=64)
    first = layout.rank_of(mf.Coord(5, 3, 31, 0))
    middle = layout.rank_of(mf.Coord(5, 3, 31, 8))
    last = layout.rank_of(mf.Coord(5, 3, 31, 15))
    got = {g.rank: g for g in mf.simulate(recipe, layout, 1, ranks=[first, middle, last])}
    assert set(got[first].microbatches[0]) == {"tokens", "position_ids"}
    assert set(got[middle].microbatches[0]) == {"position_ids"}
    assert set(got[last].microbatches[0]) == {"labels", "loss_mask", "position_ids"}
    assert len({tuple(g.microbatches[0].draws.index.tolist()) for g in got.values()}) == 1
