"""The slow rank by name, in the stats of every rank."""

from __future__ import annotations

import itertools
import json
import socket
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

import meshfeed as mf
import world
from corpus import recipe_of, write_corpus
from meshfeed.metrics import SlowRank, slowest

LONG_S = 0.02
MOST_STEPS = 100_000


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("corpus") / "text"
    write_corpus(path, num_tokens=20_000)
    return str(path)


def train_until_all_know(rank: int, path: str, layout: str, slow_ranks: list[int]) -> list[SlowRank]:
    """One rank after the other reads slowly; each phase ends when the stats of all ranks say so.

    Ranks take their steps together, as trainers do by a collective.
    """
    import meshfeed.metrics.background as background

    background.EVERY_S = 0.05
    recipe, slow_now = recipe_of(path), slow_ranks[0]
    rule: Any = recipe.sequence
    quick = rule.load

    def load(*given: Any) -> Any:
        if rank == slow_now:
            time.sleep(LONG_S)
        return quick(*given)

    object.__setattr__(rule, "load", load)
    found: list[SlowRank] = []
    with mf.Feed(
        recipe,
        mf.Layout.parse(layout),
        transport=mf.Transport(timeout_s=600, delivery="direct"),
        metrics=mf.metrics.Sink(),
    ) as feed:
        for step in itertools.islice(feed, MOST_STEPS):
            list(step.microbatches)
            told = step.stats.slowest
            knows = torch.tensor(told is not None and (told.rank, told.stage) == (slow_now, "read"))
            dist.all_reduce(knows, dist.ReduceOp.MIN)
            if knows:
                assert told is not None
                found.append(told)
                if len(found) == len(slow_ranks):
                    break
                slow_now = slow_ranks[len(found)]
    return found


def test_all_ranks_name_the_slow_one_and_then_another(corpus: str) -> None:
    slow_ranks = [2, 1]
    for found in world.run(train_until_all_know, 4, corpus, "dp4", slow_ranks):
        for told, rank in zip(found, slow_ranks, strict=True):
            assert (told.rank, told.host, told.stage) == (rank, socket.gethostname(), "read")
            assert told.wait_s > 0
            assert 0.001 <= told.share <= 1
            assert told.step > 0


def test_one_process_names_itself_and_nobody_is_named_without_sinks(corpus: str) -> None:
    for sinks in (None, mf.metrics.Sink()):
        with mf.Feed(recipe_of(corpus), transport=mf.Transport(prefetch=0), metrics=sinks) as feed:
            told = None
            for step in itertools.islice(feed, MOST_STEPS if sinks else 10):
                told = step.stats.slowest
                assert ("slowest" in step.stats) == (told is not None)
                if told is not None:
                    break
        assert (told is None) == (sinks is None)
        assert told is None or told.rank == 0


def figures(rank: int, wait_s: float) -> SlowRank:
    return SlowRank(rank=rank, host=f"node{rank}", stage="read", wait_s=wait_s, share=wait_s, step=100)


def test_who_takes_the_place_of_the_slowest() -> None:
    store, now = HashStore(), 1e9

    def compared(rank: int, wait_s: float, at: float) -> SlowRank:
        return slowest.compared(store, "key", figures(rank, wait_s), at, 60.0)

    assert compared(3, 0.2, now) == figures(3, 0.2)
    assert compared(1, 0.1, now + 1) == figures(3, 0.2)  # it is faster
    assert compared(2, 0.3, now + 2) == figures(2, 0.3)  # slower
    assert compared(2, 0.1, now + 3) == figures(2, 0.1)  # the one named there has become faster
    assert compared(1, 0.1, now + 4) == figures(2, 0.1)  # as slow is not slower
    assert compared(1, 0.05, now + 90) == figures(1, 0.05)  # the one named there has left
    assert json.loads(store.get("key")) == [now + 90, [*figures(1, 0.05)]]
