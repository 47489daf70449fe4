"""What Feed and Exchange refuse in their constructors, before anything is opened."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import meshfeed as mf
import transports
from corpus import recipe_of, write_corpus

RECIPE = mf.Recipe(data=mf.Lengths(np.ones(64, int)), sequence=mf.Documents(), batch=mf.Batch(sequences=4))


@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        (
            {"layout": "tp2-dp2"},
            mf.errors.LayoutError,
            r"layout='tp2-dp2' is a str; give mf.Layout.parse\('tp2-dp2'\)",
        ),
        ({"layout": (2, 2)}, mf.errors.LayoutError, "is a tuple; give a mf.Layout"),
        (
            {"delivery": "fast"},
            mf.errors.RoleError,
            "delivery='fast': choose one of auto, direct, broadcast, share",
        ),
        ({"delivery": None}, mf.errors.RoleError, "delivery=None"),
        ({"device": "cdua"}, mf.errors.RecipeError, "device='cdua' is not a device"),
        ({"device": 1.5}, mf.errors.RecipeError, "device=1.5 is not a device"),
        ({"device": "mps"}, mf.errors.RecipeError, "give 'cpu' or 'cuda'"),
    ],
)
def test_both_refuse(options: dict[str, Any], kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says):
        mf.Feed(RECIPE, packing=mf.Packing(capacity=16), **transports.of(**options))
    with pytest.raises(kind, match=says):
        mf.Exchange(iter(()), packing=mf.Packing(capacity=16), **transports.of(**options))


@pytest.mark.parametrize(
    "options",
    [
        {"read_ahead_bytes": 1.5},
        {"read_ahead_bytes": -1},
        {"prefetch": 2.0},
        {"prefetch": True},
        {"timeout_s": 0},
    ],
)
def test_a_feed_refuses_numbers_that_are_none(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(mf.errors.RecipeError, match=f"{name}="):
        mf.Feed(RECIPE, packing=mf.Packing(capacity=16), **transports.of(**options))


FROM_ONE: list[tuple[Callable[[Any], Any], str]] = [
    (lambda n: mf.Windows(n), "length"),
    (lambda n: mf.Batch(n), "sequences"),
    (lambda n: mf.Batch(8).then(3, n), "sequences"),
    (lambda n: mf.Blocks(sequences=n), "sequences"),
    (lambda n: mf.Blocks(window=n), "window"),
    (lambda n: mf.Blocks(lanes=n), "lanes"),
    (lambda n: replace(RECIPE, epochs=n), "epochs"),
    (lambda n: replace(RECIPE, steps=n), "steps"),
    (lambda n: mf.Packing(capacity=n), "capacity"),
    (lambda n: mf.Packing(capacity=8, max_sequences=n), "max_sequences"),
    (lambda n: mf.Packing(capacity=8, microbatches=n), "microbatches"),
    (lambda n: mf.Packing(capacity=8, quantum=n), "quantum"),
]


@pytest.mark.parametrize(("make", "says"), FROM_ONE)
def test_counts_begin_at_one(make: Callable[[Any], Any], says: str) -> None:
    made = make(1)
    assert made == make(1) != make(2)
    for other in (0, -1, 1.0, True, "1"):
        with pytest.raises((mf.errors.RecipeError, mf.errors.PlanError), match=says):
            make(other)


def test_devices_are_taken_in_every_spelling() -> None:
    for device in ("cpu", torch.device("cpu"), "cuda", "cuda:1", torch.device("cuda", 0)):
        mf.Feed(RECIPE, packing=mf.Packing(capacity=16), device=device)


def resources() -> set[Any]:
    """This process's threads, open descriptors and children."""
    pid = os.getpid()  # also the id of the main thread, which runs this
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return {*threading.enumerate(), *os.listdir("/proc/self/fd"), *children}


def test_constructors_only_store(tmp_path: Path) -> None:
    write_corpus(tmp_path / "text", num_tokens=5_000)
    recipe = recipe_of(str(tmp_path / "text"))
    pulled = itertools.count()
    before, read = resources(), recipe.data.stats.bytes_read
    log = mf.metrics.RunLog(tmp_path / "log")
    made = [
        mf.Feed(recipe, metrics=[log, mf.metrics.ProfilerRanges()], verify=True),
        mf.Feed(recipe, mf.Layout(dp=2), rank=1, transport=mf.Transport(delivery="share", prefetch=4)),
        mf.Exchange(
            ({"tokens": [next(pulled)]} for _ in range(3)), packing=mf.Packing(capacity=16), metrics=log
        ),
    ]
    assert resources() <= before and len(made) == 3  # threads of earlier tests may end meanwhile
    assert recipe.data.stats.bytes_read == read and not (tmp_path / "log").exists() and next(pulled) == 0
