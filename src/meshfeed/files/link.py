"""A process's connection to the leader of a cache folder; one for all its files, opened on first use."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from meshfeed.errors import CacheError, MeshfeedError
from meshfeed.files import message
from meshfeed.files.cache import Cache
from meshfeed.files.facts import name_of
from meshfeed.files.leader import LOG, socket_name
from meshfeed.files.refusals import without_credentials

Answer = tuple[dict[str, Any], bytes]
Session = tuple[int, int]

_START_S = 60.0
_PAUSE_S = 0.01
_LOG_EVERY_S = 10.0
_log = logging.getLogger("meshfeed")


class LostError(Exception):
    """The leader has died, and with it what it knew of this process; send the request to the next leader."""


class Link:
    """Requests to the leader, from any thread. Raises CacheError if no leader can be reached or started.

    Attributes:
        session: (process, number of leaders so far). A new leader does not know what the last one was sent,
            and a forked child has no leader yet.
    """

    def __init__(self, cache: Cache) -> None:
        self._cache, self._folder = cache, cache.own_path
        self._reset()
        _links.add(self)

    def _reset(self) -> None:
        self.session: Session = (os.getpid(), 0)
        self._connecting = threading.Lock()
        # Reentrant: garbage collection at any point may send a notification itself.
        self._sending, self._lock = threading.RLock(), threading.RLock()
        self._socket: socket.socket | None = None
        self._ids = itertools.count()
        self._futures: dict[int, Future[Answer]] = {}
        self._listeners: dict[tuple[Session, int], weakref.WeakMethod[Callable[[int], None]]] = {}

    def connected(self) -> Session:
        """The session; a new one if the last leader has died. Raises LostError if the new one dies at
        once."""
        with self._connecting:
            if self._socket is None:
                self._connect()
            return self.session

    def ask(self, session: Session, **request: Any) -> Answer:
        """Send a request to the leader of a session; its answer. Raises LostError, or the leader's error."""
        future: Future[Answer] = Future()
        number = next(self._ids)
        with self._lock:
            link = self._socket
            if session != self.session or link is None:
                raise LostError
            self._futures[number] = future
        self._send(link, {"id": number, **request})
        answer, payload = self._awaited(future, request)
        if "error" in answer:
            raise message.error_from_json(answer["error"])
        return answer, payload

    def notify(self, session: Session, **request: Any) -> None:
        """Send a message without an answer; does nothing if that leader has died."""
        with self._lock:
            link = self._socket if session == self.session else None
        if link is not None:
            with contextlib.suppress(LostError):
                self._send(link, request)

    def listen(self, session: Session, number: int, fetched: Callable[[int], None]) -> None:
        """Call the method `fetched` with the number of bytes fetched of an object, while its owner exists."""
        self._listeners[session, number] = weakref.WeakMethod(fetched)

    def close(self) -> None:
        """Disconnect from the leader; the next request connects again."""
        link = self._socket
        if link is not None:
            _shut_down(link)

    # -- below --------------------------------------------------------------------------------------------

    def _awaited(self, future: Future[Answer], request: dict[str, Any]) -> Answer:
        """Wait for an answer; logs a warning from time to time."""
        began = time.monotonic()
        while True:
            with contextlib.suppress(TimeoutError):
                return future.result(_LOG_EVERY_S)
            waited_s = time.monotonic() - began
            what = name_of(request) if "path" in request else f"blocks; see {self._folder / LOG}"
            _log.warning("waiting for storage for %.0f s: %s", waited_s, what)

    def _send(self, link: socket.socket, request: dict[str, Any]) -> None:
        encoded = message.encode(request)
        with self._sending:
            try:
                link.sendall(encoded)
            except OSError as gone:
                self.lost(link)
                raise LostError from gone

    def _connect(self) -> None:
        self._cache.make()
        link = _connect_to_leader(self._folder)
        weakref.finalize(self, _shut_down, link)
        future: Future[Answer] = Future()
        number = next(self._ids)
        with self._lock:
            self.session = (os.getpid(), self.session[1] + 1)
            self._socket = link
            self._futures[number] = future
        receiver = threading.Thread(target=_receive_loop, args=(weakref.ref(self), link), daemon=True)
        receiver.start()
        hello = {"do": "hello", "version": message.VERSION, "limit_bytes": self._cache.limit_bytes}
        try:
            self._send(link, {"id": number, **hello})
            answer, _ = future.result(_START_S)
        except TimeoutError as late:
            self.lost(link)
            raise CacheError(
                f"{self._folder}: its leader does not answer; see {self._folder / LOG}"
            ) from late
        if "error" in answer:
            self.lost(link)
            raise message.error_from_json(answer["error"])

    def on_message(self, answer: dict[str, Any], payload: bytes) -> None:
        """Pass an answer to the thread that waits for it."""
        if "fetched" in answer:
            listener = self._listeners.get((self.session, answer["object"]))
            fetched = None if listener is None else listener()
            if fetched is not None:
                fetched(answer["fetched"])
            return
        future = self._futures.pop(answer["id"], None)
        if future is not None:
            future.set_result((answer, payload))

    def lost(self, link: socket.socket) -> None:
        """The leader has died: raise LostError in all waiting threads."""
        link.close()
        with self._lock:
            if self._socket is not link:
                return
            self._socket = None
            futures, self._futures = self._futures, {}
            self._listeners.clear()
        for future in futures.values():
            future.set_exception(LostError())


_links: weakref.WeakSet[Link] = weakref.WeakSet()
_by_cache: weakref.WeakValueDictionary[Cache, Link] = weakref.WeakValueDictionary()
_making = threading.Lock()


def link_of(cache: Cache) -> Link:
    """This process's link for a cache, shared by all its users."""
    with _making:
        link = _by_cache.get(cache)
        if link is None:
            link = _by_cache[cache] = Link(cache)
        return link


def _shut_down(link: socket.socket) -> None:
    with contextlib.suppress(OSError):
        link.shutdown(socket.SHUT_RDWR)  # this ends the receiving thread


def _receive_loop(of: weakref.ref[Link], link: socket.socket) -> None:
    """The thread that receives from a leader, until either end closes."""
    try:
        while (received := message.receive(link)) is not None:
            one = of()
            if one is None:
                break
            one.on_message(*received)
            del one
    except OSError:
        pass
    finally:  # whatever went wrong, no thread may wait for an answer that never comes
        one = of()
        if one is not None:
            one.lost(link)
        link.close()


def _connect_to_leader(folder: Path) -> socket.socket:
    """Connect to the folder's leader; start one if there is none."""
    began, started = time.monotonic(), ""
    while True:
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            link.connect(socket_name(folder))
        except OSError as error:
            link.close()
            if time.monotonic() - began > _START_S:
                raise CacheError(
                    f"{folder}: no leader answers ({error}; {started or 'started'}); does another container "
                    f"or network namespace use it? See {folder / LOG}, or give each its own cache folder"
                ) from error
        else:
            if message.same_user(link):
                return link
            link.close()
            raise CacheError(
                f"{folder}: a process of another user answers instead of its leader; tell your "
                f"administrator, and use another cache folder"
            )
        started = _start_leader(folder)
        time.sleep(_PAUSE_S)  # a leader that is exiting holds the lock a moment longer


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _start_leader(folder: Path) -> str:
    """Start a leader unless there is one; returns a message if that failed."""
    script = Path(__file__).with_name("lead.py")
    path = os.pathsep.join(each for each in sys.path if each)
    with open(folder / LOG, "ab", opener=_open_private) as log:
        try:
            done = subprocess.run(
                [sys.executable, str(script), str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                env=without_credentials(os.environ) | {"PYTHONPATH": path},
                timeout=_START_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CacheError(f"{folder}: its leader cannot be started: {error}") from error
    return "" if done.returncode == 0 else f"it ended with exit code {done.returncode}"


def _forget_links() -> None:
    """In a forked child: drop the parent's connections and locks."""
    global _making
    _making = threading.Lock()
    for link in list(_links):
        inherited = link._socket  # pyright: ignore[reportPrivateUsage]
        link._reset()  # pyright: ignore[reportPrivateUsage]
        if inherited is not None:
            inherited.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_links)


def retried(cache: Cache, ask: Callable[[], Any]) -> Any:
    """Call `ask` again each time a leader dies. Raises its errors, except LostError."""
    for _ in range(_MOST_LEADERS):
        try:
            return ask()
        except LostError:
            continue
    error: MeshfeedError = CacheError(
        f"{cache.own_path}: {_MOST_LEADERS} leaders in a row died; see {cache.own_path / LOG}"
    )
    raise error


_MOST_LEADERS = 20
