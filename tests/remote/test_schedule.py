"""What a fetcher fetches next, and whom that wakes."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshfeed.remote.blocks import CacheFolder
from meshfeed.remote.client import LocalReader
from meshfeed.remote.fetcher.objects import Address, StoredObject
from meshfeed.remote.fetcher.schedule import Scheduler

BLOCK, NUM_BLOCKS = 1 << 12, 20


def test_a_block_does_not_wake_all_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that fetches it looks for work, then another for what may be left, then both again."""
    (tmp_path / "object").write_bytes(bytes(BLOCK * NUM_BLOCKS))
    cache = CacheFolder(tmp_path)
    cache.join(None)
    address, reader = Address.of(str(tmp_path / "object"), {}), LocalReader()
    one = StoredObject.of(address, reader, reader.stat(address.path), cache, BLOCK, None, None, None)
    scheduler, looks = Scheduler(), list[int]()
    look = scheduler._next_run
    monkeypatch.setattr(scheduler, "_next_run", lambda: looks.append(0) or look())
    scheduler.start()
    for block in range(NUM_BLOCKS):
        assert scheduler.need(one, [block]) == [block]
    assert NUM_BLOCKS <= len(looks) <= 24 + 5 * NUM_BLOCKS


def test_the_limit_is_not_read_for_each_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a look at every job: once a second, and where a block would exceed the last one."""
    cache, looks = CacheFolder(tmp_path), list[int]()
    cache.join(None)
    look = cache._limit
    monkeypatch.setattr(cache, "_limit", lambda: looks.append(0) or look())
    monkeypatch.setattr("meshfeed.remote.blocks.time.monotonic", lambda: now)
    now = cache._seen_at
    for _ in range(3):
        assert cache.reserve([], (), over_pins=False)
    assert not looks
    now += 1.5
    for _ in range(3):
        assert cache.reserve([], (), over_pins=False)
    assert len(looks) == 1
    cache.seen_limit_bytes = -1  # as if another job had been given a larger one since
    assert cache.reserve([], (), over_pins=False) and len(looks) == 2
