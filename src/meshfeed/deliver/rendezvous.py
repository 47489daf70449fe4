"""How the ranks of one group find each other: through a torch.distributed key-value store, by name.

Nothing global: only the members of a group take part, and one that does not come is named.

All that a run leaves in the store is under its *number*: how many runs this rank has begun among the same
ranks of the job. All begin the same runs in the same order, so it is the same on all of them; a run that
failed counts on every rank, whatever it brought to it, so they meet again in the next.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import threading
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed.distributed_c10d import PrefixStore, Store

from meshfeed.deliver.connections import FAILURES, own_connection
from meshfeed.deliver.links import Links
from meshfeed.errors import DeliveryError, MeshfeedError, PeerError, StateError

# A rank may rightly wait for a broadcast as long as its source's trainer is busy elsewhere. A dead peer
# closes its connection and is noticed at once; how long a trainer may wait for data is the Feed's timeout.
_NO_TIMEOUT = timedelta(days=30)

_CALLED_OFF = "called off"

# by store, not by process: where a process meets others at another store, neither side has a past
_numbers: defaultdict[tuple[str, str], Iterator[int]] = defaultdict(itertools.count)


@dataclass(slots=True, eq=False)
class Meeting:
    """Where the ranks of one run of a feed find each other.

    Attributes:
        store: any torch.distributed Store that all of them reach.
        timeout_s: how long to wait for the others.
        topic: what every member must agree on, such as a recipe's fingerprint.
        start: the step from which this rank goes on; the others must too.
        ranks: all of the job.
        tell: called with an error that ends a meeting, before this rank lets go of what it has met.
        takers: those of them that take what is read. They begin this run in its turn among all such runs,
            whatever its topic; a rank that is left out may stay away. Empty where nobody waits for another:
            one may begin such a run alone, and only those of the same topic are told apart.
    """

    store: Store
    timeout_s: float
    topic: str
    start: int = 0
    ranks: Sequence[int] = ()
    takers: Sequence[int] = ()
    tell: Callable[[Exception], object] = lambda error: None
    _prefix: str = field(default="", init=False)
    _off: threading.Event = field(default_factory=threading.Event, init=False, repr=False, compare=False)
    _awaited: list[str] = field(default_factory=list[str], init=False, repr=False, compare=False)

    def meet(self, purpose: str, rank: int, peers: tuple[int, ...]) -> str:
        """Wait until every peer has come to the same purpose; returns a key prefix of this meeting alone.

        Members meet once for a purpose. Raises PeerError naming who is missing after `timeout_s`, and where
        the meeting is called off.
        """
        prefix = f"{self.prefix}/{purpose}/{'-'.join(map(str, _runs(peers)))}"
        self.store.set(f"{prefix}/{rank}", "here")
        keys = [f"{prefix}/{peer}" for peer in peers]
        try:
            come = self._have_come(keys, purpose, rank, peers)
        except MeshfeedError as error:
            self.tell(error)  # at once: whoever loses this rank when it lets go would speak first
            with contextlib.suppress(*FAILURES):
                self._go_on(prefix, False)
            raise
        if not self._go_on(prefix, come):
            raise PeerError(f"rank {rank} waited for ranks {peers}, and one of them ended before it came")
        return prefix

    def call_off(self, store: Store) -> None:
        """From another thread: somebody will not come. Who waits here ends with PeerError.

        store: another connection than the one on which this rank waits.
        """
        self._off.set()
        for key in list(self._awaited):
            cast(Any, store).compare_set(key, "", _CALLED_OFF)

    def is_called_off(self) -> bool:
        """Whether `call_off` was called: a rank that this one waits for will not come."""
        return self._off.is_set()

    @property
    def prefix(self) -> str:
        """A key prefix that this run has on all ranks of the job, and no other run; waits for nobody."""
        if not self._prefix:
            space: str = cast(Any, self.store).compare_set("meshfeed/space", "", uuid.uuid4().hex).decode()
            of = "-".join(_runs(tuple(self.takers))) or self.topic
            of = hashlib.blake2b(of.encode(), digest_size=8).hexdigest()
            self._prefix = f"meshfeed/{of}/{next(_numbers[space, of])}"
        return self._prefix

    def pass_over(self) -> None:
        """Take part in the next run instead: this one failed because this rank had not come."""
        self._prefix = ""

    def compare(self, rank: int) -> None:
        """Compare topic and first step with the rank of the job that came first; waits for nobody.

        Raises PeerError where topics differ, StateError where steps do, DeliveryError for a lost store.
        """
        brought = f"{rank} {self.start} {self.topic}"
        try:
            first: str = cast(Any, self.store).compare_set(f"{self.prefix}/first", "", brought).decode()
        except FAILURES as lost:
            raise _lost(rank, lost) from lost
        other, start, topic = first.split(" ", 2)
        if topic != self.topic:
            here, there = _unlike(self.topic, topic)
            raise PeerError(
                f"rank {rank} and rank {other} disagree on the recipe, fields or delivery: rank {rank} has "
                f"{here}, rank {other} {there}; give every rank the same arguments",
                sorted((rank, int(other))),
            )
        if start != str(self.start):
            raise StateError(
                f"rank {rank} goes on from step {self.start}, rank {other} from step {start}: the checkpoint "
                f"is torn; load one that all ranks saved at the same step"
            )

    def gloo_group(self, purpose: str, rank: int, peers: tuple[int, ...]) -> GlooGroup:
        """Connections among the peers alone, made once all of them have come.

        Raises PeerError as `meet` does, or where one of them is lost on the way.
        """
        prefix = self.meet(purpose, rank, peers)
        try:
            return GlooGroup(PrefixStore(f"{prefix}/gloo", self.store), rank, peers, self.timeout_s)
        except FAILURES as broken:
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
        self._wait([key], "share", rank, (source,))  # not called off: both go on, as they have agreed
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
            with own_connection(self.store) as own:
                (own or self.store).wait(keys, timedelta(seconds=self.timeout_s))
        except FAILURES as late:
            try:
                missing = self._missing(keys, peers)
            except FAILURES:
                raise _lost(rank, late) from late
            if not missing:
                return  # they came at the last moment
            raise PeerError(
                f"rank {rank} waited {self.timeout_s:g} s for rank(s) {missing} to join its {purpose} group "
                f"{peers}; every rank of the group must iterate its Feed (are they running?)",
                missing,
            ) from late

    def _missing(self, keys: list[str], peers: tuple[int, ...]) -> list[int]:
        return [peer for key, peer in zip(keys, peers) if not self.store.check([key])]


class GlooGroup:
    """Gloo connections of some ranks, apart from the groups that torch.distributed keeps a list of.

    `dist.new_group` calls a group by how many groups this rank is in already, so ranks with different
    pasts never meet, and one made again after it was destroyed meets the addresses of the first.
    """

    def __init__(self, store: Store, rank: int, peers: tuple[int, ...], timeout_s: float) -> None:
        self._peers = peers
        timeout, self._links = timedelta(seconds=timeout_s), Links()
        self._gloo: Any = dist.ProcessGroupGloo(store, peers.index(rank), len(peers), timeout)
        ends = self._gather(torch.from_numpy(self._links.found(len(peers))), timeout)
        self._links.identify(ends.numpy())
        # Who has nothing to say would leave, while another still connects and takes it for dead.
        self._gloo.barrier().wait(timeout)

    def broadcast(self, buffer: torch.Tensor, source: int, timeout_s: float | None) -> None:
        """Fill `buffer` with that of rank `source`. RuntimeError: a peer is gone, or late by `timeout_s`."""
        timeout = _NO_TIMEOUT if timeout_s is None else timedelta(seconds=timeout_s)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = self._peers.index(source), 0, timeout
        self._gloo.broadcast([buffer], options).wait(timeout)

    def all_gather(self, row: torch.Tensor) -> torch.Tensor:
        """Each peer's row, in the order of peers, however late. RuntimeError: a peer is gone."""
        return self._gather(row, _NO_TIMEOUT)

    def _gather(self, row: torch.Tensor, timeout: timedelta) -> torch.Tensor:
        rows, options = [torch.empty_like(row) for _ in self._peers], AllgatherOptions()
        options.timeout = timeout
        self._gloo.allgather([rows], [row], options).wait(timeout)
        return torch.stack(rows)

    def lost(self) -> list[int]:
        """The ranks whose connections to this one are closed: they died, or left the group before it did."""
        return [self._peers[member] for member in self._links.lost()]

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


def _lost(rank: int, failure: Exception) -> DeliveryError:
    return DeliveryError(
        f"rank {rank}: the rendezvous store failed: {failure}; does the process that serves it live?"
    )


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
