"""What one process of a node makes and the others read."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from meshfeed.errors import UnavailableError
from meshfeed.files import Cache
from meshfeed.files.cache import once
from meshfeed.files.cache.once import DAY_S, once_per_node, sweep
from meshfeed.remote import answers
from meshfeed.remote.answers import shared
from meshfeed.store.node_arrays import cached_arrays


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


def test_an_entry_that_a_sweep_removes_while_it_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a month, the first process of a job sweeps an entry away while the others find it damaged."""
    entry, remove = tmp_path / "key", shutil.rmtree

    def both_remove(path: Path, ignore_errors: bool = False) -> None:
        remove(path)
        remove(path, ignore_errors=ignore_errors)

    def make(part: Path) -> None:
        part.mkdir()
        (part / "whole").touch()

    entry.mkdir()
    monkeypatch.setattr("meshfeed.files.cache.once.shutil.rmtree", both_remove)
    assert once_per_node(entry, lambda path: (path / "whole").exists() or None, make)


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


def aged(path: Path, days: float) -> Path:
    then = time.time() - days * DAY_S
    os.utime(path, (then, then))
    return path


def test_what_nobody_has_used_for_long_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries with what is named after them, files or folders; but no lock."""
    for name in ("old", "old.part", "new.seen", "left.part", "old.lock", "lock"):
        (tmp_path / name).touch()
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "x.npy").touch()
    (tmp_path / "new").mkdir()
    for path in tmp_path.iterdir():
        if path.name != "new":
            aged(path, 3)
    sweep(tmp_path, "???*", 4 * DAY_S)
    assert len([*tmp_path.iterdir()]) == 9
    sweep(tmp_path, "???*", 2 * DAY_S)  # just after another sweep
    assert len([*tmp_path.iterdir()]) == 9
    monkeypatch.setattr(once, "_SWEEP_EVERY_S", -1.0)
    sweep(tmp_path, "???*", 2 * DAY_S)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["new", "new.seen", "old.lock", "swept"]


def test_what_a_node_has_derived_goes_after_a_month_and_what_it_heard_after_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not what somebody opens, nor text that was prepared, which is read as a store."""
    monkeypatch.setattr(once, "_SWEEP_EVERY_S", -1.0)
    cache, made = Cache(tmp_path), {"numbers": np.arange(3)}
    used, unused = "a" * 32, "b" * 32
    for key in (used, unused):
        cached_arrays(cache.kept(), key, lambda: made)
        aged(cache.kept_path / key, 31)
    (cache.kept_path / "text").mkdir()
    aged(cache.kept_path / "text", 400)
    cached_arrays(cache.kept_path, used, lambda: {})
    assert sorted(each.name for each in cache.kept().iterdir() if each.is_dir()) == [used, "text"]
    answers = tmp_path / "answers"
    for hours in (23, 25):
        shared(answers, "stat", hours, lambda: 1)
        for path in answers.glob("stat-*"):
            aged(path, (hours if time.time() - path.stat().st_mtime < 60 else 23) / 24)
    shared(answers, "stat", 0, lambda: 1)
    assert len([each for each in answers.glob("stat-*") if not each.suffix]) == 2


def test_an_answer_that_the_disk_cannot_keep_is_asked_for_by_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[int]()

    def fail() -> None:
        asked.append(1)
        raise UnavailableError("storage is away")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(answers, "write_answer", full)
    assert shared(tmp_path, "url", 0, lambda: "signed") == "signed"
    with pytest.raises(UnavailableError):
        shared(tmp_path, "url", 1, fail)
    assert asked == [1], "it is not asked twice"
    (tmp_path / "file").touch()
    assert shared(tmp_path / "file", "url", 0, lambda: "signed") == "signed"
