"""The ranks of a job meet again after some were lost or have come back, in the processes that they are in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshfeed.amendments import Ledger
from meshfeed.deliver import Meeting
from meshfeed.errors import OptionError, PeerError


def agree(meeting: Meeting, ranks: Sequence[int], first: int | None, ledger: Ledger) -> tuple[int, Ledger]:
    """Where all of them go on: the lowest first step, and the longest ledger.

    first: the first step that this rank has not committed; None for one that has just started. 0 if all have.
    ledger: the amendments that this rank knows.
    Raises PeerError if a rank does not come, or if one ledger is not the beginning of the other; OptionError
    where the meeting's number is not new.
    """
    prefix, rank = meeting.prefix, meeting.rank
    told = f";{rank} {'-' if first is None else first} {len(ledger)} {ledger.digest or '-'}"

    def tell(store: Any) -> bool:
        if len(ledger):
            store.set(f"{prefix}/ledger/{rank}", ledger.text)
        store.append(f"{prefix}/first", told)
        return store.get(f"{prefix}/first").decode().count(f";{rank} ") == 1

    if not meeting.call(tell):
        raise OptionError(
            f"regroup(generation={meeting.number}): that number was used before; give a new one"
        )
    meeting.meet("regroup", ranks)
    lines = meeting.call(lambda store: store.get(f"{prefix}/first")).decode().split(";")[1:]
    said = [line.split() for line in lines]
    count, of = max((int(count), int(of)) for of, _, count, _ in said)
    longest = ledger
    if count > len(ledger):
        longest = Ledger.of_text(meeting.call(lambda store: store.get(f"{prefix}/ledger/{of}")).decode())
    if not longest.begins_with(ledger) or any(digest not in ("-", *longest.digests) for *_, digest in said):
        raise PeerError(
            f"ranks {rank} and {of}, or others, know different amendments; give all the ledger of one job",
            [rank, of],
        )
    return min((int(step) for _, step, *_ in said if step != "-"), default=0), longest
