"""Ranks that are lost and come back while the processes that are left go on: who is where, and how far.

`Feed.regroup` lets the ranks of a new layout agree on the step at which they go on. `Feed.at` is for ranks
that are told: torchft's manager knows when a step begins who takes part in it, and which step it is.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from meshfeed.amendments import Ledger, amendment_of
from meshfeed.deliver import Meeting
from meshfeed.errors import OptionError, PeerError
from meshfeed.feed.batch import Microbatch, Microbatches, Step
from meshfeed.layout import Layout
from meshfeed.metrics import StepCosts, StepStats
from meshfeed.plan import plan_fixed


class Seat(NamedTuple):
    """A rank's place in an arrangement of the ranks."""

    layout: Layout | None
    rank: int | None
    generation: int | None


@dataclass(slots=True)
class LoopPosition:
    """What a rank remembers of a job whose ranks come and go.

    Attributes:
        seat: where all know it to be; None for that of its arguments, and while it moves.
        generation: of the last seat that it has moved to.
        left: the step that its last loop was in.
        committed: the first step that its model has not taken, once the trainer says so.
        asked: the loop behind `Feed.at`.
    """

    seat: Seat | None = None
    generation: int | None = None
    left: int | None = None
    committed: int | None = None
    asked: Asked | None = None

    def check_later(self, generation: Any) -> None:
        """Raises OptionError unless this is the number of a later arrangement."""
        before = -1 if self.generation is None else self.generation
        if type(generation) is not int or generation <= before:
            raise OptionError(f"generation={generation!r}: give a whole number above {before}")


@dataclass(slots=True)
class Asked:
    """A loop whose steps are asked for one by one.

    Attributes:
        run, steps: the loop, and what it gives.
        next: the step that is to be asked for next.
        ahead: what the loop has given already, for a later step.
    """

    run: object
    steps: Iterator[Step]
    next: int
    ahead: Step | None = None

    def take(self) -> Step | None:
        """The next step; None where an amendment leaves it out, and at the end."""
        step, given = self.next, self.ahead or next(self.steps, None)
        self.next = step + 1
        self.ahead = None if given is None or given.index == step else given
        return given if self.ahead is None else None


def left_out(step: int, sources: tuple[str, ...], layout: Layout) -> Step:
    """A step without sequences, which has cost nothing."""
    return Step(
        index=step,
        num_microbatches=0,
        tokens=0,
        valid_tokens=0,
        sum_sq=0,
        sources=sources,
        plan=plan_fixed(np.zeros(0, np.int64), dp=layout.dp, cp=layout.cp, micro_batch_size=1),
        microbatches=Microbatches(_no_microbatches(), 0),
        _costs=StepCosts(StepStats),
    )


def _no_microbatches() -> Generator[Microbatch]:
    yield from ()


def agree(meeting: Meeting, ranks: Sequence[int], first: int | None, ledger: Ledger) -> tuple[int, Ledger]:
    """Where all of them go on: the lowest first step, and the longest ledger.

    first: the first step that this rank has not committed; None for one that has just started. 0 if all have.
    ledger: the amendments that this rank knows. Those that some rank lacks are sent, line by line.
    Raises PeerError if a rank does not come, or if one ledger is not the beginning of the other; OptionError
    where the meeting's number is not new.
    """
    prefix, rank = meeting.prefix, meeting.rank
    line = f";{rank} {'-' if first is None else first} {len(ledger)} {ledger.digest or '-'}"

    def tell(store: Any) -> bool:
        store.append(f"{prefix}/first", line)
        return store.get(f"{prefix}/first").decode().count(f";{rank} ") == 1

    if not meeting.call(tell):
        raise OptionError(f"generation={meeting.number}: that number was used before; give a new one")
    meeting.meet("regroup", ranks)
    text = meeting.call(lambda store: store.get(f"{prefix}/first")).decode()
    lines = [each.split() for each in text.split(";")[1:]]
    fewest = min(int(count) for _, _, count, _ in lines)
    most, of = max((int(count), int(of)) for of, _, count, _ in lines)
    if fewest < most:
        ledger = _sent(meeting, ranks, ledger, range(fewest, most), of)
    if any(digest not in ("-", *ledger.digests) for *_, digest in lines):
        raise PeerError(
            f"ranks {rank} and {of}, or others, know different amendments; give all the ledger of one job",
            [rank, of],
        )
    return min((int(step) for _, step, *_ in lines if step != "-"), default=0), ledger


def _sent(meeting: Meeting, ranks: Sequence[int], ledger: Ledger, lacking: range, of: int) -> Ledger:
    """A ledger with the lines that it lacks. lacking: numbers of lines that some rank lacks. of: has all."""

    def key(number: int) -> str:
        return f"{meeting.prefix}/amendment/{number}"

    if meeting.rank == of:
        lines = ledger.lines
        for number in lacking:
            meeting.call(lambda store, at=number: store.set(key(at), json.dumps(lines[at])))
    meeting.meet("amendments", ranks)
    for number in range(len(ledger), lacking.stop):
        line = meeting.call(lambda store, at=number: store.get(key(at)))
        ledger = ledger.added(amendment_of(json.loads(line), f"an amendment of rank {of}"))
    return ledger
