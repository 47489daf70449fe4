"""One flipped token on one rank is reported within one step, by name."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

import meshfeed as mf
import transports
import world
from corpus import flip_in_build, recipe_of, write_corpus
from meshfeed.deliver.verify import Digester, suspects_of
from soak import some

STEP = 3


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("corpus") / "text"
    write_corpus(path, num_tokens=5_000)
    return str(path)


def watched(feed: mf.Feed) -> Any:
    """(steps completed, ranks named, text) of a run that must end in a VerifyError."""
    done = 0
    try:
        for step in itertools.islice(feed, 20):
            for _ in step.microbatches:
                pass
            done = step.index
    except mf.errors.VerifyError as error:
        return done, error.ranks, str(error)
    return None


def flipping(rank: int, path: str, victim: int, layout: str, once: bool) -> list[Any]:
    """What is told of the flip under each delivery."""
    parsed, told = mf.Layout.parse(layout), []
    stage_map = mf.StageMap(pp=parsed.pp, mtp=tuple(range(parsed.pp)))  # tokens on every stage
    options = {"stage_map": stage_map, "micro_batch_size": 2, "verify": True, "timeout_s": 600}
    for delivery in ("direct", "share", "broadcast"):
        recipe = recipe_of(path, length=32, sequences=8)
        with mf.Feed(recipe, parsed, **transports.of(delivery=delivery, **options)) as feed:
            if rank == victim:
                flip_in_build(feed, once=once, step=STEP)
            told.append(watched(feed))
    return told


@some(2)
@pytest.mark.parametrize(
    ("layout", "victim", "once"),
    [
        ("tp2", 1, True),
        ("tp2", 0, True),
        ("pp2", 1, True),
        ("tp4", 2, False),
        ("tp2-pp2", 3, False),
        ("tp2-pp2", 0, True),
        ("tp3-dp2", 1, False),
    ],
)
def test_the_rank_with_a_flipped_token_is_named(corpus: str, layout: str, victim: int, once: bool) -> None:
    parsed = mf.Layout.parse(layout)
    told = world.run(flipping, parsed.world_size, corpus, victim, layout, once)
    for rank, said in enumerate(told):
        if parsed.coord(rank).dp != parsed.coord(victim).dp:
            continue  # other data: its ranks have nothing to compare
        for done, ranks, text in said:
            assert done == STEP, "reported with the step that it happened in"
            assert ranks == (victim,), text
            assert f"rank(s) [{victim}]" in text and f"step {STEP}" in text and "'tokens'" in text


def test_two_ranks_that_both_insist_are_both_named(corpus: str) -> None:
    told = world.run(flipping, 2, corpus, 1, "tp2", False)
    assert [[ranks for _, ranks, _ in said] for said in told] == [[(0, 1)] * 3] * 2
    assert "some of ranks (0, 1)" in told[0][0][2]
    shown = re.search(r"\(rank 0: ([0-9a-f]{16}), rank 1: ([0-9a-f]{16})\)", told[0][0][2])
    assert shown and shown[1] != shown[2] and int(shown[1], 16) >> 32, told[0][0][2]


def bad_disk(rank: int, good: str, bad: str, victim: int, layout: str) -> Any:
    recipe = recipe_of(bad if rank == victim else good, length=32, sequences=8)
    return watched(
        mf.Feed(
            recipe,
            mf.Layout.parse(layout),
            transport=mf.Transport(delivery="direct", timeout_s=600),
            verify=True,
        )
    )


# of two that each trust their own disk nobody can say who is right
@pytest.mark.parametrize(("layout", "victim", "named"), [("tp4", 2, (2,)), ("tp2-dp2", 1, (0, 1))])
def test_a_copy_with_one_flipped_token_is_named(
    tmp_path: Path, layout: str, victim: int, named: tuple[int, ...]
) -> None:
    write_corpus(tmp_path / "text", num_tokens=100_000)  # more than the fingerprint looks at
    for suffix in (".bin", ".idx"):
        shutil.copy(tmp_path / f"text{suffix}", tmp_path / f"copy{suffix}")
    recipe = recipe_of(tmp_path / "text", length=32, sequences=8)
    flipped_at = flip_one_token(tmp_path / "copy", recipe)
    told = world.run(bad_disk, 4, str(tmp_path / "text"), str(tmp_path / "copy"), victim, layout)
    for rank in named if len(named) > 1 else range(4):
        done, ranks, text = told[rank]
        assert done == flipped_at and ranks == named, text


def flip_one_token(copy: Path, recipe: mf.Recipe) -> int:
    """Flips a token that the fingerprint does not look at; returns the step that reads it."""
    original = copy.with_suffix(".bin").read_bytes()
    for step in range(1, 20):
        index = int(next(iter(mf.simulate(recipe, mf.Layout(), [step]))).batch.draws.index[0])
        changed = bytearray(original)
        changed[2 * (index * 32 + 3)] ^= 4
        copy.with_suffix(".bin").write_bytes(changed)
        if recipe_of(copy, length=32, sequences=8).fingerprint == recipe.fingerprint:
            return step
    raise AssertionError("the fingerprint sees every token")


def clean(rank: int, path: str) -> list[Any]:
    told = []
    for layout in ("tp4", "tp2-pp2", "cp2-tp2", "pp4", "dp4"):
        for rule in ({}, {"reset_attention_mask": True, "eod_mask_loss": True}):
            recipe = recipe_of(path, length=30, sequences=6, epochs=1, **rule)
            parsed = mf.Layout.parse(layout)
            options = {"delivery": "share", "verify": True, "timeout_s": 600, "pad_rows": True}
            told.append(watched(mf.Feed(recipe, parsed, **transports.of(**options))))
    return told


def test_equal_replicas_are_never_accused(corpus: str) -> None:
    assert world.run(clean, 4, corpus) == [[None] * 10] * 4


def silent_rank(rank: int, path: str) -> Any:
    feed = mf.Feed(
        recipe_of(path),
        mf.Layout.parse("tp3"),
        transport=mf.Transport(delivery="direct", timeout_s=600),
        verify=True,
    )
    store = dist.distributed_c10d._get_default_store()
    steps = iter(feed)
    next(steps)
    world.limit_waits(feed, 1)
    if rank == 1:  # takes one step and then no more
        store.wait(["told0", "told2"])
        return None
    with pytest.raises(mf.errors.PeerError) as raised:
        for _ in steps:
            pass
    store.set(f"told{rank}", "1")
    return raised.value.ranks, str(raised.value)


def test_a_rank_that_stops_comparing_ends_the_others_in_time_and_is_named(corpus: str) -> None:
    told = world.run(silent_rank, 3, corpus)
    assert told[0] == told[2] and told[0][0] == (1,) and "to compare step" in told[0][1]


def mortal(rank: int, path: str) -> Any:
    layout = mf.Layout.parse("tp3")
    feed = mf.Feed(
        recipe_of(path),
        layout,
        transport=mf.Transport(delivery="direct", prefetch=0, timeout_s=300),
        verify=True,
    )
    with pytest.raises(mf.errors.PeerError) as raised:
        for step in feed:
            list(step.microbatches)
            if (rank, step.index) == (1, STEP):
                os.kill(os.getpid(), signal.SIGKILL)
    return raised.value.ranks, str(raised.value)


def test_a_killed_rank_is_named(corpus: str) -> None:
    outcomes = world.start(mortal, 3, corpus).join()
    assert outcomes[1].exitcode == -signal.SIGKILL
    for rank in (0, 2):
        assert outcomes[rank].result is not None, outcomes[rank].trace
        ranks, text = outcomes[rank].result
        assert 1 in ranks and "lost its verify group" in text


def test_verify_needs_a_way_to_meet(corpus: str) -> None:
    feed = mf.Feed(
        recipe_of(corpus), mf.Layout.parse("tp2"), 0, transport=mf.Transport(delivery="direct"), verify=True
    )
    with pytest.raises(mf.errors.DeliveryError, match="rendezvous"):
        next(iter(feed))
    with mf.Feed(
        recipe_of(corpus), mf.Layout.parse("dp2"), 0, transport=mf.Transport(delivery="direct"), verify=True
    ) as alone:
        assert next(iter(alone)).index == 0, "nobody holds the same slices: nothing to compare"


def test_majorities() -> None:
    assert suspects_of({0: 5, 1: 5, 2: 6}) == {2}
    assert suspects_of({0: 5, 1: 6}) == set()
    assert suspects_of({0: 5, 1: 0, 2: 6, 3: 5}) == {2}
    assert suspects_of({0: 5, 1: 5, 2: 6, 3: 6}) == set()
    assert suspects_of({0: 0}) == set() == suspects_of({})


def test_digests_see_every_bit_and_who_holds_nothing() -> None:
    values = {"a": np.arange(9).reshape(3, 3), "b": [np.zeros(2), b"xy"]}
    first = Digester(["a", "b", "c"])
    first.add([values])
    assert first.digests()[2] == 0 and (first.digests()[:2] != 0).all()
    other = Digester(["a", "b", "c"])
    other.add([{"a": values["a"] + np.eye(3, dtype=np.int64), "b": [np.zeros(2), b"xz"]}])
    assert (first.digests()[:2] != other.digests()[:2]).all()
