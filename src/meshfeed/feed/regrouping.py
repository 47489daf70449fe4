"""The ranks of a job meet again after some were lost or have come back, in the processes that they are in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshfeed.amendments import Ledger
from meshfeed.deliver import Meeting
from meshfeed.errors import PeerError


def agree(meeting: Meeting, ranks: Sequence[int], first: int | None, ledger: Ledger) -> tuple[int, Ledger]:
    """Where all of them go on: the lowest first step, and the longest ledger.

    first: the first step that this rank has not committed; None for one that has just started. 0 if all have.
    ledger: the amendments that this rank knows.
    Raises PeerError if a rank does not come, or if one ledger is not the beginning of the other.
    """
    prefix, rank = meeting.prefix, meeting.rank
    told = f"{rank} {'-' if first is None else first} {len(ledger)};"

    def tell(store: Any) -> None:
        store.append(f"{prefix}/first", told)
        if len(ledger):
            store.set(f"{prefix}/ledger/{rank}", ledger.text)

    meeting.call(tell)
    meeting.meet("regroup", ranks)
    lines = meeting.call(lambda store: store.get(f"{prefix}/first")).decode().split(";")[:-1]
    said = [line.split() for line in lines]
    count, of = max((int(count), int(of)) for of, _, count in said)
    longest = ledger
    if count > len(ledger):
        longest = Ledger.of_text(meeting.call(lambda store: store.get(f"{prefix}/ledger/{of}")).decode())
    if longest.digests[: len(ledger)] != ledger.digests:
        raise PeerError(
            f"rank {rank} knows other amendments than rank {of}; give every rank the ledger of one job",
            [rank, of],
        )
    return min((int(step) for _, step, _ in said if step != "-"), default=0), longest
