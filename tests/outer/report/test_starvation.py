"""Waits that come back every so many steps: of a real job whose shuffle windows are slow to open, and of made-up runs."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import made_up
import numpy as np
import pytest

import meshfeed as mf
import world
from corpus import recipe_of, write_corpus
from delays import LEAP_S, delayed
from meshfeed.__main__ import main
from meshfeed.order import draws_of_step
from meshfeed.report import RunHistory
from meshfeed.report.history.starvation import Starvation, starvation_of, starvation_words

STEPS, SHARD = 60, 64


def slow_to_open(rank: int, corpus: str, log: str) -> list[int]:
    """A feed that is slow to read what is of a shard that it has not read before: the steps at which it is."""
    blocks = mf.Blocks(sequences=SHARD, window=2, lanes=1)
    recipe = recipe_of(corpus, length=8, sequences=16, shuffle=blocks)
    opened, edges = set[int](), list[int]()
    for step in range(STEPS):
        shards = {*(draws_of_step(recipe, step).index // SHARD).tolist()}
        if shards - opened:
            edges.append(step)
        opened |= shards
    rule: Any = recipe.sequence
    object.__setattr__(rule, "load", delayed(rule.load, edges))
    with mf.Feed(recipe, metrics=mf.metrics.RunLog(log)) as feed:
        for step in itertools.islice(feed, STEPS):
            assert len(list(step.microbatches)) >= 1
    return edges


def test_a_shuffle_window_that_is_slow_to_open_is_named(tmp_path: Path) -> None:
    write_corpus(tmp_path / "text", num_tokens=40 * SHARD * 8)
    (edges,) = world.run(slow_to_open, 1, str(tmp_path / "text"), str(tmp_path / "run"))
    assert edges == list(range(0, STEPS, 8))
    told = io.StringIO()
    with contextlib.redirect_stdout(told), contextlib.redirect_stderr(io.StringIO()):
        assert main(["report", f"{tmp_path}/run", "--out", f"{tmp_path}/page.html", "--json"]) == 0
    said = json.loads(told.getvalue())
    found = said["starved"]
    assert (found["rank"], found["stage"], found["every"], found["edges"]) == (0, "read", 8, 7)
    assert (found["first"], found["last"], found["edge_of"]) == (8, 56, "a shuffle window")
    assert found["wait_s"] == pytest.approx(LEAP_S, rel=0.1)
    assert said["outside"]["busy_s"] < LEAP_S / 2, "the loop is not told to be slow where it was kept waiting"
    words = (
        "Rank 0 starves every 8 steps, where a shuffle window begins: 17 min for read, 7 times, 100% of all"
    )
    assert words in said["says"]
    assert words in (tmp_path / "page.html").read_text()


def run_with(waits: dict[int, float], **how: Any) -> RunHistory:
    """A run of four ranks and 400 steps, in which rank 2 waits at these steps."""
    return made_up.history(
        4, ((0, 400),), spikes={(2, step): wait_s for step, wait_s in waits.items()}, **how
    )


def found_in(history: RunHistory) -> Starvation:
    found = starvation_of(history)
    assert found is not None
    return found


def test_what_is_said_and_what_to_change() -> None:
    history = run_with(dict.fromkeys(range(16, 400, 32), 4.5))
    found = found_in(history)
    assert (found.rank, found.stage, found.every, found.edges) == (2, "read", 32, 12)
    assert (found.first, found.last, found.is_over, found.edge_of) == (16, 368, False, "")
    assert found.wait_s == pytest.approx(4.5, rel=0.01)
    words = starvation_words(found)
    assert words.startswith("Rank 2 starves every 32 steps: 4.5 s for read, 12 times, ")
    assert "So let it get 5 steps further ahead, by a larger prefetch" in words
    assert "Blocks" not in words
    (start,) = history.starts
    named = replace(
        history, starts=(replace(start, edges={"a shuffle window of web": 31.2, "an epoch": 200.0}),)
    )
    words = starvation_words(found_in(named))
    assert "every 32 steps, where a shuffle window of web begins" in words
    assert words.endswith("or a smaller Blocks(window=).")


def test_a_producer_that_is_too_slow_is_not_told_to_read_ahead() -> None:
    history = run_with(dict.fromkeys(range(16, 400, 32), 4.5))
    history.ranks[2].work[:, made_up.STAGES.index("read")] += 1.2
    words = starvation_words(found_in(history))
    assert (
        "cannot catch up in between" in words and "a faster read does" in words and "ahead, by" not in words
    )


def test_what_is_over_is_told_so() -> None:
    """As where a cold cache has become warm."""
    words = starvation_words(found_in(run_with(dict.fromkeys(range(32, 225, 32), 2.0))))
    assert words.endswith(" It stopped after step 224.")


def test_an_edge_may_keep_several_steps_waiting_and_some_edges_nobody() -> None:
    several = {step + more: 1.0 for step in range(20, 400, 25) for more in range(3) if step not in (120, 245)}
    found = found_in(run_with(several))
    assert (found.every, found.edges, round(found.wait_s)) == (25, 14, 3)


@pytest.mark.parametrize(
    "hiccups",
    [
        (27, 77, 130, 181, 232, 280, 331),
        (*range(20, 400, 17), *range(3, 400, 45)),
        (*range(3, 400, 3), *range(4, 400, 9)),  # one every three steps, give or take one
    ],
)
def test_a_hiccup_between_edges_is_not_one_of_them(hiccups: tuple[int, ...]) -> None:
    """Even where hiccups are more than edges, as on a busy machine."""
    edges = dict.fromkeys(range(16, 400, 32), 1000.0)
    found = found_in(run_with(dict.fromkeys(hiccups, 2.0) | edges))
    assert (found.every, found.edges, found.last) == (32, 12, 368)


@pytest.mark.parametrize("seed", range(20))
def test_waits_without_a_pattern_are_not_starvation(seed: int) -> None:
    rng = np.random.default_rng(seed)
    some = rng.choice(np.arange(1, 399), rng.integers(1, 40), replace=False)
    assert starvation_of(run_with(dict.fromkeys(some.tolist(), 2.0), seed=seed)) is None
    assert starvation_of(made_up.history(4, slow={1: 0.5}, seed=seed)) is None, "always is not now and then"
    assert starvation_of(made_up.history(4, ((0, 40), (40, 90)), seed=seed)) is None
    assert starvation_of(made_up.history(4, ())) is None
