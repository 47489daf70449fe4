"""Who is slow, and at what: delays of half a second, each on one rank and in one stage of a real job."""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshfeed as mf
import world
from corpus import recipe_of, write_corpus
from meshfeed.metrics import StepStats
from soak import some

DELAY_S = 0.5
DELAYED = (4, 7, 10)  # calls of the stage
STEPS = 16
SLOW = {0: "read", 1: "build", 2: "plan", 3: "copy"}  # rank -> the stage that is delayed there

Told = tuple[list[dict[str, Any]], list[float]]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("corpus") / "text"
    write_corpus(path, num_tokens=20_000)
    return str(path)


def slowed(function: Callable[..., Any], slept: list[float]) -> Callable[..., Any]:
    """The function, which now and then takes longer; `slept` is told how long exactly."""
    calls = itertools.count()

    def slow(*args: Any) -> Any:
        if next(calls) in DELAYED:
            began = time.monotonic()
            threading.Event().wait(DELAY_S)
            slept.append(time.monotonic() - began)
        return function(*args)

    return slow


def delayed(rank: int, path: str, delivery: str, log: str) -> Told:
    """The stats of every step of a rank that is slow at one stage, and the delays it had."""
    recipe, slept = recipe_of(path), list[float]()
    if SLOW[rank] == "copy":
        import meshfeed.feed.feed as house

        house.microbatches_of = slowed(house.microbatches_of, slept)
    else:
        method = {"read": "load", "plan": "lengths", "build": "build"}[SLOW[rank]]
        object.__setattr__(recipe.sequence, method, slowed(getattr(recipe.sequence, method), slept))
    layout = mf.Layout.parse("tp2-dp2")
    steps: list[mf.Step] = []
    with mf.Feed(recipe, layout, delivery=delivery, timeout_s=600, metrics=mf.metrics.RunLog(log)) as feed:
        for step in itertools.islice(feed, STEPS):
            steps.append(step)
            for _ in step.microbatches:
                pass
    return [step.stats for step in steps], slept


@some(1)
@pytest.mark.parametrize("delivery", ["direct", "broadcast", "share"])
def test_a_delay_shows_on_its_rank_and_in_its_stage(corpus: str, tmp_path: Path, delivery: str) -> None:
    told: list[Told] = world.run(delayed, 4, corpus, delivery, str(tmp_path / "run"))
    history = mf.metrics.read_run(tmp_path / "run")
    assert sorted(history.ranks) == [0, 1, 2, 3]
    for rank, (stats, slept) in enumerate(told):
        check_slow(SLOW[rank], stats[2:], slept)  # the first of all are slow by themselves
        check_log(history, rank, stats)


def check_slow(slow: str, stats: list[StepStats], slept: list[float]) -> None:
    """The delays of a rank stand in the right stage of its work and wait; those of others, at most in deliver."""
    assert len(slept) == len(DELAYED)
    for key in ("work_s", "exposed_wait_s"):
        long = [each[key].get(slow, 0.0) for each in stats if each[key].get(slow, 0.0) > DELAY_S / 2]
        assert len(long) == len(DELAYED), (key, slow)
        # one of them may have been hit by another process, or met a read that had been made ahead
        assert statistics.median(long) == pytest.approx(statistics.median(slept), rel=0.1), (key, slow)
        for stage in {"read", "plan", "build", "copy"} - {slow}:
            assert sum(each[key].get(stage, 0.0) > DELAY_S / 2 for each in stats) <= 1, (key, stage)


def check_log(history: Any, rank: int, stats: list[StepStats]) -> None:
    """The log says of each step what its stats say."""
    logged = history.ranks[rank]
    assert logged.step.tolist() == list(range(STEPS))
    for table, key in ((logged.work, "work_s"), (logged.wait, "exposed_wait_s")):
        expected = [[each[key].get(stage, 0.0) for stage in history.stages] for each in stats]
        np.testing.assert_allclose(table, expected, atol=1e-6)
    for name in ("queue_depth", "bytes_read", "delivered_bytes", "opens", "collectives"):
        assert getattr(logged, name).tolist() == [each[name] for each in stats], name
