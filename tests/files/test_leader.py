"""What several jobs, users and accidents do to a node's leader, and what they must not do to each other."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshfeed.errors import AccessError, CacheError, StoreError
from meshfeed.files import Cache, message
from meshfeed.files.bring import CachedObject
from meshfeed.files.cached import CachedFile
from meshfeed.files.leader import OBJECT, socket_name
from meshfeed.files.link import link_of
from meshfeed.files.refusals import options_of_environment, without_credentials
from services.needs import needs, needs_root
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
    limit = None if limit_blocks is None else limit_blocks * BLOCK
    return CachedFile(f"{server.url}/data.bin", Cache(cache, limit_bytes=limit, block_bytes=BLOCK))


def read(file: CachedFile, begin: int, num_bytes: int = 100) -> None:
    out = np.empty(num_bytes, np.uint8)
    file.read_into(out, np.array([begin]), np.array([num_bytes]))
    assert np.array_equal(out, DATA[begin : begin + num_bytes])


def counts_of(file: CachedFile) -> dict[str, int]:
    return file._ask("counts")[0]["counts"]


def test_what_was_read_is_wished_for_no_more(server: Nginx, tmp_path: Path) -> None:
    """However often a block was announced: a wish that outlives its reading takes room from those to come."""
    halves = np.arange(0, DATA.size, BLOCK // 2)
    with file_of(server, tmp_path) as file:
        for begin in halves.tolist():
            file.will_need(np.array([begin]), np.array([begin + BLOCK // 2]))
        assert counts_of(file)["num_wished"] == NUM_BLOCKS
        for begin in halves.tolist():
            read(file, begin, BLOCK // 2)
        assert counts_of(file)["num_wished"] == 0
        assert not file._wished


def test_a_smaller_limit_of_another_job_harms_nobody(server: Nginx, tmp_path: Path) -> None:
    with file_of(server, tmp_path, 40) as large, file_of(server, tmp_path, 2) as small:
        read(small, 0)
        read(large, 0, 30 * BLOCK)
        assert counts_of(small)["limit_bytes"] == 40 * BLOCK
        link_of(large._cache).close()
        while counts_of(small)["limit_bytes"] != 2 * BLOCK:
            pass  # until the leader has heard of it
        with pytest.raises(CacheError, match=r"3 blocks are needed at one time.*limited to 32768"):
            read(small, 40 * BLOCK, 3 * BLOCK)
        with file_of(server, tmp_path) as silent:
            assert counts_of(silent)["limit_bytes"] == 2 * BLOCK
            link_of(small._cache).close()
            while counts_of(silent)["clients"] > 1:
                pass
            assert counts_of(silent)["limit_bytes"] == 2 * BLOCK, "what the folder was given last"


def test_an_interrupted_reader_leaves_nothing_held(
    server: Nginx, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with file_of(server, tmp_path, 16) as file:
        read(file, 0)

        def interrupt(*args: Any) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(file._link, "_awaited", interrupt)
            with pytest.raises(KeyboardInterrupt):
                read(file, BLOCK, 12 * BLOCK)
        assert counts_of(file)["firm_bytes"] == 0
        read(file, 20 * BLOCK, 12 * BLOCK)


def test_a_folder_that_a_new_leader_made_anew(server: Nginx, tmp_path: Path) -> None:
    """A cleaner took a file away, the leader was killed: who had the object open reads the new folder."""
    with file_of(server, tmp_path) as file:
        read(file, 0)
        hello = {"do": "hello", "version": message.VERSION, "limit_bytes": None}
        pid = file._link.ask(file._link.connected(), **hello)[0]["pid"]
        (file._opened.folder / OBJECT).unlink()
        os.kill(pid, signal.SIGKILL)
        for block in (3, 0, 7):
            read(file, block * BLOCK)


def test_a_disk_that_is_full_before_the_first_block(server: Nginx, tmp_path: Path) -> None:
    """The table of an object must be told so too: a map of it that cannot be written kills by a signal."""
    needs_root()
    disk = tmp_path / "small"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)], check=True)
    try:
        cache = Cache(disk, block_bytes=4096)
        cache.make()
        with (disk / "filler").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
            while True:
                filler.write(bytes(4096))
        file = CachedFile(f"{server.url}/data.bin", cache)
        with file, pytest.raises(CacheError, match="No space left on device"):
            for block in range(NUM_BLOCKS):
                read(file, block * BLOCK)
        link_of(cache).close()
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_another_user_in_the_leaders_place_is_told_nothing(server: Nginx, tmp_path: Path) -> None:
    needs_root()
    cache = Cache(tmp_path / "cache")
    name = socket_name(cache.make())
    ready, ready_end = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgid(65534)
            os.setuid(65534)
            spy = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            spy.bind(name)
            spy.listen()
            os.write(ready_end, b"x")
            code = 3 if spy.accept()[0].recv(1 << 16) else 0
        finally:
            os._exit(code)
    assert os.read(ready, 1) == b"x"
    with pytest.raises(CacheError, match="a process of another user answers instead of its leader"):
        _ = CachedFile(f"{server.url}/data.bin", cache).size_bytes
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_another_user_gets_no_answer_from_a_leader(server: Nginx, tmp_path: Path) -> None:
    needs_root()
    cache = Cache(tmp_path / "cache")
    with CachedFile(f"{server.url}/data.bin", cache) as file:
        read(file, 0)
        name = socket_name(cache.make())
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.setgid(65534)
                os.setuid(65534)
                spy = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                spy.settimeout(60)
                spy.connect(name)
                hello = {"id": 0, "do": "hello", "version": message.VERSION, "limit_bytes": None}
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    spy.sendall(message.encode(hello))
                    code = 3 if message.receive(spy) is not None else 0
                code = 0 if code == 1 else code
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        read(file, BLOCK)


class Refuses:
    def read(self, path: str, begin: int, end: int, tag: str) -> bytes:
        raise AccessError("expired")


class Gives(Refuses):
    def __init__(self) -> None:
        self.asked = 0

    def read(self, path: str, begin: int, end: int, tag: str) -> bytes:
        self.asked += 1
        return bytes(end - begin)


def test_each_job_reads_with_its_own_credentials_first() -> None:
    anything: Any = None
    one = CachedObject("key", "url", anything, "path", "tag", 100)
    mine, other = Gives(), Gives()
    readers: Any = {("me", "a"): mine, ("you", "b"): other, ("them", "c"): Refuses()}
    one.readers = readers
    assert one.read(0, 9, "you").nbytes == 9 and (mine.asked, other.asked) == (0, 1)
    assert one.read(0, 9, "them").nbytes == 9 and mine.asked + other.asked == 2
    one.forget("me")
    one.forget("you")
    with pytest.raises(AccessError):
        one.read(0, 9, "me")
    one.forget("them")
    with pytest.raises(StoreError, match="no client has it open"):
        one.read(0, 9, "me")


def test_a_leader_has_no_credentials_of_its_own() -> None:
    environ = {"AWS_ENDPOINT_URL": "http://a", "AZURE_STORAGE_TOKEN": "b", "PATH": "/bin", "HTTP_PROXY": "c"}
    assert without_credentials(environ) == {"PATH": "/bin", "HTTP_PROXY": "c"}
    assert options_of_environment("s3://bucket", environ) == {"aws_endpoint_url": "http://a"}


def test_messages_that_are_too_large_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message, "_MOST_BYTES", 1000)
    assert message.encode({}, bytes(1000))
    with pytest.raises(StoreError, match="1001 bytes in one message"):
        message.encode({}, bytes(1001))
