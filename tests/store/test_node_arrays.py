"""Arrays built once per node: by one of many, whoever is killed, whatever is damaged."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import world
from meshfeed.errors import StoreError
from meshfeed.files.cache import once
from meshfeed.store import node_arrays
from meshfeed.store.node_arrays import cached_arrays, key_of_parts
from soak import some

KEY = key_of_parts(kind="test", seed=5)
ARRAYS = {
    "long": np.arange(3_000_000, dtype=np.int32),
    "pairs": np.arange(10, dtype=np.int64).reshape(5, 2),
    "none": np.zeros(0, np.uint32),
}


def assert_whole(arrays):
    assert set(arrays) == set(ARRAYS)
    for name, array in arrays.items():
        assert array.dtype == ARRAYS[name].dtype and np.array_equal(array, ARRAYS[name])


def never():
    raise AssertionError("built again")


def test_built_once_then_mapped_and_read_only(tmp_path):
    assert_whole(cached_arrays(tmp_path / "deep" / "cache", KEY, lambda: ARRAYS))
    arrays = cached_arrays(str(tmp_path / "deep" / "cache"), KEY, never)
    assert_whole(arrays)
    for array in (arrays["long"], arrays["pairs"]):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    if os.path.exists("/proc/self/maps"):
        assert f"{KEY}/long.npy" in Path("/proc/self/maps").read_text()


def test_other_parts_are_other_keys(tmp_path):
    keys = {key_of_parts(seed=seed, store=store) for seed in (1, 2, 1.5) for store in ("a", "b")}
    assert len(keys) == 6 and key_of_parts(a=1, b=2) == key_of_parts(b=2, a=1)
    cached_arrays(tmp_path, "one", lambda: {"a": np.zeros(1)})
    assert cached_arrays(tmp_path, "two", lambda: {"a": np.ones(1)})["a"].tolist() == [1]


def cut(path):
    os.truncate(path, path.stat().st_size - 1)


def flip_a_byte(path):
    with path.open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        last = stream.read(1)
        stream.seek(-1, os.SEEK_END)
        stream.write(bytes([last[0] ^ 1]))


def blank(path):
    path.write_bytes(bytes(path.stat().st_size))


@some(7)
@pytest.mark.parametrize("harm", [cut, flip_a_byte, blank, os.unlink])
@pytest.mark.parametrize("name", ["long.npy", "pairs.npy", "none.npy", "manifest.json"])
def test_a_damaged_entry_is_built_anew(tmp_path, harm, name):
    cached_arrays(tmp_path, KEY, lambda: ARRAYS)
    harm(tmp_path / KEY / name)
    built = []
    assert_whole(cached_arrays(tmp_path, KEY, lambda: built.append(1) or ARRAYS))
    assert built == [1]
    assert_whole(cached_arrays(tmp_path, KEY, never))


def test_who_has_an_entry_mapped_keeps_it_when_it_is_built_anew(tmp_path):
    before = cached_arrays(tmp_path, KEY, lambda: ARRAYS)
    (tmp_path / KEY / "pairs.npy").unlink()
    cached_arrays(tmp_path, KEY, lambda: ARRAYS)
    assert_whole(before)


def test_what_a_build_raises_comes_through_and_the_next_one_builds(tmp_path):
    with pytest.raises(ZeroDivisionError):
        cached_arrays(tmp_path, KEY, lambda: 1 // 0)
    assert_whole(cached_arrays(tmp_path, KEY, lambda: ARRAYS))


def test_a_folder_that_cannot_be_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"file.*give a folder"):
        cached_arrays(tmp_path / "file" / "cache", KEY, never)


def test_a_folder_that_may_not_be_written_is_told(tmp_path, monkeypatch):
    def refuse(*args, **options):  # root may write everywhere, so modes would prove nothing here
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(node_arrays.os, "open", refuse)
    with pytest.raises(StoreError, match="Permission denied; give a folder"):
        cached_arrays(tmp_path, KEY, never)


def test_a_whole_entry_needs_no_right_to_write(tmp_path, monkeypatch):
    cached_arrays(tmp_path, KEY, lambda: ARRAYS)
    monkeypatch.setattr(once, "locked", never)
    assert_whole(cached_arrays(tmp_path, KEY, never))


def test_a_full_disk_is_told_and_leaves_no_entry(tmp_path, monkeypatch):
    def full(path):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(once, "sync", full)
        with pytest.raises(StoreError, match="No space left on device; give a folder"):
            cached_arrays(tmp_path, KEY, lambda: ARRAYS)
    assert not (tmp_path / KEY).exists()
    assert_whole(cached_arrays(tmp_path, KEY, lambda: ARRAYS))


def test_an_entry_that_will_not_stay_whole_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(node_arrays, "_opened", lambda entry: None)
    with pytest.raises(StoreError, match="damaged as soon as it was written"):
        cached_arrays(tmp_path, KEY, lambda: ARRAYS)


# -- several processes ----------------------------------------------------------------------------------


def say(path):
    """Tell the test, which reads this FIFO, that this is reached."""
    with open(path, "w") as stream:
        stream.write("x")


def wait_for(path):
    with open(path) as stream:
        stream.read()


def build_and_stop(rank, where, at):
    """The builder that is killed: it says where it is, and waits for ever."""

    def stop(*_):
        say(f"{where}/reached")
        wait_for(f"{where}/never")

    if at == "building":
        cached_arrays(f"{where}/cache", KEY, stop)
    else:  # all is written, but not on the disk
        once.sync = stop
        cached_arrays(f"{where}/cache", KEY, lambda: ARRAYS)


def build_counted(rank, where):
    say(f"{where}/asking{rank}")

    def build():
        with open(f"{where}/built", "a") as stream:
            stream.write(f"{rank}\n")
        wait_for(f"{where}/go")
        return ARRAYS

    arrays = cached_arrays(f"{where}/cache", KEY, build)
    assert_whole(arrays)
    return rank


@pytest.mark.parametrize("at", ["building", "writing"])
def test_a_killed_builder_leaves_nothing_half_done_and_another_takes_over(tmp_path, at):
    for name in ("reached", "never", "asking0", "go"):
        os.mkfifo(tmp_path / name)
    victim = world.start(build_and_stop, 1, str(tmp_path), at, distributed=False)
    wait_for(tmp_path / "reached")
    assert (tmp_path / "cache" / f"{KEY}.part").exists() == (at == "writing")
    heir = world.start(build_counted, 1, str(tmp_path), distributed=False)
    wait_for(tmp_path / "asking0")
    assert not (tmp_path / "built").exists()  # the lock is the victim's
    victim.kill([0])
    assert victim.join()[0].exitcode == -9
    say(tmp_path / "go")
    assert heir.join()[0].result == 0
    assert_whole(cached_arrays(tmp_path / "cache", KEY, never))
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == [KEY, f"{KEY}.lock"]


def test_many_processes_build_once(tmp_path):
    for name in ("asking0", "asking1", "asking2", "go"):
        os.mkfifo(tmp_path / name)
    jobs = world.start(build_counted, 3, str(tmp_path), distributed=False)
    for rank in range(3):
        wait_for(tmp_path / f"asking{rank}")
    say(tmp_path / "go")
    outcomes = jobs.join()
    assert [outcome.result for outcome in outcomes] == [0, 1, 2], outcomes
    assert len((tmp_path / "built").read_text().split()) == 1
