"""The fetcher of a reading process: the only process that talks to storage, since obstore must not be forked.

It is a light process without torch, and ends when its reader does: when the other end of its channel closes.
"""

from __future__ import annotations

import base64
import contextlib
import logging
import os
import resource
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from meshfeed.arrays import Longs
from meshfeed.errors import ChangedError, MeshfeedError, StoreError
from meshfeed.files.byte_file import Content
from meshfeed.files.cache.cache import cache_error
from meshfeed.files.sums import Sums, parse
from meshfeed.files.url import is_hub
from meshfeed.remote.answers import forget, recent, shared
from meshfeed.remote.blocks import CacheFolder
from meshfeed.remote.client import Client, LocalReader, Reader
from meshfeed.remote.fetcher.objects import Address, Opened, StoredObject, sums_at
from meshfeed.remote.fetcher.protocol import Channel
from meshfeed.remote.fetcher.schedule import Scheduler
from meshfeed.remote.hub import HubClient
from meshfeed.remote.retries import Stat

_ANSWERERS = 32
_ANSWERS = "answers"
_PEEKED_S = 600.0  # how long a peek is reused: ranks that start together open the same files


class FetcherServer:
    """Answers one reading process. Its public methods answer requests."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._scheduler = Scheduler()
        self._folders: dict[tuple[Path, int], CacheFolder] = {}  # by inode, too: a folder may be recreated
        self._caches = set[Path]()
        self._objects: list[StoredObject] = []
        self._clients: dict[tuple[Any, ...], Client | HubClient] = {}
        self._of_files = LocalReader()
        self._lock = threading.Lock()
        self._answerers = ThreadPoolExecutor(_ANSWERERS, thread_name_prefix="meshfeed-answer")
        # of its own: an answerer waits for what these do
        self._readers = ThreadPoolExecutor(_ANSWERERS, thread_name_prefix="meshfeed-read")

    def serve(self) -> None:
        """Handle messages until the reader is gone."""
        self._scheduler.start()
        with contextlib.suppress(OSError, EOFError):
            while True:
                number, request, arguments = self._channel.receive()
                if number is None:
                    self._advised(getattr(self, request), *arguments)
                else:
                    self._answerers.submit(self._reply, number, getattr(self, request), arguments)

    def _advised(self, heed: Callable[..., None], of: int, *arguments: Any) -> None:
        """Handle a message that needs no answer. It is advice, so an error of the disk is only logged."""
        one = self._objects[of]
        try:
            heed(one, *arguments)
        except FileNotFoundError:
            pass  # the user has removed the folder
        except OSError as error:
            logging.getLogger("meshfeed").warning("%s: %s", one.blocks.folder, error)

    def _reply(self, number: int, ask: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        """Answer a request that needs storage or the disk."""
        try:
            self._channel.send("answer", number, ask(*arguments))
            return
        except MeshfeedError as known:
            error = known
            if isinstance(known, ChangedError):
                self._forget_stats()
        except OSError as of_disk:
            error = cache_error(Path("the cache folder"), of_disk)
        except BaseException as unknown:  # sent to the reader, which would otherwise wait endlessly
            error = StoreError(f"the storage fetcher failed: {type(unknown).__name__}: {unknown}")
        self._channel.send("error", number, error)

    # -- requests -----------------------------------------------------------------------------------------

    def pid(self) -> int:
        return os.getpid()

    def open(
        self,
        address: Address,
        cache: tuple[Path, int | None, int],
        content: Content | None,
        sums: tuple[Address, int] | None,
        joints: tuple[Longs, Longs] | None,
        glanced: str | None,
    ) -> tuple[int, Opened]:
        """Open an object; returns the number by which the reader will name it, and what it is.

        cache: path, limit_bytes and block_bytes. sums: the checksums of its store, and its index there.
        joints: see `StoredObject.of`. glanced: the version that the reader has seen, which is newer than what
        the node knows.
        """
        path, limit_bytes, block_bytes = cache
        all_sums = None if sums is None else self._sums_of(sums[0], path)
        own_sums = None if all_sums is None or sums is None else all_sums.files[sums[1]]
        stat = self._stat(address, path)
        if glanced not in (None, stat.tag):
            self._forget_stats()
            stat = self._stat(address, path)
        with self._lock:
            folder = self._folders.setdefault((path, path.stat().st_ino), CacheFolder(path))
            folder.join(limit_bytes)
        reader = self._reader(address, path)
        one = StoredObject.of(address, reader, stat, folder, block_bytes, content, own_sums, joints)
        with self._lock:
            self._objects.append(one)
            number = len(self._objects) - 1
        fingerprint = None if all_sums is None else all_sums.fingerprint
        check_bytes = 1 if own_sums is None else own_sums.block_bytes
        return number, Opened(one.blocks.folder, one.blocks.cut, stat.tag, fingerprint, check_bytes)

    def need(self, of: int, blocks: Sequence[int]) -> tuple[list[int], int]:
        """Wait for blocks: (those now in the cache, bytes of the object fetched since the last answer)."""
        one = self._objects[of]
        return self._scheduler.need(one, blocks), self._scheduler.take_fetched_bytes(one)

    def list(self, address: Address, cache: Path) -> list[tuple[str, int]]:
        return self._client(address, cache).list(address.path)

    def commit(self, address: Address, cache: Path) -> str:
        return HubClient(address.root, address.options, cache / "hub").commit

    def peek(self, of: int, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Short ranges; storage is asked once for all processes of the node that peek in these minutes."""
        one = self._objects[of]
        size, cache = one.stat.size_bytes, one.blocks.cache.path
        spans = [(begin, max(min(end, size), begin)) for begin, end in ranges]

        def ask() -> list[str]:
            found = self._readers.map(one.read, *zip(*spans)) if spans else ()
            return [base64.b64encode(data).decode() for data in found]

        texts, _ = _shared(cache, "peek", one.address, f"{one.stat.tag} {spans}", *recent(ask, _PEEKED_S))
        return [base64.b64decode(text) for text in texts]

    def glance(self, cache: Path, wanted: Sequence[tuple[Address, int]]) -> list[tuple[Stat, bytes]]:
        """Size and version of objects, and so many of their first bytes. Nothing of it is kept."""

        def at(address: Address, num_bytes: int) -> tuple[Stat, bytes]:
            stat, data = self._client(address, cache).glance(address.path, num_bytes)
            return stat, bytes(data)

        return list(self._readers.map(at, *zip(*wanted)))

    def read(self, address: Address, cache: Path, ranges: Sequence[tuple[int, int]], tag: str) -> list[bytes]:
        """Ranges of a version of an object, of which nothing is kept."""
        client = self._client(address, cache)
        return [bytes(client.read(address.path, begin, end, tag)) for begin, end in ranges]

    # -- messages without an answer -----------------------------------------------------------------------

    def wish(self, one: StoredObject, blocks: Sequence[int]) -> None:
        self._scheduler.wish(one, blocks)

    def release(self, one: StoredObject, blocks: Sequence[int] | None) -> None:
        """Drop announcements: of blocks that were read, or of the whole object."""
        self._scheduler.release(one, blocks)
        one.blocks.cache.trim()

    def look_again(self, one: StoredObject) -> None:
        """Forget peeks: they may be wrong, since storage has no checksums for them."""
        forget(one.blocks.cache.path / _ANSWERS, "peek")

    # -- below --------------------------------------------------------------------------------------------

    def _client(self, address: Address, cache: Path) -> Client | HubClient:
        hub = cache / "hub" if is_hub(address.root) else None
        key = address.root, hub, *sorted(address.options.items())
        with self._lock:
            self._caches.add(cache)
            if key not in self._clients:
                given = address.root, address.options
                self._clients[key] = Client(*given) if hub is None else HubClient(*given, hub)
            return self._clients[key]

    def _reader(self, address: Address, cache: Path) -> Reader:
        return self._client(address, cache) if address.root else self._of_files

    def _stat(self, address: Address, cache: Path) -> Stat:
        """Size and version; of an object in storage, they are at most half a minute old.

        A temporary cache has answers of its own: it is for seeing storage as it is now.
        """
        reader = self._reader(address, cache)
        if not isinstance(reader, Client):
            return reader.stat(address.path)

        def ask() -> list[Any]:
            found = reader.stat(address.path)
            return [found.size_bytes, found.tag]

        return Stat(*_shared(cache, "stat", address, "", *recent(ask))[0])

    def _forget_stats(self) -> None:
        """Ask storage again for sizes and versions: an object was replaced."""
        with self._lock:
            caches = [*self._caches]
        for cache in caches:
            forget(cache / _ANSWERS, "stat")

    def _sums_of(self, address: Address, cache: Path) -> Sums:
        reader, stat = self._reader(address, cache), self._stat(address, cache)

        def ask() -> str:
            return base64.b64encode(sums_at(reader, address, stat)).decode()

        text = _shared(cache, "sums", address, stat.tag, ask, lambda said: True)
        return parse(address.url, base64.b64decode(text))


def _shared(
    cache: Path, kind: str, of: Address, tag: str, ask: Callable[[], Any], is_good: Callable[[Any], bool]
) -> Any:
    identity = [of.root, of.path, *sorted(of.options.items()), tag]
    return shared(cache / _ANSWERS, kind, identity, ask, is_good)


class _ToReader(logging.Handler):
    """Passes log records to the reading process."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        self._channel.send("log", record.levelno, record.getMessage())


def main(descriptor: int) -> None:
    """Serve the reader at the other end of a socket until it is gone."""
    os.umask(0o077)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a pin is an open file
    channel = Channel(socket.socket(fileno=descriptor))
    channel.start()
    logger = logging.getLogger("meshfeed")
    logger.addHandler(_ToReader(channel))
    logger.propagate = False
    try:
        FetcherServer(channel).serve()
    finally:
        os._exit(0)  # threads may wait for storage, or for a lock
