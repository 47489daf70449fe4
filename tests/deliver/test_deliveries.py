"""Every delivery, every layout: the same global batches, and the same bytes as `simulate` makes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import meshfeed as mf
import world
from corpus import recipe_of, write_corpus
from observe import ledger, seen_step, simulated, take

DELIVERIES = ("direct", "broadcast", "share", "auto")
RESET = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}


@dataclass(frozen=True)
class Case:
    """A layout, and what else a trainer may choose with it."""

    layout: mf.Layout
    options: dict[str, Any] = field(default_factory=dict)
    rule: dict[str, Any] = field(default_factory=dict)
    length: int = 64
    sequences: int = 16


def parse(text: str, **options: Any) -> mf.Layout:
    return mf.Layout.parse(text, **options)


CASES = {
    8: [
        Case(parse("tp8")),
        Case(parse("cp8")),
        Case(parse("cp8"), {"cp_split": "contiguous"}, RESET, length=50),
        Case(parse("dp8"), rule=RESET, sequences=13),
        Case(parse("pp8"), {"micro_batch_size": 2}),
        Case(parse("tp2-cp2-dp2"), {"micro_batch_size": 3}, RESET),
        Case(parse("tp2-cp2-pp2"), rule={"reset_position_ids": True}, length=33),
        Case(parse("pp2-dp2-tp2"), {"micro_batch_size": 2}, RESET),
        Case(parse("cp4-tp2"), {"cp_split": "contiguous"}),
        Case(parse("dp2-cp2-tp2"), rule={"eod_mask_loss": True}),
        Case(parse("tp4-dp2", ranks_per_node=4)),
        Case(parse("cp2-pp2-dp2", ranks_per_node=4), rule=RESET),
        Case(parse("tp2-pp4"), {"stage_map": mf.StageMap(pp=4, vpp=2, mtp=(3, 7))}),
        Case(parse("tp2-pp4"), {"stage_map": mf.StageMap(pp=4, layout="Et|t|m|L")}, RESET),
        Case(mf.Layout(tp=2, dp=4, ep=4, order="tp-ep-dp-pp")),
        Case(mf.Layout(tp=2, cp=2, pp=2, table=(6, 1, 0, 7, 2, 5, 4, 3)), rule=RESET),
    ],
    4: [
        Case(parse("tp2-pp2"), rule=RESET),
        Case(parse("cp2-tp2"), {"micro_batch_size": 4}),
        Case(parse("pp2-cp2"), {"stage_map": mf.StageMap(pp=2, vpp=2)}, length=31),
    ],
    3: [Case(parse("tp3"), rule=RESET), Case(parse("cp3"), length=60), Case(parse("dp3"))],
    1: [Case(parse("tp1"), RESET and {}, RESET)],
}


def every_delivery(rank: int, path: str, world_size: int) -> list[str]:
    """Runs the whole stream of every case through every delivery; tells what differs from simulate."""
    wrong: list[str] = []
    for at, case in enumerate(CASES[world_size]):
        recipe = recipe_of(path, length=case.length, sequences=case.sequences, epochs=1, **case.rule)
        expected = simulated(recipe, case.layout, 10**6, rank, **case.options)
        for delivery in DELIVERIES:
            with mf.Feed(
                recipe, case.layout, delivery=delivery, verify=True, timeout_s=30, **case.options
            ) as feed:
                got = take(feed)
            if got != expected:
                wrong.append(f"case {at} {case.layout} {delivery}: {first_difference(got, expected)}")
    return wrong


def first_difference(got: list[Any], expected: list[Any]) -> str:
    pairs = itertools.zip_longest(got, expected)
    return next(f"step {k}: {a}\n  expected {b}" for k, (a, b) in enumerate(pairs) if a != b)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("corpus") / "text"
    write_corpus(path, num_tokens=2_700, mean=40)
    return str(path)


@pytest.mark.parametrize("world_size", sorted(CASES))
def test_every_layout_and_delivery_gives_the_bytes_of_simulate(corpus: str, world_size: int) -> None:
    wrong = world.run(every_delivery, world_size, corpus, world_size)
    assert wrong == [[] for _ in range(world_size)]
