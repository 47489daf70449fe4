"""Inside a pipeline schedule no stage waits for another in the loader: it would wait for ever.

A stage asks for a microbatch only once the stage before has trained on it, so the last stage stands in the
trainer's recv while the first asks for its batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import meshfeed as mf
import transports
import world
from corpus import flip_in_build
from meshfeed.store import IndexedWriter

STEPS, TIMEOUT_S = 3, 600


def recipe_of(path: Path) -> mf.Recipe:
    return mf.Recipe(data=mf.open(path), sequence=mf.Windows(16), batch=mf.Batch(sequences=8), seed=3)


def schedule(feed: mf.Feed, rank: int) -> Iterator[list[int]]:
    """The draws of each microbatch: forward passes in turn, with a flush at the end of each step, as a pipeline has them.

    Ends where the stage before has ended, which says so.
    """
    layout = feed.layout
    stage, apart = layout.coord(rank).pp, layout.world_size // layout.pp
    steps, word = iter(feed), torch.ones(1)
    try:
        for _ in range(STEPS):
            step = None
            for m in itertools.count():
                if stage > 0:
                    dist.recv(word, rank - apart)
                    if not word:
                        return
                step = step or next(steps)
                yield next(step.microbatches).draws.index.tolist()
                if stage < layout.pp - 1:
                    dist.send(word, rank + apart)
                if m + 1 == step.num_microbatches:
                    break
            if stage > 0:  # the last backward pass
                dist.send(word, rank - apart)
            if stage < layout.pp - 1:
                dist.recv(word, rank + apart)
    except mf.MeshfeedError:
        if stage < layout.pp - 1:
            dist.send(torch.zeros(1), rank + apart)
        raise


def job(rank: int, path: Path, cases: list[dict[str, Any]]) -> list[list[int]]:
    seen: list[list[int]] = []
    for options in cases:
        layout = mf.Layout(pp=4, ranks_per_node=options.pop("ranks_per_node", 4))
        with mf.Feed(
            recipe_of(path), layout, **transports.of(timeout_s=TIMEOUT_S, micro_batch_size=1, **options)
        ) as feed:
            seen.append([index for draws in schedule(feed, rank) for index in draws])
    return seen


CASES = [
    {"delivery": delivery, "prefetch": prefetch, "verify": verify}
    for delivery, prefetch, verify in itertools.product(
        ("direct", "share", "broadcast"), (0, 2), (False, True)
    )
] + [{"delivery": "tree", "ranks_per_node": 2, "prefetch": n, "verify": bool(n)} for n in (0, 2)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pipeline") / "corpus"
    with IndexedWriter(path, np.uint16) as writer:
        writer.add_document(np.arange(2000) % 1000)
    return path


def test_no_stage_waits_for_another(corpus: Path) -> None:
    wanted = [
        index
        for step in mf.simulate(recipe_of(corpus), mf.Layout(), STEPS, ranks=[0])
        for microbatch in step.microbatches
        for index in microbatch.draws.index.tolist()
    ]
    for seen in world.run(job, 4, corpus, CASES):
        assert seen == [wanted] * len(CASES)


def flipping(rank: int, path: Path) -> tuple[int, Any]:
    """Microbatches seen, and the error, where rank 1 of the first stage builds a token of step 1 wrong, once."""
    feed = mf.Feed(
        recipe_of(path), mf.Layout(tp=2, pp=2), verify=True, transport=mf.Transport(timeout_s=TIMEOUT_S)
    )
    seen = 0
    with feed:
        if rank == 1:
            flip_in_build(feed, once=True, step=1)
        try:
            for _ in schedule(feed, rank):
                seen += 1
        except mf.errors.VerifyError as error:
            return seen, error.ranks
    return seen, None


def test_a_flip_is_named_before_the_next_step_though_the_other_stage_waits_for_this_one(corpus: Path) -> None:
    """Two ranks of one stage differ, so that all have to read again: those too whose loop stands in recv."""
    assert world.run(flipping, 4, corpus) == [(16, (1,))] * 2 + [(16, None)] * 2
