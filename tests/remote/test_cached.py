"""Files through the node's cache: the right bytes, each fetched once, whatever dies, fills up or changes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import random
import re
import resource
import signal
import stat
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import world
from meshfeed.errors import CacheError, ChangedError, MissingError
from meshfeed.files import Cache, Folder
from meshfeed.files.byte_file import Content
from meshfeed.remote.answers import read_answer, write_answer
from meshfeed.remote.blocks import SUM_BYTES
from meshfeed.remote.cached import CachedFile
from meshfeed.remote.fetcher.protocol import fetcher, retried
from services.faults import Fault, Faults
from services.needs import needs, needs_root, small_disk
from services.nginx import Nginx
from services.unhedged import unhedged
from soak import cases, only_soak

SIZE = 3_000_001
BLOCK = 1 << 16
DATA_BYTES = np.random.default_rng(0).integers(0, 256, SIZE).astype(np.uint8)
_context = world.context  # which has imported torch already


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nginx]:
    needs("nginx")
    folder = tmp_path_factory.mktemp("served")
    (folder / "data.bin").write_bytes(DATA_BYTES.tobytes())
    with Nginx(folder) as nginx:
        yield nginx


def file_of(url: str, cache: Path, limit_bytes: int = 1 << 30) -> CachedFile:
    return CachedFile(f"{url}/data.bin", Cache(cache, limit_bytes=limit_bytes, block_bytes=BLOCK))


def read_some(file: CachedFile, rng: np.random.Generator, ahead: bool = False) -> None:
    """A batch of random ranges; raises where a byte is wrong."""
    count = int(rng.integers(1, 12))
    begins = rng.integers(0, SIZE - 20_000, count)
    sizes = rng.integers(0, 20_000, count)
    if ahead:
        file.will_need(begins, begins + sizes)
    out = np.empty(sizes.sum(), np.uint8)
    file.read_into(out, begins, sizes)
    expected = np.concatenate([DATA_BYTES[b : b + s] for b, s in zip(begins.tolist(), sizes.tolist())])
    if not np.array_equal(out, expected):
        raise AssertionError("wrong bytes")


def fetcher_pid() -> int:
    """The process that reads from storage for this one."""
    return retried(lambda: fetcher().ask("pid", what="a test"))


def end_fetcher() -> None:
    os.kill(fetcher_pid(), signal.SIGKILL)


def blocks_in(cache: Path) -> list[Path]:
    return [path for path in cache.glob(f"u{os.getuid()}/blocks/*/*") if path.name.isdigit()]


def check_folder(cache: Path) -> int:
    """Every block in a cache folder holds the true bytes; returns how many there are."""
    found = 0
    for path in blocks_in(cache):
        with contextlib.suppress(FileNotFoundError):  # evicted just now
            before, data, begin = path.stat(), path.read_bytes(), int(path.name) * BLOCK
            if path.stat()[:2] != before[:2] or path.stat().st_ctime_ns != before.st_ctime_ns:
                continue  # evicted and fetched again meanwhile
            body = data[:-4]
            assert body == DATA_BYTES[begin : begin + BLOCK].tobytes(), f"block {path.name}"
            assert zlib.crc32(body) == int.from_bytes(data[-4:], "little")
            found += 1
    return found


def jobs_of(cache: Path) -> set[Path]:
    return set(cache.glob(f"u{os.getuid()}/jobs/*"))


def wait_for_fetchers(jobs: set[Path]) -> None:
    """Until these have ended; one goes on with what it fetches when its reader is killed."""
    for job in jobs:
        with contextlib.suppress(FileNotFoundError), job.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # held by the process that uses the cache


# -- the ordinary day ---------------------------------------------------------------------------------------


def test_reads_peeks_and_entries(server: Nginx, tmp_path: Path) -> None:
    file = file_of(server.url, tmp_path)
    assert file.size_bytes == SIZE and file.is_remote
    whole = DATA_BYTES.tobytes()
    assert file.peek([(0, 9), (SIZE - 5, SIZE + 100), (7, 7)]) == [whole[:9], whole[-5:], b""]
    rng = np.random.default_rng(1)
    with file:
        for ahead in (True, False) * 10:
            read_some(file, rng, ahead)
    assert file.stats.opens == 1 and 0 < file.stats.bytes_fetched <= SIZE
    words, last = file.arrays(("<i4", 1, 700_000), ("u1", SIZE - 3, 3))
    expected = np.frombuffer(whole, "<i4", 700_000, 1)
    places = rng.integers(-700_000, 700_000, (3, 50))
    assert np.array_equal(words[places], expected[places])
    assert np.array_equal(words[5:600_000:997], expected[5:600_000:997])
    assert words[-1] == expected[-1] and last[:].tolist() == list(whole[-3:])
    with pytest.raises(IndexError):
        words[700_000]
    assert check_folder(tmp_path) == -(-SIZE // BLOCK)


def test_a_file_that_is_cut_where_shards_meet(server: Nginx, tmp_path: Path) -> None:
    """Reads are right, each byte is fetched once, also for a copy; blocks lie between the shards' ends."""
    begins = np.arange(300_000, 2_900_000, 300_000)
    file, other = file_of(server.url, tmp_path), file_of(server.url, tmp_path)
    assert file.size_bytes == SIZE
    for each in (file, other):
        each.cut(begins, begins + 5_000)
    copied: CachedFile = pickle.loads(pickle.dumps(file))
    rng = np.random.default_rng(2)
    for each in (file, copied, other):
        with each:
            each.cut(begins + 7, begins + 9)  # too late
            for ahead in (True, False) * 10:
                read_some(each, rng, ahead)
            out = np.empty(SIZE, np.uint8)
            each.read_into(out, np.array([0]), np.array([SIZE]))
            assert np.array_equal(out, DATA_BYTES)
    assert file.stats.bytes_fetched + copied.stats.bytes_fetched + other.stats.bytes_fetched == SIZE
    sizes = [path.stat().st_size - SUM_BYTES for path in tmp_path.glob(f"u{os.getuid()}/blocks/*/*")]
    assert sum(sizes) == SIZE and max(sizes) <= BLOCK and sizes.count(5_000) == begins.size


def test_blocks_stay_open_until_they_are_evicted(
    server: Nginx, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    whole = os.open

    def noted(path: Any, flags: int, *more: int) -> int:
        if "/blocks/" in str(path):
            opened.append(Path(path).name)
        return whole(path, flags, *more)

    def read(file: CachedFile) -> list[str]:
        """The blocks that are opened to read ten, in pieces that cross their edges."""
        opened.clear()
        out = np.empty(10 * BLOCK, np.uint8)
        begins = np.arange(0, 10 * BLOCK, BLOCK // 2 + 1)
        file.read_into(out, begins, np.minimum(begins + BLOCK // 2 + 1, 10 * BLOCK) - begins)
        assert np.array_equal(out, DATA_BYTES[: 10 * BLOCK])
        return sorted(opened)

    monkeypatch.setattr(os, "open", noted)
    all_ten = [str(block) for block in range(10)]
    with file_of(server.url, tmp_path) as file:
        assert read(file) == all_ten
        assert read(file) == []
        with next(path for path in blocks_in(tmp_path) if path.name == "3").open("r+b") as evicted:
            Path(evicted.name).unlink()
            evicted.truncate(0)
        assert read(file) == all_ten, "what is missing is fetched again"
        assert read(file) == []
        assert file.stats.bytes_fetched == 11 * BLOCK
    links = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    assert not [link for link in links if os.path.lexists(link) and str(tmp_path) in os.readlink(link)]
    with file:
        assert read(file) == all_ten


def test_missing_objects(server: Nginx, tmp_path: Path) -> None:
    folder = Folder(server.url, Cache(tmp_path))
    assert folder.holds("data.bin") and not folder.holds("nothing.bin")
    with pytest.raises(MissingError, match=r"nothing\.bin: no such object"):
        _ = folder.file("nothing.bin").size_bytes


def test_a_pickled_file_reads_on(server: Nginx, tmp_path: Path) -> None:
    file = file_of(server.url, tmp_path)
    with file:
        read_some(file, np.random.default_rng(2))
        copy = pickle.loads(pickle.dumps(file))
        with copy:
            read_some(copy, np.random.default_rng(3))


def read_in_child(url: str, cache: str, seed: int, rounds: int, limit: int, ahead: bool) -> None:
    rng = np.random.default_rng(seed)
    with unhedged(), file_of(url, Path(cache), limit) as file:
        for _ in range(rounds):
            read_some(file, rng, ahead)


def run_children(count: int, *args: Any) -> None:
    cache = Path(args[1])
    ours = jobs_of(cache)  # this process's fetcher stays while any of its files is open
    children = [
        _context.Process(target=read_in_child, args=(*args[:2], seed, *args[2:])) for seed in range(count)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join(600)
    assert [child.exitcode for child in children] == [0] * count
    wait_for_fetchers(jobs_of(cache) - ours)


def test_processes_fetch_each_block_once(server: Nginx, tmp_path: Path) -> None:
    before = server.fetched_bytes()
    run_children(4, server.url, str(tmp_path), 40, 1 << 30, True)
    held = check_folder(tmp_path)
    assert held == -(-SIZE // BLOCK)
    assert server.fetched_bytes() - before == SIZE


@only_soak
def test_evictions_under_readers(server: Nginx, tmp_path: Path) -> None:
    """A cache far smaller than what is read: blocks come and go all the time, and every byte is right."""
    limit = 20 * BLOCK
    run_children(3, server.url, str(tmp_path), 60, limit, True)
    held = sum(path.stat().st_size - SUM_BYTES for path in blocks_in(tmp_path))
    assert held <= limit + BLOCK
    check_folder(tmp_path)


def test_threads_share_a_file(server: Nginx, tmp_path: Path) -> None:
    with file_of(server.url, tmp_path, 40 * BLOCK) as file, ThreadPoolExecutor(8) as pool:

        def read(seed: int) -> None:
            for turn in range(10):
                read_some(file, np.random.default_rng([seed, turn]))

        assert list(pool.map(read, range(16))) == [None] * 16


def test_a_forked_child_has_a_fetcher_of_its_own(server: Nginx, tmp_path: Path) -> None:
    with file_of(server.url, tmp_path) as file:
        read_some(file, np.random.default_rng(4))
        child = os.fork()
        if child == 0:
            code = 1
            try:
                fresh = file_of(server.url, tmp_path)
                with fresh:
                    read_some(fresh, np.random.default_rng(5))
                    read_some(file, np.random.default_rng(6))
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        read_some(file, np.random.default_rng(7))


def test_a_forked_child_knows_nothing_of_its_parents_objects(tmp_path: Path) -> None:
    """Files that a child opens anew are not taken for those that its parent had opened."""
    needs("nginx")
    (tmp_path / "served").mkdir()
    for name in "abcd":
        (tmp_path / "served" / name).write_bytes(name.encode() * 100)
    with Nginx(tmp_path / "served") as own:
        folder = Folder(own.url, Cache(tmp_path / "cache"))
        files = {name: folder.file(name) for name in "abcd"}
        assert files["a"].peek([(0, 2)]) == [b"aa"] and files["b"].peek([(0, 2)]) == [b"bb"]
        child = os.fork()
        if child == 0:
            try:
                told = [files[name].peek([(2, 4)])[0] for name in "cdba"]
                os._exit(0 if told == [b"cc", b"dd", b"bb", b"aa"] else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_peeks_are_fetched_once_for_all_processes(server: Nginx, tmp_path: Path) -> None:
    file = file_of(server.url, tmp_path)
    assert file.peek([(11, 45)]) == [DATA_BYTES[11:45].tobytes()]
    child = os.fork()
    if child == 0:
        os._exit(0 if file.peek([(11, 45)]) == [DATA_BYTES[11:45].tobytes()] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert [request.range for request in server.requests()].count("bytes=11-44") == 1
    file.look_again()
    until = time.monotonic() + 600
    while [request.range for request in server.requests()].count("bytes=11-44") == 1:
        assert file.peek([(11, 45)]) == [DATA_BYTES[11:45].tobytes()] and time.monotonic() < until


def test_a_glance_takes_few_requests_and_the_node_keeps_nothing(server: Nginx, tmp_path: Path) -> None:
    file, before = file_of(server.url, tmp_path), len(server.requests())
    CachedFile.glance([file], [100])
    spans = [(0, 50), (50, 100), (90, 110), (SIZE - 5, SIZE + 5), (SIZE + 5, SIZE + 9)]
    assert file.size_bytes == SIZE
    assert file.peek(spans) == [DATA_BYTES[begin:end].tobytes() for begin, end in spans]
    asked = [(each.method, each.range) for each in server.requests()[before:] if each.status != 404]
    ranges = ("bytes=0-99", "bytes=90-109", f"bytes={SIZE - 5}-{SIZE - 1}")
    assert sorted(asked) == sorted(("GET", each) for each in ranges)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    out = np.empty(100, np.uint8)
    with file:
        file.read_into(out, np.array([40 * BLOCK]), np.array([100]))
    assert np.array_equal(out, DATA_BYTES[40 * BLOCK : 40 * BLOCK + 100])


def test_an_object_that_is_replaced_after_a_glance(tmp_path: Path) -> None:
    needs("nginx")
    (tmp_path / "served").mkdir()
    (tmp_path / "served/data.bin").write_bytes(DATA_BYTES.tobytes())
    with Nginx(tmp_path / "served") as own, file_of(own.url, tmp_path / "cache") as file:
        CachedFile.glance([file], [100])
        (tmp_path / "served/data.bin").write_bytes(DATA_BYTES[::-1].tobytes())
        os.utime(tmp_path / "served/data.bin", (1, 1))
        with pytest.raises(ChangedError, match="was replaced"):
            file.peek([(200, 300)])
        with pytest.raises(ChangedError, match=r"was .* when this run opened it"):
            file.read_into(np.empty(9, np.uint8), np.array([0]), np.array([9]))


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_glance_at_an_object_that_was_replaced_while_the_node_knows_the_old_one(
    tmp_path: Path, when: str
) -> None:
    """Its new version is read, and what the node knows of the old one is forgotten. when: against the glance."""
    needs("nginx")
    (tmp_path / "served").mkdir()
    stored, cache = tmp_path / "served/data.bin", tmp_path / "cache"
    stored.write_bytes(b"old")
    with Nginx(tmp_path / "served") as own:
        assert file_of(own.url, cache).size_bytes == 3
        end_fetcher()
        with file_of(own.url, cache) as file:
            if when == "before":
                stored.write_bytes(DATA_BYTES.tobytes())
            CachedFile.glance([file], [1])
            if when == "before":
                out = np.empty(9, np.uint8)
                file.read_into(out, np.array([5]), np.array([9]))
                assert np.array_equal(out, DATA_BYTES[5:14])
            else:
                stored.write_bytes(DATA_BYTES.tobytes())
                with pytest.raises(ChangedError, match="was replaced"):
                    file.peek([(0, 3)])
        assert file_of(own.url, cache).size_bytes == SIZE


# -- restarts and deaths --------------------------------------------------------------------------------------


def test_a_restart_reuses_what_is_valid_and_nothing_else(server: Nginx, tmp_path: Path) -> None:
    begins, sizes = np.array([0]), np.array([SIZE])
    out = np.empty(SIZE, np.uint8)
    with file_of(server.url, tmp_path) as file:
        file.read_into(out, begins, sizes)
        end_fetcher()
    before = server.fetched_bytes()
    with file_of(server.url, tmp_path) as file:
        file.read_into(out, begins, sizes)
        assert np.array_equal(out, DATA_BYTES) and file.stats.bytes_fetched == 0
        end_fetcher()
    assert server.fetched_bytes() == before
    (block,) = (path for path in blocks_in(tmp_path) if path.name == "5")
    with block.open("r+b") as stream:  # a disk that lies
        stream.seek(17)
        stream.write(bytes([int(DATA_BYTES[5 * BLOCK + 17]) ^ 1]))
    (torn,) = (path for path in blocks_in(tmp_path) if path.name == "9")
    os.truncate(torn, 1000)  # a machine that lost power
    with file_of(server.url, tmp_path) as file:
        file.read_into(out, begins, sizes)
        assert np.array_equal(out, DATA_BYTES) and file.stats.bytes_fetched == 2 * BLOCK


def test_a_node_asks_once_what_an_object_is(server: Nginx, tmp_path: Path) -> None:
    """For half a minute, or until somebody finds that it has changed."""

    def asked() -> int:
        return sum(each.method == "HEAD" and each.status == 200 for each in server.requests())

    before = asked()
    for _ in range(3):
        end_fetcher()
        assert file_of(server.url, tmp_path).size_bytes == SIZE
    assert asked() == before + 1
    (answer,) = (path for path in tmp_path.glob("u*/answers/stat-*") if not path.suffix)
    assert answer.stat().st_mode & 0o077 == 0
    for age_s, more in ((29, 0), (31, 1), (-1, 2)):
        said, _ = read_answer(answer)
        write_answer(answer, [said, time.time() - age_s])
        assert file_of(server.url, tmp_path).size_bytes == SIZE
        assert asked() == before + 1 + more
    (size, _), _ = read_answer(answer)
    write_answer(answer, [[size, "an older one"], time.time()])
    with file_of(server.url, tmp_path) as stale, pytest.raises(ChangedError):
        stale.read_into(np.empty(9, np.uint8), np.array([0]), np.array([9]))
    with file_of(server.url, tmp_path) as file:
        file.read_into(np.empty(9, np.uint8), np.array([0]), np.array([9]))
    whole = answer.read_bytes()
    for damaged in (whole[: len(whole) // 2], whole.replace(b"[[", b"[[1", 1), b""):
        answer.write_bytes(damaged)  # a machine that lost power, a disk that fails
        assert file_of(server.url, tmp_path).size_bytes == SIZE


def test_what_a_killed_process_left_is_removed(server: Nginx, tmp_path: Path) -> None:
    with file_of(server.url, tmp_path) as file:
        read_some(file, np.random.default_rng(1))
    folder = blocks_in(tmp_path)[0].parent
    (folder / "1000.part").write_bytes(bytes(BLOCK))
    (folder.parent / "other").mkdir()
    run_children(1, server.url, str(tmp_path), 1, 1 << 30, False)
    assert not list(tmp_path.rglob("*.part")) and not (folder.parent / "other").exists()


def test_a_fetcher_leaves_when_its_reader_has(server: Nginx, tmp_path: Path) -> None:
    ours, theirs = _context.Pipe(duplex=False)
    child = _context.Process(
        target=read_forever, args=(server.url, str(tmp_path), 1, 1 << 30, theirs), daemon=True
    )
    child.start()
    theirs.close()
    pid = ours.recv()
    forked = os.fork()
    if forked == 0:  # keeps this test's own connections, which must not keep a fetcher
        time.sleep(3600)
        os._exit(0)
    child.kill()
    child.join(600)
    until = time.monotonic() + 600
    while b"fetcher/start" in command_of(pid):
        assert time.monotonic() < until
        time.sleep(0.1)
    os.kill(forked, signal.SIGKILL)
    os.waitpid(forked, 0)


def command_of(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def read_forever(url: str, cache: str, seed: int, limit: int, pipe: Any) -> None:
    rng = np.random.default_rng(seed)
    with file_of(url, Path(cache), limit) as file:
        while True:
            pipe.send(fetcher_pid())
            read_some(file, rng, ahead=bool(rng.integers(2)))


def test_deaths(server: Nginx, tmp_path: Path) -> None:
    """SIGKILL to fetchers and readers at random; what is published is right, and nobody reads wrong bytes."""
    rng, limit, kills = random.Random(11), 24 * BLOCK, 0

    def started(seed: int) -> tuple[Any, Any]:
        ours, theirs = _context.Pipe(duplex=False)
        child = _context.Process(
            target=read_forever, args=(server.url, str(tmp_path), seed, limit, theirs), daemon=True
        )
        child.start()
        theirs.close()
        return child, ours

    def still_reads(reader: tuple[Any, Any], rounds: int) -> int:
        """The last fetcher that it told of."""
        for _ in range(rounds):
            assert reader[1].poll(600), "a reader hangs"
            pid = reader[1].recv()  # EOFError where a reader met wrong bytes
        return pid

    readers = [started(seed) for seed in range(3)]
    try:
        while kills < cases(4, 40):
            at = rng.randrange(3)
            if rng.random() < 0.6:
                pid = still_reads(readers[at], 1)
                if b"fetcher/start" in command_of(pid):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            else:
                readers[at][0].kill()
                readers[at][0].join(600)
                readers[at] = started(100 + kills)
            kills += 1
            check_folder(tmp_path)
            still_reads(readers[rng.randrange(3)], rng.randint(1, 3))
        for reader in readers:
            while reader[1].poll():
                reader[1].recv()
            still_reads(reader, 3)
    finally:
        for child, _ in readers:
            child.kill()
            child.join(600)
    wait_for_fetchers(jobs_of(tmp_path))
    assert check_folder(tmp_path) > 0
    run_children(1, server.url, str(tmp_path), 1, limit, False)
    assert not list(tmp_path.rglob("*.part"))
    assert sum(path.stat().st_size - SUM_BYTES for path in blocks_in(tmp_path)) <= limit + BLOCK


# -- what must be refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit_blocks", [1, 3, 20])
def test_a_read_that_exceeds_the_cache_comes_piece_by_piece(
    server: Nginx, tmp_path: Path, limit_blocks: int
) -> None:
    before = server.fetched_bytes()
    with unhedged(), file_of(server.url, tmp_path, limit_blocks * BLOCK) as file:
        out = np.empty(SIZE, np.uint8)
        file.read_into(out, np.array([0]), np.array([SIZE]))
        assert np.array_equal(out, DATA_BYTES)
        assert file.stats.bytes_fetched == SIZE
        held = sum(path.stat().st_size - SUM_BYTES for path in blocks_in(tmp_path))
        assert held <= (limit_blocks + 1) * BLOCK
    assert server.fetched_bytes() - before == SIZE


def test_what_is_announced_beyond_the_cache_is_fetched_once(server: Nginx, tmp_path: Path) -> None:
    before = server.fetched_bytes()
    begins = np.arange(0, SIZE - BLOCK, BLOCK // 2)
    with unhedged(), file_of(server.url, tmp_path, 5 * BLOCK) as file:
        file.will_need(begins, begins + BLOCK)
        for at in range(0, begins.size, 16):  # each read is of more blocks than the cache holds
            some = begins[at : at + 16]
            out = np.empty(some.size * BLOCK, np.uint8)
            file.read_into(out, some, np.full(some.size, BLOCK))
            assert np.array_equal(out, np.concatenate([DATA_BYTES[b : b + BLOCK] for b in some.tolist()]))
    # the block at the joint of two reads may come again
    assert server.fetched_bytes() - before <= SIZE + 5 * BLOCK


def test_too_small_a_cache_is_told_once(
    server: Nginx, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with file_of(server.url, tmp_path, 5 * BLOCK) as file:
        for _ in range(3):
            file.read_into(np.empty(SIZE, np.uint8), np.array([0]), np.array([SIZE]))
        fetcher_pid()  # what it has told by now, has come
    (told,) = (each.getMessage() for each in caplog.records if "evicted" in each.getMessage())
    assert re.search(r"of \d+ bytes fetched, \d+ had been .* evicted; raise limit_bytes above 327680$", told)


def test_a_block_that_exceeds_the_cache_is_refused(server: Nginx, tmp_path: Path) -> None:
    cache = Cache(tmp_path, limit_bytes=BLOCK, block_bytes=BLOCK)
    file = CachedFile(f"{server.url}/data.bin", cache, content=Content(stored_bytes=SIZE))
    told = rf"{SIZE} bytes are fetched at one time, the cache .* is limited to {BLOCK}; raise limit_bytes$"
    with file, pytest.raises(CacheError, match=told):
        file.read_into(np.empty(1, np.uint8), np.array([0]), np.array([1]))


@pytest.mark.parametrize("sizes", [{"block_bytes": 1000}, {"block_bytes": 0}, {"limit_bytes": 5}])
def test_sizes_that_cannot_be(sizes: dict[str, int]) -> None:
    with pytest.raises(CacheError):
        Cache("x", **sizes)


def test_a_peek_is_served_where_no_block_has_room(server: Nginx, tmp_path: Path) -> None:
    disk = tmp_path / "small"
    with small_disk(disk, "1m"):
        file = file_of(server.url, disk)
        assert file.size_bytes == SIZE
        with contextlib.suppress(OSError), (disk / "fill").open("wb", buffering=0) as fill:
            while True:
                fill.write(bytes(4096))
        assert file.peek([(5, 100_000), (7, 9)]) == [
            DATA_BYTES[5:100_000].tobytes(),
            DATA_BYTES[7:9].tobytes(),
        ]
        end_fetcher()


def test_a_file_is_left_while_storage_does_not_answer(tmp_path: Path) -> None:
    asked = threading.Event()

    def silent(number: int, method: str, path: str) -> Fault:
        asked.set()
        return Fault(answer=(404, b""), stall=True)

    def opens() -> None:
        with pytest.raises(MissingError):
            file.will_need(np.array([0]), np.array([10]))

    with Faults("", silent) as storage:
        file = CachedFile(f"{storage.url}/x", Cache(tmp_path))
        file.__enter__()
        opening = threading.Thread(target=opens, daemon=True)
        opening.start()
        assert asked.wait(600)
        leaving = threading.Thread(target=lambda: (file.forget_needs(), file.__exit__()), daemon=True)
        leaving.start()
        leaving.join(600)
        assert not leaving.is_alive() and opening.is_alive()
        storage.release()
        opening.join(600)
        assert not opening.is_alive()
        end_fetcher()


@pytest.mark.parametrize("size", ["1m", "100m,nr_inodes=23"])
def test_a_full_disk_holds_what_is_read_right_now(server: Nginx, tmp_path: Path, size: str) -> None:
    """Whether bytes or inodes are used up; the limit is 1 GiB."""
    disk = tmp_path / "small"
    with small_disk(disk, size), file_of(server.url, disk) as file:
        out = np.empty(SIZE, np.uint8)
        for _ in range(2):
            file.will_need(np.array([0]), np.array([SIZE]))
            file.read_into(out, np.array([0]), np.array([SIZE]))
            assert np.array_equal(out, DATA_BYTES)
        read_some_small(file)
        assert check_folder(disk) > 0
        end_fetcher()


def read_some_small(file: CachedFile) -> None:
    out = np.empty(BLOCK, np.uint8)
    for block in range(40):
        begin = block * BLOCK
        file.read_into(out, np.array([begin]), np.array([BLOCK]))
        assert np.array_equal(out, DATA_BYTES[begin : begin + BLOCK])


def as_nobody(function: Callable[..., None], *args: Any) -> int:
    """Run in a forked child as another user; its exit code."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgid(65534)
            os.setuid(65534)
            function(*args)
            code = 0
        except CacheError:
            code = 3
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def make_own_part(cache: Path, of_the_other: Path) -> None:
    own = Cache(cache).make()
    (own / "mine").write_text("mine")
    with pytest.raises(PermissionError):
        list(of_the_other.iterdir())
    with pytest.raises(PermissionError):
        of_the_other.rename(cache / "stolen")


def test_two_users_share_a_folder(server: Nginx, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Each has a part of it; what was read with one's credentials is not shown to the other."""
    needs_root()
    folder = tmp_path_factory.mktemp("both")
    for parent in (folder, *folder.parents):
        if parent.name.startswith(("both", "popen", "pytest")):  # pytest's own, closed to others
            parent.chmod(0o755)
    cache = folder / "cache"
    cache.mkdir()
    cache.chmod(0o1777)
    with file_of(server.url, cache) as file:
        read_some(file, np.random.default_rng(1))
        assert as_nobody(make_own_part, cache, cache / "u0") == 0
        read_some(file, np.random.default_rng(2))
    assert sorted(path.name for path in cache.iterdir()) == ["u0", "u65534"]


def test_what_the_cache_holds_is_for_its_user_alone(server: Nginx, tmp_path: Path) -> None:
    with file_of(server.url, tmp_path / "cache") as file:
        read_some(file, np.random.default_rng(1))
        found = [tmp_path / "cache", *(tmp_path / "cache").rglob("*")]
    modes = {each.name: stat.S_IMODE(each.stat().st_mode) for each in found}
    assert set(modes.values()) == {0o600, 0o700} and len(modes) > 5, modes


@pytest.mark.parametrize("how", ["another's", "open to all", "open to a group", "behind another's link"])
def test_a_folder_that_others_could_swap_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Whoever may rename what lies in a parent could put a folder of their own there, and read the corpus."""
    needs_root()
    parent = tmp_path / "parent"
    parent.mkdir()
    folder = parent / "cache"
    match how:
        case "another's":
            os.chown(parent, 65534, 65534)
            parent.chmod(0o1777)
        case "open to all":
            parent.chmod(0o777)
        case "open to a group":
            os.chown(parent, 0, 65534)
            parent.chmod(0o770)
        case _:
            (parent / "real").mkdir()
            (parent / "link").symlink_to("real")
            os.chown(parent / "link", 65534, 65534, follow_symlinks=False)
            folder = parent / "link" / "cache"
    with pytest.raises(CacheError, match=r"who could replace|is another user.s link"):
        Cache(folder).make()
    assert not folder.exists()
    os.chown(parent, 0, 0)
    parent.chmod(0o1777)
    if how == "behind another's link":
        os.chown(parent / "link", 0, 0, follow_symlinks=False)
    assert Cache(folder).make() == folder / "u0" and (folder / "u0").is_dir()


def test_without_a_folder_each_user_has_a_cache_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MESHFEED_CACHE", raising=False)
    assert Cache().path.name == f"meshfeed-cache-{os.getuid()}"


def test_a_folder_that_many_make_at_once_is_made_once(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "a" / "b" / "cache")
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(lambda _: cache.make(), range(64))) == {cache.own_path}
    assert cache.own_path.is_dir()


def test_another_users_part_is_not_believed(tmp_path: Path) -> None:
    needs_root()
    cache = Cache(tmp_path / "cache")
    cache.path.mkdir()
    cache.own_path.mkdir(mode=0o777)
    os.chown(cache.own_path, 65534, 65534)
    with pytest.raises(CacheError, match="belongs to another user"):
        cache.make()


def test_a_folder_that_cannot_be_written(tmp_path_factory: pytest.TempPathFactory) -> None:
    needs_root()
    folder = tmp_path_factory.mktemp("mine")
    for parent in (folder, *folder.parents):
        if parent.name.startswith(("both", "popen", "pytest")):  # pytest's own, closed to others
            parent.chmod(0o755)
    assert as_nobody(lambda: Cache(folder / "cache").make()) == 3


def test_an_object_that_is_replaced_under_the_readers(tmp_path: Path) -> None:
    needs("nginx")
    (tmp_path / "served").mkdir()
    (tmp_path / "served/data.bin").write_bytes(DATA_BYTES.tobytes())
    with Nginx(tmp_path / "served") as own:
        first, second = file_of(own.url, tmp_path / "one"), file_of(own.url, tmp_path / "two")
        out = np.empty(100, np.uint8)
        with first, second:
            for file in (first, second):
                file.read_into(out, np.array([0]), np.array([100]))
            (tmp_path / "served/data.bin").write_bytes(DATA_BYTES[::-1].tobytes())
            os.utime(tmp_path / "served/data.bin", (1, 1))
            for file in (first, second):
                with pytest.raises(ChangedError, match=r"data\.bin: bytes \d+\.\.\d+: it was replaced"):
                    file.read_into(out, np.array([40 * BLOCK]), np.array([100]))
            end_fetcher()  # the next one finds the new version, which is not what this run opened
            with pytest.raises(ChangedError, match=r"was .* when this run opened it"):
                first.read_into(out, np.array([40 * BLOCK]), np.array([100]))


def test_pins_of_the_dead_are_freed(server: Nginx, tmp_path: Path) -> None:
    """A reader that announced the whole cache and died does not keep others from it."""
    limit = 10 * BLOCK
    child = os.fork()
    if child == 0:
        try:
            file = file_of(server.url, tmp_path, limit)
            with file:
                file.will_need(np.array([0]), np.array([limit]))
                file.read_into(np.empty(10, np.uint8), np.array([0]), np.array([10]))
                os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    os.waitpid(child, 0)
    run_children(2, server.url, str(tmp_path), 10, 40 * BLOCK, False)


@pytest.fixture(autouse=True)
def no_threads_left() -> Iterator[None]:
    yield
    assert threading.active_count() < 60
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 4 << 20
