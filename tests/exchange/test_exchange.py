"""Exchange equals plan-before-read: the same documents through a Feed and through users' iterators."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from giving import DOCUMENT_KEYS, documents, plain, plain_plan, recipe_of

import meshfeed as mf
import world
from corpus import write_corpus
from soak import SOAK

STEPS = 3
LAYOUTS = ("tp2-cp2-dp2", "tp2-dp2-pp2", "cp2-dp4", "cp2-dp2-pp2", "dp8", "tp4-pp2")
POLICIES = ("balanced", "dynamic_cp")
OWNED = ("broadcast", "share", "tree")
WAYS = (("in_order", 0), ("balanced", 0), ("dynamic_cp", 0), ("fixed", 2))  # policy, prefetch
EVERYONE = [(text, *way) for text, way in itertools.product(LAYOUTS, WAYS)]
SERVED = list(itertools.product(LAYOUTS, POLICIES, OWNED))
if not SOAK:  # each layout once, with another of the rest each time
    EVERYONE = [EVERYONE[4 * at + at % 4] for at in range(6)]
    SERVED = [SERVED[6 * at + (4 * at + at // 3 * 3) % 6] for at in range(6)]


def packing_of(policy: Any) -> mf.Packing:
    if policy == "fixed":
        return mf.Packing(
            capacity=400, policy="dynamic_cp", fixed_shapes=True, max_sequences=5, oversize="split"
        )
    return mf.Packing(capacity=400, policy=policy, align=mf.Align(sequence=2, pack=8), oversize="split")


def seen(steps: Any) -> list[Any]:
    taken: list[Any] = []
    for step in steps:
        totals = (step.index, plain_plan(step.plan), step.tokens, step.valid_tokens, step.sum_sq)
        taken.append((totals, [plain(microbatch) for microbatch in step.microbatches]))
        if step.index + 1 == STEPS:
            break
    return taken


def ends(layout: mf.Layout) -> set[int]:
    """tp rank 0 of the first and the last stage: who builds datasets in many trainers."""
    coords = zip(layout.ranks().tolist(), layout.coords().tolist())
    return {rank for rank, (tp, _, _, pp) in coords if tp == 0 and pp in (0, layout.pp - 1)}


def everyone(rank: int, path: Path) -> dict[Any, Any]:
    """Every rank has an iterator: through a Feed and through an Exchange, on the same processes."""
    got: dict[Any, Any] = {}
    for text, policy, prefetch in EVERYONE:
        layout, packing = mf.Layout.parse(text, ranks_per_node=8), packing_of(policy)
        with mf.Feed(
            recipe_of(path), layout, transport=mf.Transport(delivery="direct", timeout_s=600), packing=packing
        ) as feed:
            wanted = seen(feed)
            groups = feed.cp_groups
        mine = documents(path, STEPS + 1, layout.coord(rank).dp, layout.dp)
        with mf.Exchange(
            mine,
            layout,
            packing=packing,
            keys=DOCUMENT_KEYS,
            transport=mf.Transport(prefetch=prefetch, timeout_s=600),
        ) as exchange:
            got[text, policy, prefetch] = (seen(exchange) == wanted, exchange.cp_groups == groups)
    return got


def owners(rank: int, path: Path) -> dict[Any, Any]:
    """Only tp rank 0 of the first and last stage has one; deliveries bring the rest."""
    got: dict[Any, Any] = {}
    for text, policy, delivery in SERVED:
        layout = mf.Layout.parse(text, ranks_per_node=3 if delivery == "tree" else 8)
        owners = ends(layout)
        mine = documents(path, STEPS + 1, layout.coord(rank).dp, layout.dp) if rank in owners else None
        with mf.Exchange(
            mine,
            layout,
            packing=packing_of(policy),
            keys=DOCUMENT_KEYS,
            transport=mf.Transport(readers=owners, delivery=delivery, timeout_s=600),
        ) as exchange:
            got[text, policy, delivery] = seen(exchange)
    return got


def test_every_rank_with_an_iterator_gets_what_a_feed_gives(tmp_path: Path) -> None:
    write_corpus(tmp_path / "c", num_tokens=12_000)
    for rank, got in enumerate(world.run(everyone, 8, tmp_path / "c")):
        assert all(same == (True, True) for same in got.values()), (rank, got)
        assert list(got) == EVERYONE


def test_owners_and_those_they_serve_get_what_a_feed_gives(tmp_path: Path) -> None:
    write_corpus(tmp_path / "c", num_tokens=12_000)
    results = world.run(owners, 8, tmp_path / "c")
    for text, policy, delivery in SERVED:
        wanted: dict[int, list[Any]] = {rank: [] for rank in range(8)}
        layout = mf.Layout.parse(text)
        for one in mf.simulate(recipe_of(tmp_path / "c"), layout, STEPS, packing=packing_of(policy)):
            batch = one.batch
            totals = (batch.step, plain_plan(batch.plan), batch.tokens, batch.valid_tokens, batch.sum_sq)
            wanted[one.rank].append((totals, [plain(microbatch) for microbatch in one.microbatches]))
        for rank, got in enumerate(results):
            assert got[text, policy, delivery] == wanted[rank], (text, policy, delivery, rank)


@pytest.mark.parametrize("split", ["zigzag", "contiguous"])
def test_a_single_process_needs_no_group(tmp_path: Path, split: Any) -> None:
    write_corpus(tmp_path / "c", num_tokens=12_000)
    packing = packing_of("balanced")
    with mf.Feed(recipe_of(tmp_path / "c"), packing=packing, cp_split=split) as feed:
        wanted = seen(feed)
    with mf.Exchange(
        documents(tmp_path / "c", STEPS, 0, 1), packing=packing, keys=DOCUMENT_KEYS, cp_split=split
    ) as exchange:
        assert seen(exchange) == wanted
