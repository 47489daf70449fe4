"""Who is slow, and at what: delays, each on one rank and in one stage of a real job."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import meshfeed as mf
import world
from corpus import recipe_of, write_corpus
from delays import LEAP_S, delayed
from meshfeed.metrics import StepStats
from soak import some

DELAYED = (4, 7, 10)  # calls of the stage
STEPS = 16
SLOW = {0: "read", 1: "build", 2: "plan", 3: "copy"}  # rank -> the stage that is delayed there


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("corpus") / "text"
    write_corpus(path, num_tokens=20_000)
    return str(path)


def slow_at_a_stage(rank: int, path: str, delivery: str, log: str) -> list[dict[str, Any]]:
    """The stats of every step of a rank that is slow at one stage."""
    recipe = recipe_of(path)
    if SLOW[rank] == "copy":
        import meshfeed.feed.reading as house

        house.microbatches_of = delayed(house.microbatches_of, DELAYED)
    else:
        method = {"read": "load", "plan": "lengths", "build": "table"}[SLOW[rank]]
        object.__setattr__(recipe.sequence, method, delayed(getattr(recipe.sequence, method), DELAYED))
    layout = mf.Layout.parse("tp2-dp2")
    steps: list[mf.Step] = []
    with mf.Feed(
        recipe,
        layout,
        transport=mf.Transport(delivery=delivery, timeout_s=600),
        metrics=mf.metrics.RunLog(log),
    ) as feed:
        for step in itertools.islice(feed, STEPS):
            steps.append(step)
            for _ in step.microbatches:
                pass
    return [step.stats for step in steps]


@some(1)
@pytest.mark.parametrize("delivery", ["direct", "broadcast", "share"])
def test_a_delay_shows_on_its_rank_and_in_its_stage(corpus: str, tmp_path: Path, delivery: str) -> None:
    told = world.run(slow_at_a_stage, 4, corpus, delivery, str(tmp_path / "run"))
    history = mf.report.read_run(tmp_path / "run")
    assert sorted(history.ranks) == [0, 1, 2, 3]
    for rank, stats in enumerate(told):
        check_slow(SLOW[rank], stats)
        check_log(history, rank, stats)


def check_slow(slow: str, stats: list[StepStats]) -> None:
    """The delays of a rank stand in the right stage of its work and wait; those of others, at most in deliver."""
    for key in ("work_s", "exposed_wait_s"):
        long = [
            (stage, seconds) for each in stats for stage, seconds in each[key].items() if seconds > LEAP_S / 2
        ]
        assert [stage for stage, _ in long] == [slow] * len(DELAYED), (key, slow, long)
        assert [seconds for _, seconds in long] == pytest.approx([LEAP_S] * len(DELAYED), rel=0.1), (
            key,
            slow,
        )


def check_log(history: Any, rank: int, stats: list[StepStats]) -> None:
    """The log says of each step what its stats say."""
    logged = history.ranks[rank]
    assert logged.step.tolist() == list(range(STEPS))
    for table, key in ((logged.work, "work_s"), (logged.wait, "exposed_wait_s")):
        expected = [[each[key].get(stage, 0.0) for stage in history.stages] for each in stats]
        np.testing.assert_allclose(table, expected, atol=1e-6)
    for name in ("queue_depth", "bytes_read", "delivered_bytes", "opens", "collectives"):
        assert getattr(logged, name).tolist() == [each[name] for each in stats], name


# -- an exchange -----------------------------------------------------------------------------------


def slow_puller(rank: int, folder: str) -> None:
    def items() -> Iterator[dict[str, Any]]:
        for number in range(6):
            if rank == 1 and number >= 3:
                threading.Event().wait(0.5)
            yield {"tokens": torch.arange(10 + number)}

    layout, packing = mf.Layout.parse("dp2"), mf.Packing(capacity=64)
    with mf.Exchange(
        items(),
        layout,
        packing=packing,
        transport=mf.Transport(timeout_s=600),
        metrics=mf.metrics.RunLog(folder),
    ) as steps:
        for step in steps:
            list(step.microbatches)


def test_a_slow_iterator_shows_as_read_with_it_and_as_exchange_with_its_peers(tmp_path: Path) -> None:
    world.run(slow_puller, 2, str(tmp_path))
    history = mf.report.read_run(tmp_path)
    (read, exchange), quick, slow = map(history.stages.index, ("read", "exchange")), *history.ranks.values()
    assert quick.step.tolist() == slow.step.tolist() == list(range(6))
    assert (slow.work[3:, read] > 0.4).all() and quick.work[3:, read].min() < 0.25
    assert quick.wait[3:, exchange].max() > 0.25 and history.starts[0].fingerprint is None
    assert not any("padding" in str(number) for number in quick.padding) and (quick.padding >= 0).all()
