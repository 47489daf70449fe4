"""Rendezvous of a job's ranks through a torch.distributed key-value store.

Ranks meet by name and check that their arguments agree. Only the members of a group take part; a missing
member is named.

A run's keys contain its *number*: how many runs of this name the rank has begun. All ranks begin the runs of
a name in the same order, so the number is the same on all of them. A failed run counts too, so ranks meet
again in the next.

Only *members* of a run write in it. A member is the one process that has claimed its rank, and the rank that
began the run counts it among the ranks of the layout. Others are refused: a second process of a rank, another
job with the same store and name.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import os
import re
import socket
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch.distributed.distributed_c10d import PrefixStore, Store

from meshfeed.deliver.error_codec import ranks_in_words, ranks_of_words
from meshfeed.deliver.group import Group
from meshfeed.deliver.rendezvous import FAILURES, Rendezvous, first_text, key_of, rendezvous_of, within
from meshfeed.errors import DeliveryError, PeerError, StateError

T = TypeVar("T")

_POLLS_PER_S = 5_000  # by all waiting ranks together
_LOG_AFTER_S, _LOG_EVERY_S = 10.0, 60.0
_MAX_NAMED = 16
_WORD = re.compile(r"[^\s,()\[\]]+")

_log = logging.getLogger("meshfeed")

# per store: at a new store every rank counts from 0
_numbers: defaultdict[tuple[str, str], Iterator[int]] = defaultdict(itertools.count)
_refused: set[tuple[str, str]] = set()  # store, prefix of runs that this process was refused in
_claimed: set[tuple[str, str, str, int]] = set()  # process, store, name, rank


@dataclass(slots=True, eq=False)
class Meeting:
    """Where the ranks of one run of a feed find each other.

    Attributes:
        store: any torch.distributed Store that all of them reach.
        rank: this rank.
        timeout_s: how long to wait for the other ranks and for the store.
        name: of the feed. All ranks that begin runs of this name begin them in the same order.
        start: the step at which this rank starts or resumes; equal on all ranks.
        num_ranks: in the job.
        number: of the run, where all its ranks know it; None counts the runs that this process has begun.
        on_error: called with an error that ends a meeting, before this rank leaves its peers.
        cancelled: set by another thread if a rank will not arrive. Calls that wait here raise PeerError.
    """

    store: Store
    rank: int
    timeout_s: float
    name: str = ""
    start: int = 0
    num_ranks: int = 2
    number: int | None = None
    on_error: Callable[[Exception], object] = lambda error: None
    _prefix: str = field(default="", init=False)
    _space: str = field(default="", init=False)
    _is_member: bool | None = field(default=None, init=False)
    cancelled: threading.Event = field(default_factory=threading.Event, init=False, repr=False)

    @property
    def rendezvous(self) -> Rendezvous:
        """This process's side of the store."""
        return rendezvous_of(self.store)

    def call(self, operation: Callable[[Any], T]) -> T:
        """Run an operation on the store within `timeout_s`. Raises DeliveryError."""
        return self.rendezvous.call(operation, self.timeout_s)

    def later(self, operation: Callable[[Any], T]) -> Future[T]:
        """Run an operation on the store without waiting for it."""
        return self.rendezvous.later(operation)

    def say(self, key: str, text: str, num_speakers: int | None = None) -> str:
        """Write a text under a key unless a rank of this run already has; see `Rendezvous.say`.

        Returns the first text written. Raises DeliveryError.
        """
        return self.rendezvous.say(f"{self.prefix}/{key}", text, self.timeout_s, num_speakers)

    def said(self, key: str) -> str:
        """The text that a rank of this run has written under a key; "" if none has. Raises DeliveryError."""
        key = f"{self.prefix}/{key}"
        return self.call(lambda store: store.get(key).decode() if store.check([key]) else "")

    @property
    def prefix(self) -> str:
        """This run's key prefix: equal on all ranks of the job, different from other runs. Does not wait."""
        if not self._prefix:
            self._space = self.rendezvous.say("meshfeed/space", uuid.uuid4().hex, self.timeout_s)
            number = next(_numbers[self._space, self.name]) if self.number is None else self.number
            self._prefix = f"meshfeed/{key_of(self.name)}/{number}"
        return self._prefix

    def following(self, start: int) -> Meeting:
        """That of the next run, which begins at a step. This process does not count it as begun."""
        number = int(self.prefix.rpartition("/")[2]) + 1
        return Meeting(self.store, self.rank, self.timeout_s, self.name, start, self.num_ranks, number)

    def skip(self) -> None:
        """Join the next run instead: this one failed because this rank was missing."""
        self._prefix = ""

    def is_member(self) -> bool:
        """Whether this process is a member of the run, and may write in it. Raises DeliveryError."""
        if self._is_member is None:
            self._settle(self._is_alone() and self.is_counted())
        return bool(self._is_member)

    def _settle(self, is_member: bool) -> None:
        """Record whether this process is a member.

        If not, its run number stays unused: it must not begin the next run before the members do.
        """
        self._is_member = is_member
        if not is_member:
            _refused.add((self._space, self.prefix))
            _numbers[self._space, self.name] = itertools.count(int(self.prefix.rpartition("/")[2]))

    def was_refused(self) -> bool:
        """Whether this process has been refused in this run before."""
        return (self._space, self.prefix) in _refused

    def is_counted(self) -> bool:
        """Whether the rank that began this run counts this one; True if none has. Raises DeliveryError."""
        key = f"{self.prefix}/first"
        first = self.call(lambda store: store.get(key) if store.check([key]) else b"")
        return not first or self._counts(json.loads(first)[2])

    def _counts(self, arguments: Mapping[str, str]) -> bool:
        return "ranks" not in arguments or self.rank in ranks_of_words(arguments["ranks"])

    def compare(self, arguments: Mapping[str, str]) -> None:
        """Compare arguments with those of the rank that arrived first. Does not wait.

        arguments: all values that ranks must agree on, by name; "ranks": the ranks of the layout, as text.
        Raises PeerError if one differs or this is not a member, StateError if first steps differ,
        DeliveryError for a lost store.
        """
        rank = self.rank
        if not self._is_alone():
            self._settle(False)
            raise PeerError(
                f"two processes of this job are rank {rank}, or its store has served another job; give "
                f"each process its own rank, and each job its own store: for torchrun's restarts, export "
                f"TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
                [rank],
            )
        first = self.say("first", json.dumps([rank, self.start, dict(arguments)]))
        other, start, there = json.loads(first)
        self._settle(self._counts(there))
        if not self._is_member:
            raise PeerError(
                f"rank {rank} is not among the ranks {there['ranks']} that rank {other} began with, in "
                f"{there.get('layout', 'its layout')}; give every rank the same layout, and each job its own "
                f"store, or its feeds a name, mf.Transport(name=...)",
                [rank],
            )
        differences: list[str] = []
        for part in {**arguments, **there}:
            if arguments.get(part) != there.get(part):
                ours, theirs = _what_differs(arguments.get(part, ""), there.get(part, ""))
                differences.append(f"{part} is {ours} on rank {rank}, {theirs} on rank {other}")
        if differences:
            raise PeerError(
                f"rank {rank} and rank {other} disagree: {'; '.join(differences)}; give every rank the same "
                f"arguments, data and version. If these are two feeds that ranks begin in different orders, "
                f"give each its own name, mf.Transport(name=...)",
                sorted((rank, int(other))),
            )
        if start != self.start:
            raise StateError(
                f"rank {rank} resumes at step {self.start}, rank {other} at step {start}: the checkpoint is "
                f"inconsistent; load one that all ranks saved at the same step"
            )

    def _is_alone(self) -> bool:
        """Whether no other process has claimed this rank. A process claims it once, not in every run."""
        key, process = self._claim_of(self.rank), _identity(os.getpid())
        claim = (process, self._space, self.name, self.rank)
        if claim not in _claimed:
            if self.rendezvous.say(key, process, self.timeout_s) != process:
                return False
            _claimed.add(claim)
        return True

    def _claim_of(self, rank: int) -> str:
        """The key under which a rank's process has written its identity."""
        return f"{self.prefix.rpartition('/')[0]}/rank/{rank}"

    def places(self, ranks: Sequence[int], within_s: float) -> list[str]:
        """Each of these ranks with its host and pid, as far as they are known. Raises DeliveryError."""

        def claim(store: Any, key: str) -> list[str]:
            return store.get(key).decode().split()[1:] if store.check([key]) else []

        keys = [self._claim_of(rank) for rank in ranks]
        claims = self.rendezvous.call(lambda store: [claim(store, key) for key in keys], within_s)
        return [
            f"rank {rank} (host {found[0]}, pid {found[1]})" if found else f"rank {rank}"
            for rank, found in zip(ranks, claims)
        ]

    def meet(self, purpose: str, peers: Sequence[int]) -> str:
        """Wait until every peer has arrived for a purpose. Returns a key prefix of this meeting alone.

        Members meet once for a purpose. Raises PeerError naming the ranks missing after `timeout_s`, or if
        the meeting is cancelled; DeliveryError if the store is lost.
        """
        prefix = f"{self.prefix}/{purpose}/{ranks_in_words(peers)}"

        def arrive(store: Any) -> int:
            store.append(f"{prefix}/here", f"{self.rank} ")
            return store.add(f"{prefix}/count", 1)

        try:
            all_arrived = self.call(arrive) == len(peers) or self._wait_for_all(prefix, purpose, peers)
        except DeliveryError as error:
            self.on_error(error)  # before leaving: a peer that loses this rank would report that instead
            if isinstance(error, PeerError):
                self._decide(prefix, False)
            raise
        if not self._decide(prefix, all_arrived):
            raise PeerError(
                f"rank {self.rank} waited for ranks {_short(peers)}, and one of them ended before arriving"
            )
        return prefix

    def told_by_all(self, purpose: str, text: str, ranks: Sequence[int]) -> dict[int, str]:
        """The text of each rank, when all have come. Waits for all of them.

        Raises PeerError if two processes are one rank, and as `meet` does.
        """
        key = f"{self.prefix}/told"

        def tell(store: Any) -> list[str]:
            store.append(key, f"{self.rank} {text};")
            return store.get(key).decode().split(";")[:-1]

        def ranks_in(told: list[str]) -> list[int]:
            return [int(line.split()[0]) for line in told]

        if ranks_in(self.call(tell)).count(self.rank) > 1:
            raise self._claimed_twice([self.rank, self.rank])
        self.meet(purpose, ranks)
        told = self.call(lambda store: store.get(key)).decode().split(";")[:-1]
        if len(told) > len(ranks):
            raise self._claimed_twice(ranks_in(told))
        return {rank: line.partition(" ")[2] for rank, line in zip(ranks_in(told), told)}

    def _claimed_twice(self, ranks: Sequence[int]) -> PeerError:
        twice = sorted({rank for rank in ranks if ranks.count(rank) > 1})
        return PeerError(
            f"two processes are rank {twice[0]} of generation {self.number}, or its number was used before; "
            f"give each process its own rank, and a new number",
            twice,
        )

    def group(self, purpose: str, peers: tuple[int, ...], patience_s: float | None = None) -> Group:
        """Gloo connections among the peers, opened once all of them have arrived. patience_s: see Group.

        Raises PeerError as `meet` does, or if a peer is lost while connecting.
        """
        prefix, rank = self.meet(purpose, peers), self.rank
        store = PrefixStore(f"{prefix}/gloo", self.store)
        connect = functools.partial(
            Group.connect, store, rank, peers, self.timeout_s, patience_s=patience_s, purpose=purpose
        )
        try:
            # gloo's own timeout comes first, unless the store does not answer
            return within(1.25 * self.timeout_s, connect)
        except (*FAILURES, TimeoutError) as broken:
            others = [peer for peer in peers if peer != rank]
            raise PeerError(
                f"rank {rank} met rank(s) {others} but could not connect its {purpose} group: {broken}; "
                f"has one of them died, or the host of the rendezvous store, or does GLOO_SOCKET_IFNAME name "
                f"the wrong network?",
                others,
            ) from broken

    def _wait_for_all(self, prefix: str, purpose: str, peers: Sequence[int]) -> bool:
        """Wait until a meeting is decided. False if it is cancelled; PeerError after `timeout_s`."""
        began, log_at, pause = time.monotonic(), _LOG_AFTER_S, 0.001
        longest = max(0.05, self.num_ranks / _POLLS_PER_S)
        while not self.call(lambda store: store.check([f"{prefix}/go"])):
            waited = time.monotonic() - began
            if waited >= min(log_at, self.timeout_s) and (absent := self._missing_ranks(prefix, peers)):
                if waited >= self.timeout_s:
                    raise PeerError(
                        f"rank {self.rank} waited {self.timeout_s:g} s for rank(s) {_short(absent)} to join "
                        f"its {purpose} group {_short(peers)}; every rank of the group must iterate its Feed "
                        f"(are they running?)",
                        absent,
                    )
                _log.warning(
                    "rank %d has waited %.0f s for rank(s) %s to join its %s group; it waits %g s at most",
                    self.rank,
                    waited,
                    _short(absent),
                    purpose,
                    self.timeout_s,
                )
                log_at = waited + _LOG_EVERY_S
            if self.cancelled.wait(pause):
                return False
            pause = min(2 * pause, longest)
        return True

    def _missing_ranks(self, prefix: str, peers: Sequence[int]) -> list[int]:
        """The ranks that have not arrived.

        The first rank to ask publishes the answer for the others, until another rank arrives: thousands of
        ranks that each fetch thousands of names would keep the store busy for minutes.
        """

        def ask(store: Any) -> str:
            key = f"{prefix}/missing/{store.add(f'{prefix}/count', 0)}"
            if store.check([key]):
                return store.get(key).decode()
            here = {int(rank) for rank in store.get(f"{prefix}/here").split()}
            return first_text(store, key, ranks_in_words(sorted(set(peers) - here)) or "-")

        return ranks_of_words(self.call(ask).strip("-"))

    def _decide(self, prefix: str, all_arrived: bool) -> bool:
        """Whether the meeting takes place. The first value written decides for all members."""
        return self.rendezvous.say(f"{prefix}/go", str(all_arrived), self.timeout_s) == str(True)


@functools.cache
def _identity(pid: int) -> str:
    """A unique id of this process, with its host and pid; a forked child has another."""
    return f"{uuid.uuid4().hex} {socket.gethostname()} {pid}"


def required(meeting: Meeting | None, purpose: str, rank: int, peers: Sequence[int]) -> Meeting:
    """The meeting. Raises DeliveryError if there is none."""
    if meeting is None:
        raise DeliveryError(
            f"{purpose}: rank {rank} needs a way to meet ranks {_short(peers)}: call "
            f"torch.distributed.init_process_group first, or pass "
            f"mf.Transport(rendezvous=<torch.distributed.Store>)"
        )
    return meeting


def _short(ranks: Sequence[int]) -> str:
    """Ranks for a message: the first few, and how many in all."""
    if len(ranks) <= _MAX_NAMED:
        return str(ranks)
    return f"{str(list(ranks[:_MAX_NAMED]))[:-1]}, ... {len(ranks)} in all]"


def _what_differs(here: str, there: str) -> tuple[str, str]:
    """The words of each text that the other lacks; both texts whole if one has no such word."""
    ours, theirs = _WORD.findall(here), _WORD.findall(there)
    only_ours = ", ".join(word for word in ours if word not in theirs)
    only_theirs = ", ".join(word for word in theirs if word not in ours)
    return (only_ours, only_theirs) if only_ours and only_theirs else (here or "nothing", there or "nothing")
