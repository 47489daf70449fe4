"""Do the exchanges that take the same items, those of several stages or tp ranks, have the same?

They plan apart from each other, and plans that differ would train on data that do not belong together. So
the first member of each leaves a word on every step in the rendezvous store. Nobody waits: who comes first
is believed, the others compare, and one that differs ends the job. It has not been handed that step then, so
nobody can train the step to its end.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from typing import Any

from meshfeed.deliver import Meeting
from meshfeed.errors import DeliveryError, PeerError
from meshfeed.exchange.census import LENGTH, Census, Report
from meshfeed.exchange.seats import Seats

Told = dict[str, list[Any]]
"""Data-parallel rank -> [rank that gave its items, how many, tokens, digest]; keys as JSON has them."""


class Alike:
    """One exchange's word on its steps.

    Args:
        rank: this one; only the first member of an exchange speaks for it.
        seats: its exchange.
        meeting: where the others are heard; None where there is no way to them.
    """

    def __init__(self, rank: int, seats: Seats, meeting: Meeting | None) -> None:
        self._seats = seats
        speaks = len(seats.speakers) > 1 and rank in seats.speakers
        self._meeting = meeting if speaks else None

    def check(self, step: int, census: Census, reports: Sequence[Report]) -> None:
        """Compare a step with the exchange that came to it first. Raises PeerError naming the ranks."""
        if self._meeting is None:
            return
        here, meeting, there = told_of(census, reports, self._seats), self._meeting, None
        word = json.dumps(here, separators=(",", ":"))
        # a store that is lost, because the rank that hosts it has ended, is no error of this run
        with contextlib.suppress(DeliveryError):
            key, speakers = f"{meeting.prefix}/alike/{step}", len(self._seats.speakers)
            there = meeting.call(lambda store: _first(store, key, word, speakers))
        if there is not None:
            refuse_different(step, here, json.loads(there))


def told_of(census: Census, reports: Sequence[Report], seats: Seats) -> Told:
    """What an exchange says of a step."""
    told: Told = {}
    for dp_rank, members in enumerate(census.holders):
        if members:
            report = reports[members[0]]
            tokens = int(report.rows[:, LENGTH].sum())
            told[str(dp_rank)] = [seats.ranks[members[0]], len(report.rows), tokens, report.digest]
    return told


def refuse_different(step: int, here: Told, there: Told) -> None:
    """Raises PeerError where two exchanges have not the same items in a step."""
    for dp_rank in sorted(here.keys() | there.keys(), key=int):
        ours, theirs = here.get(dp_rank), there.get(dp_rank)
        if ours is not None and theirs is not None and ours[1:] != theirs[1:]:
            raise PeerError(
                f"rank {ours[0]} and rank {theirs[0]} are of data-parallel rank {dp_rank}, but their "
                f"iterators gave other items at step {step}: {ours[1]} of {ours[2]} tokens, and {theirs[1]} "
                f"of {theirs[2]}; give both the same items in the same order, or name only one in owners",
                (ours[0], theirs[0]),
            )
        if ours is None or theirs is None:
            one, other = (there[dp_rank][0], here) if ours is None else (ours[0], there)
            raise PeerError(
                f"rank {one} gives items of data-parallel rank {dp_rank}, but none of those that exchange "
                f"with rank {next(iter(other.values()))[0]} does; give the same data-parallel ranks an "
                f"iterator in all stages and tp ranks",
                (one,),
            )


def _first(store: Any, key: str, word: str, num_speakers: int) -> str:
    """What was said under a key first; the last of the speakers clears it away."""
    first = store.compare_set(key, "", word).decode()
    if first != word and store.add(f"{key}/heard", 1) == num_speakers - 1:
        store.delete_key(key)
        store.delete_key(f"{key}/heard")
    return first
