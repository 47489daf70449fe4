"""A line so slow that requests sent at one time exceed their time limit: they come all the same, fewer at a time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from demo.storage import Manners, SlowStorage

from meshfeed.errors import UnavailableError
from meshfeed.remote.client import Client
from meshfeed.remote.retries import Patience
from services.faults import Fault, Faults

BLOCK = 4096
DATA = np.random.default_rng(0).integers(0, 256, 24 * BLOCK).astype(np.uint8).tobytes()


@pytest.fixture
def served(tmp_path: Path) -> Path:
    (tmp_path / "served").mkdir()
    (tmp_path / "served/data.bin").write_bytes(DATA)
    return tmp_path / "served"


def read_at_once(client: Client) -> bytes:
    """All blocks, each by a request of its own, all at one time."""
    tag = client.stat("data.bin").tag
    with ThreadPoolExecutor(24) as pool:
        blocks = pool.map(
            lambda begin: client.read("data.bin", begin, begin + BLOCK, tag), range(0, len(DATA), BLOCK)
        )
        return b"".join(map(bytes, blocks))


def test_requests_that_share_a_slow_line_are_sent_fewer_at_a_time(served: Path) -> None:
    """Six blocks fit into the time limit of one; 24 at one time would all exceed it, over and over."""
    patience = Patience(timeout_s=0.5, give_up_s=60, hedge=False)
    with SlowStorage(served, Manners(latency_s=0.0, bytes_per_s=12 * BLOCK, late_every=None)) as storage:
        client = Client(storage.url, {}, patience)
        assert read_at_once(client) == DATA
        assert client.counts.requests < 90, client.counts


def test_an_answer_that_makes_progress_is_not_cut_off(served: Path) -> None:
    """It takes three times as long as a wait for more of it may take."""
    with SlowStorage(served, Manners(latency_s=0.0, bytes_per_s=16 * BLOCK, late_every=None)) as storage:
        client = Client(storage.url, {}, Patience(timeout_s=0.5, attempts=1, hedge=False))
        assert bytes(client.read("data.bin", 0, len(DATA), client.stat("data.bin").tag)) == DATA


def test_storage_that_answers_nothing_is_given_up_by_all(served: Path) -> None:
    """Who waits for a turn does not wait longer than who asks."""
    with Faults("", lambda *_: Fault(stall=True)) as storage:
        client = Client(storage.url, {}, Patience(timeout_s=0.2, give_up_s=1, hedge=False))

        def is_given_up(begin: int) -> bool:
            with pytest.raises(UnavailableError, match=r"failed \d times in"):
                client.read("data.bin", begin, begin + BLOCK, "tag")
            return True

        with ThreadPoolExecutor(24) as pool:
            assert all(pool.map(is_given_up, range(24)))
        assert client.counts.requests < 24 * 6
