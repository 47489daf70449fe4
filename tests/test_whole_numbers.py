"""Whole numbers of any library are whole numbers, in all that users call; a truth value and a part are none."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import meshfeed as mf

REFERENCE = (Path(__file__).parents[1] / "docs" / "api.md").read_text()
LENGTHS = mf.Lengths(np.ones(64, int))
MIXTURE = mf.Mixture({"all": (LENGTHS, 1)})
PACKING = mf.Packing(capacity=16)
PLAN = mf.plan.plan_step(np.array([3, 5, 2, 6]), dp=2, packing=PACKING)
SHAPE = {"num_layers": 2, "hidden_size": 8, "num_heads": 2, "ffn_size": 16, "num_kv_heads": 2, "head_dim": 4}


def recipe(**given: Any) -> mf.Recipe:
    return mf.Recipe(data=LENGTHS, sequence=mf.Documents(), **{"batch": 4, **given})


def feed(**given: Any) -> mf.Feed:
    rows = "micro_batch_size" in given
    made = mf.Recipe(data=LENGTHS, sequence=mf.Samples("x") if rows else mf.Documents(), batch=4)
    return mf.Feed(made, packing=None if rows else PACKING, **given)


def simulated(**given: Any) -> Any:
    return [
        step.batch.step
        for step in mf.simulate(recipe(), mf.Layout(), packing=PACKING, no_loss="allow", **given)
    ]


def rows(**given: Any) -> Any:
    made = mf.Recipe(data=LENGTHS, sequence=mf.Windows(4), batch=4)
    return [len(step.microbatches) for step in mf.simulate(made, mf.Layout(), 2, **given)]


def random(more: int, **given: int) -> float:
    return mf.order.rng(given["seed"], given["epoch"], given["index"], more).random()


CALLS: dict[str, list[tuple[Callable[..., Any], dict[str, int]]]] = {
    "Align": [(mf.Align, {"sequence": 2, "pack": 4})],
    "Batch": [
        (mf.Batch, {"sequences": 4, "rows_of": 16}),
        (mf.Batch, {"tokens": 64}),
        (mf.Batch(4).then, {"step": 3, "sequences": 6}),
        (mf.Batch(tokens=64).then, {"step": 3, "tokens": 128}),
    ],
    "BatchSize": [(mf.amendments.BatchSize, {"sequences": 4}), (mf.amendments.BatchSize, {"tokens": 4})],
    "Blocks": [(mf.Blocks, {"sequences": 4, "window": 2, "lanes": 3})],
    "Cache": [(lambda **given: mf.Cache("cache", **given), {"block_bytes": 4096, "limit_bytes": 8192})],
    "Chat": [(mf.Chat, {"max_len": 4})],
    "CostModel": [(lambda **given: mf.CostModel(alpha=2.0, **given), {"window": 4})],
    "Documents": [(mf.Documents, {"max_len": 4})],
    "Exchange": [
        (
            lambda **given: mf.Exchange(iter(()), packing=PACKING, **given),
            {"rank": 0, "pulls": 2},
        )
    ],
    "Feed": [
        (feed, {"rank": 0, "vocab_size": 9}),
        (feed, {"micro_batch_size": 2}),
    ],
    "IndexedWriter": [
        (lambda **given: mf.IndexedWriter("store", np.uint16, **given), {"checksum_bytes": 4096})
    ],
    "Layout": [(mf.Layout, {"tp": 2, "cp": 2, "dp": 2, "pp": 2, "ep": 2, "ranks_per_node": 8})],
    "Machine": [(mf.Machine, {"workers": 2})],
    "Masked": [
        (
            mf.Masked,
            {
                "length": 8,
                "vocab_size": 9,
                "mask_token": 9,
                "first_token": 1,
                "last_token": 2,
                "pad_token": 3,
            },
        )
    ],
    "MegatronGPT": [(mf.MegatronGPT, {"length": 8, "samples": 4})],
    "Mixture": [(lambda **given: MIXTURE.then(sources={"all": 2}, **given), {"step": 3})],
    "ModelShape": [
        (mf.ModelShape, {**SHAPE, "ffn_matrices": 3, "active_experts": 1, "vocab_size": 9, "window": 4})
    ],
    "Packing": [
        (mf.Packing, {"capacity": 16, "max_sequences": 3, "quantum": 2}),
        (mf.Packing, {"capacity": 16, "microbatches": 2}),
    ],
    "Recipe": [(recipe, {"seed": 3, "epochs": 1, "steps": 4}), (recipe, {"batch": 4})],
    "Resampled": [
        (lambda **given: vars(mf.Resampled(range(9), **given)), {"num_epochs": 2, "seed": 3}),
        (lambda **given: vars(mf.Resampled(range(9), **given)), {"num_samples": 2}),
    ],
    "SkipSteps": [(mf.amendments.SkipSteps, {"first": 2, "stop": 4})],
    "StageMap": [(mf.StageMap, {"pp": 2, "vpp": 3})],
    "State": [(lambda **given: mf.State.at(recipe(), **given), {"step": 3})],
    "Transport": [(mf.Transport, {"prefetch": 1, "read_ahead_bytes": 1})],
    "Windows": [(mf.Windows, {"length": 8})],
    "account_of": [(lambda **given: mf.plan.account_of(PLAN, PACKING, **given), {"pp": 2, "vpp": 1})],
    "packs_of": [(lambda **given: mf.plan.packs_of(PLAN, **given), {"dp_cp_rank": 1, "together": 2})],
    "plan_step": [
        (
            lambda **given: mf.plan.plan_step([3, 5, 2, 6], packing=PACKING, **given),
            {"dp": 2, "cp": 1, "pp": 2, "vpp": 1, "quantum": 2},
        )
    ],
    "rng": [(random, {"seed": 3, "epoch": 1, "index": 2, "more": 4})],
    "simulate": [(simulated, {"steps": 3}), (rows, {"micro_batch_size": 2})],
}
"""What takes whole numbers -> calls of it, each with valid ones."""

MADE = {
    *("Account", "Coord", "Draws", "EncoderPlan", "EncoderRoute", "EpochIndex", "Microbatch", "Pack", "Role"),
    *("Step", "StepPlan"),
}
"""What meshfeed makes."""
ELSEWHERE = {
    "Amendment": "recipe.amended checks it, see test_amendments.py",
    "encoder_routes": "an EncoderPlan alone has its ranks",
    "State": "made by State.at",
}
"""Parameters with a test of their own."""


def numbers() -> Iterator[tuple[str, str]]:
    """Name and parameter of everything public that takes one whole number."""
    for place in re.findall(
        r"^::: meshfeed\.((?:amendments\.|layout\.|order\.|plan\.|roles\.)?\w+)$", REFERENCE, re.M
    ):
        kind, name = attrgetter(place)(mf), place.rpartition(".")[2]
        if name in MADE or inspect.ismodule(kind):
            continue
        for each in inspect.signature(kind).parameters.values():
            if re.search(r"(^|\| )int( \||$)", str(each.annotation)):
                yield name, each.name


ALL = [(call, given, name) for calls in CALLS.values() for call, given in calls for name in given]
IDS = [
    f"{of}-{at}-{name}"
    for of, calls in CALLS.items()
    for at, (_, given) in enumerate(calls)
    for name in given
]


def test_all_that_take_whole_numbers_are_here() -> None:
    here = {(name, each) for name, calls in CALLS.items() for _, given in calls for each in given}
    missing = {each for each in numbers() if each not in here and each[0] not in ELSEWHERE}
    assert missing == set()


@pytest.mark.parametrize(("call", "given", "name"), ALL, ids=IDS)
def test_whole_numbers_of_any_library(call: Callable[..., Any], given: dict[str, int], name: str) -> None:
    wanted = repr(call(**given))
    for kind in (np.int64, np.uint16, torch.tensor):
        assert re.sub("0x[0-9a-f]+", "", repr(call(**{**given, name: kind(given[name])}))) == re.sub(
            "0x[0-9a-f]+", "", wanted
        )


@pytest.mark.parametrize(("call", "given", "name"), ALL, ids=IDS)
def test_what_is_no_whole_number(call: Callable[..., Any], given: dict[str, int], name: str) -> None:
    for bad in (True, np.True_, given[name] + 0.5, float(given[name]), str(given[name])):
        with pytest.raises(mf.MeshfeedError, match=name):
            call(**{**given, name: bad})
