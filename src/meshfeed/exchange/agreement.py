"""Check that ranks which should receive identical items did.

Exchanges of several pipeline stages or tp ranks plan independently. If their plans differed, stages would
train on data that do not belong together. So the first member of each exchange publishes a digest of every
step in the rendezvous store. No rank waits: the first digest counts, the others compare with it, and a
difference ends the job before its exchange hands out the step.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from meshfeed.deliver import Meeting
from meshfeed.errors import DeliveryError, PeerError
from meshfeed.exchange.lengths import LENGTH, GatheredLengths, MemberReport, are_alike
from meshfeed.exchange.membership import Membership

Summary = dict[str, list[Any]]
"""Data-parallel rank, as text -> [rank that gave its items, number of items, tokens, digest, content]."""


def check_agreement(
    meeting: Meeting | None,
    rank: int,
    membership: Membership,
    step: int,
    gathered: GatheredLengths,
    reports: Sequence[MemberReport],
) -> None:
    """Compare a step with the exchange that reached it first. Raises PeerError naming the ranks.

    rank: this rank; the first member represents its exchange. meeting: how to reach the others; None without
    a rendezvous store.
    """
    num_speakers = len(membership.speakers)
    if meeting is None or num_speakers < 2 or rank not in membership.speakers:
        return
    here = _summary_of(gathered, reports, membership)
    text = json.dumps(here, separators=(",", ":"))
    try:
        first = meeting.say(f"agreement/{step}", text, num_speakers)
    except DeliveryError:  # the rank that hosts the store has ended; this run continues
        return
    _refuse_different(step, here, json.loads(first))


def _summary_of(
    gathered: GatheredLengths, reports: Sequence[MemberReport], membership: Membership
) -> Summary:
    summary: Summary = {}
    for dp_rank, members in enumerate(gathered.holders):
        if members:
            report = reports[members[0]]
            tokens = int(report.rows[:, LENGTH].sum())
            told = [membership.ranks[members[0]], len(report.rows), tokens, report.digest]
            summary[str(dp_rank)] = [*told, report.content]
    return summary


def _refuse_different(step: int, here: Summary, there: Summary) -> None:
    for dp_rank in sorted(here.keys() | there.keys(), key=int):
        ours, theirs = here.get(dp_rank), there.get(dp_rank)
        if ours is None or theirs is None:
            one, other = (there[dp_rank][0], here) if ours is None else (ours[0], there)
            raise PeerError(
                f"rank {one} gives items of data-parallel rank {dp_rank}, but none of the ranks that "
                f"exchange with rank {next(iter(other.values()))[0]} does; give the same data-parallel ranks "
                f"an iterator in all stages and tp ranks",
                (one,),
            )
        if ours[1:4] != theirs[1:4] or not are_alike(ours[4], theirs[4]):
            raise PeerError(
                f"rank {ours[0]} and rank {theirs[0]} have data-parallel rank {dp_rank}, but their "
                f"iterators gave different items at step {step}: {ours[1]} of {ours[2]} tokens, and "
                f"{theirs[1]} of {theirs[2]}; give both the same items in the same order, or name only one "
                f"in readers",
                (ours[0], theirs[0]),
            )
