"""Killed anywhere, gone on under another layout: the ledger is that of a run that nobody disturbed."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import meshfeed as mf
import world
from corpus import recipe_of, write_corpus
from meshfeed.order import draws_of_step
from observe import content_of, digest
from soak import some

STEPS = 14
LAYOUTS = (
    "dp1", "tp2", "dp2", "pp2", "cp2", "dp3", "tp2-pp2", "cp2-dp2", "dp4", "pp3", "dp2-tp3", "tp2-dp2-pp2",
    "cp2-tp2-pp2", "dp8",
)  # fmt: skip
Line = dict[str, Any]


def cases() -> list[tuple[str, str, int, str, str, int, int]]:
    """(old layout, new layout, kill step, old and new delivery, old and new micro batch size)"""
    rng = random.Random(20)
    made = []
    for _ in range(10):
        old, new = rng.sample(LAYOUTS, 2)
        ways = rng.choices(("direct", "broadcast", "share", "auto"), k=2)
        made.append((old, new, rng.randrange(STEPS - 1), *ways, *rng.choices((1, 2, 3), k=2)))
    return made


def train(
    rank: int, path: str, text: str, delivery: str, micro_batch_size: int, out: str, kill_at: int | None
) -> None:
    """Trains to the end from the state in `out`; writes a ledger, and with rank 0 the state after every step.

    Where it is to be killed, it tells the test when that step is in work, and waits in it for its end.
    """
    layout, state = mf.Layout.parse(text), Path(out, "state.json")
    recipe = recipe_of(path, length=24, sequences=12)
    rows = {"micro_batch_size": micro_batch_size, "pad_rows": True}
    with (
        mf.Feed(recipe, layout, transport=mf.Transport(delivery=delivery, timeout_s=600), **rows) as feed,
        Path(out, f"ledger-{kill_at}-{rank}.jsonl").open("w") as ledger,
    ):
        if state.exists():
            feed.load_state_dict(json.loads(state.read_text()))
        for step in feed:
            for microbatch in step.microbatches:
                line = line_of(layout, rank, step.index, microbatch)
                ledger.write(json.dumps(line) + "\n")
            ledger.flush()
            if kill_at == step.index:
                dist.FileStore(f"{out}/events", -1).set(f"at{rank}", "1")
                dist.FileStore(f"{out}/never", -1).wait(["killed"], timedelta(seconds=600))
            dist.barrier()  # what a training step does
            if rank == 0:
                state.with_suffix(".new").write_text(json.dumps(feed.state_dict()))
                os.replace(state.with_suffix(".new"), state)
            if step.index == STEPS - 1:
                return


def line_of(layout: mf.Layout, rank: int, step: int, microbatch: mf.Microbatch) -> Line:
    draws = microbatch.draws
    whole = layout.cp == 1 and "tokens" in microbatch
    return {
        "step": step,
        "microbatch": microbatch.index,
        "dp": layout.coord(rank).dp,
        "draws": list(zip(draws.source.tolist(), draws.epoch.tolist(), draws.index.tolist())),
        "tokens": [digest(row) for row in microbatch["tokens"][: len(draws)]] if whole else None,
    }


def merged(lines: Iterable[Line]) -> dict[int, list[list[Any]]]:
    """Step -> its draws in order, and their tokens where somebody had them whole; all replicas agree."""
    found: dict[int, dict[tuple[int, int], Any]] = {}
    tokens: dict[str, str] = {}
    for line in lines:
        place = line["microbatch"], line["dp"]
        draws = found.setdefault(line["step"], {}).setdefault(place, line["draws"])
        assert draws == line["draws"], "replicas of a microbatch hold the same sequences"
        for draw, told in zip(line["draws"], line["tokens"] or []):
            assert tokens.setdefault(str(draw), told) == told, "a sequence has the same tokens everywhere"
    return {
        step: [draw for _, draws in sorted(places.items()) for draw in draws]
        for step, places in found.items()
    }


def lines_of(out: Path, run: str) -> list[Line]:
    files = sorted(out.glob(f"ledger-{run}-*.jsonl"))
    texts = [line for file in files for line in file.read_text().splitlines()]
    return [json.loads(text) for text in texts]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("corpus") / "text"
    write_corpus(path, num_tokens=24 * 50 + 7)  # 50 windows: three epochs and more in 14 steps of 12
    return str(path)


@some(4)
@pytest.mark.parametrize(("old", "new", "kill_at", "was", "now", "mbs_was", "mbs_now"), cases())
def test_killed_and_resumed_under_another_layout(
    corpus: str,
    tmp_path: Path,
    old: str,
    new: str,
    kill_at: int,
    was: str,
    now: str,
    mbs_was: int,
    mbs_now: int,
) -> None:
    size = mf.Layout.parse(old).world_size
    first = world.start(train, size, corpus, old, was, mbs_was, str(tmp_path), kill_at)
    events = dist.FileStore(str(tmp_path / "events"), -1)
    events.wait([f"at{rank}" for rank in range(size)], timedelta(seconds=600))
    first.kill(range(size))
    assert [outcome.exitcode for outcome in first.join()] == [-9] * size

    saved = tmp_path / "state.json"
    resumed_at = content_of(json.loads(saved.read_text()))["step"] if saved.exists() else 0
    assert resumed_at == kill_at, "the step in work when it was killed is not done"
    size = mf.Layout.parse(new).world_size
    world.run(train, size, corpus, new, now, mbs_now, str(tmp_path), None)

    before = [line for line in lines_of(tmp_path, str(kill_at)) if line["step"] < resumed_at]
    after = lines_of(tmp_path, "None")
    assert {line["step"] for line in after} == set(range(resumed_at, STEPS))
    ledger = merged([*before, *after])
    recipe = recipe_of(corpus, length=24, sequences=12)
    for step in range(STEPS):
        draws = draws_of_step(recipe, step)
        expected = zip(draws.source.tolist(), draws.epoch.tolist(), draws.index.tolist())
        assert ledger[step] == [list(draw) for draw in expected], step
    every = [tuple(draw) for step in range(STEPS) for draw in ledger[step]]
    assert len(every) == len(set(every)) == 12 * STEPS, "nothing twice"
    for epoch in range(3):
        assert {index for _, e, index in every if e == epoch} == set(range(50)), "nothing lost"
    assert content_of(json.loads(saved.read_text()))["step"] == STEPS


def test_the_cases_are_worth_running() -> None:
    chosen = cases()
    sizes = {mf.Layout.parse(text).world_size for case in chosen for text in case[:2]}
    assert len(chosen) == 10 and max(sizes) == 8 and len(sizes) >= 4
    assert {way for case in chosen for way in case[3:5]} == {"direct", "broadcast", "share", "auto"}
    assert len({case[2] for case in chosen}) >= 6
