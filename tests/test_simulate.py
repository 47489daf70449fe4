"""Every rank of many layouts: the same global batch, whoever it is cut for."""

from __future__ import annotations

import json
import pickle
import random
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import meshfeed as mf
from corpus import recipe_of, write_corpus
from meshfeed.feed import stepping
from meshfeed.feed.run import agreed_by
from soak import only_soak, some

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


@some(2)
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


def part_of_window(layout: mf.Layout, cp_rank: int, padded: int, split: str) -> list[int]:
    """The places of a padded window that one cp rank holds, in order."""
    pieces = 2 * layout.cp if split == "zigzag" and layout.cp > 1 else layout.cp
    mine = [cp_rank] if pieces == layout.cp else [cp_rank, pieces - 1 - cp_rank]
    size = padded // pieces
    return [piece * size + at for piece in mine for at in range(size)]


WHOLE_JOBS = (
    ("dp3", 2, "zigzag", None), ("cp3-tp2", 5, "zigzag", None), ("cp8", 1, "contiguous", None),
    ("pp4-dp2", 3, "zigzag", "Et*3|t*4|m|L"), ("dp2-cp4-pp2", 2, "contiguous", "E|t|m|L"),
    ("tp2-cp2-dp2-pp8", 2, "zigzag", None), ("pp2-dp2-cp2-tp8", 1, "zigzag", "E|tm|t|L"),
    ("tp8-cp2-dp4-pp4", 1, "contiguous", None), ("dp64", 1, "zigzag", None),
)  # fmt: skip


@pytest.mark.parametrize(("text", "rows", "split", "stages"), WHOLE_JOBS)
def test_every_rank_holds_its_part_of_the_one_global_batch(
    corpus: Path, text: str, rows: int, split: Any, stages: str | None
) -> None:
    """Fields, shapes and values of all ranks of jobs of up to 256, against one process that has it all."""
    recipe = recipe_of(corpus, length=21, sequences=19, eod_mask_loss=True, reset_position_ids=True)
    layout = mf.Layout.parse(text)
    layout = replace(layout, table=tuple(random.Random(text).sample(range(1000), layout.world_size)))
    stage_map = mf.StageMap(pp=layout.pp, layout=stages)
    (alone,) = mf.simulate(recipe, mf.Layout(), [50], micro_batch_size=19)
    whole, draws = alone.microbatches[0], alone.batch.draws
    assert sorted(set(draws.epoch.tolist())) == [0, 1], "a step over an epoch's end"
    padded = -(-21 // (2 * layout.cp)) * 2 * layout.cp if layout.cp > 1 else 21
    seen = 0
    for got in mf.simulate(recipe, layout, [50], stage_map=stage_map, micro_batch_size=rows, cp_split=split):
        assert (got.rank, got.coord) == (layout.ranks()[seen], layout.coord(got.rank))
        seen += 1
        kinds = {kind for v in range(stage_map.vpp) for kind in stage_map.kinds(got.coord.pp, v)}
        names = {"position_ids"}
        names |= {"tokens"} if kinds & {"first", "mtp"} else set()
        names |= {"labels", "loss_mask"} if "last" in kinds else set()
        places = part_of_window(layout, got.coord.cp, padded, split)
        real = [place for place in places if place < 21]
        assert len(got.microbatches) == -(-19 // (rows * layout.dp))
        for m, microbatch in enumerate(got.microbatches):
            first = (m * layout.dp + got.coord.dp) * rows
            mine = slice(first, min(first + rows, 19))
            assert (microbatch.index, microbatch.cp_size, microbatch.cp_rank) == (m, layout.cp, got.coord.cp)
            assert microbatch.draws.epoch.tolist() == draws.epoch[mine].tolist()
            assert microbatch.draws.index.tolist() == draws.index[mine].tolist()
            assert microbatch.is_dummy == (first >= 19)
            assert set(microbatch) == names
            for name, value in microbatch.items():
                expected = torch.zeros(rows, len(places), dtype=whole[name].dtype)
                at = [i for i, place in enumerate(places) if place < 21]
                for row in range(len(draws.index[mine])):
                    expected[row, at] = whole[name][first + row, real]
                assert torch.equal(value, expected), (name, got.rank)
    assert seen == layout.world_size


def test_a_job_of_a_thousand_ranks_holds_the_global_batch(corpus: Path) -> None:
    layout = mf.Layout.parse("tp8-cp4-dp16-pp2", ranks_per_node=8)
    assert layout.world_size == 1024
    recipe = recipe_of(corpus, length=32, sequences=40)
    for step in (0, 15, 16):  # within an epoch of 625 windows, over its end, and after
        wanted = global_batch(recipe, mf.Layout(), step)
        assert len(wanted) == len({(e, i) for e, i, _ in wanted}) == 40
        assert global_batch(recipe, layout, step) == wanted
        for made in mf.simulate(recipe, layout, [step], ranks=layout.ranks()[::37].tolist()):
            held = {m.index: m.draws.index.tolist() for m in made.microbatches}
            for m, indices in held.items():
                first = m * 16 + made.coord.dp
                assert indices == [index for _, index, _ in wanted[first : first + 1]]


def test_a_simulated_batch_can_be_pickled(corpus: Path) -> None:
    simulated = next(mf.simulate(recipe_of(corpus), mf.Layout(dp=2), 1))
    again = pickle.loads(pickle.dumps(simulated.batch))
    assert again.stats() == simulated.batch.stats() and again.tokens == simulated.batch.tokens


def test_a_pickled_microbatch_leaves_the_others_behind(corpus: Path) -> None:
    (step,) = mf.simulate(recipe_of(corpus, sequences=8), mf.Layout(), 1, micro_batch_size=1)
    one = step.microbatches[3]
    assert one["tokens"].untyped_storage().nbytes() == 8 * one["tokens"].nbytes
    again = pickle.loads(pickle.dumps(one))
    assert list(again) == list(one) and repr(again) == repr(one) and again.cp_ranks == one.cp_ranks
    assert again.draws.index.tolist() == one.draws.index.tolist()
    for name, value in again.items():
        assert torch.equal(value, one[name]) and value.untyped_storage().nbytes() == value.nbytes


def test_a_stage_map_of_another_pipeline_is_refused(corpus: Path) -> None:
    for pp in (1, 2, 8):
        with pytest.raises(mf.errors.RoleError, match=f"stage map has pp={pp}, layout pp4 has pp=4"):
            list(mf.simulate(recipe_of(corpus), mf.Layout(pp=4), 1, stage_map=mf.StageMap(pp=pp)))


def test_what_cannot_be_simulated_is_refused(corpus: Path) -> None:
    recipe = recipe_of(corpus)
    with pytest.raises(mf.errors.LayoutError, match="rank 4 is not in"):
        list(mf.simulate(recipe, mf.Layout(dp=4), 1, ranks=[0, 4]))
    with pytest.raises(mf.errors.RecipeError, match="steps=-1: give a whole number, 0 or more"):
        list(mf.simulate(recipe, mf.Layout(), [-1]))
    with pytest.raises(mf.errors.PlanError, match="micro_batch_size=0"):
        list(mf.simulate(recipe, mf.Layout(), 1, micro_batch_size=0))
    with pytest.raises(mf.errors.PlanError, match="'diagonal'"):
        list(mf.simulate(recipe, mf.Layout(), 1, cp_split="diagonal"))  # type: ignore[arg-type]
    assert list(mf.simulate(recipe, mf.Layout(dp=4), 0)) == []
    assert list(mf.simulate(recipe, mf.Layout(dp=4), 3, ranks=[])) == []


@pytest.mark.parametrize("together", [1, 64, 65, 200, 10**9])
def test_how_much_is_read_at_a_time_changes_nothing(
    corpus: Path, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of(corpus, sequences=37, reset_attention_mask=True)
    layout = mf.Layout.parse("cp2-dp3")

    def told() -> list[tuple[Any, ...]]:
        return [
            (got.rank, m.index, m.draws.index.tolist(), [(n, v.tolist()) for n, v in m.items()])
            for got in mf.simulate(recipe, layout, 2, micro_batch_size=3)
            for m in got.microbatches
        ]

    usual = told()
    assert len(usual) == 2 * 6 * 5
    monkeypatch.setattr(stepping, "_TOKENS_TOGETHER", together)
    assert told() == usual


def test_the_whole_batch_is_counted_once_for_all(corpus: Path) -> None:
    recipe = recipe_of(corpus, sequences=11, length=40, eod_mask_loss=True)
    (alone,) = mf.simulate(recipe, mf.Layout(), [3], micro_batch_size=11)
    valid = int(alone.microbatches[0]["loss_mask"].sum())
    assert 0 < valid < 440
    for text in ("dp4", "cp3-dp2", "tp2-pp2"):
        for got in mf.simulate(recipe, mf.Layout.parse(text), [3], micro_batch_size=2):
            assert (got.batch.tokens, got.batch.valid_tokens, got.batch.sum_sq) == (440, valid, 11 * 40**2)
            assert got.batch.plan.num_microbatches == len(got.microbatches)


def test_ranks_that_stand_elsewhere_do_not_agree(corpus: Path) -> None:
    """What peers compare before they deliver: one layout's text has many tables."""

    def agreed(layout: mf.Layout, rows: int = 1, split: Any = "zigzag") -> tuple[tuple[str, str], ...]:
        feed = mf.Feed(
            recipe_of(corpus),
            layout,
            0,
            transport=mf.Transport(delivery="direct"),
            micro_batch_size=rows,
            cp_split=split,
        )
        return tuple(agreed_by(feed._producer()).items())

    here = mf.Layout.parse("tp2-dp2")
    assert agreed(here) == agreed(mf.Layout(tp=2, dp=2, table=(0, 1, 2, 3)))
    others = [
        agreed(mf.Layout(tp=2, dp=2, table=(2, 3, 0, 1))),
        agreed(mf.Layout.parse("dp2-tp2")),
        agreed(mf.Layout.parse("tp2-cp2")),
        agreed(here, rows=2),
        agreed(here, split="contiguous"),
    ]
    assert len({agreed(here), *others}) == 6


def test_steps_may_be_asked_for_in_any_order(corpus: Path) -> None:
    recipe = recipe_of(corpus)
    forth = [got.batch.draws.index.tolist() for got in mf.simulate(recipe, mf.Layout(), 5)]
    back = [got.batch.draws.index.tolist() for got in mf.simulate(recipe, mf.Layout(), iter([4, 2, 0]))]
    assert back == [forth[4], forth[2], forth[0]]


def ledger(
    recipe: mf.Recipe,
    layout: mf.Layout,
    start: int,
    stop: int,
    rows: int = 2,
    dice: random.Random | None = None,
) -> list[tuple[int, int, int]]:
    """(step, epoch, index) in the order of the stream, from what one rank of every replica is handed.

    rows: micro batch size. dice: picks that rank; the first stage's first where there are none.
    """
    lines: list[tuple[int, int, int]] = []
    roll = (lambda size: 0) if dice is None else dice.randrange
    places = [
        mf.layout.Coord(roll(layout.tp), roll(layout.cp), dp, roll(layout.pp)) for dp in range(layout.dp)
    ]
    asked = [layout.rank_of(place) for place in places]
    found: dict[int, list[tuple[int, int, int, int, int]]] = defaultdict(list)
    for got in mf.simulate(recipe, layout, range(start, stop), ranks=asked, micro_batch_size=rows):
        for m in got.microbatches:
            for row, (epoch, index) in enumerate(zip(m.draws.epoch.tolist(), m.draws.index.tolist())):
                found[got.batch.step].append((m.index, got.coord.dp, row, epoch, index))
    for step in range(start, stop):
        lines += [(step, epoch, index) for *_, epoch, index in sorted(found[step])]
    return lines


@only_soak
def test_two_hundred_kills_and_resumes_under_other_layouts(corpus: Path) -> None:
    recipe = recipe_of(corpus, length=32, sequences=12)
    steps = 60
    whole = ledger(recipe, mf.Layout(), 0, steps)
    assert len(set(whole)) == steps * 12
    assert {epoch for _, epoch, _ in whole} == {0, 1}
    dice = random.Random(2026)
    pairs: set[tuple[str, str]] = set()
    for _ in range(200):
        killed = dice.randrange(steps)
        old, new = (mf.Layout.parse(dice.choice(LAYOUTS)) for _ in range(2))
        pairs.add((str(old), str(new)))
        saved = json.dumps(mf.State(recipe=recipe.summary(), step=killed).to_json())
        again = mf.Feed(recipe_of(corpus, length=32, sequences=12), new, rank=0)
        again.load_state_dict(json.loads(saved))
        resumed = again.next_step
        start, stop = max(0, killed - 3), min(steps, resumed + 3)
        part = ledger(recipe, old, start, killed, dice.randint(1, 4), dice)
        part += ledger(recipe, new, resumed, stop, dice.randint(1, 4), dice)
        assert part == [line for line in whole if start <= line[0] < stop], (str(old), str(new), killed)
    assert len(pairs) > 100


@pytest.mark.parametrize(
    ("old", "new"), [("tp2-dp3", "cp2-dp2-pp2"), ("dp5", "tp8-cp4-dp8-pp4"), ("dp1", "dp2")]
)
def test_a_job_killed_twice_loses_and_repeats_nothing(corpus: Path, old: str, new: str) -> None:
    """From the first step to the end of two epochs, the last step short, saved states and all."""
    recipe = recipe_of(corpus, length=100, sequences=7, epochs=2)  # 400 windows: 57 steps and one of 1
    written: list[tuple[int, int, int]] = []
    at = 0
    for text, until in ((old, 13), (new, 30), (old, 99)):
        saved = json.dumps(mf.State(recipe=recipe.summary(), step=at).to_json())
        state = mf.State.from_json(json.loads(saved))
        state.check(recipe_of(corpus, length=100, sequences=7, epochs=2))
        written += ledger(recipe, mf.Layout.parse(text), state.step, min(until, 58))
        at = until
    assert [step for step, _, _ in written] == [step for step in range(58) for _ in range(7)][:400]
    assert sorted(line[1:] for line in written) == [(e, i) for e in range(2) for i in range(200)]
    assert written == ledger(recipe, mf.Layout(), 0, 58)


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
    first = layout.rank_of(mf.layout.Coord(5, 3, 31, 0))
    middle = layout.rank_of(mf.layout.Coord(5, 3, 31, 8))
    last = layout.rank_of(mf.layout.Coord(5, 3, 31, 15))
    got = {g.rank: g for g in mf.simulate(recipe, layout, 1, ranks=[first, middle, last])}
    assert set(got[first].microbatches[0]) == {"tokens", "position_ids"}
    assert set(got[middle].microbatches[0]) == {"position_ids"}
    assert set(got[last].microbatches[0]) == {"labels", "loss_mask", "position_ids"}
    assert len({tuple(g.microbatches[0].draws.index.tolist()) for g in got.values()}) == 1
