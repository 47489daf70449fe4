"""Caches for a short time: an empty one beside what the node keeps."""

from __future__ import annotations

import os
from pathlib import Path

from meshfeed.files import Cache


def test_what_a_killed_process_left_goes_and_what_another_uses_stays(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        with cache.anew() as left:
            (left.path / "block").write_bytes(b"half")
            os.write(write, str(left.path).encode())
            os._exit(0)  # as a kill does, without cleaning up
    leftover = Path(os.read(read, 4096).decode())
    os.waitpid(child, 0)
    os.close(read)
    os.close(write)
    assert (leftover / "block").exists()
    with cache.anew() as first, cache.anew() as second:
        assert first.path != second.path
        assert first.path.is_dir() and second.path.is_dir() and not leftover.exists()
    assert not list(cache.own_path.glob("anew-*"))
