"""Memory shared with workers: taken while anything refers to it, then used again."""

from __future__ import annotations

import multiprocessing
from typing import Any

import numpy as np
import pytest

from meshfeed.multimodal.arena import Arena, ArenaRange


def fill(arena: Arena, room: ArenaRange, value: int) -> None:
    arena.written(room.offset, 8192)[:] = value


def taken(arena: Arena, num_bytes: int) -> Any:
    """An array of a room, which alone refers to it."""
    room = arena.take(num_bytes)
    assert room is not None and room.memory is not None
    return room.memory[:num_bytes].view(np.uint16).reshape(-1, 2)


def test_a_room_is_taken_for_as_long_as_an_array_of_it_lives() -> None:
    arena = Arena(1 << 17)  # far less than all arrays together
    rng = np.random.default_rng(0)
    kept: list[tuple[int, Any]] = []
    for value in range(500):
        if len(kept) > rng.integers(1, 5):
            del kept[int(rng.integers(len(kept)))]
        array = taken(arena, 4 * int(rng.integers(1, 2000)))
        array[...] = value
        kept.append((value, array[1:]))
        assert all((array == value).all() for value, array in kept)


def test_a_full_arena_gives_no_room_until_one_is_free() -> None:
    arena = Arena(8192)
    first, second = arena.take(5), arena.take(4096)
    assert first is not None and second is not None and arena.take(1) is None
    del first
    again = arena.take(4096)
    assert again is not None and again.offset == 0


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_a_worker_writes_where_its_room_is(method: str) -> None:
    arena = Arena(1 << 16)
    rooms = [arena.take(8192) for _ in range(3)]
    context: Any = multiprocessing.get_context(method)
    process = context.Process(target=fill, args=(arena, rooms[1], 7))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert [int(room.memory.sum()) for room in rooms if room and room.memory is not None] == [0, 7 * 8192, 0]
