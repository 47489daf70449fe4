"""Inside a pipeline schedule no stage waits for another in the loader: it would wait for ever.

A stage asks for a microbatch only once the stage before has trained on it, so the last stage stands in the
trainer's recv while the first asks for its batch.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import meshfeed as mf
import world
from meshfeed.store import IndexedWriter

STEPS, TIMEOUT_S = 3, 20


def recipe_of(path: Path) -> mf.Recipe:
    return mf.Recipe(data=mf.open(path), sequence=mf.Windows(16), batch=mf.Batch(sequences=8), seed=3)


def schedule(feed: mf.Feed, rank: int, pp: int) -> list[int]:
    """Forward passes in turn, with a flush at the end of each step, as a pipeline of pp ranks makes them."""
    steps, word = iter(feed), torch.zeros(1)
    seen: list[int] = []
    for _ in range(STEPS):
        step = None
        for m in itertools.count():
            if rank > 0:
                dist.recv(word, rank - 1)
            step = step or next(steps)
            seen += next(step.microbatches).draws.index.tolist()
            if rank < pp - 1:
                dist.send(word, rank + 1)
            if m + 1 == step.num_microbatches:
                break
        dist.barrier()  # the flush: what the last backward pass is
    return seen


def job(rank: int, path: Path, pp: int, cases: list[dict[str, Any]]) -> list[list[int]]:
    seen: list[list[int]] = []
    for options in cases:
        layout = mf.Layout(pp=pp, ranks_per_node=options.pop("ranks_per_node", pp))
        with mf.Feed(recipe_of(path), layout, timeout_s=TIMEOUT_S, micro_batch_size=1, **options) as feed:
            seen.append(schedule(feed, rank, pp))
    return seen


CASES = [
    {"delivery": delivery, "prefetch": prefetch, "verify": verify}
    for delivery, prefetch, verify in itertools.product(("direct", "share", "broadcast"), (0, 1, 2), (False,))
] + [{"delivery": "tree", "ranks_per_node": 2, "prefetch": n, "verify": False} for n in (0, 2)]


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
    for seen in world.run(job, 4, corpus, 4, CASES):
        assert seen == [wanted] * len(CASES)
