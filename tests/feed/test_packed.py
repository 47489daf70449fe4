"""Packed documents through the real Feed: every delivery, every stage, changing cp groups."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import meshfeed as mf
import world
from corpus import write_corpus
from soak import cases

STEPS = 3
LAYOUTS = ("tp2-cp2-dp2", "tp2-dp2-pp2", "cp2-dp4", "cp2-dp2-pp2", "dp8", "tp4-pp2")
POLICIES = ("in_order", "balanced", "dynamic_cp", "fixed")
DELIVERIES = ("direct", "broadcast", "share", "tree")
CASES = list(itertools.product(LAYOUTS, POLICIES, DELIVERIES))[:: cases(9, 1)]
"""Of 96, every ninth in `make test`: all layouts, policies and deliveries, but not each with each."""


def recipe_of(path: Path) -> mf.Recipe:
    return mf.Recipe(data=mf.open(path), sequence=mf.Documents(), batch=mf.Batch(sequences=24), seed=9)


def packing_of(policy: Any) -> mf.Packing:
    if policy == "fixed":
        return mf.Packing(
            capacity=400, policy="dynamic_cp", fixed_shapes=True, max_sequences=5, oversize="split"
        )
    return mf.Packing(capacity=400, policy=policy, align=mf.Align(sequence=2, pack=8), oversize="split")


def plain(microbatch: mf.Microbatch) -> dict[str, Any]:
    fields = {name: (tuple(value.shape), value.numpy().tobytes()) for name, value in microbatch.items()}
    return fields | {"cp_ranks": microbatch.cp_ranks}


def loop(rank: int, path: Path) -> dict[tuple[str, str, str], list[Any]]:
    """Cases one after the other on the same eight processes."""
    seen: dict[tuple[str, str, str], list[Any]] = {}
    for text, policy, delivery in CASES:
        layout = mf.Layout.parse(text, ranks_per_node=3 if delivery == "tree" else 8)
        feed = mf.Feed(
            recipe_of(path),
            layout,
            transport=mf.Transport(delivery=delivery, timeout_s=600),
            packing=packing_of(policy),
            verify=True,
        )
        with feed:
            taken = seen[text, policy, delivery] = []
            for step in feed:
                for microbatch in step.microbatches:
                    assert microbatch.cp_ranks == feed.cp_groups[microbatch.cp_size]
                    taken.append(plain(microbatch))
                assert step.stats.efficiency > 0
                if step.index + 1 == STEPS:
                    break
    return seen


def test_every_delivery_gives_what_simulate_gives(tmp_path: Path) -> None:
    write_corpus(tmp_path / "c", num_tokens=12_000)
    results = world.run(loop, 8, tmp_path / "c")
    for (text, policy), some in itertools.groupby(CASES, key=lambda case: case[:2]):
        layout = mf.Layout.parse(text)
        wanted: dict[int, list[Any]] = {rank: [] for rank in range(8)}
        for got in mf.simulate(recipe_of(tmp_path / "c"), layout, STEPS, packing=packing_of(policy)):
            wanted[got.rank] += [plain(microbatch) for microbatch in got.microbatches]
        for *_, delivery in some:
            for rank, seen in enumerate(results):
                assert seen[text, policy, delivery] == wanted[rank], (text, policy, delivery, rank)


@settings(max_examples=cases(25), deadline=None)
@given(st.data())
def test_padding_is_what_no_token_fills_of_all_tensors(data: st.DataObject) -> None:
    """Those of ranks that hold no sequence of a microbatch, too."""
    draw, lengths = data.draw, data.draw(st.lists(st.integers(1, 128), min_size=1, max_size=12))
    layout = mf.Layout.parse(draw(st.sampled_from(("dp3", "cp2-dp2", "tp2-dp2-pp2", "cp4"))))
    shapes: dict[str, Any] = {"fixed_shapes": True, "max_sequences": 3} if draw(st.booleans()) else {}
    packing = mf.Packing(
        capacity=128,
        policy=draw(st.sampled_from(("in_order", "balanced", "dynamic_cp"))),
        align=mf.Align(sequence=draw(st.sampled_from((1, 4))), pack=draw(st.sampled_from((1, 32)))),
        **shapes,
    )
    recipe = mf.Recipe(
        data=mf.Lengths(lengths), sequence=mf.Documents(), batch=mf.Batch(len(lengths)), steps=1
    )
    split = draw(st.sampled_from(("zigzag", "contiguous", "pack_contiguous")))
    made = list(mf.simulate(recipe, layout, 1, packing=packing, cp_split=split, no_loss="allow"))
    ranks = (each for each in made if each.coord.tp == each.coord.pp == 0)
    size = sum(microbatch["tokens"].numel() for each in ranks for microbatch in each.microbatches)
    assert made[0].batch.stats().padding == pytest.approx(1 - sum(lengths) / size)


def test_every_stage_has_lengths_without_being_sent_any(tmp_path: Path) -> None:
    write_corpus(tmp_path / "c", num_tokens=12_000)
    layout = mf.Layout.parse("tp2-pp4")
    stages = mf.StageMap(pp=4, layout="Et|t|tm|L")
    by_stage: dict[int, list[set[str]]] = {}
    for got in mf.simulate(
        recipe_of(tmp_path / "c"), layout, 1, stage_map=stages, packing=packing_of("balanced")
    ):
        by_stage.setdefault(got.coord.pp, []).extend(set(m) for m in got.microbatches)
        for m in got.microbatches:
            assert m["cu_seqlens"].dtype == m["cu_seqlens_padded"].dtype == torch.int32
    everywhere = {
        "position_ids",
        "sequence_ids",
        "padding_mask",
        "cu_seqlens",
        "cu_seqlens_padded",
        "max_seqlen",
    }
    for stage, extra in {0: {"tokens"}, 1: set(), 2: {"tokens"}, 3: {"labels", "loss_mask"}}.items():
        assert all(fields == everywhere | extra for fields in by_stage[stage])
    roles = mf.roles.assign_roles(layout, stages, mf.Documents().fields, "share")
    assert [roles[rank].source is None for rank in range(8)] == [
        False,
        False,
        True,
        True,
        False,
        False,
        False,
        False,
    ]


def test_what_is_left_out_is_told(tmp_path: Path) -> None:
    from meshfeed.store import IndexedWriter

    with IndexedWriter(tmp_path / "c", np.uint16) as writer:
        for size in (5, 0, 300, 7):
            writer.add_document(np.arange(size, dtype=np.uint16))
    recipe = mf.Recipe(
        data=mf.open(tmp_path / "c"), sequence=mf.Documents(), batch=mf.Batch(sequences=4), shuffle="none"
    )
    with mf.Feed(recipe, packing=mf.Packing(capacity=100, oversize="drop")) as feed:
        step = next(iter(feed))
        assert step.stats.oversize == [(0, 0, 2)]
        assert step.stats.empty == [(0, 0, 1)]
        assert (step.tokens, step.valid_tokens, step.sum_sq) == (12, 10, 25 + 49)
        shape = mf.ModelShape(hidden_size=8, num_layers=2, num_heads=2, ffn_size=16, vocab_size=10)
        assert step.flops(shape) == 3 * step.flops(shape, backward=False)
    with (
        mf.Feed(recipe, packing=mf.Packing(capacity=100)) as feed,
        pytest.raises(mf.errors.PlanError, match=r"300 tokens.*source 0, epoch 0, index 2"),
    ):
        next(iter(feed))


def test_packing_and_rule_must_fit(tmp_path: Path) -> None:
    write_corpus(tmp_path / "c")
    with pytest.raises(mf.errors.RecipeError, match="needs packing"):
        mf.Feed(recipe_of(tmp_path / "c"))
    windows = mf.Recipe(data=mf.open(tmp_path / "c"), sequence=mf.Windows(8), batch=mf.Batch(sequences=4))
    with pytest.raises(mf.errors.RecipeError, match="leave packing out"):
        mf.Feed(windows, packing=mf.Packing(capacity=100))
