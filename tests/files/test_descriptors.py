"""Files that are read stay within the descriptors that a process may have, whatever threads and forks do."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshfeed.errors import ChangedError, MissingError, StoreError
from meshfeed.files import LocalFile, byte_file
from meshfeed.files.local.mapping import mapped

SIZE = 64
MOST = 4


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[LocalFile]:
    """Twenty files, each full of its own number; four may be open."""
    monkeypatch.setattr(byte_file, "most_open", lambda: MOST)
    for i in range(20):
        (tmp_path / str(i)).write_bytes(bytes([i]) * SIZE)
    return [LocalFile(tmp_path / str(i)) for i in range(20)]


def open_in(folder: Path) -> list[str]:
    """Names of the folder's files that this process has open."""
    links = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    found = (os.readlink(link) for link in links if os.path.lexists(link))
    return sorted(os.path.basename(path) for path in found if path.startswith(f"{folder}/"))


def read(file: LocalFile) -> bytes:
    out = np.empty(SIZE, np.uint8)
    file.read_into(out, np.array([0]), np.array([SIZE]))
    return out.tobytes()


def test_no_more_are_open_than_may_be(files: list[LocalFile], tmp_path: Path) -> None:
    rng = random.Random(0)
    for file in files:
        file.__enter__()
    for _ in range(300):
        i = rng.randrange(len(files))
        assert read(files[i]) == bytes([i]) * SIZE
        assert len(open_in(tmp_path)) <= MOST
    assert sum(file.stats.opens for file in files) > len(files)
    for file in files:
        file.__exit__()
    assert open_in(tmp_path) == []


def test_what_is_read_again_and_again_stays_open(files: list[LocalFile], tmp_path: Path) -> None:
    for file in files:
        file.__enter__()
    for file in files[1:]:
        read(files[0])
        read(file)
    assert files[0].stats.opens == 1
    for file in files:
        file.__exit__()


def test_nothing_is_closed_under_a_reader(
    files: list[LocalFile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, inside, go_on = os.preadv, threading.Barrier(7), threading.Event()

    def slowly(fd: int, buffers: tuple[memoryview, ...], at: int) -> int:
        if threading.current_thread() is not threading.main_thread():
            inside.wait(600)
            assert go_on.wait(600)
        return whole(fd, buffers, at)

    monkeypatch.setattr(byte_file, "_read_ranges", None)
    monkeypatch.setattr(os, "preadv", slowly)
    for file in files:
        file.__enter__()
    got: dict[int, bytes] = {}
    threads = [threading.Thread(target=lambda i=i: got.update({i: read(files[i])})) for i in range(6)]
    for thread in threads:
        thread.start()
    inside.wait(600)
    assert len(open_in(tmp_path)) == 6  # more than may be, since all are being read
    for i in range(6, 20):
        assert read(files[i]) == bytes([i]) * SIZE
        assert {str(each) for each in (*range(6), i)} <= set(open_in(tmp_path))
        assert len(open_in(tmp_path)) <= 6 + MOST
    files[0].__exit__()
    assert "0" in open_in(tmp_path)  # it is closed by who reads it
    go_on.set()
    for thread in threads:
        thread.join(600)
    assert got == {i: bytes([i]) * SIZE for i in range(6)}
    assert "0" not in open_in(tmp_path)
    for file in files[1:]:
        file.__exit__()
    assert open_in(tmp_path) == []


def test_threads_read_what_is_there(files: list[LocalFile], tmp_path: Path) -> None:
    wrong: list[int] = []

    def read_some(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(400):
            i = rng.randrange(len(files))
            with files[i]:
                if read(files[i]) != bytes([i]) * SIZE:
                    wrong.append(i)

    threads = [threading.Thread(target=read_some, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert wrong == []
    assert open_in(tmp_path) == []
    assert sum(file.stats.reads for file in files) == 8 * 400


def test_what_is_in_memory_is_not_announced(files: list[LocalFile], monkeypatch: pytest.MonkeyPatch) -> None:
    """Until a read has to wait for the disk, or nobody can tell."""
    advised: list[tuple[int, int]] = []
    whole, in_memory = byte_file.fill, True

    def told(*arguments: Any) -> bool:
        whole(*arguments)
        return in_memory

    monkeypatch.setattr(byte_file, "fill", told)
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, at, size, what: advised.append((at, size)))
    with files[0] as file:
        for found in (True, False, True):
            file.will_need(np.array([0, 10]), np.array([10, SIZE]))
            advised.append((-1, found))
            in_memory = found
            assert read(file) == bytes(SIZE)
        file.will_need(np.array([0]), np.array([SIZE]))
    assert advised == [(0, SIZE), (-1, True), (-1, False), (0, SIZE), (-1, True)]


@pytest.mark.parametrize("how", ["replaced", "written", "cut", "removed"])
def test_another_file_is_noticed_when_it_is_opened_again(
    files: list[LocalFile], tmp_path: Path, how: str
) -> None:
    for file in files:
        file.__enter__()
    read(files[0])
    for file in files[1:]:  # which closes it
        read(file)
    path = tmp_path / "0"
    match how:
        case "replaced":
            kept = path.stat()
            (tmp_path / "new").write_bytes(bytes(SIZE))
            os.utime(tmp_path / "new", ns=(kept.st_atime_ns, kept.st_mtime_ns))
            (tmp_path / "new").replace(path)
        case "written":
            path.write_bytes(bytes(SIZE))
            os.utime(path, ns=(1, 1))
        case "cut":
            os.truncate(path, 5)
        case _:
            path.unlink()
    with pytest.raises(MissingError if how == "removed" else ChangedError, match=f"{path}: "):
        read(files[0])
    for file in files:
        file.__exit__()


def test_descriptors_that_others_took_are_made_up_for(
    files: list[LocalFile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, room = os.open, 2

    def few(path: str, flags: int, *more: int) -> int:
        if len(open_in(tmp_path)) >= room:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return whole(path, flags, *more)

    monkeypatch.setattr(os, "open", few)
    for file in files:
        file.__enter__()
    for i, file in enumerate(files):
        assert read(file) == bytes([i]) * SIZE
    room = 0
    with pytest.raises(StoreError, match="Too many open files"):
        read(files[0])
    for file in files:
        file.__exit__()


def test_the_trainer_has_three_quarters_of_the_descriptors(tmp_path: Path) -> None:
    for i in range(120):
        (tmp_path / str(i)).write_bytes(bytes([i]) * SIZE)
    script = """
import contextlib, os, resource, sys
import numpy as np
from meshfeed.files import LocalFile
files = [LocalFile(f"{sys.argv[1]}/{i}") for i in range(120)]
out, here = np.empty(64, np.uint8), len(os.listdir("/proc/self/fd"))
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
with contextlib.ExitStack() as stack:
    for file in files:
        stack.enter_context(file).read_into(out, np.array([0]), np.array([64]))
    own = [open("/dev/null") for _ in range(48 - here)]
    for file in files:
        file.read_into(out, np.array([0]), np.array([64]))
    open("/dev/null").close()
"""
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True)


def test_a_forked_child_reads_on_whatever_threads_of_the_parent_held(
    files: list[LocalFile], tmp_path: Path
) -> None:
    for file in files:
        file.__enter__()
    stop = threading.Event()

    def read_on(seed: int) -> None:
        rng = random.Random(seed)
        while not stop.is_set():
            read(files[rng.randrange(len(files))])

    threads = [threading.Thread(target=read_on, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    right = all(read(file) == bytes([i]) * SIZE for i, file in enumerate(files))
                    code = 0 if right else 2
                finally:
                    os._exit(code)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        stop.set()
        for thread in threads:
            thread.join(600)
    for file in files:
        file.__exit__()


def test_a_map_keeps_no_descriptor_and_goes_with_its_last_array(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(bytes(range(100)))

    def is_mapped() -> bool:
        return str(path) in Path("/proc/self/maps").read_text()

    with path.open("rb") as stream:
        part = mapped(stream.fileno())[1:7].view("<u2")
    assert open_in(tmp_path) == [] and is_mapped()
    assert part[:].tolist() == [0x0201, 0x0403, 0x0605]
    with pytest.raises(ValueError, match="read-only"):
        part[0] = 1
    del part
    assert not is_mapped()
    with path.open("r+b") as stream:
        array = mapped(stream.fileno(), write=True)
    array[3] = 77
    assert path.read_bytes()[3] == 77


def test_entries_of_a_local_file_are_read_and_a_cut_file_is_an_error(tmp_path: Path) -> None:
    entries = np.random.default_rng(0).integers(0, 1 << 62, 5_000).astype("<i8")
    path = tmp_path / "f"
    path.write_bytes(b"abc" + entries.tobytes())
    (found,) = LocalFile(path).arrays(("<i8", 3, entries.size))
    places = np.array([4_999, 0, 511, 512, 0, 2_000])
    assert found[places].tolist() == entries[places].tolist()
    assert found[100:3_000].tolist() == entries[100:3_000].tolist()
    assert found[np.zeros(0, np.int64)].size == 0 and found[7] == entries[7]
    assert open_in(tmp_path) == []
    os.truncate(path, 4_096)
    assert found[0] == entries[0]
    for where in (places, slice(600, 700)):
        with pytest.raises(ChangedError, match="the file ends"):
            found[where]
