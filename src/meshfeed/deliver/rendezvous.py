"""How the ranks of one group find each other: through a torch.distributed key-value store, by name.

Nothing global: only the members of a group take part, and one that does not come is named.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from meshfeed.errors import DeliveryError, PeerError, StateError

# A rank may rightly wait for a broadcast as long as its source's trainer is busy elsewhere. A dead peer
# closes its connection and is noticed at once; how long a trainer may wait for data is the Feed's timeout.
_NO_TIMEOUT = timedelta(days=30)

_CALLED_OFF = "called off"

_meetings: defaultdict[tuple[str, tuple[int, ...]], Iterator[int]] = defaultdict(itertools.count)


@dataclass(frozen=True, slots=True)
class Meeting:
    """One meeting of some ranks.

    Attributes:
        store: any torch.distributed Store that all of them reach.
        timeout_s: how long to wait for the others.
        topic: what every member must agree on, such as a recipe's fingerprint.
        start: the step from which this rank goes on; the others must too.
        ranks: all of the job.
    """

    store: Store
    timeout_s: float
    topic: str
    start: int = 0
    ranks: Sequence[int] = ()
    _off: threading.Event = field(default_factory=threading.Event, init=False, repr=False, compare=False)
    _awaited: list[str] = field(default_factory=list[str], init=False, repr=False, compare=False)

    def meet(self, purpose: str, rank: int, peers: tuple[int, ...]) -> str:
        """Wait until every peer has come to the same purpose; returns a key prefix of this meeting alone.

        Members must call in the same order for the same peers, as for torch.distributed.new_group.
        Raises PeerError naming who is missing after `timeout_s`, or who brings another topic, and where the
        meeting is called off; StateError where one goes on from another step.
        """
        turn = next(_meetings[purpose, peers])
        prefix = f"meshfeed/{purpose}/{turn}/{'-'.join(map(str, _runs(peers)))}"
        self.store.set(f"{prefix}/{rank}", f"{self.start} {self.topic}")
        keys = [f"{prefix}/{peer}" for peer in peers]
        if not self._go_on(prefix, self._have_come(keys, purpose, rank, peers)):
            raise PeerError(f"rank {rank} waited for ranks {peers}, and one of them ended before it came")
        starts, topics = {}, {}
        for peer, brought in zip(peers, self._read_all(keys)):
            starts[peer], _, topics[peer] = brought.partition(" ")
        others = [peer for peer in peers if topics[peer] != self.topic]
        if others:
            here, there = _unlike(self.topic, topics[others[0]])
            raise PeerError(
                f"rank {rank} and rank(s) {others} disagree on the recipe, fields or delivery: here "
                f"{here}, there {there}; give every rank the same arguments",
                others,
            )
        for peer, start in starts.items():
            self._check_start(rank, start, f"rank {peer}")
        return prefix

    def call_off(self, store: Store) -> None:
        """From another thread: somebody will not come. Who waits here ends with PeerError.

        store: another connection than the one on which this rank waits.
        """
        self._off.set()
        for key in list(self._awaited):
            cast(Any, store).compare_set(key, "", _CALLED_OFF)

    def check_start(self, rank: int) -> None:
        """Compare the first step with the rank of the job that came first; waits for nobody.

        All ranks that resume must call it equally often. Raises StateError.
        """
        key = f"meshfeed/start/{self._digest}/{next(_meetings[self.topic, ()])}"
        self._check_start(rank, self.store.compare_set(key, "", str(self.start)).decode(), "another rank")

    def turn(self, purpose: str) -> str:
        """A key prefix that the same run of the same feed has on all ranks of the job; waits for nobody."""
        prefix = f"meshfeed/{purpose}/{self._digest}/{self.start}"
        return f"{prefix}/{next(_meetings[prefix, ()])}"

    @property
    def _digest(self) -> str:
        return hashlib.blake2b(self.topic.encode(), digest_size=8).hexdigest()

    def _check_start(self, rank: int, start: str, peer: str) -> None:
        if start != str(self.start):
            raise StateError(
                f"rank {rank} goes on from step {self.start}, {peer} from step {start}: the checkpoint is "
                f"torn; load one that all ranks saved at the same step"
            )

    def gloo_group(self, purpose: str, rank: int, peers: tuple[int, ...]) -> GlooGroup:
        """Connections among the peers alone, made once all of them have come.

        Raises PeerError as `meet` does, or where one of them is lost on the way.
        """
        prefix = self.meet(purpose, rank, peers)
        try:
            return GlooGroup(PrefixStore(f"{prefix}/gloo", self.store), rank, peers, self.timeout_s)
        except (RuntimeError, dist.DistError) as broken:
            others = [peer for peer in peers if peer != rank]
            raise PeerError(
                f"rank {rank} met rank(s) {others} but could not connect its {purpose} group: {broken}; "
                f"has one of them died, or does GLOO_SOCKET_IFNAME name the wrong network?",
                others,
            ) from broken

    def publish(self, key: str, text: str) -> None:
        """Leave a word for the others."""
        self.store.set(key, text)

    def read(self, key: str, source: int, rank: int) -> str:
        """What `source` has left, waiting for it. Raises PeerError naming it after `timeout_s`."""
        self._wait([key], "share", rank, (source,))
        return self.store.get(key).decode()

    def _have_come(self, keys: list[str], purpose: str, rank: int, peers: tuple[int, ...]) -> bool:
        """Whether all peers come before the meeting is called off."""
        self._awaited[:] = keys
        try:
            if self._off.is_set():  # asked once `call_off` can see the keys
                return False
            self._wait(keys, purpose, rank, peers)
            return _CALLED_OFF not in self._read_all(keys)
        finally:
            self._awaited.clear()

    def _go_on(self, prefix: str, come: bool) -> bool:
        """All members go on, or none does, since each would wait for the others: the first word holds."""
        word: str = cast(Any, self.store).compare_set(f"{prefix}/go", "", str(come)).decode()
        return word == str(True)

    def _read_all(self, keys: list[str]) -> list[str]:
        return [value.decode() for value in cast(Any, self.store).multi_get(keys)]

    def _wait(self, keys: list[str], purpose: str, rank: int, peers: tuple[int, ...]) -> None:
        try:
            self.store.wait(keys, timedelta(seconds=self.timeout_s))
        except (RuntimeError, dist.DistError) as late:
            missing = self._missing(keys, peers)
            if not missing:
                raise DeliveryError(
                    f"rank {rank}: the rendezvous store failed: {late}; does the process that serves it live?"
                ) from late
            raise PeerError(
                f"rank {rank} waited {self.timeout_s:g} s for rank(s) {missing} to join its {purpose} group "
                f"{peers}; every rank of the group must iterate its Feed (are they running?)",
                missing,
            ) from late

    def _missing(self, keys: list[str], peers: tuple[int, ...]) -> list[int]:
        """Who has not come; nobody where the store cannot say."""
        try:
            return [peer for key, peer in zip(keys, peers) if not self.store.check([key])]
        except (RuntimeError, dist.DistError):
            return []


class GlooGroup:
    """Gloo connections of some ranks, apart from the groups that torch.distributed keeps a list of.

    `dist.new_group` calls a group by how many groups this rank is in already, so ranks with different
    pasts never meet, and one made again after it was destroyed meets the addresses of the first.
    """

    def __init__(self, store: Store, rank: int, peers: tuple[int, ...], timeout_s: float) -> None:
        self._peers = peers
        timeout = timedelta(seconds=timeout_s)
        self._gloo: Any = dist.ProcessGroupGloo(store, peers.index(rank), len(peers), timeout)

    def broadcast(self, buffer: torch.Tensor, source: int, timeout_s: float | None) -> None:
        """Fill `buffer` with that of rank `source`. RuntimeError: a peer is gone, or late by `timeout_s`."""
        timeout = _NO_TIMEOUT if timeout_s is None else timedelta(seconds=timeout_s)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = self._peers.index(source), 0, timeout
        self._gloo.broadcast([buffer], options).wait(timeout)

    def all_gather(self, row: torch.Tensor) -> torch.Tensor:
        """Each peer's row, in the order of peers. RuntimeError: a peer is gone, or late by `timeout_s`."""
        rows = [torch.empty_like(row) for _ in self._peers]
        self._gloo.allgather([rows], [row]).wait()
        return torch.stack(rows)

    @property
    def backend(self) -> Any:
        """What torch calls a backend: collectives among the peers, in their order."""
        return self._gloo

    def close(self) -> None:
        """Close the connections, which tells the peers."""
        self._gloo = None


def default_store() -> Store | None:
    """The store of the default process group; None where torch.distributed is not initialised."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    return dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]


def _unlike(here: str, there: str) -> tuple[str, str]:
    # how two topics begin and end alike is left out, at commas: what differs is what a reader looks for
    ours, theirs = here.split(", "), there.split(", ")
    start = _alike(ours, theirs)
    ours, theirs = ours[start:], theirs[start:]
    end = _alike(ours[::-1], theirs[::-1])
    ours, theirs = ours[: len(ours) - end], theirs[: len(theirs) - end]
    return ", ".join(ours) or "nothing", ", ".join(theirs) or "nothing"


def _alike(ours: list[str], theirs: list[str]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs)))


def _runs(ranks: tuple[int, ...]) -> list[str]:
    # (0, 1, 2, 3, 8) -> ["0:3", "8"]: a key stays short for a group of thousands
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return [str(a) if a == b else f"{a}:{b}" for a, b in runs]
