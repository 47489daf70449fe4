"""Ranks whose first attempt failed, however unevenly, meet again in the same processes."""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

import meshfeed as mf
import transports
import world
from corpus import recipe_of, write_corpus
from meshfeed.deliver import Meeting
from meshfeed.deliver.group import Group
from observe import take

LONG = timedelta(seconds=600)
WAYS = ["share", "broadcast", "tree", "verify", "exchange"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("corpus") / "text"
    write_corpus(path, num_tokens=5_000)
    return str(path)


def default_store() -> Any:
    return dist.distributed_c10d._get_default_store()


def source(
    path: str, way: str, *, seed: int = 1, timeout_s: float = 600, layout: str = "", **options: Any
) -> Any:
    """A Feed by one of its deliveries, or an Exchange; neither has an end.

    seed: what ranks may disagree about.
    """
    layout = layout or ("tp4" if way == "tree" else "tp2-dp2")
    where = mf.Layout.parse(layout, ranks_per_node=2)
    if way == "exchange":
        rows, packing = itertools.repeat({"tokens": np.arange(5)}), mf.Packing(capacity=64 * seed)
        return mf.Exchange(rows, where, **transports.of(packing=packing, timeout_s=timeout_s, **options))
    options |= {"delivery": "direct", "verify": True} if way == "verify" else {"delivery": way}
    return mf.Feed(
        recipe_of(path, sequences=8, seed=seed), where, **transports.of(timeout_s=timeout_s, **options)
    )


def ending(feed: Any, steps: int | None = None) -> str:
    """How it ends, by itself or after so many steps."""
    try:
        with feed:
            return str(len(take(feed, steps)))
    except mf.MeshfeedError as error:
        return f"{type(error).__name__} {error}"


def disagreeing(rank: int, path: str) -> dict[str, list[str]]:
    """One rank brings something else, then another one; then all bring the same."""
    told = {}
    for way in WAYS:
        odd = [ending(source(path, way, seed=1 + (rank == at))) for at in (3, 0)]
        told[way] = [*odd, ending(source(path, way), 3)]
    return told


def test_ranks_that_disagreed_meet_again(corpus: str) -> None:
    told = world.run(disagreeing, 4, corpus)
    for way in WAYS:
        for attempt, odd in enumerate((3, 0)):
            text = told[odd][way][attempt]
            assert {each[way][attempt] for each in told} == {text}, way
            assert text.startswith("PeerError") and f"rank {odd} " in text and "disagree" in text, text
        assert [each[way][2] for each in told] == ["3"] * 4, way


def coming_late(rank: int, path: str) -> dict[str, list[str]]:
    """Rank 1 has nothing to begin with, until all others have given up waiting for it; then it comes."""
    told = {}
    for way in ("share", "tree", "exchange"):
        if rank == 1:
            default_store().wait([f"{way}{other}" for other in (0, 2, 3)], LONG)
            told[way] = ["absent"]
        else:
            # who waits for rank 1 itself tires first, not who waits for its peers
            waits = rank == (3 if way == "exchange" else 0)
            with world.waiting_in_vain_for(1) if waits else contextlib.nullcontext():
                told[way] = [ending(source(path, way))]
            default_store().set(f"{way}{rank}", "1")
        told[way].append(ending(source(path, way), 3))
    return told


def test_a_rank_that_others_gave_up_waiting_for_meets_them_in_their_next_attempt(corpus: str) -> None:
    told = world.run(coming_late, 4, corpus)
    for way in told[0]:
        assert {each[way][0] for rank, each in enumerate(told) if rank != 1} == {told[0][way][0]}
        assert "600 s for rank(s) [1] to join" in told[0][way][0], way
        assert [each[way][1] for each in told] == ["3"] * 4, way


def interleaved(rank: int, path: str) -> list[str]:
    """A feed is alive while others of several topics fail, disagree and succeed, in the same group."""
    told = []
    with source(path, "share") as training, source(path, "broadcast", seed=9) as checking:
        steps, checks = iter(training), iter(checking)
        take(steps, 2), take(checks, 1)
        told.append(ending(source(path, "share", seed=2 + (rank == 2))))
        told.append(ending(source(path, "exchange", readers=[0, 2, 3])))  # rank 1 has one too
        take(steps, 2)
        told.append(ending(source(path, "share", seed=2), 3))
        told.append(ending(source(path, "exchange", seed=1 + rank)))
        told.append(ending(source(path, "exchange"), 2))
        told.append(str([seen["step"] for seen in [*take(steps, 2), *take(checks, 2)]]))
    return told


def test_feeds_that_are_alive_go_on_while_others_begin_and_fail(corpus: str) -> None:
    told = world.run(interleaved, 4, corpus)
    kinds = ["PeerError", "RoleError", "3", "PeerError", "2", "[4, 5, 1, 2]"]
    for one in told:
        assert [text.split(" ")[0] if "rank" in text else text for text in one] == kinds, one
    assert told == [told[0]] * 4


def early_and_late(rank: int, path: str) -> list[str]:
    """Ranks 0 and 1 disagree; 2 and 3, a delivery group of their own, come when that is over."""
    told = []
    if rank > 1:
        default_store().wait(["over0", "over1"], LONG)
    told.append(ending(source(path, "share", seed=1 + (rank == 1))))
    default_store().set(f"over{rank}", "1")
    told.append(ending(source(path, "share"), 3))
    return told


def test_who_comes_late_is_told_what_it_missed(corpus: str) -> None:
    told = world.run(early_and_late, 4, corpus)
    assert "disagree" in told[0][0] and told == [told[0]] * 4 and told[0][1] == "3"


def other_pasts(rank: int, path: str) -> list[int]:
    """One process has met others elsewhere more often: at a new store, and by a new connection, all is new."""
    alone = mf.Feed(
        recipe_of(path),
        mf.Layout.parse("tp2"),
        rank,
        transport=mf.Transport(rendezvous=dist.HashStore(), timeout_s=0.1),
    )
    if rank == 0:
        assert "rank(s) [1]" in ending(alone)
    taken = []
    for _ in range(3):
        base = default_store().underlying_store
        store = dist.TCPStore("127.0.0.1", base.port, None, False)
        feed = mf.Feed(
            recipe_of(path),
            mf.Layout.parse("tp2"),
            rank,
            transport=mf.Transport(rendezvous=store, timeout_s=600),
        )
        with feed:
            taken.append(len(take(feed, 2)))
    return taken


def test_a_past_at_another_store_does_not_count(corpus: str) -> None:
    assert world.run(other_pasts, 2, corpus) == [[2, 2, 2]] * 2


def torn(rank: int, path: str, delivery: str) -> list[str]:
    """States of two steps, then of one; the ranks that differ are in no delivery group together."""
    told = []
    for step in (4 + (rank > 1), 4):
        feed = source(path, delivery)
        feed.load_state_dict(mf.State(recipe=feed.recipe.summary(until=step), step=step).to_json())
        told.append(ending(feed, 3 if told else None))
    return told


@pytest.mark.parametrize("delivery", ["direct", "share"])
def test_a_torn_checkpoint_ends_all_ranks_and_a_whole_one_goes_on(corpus: str, delivery: str) -> None:
    told = world.run(torn, 4, corpus, delivery)
    assert told == [told[0]] * 4 and told[0][1] == "3"
    assert told[0][0].startswith("StateError") and "inconsistent" in told[0][0]


def test_runs_and_stores_have_keys_of_their_own() -> None:
    one, other = dist.HashStore(), dist.HashStore()
    counted = [Meeting(one, 0, 1, name).prefix for name in "aab"]
    assert counted[0][:-1] == counted[1][:-1] != counted[2][:-1] and len(set(counted)) == 3
    assert [Meeting(other, 0, 1, name).prefix for name in "aab"] == counted


def is_in(function: str, frame: Any) -> bool:
    return frame is not None and (frame.f_code.co_name == function or is_in(function, frame.f_back))


def busy_store(rank: int, path: str) -> int:
    """Rank 1 begins once another thread of rank 0, which waits for it, has used the same store."""
    store = default_store()

    def answer(main: int | None) -> None:
        while not is_in("_wait_for_all", sys._current_frames()[main]):
            threading.Event().wait(0.01)
        store.set("go", "1")

    if rank == 0:
        threading.Thread(target=answer, args=(threading.get_ident(),), daemon=True).start()
    else:
        store.wait(["go"], LONG)
    with source(path, "share", layout="tp2") as feed:
        return len(take(feed, 2))


def test_who_waits_for_peers_leaves_the_store_to_other_threads(corpus: str) -> None:
    assert world.run(busy_store, 2, corpus) == [2, 2]


class Slow(dist.Store):
    """A store that says nothing to this rank before another one has gone, or cannot for a while."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base, self.said = base, False

    def set(self, key: str, value: str) -> None:
        self.base.set(key, value)

    def get(self, key: str) -> bytes:
        return self.base.get(key)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        if not self.said:
            with contextlib.suppress(dist.DistStoreError):
                self.base.wait(["gone"], timedelta(seconds=0.5))
        self.said = True
        self.base.wait(keys, timeout)


def hasty(rank: int) -> None:
    """Ranks 0 and 1 have nothing to say to rank 2, and leave as soon as they have met it."""
    for turn in range(6):  # who connects to whom is by port: in one turn of three, none can leave early
        store: Any = dist.PrefixStore(str(turn), default_store())
        Group.connect(Slow(store) if rank == 2 else store, rank, (0, 1, 2), 600).close()
        store.set("gone" if rank < 2 else "stayed", "1")
        store.wait(["gone", "stayed"], LONG)


def test_who_leaves_at_once_is_not_taken_for_dead_by_who_still_connects() -> None:
    world.run(hasty, 3)
