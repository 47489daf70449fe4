"""Lanes reach nodes: under a shuffle by blocks, a shard of rows is met by one node."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshfeed as mf
from corpus import Backwards, write_corpus
from meshfeed.feed.stepping import Stepping
from meshfeed.order import draws_of_step, lanes_of_step, num_steps
from meshfeed.plan import plan_fixed
from meshfeed.testing import assert_elastic, assert_resumable
from soak import cases, some


def windows_of(shuffle: Any, *, size: int, sequences: int, **options: Any) -> mf.Recipe:
    """Windows of four tokens over nothing."""
    return mf.Recipe(
        data=mf.Lengths(np.full(size, 4)),
        sequence=mf.Windows(3),
        batch=mf.Batch(sequences=sequences),
        shuffle=shuffle,
        **options,
    )


def shards_per_node(recipe: mf.Recipe, layout: mf.Layout, nodes: int, shard: int, rows: int) -> float:
    """Distinct (epoch, shard, node) over distinct (epoch, shard), over the steps of a recipe."""
    stepping = Stepping(recipe=recipe, layout=layout, micro_batch_size=rows, cp_split="zigzag")
    met: set[tuple[int, int, int]] = set()
    for step in range(num_steps(recipe) or 0):
        batch = stepping.global_batch(step)
        assert batch is not None
        node = batch.plan.first_rank // layout.cp * nodes // layout.dp
        met.update(zip(batch.draws.epoch.tolist(), (batch.draws.index // shard).tolist(), node.tolist()))
    return len(met) / len({(epoch, shard) for epoch, shard, _ in met})


@some(1)
@pytest.mark.parametrize(
    ("layout", "nodes", "lanes", "sequences", "rows"),
    [
        ("dp8", 2, 8, 48, 3),
        ("cp2-dp6", 3, 12, 24, 2),
        ("dp16", 4, 8, 32, 2),
        ("dp2", 2, 8, 16, 1),
        ("dp4", 4, 8, 16, 2),
        ("dp8", 8, 8, 16, 1),
        ("dp6", 2, 8, 18, 1),
        ("dp12", 4, 8, 36, 3),
    ][: cases(3, 8)],
)
def test_a_node_meets_shards_of_its_own(
    layout: str, nodes: int, lanes: int, sequences: int, rows: int
) -> None:
    blocks = mf.Blocks(sequences=32, window=3, lanes=lanes)
    recipe = windows_of(blocks, size=12_011, sequences=sequences, epochs=2)
    place = mf.Layout.parse(layout)
    assert shards_per_node(recipe, place, nodes, 32, rows) <= 1.05
    everywhere = shards_per_node(replace(recipe, shuffle="global", epochs=1), place, nodes, 32, rows)
    assert everywhere > 0.9 * nodes


def test_in_a_mixture_a_node_meets_its_neighbours_at_most() -> None:
    """Sources do not fill every step alike: rows at a node's edge are of the next one's lanes."""
    stores = {name: (mf.Lengths(np.full(9_000, 4)), share) for name, share in (("a", 0.61), ("b", 0.39))}
    recipe = mf.Recipe(
        data=mf.Mixture(stores),
        sequence=mf.Windows(3),
        batch=mf.Batch(sequences=64),
        shuffle=mf.Blocks(sequences=32, window=2, lanes=16),
        steps=150,
    )
    stepping = Stepping(recipe=recipe, layout=mf.Layout.parse("dp8"), micro_batch_size=2, cp_split="zigzag")
    met: set[tuple[int, ...]] = set()
    for step in range(150):
        batch = stepping.global_batch(step)
        assert batch is not None
        node, draws = batch.plan.first_rank // 2, batch.draws
        met.update(
            zip(draws.source.tolist(), draws.epoch.tolist(), (draws.index // 32).tolist(), node.tolist())
        )
    assert len(met) / len({key[:3] for key in met}) < 1.3, "against 4 without lanes"


def test_steps_whose_lanes_are_alike_are_planned_and_cut_once() -> None:
    recipe = windows_of(mf.Blocks(sequences=8, window=2, lanes=4), size=68, sequences=8, epochs=2)
    stepping = Stepping(recipe=recipe, layout=mf.Layout.parse("dp2"), micro_batch_size=2, cp_split="zigzag")
    batches = [stepping.global_batch(step) for step in range(22)]
    plans = [batch.plan for batch in batches if batch is not None]
    assert len(plans) == 22
    # an epoch has 90 sequences, so step 11 is of two epochs, and the next ones begin with another lane
    assert [plans.index(plan) for plan in plans] == [0] * 11 + [11] + [12] * 10
    for batch in batches:
        assert batch is not None
        for coord in (mf.layout.Coord(0, 0, 0, 0), mf.layout.Coord(0, 0, 1, 0)):
            cut = stepping.portions(batch, coord, [0])
            drawn = np.concatenate([portion.draws.index for portion in cut])
            mine = np.flatnonzero(batch.plan.first_rank == coord.dp)
            in_order = mine[np.argsort(batch.plan.microbatch[mine], kind="stable")]
            assert drawn.tolist() == batch.draws.index[in_order].tolist()


def test_lanes_take_turns_and_only_blocks_have_any() -> None:
    recipe = windows_of(mf.Blocks(lanes=5), size=100, sequences=7)
    assert num_steps(replace(recipe, epochs=1)) == 19
    of_steps = [lanes_of_step(replace(recipe, epochs=1), step) for step in range(20)]
    lanes = np.concatenate([each for each in of_steps if each is not None])
    assert lanes.tolist() == (np.arange(133) % 5).tolist()
    assert lanes_of_step(windows_of("global", size=100, sequences=7), 0) is None


def test_the_deal_leaves_every_rank_as_many_rows() -> None:
    rng = np.random.default_rng(0)
    for count in (0, 1, 5, 24, 31):
        lengths, by = rng.integers(1, 9, count), rng.integers(0, 4, count)
        dealt = plan_fixed(lengths, dp=3, cp=2, micro_batch_size=2, order=np.argsort(by))
        plain = plan_fixed(lengths, dp=3, cp=2, micro_batch_size=2)
        places = [sorted(zip(plan.microbatch.tolist(), plan.first_rank.tolist())) for plan in (dealt, plain)]
        assert places[0] == places[1]
        by_rank = [by[dealt.first_rank == rank] for rank in (0, 2, 4)]
        for one, other in pairwise(by_rank):
            assert one.max(initial=-1) <= other.min(initial=9)


@some(1)
@pytest.mark.parametrize("rule", ["windows", "documents"])
def test_global_batches_are_those_of_one_process(tmp_path: Path, rule: str) -> None:
    write_corpus(tmp_path / "c", num_tokens=12_000)
    windows = rule == "windows"
    recipe = mf.Recipe(
        data=mf.open(tmp_path / "c"),
        sequence=mf.Windows(32) if windows else mf.Documents(),
        batch=mf.Batch(sequences=24).then(2, 16),
        shuffle=mf.Blocks(sequences=4, window=2, lanes=4),
    )
    packing = None if windows else mf.Packing(capacity=512, policy="balanced")
    assert_elastic(recipe, ["dp4", "tp2-dp3", "cp2-dp2"], steps=5, packing=packing)
    assert_resumable(recipe, packing=packing)
    assert len(draws_of_step(recipe, 0)) == 24


def test_rows_of_an_own_order_have_no_lanes() -> None:
    blocks = mf.Blocks(sequences=4, window=2, lanes=4)
    recipe = replace(windows_of(blocks, size=16, sequences=8), sequence=Backwards(4))
    stepping = Stepping(recipe=recipe, layout=mf.Layout.parse("dp2"), micro_batch_size=2, cp_split="zigzag")
    batch = stepping.global_batch(1)
    assert batch is not None and batch.draws.index.tolist() == [*range(7, -1, -1)]
