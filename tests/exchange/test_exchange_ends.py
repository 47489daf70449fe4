"""How an exchange ends: in time, unevenly, by an error, by a dead rank; and how it goes on."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from giving import item_of, plain
from hypothesis import example, given, settings
from hypothesis import strategies as st

import meshfeed as mf
import transports
import world
from meshfeed.metrics import Sink
from meshfeed.state import sealed
from observe import content_of
from soak import cases, some

PACKING = mf.Packing(capacity=64)
LAYOUTS = (mf.Layout(dp=4), mf.Layout(tp=2, dp=2), mf.Layout(cp=2, dp=2), mf.Layout(dp=2, pp=2))


class Numbered:
    """A stateful iterable of items, of so many of them."""

    def __init__(self, owner: int, count: int) -> None:
        self.owner, self.count, self.at = owner, count, 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while self.at < self.count:
            self.at += 1
            yield item_of(self.owner, self.at - 1, 3 + self.at * 7 % 20)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def exchange_of(rank: int, layout: mf.Layout, iterator: Any, **options: Any) -> mf.Exchange:
    return mf.Exchange(iterator, layout, **transports.of(packing=PACKING, timeout_s=600, **options))


@settings(max_examples=cases(40), deadline=None)
@given(
    st.integers(1, 6),
    st.integers(1, 3),
    st.sampled_from([0, 2]),
    st.sampled_from([1, 2]),
    st.lists(st.integers(0, 5), max_size=5),
)
@example(4, 1, 2, 1, [4, 2])
@example(3, 2, 0, 1, [2, 2])
@example(3, 1, 0, 2, [1, 5])
def test_a_loop_after_a_break_gives_what_a_resumed_job_gives(
    count: int, pulls: int, prefetch: int, vpp: int, loops: list[int]
) -> None:
    """loops: how many steps each takes, before it breaks; one that asks for more gets the end.

    vpp: virtual stages; the first of two gets the end before the other one begins.
    """
    items = [item_of(0, at, 3 + at) for at in range(count)]

    def new(vpp: int = 1) -> mf.Exchange:
        stages = mf.StageMap(pp=1, vpp=vpp)
        return exchange_of(0, mf.Layout(), items, pulls=pulls, prefetch=prefetch, stage_map=stages)

    def taken(exchange: mf.Exchange, most: int) -> list[Any]:
        found = list[Any]()
        *ahead, steps = exchange.virtual_stages
        for step in (step for stage in ahead for step in (stage if most else ())):
            list(step.microbatches)
        for step in steps if most else ():
            found.append((step.index, [uid for m in step.microbatches for uid in m.get("uid", [])]))
            time.sleep(0.002 * prefetch)  # its thread meets the end
            if len(found) == most:
                break
        return found

    with new(vpp) as whole:
        for most in loops:
            with new() as resumed:
                resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
                assert taken(resumed, most) == taken(whole, most)
                assert resumed.state_dict() == whole.state_dict()


class Refuses(Sink):
    """It has not received all data when it closes."""

    def take(self, entries: Any) -> None: ...

    def close(self) -> None:
        raise OSError("the disk is full")


def test_a_sink_that_refuses_to_close_ends_no_iterator() -> None:
    items, taken = [item_of(0, at, 4) for at in range(3)], list[int]()
    exchange = exchange_of(0, mf.Layout(), items, metrics=[Refuses()])
    for _ in range(3):
        with pytest.raises(mf.errors.MetricsError):
            for step in exchange:
                taken.append(step.index)
    assert taken == [*range(9)]


# -- uneven ends -------------------------------------------------------------------------------------


def uneven(rank: int, prefetch: int) -> dict[str, Any]:
    got: dict[str, Any] = {}
    for how in ("drain", "drop", "error"):
        iterator = Numbered(rank, 3 * rank)  # 0, 3, 6 and 9 items, two to a step
        with exchange_of(rank, mf.Layout(dp=4), iterator, pulls=2, uneven=how, prefetch=prefetch) as exchange:
            held: list[list[bytes]] = []
            try:
                for step in exchange:
                    held.append([uid for m in step.microbatches for uid in m.get("uid", [])])
            except mf.errors.RecipeError as error:
                got["error"] = str(error)
                continue
            got[how] = (held, exchange.left_over)
    return got


@pytest.mark.parametrize("prefetch", [0, 2])
def test_all_end_together_and_nothing_is_lost_silently(prefetch: int) -> None:
    results = world.run(uneven, 4, prefetch)
    drained = [got["drain"][0] for got in results]
    assert {len(steps) for steps in drained} == {5}
    everything = sorted(f"{owner}/{n}".encode() for owner in range(4) for n in range(3 * owner))
    assert sorted(uid for steps in drained for step in steps for uid in step) == everything
    for got in results:
        assert got["drop"] == ([], {1: 2, 2: 2, 3: 2})
        assert "data-parallel ranks [0]" in got["error"]
    assert len({got["error"] for got in results}) == 1


def rounds(rank: int) -> list[list[int]]:
    """An iterable begins again when it is iterated again, a step is never counted twice."""
    rows = [[item_of(rank, n, 5)] for n in range(2)]
    with exchange_of(rank, mf.Layout(dp=2), rows) as exchange:
        return [[step.index for step in exchange] for _ in range(2)]


def test_iterating_again_begins_a_new_round() -> None:
    assert world.run(rounds, 2) == [[[0, 1], [2, 3]]] * 2


# -- going on ----------------------------------------------------------------------------------------


def resumed(rank: int, layout: mf.Layout, prefetch: int) -> list[Any]:
    """Straight through; left by `break` twice; and from a state, taken in the middle."""
    owner = layout.coord(rank).dp

    def fresh() -> mf.Exchange:
        return exchange_of(rank, layout, Numbered(owner, 9), pulls=2, prefetch=prefetch)

    def seen(steps: Any, most: int) -> list[Any]:
        taken: list[Any] = []
        for step in steps:
            taken.append((step.index, [plain(m) for m in step.microbatches]))
            if len(taken) == most:
                break
        return taken

    with fresh() as exchange:
        straight = seen(exchange, 99)
    with fresh() as exchange:
        parts = seen(exchange, 2) + seen(exchange, 1)
        state = exchange.state_dict()
        parts += seen(exchange, 99)
    with fresh() as exchange:
        exchange.load_state_dict(state)
        rest = seen(exchange, 99)
    assert len(straight) == 5
    return [parts == straight, rest == straight[3:], content_of(state)["step"], content_of(state)["iterator"]]


@some(3)
@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_state_goes_on_where_it_was_taken(layout: mf.Layout, prefetch: int) -> None:
    for got in world.run(resumed, 4, layout, prefetch):
        assert got == [True, True, 3, {"at": 6}]


def test_a_foreign_state_is_refused() -> None:
    with exchange_of(0, mf.Layout(), Numbered(0, 4)) as exchange:
        state = exchange.state_dict()
        content = content_of(state)
        del content["fingerprint"]
        for bad in (
            {},
            content,
            {**state, "step": 5},
            {"meshfeed": state["meshfeed"].replace('"taken":0', '"taken":1')},
            *(
                sealed(content | changed)
                for changed in ({"version": 4}, {"step": -1}, {"step": "1"}, {"more": 1})
            ),
        ):
            with pytest.raises(mf.errors.StateError):
                exchange.load_state_dict(bad)
        with pytest.raises(mf.errors.StateError, match="data is at step 0, the model at step 1"):
            exchange.load_state_dict(state, step=1)
        assert exchange.state_dict() == state
        exchange.load_state_dict(state, step=0)
    with (
        exchange_of(0, mf.Layout(), iter([])) as exchange,
        pytest.raises(mf.errors.StateError, match="load_state_dict"),
    ):
        exchange.load_state_dict(state)


def test_a_state_of_another_ranks_iterator_is_refused() -> None:
    """As torch.distributed.checkpoint gives it, which keeps one object for each key."""
    layout, items = mf.Layout(tp=2, dp=2), [item_of(0, at, 4) for at in range(3)]
    transport = mf.Transport(readers=[0, 2], delivery="broadcast")
    ranks = [
        mf.Exchange(None if rank % 2 else items, layout, rank, packing=PACKING, transport=transport)
        for rank in range(4)
    ]
    states = [rank.state_dict() for rank in ranks]
    for rank in ranks:
        for other, state in enumerate(states):
            if other == rank.rank or rank.rank % 2:
                rank.load_state_dict(state)
                continue
            with pytest.raises(mf.errors.StateError, match="save each rank's state and load it there"):
                rank.load_state_dict(state)


def torn(rank: int) -> str:
    with exchange_of(rank, mf.Layout(dp=2), Numbered(rank, 8)) as exchange:
        content = content_of(exchange.state_dict())
        del content["fingerprint"]
        exchange.load_state_dict(sealed(content | {"step": rank}))
        try:
            next(iter(exchange))
        except mf.errors.StateError as error:
            return str(error)
    return ""


def crossed(rank: int) -> str:
    items = [[item_of(rank, 0, 5)]]
    several = [exchange_of(rank, mf.Layout(dp=2), items, name=name) for name in ("train", "valid")]
    with several[0], several[1], pytest.raises(mf.errors.PeerError) as refused:
        next(iter(several[rank]))
    return str(refused.value)


def test_equal_exchanges_in_another_order_are_told_apart_by_name() -> None:
    told = world.run(crossed, 2)
    assert told[0] == told[1] and "'train' on rank" in told[0] and "'valid' on rank" in told[0]
    with pytest.raises(mf.errors.RecipeError, match="name is an int, 3; give a str"):
        exchange_of(0, mf.Layout(), None, name=3)


def test_ranks_that_go_on_from_different_steps_are_refused() -> None:
    assert all("inconsistent" in told for told in world.run(torn, 2))


# -- errors ------------------------------------------------------------------------------------------


def failing(rank: int, layout: mf.Layout, what: str, owned: bool, prefetch: int) -> tuple[str, str, int]:
    """One data-parallel rank gives something bad at step 2; how this rank ends."""
    coord = layout.coord(rank)
    owners = [
        r for r in range(layout.world_size) if layout.coord(r)[:2] == (0, 0) and layout.coord(r).pp == 0
    ]

    def items() -> Iterator[Any]:
        for step in range(4):
            good = {"tokens": np.arange(9), "labels": np.arange(9), "loss_mask": np.ones(9, np.float32)}
            bad = dict(good)
            if step == 2 and coord.dp == layout.dp - 1:
                match what:
                    case "raise":
                        raise ValueError("boom")
                    case "missing":
                        del bad["tokens"]
                    case "unequal":
                        bad["labels"] = np.arange(7)
                    case "long":
                        bad = {name: np.resize(value, 500) for name, value in good.items()}
                    case "mixed":
                        bad["labels"] = np.arange(9, dtype=np.int32)
                    case "mixed ranks":
                        good["labels"] = bad["labels"] = np.arange(9, dtype=np.int32)
                    case "object":
                        bad["labels"] = np.array([None] * 9)
                    case "reserved":
                        bad["position_ids"] = np.arange(9)
                    case "no item":
                        yield 7
            yield [good, bad]

    mine = items() if not owned or rank in owners else None
    steps = 0
    # owners broadcast, or share
    options = {"readers": owners, "delivery": "auto" if prefetch else "broadcast"} if owned else {}
    with exchange_of(rank, layout, mine, prefetch=prefetch, **options) as exchange:
        try:
            for step in exchange:
                list(step.microbatches)
                steps += 1
        except mf.MeshfeedError as error:
            return type(error).__name__, str(error), steps
    return "", "", steps


BAD = {
    "raise": ("DeliveryError", r"rank {r}.* failed at step 2, after 4 items: ValueError: boom"),
    "missing": ("StoreError", r"rank {r}: item 5: key 'tokens' is missing.*'labels'"),
    "unequal": ("StoreError", r"rank {r}: item 5: key 'labels' has 7 tokens, 'tokens' 9"),
    "long": ("PlanError", r"rank {r}: item 5: key 'tokens' has 500 tokens, at step 2.*64.*raise capacity"),
    "mixed": ("StoreError", r"rank \d: item \d.*key 'labels' is .*int"),
    "mixed ranks": ("StoreError", r"rank \d: item \d.*key 'labels' is .*int.* in rank 0: item"),
    "object": ("StoreError", r"rank {r}: item 5: key 'labels' is an array of Python objects"),
    "reserved": ("StoreError", r"rank {r}: item 5: key 'position_ids' is computed from lengths"),
    "no item": ("StoreError", r"rank {r}.*the iterator gave int"),
}


def all_failing(rank: int, layout: mf.Layout, owned: bool, prefetch: int) -> dict[str, Any]:
    return {what: failing(rank, layout, what, owned, prefetch) for what in BAD}


@some(2)
@pytest.mark.parametrize(
    ("layout", "owned", "prefetch"),
    [
        (mf.Layout(dp=2), False, 0),
        (mf.Layout(tp=2, dp=2), False, 0),
        (mf.Layout(tp=2, dp=2), True, 0),
        (mf.Layout(dp=2, pp=2), True, 2),
    ],
    ids=str,
)
def test_one_error_for_all(layout: mf.Layout, owned: bool, prefetch: int) -> None:
    results = world.run(all_failing, layout.world_size, layout, owned, prefetch)
    culprits = [r for r in range(layout.world_size) if layout.coord(r).dp == 1]
    for what, (kind, text) in BAD.items():
        ends = {got[what] for got in results}
        assert len({(name, said) for name, said, _ in ends}) == 1, (what, ends)
        name, said, _ = ends.pop()
        assert name == kind, (what, said)
        pattern = text.replace("{r}", f"({'|'.join(map(str, culprits))})")
        assert re.search(pattern, said, re.DOTALL), (what, said)
        # who lags behind those that have failed loses them with the step that it was asked for
        assert all(got[what][2] in ((1, 2) if prefetch else (2,)) for got in results), what


def killed(rank: int) -> str:
    def items() -> Iterator[Any]:
        for step in range(5):
            if (rank, step) == (1, 2):
                os.kill(os.getpid(), signal.SIGKILL)
            yield item_of(rank, step, 5)

    with exchange_of(rank, mf.Layout(dp=4), items()) as exchange:
        try:
            for step in exchange:
                list(step.microbatches)
        except mf.errors.PeerError as error:
            return f"{error.ranks} {error}"
    return ""


def test_a_killed_rank_ends_all_and_is_named() -> None:
    outcomes = world.start(killed, 4).join()
    assert outcomes[1].exitcode == -signal.SIGKILL
    for rank in (0, 2, 3):
        outcome = outcomes[rank]
        # the world's own barrier at the end may find the dead rank before the answer is sent
        assert outcome.result or (outcome.error and "peer" in outcome.error[1].lower()), outcome
        assert not outcome.result or re.match(
            r"\(1,\) rank \d lost its exchange group .*: the connection to rank 1 is closed", outcome.result
        )


def leaving(rank: int, prefetch: int) -> str:
    """Rank 1 leaves after two steps, the others want more. It has an iterator, or is served by rank 0."""
    layout, options = mf.Layout(dp=4), dict[str, Any]()
    if prefetch:
        layout, options = mf.Layout(tp=2, dp=2), {"readers": [0, 2], "delivery": "broadcast"}
    mine = None if prefetch and rank % 2 else Numbered(rank, 9)
    with exchange_of(rank, layout, mine, prefetch=prefetch, **options) as exchange:
        num_steps = 0
        try:
            for step in exchange:
                num_steps += 1
                if (rank, step.index) == (1, 1):
                    return ""
        except mf.errors.PeerError as error:
            return f"{num_steps} {error.ranks} {error}"
    return "went through"


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_rank_that_leaves_is_named(prefetch: int) -> None:
    first, gone, *others = world.run(leaving, 4, prefetch)
    assert gone == ""
    for told in (first, *others):
        assert re.match(r"[0-9] \(1,\) rank 1 has closed its feed", told), told


def differing(rank: int, layout: mf.Layout) -> str:
    iterator = [[item_of(rank, 0, 5 + rank)]]
    with exchange_of(rank, layout, iterator) as exchange:
        try:
            next(iter(exchange))
        except mf.errors.PeerError as error:
            return str(error)
    return ""


def test_ranks_of_one_replica_must_give_the_same() -> None:
    for told in world.run(differing, 2, mf.Layout(cp=2)):
        assert told.startswith("rank 0 and rank(s) [1] have one data-parallel rank")


def ownerless(rank: int) -> list[str]:
    told: list[str] = []
    for iterator, options in (
        (None, {}),
        (iter([]), {"readers": [1 - rank]}),
        (iter([]), {"delivery": "share"}),
    ):
        layout = mf.Layout(tp=2) if "delivery" in options else mf.Layout(dp=2)
        if "delivery" in options and rank == 0:
            continue
        with exchange_of(rank, layout, iterator, **options) as exchange:
            try:
                next(iter(exchange))
            except mf.errors.RoleError as error:
                told.append(str(error))
    return told


def test_somebody_must_own_an_iterator() -> None:
    for none, foreign, *served in world.run(ownerless, 2):
        assert all("would get its items from rank 0 by 'share'" in told for told in served)
        assert "none of ranks (0, 1)" in none
        assert "has an iterator, but readers=" in foreign
