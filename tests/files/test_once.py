"""What one process of a node makes and the others read."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from meshfeed.files.cache.once import once_per_node


def read(path: Path) -> str | None:
    return path.read_text() or None if path.exists() else None


def writes(text: str) -> Callable[[Path], None]:
    return lambda part: part.write_text(text) and None


def never(part: Path) -> None:
    raise AssertionError("made again")


def test_the_first_makes_it_and_the_others_read(tmp_path: Path) -> None:
    all_came, made = threading.Barrier(8), list[int]()

    def ask(number: int) -> str:
        def make(part: Path) -> None:
            made.append(number)
            part.write_text(f"by {number}")

        all_came.wait()
        return once_per_node(tmp_path / "key", read, make)

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(ask, range(8))) == {f"by {made[0]}"} and len(made) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["key", "key.lock"]
    assert once_per_node(tmp_path / "key", read, never) == f"by {made[0]}"


def test_what_a_failed_or_killed_maker_left_is_thrown_away(tmp_path: Path) -> None:
    def fail(part: Path) -> None:
        assert not part.exists()
        part.mkdir()
        (part / "half").write_text("x")
        raise ZeroDivisionError

    (tmp_path / "key.part").write_text("of a killed one")
    with pytest.raises(ZeroDivisionError):
        once_per_node(tmp_path / "key", read, fail)
    assert [path.name for path in tmp_path.iterdir()] == ["key.lock"]
    assert once_per_node(tmp_path / "key", read, writes("good")) == "good"


def test_what_is_damaged_or_old_is_made_again(tmp_path: Path) -> None:
    entry = tmp_path / "key"
    entry.write_text("")
    assert once_per_node(entry, read, writes("first")) == "first"
    assert once_per_node(entry, read, writes("second"), is_good=lambda _: False) == "second"  # new is good
    assert once_per_node(entry, read, never, is_good=lambda said: said == "second") == "second"


def test_an_entry_that_is_damaged_at_once_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"damaged as soon as it was written.*key"):
        once_per_node(tmp_path / "key", read, writes(""))


def test_what_cannot_be_read_is_made_again_and_then_told(tmp_path: Path) -> None:
    entry, looks = tmp_path / "key", list[Path]()
    entry.write_text("old")

    def unreadable(path: Path) -> str:
        looks.append(path)
        raise OSError(errno.EMFILE, "Too many open files", str(path))

    with pytest.raises(OSError, match="Too many open files") as told:
        once_per_node(entry, unreadable, writes("new"))
    assert told.value.errno == errno.EMFILE and len(looks) == 3
    assert entry.read_text() == "new"


def test_several_entries_may_share_a_lock(tmp_path: Path) -> None:
    for name in ("one", "two"):
        once_per_node(tmp_path / name, read, writes(name), lock=tmp_path / "lock", is_durable=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "one", "two"]
