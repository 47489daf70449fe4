"""The cache's folder, without storage: who may fetch a block, and which ones go."""

from __future__ import annotations

import contextlib
import errno
import io
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

import meshfeed.remote.blocks
from meshfeed.remote.blocks import SUM_BYTES, CachedBlocks, CacheFolder, Summed
from meshfeed.remote.cut import Cut

SIZE = 1000


@pytest.fixture
def blocks(tmp_path: Path) -> CachedBlocks:
    return joined(tmp_path, 6)


def joined(path: Path, limit_blocks: int | None, key: str = "a") -> CachedBlocks:
    """Blocks of an object, of a process with this limit."""
    folder = CacheFolder(path)
    folder.join(None if limit_blocks is None else limit_blocks * SIZE)
    return folder.object(key, Cut(20 * SIZE - 1, SIZE))


def put(blocks: CachedBlocks, block: int, *, over_pins: bool = True, keep: Collection[Path] = ()) -> bool:
    """Whether there was room; the block is there then."""
    claim = blocks.claim(block, wait=False)
    if claim is None:
        return True
    if not blocks.cache.reserve([claim], keep, over_pins=over_pins):
        blocks.cache.give_up([claim])
        return False
    claim.publish(Summed.of(memoryview(bytes([block]) * blocks.num_bytes(block))))
    blocks.published(block)
    os.utime(blocks.path(block), ns=(0, next(_clock)))  # a tick of its own
    return True


_clock = iter(range(1, 1 << 30))


def zeros() -> Summed:
    return Summed.of(memoryview(bytes(SIZE)))


def read(blocks: CachedBlocks, block: int) -> bytes:
    """A block that is there, so that nobody can claim it."""
    assert blocks.claim(block, wait=True) is None
    return blocks.path(block).read_bytes()[:-SUM_BYTES]


def held(blocks: CachedBlocks) -> list[int]:
    return sorted(int(path.name) for path in blocks.folder.iterdir())


def test_what_was_used_longest_ago_goes(blocks: CachedBlocks) -> None:
    for block in range(6):
        put(blocks, block)
    assert blocks.touch(0) and held(blocks) == [0, 1, 2, 3, 4, 5]
    put(blocks, 6)
    put(blocks, 19)
    assert {0, 6, 19} <= set(held(blocks)) and not {1, 2} & set(held(blocks))
    assert blocks.cache.held_bytes() == sum(path.stat().st_size - 4 for path in blocks.folder.iterdir())


def test_blocks_of_two_shards_stay_for_the_second_one(tmp_path: Path) -> None:
    """In a third of the limit; the last ones, if there are more. Those of an object that nobody reads go, too."""
    cut = Cut(20 * SIZE, SIZE, tuple(range(SIZE, 21 * SIZE, SIZE)), frozenset({1, 3, 5, 7}))
    folder = CacheFolder(tmp_path)
    folder.join(6 * SIZE)
    blocks, other = folder.object("a", cut), folder.object("b", Cut(20 * SIZE, SIZE))
    for block in range(8):
        put(blocks, block)
    names = {path.name for path in blocks.folder.iterdir()}
    assert {"5+", "7+"} <= names and not {"0", "1+"} & names
    for block in range(8, 16, 2):
        put(blocks, block)
    assert {"5+", "7+"} <= {path.name for path in blocks.folder.iterdir()}
    for block in range(6):
        put(other, block)
    assert not [*blocks.folder.glob("*")]


def test_pinned_blocks_stay_while_others_can_go(blocks: CachedBlocks) -> None:
    for block in range(6):
        put(blocks, block)
    pins = [blocks.pin(block) for block in (0, 1, 2)]
    for block in range(6, 12):
        assert put(blocks, block, over_pins=False)
    assert {0, 1, 2} <= set(held(blocks))
    pins += [blocks.pin(block) for block in held(blocks)[3:]]
    assert not put(blocks, 12, over_pins=False)
    assert put(blocks, 12) and 12 in held(blocks) and 0 not in held(blocks)
    for fd in pins:
        if fd is not None:
            os.close(fd)


def test_what_is_needed_at_one_time_stays(blocks: CachedBlocks) -> None:
    keep = {blocks.path(block) for block in range(8)}
    for block in range(8):
        assert put(blocks, block, keep=keep)
    assert held(blocks) == list(range(8))
    blocks.cache.trim()
    assert len(held(blocks)) <= 6


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_block_published_during_a_count_is_counted(
    blocks: CachedBlocks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    claim = blocks.claim(3, wait=True)
    assert claim is not None and blocks.cache.reserve([claim], (), over_pins=False)
    look = meshfeed.remote.blocks._removed_if_free

    def looking(part: Path) -> bool:
        if when == "before":
            claim.publish(zeros())
        is_gone = look(part)
        if when == "after":
            claim.publish(zeros())
        return is_gone

    monkeypatch.setattr("meshfeed.remote.blocks._removed_if_free", looking)
    (tmp_path / "room").write_text("")
    assert blocks.cache.held_bytes() == SIZE and held(blocks) == [3]


def test_one_process_at_a_time_may_fetch_a_block(blocks: CachedBlocks, tmp_path: Path) -> None:
    other = joined(tmp_path, None)
    claim = blocks.claim(3, wait=True)
    assert claim is not None and other.claim(3, wait=False) is None
    blocks.cache.give_up([claim])
    again = other.claim(3, wait=True)
    assert again is not None
    other.cache.reserve([again], (), over_pins=False)
    again.publish(zeros())
    assert read(blocks, 3) == bytes(SIZE)


def test_a_claim_of_the_dead_is_taken_over_or_removed(blocks: CachedBlocks, tmp_path: Path) -> None:
    for block in (1, 2):
        claim = blocks.claim(block, wait=True)
        assert claim is not None and blocks.cache.reserve([claim], (), over_pins=False)
        os.close(claim.fd)  # as the kernel does
    assert put(blocks, 1)
    joined(tmp_path, None)  # the next process
    assert held(blocks) == [1] and blocks.cache.held_bytes() == SIZE


def test_a_folder_cleared_during_a_fetch_publishes_nobody_elses_part(
    blocks: CachedBlocks, tmp_path: Path
) -> None:
    other = joined(tmp_path, None)
    claim = blocks.claim(3, wait=True)
    assert claim is not None and blocks.cache.reserve([claim], (), over_pins=False)
    claim.part.unlink()  # as an operator does
    theirs = other.claim(3, wait=False)
    assert theirs is not None and other.cache.reserve([theirs], (), over_pins=False)
    with pytest.raises(FileNotFoundError):
        claim.publish(zeros())
    blocks.cache.give_up([claim])
    theirs.publish(Summed.of(memoryview(b"x" * SIZE)))
    assert read(blocks, 3) == b"x" * SIZE


def test_a_folder_that_another_process_makes_and_removes(
    blocks: CachedBlocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for an object of one block, such as a compressed shard, that several read and a small cache evicts."""

    def made_by_another(path: str, mode: int = 0o777) -> None:
        monkeypatch.undo()
        raise FileExistsError(17, "File exists", path)  # and it is gone again

    monkeypatch.setattr(os, "mkdir", made_by_another)
    assert put(blocks, 3) and read(blocks, 3) == bytes([3]) * SIZE


def test_a_damaged_block_that_was_replaced_stays(blocks: CachedBlocks) -> None:
    put(blocks, 3)
    with blocks.path(3).open("rb") as damaged:
        blocks.path(3).unlink()
        put(blocks, 3)
        blocks.cache.remove(blocks.path(3), damaged.fileno())
    assert read(blocks, 3) == bytes([3]) * SIZE


def test_claims_are_unlocked_even_if_the_folder_cannot_be_locked(
    blocks: CachedBlocks, tmp_path: Path
) -> None:
    claim = blocks.claim(3, wait=True)
    assert claim is not None
    (tmp_path / "room").unlink()
    (tmp_path / "room").mkdir()
    with pytest.raises(OSError):
        blocks.cache.give_up([claim])
    (tmp_path / "room").rmdir()
    (tmp_path / "room").touch()
    assert put(blocks, 3)


def test_tidying_up_makes_nothing_in_a_folder_that_its_user_removes(
    blocks: CachedBlocks, tmp_path: Path
) -> None:
    put(blocks, 3)
    for name in ("room", "limit"):
        (tmp_path / name).unlink()
        for tidy in (blocks.cache.trim, blocks.cache.limit_bytes, blocks.cache.held_bytes):
            with contextlib.suppress(FileNotFoundError):
                tidy()
        assert not (tmp_path / name).exists()


class Unreadable(io.FileIO):
    """A file in a sector that its disk has lost."""

    def readall(self) -> bytes:
        raise OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize("damage", ["a flipped bit", "a hole", "a cut", "nothing left", "a lost sector"])
def test_what_a_disk_damages_is_not_there(
    blocks: CachedBlocks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    put(blocks, 3)
    path = blocks.path(3)
    data = path.read_bytes()
    match damage:
        case "a flipped bit":
            path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
        case "a hole":
            path.write_bytes(bytes(len(data)))
        case "a cut":
            path.write_bytes(data[:100])
        case "a lost sector":
            opened: Any = Path.open

            def lost(at: Path, *how: Any, **more: Any) -> Any:
                return Unreadable(at) if at == path else opened(at, *how, **more)

            monkeypatch.setattr(Path, "open", lost)
        case _:
            path.write_bytes(b"")
    fresh = joined(tmp_path, None)
    claim = fresh.claim(3, wait=False)
    assert claim is not None and fresh.cache.held_bytes() == 0
    os.close(claim.fd)


def test_the_largest_limit_counts_and_then_the_last_one(blocks: CachedBlocks, tmp_path: Path) -> None:
    unit = SIZE
    small, silent = joined(tmp_path, 2).cache, joined(tmp_path, None).cache
    assert small.limit_bytes() == silent.limit_bytes() == 6 * unit
    assert blocks.cache._job is not None and small._job is not None
    os.close(blocks.cache._job)
    assert silent.limit_bytes() == 2 * unit
    os.close(small._job)
    assert silent.limit_bytes() == 2 * unit
    silent.join(9 * unit)
    silent.join(3 * unit)
    assert silent.limit_bytes() == 9 * unit


def test_a_lost_count_is_made_again(blocks: CachedBlocks, tmp_path: Path) -> None:
    for block in range(4):
        put(blocks, block)
    (tmp_path / "room").write_text("")  # a process was killed while it wrote
    assert blocks.cache.held_bytes() == 4 * SIZE
