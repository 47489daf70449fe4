"""How deliveries speak to each other, with the network taken out: what is sent, and when nothing is."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import numpy as np
import pytest

import meshfeed as mf
from meshfeed.arrays import Columns
from meshfeed.deliver import EndOfStream, Traffic
from meshfeed.deliver.broadcast import Broadcast
from meshfeed.deliver.choose import Relay
from meshfeed.roles import Role


class Wire:
    """A broadcast group of two, and where they meet: what one sends, the other gets. Both call the same."""

    def __init__(self) -> None:
        self.sent: deque[np.ndarray] = deque()
        self.closed = 0


class End:
    """Where a rank meets its peer, and its group there."""

    def __init__(self, wire: Wire, rank: int) -> None:
        self.wire, self.rank = wire, rank

    def group(self, purpose: str, peers: tuple[int, ...], patience_s: float | None) -> End:
        return self

    def broadcast(self, buffer: np.ndarray, source: int) -> None:
        if self.rank == source:
            self.wire.sent.append(buffer.copy())
            return
        sent = self.wire.sent.popleft()
        assert sent.shape == buffer.shape, "gloo would hang, or write past the end"
        buffer[:] = sent

    def close(self) -> None:
        self.wire.closed += 1


def role_of(rank: int) -> Role:
    return Role(rank=rank, reads=rank == 0, source=0, peers=(0, 1), fields=("tokens",))


def both(wire: Wire) -> tuple[Broadcast, Broadcast]:
    ends: list[Any] = [End(wire, 0), End(wire, 1)]
    return Broadcast(role_of(0), ends[0], None), Broadcast(role_of(1), ends[1], None)


def columns_of(size: int) -> Columns:
    return {"tokens": np.arange(size, dtype=np.int64)}


def test_a_message_that_does_not_fit_is_sent_again_and_the_next_one_fits() -> None:
    wire = Wire()
    reader, peer = both(wire)
    with reader, peer:
        collectives: list[int] = []
        for size in (10, 100_000, 100_000, 90_000, 10, 200_000, 100_000, 200_000):
            before = reader.traffic.collectives
            reader.deliver(columns_of(size), 0)  # the plan knows nothing of what it takes
            got = peer.deliver(None, 0)
            assert np.array_equal(got["tokens"], np.arange(size))
            collectives.append(reader.traffic.collectives - before)
    assert collectives == [1, 2, 1, 1, 1, 2, 1, 1]
    assert reader.traffic == peer.traffic
    assert (wire.closed, len(wire.sent)) == (2, 0)


def test_a_message_travels_whether_it_just_fits_or_just_does_not() -> None:
    for num_bytes in range(3_900, 4_200):
        reader, peer = both(Wire())
        with reader, peer:
            columns = {"tokens": np.arange(num_bytes % 251, num_bytes % 251 + num_bytes).astype(np.uint8)}
            reader.deliver(columns, 0)
            assert np.array_equal(peer.deliver(None, 0)["tokens"], columns["tokens"])


def test_what_the_plan_tells_is_enough_for_most() -> None:
    wire, draw = Wire(), random.Random(3)
    reader, peer = both(wire)
    with reader, peer:
        for _ in range(50):
            columns = columns_of(draw.randrange(100_000))
            reader.deliver(columns, columns["tokens"].nbytes)
            assert np.array_equal(peer.deliver(None, columns["tokens"].nbytes)["tokens"], columns["tokens"])
    assert reader.traffic.collectives == 50


def test_errors_and_the_end_travel_as_messages() -> None:
    wire = Wire()
    reader, peer = both(wire)
    with reader, peer:
        reader.fail(mf.errors.StoreError("the disk is gone"), 100)
        with pytest.raises(mf.errors.StoreError, match="the disk is gone"):
            peer.deliver(None, 100)
        with pytest.raises(mf.errors.DeliveryError, match="Python objects"):
            reader.deliver({"tokens": np.array([object()])}, 100)
        with pytest.raises(mf.errors.DeliveryError, match="Python objects"):
            peer.deliver(None, 100)
        peer.interrupt()  # it goes on receiving until the reader ends
        reader.deliver(columns_of(3), 100)
        assert peer.deliver(None, 100)["tokens"].tolist() == [0, 1, 2]
        reader.interrupt()
        with pytest.raises(EndOfStream):
            reader.deliver(columns_of(3), 100)
        with pytest.raises(EndOfStream):
            peer.deliver(None, 100)


class Recorded:
    """A delivery that says what is asked of it; `ends` once its node wants no more."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log
        self.traffic = Traffic()
        self.raises: BaseException | None = None

    def __enter__(self) -> Recorded:
        self.log.append(f"{self.name} enters")
        return self

    def __exit__(self, *why: object) -> None:
        self.log.append(f"{self.name} leaves")

    def deliver(self, columns: Columns | None, num_bytes: int) -> Columns:
        self.log.append(f"{self.name} delivers")
        if self.raises is not None:
            raise self.raises
        return columns or {"from": np.array([1])}

    def fail(self, error: BaseException, num_bytes: int) -> None:
        self.log.append(f"{self.name} fails with {error}")
        if self.raises is not None:
            raise self.raises

    def interrupt(self) -> None:
        self.log.append(f"{self.name} is interrupted")


def relay() -> tuple[Relay, Recorded, Recorded, list[str]]:
    log: list[str] = []
    across, within = Recorded("across", log), Recorded("within", log)
    made: Any = Relay
    return made(across, within), across, within, log


def said(log: list[str]) -> list[str]:
    told = log[:]
    log.clear()
    return told


def test_a_relay_passes_on_what_comes() -> None:
    leader, across, within, log = relay()
    with leader:
        assert said(log) == ["across enters", "within enters"]
        assert leader.deliver(None, 5)["from"].tolist() == [1]
        assert said(log) == ["across delivers", "within delivers"]
        leader.interrupt()
        assert said(log) == ["across is interrupted", "within is interrupted"]
        assert across.traffic is within.traffic is leader.traffic
    assert said(log) == ["within leaves", "across leaves"]


def test_a_relay_whose_node_has_parted_goes_on_receiving_for_the_others() -> None:
    """Until the reader ends; its node, which is gone, is asked nothing more."""
    leader, across, within, log = relay()
    with leader:
        within.raises = EndOfStream()
        assert leader.deliver(None, 5)["from"].tolist() == [1]
        assert said(log)[2:] == ["across delivers", "within delivers", "within leaves"]
        within.raises = AssertionError("it has parted")
        leader.deliver(None, 5)
        leader.fail(mf.errors.StoreError("late"), 5)
        assert said(log) == ["across delivers", "across fails with late"]
        across.raises = mf.errors.StoreError("the reader's")
        with pytest.raises(mf.errors.StoreError, match="the reader's"):
            leader.deliver(None, 5)
        across.raises = EndOfStream()
        with pytest.raises(EndOfStream):
            leader.deliver(None, 5)
        assert said(log) == ["across delivers", "across delivers"]


@pytest.mark.parametrize("gone", [EndOfStream(), OSError("reset"), RuntimeError("closed")])
def test_a_relay_passes_errors_and_the_end_to_its_node(gone: BaseException) -> None:
    leader, across, within, log = relay()
    with leader:
        across.raises, within.raises = mf.errors.StoreError("the reader's"), gone
        with pytest.raises(mf.errors.StoreError, match="the reader's"):
            leader.deliver(None, 5)
        assert said(log)[2:] == ["across delivers", "within fails with the reader's"]
        across.raises = EndOfStream()
        with pytest.raises(EndOfStream):
            leader.deliver(None, 5)
        assert said(log) == ["across delivers", "within leaves"]
        with pytest.raises(EndOfStream):
            leader.deliver(None, 5)
        assert said(log) == ["across delivers"]


def test_a_relay_that_fails_tells_its_node_though_the_network_is_gone() -> None:
    leader, across, _, log = relay()
    with leader:
        across.raises = mf.errors.PeerError("rank 4 is gone", [4])
        with pytest.raises(mf.errors.PeerError):
            leader.fail(mf.errors.StoreError("mine"), 5)
        assert said(log)[2:] == ["across fails with mine", "within fails with mine"]
