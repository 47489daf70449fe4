"""How the ranks of one job find each other, and see that they have the same: by name, through a
torch.distributed key-value store.

Nothing global: only the members of a group take part, and one that does not come is named.

All that a run leaves in the store is under its *number*: how many runs of this name this rank has begun. All
ranks begin the same runs of a name in the same order, so it is the same on all of them; a run that failed
counts on every rank, so they meet again in the next.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import logging
import os
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from meshfeed.deliver.error_codec import ranks_in_words, ranks_of_words
from meshfeed.deliver.gloo import GlooGroup
from meshfeed.deliver.store_client import FAILURES, StoreClient, client_of, within
from meshfeed.errors import DeliveryError, PeerError, StateError

T = TypeVar("T")

_LOOKS_PER_S = 5_000  # of all ranks that wait together
_LOG_AFTER_S, _LOG_EVERY_S = 10.0, 60.0
_MOST_NAMED = 16

_log = logging.getLogger("meshfeed")

# by store, not by process: where a process meets others at another store, neither side has a past
_numbers: defaultdict[tuple[str, str], Iterator[int]] = defaultdict(itertools.count)
_claimed: set[tuple[str, str, str, int]] = set()  # process, store, name, rank


@dataclass(slots=True, eq=False)
class Meeting:
    """Where the ranks of one run of a feed find each other.

    Attributes:
        store: any torch.distributed Store that all of them reach.
        rank: this one, of the job.
        timeout_s: how long to wait for the others, and for the store.
        name: of the feed. Runs of one name are begun in the same order by all ranks that begin any.
        start: the step from which this rank goes on; the others must too.
        num_ranks: of the job.
        on_error: called with an error that ends a meeting, before this rank leaves its peers.
    """

    store: Store
    rank: int
    timeout_s: float
    name: str = ""
    start: int = 0
    num_ranks: int = 2
    on_error: Callable[[Exception], object] = lambda error: None
    _prefix: str = field(default="", init=False)
    _space: str = field(default="", init=False)
    _off: threading.Event = field(default_factory=threading.Event, init=False, repr=False, compare=False)

    @property
    def client(self) -> StoreClient:
        """This process's way to the store."""
        return client_of(self.store)

    def call(self, operation: Callable[[Any], T]) -> T:
        """What an operation on the store returns, within `timeout_s`. Raises DeliveryError."""
        return self.client.call(operation, self.timeout_s)

    def say(self, key: str, text: str) -> str:
        """The first text that any rank of this run said under a key. Raises DeliveryError."""
        return self.client.say(f"{self.prefix}/{key}", text, self.timeout_s)

    def is_called_off(self) -> bool:
        """Whether `call_off` was called: a rank that this one waits for will not come."""
        return self._off.is_set()

    @property
    def prefix(self) -> str:
        """A key prefix that this run has on all ranks of the job, and no other run; waits for nobody."""
        if not self._prefix:
            self._space = self.client.say("meshfeed/space", uuid.uuid4().hex, self.timeout_s)
            of = hashlib.blake2b(self.name.encode(), digest_size=8).hexdigest()
            self._prefix = f"meshfeed/{of}/{next(_numbers[self._space, self.name])}"
        return self._prefix

    def pass_over(self) -> None:
        """Take part in the next run instead: this one failed because this rank had not come."""
        self._prefix = ""

    def call_off(self) -> None:
        """From another thread: somebody will not come. Who waits here ends with PeerError."""
        self._off.set()

    def compare(self, brought: Mapping[str, str]) -> None:
        """Compare with the rank of the job that came first; waits for nobody.

        brought: all that ranks must agree on, part by part. Raises PeerError where a part differs or two
        processes are one rank, StateError where first steps differ, DeliveryError for a lost store.
        """
        rank = self.rank
        if not self._is_alone():
            raise PeerError(
                f"two processes of this job are rank {rank}, or its store served another job before; give "
                f"each process its own rank, and each job its own store",
                [rank],
            )
        first = self.say("first", json.dumps([rank, self.start, dict(brought)]))
        other, start, there = json.loads(first)
        differ = [part for part in {**brought, **there} if brought.get(part) != there.get(part)]
        if differ:
            told = _differences(differ, brought, there, rank, other)
            raise PeerError(
                f"rank {rank} and rank {other} disagree: {told}; "
                f"give every rank the same arguments and version, or, where these are two feeds that not all "
                f"ranks begin in the same order, give each a name of its own (name=)",
                sorted((rank, int(other))),
            )
        if start != self.start:
            raise StateError(
                f"rank {rank} goes on from step {self.start}, rank {other} from step {start}: the checkpoint "
                f"is torn; load one that all ranks saved at the same step"
            )

    def _is_alone(self) -> bool:
        """Whether no other process is this rank; said once per process, not in a key of every run."""
        key, process = f"{self.prefix.rpartition('/')[0]}/rank/{self.rank}", _identity(os.getpid())
        claim = (process, self._space, self.name, self.rank)
        if claim not in _claimed:
            if self.client.say(key, process, self.timeout_s) != process:
                return False
            _claimed.add(claim)
        return True

    def meet(self, purpose: str, peers: Sequence[int]) -> str:
        """Wait until every peer has come to the same purpose; returns a key prefix of this meeting alone.

        Members meet once for a purpose. Raises PeerError naming who is missing after `timeout_s`, and where
        the meeting is called off; DeliveryError where the store is lost.
        """
        prefix = f"{self.prefix}/{purpose}/{ranks_in_words(peers)}"

        def arrive(store: Any) -> int:
            store.append(f"{prefix}/here", f"{self.rank} ")
            return store.add(f"{prefix}/count", 1)

        try:
            come = self.call(arrive) == len(peers) or self._await(prefix, purpose, peers)
        except DeliveryError as error:
            self.on_error(error)  # before leaving: a peer that loses this rank would report that instead
            if isinstance(error, PeerError):
                self._go_on(prefix, False)
            raise
        if not self._go_on(prefix, come):
            raise PeerError(
                f"rank {self.rank} waited for ranks {_some(peers)}, and one of them ended before it came"
            )
        return prefix

    def gloo_group(self, purpose: str, peers: tuple[int, ...]) -> GlooGroup:
        """Connections among the peers alone, made once all of them have come.

        Raises PeerError as `meet` does, or where one of them is lost on the way.
        """
        prefix, rank = self.meet(purpose, peers), self.rank
        store = PrefixStore(f"{prefix}/gloo", self.store)
        try:
            # its own timeout comes first, unless the store is silent
            return within(1.25 * self.timeout_s, lambda: GlooGroup(store, rank, peers, self.timeout_s))
        except (*FAILURES, TimeoutError) as broken:
            others = [peer for peer in peers if peer != rank]
            raise PeerError(
                f"rank {rank} met rank(s) {others} but could not connect its {purpose} group: {broken}; "
                f"has one of them died, or the host of the rendezvous store, or does GLOO_SOCKET_IFNAME name "
                f"the wrong network?",
                others,
            ) from broken

    def _await(self, prefix: str, purpose: str, peers: Sequence[int]) -> bool:
        """Wait until a meeting is decided. False where it is called off, PeerError after `timeout_s`."""
        began, log_at, pause = time.monotonic(), _LOG_AFTER_S, 0.001
        longest = max(0.05, self.num_ranks / _LOOKS_PER_S)
        while not self.call(lambda store: store.check([f"{prefix}/go"])):
            waited = time.monotonic() - began
            if waited >= min(log_at, self.timeout_s) and (absent := self._missing(prefix, peers)):
                if waited >= self.timeout_s:
                    raise PeerError(
                        f"rank {self.rank} waited {self.timeout_s:g} s for rank(s) {_some(absent)} to join "
                        f"its {purpose} group {_some(peers)}; every rank of the group must iterate its Feed "
                        f"(are they running?)",
                        absent,
                    )
                _log.warning(
                    "rank %d has waited %.0f s for rank(s) %s to join its %s group; it waits %g s at most",
                    self.rank,
                    waited,
                    _some(absent),
                    purpose,
                    self.timeout_s,
                )
                log_at = waited + _LOG_EVERY_S
            if self._off.wait(pause):
                return False
            pause = min(2 * pause, longest)
        return True

    def _missing(self, prefix: str, peers: Sequence[int]) -> list[int]:
        """Who has not come. The first to ask works it out for all who ask before another one comes:
        thousands of ranks that each fetch thousands of names would keep the store busy for minutes."""

        def ask(store: Any) -> str:
            key = f"{prefix}/missing/{store.add(f'{prefix}/count', 0)}"
            if store.check([key]):
                return store.get(key).decode()
            here = {int(rank) for rank in store.get(f"{prefix}/here").split()}
            return store.compare_set(key, "", ranks_in_words(sorted(set(peers) - here)) or "-").decode()

        return ranks_of_words(self.call(ask).strip("-"))

    def _go_on(self, prefix: str, come: bool) -> bool:
        """All members go on, or none does, since each would wait for the others: the first word holds."""
        return self.client.say(f"{prefix}/go", str(come), self.timeout_s) == str(True)


@functools.cache
def _identity(pid: int) -> str:
    """Of this process, by whatever connection it speaks; a fork is another."""
    return uuid.uuid4().hex


def default_store() -> Store | None:
    """The store of the default process group; None where torch.distributed is not initialised."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    return dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]


def _differences(
    parts: Sequence[str], here: Mapping[str, str], there: Mapping[str, str], rank: int, other: int
) -> str:
    told: list[str] = []
    for part in parts:
        ours, theirs = _unlike(here.get(part, ""), there.get(part, ""))
        told.append(f"{part} is {ours} on rank {rank}, {theirs} on rank {other}")
    return "; ".join(told)


def _some(ranks: Sequence[int]) -> str:
    """Ranks in words, of which a message has no more than it needs."""
    if len(ranks) <= _MOST_NAMED:
        return str(ranks)
    return f"{str(list(ranks[:_MOST_NAMED]))[:-1]}, ... {len(ranks)} in all]"


def _unlike(here: str, there: str) -> tuple[str, str]:
    # how two topics begin and end alike is left out, at commas: what differs is what a reader looks for
    ours, theirs = here.split(", "), there.split(", ")
    start = _alike(ours, theirs)
    ours, theirs = ours[start:], theirs[start:]
    end = _alike(ours[::-1], theirs[::-1])
    ours, theirs = ours[: len(ours) - end], theirs[: len(theirs) - end]
    return _closed(", ".join(ours)) or "nothing", _closed(", ".join(theirs)) or "nothing"


def _closed(text: str) -> str:
    """With as many brackets closed as are opened."""
    missing = text.count("(") - text.count(")")
    return text + missing * ")" if missing >= 0 else text.removesuffix(-missing * ")")


def _alike(ours: list[str], theirs: list[str]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs)))
