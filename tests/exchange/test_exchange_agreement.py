"""Stages and tp ranks that exchange apart from each other have the same items, or the job ends."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

import meshfeed as mf
import world
from meshfeed.deliver import Meeting
from meshfeed.exchange import GatheredLengths, Membership, encode
from meshfeed.exchange.agreement import check_agreement

PACKING = mf.Packing(capacity=512)
LENGTHS = (200, 130, 80, 90)


def rows(lengths: tuple[int, ...] = LENGTHS) -> list[list[dict[str, Any]]]:
    """A step each."""
    made = np.random.default_rng(5)
    full = [made.integers(0, 99, (2, max(LENGTHS))) for _ in LENGTHS]
    return [[{"tokens": a[:n], "labels": b[:n]}] for (a, b), n in zip(full, lengths)]


def changed(what: str) -> list[list[dict[str, Any]]]:
    """What the other stage gives."""
    if what == "length":
        return rows((200, 131, 80, 90))
    made = rows()
    if what == "tokens":
        made[1][0]["tokens"] = made[1][0]["tokens"] + 1
    elif what == "a stretch":  # of 4 tokens of 130
        made[1][0]["tokens"][40:44] += 1
    elif what == "labels":  # of the last stage alone
        made[1][0]["labels"] = made[1][0]["labels"] + 1
    elif what == "order":
        made[1], made[2] = made[2], made[1]
    elif what == "end":
        del made[1:]
    return made


def staged(rank: int, whats: tuple[str, ...]) -> dict[str, Any]:
    """Both stages have an iterator, the last one its own idea; steps are taken together, as in a pipeline."""
    store, got = _get_default_store(), {}
    for what in whats:
        mine = rows() if rank == 0 else changed(what)
        told, taken = "", 0
        with mf.Exchange(
            mine, mf.Layout(pp=2), packing=PACKING, transport=mf.Transport(timeout_s=600)
        ) as exchange:
            try:
                for step in exchange:
                    taken += len(list(step.microbatches))
                    store.set(f"{what}/{rank}/{step.index}", "taken")
                    store.wait([f"{what}/{1 - rank}/{step.index}"])
            except mf.errors.PeerError as error:
                told = f"{error.ranks} {error}"
            finally:
                for step in range(len(LENGTHS)):
                    store.set(f"{what}/{rank}/{step}", "gone")
        got[what] = (told, taken)
    return got


def test_stages_with_other_items_do_not_train_a_step_to_its_end() -> None:
    whats = ("length", "tokens", "a stretch", "labels", "order", "end", "nothing")
    first, last = world.run(staged, 2, whats)
    assert any(
        re.search("1 of 13[01] tokens, and 1 of 13[01]; give", got["length"][0]) for got in (first, last)
    )
    assert first["nothing"] == last["nothing"] == ("", len(LENGTHS))
    for what in whats[:-1]:
        told = {got[what][0] for got in (first, last)} - {""}
        assert min(got[what][1] for got in (first, last)) == 1, what
        assert len(told) == 1, (what, told)
        pattern = r"\(([01]), ([01])\) rank \1 and rank \2 have data-parallel rank 0.* at step 1: "
        assert re.match(pattern, told.pop()), what


def counted(rank: int) -> list[Any]:
    layout = mf.Layout(dp=2, pp=2)
    with mf.Exchange(rows(), layout, packing=PACKING, transport=mf.Transport(timeout_s=600)) as exchange:
        return [step.stats.collectives for step in exchange if list(step.microbatches)]


def test_comparing_costs_no_collective() -> None:
    assert world.run(counted, 4) == [[2] * len(LENGTHS)] * 4


def test_words_are_cleared_away_and_name_who_has_no_iterator() -> None:
    store = dist.HashStore()
    membership = [
        Membership((0, 1), ((0,), (1,)), 1, (0, 2, 4)),
        Membership((2, 3), ((0,), (1,)), 1, (0, 2, 4)),
    ]
    membership.append(Membership((4, 5), ((0,), (1,)), 1, (0, 2, 4)))
    given = [encode(step, mf.exchange.Keys()).report for step in rows()[:2]]
    gathered = GatheredLengths.of(given, membership[0])
    meetings = [Meeting(store, each.ranks[0], 60) for each in membership]
    for meeting in meetings:
        meeting._prefix = "one run"  # in processes of their own they would be of one turn

    def check(exchange: int, step: int, reports: list[Any]) -> None:
        own = membership[exchange]
        gathered = GatheredLengths.of(reports, own)
        check_agreement(meetings[exchange], own.ranks[0], own, step, gathered, reports)

    before = store.num_keys()
    check_agreement(meetings[0], 1, membership[0], 0, gathered, given)
    assert store.num_keys() == before, "a second member says nothing"
    for step in range(3):
        for exchange in range(3):
            check(exchange, step, given)
    assert store.num_keys() == before
    check(0, 3, given)
    with pytest.raises(
        mf.errors.PeerError, match=r"rank 1 gives items of data-parallel rank 1, but none .* rank 2"
    ):
        check(1, 3, [given[0], mf.exchange.nothing().report])


# -- verify ------------------------------------------------------------------------------------------


def verified(rank: int, where: int | None) -> tuple[str, int]:
    """Three tp ranks with iterators of their own; one number of rank 1 is wrong at step 1."""
    mine, steps = rows(), 0
    mine[0][0]["image"], mine[1][0]["note"] = np.ones((2, 3)), "of no length"
    if rank == 1 and where is not None:
        mine[1][0]["tokens"][where] += 1
    layout = mf.Layout(tp=3)
    with mf.Exchange(
        mine, layout, packing=PACKING, verify=True, transport=mf.Transport(timeout_s=600)
    ) as exchange:
        try:
            for step in exchange:
                list(step.microbatches)
                steps += 1
        except mf.errors.VerifyError as error:
            return f"{error.ranks} {error}", steps
    return "", steps


def verified_stages(rank: int, where: int | None) -> str:
    """Three stages with iterators of their own; a label of the first one's, which the last alone needs, is wrong."""
    mine = rows()
    for step in mine:
        step[0]["note"] = np.arange(3)
    if rank == 0 and where is not None:
        mine[1][0]["labels"][where] += 1
    try:
        with mf.Exchange(
            mine, mf.Layout(pp=3), packing=PACKING, verify=True, transport=mf.Transport(timeout_s=600)
        ) as exchange:
            for step in exchange:
                list(step.microbatches)
    except mf.errors.VerifyError as error:
        return f"{error.ranks} {error}"
    return ""


def test_verify_compares_what_one_stage_alone_needs() -> None:
    assert world.run(verified_stages, 3, None) == [""] * 3
    for told in world.run(verified_stages, 3, 40):
        assert re.match(
            r"\(0,\) .*step 1: rank\(s\) \[0\].* different bytes in 'labels of its iterator'", told
        ), told


def test_verify_names_the_rank_that_holds_other_bytes() -> None:
    assert world.run(verified, 3, None) == [("", len(LENGTHS))] * 3
    unseen = 40  # of 130 tokens every other is compared in every step
    for told, steps in world.run(verified, 3, unseen):
        assert steps == 2
        assert re.match(
            r"\(1,\) .*step 1: rank\(s\) \[1\] and their replicas hold different bytes in 'tokens'", told
        ), told
