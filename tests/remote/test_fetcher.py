"""What several jobs and accidents do to a node's cache, and what they must not do to each other."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import world
from meshfeed.errors import CacheError, StoreError
from meshfeed.files import Cache
from meshfeed.files.cache.cache import cache_error
from meshfeed.files.local.lock import locked
from meshfeed.remote.blocks import SUM_BYTES
from meshfeed.remote.cached import CachedFile
from meshfeed.remote.errors import options_of_environment, without_credentials
from meshfeed.remote.fetcher import protocol
from services.faults import Fault, Faults
from services.needs import immutable, needs, small_disk
from services.nginx import Nginx

BLOCK, NUM_BLOCKS = 1 << 14, 60
DATA = np.random.default_rng(0).integers(0, 256, BLOCK * NUM_BLOCKS).astype(np.uint8)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nginx]:
    needs("nginx")
    folder = tmp_path_factory.mktemp("served")
    DATA.tofile(folder / "data.bin")
    with Nginx(folder) as nginx:
        yield nginx


def file_of(server: Nginx, cache: Path, limit_blocks: int | None = None) -> CachedFile:
    return file_at(server.url, cache, limit_blocks)


def file_at(url: str, cache: Path, limit_blocks: int | None) -> CachedFile:
    limit = None if limit_blocks is None else limit_blocks * BLOCK
    return CachedFile(f"{url}/data.bin", Cache(cache, limit_bytes=limit, block_bytes=BLOCK))


def read(file: CachedFile, begin: int, num_bytes: int = 100) -> None:
    out = np.empty(num_bytes, np.uint8)
    file.read_into(out, np.array([begin]), np.array([num_bytes]))
    assert np.array_equal(out, DATA[begin : begin + num_bytes])


def pinned_in(cache: Path) -> list[int]:
    """The blocks that someone will read."""
    found: list[int] = []
    for path in cache.glob("u*/blocks/*/*"):
        if not path.name.isdigit():
            continue
        try:
            with contextlib.suppress(FileNotFoundError), locked(path, wait=False, create=False):
                pass
        except BlockingIOError:
            found.append(int(path.name))
    return sorted(found)


def wait_until(condition: Any) -> None:
    until = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_what_was_announced_is_pinned_until_it_is_read(server: Nginx, tmp_path: Path) -> None:
    """However often a block was announced: a pin that outlives its reading takes room from those to come."""
    halves = np.arange(0, DATA.size, BLOCK // 2)
    with file_of(server, tmp_path) as file:
        for begin in halves.tolist():
            file.will_need(np.array([begin]), np.array([begin + BLOCK // 2]))
        wait_until(lambda: pinned_in(tmp_path) == list(range(NUM_BLOCKS)))
        for begin in halves.tolist():
            read(file, begin, BLOCK // 2)
        wait_until(lambda: not pinned_in(tmp_path))
        assert not np.any(file._wished)


def test_what_will_not_be_read_is_not_pinned(server: Nginx, tmp_path: Path) -> None:
    with file_of(server, tmp_path) as file:
        file.will_need(np.array([0]), np.array([10 * BLOCK]))
        wait_until(lambda: pinned_in(tmp_path) == list(range(10)))
        file.forget_needs()
        wait_until(lambda: not pinned_in(tmp_path))


def test_announced_blocks_leave_room_for_what_is_needed_now(server: Nginx, tmp_path: Path) -> None:
    with file_of(server, tmp_path, 12) as file:
        file.will_need(np.array([0]), np.array([40 * BLOCK]))
        wait_until(lambda: len(pinned_in(tmp_path)) >= 3)
        for block in range(40, 52):
            read(file, block * BLOCK)
        read(file, 40 * BLOCK, 12 * BLOCK)
        for block in range(40):  # all of them come in the end, however far ahead they were announced
            read(file, block * BLOCK, BLOCK)
        held = sum(path.stat().st_size - SUM_BYTES for path in tmp_path.glob("u*/blocks/*/*"))
        assert held <= 13 * BLOCK


def keep_open(url: str, cache: str, limit_blocks: int, pipe: Any) -> None:
    with file_at(url, Path(cache), limit_blocks) as file:
        read(file, 0)
        pipe.send("ready")
        pipe.recv()
        read(file, 0, 30 * BLOCK)
        pipe.send("done")
        pipe.recv()


def test_a_smaller_limit_of_another_job_harms_nobody(server: Nginx, tmp_path: Path) -> None:
    ours, theirs = world.context.Pipe()
    large = world.context.Process(target=keep_open, args=(server.url, str(tmp_path), 40, theirs))
    large.start()
    assert ours.recv() == "ready"
    with file_of(server, tmp_path, 4) as small:
        read(small, 0)
        ours.send("read")
        assert ours.recv() == "done"
        read(small, 40 * BLOCK, 10 * BLOCK)
        ours.send("end")
        large.join(600)
        wait_until(lambda: held_after_a_read(small, tmp_path) <= 5 * BLOCK)  # once the other job is gone
    os.kill(protocol.retried(lambda: protocol.fetcher().ask("pid", what="")), 9)
    with file_of(server, tmp_path) as silent:
        assert held_after_a_read(silent, tmp_path) <= 5 * BLOCK  # what the folder was given last


def held_after_a_read(file: CachedFile, cache: Path) -> int:
    """Bytes in the cache once all has been evicted and ten blocks have been read."""
    for path in cache.glob("u*/blocks/*/*"):
        os.truncate(path, 0)
    shutil.rmtree(next(cache.glob("u*/blocks/*")))
    read(file, 20 * BLOCK, 10 * BLOCK)
    return sum(path.stat().st_size - SUM_BYTES for path in cache.glob("u*/blocks/*/*"))


def test_an_interrupted_reader_leaves_nothing_held(
    server: Nginx, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with file_of(server, tmp_path, 16) as file:
        read(file, 0)

        def interrupt(*args: Any) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(protocol.Future, "result", interrupt)
            with pytest.raises(KeyboardInterrupt):
                read(file, BLOCK, 12 * BLOCK)
        read(file, 20 * BLOCK, 12 * BLOCK)
        wait_until(lambda: not pinned_in(tmp_path))


def test_a_folder_that_a_cleaner_removed_is_made_again(server: Nginx, tmp_path: Path) -> None:
    with file_of(server, tmp_path) as file:
        read(file, 0)
        for block in (3, 0, 7):
            shutil.rmtree(file._opened.folder)
            read(file, block * BLOCK)
        os.truncate(file._opened.folder / "7", 10)
        read(file, 7 * BLOCK)
        shutil.rmtree(tmp_path)
        with pytest.raises(CacheError, match="was the cache folder cleared"):
            read(file, 9 * BLOCK)
    with file_of(server, tmp_path) as file:
        read(file, 9 * BLOCK)


@pytest.mark.parametrize("seed", range(12))
def test_a_cache_folder_that_is_removed_at_any_time(server: Nginx, tmp_path: Path, seed: int) -> None:
    """Also while blocks are fetched into it."""
    rng, cache = random.Random(seed), tmp_path / "cache"
    with Faults(server.url) as faults, file_at(faults.url, cache, 20) as file:
        read(file, 0)
        faults.plan = lambda *_: Fault(delay_s=rng.uniform(0, 0.02))
        remove = threading.Timer(rng.uniform(0, 0.2), shutil.rmtree, [cache], {"ignore_errors": True})
        remove.start()
        with pytest.raises(CacheError, match="was the cache folder cleared during this run"):
            while True:
                read(file, rng.randrange(NUM_BLOCKS - 4) * BLOCK, 3 * BLOCK)
        remove.join()


def test_a_cache_folder_that_becomes_immutable(server: Nginx, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with file_of(server, cache) as file:
        read(file, 0)
        with immutable(cache):
            told = (
                r"/cache/u0/.*: Operation not permitted; this user cannot write to the cache folder; allow it"
            )
            with pytest.raises(CacheError, match=told):
                read(file, 9 * BLOCK)
            file._used[0] = 0  # as for a reader that has not read it lately
            read(file, 0)
            with pytest.raises(CacheError, match=told):
                Cache(cache).kept()
            with pytest.raises(CacheError, match=told), Cache(cache).anew():
                pass
        read(file, 9 * BLOCK)


@pytest.mark.parametrize(
    ("code", "cure"),
    [
        (errno.EDQUOT, "raise the quota"),
        (errno.EPERM, "this user cannot write to the cache folder; allow it or give another"),
        (errno.ESTALE, "was the cache folder cleared"),
        (errno.EIO, "check the disk"),
    ],
)
def test_an_error_of_the_caches_disk_names_the_path_and_what_to_do(code: int, cure: str) -> None:
    where = Path("/cache/u0")
    told = [
        str(cache_error(where, error)) for error in (OSError(code, "x"), OSError(code, "x", "/cache/u0/b"))
    ]
    assert [each.partition("; ")[0] for each in told] == ["/cache/u0: x", "/cache/u0/b: x"]
    assert all(cure in each for each in told)


def test_a_disk_that_is_full_before_the_first_block(server: Nginx, tmp_path: Path) -> None:
    disk = tmp_path / "small"
    with small_disk(disk, "256k"):
        cache = Cache(disk, block_bytes=4096)
        cache.make()
        with (disk / "filler").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
            while True:
                filler.write(bytes(4096))
        file = CachedFile(f"{server.url}/data.bin", cache)
        told = "No space left on device; free space and inodes on this disk, raise the quota"
        with file:
            with pytest.raises(CacheError, match=told):
                read(file, 0)
            (disk / "filler").unlink()
            read(file, 0, DATA.size)  # at once, on a disk that holds a quarter of it
        os.kill(protocol.retried(lambda: protocol.fetcher().ask("pid", what="")), 9)


def test_a_fetcher_is_given_its_credentials_with_each_request() -> None:
    environ = {"AWS_ENDPOINT_URL": "http://a", "AZURE_STORAGE_TOKEN": "b", "PATH": "/bin", "HTTP_PROXY": "c"}
    assert without_credentials(environ) == {"PATH": "/bin", "HTTP_PROXY": "c"}
    assert options_of_environment("s3://bucket", environ) == {"aws_endpoint_url": "http://a"}


def killed_starts(monkeypatch: pytest.MonkeyPatch, folder: Path, kills: int) -> Path:
    """The next fetchers of this process are killed while they start; the file counts them."""
    count = folder / "starts"
    script = folder / "start.py"
    script.write_text(
        "import os, runpy, signal, sys\n"
        f"with open({str(count)!r}, 'a') as told: told.write('x')\n"
        f"if os.path.getsize({str(count)!r}) <= {kills}: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"runpy.run_path({str(protocol._SCRIPT)!r}, run_name='__main__')\n"
    )
    mine: Any = protocol.fetcher.__self__
    monkeypatch.setattr(mine, "_client", None)
    monkeypatch.setattr(protocol, "_SCRIPT", script)
    return count


def test_a_fetcher_that_is_killed_while_it_starts_is_started_again(
    server: Nginx, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = killed_starts(monkeypatch, tmp_path, 2)
    with file_of(server, tmp_path / "cache") as file:
        read(file, 0)
    assert count.read_text() == "xxx"


def test_fetchers_that_are_always_killed_are_given_up(
    server: Nginx, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = killed_starts(monkeypatch, tmp_path, 1000)
    monkeypatch.setattr(protocol, "_MOST_FETCHERS", 3)
    with (
        file_of(server, tmp_path / "cache") as file,
        pytest.raises(StoreError, match="3 storage fetchers in a row"),
    ):
        read(file, 0)
    assert count.read_text() == "xxx"
