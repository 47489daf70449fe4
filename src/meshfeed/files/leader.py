"""The leader: the cache server of a node and user, which owns a cache folder and is the only process that
fetches.

A client that finds no leader starts one. A leader holds the kernel's lock on a file in the folder. The lock
is released the moment the leader dies; then a client starts the next. It serves processes of its own user
over an abstract Unix socket, which leaves nothing behind, and exits some seconds after the last of them.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import queue
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from meshfeed.errors import CacheError, ChangedError, MeshfeedError, MissingError, StoreError
from meshfeed.files import message
from meshfeed.files.bring import CachedObject, sums_at
from meshfeed.files.byte_file import Content
from meshfeed.files.client import Client, LocalReader, Reader, Stat
from meshfeed.files.facts import facts_of, key_of, name_of
from meshfeed.files.fetch import Fetcher
from meshfeed.files.once import Once
from meshfeed.files.shelf import Shelf
from meshfeed.files.sums import Sums
from meshfeed.files.table import TABLE, Blocks, make_files, num_blocks_of

LOCK, LOG, LIMIT, OBJECT = "leader.lock", "leader.log", "limit", "object.json"
_LINGER_S = 5.0
_ANSWERERS = 32
_DEFAULT_LIMIT_BYTES = 64 << 30
_STATS_KEPT_S = 30.0
_PAUSE_S = 0.1


def socket_name(folder: Path) -> str:
    """The abstract socket of a cache folder's leader. Raises OSError."""
    found = folder.stat()
    return f"\0meshfeed-cache-{os.getuid()}-{found.st_dev:x}-{found.st_ino:x}"


@dataclass(eq=False)
class _Client:
    """A connected process, and its open objects."""

    link: socket.socket
    limit_bytes: int | None = None
    opened: dict[int, CachedObject] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)  # of an object's key, in `opened`
    readers: set[str] = field(default_factory=set)
    outgoing: queue.SimpleQueue[bytes | None] = field(default_factory=queue.SimpleQueue)

    def send(self, say: dict[str, Any], payload: bytes = b"") -> None:
        """Queue a message; does not wait for the other end."""
        self.outgoing.put(message.encode(say, payload))

    def send_all(self) -> None:
        """The thread that sends."""
        with contextlib.suppress(OSError):
            while (data := self.outgoing.get()) is not None:
                self.link.sendall(data)


class Leader:
    """Serves the clients of one cache folder, from `serve` to its end."""

    def __init__(self, folder: Path, listener: socket.socket) -> None:
        self._folder, self._listener = folder, listener
        self._shelf = Shelf(self._last_limit())
        self._fetcher = Fetcher(self._shelf, self._notify_fetched)
        self._objects: dict[str, CachedObject] = {}
        self._readers: dict[str, Reader] = {}
        self._stats = Once[Stat](_STATS_KEPT_S)
        self._sums = Once[Sums](_STATS_KEPT_S)
        self._peeked = Once[bytes]()
        self._clients: set[_Client] = set()
        self._lock = threading.RLock()
        self._answerers = ThreadPoolExecutor(_ANSWERERS, thread_name_prefix="meshfeed-answer")
        self._peekers = ThreadPoolExecutor(_ANSWERERS, thread_name_prefix="meshfeed-peek")

    def serve(self) -> None:
        """Serve until no client has been connected for some seconds."""
        threading.Thread(target=self._adopt_leftovers, daemon=True).start()
        self._listener.settimeout(_LINGER_S)
        while True:
            try:
                link, _ = self._listener.accept()
            except TimeoutError:
                with self._lock:
                    if not self._clients:
                        return
                continue
            except OSError:  # no free descriptor at the moment
                time.sleep(_PAUSE_S)
                continue
            if not message.same_user(link):
                link.close()
                continue
            client = _Client(link)
            with self._lock:
                self._clients.add(client)
            threading.Thread(target=client.send_all, daemon=True).start()
            threading.Thread(target=self._listen, args=(client,), daemon=True).start()

    # -- clients ------------------------------------------------------------------------------------------

    def _listen(self, client: _Client) -> None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, StoreError):
            while (received := message.receive(client.link)) is not None:
                self._handle(client, received[0])
        client.outgoing.put(None)
        self._fetcher.forget(client)
        with self._lock:
            self._clients.discard(client)
            for one in client.opened.values():
                one.forget(client)
            used = set[str]().union(*(other.readers for other in self._clients))
            for unused in self._readers.keys() - used:
                self._readers.pop(unused).close()
            self._set_limit()
            if not self._clients:
                self._forget_answers()  # the next client may find another version
        client.link.close()

    def _forget_answers(self) -> None:
        for known in (self._stats, self._sums, self._peeked):
            known.forget()

    def _handle(self, client: _Client, request: dict[str, Any]) -> None:
        one = client.opened.get(request.get("object", -1))
        match request["do"]:
            case "hello":
                self._hello(client, request)
            case "need" if one is not None:
                self._fetcher.need(client, one, request["blocks"], self._answer_to(client, request))
            case "abandon" if one is not None:
                self._fetcher.abandon(client, one, request["blocks"])
            case "wish" if one is not None:
                self._fetcher.wish(client, one, request["blocks"])
            case "release" if one is not None:
                self._fetcher.release(client, one, request["needs"], firm=True)
                self._fetcher.release(client, one, request["wishes"], firm=False)
            case "forget" if one is not None:
                self._fetcher.forget(client, one)
            case "look again" if one is not None:
                self._peeked.forget(lambda key: key[0] == one.key)
            case _:
                self._answerers.submit(self._reply, client, request)

    def _answer_to(self, client: _Client, request: dict[str, Any]) -> Callable[[MeshfeedError | None], None]:
        def done(error: MeshfeedError | None) -> None:
            if isinstance(error, ChangedError):
                self._forget_answers()
            error_field = {} if error is None else {"error": message.error_to_json(error)}
            client.send({"id": request["id"], **error_field})

        return done

    def _reply(self, client: _Client, request: dict[str, Any]) -> None:
        """Answer requests that need storage or the disk."""
        answers: dict[str, Callable[[_Client, dict[str, Any]], tuple[dict[str, Any], bytes]]] = {
            "open": self._open,
            "exists": self._exists,
            "list": self._list,
            "peek": self._peek,
            "counts": self._counts,
        }
        try:
            answer, payload = answers[request["do"]](client, request)
            client.send({"id": request["id"], **answer}, payload)
        except MeshfeedError as error:
            self._answer_to(client, request)(error)
        except BaseException as error:  # sent to the client, which would otherwise wait endlessly
            text = f"{self._folder}: the leader failed: {type(error).__name__}: {error}"
            client.send({"id": request["id"], "error": message.error_to_json(StoreError(text))})

    def _hello(self, client: _Client, request: dict[str, Any]) -> None:
        if request["version"] != message.VERSION:
            error = CacheError(
                f"{self._folder}: its leader, process {os.getpid()}, runs another version of meshfeed "
                f"({message.VERSION}, here {request['version']}); let its jobs end, or use another cache "
                "folder"
            )
            client.send({"id": request["id"], "error": message.error_to_json(error)})
            return
        with self._lock:
            client.limit_bytes = request["limit_bytes"]
            self._set_limit()
        client.send({"id": request["id"], "pid": os.getpid()})

    def _set_limit(self) -> None:
        """Apply the largest limit of the connected clients, so that no job fails because of another's
        limit."""
        last = self._last_limit()
        limit = max(
            (each.limit_bytes for each in self._clients if each.limit_bytes is not None), default=last
        )
        if limit != last:
            with contextlib.suppress(OSError):
                (self._folder / LIMIT).write_text(str(limit))
        self._fetcher.limit(limit)

    def _last_limit(self) -> int:
        """The last limit of the folder."""
        with contextlib.suppress(OSError, ValueError):
            return int((self._folder / LIMIT).read_text())
        return _DEFAULT_LIMIT_BYTES

    def _notify_fetched(self, holder: Any, one: CachedObject, num_bytes: int) -> None:
        if isinstance(holder, _Client):
            number = holder.numbers.get(one.key)
            if number is not None:
                holder.send({"fetched": num_bytes, "object": number})

    # -- answers ------------------------------------------------------------------------------------------

    def _open(self, client: _Client, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        content = None if request["content"] is None else Content(**request["content"])
        sums = self._sums_of(client, request)
        one = self._object_of(client, request, content, sums)
        with self._lock:
            number = len(client.opened)
            client.opened[number] = one
            client.numbers[one.key] = number
        blocks = one.blocks
        return {
            "object": number,
            "folder": str(blocks.folder),
            "size_bytes": blocks.size_bytes,
            "block_bytes": blocks.block_bytes,
            "tag": one.tag,
            "birth": (blocks.folder / TABLE).stat().st_ino,
            "sums": None if sums is None else sums.fingerprint,
        }, b""

    def _object_of(
        self, client: _Client, request: dict[str, Any], content: Content | None, sums: Sums | None
    ) -> CachedObject:
        reader, stat = self._stat_of(client, request)
        facts = facts_of(request, stat, content, sums)
        key = key_of(request, facts)
        with self._lock:
            if key not in self._objects:
                one = CachedObject(
                    key=key,
                    url=name_of(request),
                    blocks=self._blocks_of(key, facts),
                    path=request["path"],
                    tag=stat.tag,
                    stored_bytes=stat.size_bytes,
                    content=content,
                )
                self._objects[key] = one
                self._fetcher.add(one, one.blocks.doubt_all())
            one = self._objects[key]
            one.readers[client, json.dumps(request["options"], sort_keys=True)] = reader
            one.path, one.stored_bytes = request["path"], stat.size_bytes  # an earlier leader's had none
            one.sums = None if sums is None else sums.files[request["sums"][1]]
            return one

    def _sums_of(self, client: _Client, request: dict[str, Any]) -> Sums | None:
        """The checksums of the store that the object belongs to."""
        if request["sums"] is None:
            return None
        reader, options = self._reader_of(client, request)
        path = request["sums"][0]
        url = name_of(request | {"path": path})
        return self._sums.answer((path, options), lambda: sums_at(reader, path, url))

    def _blocks_of(self, key: str, facts: dict[str, Any]) -> Blocks:
        folder, size, block_bytes = self._folder / key, facts["size_bytes"], facts["block_bytes"]
        try:
            if (folder / OBJECT).exists():
                with contextlib.suppress(OSError, ValueError):
                    return Blocks(folder, size, block_bytes)
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make_files(folder, size, num_blocks_of(size, block_bytes))
            Blocks(folder, size, block_bytes).check_holes()
            part = folder / f"{OBJECT}.part"
            part.write_text(json.dumps(facts))
            part.rename(folder / OBJECT)
            return Blocks(folder, size, block_bytes)
        except CacheError:
            raise
        except (OSError, ValueError) as error:
            raise CacheError(
                f"{folder}: {getattr(error, 'strerror', None) or error}; check the disk, or choose another "
                f"cache folder"
            ) from error

    def _stat_of(self, client: _Client, request: dict[str, Any]) -> tuple[Reader, Stat]:
        """The object's size and version, asked once for all ranks of a job that starts."""
        reader, options = self._reader_of(client, request)
        path = request["path"]
        return reader, self._stats.answer((path, options), lambda: reader.stat(path))

    def _reader_of(self, client: _Client, request: dict[str, Any]) -> tuple[Reader, str]:
        options = json.dumps([request["root"], request["options"]], sort_keys=True)
        with self._lock:
            client.readers.add(options)
            if options not in self._readers:
                self._readers[options] = (
                    Client(request["root"], request["options"]) if request["root"] else LocalReader()
                )
            return self._readers[options], options

    def _exists(self, client: _Client, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        try:
            self._stat_of(client, request)
        except MissingError:
            return {"exists": False}, b""
        return {"exists": True}, b""

    def _list(self, client: _Client, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        return {"found": self._reader_of(client, request)[0].list(request["path"])}, b""

    def _peek(self, client: _Client, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        one = client.opened[request["object"]]
        if one.content is not None:
            raise StoreError(f"{one.url}: is checked as a whole, so no part of it can be read before")
        ranges = [(begin, max(begin, min(end, one.stored_bytes))) for begin, end in request["ranges"]]
        begins, ends = zip(*ranges)
        pieces = list(
            self._peekers.map(self._piece, [client] * len(ranges), [one] * len(ranges), begins, ends)
        )
        return {"sizes": [len(piece) for piece in pieces]}, b"".join(pieces)

    def _piece(self, client: _Client, one: CachedObject, begin: int, end: int) -> bytes:
        return self._peeked.answer((one.key, begin, end), lambda: bytes(one.read(begin, end, client)))

    def _counts(self, client: _Client, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        names = ("limit_bytes", "held_bytes", "firm_bytes", "num_wished")
        counts = {"clients": len(self._clients)} | {name: int(getattr(self._shelf, name)) for name in names}
        for reader in self._readers.values():
            for name, count in asdict(reader.counts).items():  # type: ignore[attr-defined]
                counts[name] = counts.get(name, 0) + count
        return {"counts": counts}, b""

    # -- the folder ---------------------------------------------------------------------------------------

    def _adopt_leftovers(self) -> None:
        """Add the objects of earlier leaders: they are unused, but take space."""
        found: list[tuple[float, Path]] = []
        with contextlib.suppress(OSError):
            found = [(each.stat().st_mtime, each) for each in self._folder.iterdir() if each.is_dir()]
        for _, folder in sorted(found):
            with self._lock, contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                if folder.name in self._objects:
                    continue  # already open
                facts = json.loads((folder / OBJECT).read_text())
                blocks = Blocks(folder, facts["size_bytes"], facts["block_bytes"])
                content = None if facts["content"] is None else Content(**facts["content"])
                one = CachedObject(
                    key=folder.name,
                    url=facts["url"],
                    blocks=blocks,
                    path="",
                    tag=facts["tag"],
                    stored_bytes=blocks.size_bytes,
                    content=content,
                )
                doubted = blocks.doubt_all()
                if not doubted:
                    shutil.rmtree(folder)
                    continue
                self._objects[folder.name] = one
                self._fetcher.add(one, doubted)


def main(folder: Path) -> None:
    """Fork a leader unless there is one; this process returns once that is decided."""
    os.umask(0o077)
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(socket_name(folder))
    listener.listen(512)
    if os.fork():
        return
    os.setsid()
    Leader(folder, listener).serve()
    sys.stdout.flush()
    os._exit(0)  # threads may wait for storage
