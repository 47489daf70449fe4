"""Check that replicas hold the same bytes: digests of every field, compared once a step.

Ranks with the same (dp, cp) coordinate hold equal fields, whatever their tp and pp. One small all-gather
after a step finds a rank that differs before it receives the next step. Without a majority, each rank rereads
its own bytes from storage to find the wrong one.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Self

import numpy as np

from meshfeed.arrays import Array, Arrays, Longs
from meshfeed.deliver.meeting import Meeting, required
from meshfeed.errors import DeliveryError, MeshfeedError, VerifyError
from meshfeed.layout import Layout
from meshfeed.roles import Roles

Digests = Longs

_JOIN_S = 5.0


class Digester:
    """Digest of each field over the microbatches of one step; 0 for an absent field."""

    def __init__(self, names: Sequence[str]) -> None:
        self._hashes = {name: hashlib.blake2b(digest_size=8) for name in names}
        self._seen: set[str] = set()

    def add(self, microbatches: Sequence[Arrays]) -> None:
        for name, value in (item for arrays in microbatches for item in arrays.items()):
            self._seen.add(name)
            for piece in [value] if isinstance(value, np.ndarray) else value:
                self._hashes[name].update(piece if isinstance(piece, bytes) else _bytes_of(piece))

    def digests(self) -> Digests:
        """The digests, in the order of the names; int64 [fields]."""
        return np.array(
            [
                int.from_bytes(h.digest(), "little", signed=True) if name in self._seen else 0
                for name, h in self._hashes.items()
            ],
            np.int64,
        )


def _bytes_of(array: Array) -> memoryview:
    return memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))  # pyright: ignore


class Verifier:
    """Compares the digests of the ranks of one (dp, cp) coordinate.

    A thread compares a step once this rank's loop has received all of it. So a pipeline stage that begins the
    next step never waits for a rank that waits for that stage: all stages have received the previous step.
    """

    def __init__(self, rank: int, peers: tuple[int, ...], names: Sequence[str], meeting: Meeting) -> None:
        self._rank, self._peers, self._names, self._meeting = rank, peers, tuple(names), meeting
        self._made: deque[tuple[int, Digests, Callable[[], Digests]]] = deque()
        self._taken = self._compared = -1
        self._failure: Exception | None = None
        self._ending = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="meshfeed-verify", daemon=True)

    @classmethod
    def among(
        cls, layout: Layout, roles: Roles, rank: int, names: Sequence[str], meeting: Meeting | None
    ) -> Self | None:
        """The verifier of a rank's replicas; None if the rank takes no stored bytes or has no replica.

        names: the fields to compare. Raises DeliveryError without a rendezvous store.
        """
        replicas = layout.group_of(rank, "tp-pp").tolist()
        peers = tuple(sorted(peer for peer in replicas if roles[peer].source is not None))
        if rank not in peers or len(peers) == 1:
            return None
        return cls(rank, peers, names, required(meeting, "verify=True", rank, peers))

    def __enter__(self) -> Self:
        self._group = self._meeting.group("verify", self._peers)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._ending = True
            self._failure = None  # its traceback would keep its frames' objects alive
            self._changed.notify_all()
        # A thread that is still running waits for peers in this step; it closes the group itself.
        self._thread.join(_JOIN_S)

    def made(self, step: int, digests: Digests, reread: Callable[[], Digests]) -> None:
        """The producer has made all of a step. reread: recomputes the digests from storage."""
        with self._changed:
            self._made.append((step, digests, reread))
            self._changed.notify_all()

    def taken(self, step: int) -> None:
        """The loop has received all of a step: compare it once it is made."""
        with self._changed:
            self._taken = step
            self._changed.notify_all()

    @property
    def others(self) -> list[int]:
        """The ranks that this one compares with."""
        return [peer for peer in self._peers if peer != self._rank]

    def wake(self) -> None:
        """Make `check` look for an error of the job."""
        with self._changed:
            self._changed.notify_all()

    def check(self, step: int, error_of_job: Callable[[], BaseException | None] = lambda: None) -> None:
        """Wait until a step has been compared.

        error_of_job: an error to raise instead; asked after each `wake`. Raises VerifyError naming the rank
        that differs, PeerError for a lost rank, TimeoutError for a late one, DeliveryError if another thread
        ends the comparison.
        """
        self.taken(step)
        patience_s = self._meeting.timeout_s
        with self._changed:
            done = self._changed.wait_for(
                lambda: self._compared >= step or self._failure or self._ending or error_of_job(), patience_s
            )
            failure, was_ended = self._failure, self._ending
        if other := error_of_job():
            raise other
        if failure is not None:
            raise failure
        if was_ended:
            raise DeliveryError(f"rank {self._rank} has closed its feed while step {step} was compared")
        if not done:
            raise TimeoutError

    def _run(self) -> None:
        try:
            while (step := self._next()) is not None:
                self._compare(*step)
                with self._changed:
                    self._compared = step[0]
                    self._changed.notify_all()
        except Exception as failure:  # raised by `check`
            with self._changed:
                self._failure = None if self._ending else failure
                self._changed.notify_all()
        finally:
            self._group.close()

    def _next(self) -> tuple[int, Digests, Callable[[], Digests]] | None:
        """The next step to compare, once it is made and the loop has received it; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._ending or (self._made and self._made[0][0] <= self._taken))
            return None if self._ending else self._made.popleft()

    def _compare(self, step: int, digests: Digests, reread: Callable[[], Digests]) -> None:
        """Compare one step's digests, on every rank of the group. Raises VerifyError."""
        table = np.stack([row.view(np.int64) for row in self._group.all_gather(digests)])
        fields = [f for f in range(len(self._names)) if len(set(table[:, f].tolist()) - {0}) > 1]
        if not fields:
            return
        suspects = {
            rank for f in fields for rank in suspects_of(dict(zip(self._peers, table[:, f].tolist())))
        }
        if not suspects:
            suspects = self._arbitrate(digests, reread)
        names = ", ".join(repr(self._names[f]) for f in fields)
        shown = ", ".join(
            f"rank {rank}: {int(table[at, fields[0]]) & (2**64 - 1):016x}"
            for at, rank in enumerate(self._peers)
            if table[at, fields[0]]
        )
        who = f"rank(s) {sorted(suspects)}" if suspects else f"some of ranks {self._peers}"
        raise VerifyError(
            f"step {step}: {who} and their replicas hold different bytes in {names} ({shown}); check the "
            f"memory, storage and code of these ranks before using their work",
            sorted(suspects) or self._peers,
        )

    def _arbitrate(self, digests: Digests, reread: Callable[[], Digests]) -> set[int]:
        try:
            wrong = int(not np.array_equal(reread(), digests))
        except MeshfeedError:
            wrong = 0  # no storage here to compare with
        verdicts = self._group.all_gather(bytes([wrong]))
        return {rank for rank, verdict in zip(self._peers, verdicts) if verdict[0]}


def suspects_of(digest_of_rank: Mapping[int, int]) -> set[int]:
    """Ranks that differ from the majority of those that hold the field (digest not 0); {} without one."""
    held = {rank: digest for rank, digest in digest_of_rank.items() if digest}
    if not held:
        return set()
    digest, count = Counter(held.values()).most_common(1)[0]
    return {rank for rank in held if held[rank] != digest} if 2 * count > len(held) else set()
